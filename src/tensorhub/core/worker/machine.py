"""The worker's decisions: what its buffer is, what it may read, when its caller's call has ended.

Events go in, effects come out; the shell carries them out and decides nothing. After every event the machine looks at
how things are and takes each step that has become possible, so a lost or repeated message never leaves it stuck.

Rules it keeps:
- Orders are the whole truth at their number. Older ones are dropped; a ticket that they do not name is void; a ticket
  that was ever void here is never begun.
- What it reads counts only inside its own lease, from when it *sent* the report that the server acknowledged.
- One read at a time writes the buffer, and nobody reads from the buffer when it changes from one version to another.
- A version is not given up before its successor is within reach, and is had back if nothing was written over it.
- A call ends by its deadline. A fill that was cut short leaves the buffer poisoned.

It must never look at a clock, a socket or a tensor.
"""

from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import assert_never

from ..errors import InvariantViolation
from ..messages import (
    Buffer,
    Empty,
    Failure,
    Filling,
    Holding,
    Orders,
    Poisoned,
    Reading,
    Refusal,
    Report,
    TicketFailure,
    Vacated,
    Withdrawing,
)
from ..names import Digest, Number, Version, WorkerId
from . import calling, events, filling
from .call import FILLS, Call, deadline_failure
from .host_copies import Shelf
from .invariants import worker_contradiction
from .read_slot import ReadSlot
from .report_book import ReportBook


