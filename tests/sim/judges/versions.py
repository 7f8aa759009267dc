"""G3 and G9: a number is used once, `latest` is the newest that is not lost, and a new server forgets nothing."""

from math import inf

from tensorhub.protocol.messages import Orders
from tensorhub.protocol.names import Version

from ..truth.life import Call, Life
from ..truth.made import Made
from ..truth.troubles import RECONNECT_S
from .bench import Judge

FILLS = ("replicate", "update")


class VersionJudge(Judge):
    """Looks at what the server answers, when it says so for the first time."""

    promise = "G3 monotonic"

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self._answered: dict[tuple[str, str, int], Version] = {}

    def ordered(self, life: Life, orders: Orders) -> None:
        """Orders leave the server."""
        answer, call = orders.answer, life.call
        if answer is None or answer.version is None or call is None or call.number != answer.number:
            return
        key = (life.me.model, life.me.replica, answer.number)
        if key in self._answered:
            return  # who joins a call that was resolved earlier gets what was the newest then
        self._answered[key] = answer.version
        if call.verb == "publish":
            self._publish(life, call, answer.version)
        elif call.verb in FILLS and call.spec == "latest":
            self._latest(life, call, answer.version)

    def _publish(self, life: Life, call: Call, version: Version) -> None:
        """The server lets a replica publish that number."""
        model = life.me.model
        for other in self.truth.existing(model):
            made = self.truth.exists(model, other)
            is_other = other > version or (made is not None and made.root_of(life.shard) not in (None, call.root))
            if other < version or not is_other or made is None:
                continue
            is_old = made.exists <= self.now - self.spread_s and self._must_know(model, other)
            if is_old or (self._was_said(made) and any(self._outlived(s, other) for s in self._shards(model))):
                text = f"{life.name} may publish {version} ({call.root}), though {other} exists ({made.replica})"
                self.broken(text, "G3 version conflict")

    def _latest(self, life: Life, call: Call, version: Version) -> None:
        """The server says what `latest` is."""
        held = [mine.held.version for mine in self.truth.group(life) if mine.held is not None]
        if call.verb == "update" and version in held:
            return
        for newer in self.truth.existing(life.me.model):
            made = self.truth.exists(life.me.model, newer)
            if newer <= version or made is None:
                continue
            is_old = made.exists <= self.now - self.spread_s and self._must_know(life.me.model, newer)
            is_left = self._was_said(made) and self._all_outlived(life.me.model, newer)
            if (is_old and self._is_there(life, newer)) or is_left:
                self.broken(f"latest is {version} for {life.name}, though {newer} exists and is not lost")

    def _shards(self, model: str) -> list[tuple[str, int]]:
        return [shard for cut in self.truth.cuts(model) for shard in cut]

    def _all_outlived(self, model: str, version: Version) -> bool:
        return any(all(self._outlived(shard, version) for shard in cut) for cut in self.truth.cuts(model))

    def _was_said(self, made: Made) -> bool:
        """The publisher was told that it exists, by a server that has died since."""
        return made.known < self.truth.troubles.server_died

    def _outlived(self, shard: tuple[str, int], version: Version) -> bool:
        """Somebody has had that shard since before the last server died, and its own lease with that one is not over.

        However soon a server speaks again, it has heard of whoever had a session with the one before.
        """
        died = self.truth.troubles.server_died
        for holder in self.truth.holders(shard, version):
            held = holder.held
            is_held = held is not None and held.version == version and held.is_served and held.since < died
            if is_held and holder.clock() < holder.trust_until and holder.closing == inf:
                return True
        return False

    def _is_there(self, life: Life, version: Version) -> bool:
        """Each shard has somebody who can be heard, and has had it for a while."""
        return self.truth.is_had(life.me.model, version, lambda holder: self._is_heard(holder, version))

    def _must_know(self, model: str, version: Version) -> bool:
        """Somebody lives who has the version and could say so for long enough, in this life of the server."""
        for shard in self._shards(model):
            for holder in self.truth.holders(shard, version):
                if self._is_heard(holder, version):
                    return True
        return self.truth.is_known_whole(model, version)

    def _is_heard(self, holder: Life, version: Version) -> bool:
        since = self.now - self.spread_s - RECONNECT_S - self.settings.lease_s
        held, copy = holder.held, holder.copies.get(version)
        is_held = held is not None and held.version == version and held.is_served and held.since < since
        is_copied = copy is not None and copy.since < since
        if (not is_held and not is_copied) or holder.closing <= self.now:
            return False
        if (
            holder.heard_by != self.truth.server_life
            and self.truth.troubles.server_back > since + self.settings.lease_s
        ):
            return False  # it may still be about to connect to the new server
        return self.truth.troubles.hears(holder, since)
