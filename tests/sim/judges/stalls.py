"""G7 and G9: who has to read, and says so, is not left without a source while somebody has what it needs.

Also while a server that has just restarted still listens: transfers go on, and who loses its source gets another.
"""

from math import inf

from tensorhub.protocol.messages import Empty, Filling, Holding, Orders, Poisoned
from tensorhub.protocol.names import Version

from ..truth.life import Call, Life
from .bench import Judge

FILLS = ("replicate", "update")


class StallJudge(Judge):
    """Looks at everybody now and then."""

    promise = "G7 nobody is left waiting"

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self._granted: dict[str, int] = {}  # the last ticket of each life

    def ordered(self, life: Life, orders: Orders) -> None:
        """Who has said that it has a version is granted no read of that: it would end at once, for the next one."""
        grant = orders.grant
        if grant is None or grant.ticket <= self._granted.get(life.name, 0):
            return
        self._granted[life.name] = grant.ticket
        if grant.to_host or life.heard is None or not life.is_heard_by(self.truth.server_life):
            return
        held, buffer, made = life.held, life.heard.buffer, self.truth.exists(life.me.model, grant.version)
        is_held = held is not None and held.version == grant.version and held.is_served
        is_said = isinstance(buffer, Holding) and buffer.version == grant.version
        if is_held and is_said and made is not None and life.root_of(grant.version) == made.root_of(life.shard):
            self.broken(f"{life.name} is granted a read of version {grant.version}, which it has, and has said so")

    def turned_away(self, life: Life) -> None:
        """The server refuses it, so it must have lost its session: else whatever was refused would be an excuse."""
        has_left = life.heard is not None and life.heard.leaving
        if self.truth.is_in_session(life) and not has_left:
            self.broken(f"{life.name} was refused, and has a session: it was heard at {life.heard_at:.4f}")

    def look(self, life: Life) -> None:
        """It has been ready to read for a while, and nobody lets it."""
        version = self._waits_for(life)
        if version != life.idle_for:
            life.idle_for, life.idle_since = version, self.now
        if version is None:
            return
        patience_s = 0.4 + 12 * self.conditions.delay_s
        since = max(life.idle_since, life.heard_since)
        if self.now < since + patience_s or not self._can_talk(life, since):
            return
        for source in self.truth.holders(life.shard, version):
            if self._could_serve(source, life, version, self.now - patience_s):
                text = f"{life.name} has waited {self.now - since:.2f} s for somebody to read version {version} from"
                self.broken(f"{text}, {source.name} has it")

    def _waits_for(self, life: Life) -> Version | None:
        """What it needs and is ready for, as the server was told."""
        call, report = life.call, life.heard
        if call is None or call.verb not in FILLS or call.resolved is None or report is None or life.read is not None:
            return None
        if life.has(call.resolved) or life.held is not None or life.closing < inf:
            return None
        if life.copying is not None or life.is_copying_in:
            return None
        buffer, reported = report.buffer, report.call
        is_free = isinstance(buffer, Empty) or (isinstance(buffer, Poisoned) and buffer.version is None)
        is_ready = is_free or (isinstance(buffer, Filling) and buffer.version == call.resolved)
        is_told = reported is not None and reported.number == call.resolved_as and report.reading is None
        if call.resolved_at < self.truth.troubles.server_back and not self._knows_it(life, call.resolved):
            return None  # a former server had resolved it: this one has to learn first what the newest is
        has_part = any(copy.version == call.resolved for copy in report.copies)
        return call.resolved if is_ready and is_told and not has_part else None

    def _knows_it(self, life: Life, version: Version) -> bool:
        """A shard of its group has told this server what their call was resolved to."""
        heard = [each for each in self.truth.group(life) if each.is_heard_by(self.truth.server_life)]
        calls = [each.heard.call for each in heard if each.heard is not None]
        return any(call is not None and call.resolved == version for call in calls)

    def _can_talk(self, life: Life, since: float) -> bool:
        troubles = self.truth.troubles
        is_heard = life.is_alive and life.heard_by == self.truth.server_life and life.is_connected
        is_quiet = (
            life.bad_until <= since and troubles.of(life, since, ("mute", "deaf", "cut", "disconnect", "pause")) is None
        )
        return is_heard and is_quiet and troubles.server_back <= since

    def _asked(self, reader: Life) -> float:
        """Since when its call is: whom it has failed to read from in that, it need not be given again."""
        return reader.call.began if reader.call is not None else -inf

    def _could_serve(self, source: Life, reader: Life, version: Version, since: float) -> bool:
        """It has all of it to give, near enough, and has said so."""
        held, copy, troubles = source.held, source.copies.get(version), self.truth.troubles
        is_held = held is not None and held.version == version and held.is_served and held.since < since
        is_copied = copy is not None and copy.since < since and version not in source.released
        is_here = source.site == reader.site and source.closing == inf and source.layout == reader.layout
        if source is reader or not (is_held or is_copied) or not is_here or source.heard_since > since:
            return False
        if any(call is not None and _leaves(call, version, since) for call in (source.call, *source.past[-1:])):
            return False
        if not self.truth.said_to_have(source, version) or reader.failed_since(self._asked(reader), source.me):
            return False
        return self._can_talk(source, since) and troubles.serves(source, since)


def _leaves(call: Call, version: Version, since: float) -> bool:
    """Its caller wanted the memory back of what it held, at some time since then."""
    return call.verb == "unpublish" and call.had == version and call.ended > since