@dataclass
class Worker:
    """One life of one worker. See the module for its rules; `handle` is the only thing that changes it."""

    me: WorkerId
    buffer: Buffer = field(default_factory=Empty)
    layout: events.Registered | None = None
    call: Call | None = None
    session: Number = Number(0)
    seen: Number = Number(0)
    newest: Version | None = None
    connected: bool = False
    refusal: Refusal | None = None
    received_bytes: dict[str, int] = field(default_factory=dict)
    far_bytes: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slot, self.shelf = ReadSlot(self.me), Shelf()
        self.serving: Version | None = None  # an export of this version exists
        self.is_stopping_serving = False
        self.withdrawn_in = 0  # the report that first said so
        self.proved_newest: tuple[Version | None, str] = (None, "")
        self.ceiling: tuple[Number, str] = (Number(0), "")
        self.receipts: dict[int, str] = {}  # by version of what is here
        self.is_disowned = False  # what is being stopped was published here, and is not what its version is
        self.opened: Version | None = None  # in this call: some source had it, and its manifest is known
        self.ended, self.finished = 0, 0
        self.patience_s = inf  # how long a death may remain unknown: the server says
        self.position: int | None = None
        self.claim: Version | None = None  # what the last unpublish has claimed, until it is published
        self.failures: list[TicketFailure] = []
        self.closing: Call | None = None
        self.is_hurried = False  # half of the time to leave is over
        self.leaving_in, self.has_left = 0, False
        self.book = ReportBook()
        self.is_urgent = False
        self.effects: list[events.Effect] = []
        self._story: deque[tuple[float, str]] = deque(maxlen=200)

    # --- the seam -----------------------------------------------------------------------------------------------------

    def handle(self, event: events.Event, *, now: float) -> list[events.Effect]:
        """Take in one event; return what is to be done, in order. `now` never goes back."""
        self.effects = []
        self.is_urgent |= self.slot.lapse(now)
        match event:
            case events.Connected():
                self.connected, self.refusal = True, None
                self.book.repeat()
                if self.layout is not None:
                    self.effects.append(events.Send(self.layout.layout))
            case events.Disconnected():
                self.connected = False
            case events.Received(message=message):
                if isinstance(message, Refusal):
                    self._take_refusal(message, now)
                else:
                    self._take_orders(message, now)
            case events.Registered():
                self._register(event)
            case events.Called():
                calling.take(self, event, now)
            case events.ClaimDropped():
                self.claim = None
            case events.Cancelled():
                if self.call is not None:
                    calling.end(self, well=False, now=now)
            case events.Closing(deadline=deadline):
                self._begin_closing(deadline, now)
            case events.ReadOpened():
                filling.opened(self, event, now)
            case events.ReadTouched():
                filling.touched(self, event)
            case events.ReadBarred():
                filling.barred(self, event, now)
            case events.ReadAdvanced():
                filling.advanced(self, event)
            case events.ReadMeasured():
                self.slot.measured(event)
            case events.ReadEnded():
                filling.ended(self, event, now)
            case events.ServingStopped(version=version):
                filling.serving_stopped(self, version, now)
            case events.CopiedOut(version=version, failure=failure):
                self.shelf.copied_out(version, failure)
                self.note(now, f"offload of version {version} ended: {failure.message if failure else 'done'}")
            case events.CopiedIn(version=version, failure=failure):
                filling.copied_in(self, version, failure, now)
            case events.CopyDropped(version=version):
                self.shelf.dropped(version)
                self.note(now, f"host copy of version {version} dropped")
            case events.Wished(prefetch=prefetch, pins=pins):
                self.shelf.prefetch, self.shelf.pins = prefetch, pins
            case events.Tick():
                pass
            case _:
                assert_never(event)
        self._advance(now)
        self._report(now)
        return self.effects

    def next_deadline(self) -> float:
        """When to call `handle(events.Tick())` if nothing else happens before."""
        times = [inf]
        if self.call is not None:
            times.append(self.call.deadline)
            if self.call.awaits_shard is not None and not self.call.is_delayed:
                times.append(self.call.started + self.patience_s)
            if isinstance(self.buffer, Withdrawing) and not self.buffer.impatient:
                times.append(self.call.impatient_at)
        if self.closing is not None and not self.has_left:
            times.append(self.closing.deadline)
            if not self.is_hurried:
                times.append(self.closing.impatient_at)
        if self.reading is not None and not self.slot.is_stopping:
            times.append(self.slot.trust_until)
        if self.connected:
            times.append(self.book.next_at)
        return min(times)

    # --- what others ask ----------------------------------------------------------------------------------------------

    @property
    def held(self) -> Version | None:
        """The version whose bytes are in the buffer, whole and verified; None if there is none."""
        return self.buffer.version if isinstance(self.buffer, Holding | Withdrawing | Vacated) else None

    @property
    def withdrawn(self) -> Withdrawing | None:
        """What is being withdrawn."""
        return self.buffer if isinstance(self.buffer, Withdrawing) else None

    @property
    def progress(self) -> tuple[int, int]:
        """Chunks done and chunks in all, of a fill; (0, 0) when there is none."""
        return (self.buffer.done, self.buffer.chunks) if isinstance(self.buffer, Filling) else (0, 0)

    @property
    def reading(self) -> Reading | None:
        """The open read, which may be about to stop."""
        return self.slot.reading

    @property
    def may_register(self) -> bool:
        """Other tensors may be registered: nobody reads or writes the present ones."""
        is_idle = self.call is None and self.is_untouched
        return is_idle and isinstance(self.buffer, Empty | Poisoned)

    def story(self) -> list[tuple[float, str]]:
        """The last 200 things that happened here, oldest first."""
        return list(self._story)

    def statistics(self) -> dict[str, int]:
        return {**self.book.statistics(), "received_bytes": sum(self.received_bytes.values())}

    def check_invariants(self) -> None:
        """Raise `InvariantViolation` if this machine contradicts itself."""
        wrong = worker_contradiction(self)
        if wrong:
            raise InvariantViolation(f"{self.me} {wrong}")

    # --- from the server ----------------------------------------------------------------------------------------------

    def _take_orders(self, orders: Orders, now: float) -> None:
        if orders.number <= self.seen:
            return  # late or repeated: a newer truth is known
        self.seen = orders.number
        self.session = orders.session
        self.book.every_s, self.patience_s = orders.report_s, orders.lease_s + orders.report_s
        self.position = orders.position
        sent_at = self.book.acknowledge(orders.acknowledged)
        if sent_at is not None:
            self.slot.extend_trust(sent_at + orders.trust_s)
        self.slot.take_grant(orders.grant)
        self.shelf.take(orders, next_report=self.book.number + 1)
        self.note_newest(orders.newest)
        self.take_receipts(orders)
        calling.take_conflict(self, orders.conflict, now)
        call = self.call
        if call is not None and call.take(orders.answer):
            if call.verb in FILLS:  # a version that is being published may yet fail to come into being
                self.note_newest(call.resolved)
            self.note(now, f"{call} is version {call.resolved}")
        is_answer = self.withdrawn_in > 0 and self.book.is_answered(self.withdrawn_in, orders.acknowledged)
        is_going = isinstance(self.buffer, Withdrawing | Poisoned) and orders.drained == self.buffer.version
        if is_going and is_answer and self.shelf.copying is None:  # else it is said again afterwards
            self.stop_serving(now)
        if self.leaving_in and orders.acknowledged >= self.leaving_in:
            calling.leave(self, drained=True)

    def _take_refusal(self, refusal: Refusal, now: float) -> None:
        self.refusal = refusal
        if refusal.retry_s <= 0 and self.call is not None:
            calling.fail(self, Failure(refusal.code, refusal.message, refusal.hint), now)

    # --- from the caller ----------------------------------------------------------------------------------------------

    def _register(self, event: events.Registered) -> None:
        if not self.may_register:
            raise InvariantViolation(f"{self.me} was given other tensors while {self.buffer}")
        self.layout = event
        self.buffer = Empty()
        next_report = self.book.number + 1
        self.shelf.register(event.digest, event.size_bytes, event.most_copies, next_report=next_report)
        if self.connected:
            self.effects.append(events.Send(event.layout))

    @property
    def is_closing(self) -> bool:
        return self.closing is not None

    def _begin_closing(self, deadline: float, now: float) -> None:
        if self.closing is None:
            self.closing = Call("close", "", Digest(""), now, deadline)
            if self.call is not None:
                calling.fail(self, Failure("closed", f"{self.me} was closed during {self.call.verb}"), now)

    # --- steps --------------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        """Take every step that how things are now allows."""
        calling.advance_closing(self, now)
        call = self.call
        if call is not None and call.number is None and (self.ended or self.position is not None):
            call.number = max(self.ended, self.position or 0) + 1
        if call is not None and now < call.deadline and calling.retries(call):
            calling.again(self, call, now)
        elif call is not None and call.answer is not None and call.answer.error is not None:
            calling.fail(self, call.answer.error, now)
        elif call is not None and call.answer is not None and call.answer.finished:
            calling.end(self, well=True, now=now)
        elif call is not None and now >= call.deadline:
            calling.fail(self, deadline_failure(self, call), now)
        elif call is not None:
            calling.advance(self, call, now)
            calling.say_delay(self, call, now)
        filling.advance_read(self, now)
        self._advance_copies(now)

    @property
    def is_untouched(self) -> bool:
        """Nobody reads or writes the buffer."""
        return not self._is_written and self.serving is None and self.shelf.copying is None

    @property
    def _is_written(self) -> bool:
        """A read into the buffer is open."""
        return self.reading is not None and not self.reading.to_host

    def _advance_copies(self, now: float) -> None:
        """Offload, fill from a host copy, and drop what was told to go."""
        step: events.Effect | None = None
        if isinstance(self.buffer, Holding | Withdrawing) and not self.is_stopping_serving:
            step = self.shelf.copy_out(self.buffer)
        elif isinstance(self.buffer, Filling) and self.call is not None and not self._is_written:
            if self.is_untouched:
                step = self.shelf.copy_in(self.buffer.version)
            elif self.serving is not None and self.shelf.whole(self.buffer.version) is not None:
                filling.poison(self)  # a read had begun before the copy was known of: who reads behind it goes first
        if step is not None:
            self.note(now, f"begins: {step}")
            self.effects.append(step)
        self.effects += self.shelf.drops(self.reading)

    def stop_serving(self, now: float) -> None:
        if self.serving is not None and not self.is_stopping_serving:
            self.is_stopping_serving = True
            self.effects.append(events.StopServing(self.serving))

    # --- reports ------------------------------------------------------------------------------------------------------

    def _report(self, now: float) -> None:
        report = Report(
            number=0,
            session=self.session,
            seen=self.seen,
            buffer=self.buffer,
            layout=self.layout.digest if self.layout else Digest(""),
            size_bytes=self.layout.size_bytes if self.layout else 0,
            operation=self.call.told() if self.call is not None else None,
            ended=self.ended,
            finished=self.finished,
            reading=self.reading,
            closed=self.slot.raise_watermark(self.seen),
            newest=self.proved_newest[0],
            newest_receipt=self.proved_newest[1],
            receipts=self._receipts_here(),
            ceiling=self.ceiling[0],
            ceiling_receipt=self.ceiling[1],
            failures=tuple(self.failures),
            received_bytes=dict(self.received_bytes),
            far_bytes=dict(self.far_bytes),
            copies=self.shelf.told(),
            copies_left=self.shelf.left,
            copy_error=self.shelf.error,
            pins=self.shelf.pins,
            prefetch=self.shelf.prefetch,
            closing=self.closing is not None,
            leaving=self.leaving_in > 0,
            claim=self.claim if self.closing is None else None,
        )
        if self.connected and (self.is_urgent or self.book.is_due(report, now=now)):
            self.is_urgent = False
            self.effects.append(events.Send(self.book.sent(report, now=now)))

    def take_receipts(self, orders: Orders) -> None:
        """What the server has said, to be told to the next one."""
        if orders.newest is not None:
            self.proved_newest = (orders.newest, orders.newest_receipt)
        if orders.ceiling > self.ceiling[0]:
            self.ceiling = (orders.ceiling, orders.ceiling_receipt)
        self.receipts = {**self._receipts_here(), **orders.receipts}

    def _receipts_here(self) -> dict[int, str]:
        """Those of what is here."""
        here = dict.fromkeys([self.held, *self.shelf.copies])
        return {version: receipt for version, receipt in self.receipts.items() if version in here}

    def note_newest(self, version: Version | None) -> None:
        if version is not None:
            self.newest = version if self.newest is None else max(self.newest, version)

    def note(self, now: float, what: str) -> None:
        self._story.append((now, what))
