"""A worker's state: its call, its reports, its parts, and their invariants."""

from collections import deque
from dataclasses import dataclass, field
from math import inf

from msgspec.structs import replace

from ..protocol.messages import (
    Answer,
    Buffer,
    CallReport,
    Empty,
    Failure,
    Filling,
    Holding,
    Reading,
    Refusal,
    Report,
    Spec,
    Step,
    Vacated,
    Withdrawing,
    call_text,
)
from ..protocol.names import Digest, Number, Ticket, Version, WorkerId
from .buffer import RegisteredMemory
from .copies import HostCopyRecords
from .events import Effect, Registered
from .read_slot import ReadSlot

# --- when a worker reports --------------------------------------------------------------------------------------------
#
# At once when there is news, and once a second in any case. News that leads to further news waits a moment for that: an
# update takes four reports so, and not seven.


TOGETHER_S = 0.1  # a small read has ended by then
MAX_UNACKNOWLEDGED = 64  # a minute of silence at one a second: the lease is long over


def news_of(report: Report) -> Report:
    """The report without counters and what the server itself has said: a change of anything else is told at once."""
    buffer = Filling(report.buffer.version) if isinstance(report.buffer, Filling) else report.buffer
    reading = report.reading
    if reading is not None:
        reading = replace(reading, rate_bytes_per_s=0, arrived_bytes=0, is_opened=False)
    copies = tuple(replace(each, done=0, chunks=0) for each in report.copies)
    counters = {"number": 0, "seen": Number(0), "closed": Ticket(0), "received_bytes": {}, "cross_site_bytes": {}}
    carried = replace(report, newest=None, newest_epoch=Number(0), writes=Number(0), stops=False)
    return replace(carried, buffer=buffer, reading=reading, copies=copies, **counters)


def pressing(news: Report) -> Report:
    """The news that must not wait: all but how a fill begins, and which copies do."""
    buffer, reading, call = news.buffer, news.reading, news.call
    if call is not None:
        is_hurried = isinstance(buffer, Withdrawing) and buffer.impatient
        if call.verb in FILLS and isinstance(buffer, Withdrawing | Vacated | Filling) and not is_hurried:
            buffer = Empty()  # the read will say more: that it has ended is told at once
        call = replace(call, resolved=None)  # the server itself has said so
    if reading is not None and not reading.to_host:
        reading = None
    copies = tuple(each for each in news.copies if each.whole or each.dropping)
    return replace(news, buffer=buffer, reading=reading, call=call, copies=copies, copies_left=0)


class ReportBook:
    """Numbers a worker's reports and says when the next one is due."""

    def __init__(self) -> None:
        self.number = 0
        self.every_s = 1.0
        self.acknowledged = 0  # the latest report that the server has taken in
        self._since = 1  # the first report of this connection
        self._sent_at: dict[int, float] = {}
        self._last_news: Report | None = None
        self._last_at = -inf
        self._waits_since = inf  # there is news that may wait a moment for more

    def statistics(self) -> dict[str, int]:
        return {"reports": self.number, "unacknowledged": len(self._sent_at)}

    @property
    def next_at(self) -> float:
        """When the next report is due if there is no further news."""
        return min(self._last_at + self.every_s, self._waits_since + TOGETHER_S)

    def unanswered_s(self, now: float) -> float:
        """How long the oldest report has waited that the server has not acknowledged."""
        return max(0.0, now - min(self._sent_at.values(), default=now))

    def repeat(self) -> None:
        """A new connection: the server at its end may have heard nothing, so all is told again."""
        self._last_news, self._last_at = None, -inf
        self._since = self.number + 1

    def is_current(self, acknowledged: int) -> bool:
        """Orders with that acknowledgement answer something that was said over this connection.

        All is said again on each connection: orders that answer an older one may come from a server that is dead.
        """
        return acknowledged >= self._since

    def is_due(self, report: Report, *, now: float) -> bool:
        """It is to go out now. News that may wait has its time from the first of these calls that shows it."""
        former = self._last_news
        if former is None or now >= self.next_at:
            return True
        news = news_of(report)
        if pressing(news) != pressing(former):
            return True
        self._waits_since = min(self._waits_since, now) if news != former else inf
        return False

    def sent(self, report: Report, *, now: float) -> Report:
        """Number the report and note that it goes out now."""
        self.number += 1
        self._last_news, self._last_at, self._waits_since = news_of(report), now, inf
        self._sent_at[self.number] = now
        if len(self._sent_at) > MAX_UNACKNOWLEDGED:
            del self._sent_at[min(self._sent_at)]
        return replace(report, number=self.number)

    def acknowledge(self, number: int) -> float | None:
        """When that report was sent, None if that is not known (any more); older ones are forgotten."""
        self.acknowledged = max(self.acknowledged, number)
        sent_at = self._sent_at.get(number)
        self._sent_at = {n: at for n, at in self._sent_at.items() if n > number}
        return sent_at


