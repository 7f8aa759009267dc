"""How far a worker that was closed is with leaving."""

from dataclasses import dataclass


@dataclass
class Departure:
    """From `close()` until nothing keeps the worker any more."""

    started: float
    deadline: float
    is_hurried: bool = False  # half of the time is over
    leaving_in: int = 0  # the first report that says that nothing is left here
    has_left: bool = False

    @property
    def impatient_at(self) -> float:
        """Heirs and readers have half of the time; then those who still read are cut off."""
        return self.started + (self.deadline - self.started) / 2
