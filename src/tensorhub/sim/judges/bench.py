"""What every judge has: the truth, and a way to say that a promise was broken."""

from math import inf

from ...core.names import Version
from ..truth.life import Call, Life
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

    def had_other_content(self, life: Life, call: Call) -> bool:
        """What it held when the call began was not what that version is: it may have heard so before."""
        made = self.truth.exists(life.me.model, call.had) if call.had is not None else None
        return made is not None and made.root_of(life.shard) not in (None, call.had_root)

    def is_left_over(self, life: Life, version: Version | None) -> bool:
        """Its own publish of that never ended, another replica's did, and nobody with that shard of the other one is in
        session: then half of a publish may be taken for the version (docs/status.md).
        """
        if version is None:
            return False
        own = self.truth.made.get((life.me.model, version), {}).get(life.me.replica)
        if own is None or own.exists < inf or self.truth.exists(life.me.model, version) is None:
            return False
        others = [other for other in self.truth.holders(life.shard, version) if other.me.replica != life.me.replica]
        return not any(self.truth.is_in_session(other) for other in others)

    def broken(self, what: str, promise: str = "") -> None:
        """The history ends here."""
        name = promise or self.promise
        self.world.note("oracle", f"{name} broken: {what}")
        raise OracleViolation(f"{name} broken at {self.now:.4f}: {what}")
