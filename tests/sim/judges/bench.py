"""What every judge has: the truth, and a way to say that a promise was broken."""

from math import inf

from tensorhub.protocol.names import Version

from ..truth.life import Call, Life
from ..truth.made import Made
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
        """Its own publish of that never ended, another replica has published it, and nobody with that shard of that one
        is in session: then half of a publish may be taken for the version (docs/status.md).
        """
        if version is None:
            return False
        own = self.truth.made.get((life.me.model, version), {}).get(life.me.replica)
        if own is None or self.truth.exists(life.me.model, version) is None:
            return False
        if own.exists < inf and not self._is_half_beside_another(life, version, own):
            return False
        others = [other for other in self.truth.holders(life.shard, version) if other.me.replica != life.me.replica]
        return not any(self.truth.is_in_session(other) for other in others)

    def _is_half_beside_another(self, life: Life, version: Version, own: Made) -> bool:
        """All its shards had it, but no server has said so, and this one cannot have heard so: one had stopped before
        another was first heard. And somebody has what another replica has published.
        """
        group, server = list(self.truth.group(life)), self.truth.server_life
        of_version = [other for other in group if other.held is not None and other.held.version == version]
        came = max((other.heard_since for other in group if other.is_heard_by(server)), default=-inf)
        if own.known < inf or not any(other.held and other.held.stopped_at <= came for other in of_version):
            return False
        rivals = [other for other in self.truth.lives.values() if other.me[:2] != life.me[:2]]
        rivals = [other for other in rivals if other.me.model == life.me.model and self.truth.is_in_session(other)]
        return any(other.held and other.held.version == version and other.held.published for other in rivals)

    def broken(self, what: str, promise: str = "") -> None:
        """The history ends here."""
        name = promise or self.promise
        self.world.note("oracle", f"{name} broken: {what}")
        raise OracleViolation(f"{name} broken at {self.now:.4f}: {what}")
