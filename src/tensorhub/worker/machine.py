"""The worker's machine: events go in, effects come out. The shell carries those out and decides nothing.

After every event the machine takes each step that has become possible, so a lost or repeated message never leaves it
stuck. Rules:
- Orders are the whole truth at their number. Older ones are dropped; a ticket that they do not name is void, for ever.
- A read counts only inside the worker's own lease, from when it *sent* the report that the server acknowledged.
- One read at a time writes the buffer. No peer reads the buffer when it changes from one version to another.
- A version is not given up before its successor is within reach. It is held again if nothing was written over it.
- A call ends by its deadline. A fill that was cut short leaves the buffer poisoned.
"""

from math import inf
from typing import assert_never

from ..protocol.errors import InvariantViolation
from ..protocol.messages import (
    Buffer,
    Empty,
    Failure,
    Filling,
    Hello,
    Orders,
    Poisoned,
    Reading,
    Refusal,
    Report,
    Spec,
    Withdrawing,
)
from ..protocol.names import Digest, Number, Version, WorkerId
from . import calls, events, reads
from .calls import update_at_once, why_not_begin
from .state import Call, WorkerState, contradiction

# --- reports ----------------------------------------------------------------------------------------------------------


def report_of(worker: WorkerState) -> Report:
    """Builds the report. It gets its number when it is sent."""
    layout, departure = worker.layout, worker.departure
    return Report(
        number=0,
        session=worker.session,
        seen=worker.seen,
        buffer=worker.buffer,
        layout=layout.digest if layout is not None else Digest(""),
        size_bytes=layout.size_bytes if layout is not None else 0,
        can_box=layout is not None and layout.can_box,
        call=worker.call.for_report() if worker.call is not None else None,
        ended=worker.ended,
        finished=worker.finished,
        step=worker.step,
        missed=worker.missed,
        reading=worker.reading,
        read=worker.slot.done,
        closed=worker.slot.closed,
        newest=worker.newest,
        newest_epoch=worker.newest_epoch,
        writes=worker.writes if departure is None else Number(0),
        failures=tuple(worker.slot.failures),
        received_bytes=dict(worker.received_bytes),
        cross_site_bytes=dict(worker.cross_site_bytes),
        copies=worker.copies.for_report(),
        copies_left=worker.copies.room,
        copy_error=worker.copies.error,
        pins=worker.copies.pins,
        prefetch=worker.copies.prefetch,
        closing=departure is not None,
        left=departure is not None and departure.leaving_in > 0,
        stops=worker.memory.is_stopping,
    )


# --- orders -----------------------------------------------------------------------------------------------------------


def take(worker: WorkerState, orders: Orders) -> None:
    """Orders are the whole truth at their number: late or repeated ones are dropped."""
    if orders.number <= worker.seen or not worker.book.is_current(orders.acknowledged):
        return
    worker.seen, worker.session, worker.position = orders.number, orders.session, orders.position
    worker.has_heard, worker.heard_at, worker.says_alone = True, worker.now, False
    worker.book.every_s, worker.patience_s = orders.report_s, orders.lease_s + orders.report_s
    sent_at = worker.book.acknowledge(orders.acknowledged)
    if sent_at is not None:
        worker.slot.extend_trust(sent_at + orders.trust_s)
    worker.slot.take_grant(orders.grant)
    worker.copies.take_orders(orders, next_report=worker.next_report)
    worker.newest, worker.newest_epoch = orders.newest, orders.newest_epoch
    worker.is_urgent |= orders.report_at_once
    worker.is_to_box = orders.box
    calls.take_superseded(worker, orders.superseded)
    calls.take_judged(worker, orders.judged)
    call = worker.call
    if call is not None and call.take(orders.answer):
        worker.note(f"{call} is version {call.resolved}")
        worker.writes = max(worker.writes, call.epoch)
    is_drained = orders.drained is not None and orders.drained == worker.memory.serving
    worker.memory.drained_by = orders.acknowledged if is_drained else 0
    departure = worker.departure
    if departure is not None and 0 < departure.leaving_in <= orders.acknowledged:
        calls.leave(worker, departure, drained=True)


def take_refusal(worker: WorkerState, refusal: Refusal) -> None:
    """The server does not talk to this worker: for good, or for now."""
    worker.refusal = refusal
    while refusal.retry_s <= 0 and worker.call is not None:
        calls.fail(worker, Failure(refusal.code, refusal.message, refusal.hint))


