"""Drives a worker's machine: events in from caller, server, data plane and clock, and effects out in order."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, assert_never

from msgspec.structs import replace

from ..memory.host_copies import pinned_bytes
from ..memory.host_memory import MAX_COPIES
from ..protocol.errors import (
    Closed,
    DeadlineExceeded,
    InvariantViolation,
    ServerUnreachable,
    TensorHubError,
    UsageError,
    error_from_code,
)
from ..protocol.events import size_text
from ..protocol.messages import Failure, Filling, Hello, Orders, ReadDone, Refusal, Source, Withdrawing, named
from ..protocol.names import Version
from ..transport import threads
from ..transport.base import Transport
from ..worker.calls import UNANSWERED, how_far
from ..worker.events import (
    Called,
    Cancelled,
    Closing,
    Connected,
    CopyIn,
    CopyOut,
    Delayed,
    DropCopy,
    Effect,
    Event,
    Finished,
    Left,
    OpenRead,
    ReadBarred,
    Received,
    Send,
    StartRead,
    StartServing,
    StopRead,
    StopServing,
    Tick,
    Trust,
    Warn,
)
from ..worker.machine import Worker
from .config import Options
from .connection import START, Connection, ConnectionEvent, unreached
from .dataplane import DataPlane
from .loops import in_thread
from .metrics import CALL, DRAIN, HASH, READ, VERIFY, Record, WorkerPage
from .statistics import Progress, Statistics
from .tile_reads import Covering

_log = logging.getLogger(__name__)


@dataclass
class LastCalls:
    """Seconds of the last fill and of the last publish."""

    update_s: float = 0.0
    transfer_s: float = 0.0
    verify_s: float = 0.0
    publish_s: float = 0.0
    hash_s: float = 0.0

    @contextlib.contextmanager
    def timed(self, verb: str, record: Record) -> Iterator[None]:
        """Measures the call, also where it raises."""
        began, read, checked, hashed = time.monotonic(), record.total(READ), record.total(VERIFY), record.total(HASH)
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            if verb == "publish":
                self.publish_s, self.hash_s = seconds, record.total(HASH) - hashed
            elif verb in ("update", "replicate"):
                self.update_s = seconds
                self.transfer_s, self.verify_s = record.total(READ) - read, record.total(VERIFY) - checked


def replicas_of(sources: Sequence[Source]) -> str:
    """Their names, each once."""
    return ", ".join(dict.fromkeys(source.worker.replica for source in sources))


SAYS_AFTER_S = (5.0, 30.0)  # since it began: what is over by itself is over by the first
EVERY_S = 60.0  # from then on
LOOK_S = 0.5  # so often it is looked at whether the call waits
STILL_S = 1.2  # without a byte, which is measured twice in that time: the call waits
LONG_S = 2.0  # a wait that is told at the end of its call


class LongWait:
    """Of one call, from its beginning until `end`. Used in the worker loop only."""

    def __init__(self, what: str, why: Callable[[], tuple[str, float]]) -> None:
        """`why` is asked for what it waits for, and since when; "" while bytes come."""
        self._what, self._why = what, why
        self._began = time.monotonic()
        self._times = 0  # that its time to say something has come
        self._said = ""
        self._waited_s = 0.0  # before it began to wait this time
        self._since: float | None = None  # when that was
        self._reason = ""  # for which it has waited last
        self._timer: asyncio.TimerHandle | None = None
        self._look_timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)
        self._begin()

    def _look(self) -> None:
        reason, since = self._why()
        if reason:
            self._reason, self._since = reason, since if self._since is None else self._since
        elif self._since is not None:
            self._waited_s, self._since = self._waited_s + time.monotonic() - self._since, None
        self._look_timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    @property
    def text(self) -> str:
        """For how long the call has waited, and for what; empty if that was not long."""
        waited_s = self._waited_s + (time.monotonic() - self._since if self._since is not None else 0.0)
        return f"; waited {waited_s:.1f} s: {self._reason}" if waited_s >= LONG_S else ""

    def _begin(self) -> None:
        beyond = self._times + 1 - len(SAYS_AFTER_S)
        after_s = SAYS_AFTER_S[self._times] if beyond <= 0 else SAYS_AFTER_S[-1] + beyond * EVERY_S
        delay_s = self._began + after_s - time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._remind)

    def _remind(self) -> None:
        self._times += 1
        if self._times > 1:
            self._said = ""  # it still waits for the same, and that was long ago
        self.say(self._why()[0])
        self._begin()

    def say(self, why: str) -> None:
        """Logs what the call waits for, unless that was logged just before by the machine or by the clock here."""
        if why and why != self._said:
            self._said = why
            _log.warning("%s goes on waiting after %.0f s: %s", self._what, time.monotonic() - self._began, why)

    def end(self) -> None:
        """Called when the call is over."""
        self._look_timer.cancel()
        if self._timer is not None:
            self._timer.cancel()


def why_waits(worker: Worker, server: str, why_away: str, now: float) -> str:
    """What its call waits for, as far as the server has said, or that it says nothing; "" if it waits for no other.

    In the order in which an error would name it. `why_away`: what was wrong with the connection, if there is none.
    """
    call, refusal, book = worker.call, worker.refusal, worker.state.book
    if call is None:
        return ""
    if not worker.connected:
        return f"the reference server at {server}: {refusal.message if refusal is not None else why_away}"
    unanswered_s = book.unanswered_s(now)
    if unanswered_s > UNANSWERED * book.every_s:  # what it said before then may no longer be so
        return f"the reference server at {server} has not answered for {unanswered_s:.3g} s"
    if call.answer is None:
        return f"the reference server at {server} has not answered it"
    return call.answer.waiting.message if call.answer.waiting is not None else ""


# A machine that contradicts itself is a defect: its story is logged, each call fails, and this worker stops.


TRANSPORT_CLOSE_S = 5.0  # its threads return at once when cut; a copy from a device may take longer
GOODBYE_S = 0.3  # for the server to hear that an open was given up: twice, an answer and a goodbye
AFTER_DEADLINE_S = 0.5  # a machine that has not ended a call by then has a bug


def failed(failure: Failure | Refusal) -> TensorHubError:
    """The error that a failure on the wire stands for."""
    return error_from_code(failure.code, failure.message, hint=failure.hint or None)


class Driver:
    """Runs one worker from joining to closing."""

    def __init__(
        self,
        hello: Hello,
        options: Options,
        transports: Mapping[str, Transport],
        *,
        why_it_cannot_end: Callable[[], UsageError | None] = lambda: None,
    ) -> None:
        """`why_it_cannot_end` is asked once, of a call that waits long for living shards. Its answer ends the call."""
        self.me = hello.worker
        self.record = Record((self.me.model, self.me.replica, str(self.me.shard)))
        self.last = LastCalls()
        self.read_from = ""  # the replicas of the last read
        self.page: WorkerPage | None = None  # which shows the record
        self._drains_since: float | None = None
        self.data = DataPlane(
            self.me,
            transports,
            verify=options.verify,
            tell=self.feed,
            host_bytes=options.host_bytes,
            chunk_bytes=options.chunk_bytes,
            record=self.record,
        )
        self.data.copies.most = max(MAX_COPIES, options.retain + 1)  # what is retained, and what is established
        self.data.copies.pinned_bytes = options.pinned_bytes
        self.data.tiles.covering = Covering(options, self.me, hello.shards)
        self.worker = Worker(
            self.me,
            received_bytes=self.data.received.by_replica,
            cross_site_bytes=self.data.received.cross_site,
            shards=hello.shards,
            may_work_alone=options.verify != "none" or hello.revocable,
        )
        self.connection = Connection(options.server, hello, self._on_connection)
        self.broken: InvariantViolation | None = None
        self.is_gone = False
        self._loop = asyncio.get_running_loop()
        self._life: asyncio.Task[None] | None = None
        self._end: asyncio.Task[None] | None = None
        self._answered: asyncio.Future[Refusal | None] = self._loop.create_future()
        self._why_it_cannot_end = why_it_cannot_end
        self._finished: asyncio.Future[Finished] | None = None
        self._waits: LongWait | None = None
        self._moved: tuple[object, float] = None, 0.0  # how far the call has come, and since when
        self._left: asyncio.Future[bool] = self._loop.create_future()
        self._source = ""  # of the last read, for the log
        self._timer: asyncio.TimerHandle | None = None
        self._awaited: dict[asyncio.Future[None], Callable[[], bool]] = {}

    # --- what callers want --------------------------------------------------------------------------------------------

    async def start(self, deadline: float) -> None:
        """Connect, and wait until the server has named a session or refused. Leaves nothing behind on an error."""
        self._life = self._loop.create_task(self.connection.run())
        self._life.add_done_callback(self._line_ended)
        try:
            refusal = await self._first_answer(deadline)
            if refusal is not None:
                raise failed(refusal)
        except BaseException:
            await self._unjoin()
            raise

    async def _unjoin(self) -> None:
        """Its caller gave up: a session that the server makes ends now, and not by its lease."""
        if self.connection.is_connected and not self._answered.done():
            await asyncio.wait([self._answered], timeout=GOODBYE_S)
        if self.worker.session and self.broken is None:
            await self.leave(time.monotonic() + GOODBYE_S)
        else:
            await self.end(time.monotonic())

    async def _first_answer(self, deadline: float) -> Refusal | None:
        began = time.monotonic()
        try:
            async with asyncio.timeout_at(deadline):
                return await asyncio.shield(self._answered)  # who is cancelled still wants to know it: see `_unjoin`
        except TimeoutError as error:
            if self.worker.refusal is not None:
                raise failed(self.worker.refusal) from error
            patience_s = round(deadline - began, 1) or 0.1  # as it was asked for: 1 s, not 0.997 s
            hint = f"{START}, or name another with server= or TENSORHUB_SERVER"
            within = f" within {patience_s:g} s"
            text, hint = unreached(self.connection.address, self.connection.why, hint=hint, within=within)
            raise ServerUnreachable(f"{self.me}: {text}", hint=hint) from error

    async def call(self, called: Called) -> Version | None:
        """One call, from here to its end. Cancelling it tells the machine so. `Closed` once the worker has gone."""
        self._check_here()
        ended: asyncio.Future[Finished] = self._loop.create_future()
        self._finished = ended
        self._waits = waits = LongWait(f"{called.verb} of {self.me}", self._waits_for)
        began, before = self._loop.time(), self.worker.state.slot.done
        try:
            self.data.errors.clear()
            self.feed(called)
            await asyncio.wait((ended,), timeout=called.deadline + AFTER_DEADLINE_S - self._loop.time())
            if not ended.done():  # this process did not run for a while: the machine may not have been told the time
                self.feed(Tick())
            if not ended.done():
                self._break(InvariantViolation(f"{self.me}: {called.verb} did not end by its deadline"))
            finished = ended.result()
            if finished.error is None:
                self._log_call(called, finished.version, self._loop.time() - began, before)
        except (asyncio.CancelledError, UsageError):
            self.feed(Cancelled())
            raise
        finally:
            self._finished = self._waits = None
            waits.end()
        if finished.error is not None:
            raise self._own(finished.error) or failed(self._with_circumstances(finished.error))
        return finished.version

    def _own(self, failure: Failure) -> TensorHubError | None:
        """The error by which a read or a copy of this worker has ended the call: with its hint, and with its cause."""
        error = self.data.errors.pop(failure.code, None)
        if error is not None and failure.message != str(error):
            error.add_note(failure.message)  # of which version, and from which source
        return error

    def _waits_for(self) -> tuple[str, float]:
        """What the call waits for, and since when; empty while it goes on."""
        now, worker = time.monotonic(), self.worker
        why = why_waits(worker, self.connection.address, self.connection.why, now)
        call, place = worker.call, (worker.reading, worker.buffer)
        if place != self._moved[0]:
            self._moved = place, now
        if why or call is None or worker.state.copies.copying is not None or now - self._moved[1] < STILL_S:
            return why, now
        return "; ".join(how_far(worker.state, call)), self._moved[1]

    def _log_call(self, called: Called, version: Version | None, took_s: float, before: ReadDone | None) -> None:
        """Logs the end of a call that has succeeded: one line."""
        waited, done = self._waits.text if self._waits is not None else "", self.worker.state.slot.done
        level = logging.INFO
        if called.verb == "publish":
            text = f"published version {version} in {called.hash_s + took_s:.2f} s, hashed in {called.hash_s:.2f} s"
        elif called.verb == "unpublish":
            text, level = f"unpublished in {took_s:.2f} s", logging.INFO if waited else logging.DEBUG
        elif done is not None and done is not before:
            rate = f"{size_text(done.arrived_bytes / max(done.seconds, 1e-9))}/s"
            text = f"updated to version {version} in {took_s:.2f} s: {size_text(done.arrived_bytes)} at {rate}"
            text = f"{text} from {self._source}" + (f" by {done.transport}" if done.transport else "")
        else:
            text = f"holds version {version} after {took_s:.2f} s, and has read nothing for it"
        _log.log(level, "%s %s%s", self.me, text, waited)

    def check(self, called: Called) -> None:
        """Raises what the caller does wrong. Where it is for what is in the tensors, the siblings hear of it."""
        wrong = self.worker.why_not_begin(called)
        if wrong is not None:
            self.missed(called, wrong)
            raise failed(wrong)

    def miss(self, called: Called, why: BaseException) -> None:
        """The call has failed before the machine heard of it. It counts, as the siblings' calls do."""
        if not isinstance(why, TensorHubError):
            why = TensorHubError(str(why) or type(why).__name__)
        self.missed(called, Failure.of(why))

    def missed(self, called: Called, why: Failure) -> None:
        """The same, where it is known what to say."""
        event = Called(called.verb, called.spec, self._loop.time(), missed=why.bounded())
        if self.broken is None and self.worker.why_not_begin(event) is None:  # else another call would hear the refusal
            self.feed(event)

    def _with_circumstances(self, failure: Failure) -> Failure:
        """Adds to the error what only this process knows of the timeout."""
        if failure.code != DeadlineExceeded.code:
            return failure
        shortage, remedy = threads.recent()
        known = (self.connection.why if not self.connection.is_connected else "", shortage)
        return replace(failure, message="; ".join([failure.message, *filter(None, known)]), hint=remedy or failure.hint)

    @property
    def progress(self) -> Progress | None:
        """How far the fill of the tensors is; None if there is none. Any thread may ask."""
        buffer, reading, registration = self.worker.buffer, self.worker.reading, self.data.registration
        if not isinstance(buffer, Filling) or registration is None:
            return None
        total = registration.size_bytes
        done = total * buffer.done // buffer.chunks if buffer.chunks else 0
        if reading is None or reading.to_host:
            return Progress(buffer.version, done, total, "", 0)
        arrived = min(total, reading.arrived_bytes)  # of chunks under way too
        return Progress(
            buffer.version, max(done, arrived), total, replicas_of(reading.sources), reading.rate_bytes_per_s
        )

    def statistics(self) -> Statistics:
        """Figures of this worker's life."""
        data, copies, record = self.data.statistics(), self.data.copies, self.record
        machine = self.worker.statistics()
        return {
            "reports": machine["reports"],
            "unacknowledged": machine["unacknowledged"],
            "received_bytes": machine["received_bytes"],
            "bytes_by_source": dict(self.data.received.by_replica),
            "bytes_by_transport": dict(self.data.received.by_transport),
            "sent_bytes": data.get("sent_bytes", 0),
            "host_bytes": copies.used_bytes,
            "host_bytes_limit": copies.limit_bytes,
            "pinned_bytes": pinned_bytes(),  # of this process
            "why_pageable": copies.why_pageable,
            "offloaded_bytes": copies.offloaded_bytes,
            "connects": self.connection.connects,
            "is_connected": self.connection.is_connected,
            "transport": data,
            "update_s": self.last.update_s,
            "update_transfer_s": self.last.transfer_s,
            "update_verify_s": self.last.verify_s,
            "publish_s": self.last.publish_s,
            "publish_hash_s": self.last.hash_s,
            "total_update_s": record.total(CALL, "update") + record.total(CALL, "replicate"),
            "total_transfer_s": record.total(READ),
            "total_verify_s": record.total(VERIFY),
            "total_publish_s": record.total(CALL, "publish"),
            "total_hash_s": record.total(HASH),
            "total_drain_s": record.total(DRAIN),
        }

    async def until(self, is_true: Callable[[], bool], deadline: float) -> bool:
        """Wait until something is so of the machine, or the deadline; returns whether it is. `Closed` as of `call`."""
        self._check_here()
        future: asyncio.Future[None] = self._loop.create_future()
        self._awaited[future] = is_true
        try:
            if not is_true():
                async with asyncio.timeout_at(deadline):
                    await future
        except TimeoutError:
            return is_true()
        finally:
            del self._awaited[future]
        return True

    async def leave(self, deadline: float) -> bool:
        """Withdraw, wait for readers, go. Returns whether all had left by themselves; ends by the deadline."""
        self.feed(Closing(deadline))
        is_drained = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline + AFTER_DEADLINE_S / 2):
                is_drained = self.broken is None and await self._left
        await self.end(deadline)
        return is_drained

    async def end(self, deadline: float) -> None:
        """Cuts the connection, the clock and the transports. Afterwards no thread touches the registered memory."""
        self.is_gone = True
        _fail(self._gone(), self._finished, *self._awaited)  # the machine hears of nothing any more
        if self._timer is not None:
            self._timer.cancel()
        if self.page is not None:
            await self.page.leave(self)
        if self._life is not None:
            self._life.cancel()
            await asyncio.wait([self._life], timeout=AFTER_DEADLINE_S)
        patience_s = min(TRANSPORT_CLOSE_S, max(0.0, deadline - time.monotonic()) + AFTER_DEADLINE_S)
        try:
            async with asyncio.timeout(patience_s):
                await in_thread(self.data.close, name="close", otherwise="here")
        except TimeoutError:
            _log.warning("%s: its transports have not ended after %.1f s", self.me, patience_s)
        else:
            data = self.data  # from now on the tensors are the caller's alone, and host memory is free
            data.registration = data.content = data.incoming = data.vacated = None
            data.tiles.let_go()
            data.copies.let_go()

    def _gone(self) -> Closed | InvariantViolation:
        return self.broken or Closed(f"{self.me} was closed", hint="open it again")

    def _check_here(self) -> None:
        """The machine hears of what is asked now, and so its caller is answered."""
        if self.is_gone or self.broken is not None:
            raise self._gone()

    # --- the machine --------------------------------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        """Hand the machine one event and carry out what it wants."""
        if self.is_gone:
            return
        try:
            barred: list[ReadBarred] = []
            for effect in self.worker.handle(event, now=time.monotonic()):
                if isinstance(effect, StopRead):
                    barred.append(ReadBarred(effect.ticket, self.data.stop_read(effect.ticket)))
                else:
                    self._carry_out(effect)
            self.worker.check_invariants()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is our bug and ends this worker
            self._break(error)
            return
        for answer in barred:
            self.feed(answer)
        self._time_drain()
        self._set_timer()
        for future, is_true in list(self._awaited.items()):
            if is_true() and not future.done():
                future.set_result(None)

    def _time_drain(self) -> None:
        """A drain lasts as long as the buffer is withdrawing."""
        is_draining, began = isinstance(self.worker.buffer, Withdrawing), self._drains_since
        if is_draining and began is None:
            self._drains_since = time.monotonic()
        elif not is_draining and began is not None:
            self.record.observe(DRAIN, time.monotonic() - began)
            self._drains_since = None

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Send(message=message):
                self.connection.send(message)
            case OpenRead(grant=grant):
                _log.debug("%s opens version %d at %s: %s", self.me, grant.version, named(grant.sources), grant.reason)
                self.data.open_read(grant)
            case StartRead(grant=grant):
                self._source = named(grant.sources)
                _log.debug("%s reads version %d from %s: %s", self.me, grant.version, self._source, grant.reason)
                self.read_from = replicas_of(grant.sources)
                self.data.start_read(grant)
            case Trust(until=until):
                self.data.trust(until)
            case StartServing(version=version, root=root):
                self.data.start_serving(version, root)
            case StopServing(version=version):
                self.data.stop_serving(version)
            case CopyOut(version=version, is_ahead=is_ahead):
                self.data.copy_to_host(version, is_ahead=is_ahead)
            case CopyIn(version=version):
                self.data.copy_in(version)
            case DropCopy(version=version):
                self.data.copies.drop(version)
            case StopRead():
                raise InvariantViolation("the answer to it comes at once: see feed()")
            case Warn(text=text):
                _log.warning("%s", text)
            case Finished():
                if self._finished is not None and not self._finished.done():
                    self._finished.set_result(effect)
            case Delayed(why=why):
                if self._waits is not None:
                    self._waits.say(why.message)
                wrong = self._why_it_cannot_end()
                if wrong is not None and self._finished is not None and not self._finished.done():
                    self._finished.set_exception(wrong)
            case Left(drained=is_drained):
                if not self._left.done():
                    self._left.set_result(is_drained)
            case _:
                assert_never(effect)

    def _set_timer(self) -> None:
        deadline = self.worker.next_deadline()
        if self._timer is not None:
            if self._timer.when() == deadline and not self._timer.cancelled():
                return
            self._timer.cancel()
        self._timer = None if deadline == inf else self._loop.call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.feed(Tick())

    def _on_connection(self, event: ConnectionEvent) -> None:
        self.feed(event)
        if self._answered.done():
            return
        match event:
            case Received(message=Orders()):
                self._answered.set_result(None)
            case Received(message=Refusal() as refusal) if refusal.retry_s <= 0:
                self._answered.set_result(refusal)
            case Connected():
                _log.debug("%s: connected to %s", self.me, self.connection.address)

    def _break(self, error: Exception) -> None:
        """Our bug: tell the story, fail every call, stop."""
        if self.broken is not None:
            return
        story = "\n".join(f"  {at:.3f} {what}" for at, what in self.worker.story())
        _log.critical("%s stops: %r; what happened to it:\n%s", self.me, error, story, exc_info=error)
        self.broken = error if isinstance(error, InvariantViolation) else InvariantViolation(f"{self.me}: {error!r}")
        self.broken.__cause__ = error if error is not self.broken else None
        _fail(self.broken, self._finished, self._left, self._answered, *self._awaited)
        if not self.is_gone:
            self._end = self._loop.create_task(self.end(time.monotonic()))

    def _line_ended(self, life: asyncio.Task[None]) -> None:
        error = None if life.cancelled() else life.exception()
        if isinstance(error, Exception):
            self._break(error)


def _fail(error: Closed | InvariantViolation, *futures: "asyncio.Future[Any] | None") -> None:
    """Fails all waiting calls with the error."""
    for future in futures:
        if future is not None and not future.done():
            future.set_exception(error)
            future.exception()  # looked at: no task needs to await it