# --- calls ------------------------------------------------------------------------------------------------------------


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
    number: int | None = None  # its position among the replica's calls, once that can be known; it may change
    resolved: Version | None = None
    answer: Answer | None = None
    opened: Version | None = None  # some source had this version, and its manifest is here
    hopeless: Failure | None = None  # why no source, and no host copy, can help this worker
    is_delayed: bool = False  # the caller was told why it waits so long
    waits: bool = False  # of a replicate: for a number that is not published yet
    metadata: Digest = Digest("")  # of a publish
    grid: Digest = Digest("")  # the same
    former: Digest = Digest("")  # the same
    hash_s: float = 0.0  # the same
    epoch: Number = Number(0)  # of what it was resolved to, if it is a publish; of a claim: of the writer's lease
    floor: Version | None = None  # of an update: what was held when the caller called

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
        """Readers have half of the time to finish or to move; then they are cut off."""
        return self.started + (self.deadline - self.started) / 2

    @property
    def may_withdraw(self) -> bool:
        """The server knows of the call and has granted its claim: a call that is refused must have changed nothing."""
        return self.number is not None and (self.claim is None or self.resolved is not None)

    @property
    def is_passed(self) -> bool:
        """Another shard of the replica is past it. This one ends it by itself."""
        return self.answer is not None and self.answer.past is not None

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
        if is_news:
            self.resolved, self.epoch = answer.version, answer.epoch
        return is_news

    def again(self) -> "Call":
        """Returns this call with the number of the replica's next call."""
        former = self.verb, self.spec, self.root, self.started, self.deadline
        return Call(*former, waits=self.waits, floor=self.floor)

    def for_report(self) -> CallReport | None:
        """The call as the worker reports it."""
        if self.number is None:
            return None
        return CallReport(
            *(self.number, self.verb, self.spec, self.root, self.resolved, self.claim, self.waits, self.metadata),
            self.grid,
            self.floor,
            self.former,
            self.epoch,
            self.hash_s,
        )


# --- leaving ----------------------------------------------------------------------------------------------------------


FOR_OTHERS = 0.9  # of the time: to be cut off takes a reader a few messages, and what it has not got may be lost


@dataclass
class Departure:
    """Of a worker that was closed, until nothing keeps it any more."""

    started: float
    deadline: float
    is_hurried: bool = False  # the time of other workers is over
    leaving_in: int = 0  # the first report that says that nothing is left here
    is_alone: bool = False  # it waits for the server, and has said so
    has_left: bool = False

    @property
    def impatient_at(self) -> float:
        """Other workers have nearly all of the time to get what is here; the rest is for cutting off readers."""
        return self.started + FOR_OTHERS * (self.deadline - self.started)


# --- the whole state --------------------------------------------------------------------------------------------------


