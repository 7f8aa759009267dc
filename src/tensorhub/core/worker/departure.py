"""How far a worker that was closed is with leaving."""

from dataclasses import dataclass

FOR_HEIRS = 0.9  # of the time: to be cut off takes a reader a few messages, and what it has not got may be lost


@dataclass
class Departure:
    """From `close()` until nothing keeps the worker any more."""

    started: float
    deadline: float
    is_hurried: bool = False  # the time of heirs and readers is over
    leaving_in: int = 0  # the first report that says that nothing is left here
    is_alone: bool = False  # it waits for the server, and has said so
    has_left: bool = False

    @property
    def impatient_at(self) -> float:
        """Heirs and readers have nearly all of the time; the rest is for cutting off those who still read."""
        return self.started + FOR_HEIRS * (self.deadline - self.started)
