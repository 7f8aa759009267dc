"""The worker's decisions: what its buffer is, what it may read, when its caller's call has ended.

Events go in, effects come out; the shell carries them out and decides nothing. After every event the machine looks at
how things are and takes each step that has become possible, so a lost or repeated message never leaves it stuck.

Rules it keeps:
- Orders are the whole truth at their number. Older ones are dropped; a ticket that they do not name is void; a ticket
  that was ever void here is never begun.
- What it reads counts only inside its own lease, from when it *sent* the report that the server acknowledged.
- One read at a time writes the buffer, and nobody reads from the buffer when it changes from one version to another.
- A call ends by its deadline. A fill that was cut short leaves the buffer poisoned.

It must never look at a clock, a socket or a tensor.
"""

from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import assert_never

from . import events
from .calls import FILLS, Call, deadline_failure, why_not_begin
from .errors import InvariantViolation
from .invariants import worker_contradiction
from .messages import (
    MOST_FAILURES,
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
    Withdrawing,
)
from .names import Digest, Number, Version, WorkerId
from .read_slot import ReadSlot
from .reports import ReportBook


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

    def __post_init__(self) -> None:
        self.slot = ReadSlot(self.me)
        self.serving: Version | None = None  # an export of this version exists
        self.is_stopping_serving = False
        self._withdrawn_in = 0  # the report that first said so
        self._ended, self._finished = 0, 0
        self._position: int | None = None
        self._failures: list[TicketFailure] = []
        self._closing: Call | None = None
        self._leaving_in = 0
        self._has_left = False
        self._book = ReportBook()
        self._is_urgent = False
        self._effects: list[events.Effect] = []
        self._story: deque[tuple[float, str]] = deque(maxlen=200)

    # --- the seam -----------------------------------------------------------------------------------------------------

    def handle(self, event: events.Event, *, now: float) -> list[events.Effect]:
        """Take in one event; return what is to be done, in order. `now` never goes back."""
        self._effects = []
        self._is_urgent |= self.slot.lapse(now)
        match event:
            case events.Connected():
                self.connected, self.refusal = True, None
                self._book.repeat()
                if self.layout is not None:
                    self._effects.append(events.Send(self.layout.layout))
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
                self._take_call(event, now)
            case events.Cancelled():
                if self.call is not None:
                    self._end_call(well=False, now=now)
            case events.Closing(deadline=deadline):
                self._begin_closing(deadline, now)
            case events.ReadAdvanced():
                self._read_advanced(event)
            case events.ReadMeasured():
                self.slot.measured(event)
            case events.ReadEnded():
                self._read_ended(event, now)
            case events.ServingStopped(version=version):
                self._serving_stopped(version, now)
            case events.Tick():
                pass
            case _:
                assert_never(event)
        self._advance(now)
        self._report(now)
        return self._effects

    def next_deadline(self) -> float:
        """When to call `handle(events.Tick())` if nothing else happens before."""
        times = [inf]
        if self.call is not None:
            times.append(self.call.deadline)
            if isinstance(self.buffer, Withdrawing) and not self.buffer.impatient:
                times.append(self.call.impatient_at)
        if self._closing is not None and not self._has_left:
            times.append(self._closing.deadline)
        if self.reading is not None and not self.slot.is_stopping:
            times.append(self.slot.trust_until)
        if self.connected:
            times.append(self._book.next_at)
        return min(times)

    # --- what others ask ----------------------------------------------------------------------------------------------

    @property
    def held(self) -> Version | None:
        """The version whose bytes are in the buffer, whole and verified; None if there is none."""
        return self.buffer.version if isinstance(self.buffer, Holding | Withdrawing) else None

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
        is_idle = self.call is None and self.reading is None and self.serving is None
        return is_idle and isinstance(self.buffer, Empty | Poisoned)

    def story(self) -> list[tuple[float, str]]:
        """The last 200 things that happened here, oldest first."""
        return list(self._story)

    def statistics(self) -> dict[str, int]:
        return {**self._book.statistics(), "received_bytes": sum(self.received_bytes.values())}

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
        self._book.every_s = orders.report_s
        self._position = orders.position
        sent_at = self._book.acknowledge(orders.acknowledged)
        if sent_at is not None:
            self.slot.extend_trust(sent_at + orders.trust_s)
        self.slot.take_grant(orders.grant)
        self._note_newest(orders.newest)
        call = self.call
        if call is not None and call.take(orders.answer):
            if call.verb in FILLS:  # a version that is being published may yet fail to come into being
                self._note_newest(call.resolved)
            self._note(now, f"{call} is version {call.resolved}")
        is_answer_to_withdrawal = orders.acknowledged >= self._withdrawn_in > 0
        is_going = isinstance(self.buffer, Withdrawing | Poisoned) and orders.drained == self.buffer.version
        if is_going and is_answer_to_withdrawal:
            self._stop_serving(now)
        if self._leaving_in and orders.acknowledged >= self._leaving_in:
            self._leave(drained=True)

    def _take_refusal(self, refusal: Refusal, now: float) -> None:
        self.refusal = refusal
        if refusal.retry_s <= 0 and self.call is not None:
            self._fail_call(Failure(refusal.code, refusal.message, refusal.hint), now)

    # --- from the caller ----------------------------------------------------------------------------------------------

    def _register(self, event: events.Registered) -> None:
        if not self.may_register:
            raise InvariantViolation(f"{self.me} was given other tensors while {self.buffer}")
        self.layout = event
        self.buffer = Empty()
        if self.connected:
            self._effects.append(events.Send(event.layout))

    def _take_call(self, event: events.Called, now: float) -> None:
        wrong = why_not_begin(self, event)
        if wrong is not None:
            self._effects.append(events.Finished(0, error=wrong))
            return
        self.call = Call(event.verb, event.spec, event.root, now, event.deadline)
        self._failures = []
        self._note(now, f"called {event.verb} {event.spec}")

    @property
    def is_closing(self) -> bool:
        return self._closing is not None

    def _begin_closing(self, deadline: float, now: float) -> None:
        if self._closing is None:
            self._closing = Call("close", "", Digest(""), now, deadline)
            if self.call is not None:
                self._fail_call(Failure("closed", f"{self.me} was closed during {self.call.verb}"), now)

    # --- from the data plane ------------------------------------------------------------------------------------------

    def _read_advanced(self, event: events.ReadAdvanced) -> None:
        is_ours = self.reading is not None and self.reading.ticket == event.ticket
        if is_ours and isinstance(self.buffer, Filling):
            self.buffer = Filling(self.buffer.version, max(self.buffer.done, event.done), event.chunks)

    def _read_ended(self, event: events.ReadEnded, now: float) -> None:
        reading, by_itself = self.slot.ended(event.ticket)
        if event.complete and isinstance(self.buffer, Filling) and self.buffer.version == reading.version:
            self.buffer = Holding(reading.version, self.slot.root)
            self._note(now, f"holds version {reading.version}, last chunk from {reading.source}")
        elif event.failure is not None and by_itself:
            told = TicketFailure(event.ticket, reading.source, event.failure.code, event.failure.message[:500])
            self._failures = [*self._failures, told][-MOST_FAILURES:]
            self._note(now, f"read {event.ticket} from {reading.source} failed: {event.failure.message}")

    def _serving_stopped(self, version: Version, now: float) -> None:
        if not self.is_stopping_serving or self.serving != version:
            raise InvariantViolation(f"{self.me}: serving {version} stopped, but it serves {self.serving}")
        self.serving, self.is_stopping_serving, self._withdrawn_in = None, False, 0
        self.buffer = Poisoned() if isinstance(self.buffer, Poisoned) else Empty()
        self._note(now, f"version {version} withdrawn")

    # --- steps --------------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        """Take every step that how things are now allows."""
        self._advance_closing(now)
        call = self.call
        if call is not None and call.number is None and (self._ended or self._position is not None):
            call.number = max(self._ended, self._position or 0) + 1
        if call is not None and call.answer is not None and call.answer.error is not None:
            self._fail_call(call.answer.error, now)
        elif call is not None and call.answer is not None and call.answer.finished:
            self._end_call(well=True, now=now)
        elif call is not None and now >= call.deadline:
            self._fail_call(deadline_failure(self, call), now)
        elif call is not None:
            self._advance_call(call, now)
        self._advance_read(now)

    def _advance_call(self, call: Call, now: float) -> None:
        if isinstance(self.buffer, Withdrawing) and not self.buffer.impatient and now >= call.impatient_at:
            self._withdraw(impatient=True, now=now)
        match self.buffer:
            case Holding(version=version) if call.verb == "unpublish" and call.number is not None:
                self._withdraw(impatient=False, now=now)
            case Holding(version=version) if call.verb in FILLS and call.resolved not in (None, version):
                self._withdraw(impatient=False, now=now)
            case Empty() if call.verb == "publish" and call.resolved is not None and self._is_untouched:
                self.buffer = Holding(call.resolved, call.root, published=True)
                self.serving = call.resolved
                self._effects.append(events.StartServing(call.resolved, call.root))
                self._note(now, f"published version {call.resolved}")
            case Empty() | Poisoned() if call.verb in FILLS and call.resolved is not None and self._is_untouched:
                self.buffer = Filling(call.resolved)

    @property
    def _is_untouched(self) -> bool:
        """Nobody reads or writes the buffer."""
        return self.reading is None and self.serving is None

    def _advance_read(self, now: float) -> None:
        slot, call = self.slot, self.call
        wanted = self.buffer.version if isinstance(self.buffer, Filling) and call is not None else None
        is_wanted = slot.grant is not None and slot.grant.version == wanted
        may_be_wanted = call is not None and call.verb in FILLS and not isinstance(self.buffer, Holding)
        if slot.grant is not None and not is_wanted and not may_be_wanted:
            slot.grant, self._is_urgent = None, True  # so that its source need not wait for us
        slot.stop_unless_granted(wanted)
        if slot.may_start(wanted, now) and not self.is_stopping_serving:
            grant = slot.start()
            self.serving = grant.version
            self._note(now, f"reads {grant.version} from {grant.source}, ticket {grant.ticket}: {grant.reason}")
        for effect in slot.effects:
            if isinstance(effect, events.StopRead):
                self._note(now, f"stops ticket {effect.ticket}: {slot.stop_reason}")
        self._effects += slot.take_effects()

    def _stop_serving(self, now: float) -> None:
        if self.serving is not None and not self.is_stopping_serving:
            self.is_stopping_serving = True
            self._effects.append(events.StopServing(self.serving))

    def _withdraw(self, *, impatient: bool, now: float) -> None:
        assert isinstance(self.buffer, Holding | Withdrawing)
        if isinstance(self.buffer, Holding):
            self._withdrawn_in = self._book.number + 1
        self.buffer = Withdrawing(self.buffer.version, self.buffer.root, self.buffer.published, impatient)
        self._note(now, f"withdraws version {self.buffer.version}" + (", impatient" if impatient else ""))

    def _fail_call(self, failure: Failure, now: float) -> None:
        call = self.call
        assert call is not None
        self._note(now, f"{call.verb} {call.spec} failed: {failure.code}: {failure.message}")
        self._effects.append(events.Finished(call.number or 0, error=failure))
        self._end_call(well=False, now=now)

    def _end_call(self, *, well: bool, now: float) -> None:
        call = self.call
        assert call is not None
        self.call, self._failures = None, []
        if call.number is not None:
            self._ended = call.number
            self._finished = call.number if well else self._finished
        if well:
            self._effects.append(events.Finished(call.number or 0, version=self.held))
            self._note_newest(self.held)
            return
        if isinstance(self.buffer, Filling):
            self.buffer = Poisoned(self.serving)
            self._withdrawn_in = self._book.number + 1 if self.serving is not None else 0
            self.slot.grant = None
            self.slot.stop("the call failed")
        elif isinstance(self.buffer, Withdrawing) and not self.is_stopping_serving and self._closing is None:
            self.buffer = Holding(self.buffer.version, self.buffer.root, self.buffer.published)
            self._withdrawn_in = 0

    def _advance_closing(self, now: float) -> None:
        closing = self._closing
        if closing is None or self._has_left:
            return
        if isinstance(self.buffer, Holding):
            self._withdraw(impatient=False, now=now)
        if isinstance(self.buffer, Withdrawing) and not self.buffer.impatient and now >= closing.impatient_at:
            self._withdraw(impatient=True, now=now)
        if now >= closing.deadline or not self.connected:
            self.slot.stop("closing")
            self._stop_serving(now)
            self._leave(drained=not isinstance(self.buffer, Withdrawing))
        elif isinstance(self.buffer, Empty | Poisoned) and self._is_untouched and not self._leaving_in:
            self._leaving_in = self._book.number + 1

    def _leave(self, *, drained: bool) -> None:
        if not self._has_left:
            self._has_left = True
            self._effects.append(events.Left(drained))

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
            ended=self._ended,
            finished=self._finished,
            reading=self.reading,
            closed=self.slot.raise_watermark(self.seen),
            newest=self.newest,
            failures=tuple(self._failures),
            received_bytes=self.received_bytes,
            leaving=self._leaving_in > 0,
        )
        if self.connected and (self._is_urgent or self._book.is_due(report, now=now)):
            self._is_urgent = False
            self._effects.append(events.Send(self._book.sent(report, now=now)))

    def _note_newest(self, version: Version | None) -> None:
        if version is not None:
            self.newest = version if self.newest is None else max(self.newest, version)

    def _note(self, now: float, what: str) -> None:
        self._story.append((now, what))