@dataclass
class WorkerState:
    """One worker, as the last event left it. Only `memory`, `slot` and `copies` change their own fields."""

    me: WorkerId
    received_bytes: dict[str, int]  # by source replica; the shell counts
    cross_site_bytes: dict[int, int]  # by version, of those received from other sites; the shell counts

    # its parts
    memory: RegisteredMemory = field(init=False)
    slot: ReadSlot = field(init=False)
    copies: HostCopyRecords = field(default_factory=HostCopyRecords)
    book: ReportBook = field(default_factory=ReportBook)

    # what its caller wants
    layout: Registered | None = None
    call: Call | None = None
    departure: Departure | None = None
    writes: Number = Number(0)  # the highest epoch or lease that it was given as the writer of its model
    ended: int = 0  # position of the last call that ended here
    finished: int = 0  # and of the last one that ended well
    step: Step | None = None  # how far it has come without the server, since a call has ended well with it
    missed: Failure | None = None  # why the last one was never made
    kept: Failure | None = None  # why the last one, an update, has kept what was held; it is said once

    # what it knows from the server
    shards: int = 1  # of its replica
    may_work_alone: bool = True  # readers refuse what is overwritten while they read it
    heard_at: float = inf  # when it last took orders in; a pause of this process does not count
    says_alone: bool = False  # it was logged that it goes on without the server
    connected: bool = False
    has_heard: bool = False  # orders came on this connection
    alone_since: float = -inf  # when the last connection broke on which some came
    refusal: Refusal | None = None
    session: Number = Number(0)
    seen: Number = Number(0)  # the highest number of orders
    newest: Version | None = None  # of the model, as the latest orders say
    newest_epoch: Number = Number(0)
    position: int | None = None  # of the replica's last call that ended anywhere
    patience_s: float = inf  # a shard may be dead for that long before the server says so
    is_to_box: bool = False  # other workers of the model have boxes

    # of this event
    now: float = -inf
    is_urgent: bool = False  # the next report must not wait
    effects: list[Effect] = field(default_factory=list)
    story: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=200))

    def __post_init__(self) -> None:
        self.memory, self.slot = RegisteredMemory(self.me), ReadSlot(self.me)

    def want(self, effect: Effect | None) -> None:
        """The shell is to carry this out."""
        if effect is not None:
            self.effects.append(effect)

    def note(self, what: str) -> None:
        """Something has happened, for people who ask later."""
        self.story.append((self.now, what))

    # --- questions ----------------------------------------------------------------------------------------------------

    @property
    def buffer(self) -> Buffer:
        return self.memory.buffer

    @property
    def reading(self) -> Reading | None:
        return self.slot.reading

    @property
    def next_report(self) -> int:
        """The number of the first report that says what is decided now."""
        return self.book.number + 1

    @property
    def alone_at(self) -> float:
        """When no worker trusts any more what a server has granted that has said nothing since.

        A reader trusts a read for less than a lease after a report that the server has answered. Such a report may have
        come until this worker's next one went unanswered.
        """
        return self.heard_at + self.patience_s if self.may_work_alone else inf

    @property
    def is_alone(self) -> bool:
        """The server has been gone for so long that this worker may go on without it."""
        return self.now >= self.alone_at

    @property
    def is_untouched(self) -> bool:
        """No worker reads or writes the registered memory."""
        return not self.slot.is_into_buffer and self.memory.serving is None and self.copies.copying is None

    def has_within_reach(self, version: Version) -> bool:
        """A source of the version has answered, or it is whole in a host copy: the old one may be given up for it."""
        return (self.call is not None and self.call.opened == version) or self.copies.whole(version) is not None


def contradiction(worker: WorkerState) -> str | None:
    """How a worker contradicts itself, or None."""
    slot, buffer, serving = worker.slot, worker.buffer, worker.memory.serving
    reading = slot.reading
    if slot.may_write and not slot.is_stopping and not isinstance(buffer, Filling | Vacated):
        return f"reads {reading} into a buffer that is {buffer}"
    if isinstance(buffer, Filling) and worker.call is None:
        return f"fills {buffer} and is in no call"
    if isinstance(buffer, Vacated) and serving is not None:
        return f"has vacated {buffer.version} and serves {serving}"
    if reading is not None and slot.closed >= reading.ticket:
        return f"reads ticket {reading.ticket}, called closed up to {slot.closed}"
    if isinstance(buffer, Empty) and serving is not None:
        return f"serves version {serving} from an empty buffer"
    if isinstance(buffer, Holding | Withdrawing) and serving != buffer.version:
        return f"holds {buffer.version} and serves {serving}"
    if isinstance(buffer, Holding | Withdrawing) and slot.may_write:
        return f"holds {buffer.version} while {reading} still writes"
    copies = worker.copies
    if copies.count > copies.max_copies and not copies.dropping:
        return f"has {copies.count} host copies where {copies.max_copies} are allowed"
    return None
