"""G5: who wants its buffer back has it soon, if others have what is in it."""

from math import inf

from ..truth.life import Call, Life
from .bench import Judge


class DrainJudge(Judge):
    """Judges each unpublish when it ends, well or not."""

    promise = "G5 bounded drain"

    def ended(self, life: Life, call: Call) -> None:
        """A shard's unpublish has returned."""
        if call.verb != "unpublish" or call.had is None or call.is_cancelled:
            return
        calls = [self._same_call(other, call) for other in self.truth.group(life)]
        if len(calls) < self.conditions.shards_in(life.cut) or None in calls:
            return
        began = max(each.began for each in calls if each is not None)
        took_s = self.now - began
        if took_s <= self.bound_s(life, began) or not self._is_plain(life, call, began):
            return
        self.broken(f"unpublish of {life.name} took {took_s:.2f} s, though others have version {call.had}")

    def _same_call(self, life: Life, call: Call) -> Call | None:
        calls = [*life.past[-1:], *([life.call] if life.call is not None else [])]
        return next((c for c in calls if c.number == call.number and c.verb == call.verb), None)

    def bound_s(self, life: Life, began: float) -> float:
        """Reports and orders there and back; each reader ends its chunk, or its lease; the last copy is offloaded."""
        readers = len(list(self.truth.same_shard(life.shard)))
        chunk_s = (
            1.5 * self.conditions.chunk_s * self.slowest(began) * (1 + readers) * (1 + self.conditions.uplink * readers)
        )
        copy_s = 2 * self.conditions.chunks * self.conditions.chunk_s
        lease_s = 0.0
        everybody = [other for cut in self.truth.cuts(life.me.model) for shard in cut for other in self.readers(shard)]
        if self.conditions.stuck_stop or any(not self._is_prompt(other, began) for other in everybody):
            lease_s = 1.2 * self.settings.lease_s + self.conditions.stuck_stop * 4 * self.settings.lease_s
        return 3 * self.spread_s + 2 * chunk_s + copy_s + lease_s + self.settings.avoid_s + 0.5

    def slowest(self, since: float) -> float:
        """How many times slower than usual the slowest source was since then."""
        found = [1.0]
        for trouble in self.truth.troubles.all:
            if trouble.until > since and trouble.misfortune.kind == "slow":
                found.append(trouble.misfortune.value)
            if trouble.until > since and trouble.misfortune.kind == "stutter":
                found.append(1 + 1 / self.conditions.chunk_s)
        return max(found)

    def readers(self, shard: tuple[str, int]) -> list[Life]:
        """Whoever may read there, and those who died lately."""
        dead = [life for life in self.truth.dead.values() if life.shard == shard]
        return [*self.truth.same_shard(shard), *dead]

    def _is_prompt(self, life: Life, since: float) -> bool:
        """It hears what it is told, and says so."""
        if not life.is_alive:
            return life.died < since - 1.2 * self.settings.lease_s - self.spread_s
        return self.truth.troubles.hears(life, since - self.spread_s) and self.truth.troubles.serves(life, since)

    def _is_plain(self, life: Life, call: Call, began: float) -> bool:
        """Nothing stood in the way of the replica itself, and for each shard somebody else has what it leaves."""
        troubles, since = self.truth.troubles, began - self.spread_s
        if not troubles.server(since) or self.conditions.copy_error:
            return False
        for member in self.truth.group(life):
            if not troubles.hears(member, since) or member.closing < inf:
                return False
            assert call.had is not None
            others = [o for o in self.truth.holders(member.shard, call.had) if o.me.replica != member.me.replica]
            if not any(self._is_steady(other, call, since) for other in others):
                return False
        return True

    def _is_steady(self, holder: Life, call: Call, since: float) -> bool:
        """It has the version to give, all the time, and stays."""
        held, troubles = holder.held, self.truth.troubles
        is_held = held is not None and held.version == call.had and held.is_served and held.since < since
        is_idle = holder.call is None or (holder.call.had == call.had and holder.call.verb == "update")
        is_here = holder.closing == inf and holder.hello.reliable and is_idle
        return is_held and is_here and troubles.hears(holder, since) and troubles.serves(holder, since)
