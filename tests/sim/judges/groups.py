"""G2 and G8: a group's call is of one version, on all shards or on none, and returns when every shard has it."""

from math import inf

from tensorhub.protocol.names import Version
from tensorhub.worker.events import Finished

from ..truth.contents import what_is
from ..truth.life import Call, Life
from ..truth.record import Truth
from ..world import World
from .bench import Judge

FILLS = ("replicate", "update")


class GroupCall:
    """One step of a program: the same call on all shards of its replica."""

    def __init__(self, replica: str, verb: str, spec: int | str, began: float, lives: dict[int, Life]) -> None:
        self.replica, self.verb, self.spec, self.began, self.lives = replica, verb, spec, began, lives

    def call_of(self, life: Life) -> Call | None:
        """What that shard made of it."""
        calls = [*life.past, *([life.call] if life.call is not None else [])]
        found = [call for call in calls if call.began >= self.began]
        return found[-1] if found else None

    def calls(self) -> list[Call]:
        """What each shard that has called by now made of it."""
        found = [self.call_of(life) for life in self.lives.values()]
        return [call for call in found if call is not None]


class GroupJudge(Judge):
    """Watches the calls of whole replicas."""

    def __init__(self, truth: Truth, world: World) -> None:
        super().__init__(truth, world)
        self.steps: dict[str, GroupCall] = {}  # what each program is at, or was last

    def began(self, group: GroupCall) -> None:
        """A program is about to call on all its shards: what it had called before is over on all of them."""
        self.steps[group.replica] = group

    def step_of(self, life: Life) -> GroupCall:
        """The step of its program to which its call belongs."""
        return self.steps[f"{life.me.model}/{life.me.replica}"]

    def shard_ended(self, life: Life, call: Call, finished: Finished) -> None:
        """One shard's call has returned."""
        if finished.error is not None or finished.version is None:
            return
        version, held = finished.version, life.held
        if held is None or held.version != version or tuple(life.memory) != self.truth.contents[held.root]:
            self.broken(f"{life.name} returned {version}, and holds {held}", "G8 never run early")
        if not finished.number:
            return  # what it held already, and nobody else has a say in it
        for other in self.truth.group(life):
            theirs = other.call
            if theirs is None or theirs.number != call.number or theirs.verb != call.verb:
                continue
            if other.held is None or other.held.version != version:
                self.broken(f"{life.name} returned {version}, {other.name} holds {other.held}", "G8 never run early")

    def ended(self, group: GroupCall, outcomes: dict[int, Finished]) -> None:
        """All shards of a replica have returned, or died."""
        good = {shard: o.version for shard, o in outcomes.items() if o.error is None}
        bad = {shard: o.error.code for shard, o in outcomes.items() if o.error is not None}
        name = f"{group.verb}({group.spec!r}) of {group.replica}"
        if len(dict.fromkeys(good.values())) > 1:
            self.broken(f"{name} gave {good}", "G2 one version")
        if good and bad:
            for shard in bad:
                if not self._is_excused(group, shard):
                    self.broken(f"{name} succeeded on {list(good)} and failed with {bad}", "G2 all or none")
        if group.verb in FILLS and good:
            self._is_of_one_publish(group, name, good)
        if group.verb == "update" and good:
            self._goes_forward(group, name, next(iter(good.values())))
        for version in good.values():
            is_named = isinstance(group.spec, int) and group.verb in ("publish", "replicate")
            if is_named and version != group.spec:
                self.broken(f"{name} gave {version}", "G2 one version")

    def _is_of_one_publish(self, group: GroupCall, name: str, good: dict[int, Version | None]) -> None:
        """What the shards have read is one thing that somebody has published, whatever anybody believes."""
        held = [group.lives[shard].held for shard in good if shard in group.lives]
        read = [each.root for each in held if each is not None and each.version in good.values() and not each.published]
        if len(dict.fromkeys(map(what_is, read))) > 1:
            self.broken(f"{name} gave {good}, of two publishes: {read}", "G2 one version")

    def _goes_forward(self, group: GroupCall, name: str, version: Version | None) -> None:
        """An update gives no older version than the one that all shards of the replica held before."""
        calls = {life: group.call_of(life) for life in group.lives.values()}
        had = [call.had for call in calls.values() if call is not None]
        shards = max((self.conditions.shards_in(life.cut) for life in calls), default=1)
        if version is None or len(had) < shards or had[0] is None or had.count(had[0]) < len(had):
            return
        if version < had[0]:
            self.broken(f"{name} went back from {had[0]} to {version}", "G3 monotonic")

    def _is_excused(self, group: GroupCall, failed: int) -> bool:
        """Why a shard failed where others did not: it had left them, or one of those had left before it heard."""
        life = group.lives.get(failed)
        if life is None or self.has_left(life, group.began):
            return True
        return any(self.has_left(other, group.began) for other in group.lives.values())

    def has_left(self, life: Life, since: float) -> bool:
        """It died, was closed, gave up, ran out of time, made another call, or its lease was over."""
        if not life.is_alive or life.closing < inf:
            return True
        calls = [call for call in [*life.past, life.call] if call is not None and call.began >= since - 1e-9]
        if not calls:
            return True
        call = calls[-1]
        is_late = call.ended >= call.deadline - 0.05 - 0.05 * (call.deadline - call.began)
        return call.is_cancelled or (is_late and call.error is not None) or self.was_unheard(life, call)

    def was_unheard(self, life: Life, call: Call) -> bool:
        """The server may have taken it for dead at some time during the call."""
        silent_s = 0.7 * self.settings.lease_s
        return life.bad_until > call.began or not self.truth.troubles.hears(life, call.began - silent_s)
