"""The end: the storm is long over, and everybody whom nothing keeps down has what he wanted. Nothing is left over."""

from math import inf

from tensorhub.protocol.names import Version

from ..plan import Replica
from ..truth.life import Call, Life
from .bench import Judge
from .groups import GroupCall

TOLD_S = 1.0  # since the last chunk came: a report may be lost, and the next one is told of it
MAX_REST_S = 1.0  # a plain program rests for half as long between two calls; some go on at whole seconds then
FILLS = ("replicate", "update")
PLAIN = ("update", "latest")  # what a program calls once it is plain
OUT_OF_TIME = ("deadline-exceeded", "group-incomplete")  # its own time, or a sibling's
STAYING = ("gone", "pause", "cut", "mute", "deaf", "unplug", "slow", "stutter", "disconnect")


class ProgressJudge(Judge):
    """Asked once."""

    promise = "progress"

    def healthy(self, replica: str) -> bool:
        """Every shard of it lives, and no misfortune that stays has hit one."""
        members = [life for me, life in self.truth.lives.items() if f"{me.model}/{me.replica}" == replica]
        is_whole = bool(members) and len(members) == self.conditions.shards_in(members[0].cut)
        return is_whole and not any(self._is_down(life) for life in members)

    def _is_down(self, life: Life) -> bool:
        return self.truth.troubles.of(life, self.now, STAYING) is not None

    def rollout(self, replica: str, has: Version | None, last: GroupCall | None, *, is_refused: bool) -> None:
        """`has` is what its latest call that succeeded gave it."""
        if not self.healthy(replica):
            return
        model = replica.partition("/")[0]
        newest = self.newest_to_have(model)
        is_behind = newest is not None and has != newest and not is_refused and self._fits(replica)
        is_excused = newest is not None and (self._has_just_begun(replica, newest) or self._keeps_the_last(replica))
        if newest is not None and is_behind and not is_excused:
            self.broken(f"{replica} has version {has}, the latest is {newest}")
        for me, life in self.truth.lives.items():
            if f"{me.model}/{me.replica}" == replica:
                self._has_it(life, newest)

    def _has_it(self, life: Life, newest: Version | None) -> None:
        held = life.held
        if newest is not None and held is not None and tuple(life.memory) != self.truth.contents[held.root]:
            self.broken(f"{life.name} holds {held.version}, but its memory is another content", "G8 never run early")

    def newest_to_have(self, model: str) -> Version | None:
        """The newest version of which somebody in good health has each shard; no newer one is being made."""
        return next((each for each in self.truth.existing(model) if self._is_to_be_had(model, each)), None)

    def _is_to_be_had(self, model: str, version: Version) -> bool:
        return self.truth.is_had(model, version, lambda h: not self._is_down(h) and h.closing == inf)

    def _has_just_begun(self, replica: str, newest: Version) -> bool:
        """It is still in the first call that it has made since that version came and its program went plain, or in one
        that it had begun as a plain program before that version came.

        None that was to bring that version has failed, though it had the time, and it has lasted for less than a
        quarter of the calm, or than the network may take for all versions that are read: whoever hangs is not excused.
        Where a host stays slow for ever, a call may take all of its time. Or that version has come while it rested
        between two calls, or during one that has just brought what was the newest before, or could not: who has that
        is down for good. Or it rests after the last step that it made before it went plain, which was for another one.
        """
        made = self.truth.exists(replica.partition("/")[0], newest)
        plain_at = self.conditions.storm_s + self.conditions.calm_s / 2
        told_at = min(made.known, made.exists + self.spread_s) if made is not None else plain_at
        since = max(plain_at, told_at)
        lives = [life for me, life in self.truth.lives.items() if f"{me.model}/{me.replica}" == replica]
        calls = [call for life in lives for call in [*life.past, life.call] if call is not None]
        begun = [call for call in calls if call.began >= (since if call.ended < inf else plain_at)]
        begun = [call for call in begun if not self._is_of_the_storm(call)]
        plain_rest_s = MAX_REST_S * (1.5 if any(each.is_in_step for each in self._programs(replica)) else 1.0)
        for call in calls:
            step = [other for other in calls if abs(other.began - call.began) < self.spread_s]
            is_over = max(other.ended for other in step) < self.now - plain_rest_s - self.spread_s
            if _met_an_old_call(call, lives) and not is_over:
                return True  # it is as if that step of its program had not been made
        if any(call.resolved == newest and self._has_failed(call) for call in calls):
            return False
        over = [call for call in calls if call.ended < inf]
        model = replica.partition("/")[0]
        ended = max((c.ended for c in over if c.error is None or self._was_in_vain(model, c, newest)), default=-inf)
        if made is not None and not begun and self.now - max(made.exists, ended) < plain_rest_s:
            return True
        of_storm = (call for call in over if call.began < plain_at or self._is_of_the_storm(call))
        others = [call for call in of_storm if call.spec != "latest" and call.resolved != newest]
        former = max((call.ended for call in others), default=-inf)
        if not begun and self.now - former < self._rest_of_the_storm_s(replica):
            return True
        is_hindered = any(trouble.misfortune.stays for trouble in self.truth.troubles.all)
        most_s = (
            inf
            if is_hindered
            else max(self.conditions.calm_s / 4, self._versions_under_way() * self.plan.slowest_read_s)
        )
        is_young = all(self._is_well(call, newest) and self.now - call.began < most_s for call in begun)
        return 0 < len(begun) <= self.conditions.shards_in(lives[0].cut) and is_young

    def _programs(self, replica: str) -> list[Replica]:
        return [each for each in self.plan.replicas if f"{each.model}/{each.name}" == replica]

    def _rest_of_the_storm_s(self, replica: str) -> float:
        """How long its program rests at most after a step that is not plain; some go on at whole seconds."""
        programs = self._programs(replica)
        return max((step.rest_s + each.is_in_step for each in programs for step in each.steps), default=0.0)

    def _versions_under_way(self) -> int:
        """How many are read now: all of them share the uplinks."""
        reads = [life.read for life in self.truth.lives.values()]
        return max(1, len({read.grant.version for read in reads if read is not None}))

    def _was_in_vain(self, model: str, call: Call, newest: Version) -> bool:
        """It was to bring an older version, of which nobody in good health has all."""
        version = call.resolved
        return version is not None and version < newest and not self._is_to_be_had(model, version)

    def _is_of_the_storm(self, call: Call) -> bool:
        """Its program was not plain yet when it made this step, though this shard called a little later.

        A plain one updates to the latest version, and gives each call the time that the network may take.
        """
        if (call.verb, call.spec) != PLAIN:
            return True
        is_short = call.deadline - call.began < self.plan.slowest_read_s
        return is_short and call.error is not None and call.error.code in OUT_OF_TIME

    def _is_well(self, call: Call, newest: Version) -> bool:
        """It goes on, or has just brought that version, while those of its siblings go on."""
        is_good = call.outcome is not None and call.error is None and call.outcome.version == newest
        return call.ended == inf or is_good

    def _has_failed(self, call: Call) -> bool:
        """It ended in an error after the storm, and its caller gave it the time since that the network may take."""
        had_s = call.ended - max(call.began, self.conditions.storm_s)
        if call.error is None or had_s <= 0:
            return False
        return call.error.code not in OUT_OF_TIME or had_s >= self.plan.slowest_read_s

    def _keeps_the_last(self, replica: str) -> bool:
        """Nobody has room for a copy, and all who could have the newest version before it leaves the last usable one
        are down for good. It waits for them rather than risk that one (docs/status.md).
        """
        model = replica.partition("/")[0]
        keeps, trainers = self.truth.established.version(model), [r.name for r in self.plan.replicas if r.is_trainer]
        lives = [life for me, life in self.truth.lives.items() if me.model == model and me.replica not in trainers]
        mine = [life for life in lives if f"{model}/{life.me.replica}" == replica]
        others = {life.me.replica: None for life in lives if life not in mine}
        is_holding = all(life.held is not None and life.held.version == keeps for life in mine)
        return (
            self.conditions.host_copies == 0
            and is_holding
            and bool(others)
            and not any(self.healthy(f"{model}/{other}") for other in others)
        )

    def _fits(self, replica: str) -> bool:
        """Each of its shards has the tensors that everybody has."""
        lives = [life for me, life in self.truth.lives.items() if f"{me.model}/{me.replica}" == replica]
        return all(other.layout == life.layout for life in lives for other in self.truth.same_shard(life.shard))

    def trainer(self, replica: str, published: Version | None, *, is_refused: bool) -> None:
        """It has published something in its life."""
        is_due = published is None and not is_refused and self.healthy(replica)
        if is_due and not self._has_only_now_time(replica):
            self.broken(f"{replica} never published anything")

    def _has_only_now_time(self, replica: str) -> bool:
        """A step that its program made before it went plain took very long, waiting for a shard that was started again,
        say, and it ended so lately that a fill and a publish need not have followed yet.
        """
        plain_at = self.conditions.storm_s + self.conditions.calm_s / 2
        lives = [life for me, life in self.truth.lives.items() if f"{me.model}/{me.replica}" == replica]
        late = [call.ended for life in lives for call in life.past if call.began < plain_at]
        return self.now - max(late, default=-inf) < max(self.conditions.calm_s / 4, self.plan.slowest_read_s)

    def left_over(self, reads: dict[int, str], holders: dict[str, list[str]]) -> None:
        """What the server shows people for a while: reads by ticket and reader, and who holds what."""
        for ticket, reader in reads.items():
            life = next((each for each in self.truth.lives.values() if str(each.me) == reader), None)
            is_told = life is None or self.now - life.fed_at > TOLD_S  # a read that has just ended may be reported yet
            is_read = life is not None and (self._reads(life, ticket) or self._is_down(life) or self._may_wait(life))
            if life is None or (is_told and not is_read):
                self.broken(f"ticket {ticket} of {reader} is open for ever", "leak")
        living = dict.fromkeys(f"{me.model}/{me.replica}" for me in self.truth.lives)
        for what, replicas in holders.items():
            for replica in replicas:
                if replica not in living:
                    self.broken(f"{replica} is dead and still counts as a holder of {what}", "leak")

    def _may_wait(self, life: Life) -> bool:
        """It reads what it was given when it may give up what it keeps for all, and that need not be soon."""
        return self._keeps_the_last(f"{life.me.model}/{life.me.replica}")

    def _reads(self, life: Life, ticket: int) -> bool:
        return life.read is not None and ticket in life.read.tickets

    def _kept(self, model: str) -> list[Version]:
        """The newest versions but one that are not lost: numbers between them may have come to nothing."""
        whole = [version for version in self.truth.existing(model)[1:] if self.truth.is_whole(model, version)]
        return whole[: max(0, self.conditions.retain - 1)]

    def _is_awaited(self, model: str) -> bool:
        """A caller is not back yet with what it wants."""
        return any(
            e.call is not None and e.call.verb in FILLS for e in self.truth.lives.values() if e.me.model == model
        )

    def copies(self) -> None:
        """Everybody holds the newest version: no host copy is needed but of what is pinned or retained.

        And one of the newest for each shard, made ahead of need: it outlives the birth of the next version. More of
        that are needed as long as a caller is on its way to it, and where a sibling's tensors keep a replica from it.
        """
        if any(trouble.misfortune.stays for trouble in self.truth.troubles.all):
            return
        for life in self.truth.lives.values():
            pinned = [v for other in self.truth.lives.values() for v in other.pins]
            newest = self.truth.newest(life.me.model)
            for version in life.copies:
                kept = [
                    other.name
                    for other in self.truth.lives.values()
                    if other.shard == life.shard and version in other.copies
                    if self._fits(f"{other.me.model}/{other.me.replica}")
                ]
                is_spare = version == newest and life.name in kept and len(kept) > 1
                is_spare = is_spare and not self._is_awaited(life.me.model)
                is_old = newest is None or is_spare or version < newest - 2 * self.conditions.retain
                is_old = is_old and version not in self._kept(life.me.model)
                publishers = [r for r in self.plan.replicas if r.is_trainer and r.model == life.me.model]
                is_established = version == self.truth.established.version(life.me.model) or len(publishers) > 1
                if version not in pinned and is_old and not is_established:
                    self.broken(f"{life.name} still has a host copy of version {version}", "leak")


def _met_an_old_call(call: Call, lives: list[Life]) -> bool:
    """It failed at once, as another shard's call had just failed that the server had not heard the end of."""
    if call.error is None or call.error.code != "group-incomplete":
        return False
    past = (old for life in lives for old in life.past if old is not call)
    return any(old.error is not None and old.began < call.began < old.end_heard for old in past)
