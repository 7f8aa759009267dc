"""G7: every call ends by its deadline, and every error is justified by the truth."""

from math import inf

from tensorhub.protocol.messages import Failure
from tensorhub.protocol.names import Version, WorkerId

from ..truth.life import Call, Life
from ..truth.made import Made, contents
from ..truth.troubles import RECONNECT_S
from .drains import DrainJudge
from .groups import GroupJudge

FILLS = ("replicate", "update")
LATE_S = 0.05  # a call may end this much after its deadline: one tick of a clock that drifts
AT_DEADLINE = ("deadline-exceeded", "server-unreachable")
LONG_AGO = -1e9


class ErrorJudge(GroupJudge):
    """Judges each call when it returns, and when it should have."""

    promise = "G7 every error is justified"

    def __init__(self, drains: DrainJudge) -> None:
        super().__init__(drains.truth, drains.world)
        self.drains = drains

    def called(self, life: Life, call: Call) -> None:
        """It must have ended by then."""
        length_s = call.deadline - self.now
        self.world.after(length_s * (1 + 2 * self.conditions.drift) + LATE_S, lambda: self._still(life, call))

    def _still(self, life: Life, call: Call) -> None:
        if call.ended < inf or not life.is_alive:
            return
        if self.truth.troubles.of(life, self.now - LATE_S, ("pause",)) is not None:
            self.world.after(1.0, lambda: self._still(life, call))
            return
        self.broken(f"{call.verb}({call.spec!r}) of {life.name} goes on after its deadline", "G7 nothing waits forever")

    def call_ended(self, life: Life, call: Call, failure: Failure) -> None:
        """It has returned an error."""
        code = failure.code
        judged = {
            "deadline-exceeded": self._deadline,
            "server-unreachable": self._unreachable,
            "version-unavailable": self._unavailable,
            "group-incomplete": self._incomplete,
            "group-mismatch": self._mismatch,
            "version-conflict": self._conflict,
            "host-memory-full": self._full,
            "source-lost": self._source_lost,
            "corrupt-transfer": self._corrupt,
            "layout-mismatch": self._layout,
            "not-drained": self._not_drained,
            "usage": self._usage,
            "closed": self._closed,
            "shard-taken": self._taken,
            "unavailable": self._recovering,
            "error": self._copy_error,
        }.get(code)
        why_not = judged(life, call) if judged is not None else "nothing says what it should mean"
        if why_not:
            what = f"{call.verb}({call.spec!r}) of {life.name} failed with {code}, though {why_not}"
            self.broken(f"{what}: {failure.message}")

    # --- by code; each says why the error is not justified, or nothing ------------------------------------------------

    def is_at_deadline(self, call: Call) -> bool:
        length_s = call.deadline - call.began
        return self.now >= call.deadline - LATE_S - 2 * self.conditions.drift * length_s

    def _deadline(self, life: Life, call: Call) -> str:
        if not self.is_at_deadline(call):
            return f"it had {call.deadline - self.now:.2f} s left"
        return self._is_told_nothing(life, call) or self._could_have_succeeded(life, call)

    def _is_told_nothing(self, life: Life, call: Call) -> str:
        """A shard that was in a call which a sibling then could not make hears so."""
        step = self.step_of(life)
        since, troubles = step.began - self.settings.lease_s, self.truth.troubles
        if step.call_of(life) is not call or not troubles.hears(life, since) or not troubles.remembers(since):
            return ""
        for other in self.truth.group(life):
            theirs = step.call_of(other)
            if theirs is None or other is life or not theirs.is_missed or call.heard >= theirs.end_heard:
                continue
            if theirs.end_heard + self.spread_s < self.now:
                return f"{other.name} could not make the call {self.now - theirs.began:.2f} s ago"
        return ""

    def _unreachable(self, life: Life, call: Call) -> str:
        if not self.is_at_deadline(call):
            return f"it had {call.deadline - self.now:.2f} s left"
        since = self.now - self.spread_s
        if self.truth.troubles.server(since) and self.truth.troubles.hears(life, since):
            return "nothing stood between it and the server"
        return ""

    def _recovering(self, life: Life, call: Call) -> str:
        return "no server had just restarted" if self.truth.troubles.server(call.began) else ""

    def _unavailable(self, life: Life, call: Call) -> str:
        model, since = life.me.model, min(call.began, self.now - self.spread_s) - self.settings.lease_s
        if not isinstance(call.spec, int) and call.resolved is None:
            return self._unavailable_latest(life, call, since)
        version = call.resolved if call.resolved is not None else Version(int(call.spec))
        made, newest = self.truth.exists(model, version), self.truth.newest(model)
        shards_in = self.conditions.shards_in
        is_taken = any(len(each.roots) == shards_in(each.cut) for each in self.truth.made_as(model, version))
        if call.waits and made is None and not is_taken and (newest is None or newest < version):
            return f"version {version} may still come, and it was to wait"
        if made is None or made.exists > since or self.truth.lost_since(model, version, since):
            return ""
        if not self.truth.is_had(model, version, lambda holder: self._is_steady(holder, version, since)):
            return ""
        return f"each shard of version {version} had a holder all the time"

    def _unavailable_latest(self, life: Life, call: Call, since: float) -> str:
        if self.is_at_deadline(call):
            return "that was its deadline"
        for version in self.truth.existing(life.me.model):
            is_had = self.truth.is_had(life.me.model, version, lambda h, v=version: self._is_steady(h, v, since))  # type: ignore[misc]
            if call.spec == "latest" and is_had:
                return f"each shard of version {version} had a holder all the time"
        return ""

    def _is_steady(self, holder: Life, version: Version, since: float) -> bool:
        """It has held the version all the time, did not want to leave it, and the server could hear so."""
        held, copy, troubles = holder.held, holder.copies.get(version), self.truth.troubles
        is_held = held is not None and held.version == version and held.is_served and held.since < since
        is_copied = copy is not None and copy.since < since and version not in holder.released
        if (not is_held and not is_copied) or holder.closing < inf or not troubles.remembers(since):
            return False
        calls = [*holder.past[-2:], *([holder.call] if holder.call is not None else [])]
        is_leaving = any(c.ended > since and c.had == version and not _stays(c, version) for c in calls)
        return not is_leaving and troubles.hears(holder, since)

    def _incomplete(self, life: Life, call: Call) -> str:
        """How an earlier step of the program ended is no excuse, once the server has heard that it had.

        Until then the server takes the calls of this step for those that another shard's old one had waited for.
        """
        since = self.truth.troubles.before_pauses(call.began - self.settings.lease_s * 1.2)
        step = self.step_of(life)
        others = [other for other in self.truth.group(life) if other is not life]
        if len(others) + 1 < self.conditions.shards_in(life.cut) or not self.truth.troubles.remembers(since):
            return ""  # somebody is not there, or was not
        for other in self._group_of(life, since):
            is_other = other is not life
            if is_other and (self._gave_up(other, since, step.began) or not self.truth.troubles.hears(other, since)):
                return ""
        if not self.truth.troubles.hears(life, since) or self._gave_up(life, since, call.began, call):
            return ""
        return "" if self._differs(life, call) else "every shard was there and stayed"

    def _group_of(self, life: Life, since: float) -> list[Life]:
        """Its replica, and those of it that have died since then."""
        dead = [d for d in self.truth.dead.values() if d.died >= since and d.me[:2] == life.me[:2]]
        return [*self.truth.group(life), *dead]

    def _gave_up(self, other: Life, since: float, called: float, but: Call | None = None) -> bool:
        """It died, was born or closed since then, or a call failed that began, or was heard to end, after `called`."""
        if other.started > since or not other.is_alive or other.closing < inf:
            return True
        calls = [c for c in other.past if c is not but and (c.began >= called or (c.number and c.end_heard > called))]
        return any(c.is_cancelled or c.error is not None for c in calls)

    def _mismatch(self, life: Life, call: Call) -> str:
        if call.claim is not None and self._is_apart(life):
            return ""
        return "" if self._differs(life, call) else "all shards made the same call"

    def _is_apart(self, life: Life) -> bool:
        """Its replica's shards have held versions that differ."""
        return len({c.had for c in self.step_of(life).calls() if c.had is not None}) > 1

    def _differs(self, life: Life, call: Call) -> bool:
        """Another shard makes another call where this one makes this: in the same step of their program."""
        return any((c.verb, c.spec) != (call.verb, call.spec) for c in self.step_of(life).calls())

    def _conflict(self, life: Life, call: Call) -> str:
        model, version = life.me.model, Version(int(call.spec)) if isinstance(call.spec, int) else Version(-1)
        if call.verb != "publish" and call.claim is None:
            if self._has_other_content(life, call) or self._is_made_otherwise(life, call):
                return ""
            return "" if self.is_left_over(life, call.had) else "it published nothing"
        version = call.claim if call.claim is not None else version
        newest = self.truth.newest(model)
        if newest is not None and newest >= version:
            return ""
        for (name, number), made in self.truth.made.items():
            if name == model and number >= version and any(each.replica != life.me.replica for each in made.values()):
                return ""
        since = self.truth.troubles.before_pauses(call.began - self.settings.lease_s)
        if any(
            self._publishes(other, version, since, life, call)
            for other in [*self.truth.lives.values(), *self.truth.dead.values()]
        ):
            return ""
        made_here = self.truth.made.get((model, version), {}).get(life.me.replica)
        if made_here is not None and made_here.root_of(life.shard) not in (None, call.root):
            return ""  # a publish of its own failed half-way, with other content
        return f"no version from {version} on exists, and nobody else publishes"

    def _publishes(self, other: Life, version: Version, since: float, life: Life, call: Call) -> bool:
        """Another replica has published a number since then, or claimed this one. Who has claimed it minds only what is
        published above it."""
        if other.me.model != life.me.model or other.me.replica == life.me.replica:
            return False
        calls = [c for c in [*other.past, other.call] if c is not None and c.ended >= since]
        if call.claimed == version and self._kept_its_claim(life, version):
            return any(c.verb == "publish" and isinstance(c.spec, int) and c.spec > version for c in calls)
        claimed, until = other.former_claim
        is_claimed = other.claim == version or (claimed == version and until >= since)
        return is_claimed or any(c.verb == "publish" or c.claim == version for c in calls)

    def _kept_its_claim(self, life: Life, version: Version) -> bool:
        """All shards of the replica have claimed that number, and the server could hear so ever since."""
        group = list(self.truth.group(life))
        calls = [c for c in (other.call or next(reversed(other.past), None) for other in group) if c is not None]
        is_claimed = len(calls) == self.conditions.shards_in(life.cut) and all(c.claimed == version for c in calls)
        return is_claimed and all(self.truth.troubles.hears(o, max(o.claimed, o.started + RECONNECT_S)) for o in group)

    def _has_other_content(self, life: Life, call: Call) -> bool:
        made = self.truth.exists(life.me.model, call.had) if call.had is not None else None
        if made is None or call.had is None:
            return False
        roots = contents(self.truth.made_as(life.me.model, call.had), made, life.shard)
        return any(root != call.had_root for root in roots)

    def _is_made_otherwise(self, life: Life, call: Call) -> bool:
        """Another replica publishes what it held with other content, or did so lately: the server may have let it."""
        since = self.truth.troubles.before_pauses(call.began - self.settings.lease_s)
        others = [o for o in [*self.truth.lives.values(), *self.truth.dead.values()] if o.shard == life.shard]
        made = [c for o in others if o.me.replica != life.me.replica for c in [*o.past, o.call] if c is not None]
        return any(
            c.verb == "publish" and c.spec == call.had and c.root != call.had_root and c.ended >= since for c in made
        )

    def _full(self, life: Life, call: Call) -> str:
        for other in self.truth.group(life):
            is_full = other.hosted >= self.conditions.host_copies or other.full_until >= call.refused_at
            if is_full or (other.read is not None and other.read.grant.to_host):
                return ""
        return "each shard had room for a copy when the server said so"

    def _source_lost(self, life: Life, call: Call) -> str:
        group = [(other, other.failures) for other in self._group_of(life, call.began)]
        found = [(at, who) for _, failures in group for at, who, _ in failures if at >= call.began - self.spread_s]
        if not found:
            return "no read of the replica had failed"
        version = next((c.resolved for c in [call] if c.resolved is not None), None)
        if version is None:
            return ""
        return self._untried(life, version, call.began, [who for _, who in found])

    def _untried(self, life: Life, version: Version, since: float, tried: list[WorkerId]) -> str:
        """A whole source that nobody of the replica has tried, for each shard."""
        for cut in self.truth.cuts(life.me.model):
            fresh = []
            for shard in cut:
                holders = self.truth.holders(shard, version)
                good = [h for h in holders if h.me not in tried and self._is_steady(h, version, since - self.spread_s)]
                fresh += [h for h in good if self.truth.troubles.serves(h, since)][:1]
            if len(fresh) == len(cut):
                return f"{fresh[0].name} has version {version}, and was not tried"
        return ""

    def _corrupt(self, life: Life, call: Call) -> str:
        group = [failures for other in self._group_of(life, call.began) for failures in other.failures]
        found = any(at >= call.began - self.spread_s and code == "corrupt-transfer" for at, _, code in group)
        return "" if found or self.conditions.copy_error else "no chunk of it was corrupted"

    def _layout(self, life: Life, call: Call) -> str:
        """A shard of its replica has other tensors than the version that it was to be filled with."""
        named = call.resolved if call.resolved_as == call.number and self._is_kept(life, call) else call.spec
        group = list(self.truth.group(life))
        for (model, version), made in self.truth.made.items():
            is_meant = model == life.me.model and (version == named or not isinstance(named, int))
            if is_meant and any(self._is_other(other, each) for other in group for each in made.values()):
                return ""
        return "each shard has the tensors of what was published"

    def _is_kept(self, life: Life, call: Call) -> bool:
        """To what it was resolved: the server has said so in this session, or has been told since that it had."""
        told = life.heard.call if life.heard is not None else None
        is_of_session = call.resolved_at >= max(life.heard_since, life.turned_away_at)
        return is_of_session or (told is not None and told.resolved == call.resolved)

    def _is_other(self, life: Life, made: Made) -> bool:
        """It has other tensors, or had when a server last heard of it.

        Into another cut the tensors are those of that cut's shards; which ones, only they can say.
        """
        if life.cut == made.cut:
            layout, heard = made.layouts.get(life.me.shard, life.layout), life.heard
            return layout != life.layout or (heard is not None and bool(heard.layout) and layout != heard.layout)
        cuts = [shard for cut in self.truth.cuts(life.me.model) for shard in cut]
        return any(len(self.truth.layouts.get(shard, {})) > 1 for shard in cuts)

    def _not_drained(self, life: Life, call: Call) -> str:
        return "" if call.verb == "publish" and (life.held is not None or call.had is not None) else "it holds nothing"

    def _usage(self, life: Life, call: Call) -> str:
        is_spoiled = call.claim is not None and any(other.poisoned for other in self.truth.group(life))
        wants_ahead = life.hello.prefetch == "always" or life.prefetch is not None
        fetches = wants_ahead and self.conditions.host_copies > 0
        is_in_vain = (call.verb, call.spec) == ("update", "prefetched") and not fetches
        is_wrong = is_spoiled or is_in_vain or (life.poisoned and call.verb == "publish")
        return "" if is_wrong else "its caller did nothing wrong"

    def _closed(self, life: Life, call: Call) -> str:
        return "" if life.closing < inf else "nobody had closed it"

    def _taken(self, life: Life, call: Call) -> str:
        """The life before it was thought to live when it came. (A real program cannot call before it is let in.)"""
        former = self.truth.dead.get(life.me)
        since = self.truth.troubles.before_pauses(self.now - 1.2 * self.settings.lease_s - self.spread_s)
        is_recent = former is not None and former is not life and former.died >= since
        return "" if is_recent and life.heard is None else "nobody else was that shard"

    def _copy_error(self, life: Life, call: Call) -> str:
        return "" if self.conditions.copy_error else "no copy had failed"

    # --- what could have been -----------------------------------------------------------------------------------------

    def _could_have_succeeded(self, life: Life, call: Call) -> str:
        """A call in which nothing stood in the way for long enough must succeed."""
        if call.verb not in FILLS or call.spec == "prefetched":
            return ""
        members = list(self.truth.group(life))
        calls = [member.call or next(reversed(member.past), None) for member in members]
        same = [c for c in calls if c is not None and (c.verb, c.spec, c.number) == (call.verb, call.spec, call.number)]
        if len(same) < self.conditions.shards_in(life.cut) or call.number == 0:
            return ""
        began = max(c.began for c in same)
        since = began - self.spread_s
        if self.now - began < self._enough_s(life, began):
            return ""
        for member in members:
            is_here = member.closing == inf and self.truth.troubles.hears(member, since)
            if not is_here or self.truth.troubles.of(member, since, ("unplug",)) or member.failed_since(since):
                return ""
            if member.layout != life.layout and self.conditions.shards_in(life.cut) == 1:
                return ""
        version = self._reachable(life, call, since)
        return f"{self.now - began:.2f} s were enough for version {version}" if version is not None else ""

    def _reachable(self, life: Life, call: Call, since: float) -> Version | None:
        """A version that would have done, and each of whose shards somebody gave all the time."""
        for version in self.truth.existing(life.me.model):
            if version != call.spec and call.spec != "latest":
                continue
            if self.truth.is_had(life.me.model, version, lambda h, v=version: self._gives(h, life, v, since)):  # type: ignore[misc]
                return version
            if call.spec == "latest":
                return None  # the newest is another matter; only that one is promised
        return None

    def _gives(self, holder: Life, life: Life, version: Version, since: float) -> bool:
        is_other = holder.me.replica != life.me.replica and bool(holder.layout)
        return is_other and self._is_steady(holder, version, since) and self.truth.troubles.serves(holder, since)

    def _enough_s(self, life: Life, began: float) -> float:
        """Withdraw the old, read the new behind everybody else, hear of it."""
        lines = [shard for cut in self.truth.cuts(life.me.model) for shard in cut] if life.cut else [life.shard]
        readers = sum(len(list(self.truth.same_shard(line))) for line in lines)
        readers *= max(self.conditions.shards, self.conditions.shards_b)
        chunk_s = 1.5 * self.conditions.chunk_s * self.drains.slowest(began) * (1 + self.conditions.uplink * readers)
        transfer_s = chunk_s * (self.conditions.chunks + 2) * (readers if self.conditions.is_shared else 2)
        errors = self.conditions.read_error + self.conditions.corruption + self.conditions.copy_error
        more_s = 10 * self.settings.lease_s if errors or self.conditions.stuck_stop else 0.0
        return self.drains.bound_s(life, began) + transfer_s + 1.3 * self.settings.lease_s + 4 * self.spread_s + more_s


def _stays(call: Call, version: Version) -> bool:
    """The call leaves what is held in place."""
    return call.verb == "update" and call.resolved in (None, version) and call.error is None
