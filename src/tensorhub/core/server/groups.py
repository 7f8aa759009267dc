"""Group operations: what the shards of one replica do together (promise G2).

The number of an operation is its position in the replica's sequence of calls. The first shard to arrive fixes what a
spec means; the others get the stored answer. It succeeds on all shards, or fails on all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..messages import Answer, Failure, Operation, Spec
from ..names import Digest, ReplicaName, Shard, Version, WorkerId
from ..version_spec import call_text


def some_shards(shards: Sequence[int]) -> str:
    """The first few of them, for an error: a replica may have thousands."""
    return ", ".join(str(shard) for shard in shards[:8]) + (", …" if len(shards) > 8 else "")


@dataclass
class GroupOperation:
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
    waiting: Failure | None = None

    @property
    def is_over(self) -> bool:
        return self.is_finished or self.error is not None

    def __str__(self) -> str:
        return call_text(self.verb, self.spec, self.claim)

    def fail(self, failure: Failure) -> None:
        if not self.is_over:
            self.error = failure


@dataclass
class Replica:
    """A replica's members that live, its operation, and how far its sequence of calls has come."""

    name: ReplicaName
    shards: int
    members: dict[Shard, WorkerId] = field(default_factory=dict)
    operation: GroupOperation | None = None
    former: GroupOperation | None = None  # a member may not have heard yet how it ended
    ended: int = 0  # highest position that ended anywhere
    finished: int = 0  # highest position that ended well
    publishes: bool = False  # it has published, or wanted to: a trainer, for whom nothing is fetched ahead

    @property
    def is_empty(self) -> bool:
        return not self.members

    def missing(self) -> list[int]:
        """The shards that have not arrived at the current operation."""
        arrived = self.operation.arrived if self.operation is not None else {}
        return [shard for shard in range(self.shards) if Shard(shard) not in arrived]

    def note_ended(self, shard: Shard, ended: int, finished: int) -> None:
        """One shard's caller has got its answer for the operations up to `ended`."""
        operation = self.operation
        self.ended, self.finished = max(self.ended, ended), max(self.finished, finished)
        if operation is None or operation.is_over or operation.number > ended:
            return
        if finished == operation.number:
            operation.is_finished = True  # as a server before this one had said
            return
        text = f"shard {shard} of {self.name} gave up {operation} before all shards were done"
        operation.fail(Failure("group-incomplete", text, "retry on all shards"))

    def arrive(self, shard: Shard, told: Operation, *, now: float) -> None:
        """One shard's caller is in this operation."""
        self.publishes |= told.verb == "publish" or told.claim is not None
        current = self.operation
        if current is None or told.number > current.number:
            if current is not None:
                text = f"shard {shard} of {self.name} went on before {current} had ended"
                current.fail(Failure("group-incomplete", text, "retry on all shards"))
                self.former = current
            current = self.operation = self._begin(told, now)
        operation = self.find(told.number)
        if operation is None or operation.is_over:
            return
        mismatch = self._mismatch(shard, operation, told)
        if mismatch is not None:
            operation.fail(mismatch)
            return
        operation.arrived[shard] = told.root
        if operation.version is None:
            operation.version = told.resolved  # a server before this one had answered so

    def _begin(self, told: Operation, now: float) -> GroupOperation:
        operation = GroupOperation(told.number, told.verb, told.spec, now, told.claim)
        if told.number == self.finished:
            operation.is_finished, operation.version = True, told.resolved
        elif told.number <= self.ended:
            text = f"{operation} is position {told.number} of {self.name}, whose other shards are past {self.ended}"
            operation.fail(Failure("group-incomplete", text, "retry on all shards"))
        return operation

    def _mismatch(self, shard: Shard, operation: GroupOperation, told: Operation) -> Failure | None:
        if (operation.verb, operation.spec, operation.claim) == (told.verb, told.spec, told.claim):
            return None
        others = some_shards(list(operation.arrived)) or "the others"
        mine = call_text(told.verb, told.spec, told.claim)
        text = f"shard {shard} of {self.name} called {mine} where shard {others} called {operation}"
        return Failure("group-mismatch", text, "all shards of a replica make the same calls in the same order")

    def find(self, number: int) -> GroupOperation | None:
        for operation in (self.operation, self.former):
            if operation is not None and operation.number == number:
                return operation
        return None

    def answer(self, shard: Shard, told: Operation) -> Answer:
        """What became of the operation that a shard's caller is in."""
        operation = self.find(told.number)
        if operation is None:
            text = f"position {told.number} of {self.name} is over; its other shards are past {self.ended}"
            return Answer(told.number, error=Failure("group-incomplete", text, "retry on all shards"))
        mismatch = self._mismatch(shard, operation, told)
        if mismatch is not None:
            return Answer(told.number, error=mismatch)
        error = operation.error.bounded() if operation.error is not None else None
        waiting = operation.waiting.bounded() if operation.waiting is not None else None
        version = operation.version
        return Answer(told.number, version, operation.is_finished, error, waiting)

    def lose(self, shard: Shard, why: str) -> None:
        """The shard's worker is gone: whatever is under way ends, whether it had come to it or would have."""
        self.members.pop(shard, None)
        if self.operation is not None:
            text = f"shard {shard} of {self.name} {why} during {self.operation}"
            self.operation.fail(Failure("group-incomplete", text, "restart that shard, then retry on all shards"))
