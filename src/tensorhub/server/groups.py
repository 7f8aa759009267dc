"""Group calls: what the shards of one replica do together (promise G2).

The number of a call is its position in the replica's sequence of calls. The first shard to arrive fixes what a spec
means; the others get the stored answer. A call succeeds on all shards, or fails on all of them.

A worker gives its call the number after its last one; its first call, the number after the position that it was told;
one that it could not make, the number after the later of both.
Its siblings may have ended calls of which it has not heard, so that number can be stale. Rules (decision 0001):
- A shard that comes to a position that is over is numbered anew: the call that its siblings are in now if that is the
  same, else the next one. While they are in another call, it fails: it has been left behind, and is in step again after
  that.
- A shard that was put at its position, because it was started again or has missed calls, arrives in a call under way
  only when a shard that is in it has heard of that and said that it still is: it may have ended it.
- A call that differs from the one at its position does not arrive there, and fails nothing until one shard of each side
  has heard of it and said that it still is where it was. If all of them came from the position before, the program is
  wrong (`GroupMismatch`); else one of them was put there, and all may try again (`GroupIncomplete`).
- A shard that was in a call with others, or waited for them, when it failed hears so. A shard that waited for one that
  had already been past it has come late.
- A shard may end calls without the server. A writer's calls are in order: it claims a number, publishes that version,
  and unpublishes it. What leads to where that shard has come, a sibling ends by itself, too (`calls.passed_by`). An
  update or replicate at a position that was ended so keeps what all hold, or fails.
- A shard that could not make its call leaves all that were in theirs by then, also one that has come to a position that
  is over and is on its way to the next one: those hear so too, and do not wait there for that shard once more.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..protocol.messages import CLAIMED, PUBLISHED, UNPUBLISHED, Answer, CallReport, Failure, Spec, Step, call_text
from ..protocol.names import Digest, Number, ReplicaName, Shard, Version, WorkerId
from .members import LayoutSet

ALL = 1 << 63  # above every number


def some_shards(shards: Sequence[int]) -> str:
    """The first few of them, for an error: a replica may have thousands."""
    return ", ".join(str(shard) for shard in shards[:8]) + (", …" if len(shards) > 8 else "")


@dataclass
class GroupCall:
    """One position in a replica's sequence of calls."""

    number: int
    verb: str
    spec: Spec
    began: float  # when its first shard arrived, or a successor was waited for, by the server's clock
    is_inherited: bool = False  # that shard was in it already when its session began: a former server may have ended it
    claim: Version | None = None  # of an unpublish: what it is to be followed by; `version` once it is granted
    version: Version | None = None
    arrived: dict[Shard, Digest] = field(default_factory=dict)  # the root that a publish brought, else ""
    since: dict[Shard, int] = field(default_factory=dict)  # the last number that had been given out when it arrived
    grids: dict[Shard, Digest] = field(default_factory=dict)  # of the tiles of each shard of a publish
    pending: dict[Shard, Digest] = field(default_factory=dict)  # the same, of shards that were put there
    differing: dict[Shard, str] = field(
        default_factory=dict
    )  # shards that call something else; "": only other metadata
    doubted: Number = Number(0)  # a shard that has heard higher numbers has heard of those two
    is_finished: bool = False
    error: Failure | None = None
    is_over: bool = False  # it is finished, or has an error, or each shard ends it by itself
    is_resolved_here: bool = False  # by this life of the server
    epoch: Number = Number(0)  # of a publish that is resolved; of a claim: the number of the writer's lease
    waiting: Failure | None = None  # what it awaits; once it is finished, why an update kept what was held
    waits: bool = False  # of a replicate: for a number that is not published yet
    metadata: Digest = Digest("")  # of what a publish says beside its tensors

    def __str__(self) -> str:
        return call_text(self.verb, self.spec, self.claim, waits=self.waits)

    def is_same(self, reported: CallReport) -> bool:
        """This shard calls the same as the shards that have arrived."""
        return _said_of(self) == _said_of(reported) and self.metadata == reported.metadata

    @property
    def kind(self) -> str:
        """Its verb; "mutating" if a block of the caller follows."""
        return self.verb if self.claim is None else "mutating"

    @property
    def may_keep(self) -> bool:
        """It is an update that keeps what is held where no source of a newer version answers. One to a number waits."""
        return self.verb == "update" and not isinstance(self.spec, int) and not self.is_over

    @property
    def is_doubted(self) -> bool:
        """It is not certain that all shards at this position are there together."""
        return bool(self.differing or self.pending) and not self.is_over

    def difference(self, replica: ReplicaName) -> str:
        """Names the shards whose calls differ."""
        others = some_shards(list(self.arrived)) or "the others"
        found = [f"shard {shard} of {replica} called {text or self}" for shard, text in self.differing.items()]
        if not any(self.differing.values()):
            return f"{', '.join(found[:8])} with other metadata than shard {others}"
        return f"{', '.join(found[:8])} where shard {others} called {self}"

    def resolve(self, version: Version) -> None:
        """It is about that version, as this server says."""
        self.version, self.is_resolved_here = version, True

    def finish(self) -> None:
        """It has ended well on all shards."""
        self.is_finished = self.is_over = True
        self.waiting = None

    def fail(self, failure: Failure) -> None:
        """On all shards that are in it, and on those that call something else there."""
        if not self.is_over:
            self.error, self.is_over = failure, True

    def give_up(self, text: str, hint: str = "retry on all shards") -> None:
        """It fails, and not for what some call instead: they are late for it, and have done nothing wrong."""
        if not self.is_over:
            self.fail(Failure("group-incomplete", text, hint))
            self.differing, self.pending = {}, {}

    def leave(self, shard: Shard, text: str, seen: int) -> None:
        """The shard is past this call, and has heard numbers up to `seen`.

        If it was never here, the others have come to a position that was over; so have shards that came after all that
        it had heard.
        """
        if not self.is_over:
            was_here = shard in self.arrived
            met = {each: root for each, root in self.arrived.items() if each == shard or self.since.get(each, 0) < seen}
            self.arrived = met if was_here else {}
        self.give_up(text)


