"""Group calls: what the shards of one replica do together (promise G2).

The number of a call is its position in the replica's sequence of calls. The first shard to arrive fixes what a spec
means; the others get the stored answer. A call succeeds on all shards, or fails on all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..messages import Answer, CallReport, Failure, Spec
from ..names import Digest, ReplicaName, Shard, Version, WorkerId
from ..version_spec import call_text


def some_shards(shards: Sequence[int]) -> str:
    """The first few of them, for an error: a replica may have thousands."""
    return ", ".join(str(shard) for shard in shards[:8]) + (", …" if len(shards) > 8 else "")


@dataclass
class GroupCall:
    """One position in a replica's sequence of calls."""

    number: int
    verb: str
    spec: Spec
    began: float  # when its first shard arrived, by the server's clock
    claim: Version | None = None  # of an unpublish: what it is to be followed by; `version` once it is granted
    version: Version | None = None
    arrived: dict[Shard, Digest] = field(default_factory=dict)  # the root that a publish brought, else ""
    is_finished: bool = False
    error: Failure | None = None
    is_over: bool = False  # it is finished, or has an error
    waiting: Failure | None = None
    waits: bool = False  # of a replicate: for a number that nobody has published yet
    metadata: Digest = Digest("")  # of what a publish says beside its tensors

    def __str__(self) -> str:
        return call_text(self.verb, self.spec, self.claim, waits=self.waits)

    def finish(self) -> None:
        """It has ended well on all shards."""
        self.is_finished = self.is_over = True

    def fail(self, failure: Failure) -> None:
        """It ends so on all shards, unless it has ended before."""
        if not self.is_over:
            self.error, self.is_over = failure, True


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
    publishes: bool = False  # it has published, or wanted to: a trainer, for whom nothing is fetched ahead

    @property
    def is_empty(self) -> bool:
        return not self.members

    def missing(self) -> list[int]:
        """The shards that have not arrived at the current call."""
        arrived = self.call.arrived if self.call is not None else {}
        if len(arrived) == self.shards:
            return []
        return [shard for shard in range(self.shards) if Shard(shard) not in arrived]

    def note_ended(self, shard: Shard, ended: int, finished: int) -> None:
        """One shard's caller has got its answer for the calls up to `ended`."""
        call = self.call
        self.ended, self.finished = max(self.ended, ended), max(self.finished, finished)
        if call is None or call.is_over or call.number > ended:
            return
        if finished == call.number:
            call.finish()  # as a server before this one had said
            return
        text = f"shard {shard} of {self.name} gave up {call} before all shards were done"
        call.fail(Failure("group-incomplete", text, "retry on all shards"))

    def arrive(self, shard: Shard, reported: CallReport, *, now: float) -> None:
        """One shard's caller is in this call."""
        self.publishes |= reported.verb == "publish" or reported.claim is not None
        current = self.call
        if current is None or reported.number > current.number:
            if current is not None:
                text = f"shard {shard} of {self.name} went on before {current} had ended"
                current.fail(Failure("group-incomplete", text, "retry on all shards"))
                self.former = current
            current = self.call = self._begin(reported, now)
        call = self.find(reported.number)
        if call is None or call.is_over:
            return
        mismatch = self._mismatch(shard, call, reported)
        if mismatch is not None:
            call.fail(mismatch)
            return
        call.arrived[shard] = reported.root
        if call.version is None:
            call.version = reported.resolved  # a server before this one had answered so

    def _begin(self, reported: CallReport, now: float) -> GroupCall:
        call = GroupCall(reported.number, reported.verb, reported.spec, now, reported.claim)
        call.waits, call.metadata = reported.waits, reported.metadata
        if reported.number == self.finished:
            call.version = reported.resolved
            call.finish()
        elif reported.number <= self.ended:
            text = f"{call} is position {reported.number} of {self.name}, whose other shards are past {self.ended}"
            call.fail(Failure("group-incomplete", text, "retry on all shards"))
        return call

    def _mismatch(self, shard: Shard, call: GroupCall, reported: CallReport) -> Failure | None:
        is_same = _said_of(call) == _said_of(reported)
        if is_same and call.metadata == reported.metadata:
            return None
        others = some_shards(list(call.arrived)) or "the others"
        mine = call_text(reported.verb, reported.spec, reported.claim, waits=reported.waits)
        text = f"shard {shard} of {self.name} called {mine} where shard {others} called {call}"
        if is_same:
            text = f"shard {shard} of {self.name} called {mine} with other metadata than shard {others}"
        return Failure("group-mismatch", text, "all shards of a replica make the same calls in the same order")

    def find(self, number: int) -> GroupCall | None:
        for call in (self.call, self.former):
            if call is not None and call.number == number:
                return call
        return None

    def answer(self, shard: Shard, reported: CallReport) -> Answer:
        """What became of the call that a shard's caller is in."""
        call = self.find(reported.number)
        if call is None:
            text = f"position {reported.number} of {self.name} is over; its other shards are past {self.ended}"
            return Answer(reported.number, error=Failure("group-incomplete", text, "retry on all shards"))
        mismatch = self._mismatch(shard, call, reported)
        if mismatch is not None:
            return Answer(reported.number, error=mismatch)
        error = call.error.bounded() if call.error is not None else None
        waiting = call.waiting.bounded() if call.waiting is not None else None
        version = call.version
        return Answer(reported.number, version, call.is_finished, error, waiting)

    def lose(self, shard: Shard, why: str) -> None:
        """The shard's worker is gone: the call under way fails, whether or not the shard had come to it."""
        self.members.pop(shard, None)
        if self.call is not None:
            text = f"shard {shard} of {self.name} {why} during {self.call}"
            self.call.fail(Failure("group-incomplete", text, "restart that shard, then retry on all shards"))


def _said_of(call: GroupCall | CallReport) -> tuple[object, ...]:
    """What all shards of a replica have to say alike."""
    return call.verb, call.spec, call.claim, call.waits
