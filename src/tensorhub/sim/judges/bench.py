"""What every judge has: the truth, and a way to say that a promise was broken."""

from ..truth.record import Truth
from ..world import OracleViolation, World


class Judge:
    """One who watches one promise."""

    promise = ""

    def __init__(self, truth: Truth, world: World) -> None:
        self.truth = truth
        self.world = world
        self.plan = truth.plan
        self.settings = truth.plan.settings
        self.conditions = truth.plan.conditions

    @property
    def now(self) -> float:
        return self.world.now

    @property
    def spread_s(self) -> float:
        """By then news have got about among those who can be heard."""
        return self.truth.spread_s

    def broken(self, what: str, promise: str = "") -> None:
        """The history ends here."""
        name = promise or self.promise
        self.world.note("oracle", f"{name} broken: {what}")
        raise OracleViolation(f"{name} broken at {self.now:.4f}: {what}")
