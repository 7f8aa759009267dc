"""The caller's call at one worker, from its beginning to its end. A worker has one at a time."""

from dataclasses import dataclass

from ..messages import Answer, CallReport, Failure, Spec
from ..names import Digest, Version
from ..version_spec import call_text

FILLS = ("replicate", "update")


@dataclass
class Call:
    """What the caller wants, and what the server has answered so far."""

    verb: str
    spec: Spec
    root: Digest
    started: float
    deadline: float
    claim: Version | None = None  # of an unpublish
    number: int | None = (
        None  # its position among the replica's calls; None until that can be known, and may turn out late
    )
    resolved: Version | None = None
    answer: Answer | None = None
    opened: Version | None = None  # some source had this version, and its manifest is here
    hopeless: Failure | None = None  # why no source, and no host copy, can help this worker
    is_delayed: bool = False  # the caller was told why it waits so long
    waits: bool = False  # of a replicate: for a number that nobody has published yet
    metadata: Digest = Digest("")  # of a publish
    grid: Digest = Digest("")  # the same
    floor: Version | None = None  # of an update: what was held when the caller called
    is_held_back: bool = False  # nothing is withdrawn for it yet

    def __str__(self) -> str:
        return call_text(self.verb, self.spec, self.claim, waits=self.waits)

    @property
    def fills(self) -> bool:
        """It is to bring another version into the buffer."""
        return self.verb in FILLS

    @property
    def awaits_shard(self) -> Failure | None:
        """What the server last said of shards that have not come to this call."""
        waiting = self.answer.waiting if self.answer is not None else None
        return waiting if waiting is not None and waiting.code == "group-incomplete" else None

    @property
    def impatient_at(self) -> float:
        """Readers have half of the time to finish or to move; then those who still read are cut off."""
        return self.started + (self.deadline - self.started) / 2

    @property
    def may_withdraw(self) -> bool:
        """The server knows of the call and has granted its claim: a call that is refused must have changed nothing."""
        return self.number is not None and (self.claim is None or self.resolved is not None)

    @property
    def is_called_again(self) -> bool:
        """Its version was lost, and what it names may be another version by now: the worker makes the call once more.

        All shards of the replica hear so together, and all do the same.
        """
        error = self.answer.error if self.answer is not None else None
        is_lost = error is not None and error.code == "version-unavailable"
        return is_lost and self.fills and not isinstance(self.spec, int)

    def take(self, answer: Answer | None) -> bool:
        """The server has answered. Returns whether it has just said which version it is."""
        if answer is None or answer.number != self.number:
            return False
        if answer.instead > answer.number and self.resolved is None:
            self.number, self.answer = answer.instead, None
            return False
        self.answer = answer
        is_news = self.resolved is None and answer.version is not None
        self.resolved = answer.version if is_news else self.resolved
        return is_news

    def again(self) -> "Call":
        """The same call as the replica's next one."""
        former = self.verb, self.spec, self.root, self.started, self.deadline
        return Call(*former, waits=self.waits, floor=self.floor)

    def for_report(self) -> CallReport | None:
        """As a report says it."""
        if self.number is None:
            return None
        return CallReport(
            *(self.number, self.verb, self.spec, self.root, self.resolved, self.claim, self.waits, self.metadata),
            self.grid,
            self.floor,
        )