LATE = 0.5  # of the time between two reports: to be called later than that is a pause of this process


# --- the machine ------------------------------------------------------------------------------------------------------


class Worker:
    """One life of one worker. Only `handle` changes it."""

    def __init__(
        self,
        me: WorkerId,
        *,
        received_bytes: dict[str, int] | None = None,
        cross_site_bytes: dict[int, int] | None = None,
        shards: int = 1,
        may_work_alone: bool = True,
    ) -> None:
        """The shell counts in these tables what was received; reports say what stands in them.

        `shards`: of its replica. `may_work_alone`: readers of what is published here compare digests, so that
        its caller need not wait for a server that is gone.
        """
        received = received_bytes if received_bytes is not None else {}
        crossed = cross_site_bytes if cross_site_bytes is not None else {}
        self.state = WorkerState(me, received, crossed, shards=shards, may_work_alone=may_work_alone)

    def handle(self, event: events.Event, *, now: float) -> list[events.Effect]:
        """Take in one event; return what is to be done, in order. `now` never goes back."""
        worker = self.state
        late_s = now - self.next_deadline()
        if worker.connected and late_s > LATE * worker.book.every_s:
            worker.heard_at += late_s  # this process stood still: what the server has said is still to be taken in
        worker.now, worker.effects = now, []
        worker.is_urgent |= worker.slot.lapse(now)
        self._take(event)
        calls.advance_closing(worker)
        calls.advance(worker)
        reads.stop_drained(worker)
        reads.advance(worker)
        reads.advance_copies(worker)
        self._report()
        return worker.effects

    def next_deadline(self) -> float:
        """When to call `handle(events.Tick())` if nothing else happens before."""
        worker, times = self.state, [inf]
        call, departure = worker.call, worker.departure
        if call is not None:
            times.append(call.deadline)
            if not worker.is_alone:
                times.append(worker.alone_at)
            if call.awaits_shard is not None and not call.is_delayed:
                times.append(call.started + worker.patience_s)
            if isinstance(worker.buffer, Withdrawing) and not worker.buffer.impatient:
                times.append(call.impatient_at)
        if departure is not None and not departure.has_left:
            times.append(departure.deadline)
            if not departure.is_hurried:
                times.append(departure.impatient_at)
            if not worker.connected:
                times.append(calls.alone_until(worker))
        if worker.reading is not None and not worker.slot.is_stopping:
            times.append(worker.slot.trust_until)
        if worker.connected:
            times.append(worker.book.next_at)
        return min(times)

    def check_invariants(self) -> None:
        """Raise `InvariantViolation` if this machine contradicts itself."""
        wrong = contradiction(self.state)
        if wrong:
            raise InvariantViolation(f"{self.me} {wrong}")

    def statistics(self) -> dict[str, int]:
        return {**self.state.book.statistics(), "received_bytes": sum(self.state.received_bytes.values())}

    def story(self) -> list[tuple[float, str]]:
        """The last 200 things that happened here, oldest first."""
        return list(self.state.story)

    # --- what the shell asks ------------------------------------------------------------------------------------------

    @property
    def me(self) -> WorkerId:
        return self.state.me

    @property
    def buffer(self) -> Buffer:
        return self.state.buffer

    @property
    def held(self) -> Version | None:
        return self.state.memory.held

    @property
    def progress(self) -> tuple[int, int]:
        """Chunks done and chunks in all, of a fill; (0, 0) when there is none."""
        return (self.buffer.done, self.buffer.chunks) if isinstance(self.buffer, Filling) else (0, 0)

    @property
    def reading(self) -> Reading | None:
        return self.state.reading

    @property
    def call(self) -> Call | None:
        return self.state.call

    @property
    def is_withdrawing(self) -> bool:
        """The caller's unpublish goes on: the server has granted what it claims, or is gone."""
        call = self.state.call
        return call is not None and call.verb == "unpublish" and calls.may_withdraw(self.state, call)

    @property
    def alone_at(self) -> float:
        """When a writer goes on without the server, if that says nothing until then."""
        return self.state.alone_at if self.state.writes else inf

    @property
    def is_to_box(self) -> bool:
        """Other workers of the model have boxes, and what this one publishes it should publish with boxes."""
        return self.state.is_to_box

    @property
    def is_registered(self) -> bool:
        return self.state.layout is not None

    @property
    def may_register(self) -> bool:
        """Other tensors may be registered: no worker reads or writes the present ones."""
        is_idle = self.call is None and self.state.is_untouched
        return is_idle and isinstance(self.buffer, Empty | Poisoned)

    @property
    def connected(self) -> bool:
        return self.state.connected

    @property
    def has_heard(self) -> bool:
        """The server has answered on the present connection."""
        return self.state.has_heard

    @property
    def session(self) -> Number:
        return self.state.session

    @property
    def refusal(self) -> Refusal | None:
        """Why the server does not talk to this worker, since the last connection."""
        return self.state.refusal

    @property
    def prefetch(self) -> Spec | None:
        return self.state.copies.prefetch

    @property
    def pins(self) -> tuple[Version, ...]:
        return self.state.copies.pins

    @property
    def reported(self) -> int:
        return self.state.book.number

    @property
    def acknowledged(self) -> int:
        return self.state.book.acknowledged

    def why_not_begin(self, call: events.Called) -> Failure | None:
        return why_not_begin(self.state, call)

    def update_at_once(self, hello: Hello, call: events.Called) -> Version | Failure | None:
        """The result of an update to "prefetched" without the server; None if the server must be asked."""
        return update_at_once(self.state, hello, call)

    # --- events -------------------------------------------------------------------------------------------------------

    def _take(self, event: events.Event) -> None:
        """What the event changes at once."""
        worker = self.state
        match event:
            case events.Connected():
                self._connected()
            case events.Disconnected():
                worker.connected, worker.memory.drained_by = False, 0  # the next server may not know of it
                if worker.has_heard:
                    worker.has_heard, worker.alone_since = False, worker.now
            case events.Received(message=message):
                if isinstance(message, Refusal):
                    take_refusal(worker, message)
                else:
                    take(worker, message)
            case events.Registered():
                self._register(event)
            case events.Called():
                calls.take(worker, event)
            case events.Cancelled():
                calls.cancel(worker)
            case events.Closing(deadline=deadline):
                calls.begin(worker, deadline)
            case events.ReadOpened(ticket=ticket, root=root):
                reads.opened(worker, ticket, root)
            case events.ReadTouched(ticket=ticket):
                reads.touched(worker, ticket)
            case events.ReadBarred():
                reads.barred(worker, event)
            case events.ReadAdvanced():
                reads.advanced(worker, event)
            case events.ReadMeasured():
                worker.slot.measured(event)
            case events.ReadEnded():
                reads.ended(worker, event)
            case events.NotShared():
                reads.not_shared(worker, event)
            case events.ServingStopped(version=version):
                reads.serving_stopped(worker, version)
            case events.CopiedOut(version=version, failure=failure):
                reads.copied_out(worker, version, failure)
            case events.CopiedIn(version=version, failure=failure):
                reads.copied_in(worker, version, failure)
            case events.CopyDropped(version=version):
                worker.copies.dropped(version)
                worker.note(f"host copy of version {version} dropped")
            case events.CopyCounted(version=version):
                worker.copies.counted(version)
            case events.Wished(prefetch=prefetch, pins=pins):
                worker.copies.prefetch, worker.copies.pins = prefetch, pins
            case events.Tick():
                pass
            case _:
                assert_never(event)

    def _connected(self) -> None:
        worker = self.state
        worker.connected, worker.refusal = True, None
        worker.book.repeat()
        if worker.layout is not None:
            worker.want(events.Send(worker.layout.layout))

    def _register(self, event: events.Registered) -> None:
        worker = self.state
        if not self.may_register:
            raise InvariantViolation(f"{self.me} was given other tensors while {self.buffer}")
        worker.layout = event
        worker.memory.register()
        worker.copies.register(event, next_report=worker.next_report)
        if worker.connected:
            worker.want(events.Send(event.layout))

    # --- reports ------------------------------------------------------------------------------------------------------

    def _report(self) -> None:
        """Say how things are, if that is due."""
        worker = self.state
        worker.slot.raise_watermark(worker.seen)
        report = report_of(worker)
        if worker.connected and (worker.is_urgent or worker.book.is_due(report, now=worker.now)):
            worker.is_urgent = False
            worker.want(events.Send(worker.book.sent(report, now=worker.now)))