@dataclass
class Replica:
    """A replica's members that live, its call, and how far its sequence of calls has come."""

    name: ReplicaName
    shards: int
    members: dict[Shard, WorkerId] = field(default_factory=dict)
    call: GroupCall | None = None
    former: GroupCall | None = None  # a member may not have heard yet how it ended
    ended: int = 0  # highest position that ended anywhere
    finished: int = 0  # highest position that ended well
    alone: int = 0  # highest position that a shard has ended without the server
    steps: dict[Shard, Step] = field(default_factory=dict)  # how far shards have come without the server
    come: Step | None = None  # the furthest of them
    unjudged: dict[Shard, CallReport] = field(default_factory=dict)  # publishes that have ended without the server
    standing: GroupCall | None = None  # the newest of them, as one call
    missed: tuple[Shard, Failure] | None = None  # the shard that never made its last call, and why
    bereft: dict[Shard, Failure] = field(
        default_factory=dict
    )  # shards that came late to a call that another could not make
    layout_set: LayoutSet | None = None  # the latest of which its shards are
    judged: tuple[object, ...] = ()  # how far its call had come when members that had withdrawn for it were judged
    publishes: bool = False  # it has published, or wanted to: a trainer, which fetches nothing ahead

    @property
    def is_empty(self) -> bool:
        return not self.members

    def missing(self) -> list[int]:
        """The shards that have not arrived at the current call."""
        arrived = self.call.arrived if self.call is not None else {}
        if len(arrived) == self.shards:
            return []
        return [shard for shard in range(self.shards) if Shard(shard) not in arrived]

    def note_ended(
        self,
        shard: Shard,
        ended: int,
        finished: int,
        *,
        seen: int = ALL,
        missed: Failure | None = None,
        held: Version | None = None,
    ) -> None:
        """One shard's caller has got its answer for the calls up to `ended`. `seen`: the highest number heard.

        `held`: what it has since. A server before this one may have answered another version than this one did.
        `missed`: why the last of them was never made. It belongs to the call that the others are in there all the same.
        """
        call = self.call
        if ended > self.ended:
            self.missed = (shard, missed.bounded()) if missed is not None else None
        self.ended, self.finished = max(self.ended, ended), max(self.finished, finished)
        if call is None or call.is_over or call.number > ended:
            return
        if finished == call.number and call.is_inherited and (not call.is_resolved_here or call.version == held):
            call.finish()  # as a server before this one had said
            return
        text = f"shard {shard} of {self.name} gave up {call} before all shards were done"
        if finished == call.number:
            text = f"shard {shard} of {self.name} had ended {call} with another version than {call.version}"
        if missed is not None:
            call.arrived.setdefault(shard, Digest(""))
            text, seen = f"{text}: {missed.message}", ALL
        call.leave(shard, text, seen)

    def note_bereft(self, shard: Shard, by: Shard, reported: CallReport, missed: Failure) -> None:
        """The shard was in this call when another shard could not make it: it is told, and does not go on later."""
        call = self.find(reported.number)
        if reported.number <= self.ended and (call is None or self._is_late(shard, call, reported)):
            what = call_text(reported.verb, reported.spec, reported.claim, waits=reported.waits)
            text = f"shard {by} of {self.name} gave up {what} before all shards were done: {missed.message}"
            self.bereft[shard] = Failure("group-incomplete", text, "retry on all shards").bounded()

    def arrive(
        self,
        shard: Shard,
        reported: CallReport,
        *,
        now: float,
        is_first: bool = False,
        is_put: bool = False,
        seen: int = ALL,
        last: int = 0,
    ) -> None:
        """One shard's caller is in this call. `is_first`: says the first report of a session.

        `is_put`: it does not come from the position before. `seen`: the highest number that it has heard; `last`: that
        was given out.
        """
        self.publishes |= reported.verb == "publish" or reported.claim is not None
        current = self.call
        if current is None or reported.number > current.number:
            if current is not None:
                text = f"shard {shard} of {self.name} went on before {current} had ended"
                current.leave(shard, text, seen)
                self.former = current
            current = self.call = self._begin(reported, now, is_first)
        call = self.find(reported.number)
        if call is None or call.is_over:
            return
        if not call.is_same(reported):
            if shard not in call.differing:
                call.doubted = Number(0)  # the sessions give it a number
            text = call_text(reported.verb, reported.spec, reported.claim, waits=reported.waits)
            call.differing[shard] = text if _said_of(call) != _said_of(reported) else ""
            return
        call.grids[shard] = reported.grid
        if is_put and not is_first and call.arrived and shard not in call.arrived:
            if shard not in call.pending:
                call.doubted = Number(0)
            call.pending[shard] = reported.root
            return
        if shard not in call.arrived:
            call.since[shard] = last
        call.arrived[shard] = reported.root
        if call.version is None:
            call.version, call.epoch = reported.resolved, reported.epoch  # a server before this one had answered so

    def join(self, shard: Shard, worker: WorkerId, *, is_in_call: bool) -> None:
        """A session of that shard has begun. One that is in no call has not arrived where a life before it had."""
        self.members[shard] = worker
        for call in (self.call, self.former):
            if call is not None and not is_in_call:
                call.arrived.pop(shard, None)

    def _begin(self, reported: CallReport, now: float, is_first: bool) -> GroupCall:
        call = GroupCall(reported.number, reported.verb, reported.spec, now, is_first, reported.claim)
        call.waits, call.metadata = reported.waits, reported.metadata
        if reported.number == self.finished and is_first:
            call.version, call.epoch = reported.resolved, reported.epoch
            call.finish()
        elif reported.number <= self.ended:
            text = f"{call} is position {reported.number} of {self.name}, whose other shards are past {self.ended}"
            call.give_up(text)
        return call

    def find(self, number: int) -> GroupCall | None:
        for call in (self.call, self.former):
            if call is not None and call.number == number:
                return call
        return None

    def note_progress(self, call: GroupCall) -> bool:
        """Note how far the call has come. Returns whether it has just been resolved, or ended, or others have come."""
        former, self.judged = self.judged, (call.number, call.version, call.is_over, len(call.pending))
        return self.judged != former and (call.is_over or call.version is not None)

    def version_of(self, shard: Shard, reported: CallReport, *, is_put: bool) -> Version | None:
        """To what the call of a shard was resolved, if it goes on, and the shard is in it or comes to it now."""
        call = self.call
        if call is None or call.number != reported.number or call.is_over or not call.is_same(reported):
            return None
        return call.version if shard in call.arrived or not is_put else None

    def note_step(self, shard: Shard, step: Step | None) -> bool:
        """How far the shard has come without the server. Returns whether that is news for the others."""
        former, come = self.steps.get(shard), self.come
        if step == former:
            return False
        if step is None:
            self._forget_step(shard)
            return True
        self.steps[shard], self.alone = step, max(self.alone, step.alone)
        if step.publish is not None:
            self.unjudged[shard] = step.publish
        else:
            self.unjudged.pop(shard, None)
        self.come = max(self.steps.values(), key=lambda each: each.place) if former == come else come
        if self.come is None or step.place > self.come.place:
            self.come = step
        is_publish = step.publish != (former.publish if former is not None else None)
        return is_publish or self.come != come

    def _forget_step(self, shard: Shard) -> None:
        self.steps.pop(shard, None)
        self.unjudged.pop(shard, None)
        self.come = max(self.steps.values(), key=lambda each: each.place, default=None)

    def answer_judged(self, publish: CallReport | None) -> Answer | None:
        """What became of that publish, which a shard has ended without the server."""
        judged = self.standing
        if publish is None or judged is None or judged.spec != publish.spec:
            return None
        if judged.version is None and not judged.is_over:
            return None
        error = judged.error.bounded() if judged.error is not None else None
        return Answer(publish.number, judged.version, judged.is_finished, error, epoch=judged.epoch)

    def is_there(self, reported: CallReport, place: tuple[int, int]) -> bool:
        """A shard that has come so far is in this same call with the server."""
        call = self.call
        if call is None or call.is_over or not call.is_same(reported):
            return False
        return any(self.steps[shard].place == place for shard in call.arrived if shard in self.steps)

    def answer(self, shard: Shard, reported: CallReport, *, is_whole: bool = True) -> Answer | None:
        """What became of the call that a shard's caller is in. None: what is over cannot be known yet.

        `is_whole`: all shards that may have ended a call have said so.
        """
        call = self.find(reported.number)
        if call is None or self._is_late(shard, call, reported):
            return self._answer_late(shard, reported, call, is_whole)
        error = call.error.bounded() if call.error is not None else None
        waiting = call.waiting.bounded() if call.waiting is not None else None
        version = call.version if shard in call.arrived or call.is_finished else None
        epoch = call.epoch if version is not None else Number(0)
        return Answer(reported.number, version, call.is_finished, error, waiting, epoch=epoch)

    def _is_late(self, shard: Shard, call: GroupCall, reported: CallReport) -> bool:
        """The call was over before the shard came to it."""
        if not call.is_over or (call.is_finished and call.is_same(reported)):
            return False
        return shard not in call.arrived and shard not in call.differing

    def _answer_late(self, shard: Shard, reported: CallReport, call: GroupCall | None, is_whole: bool) -> Answer | None:
        """The position was over before the shard came to it."""
        if reported.resolved is None and not is_whole:
            return None
        if reported.resolved is None and shard in self.bereft:
            return Answer(reported.number, error=self.bereft[shard])
        error = call.error.bounded() if call is not None and call.error is not None else None
        if error is None:
            text = f"position {reported.number} of {self.name} is over; its other shards are past {self.ended}"
            error = Failure("group-incomplete", text, "retry on all shards")
        instead = self._instead(reported) if reported.resolved is None else 0
        return Answer(reported.number, error=error, instead=instead)

    def _instead(self, reported: CallReport) -> int:
        """At which position that call goes on; 0 if it cannot."""
        current = self.call
        if current is None or current.is_over:
            return max(self.ended, current.number if current is not None else 0) + 1
        return current.number if current.is_same(reported) else 0

    def lose(self, shard: Shard, why: str, *, is_awaited_since: float | None = None) -> None:
        """The shard's worker is gone: the call under way fails, whether or not the shard had come to it.

        Unless its successor is waited for since a moment, as a shard is that was never there.
        """
        self.members.pop(shard, None)
        self.bereft.pop(shard, None)
        self._forget_step(shard)
        if self.call is not None and is_awaited_since is not None:
            self.call.began = is_awaited_since
        elif self.call is not None:
            text = f"shard {shard} of {self.name} {why} during {self.call}"
            self.call.give_up(text, "restart that shard, then retry on all shards")


def _said_of(call: GroupCall | CallReport) -> tuple[object, ...]:
    """The fields that all shards of a replica must give alike."""
    return call.verb, call.spec, call.claim, call.waits


def place_of(call: CallReport, held: Version | None) -> tuple[int, int] | None:
    """Where a writer's call comes among its steps. `held`: what an unpublish withdraws. None: of nothing."""
    if call.verb == "publish":
        return int(call.spec), PUBLISHED
    if call.claim is not None:
        return call.claim, CLAIMED
    return (held, UNPUBLISHED) if held is not None else None
