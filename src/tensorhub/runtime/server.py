"""The reference server's shell: sockets and a clock around the machine that decides."""

import asyncio
import contextlib
import hmac
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Protocol

from aiohttp import WSCloseCode, WSMsgType, web
from aiohttp.typedefs import Handler

from ..protocol.messages import (
    MAX_LAYOUT_BYTES,
    PROTOCOL,
    Hello,
    LayoutInfo,
    LayoutWanted,
    Orders,
    Refusal,
    Report,
    ToServer,
    ToWorker,
    named,
)
from ..protocol.names import Digest, Ticket
from ..protocol.settings import Settings
from ..protocol.status import Status
from ..server import Server
from . import standby
from .admission import Accepted, Descriptors, Names, UnknownClient, UnknownClients
from .answers import Answers, Shown
from .config import OTHER_HOST
from .connection import Malformed, OddNumber, decode_to_server, encode
from .dashboard import Dashboard
from .event_log import EventLog, UncheckedRefusals
from .journal import JournalFile
from .metrics import LOOP_LAG, REFUSALS, server_record, server_sheet, take, targets, watch_loop

# Only the newest orders wait to be sent: a worker that does not read costs one message, and is cut after a while.


_log = logging.getLogger(__name__)

CLOSE_S = 1.0  # for the other side's goodbye


class WorkerSocket:
    """A connection. `sender` is its name towards the machine."""

    def __init__(self, sender: str, websocket: web.WebSocketResponse, request: web.Request) -> None:
        self.sender = sender
        self.name = "a client without a hello"
        self.address = ""  # of the client
        self.websocket = websocket
        self.has_said_hello = False
        self.is_cut = False
        self.opened_at = self.heard_at = time.monotonic()
        self.sending_since = inf
        self.logged_ticket = Ticket(0)
        self._transport = request.transport
        self._orders: Orders | None = None
        self._refusal: Refusal | None = None
        self._wanted: LayoutWanted | None = None
        self._has_mail = asyncio.Event()

    @property
    def is_refused(self) -> bool:
        return self._refusal is not None

    def post(self, message: ToWorker) -> None:
        """Send it soon. After a refusal nothing more is sent, and the connection is closed."""
        if self._refusal is not None:
            return
        if isinstance(message, Refusal):
            self._refusal = message
        else:
            self._orders = message
        self._has_mail.set()

    def ask(self, layout: Digest) -> None:
        """Asks the worker for the layout that its newest report names."""
        self._wanted = LayoutWanted(layout)
        self._has_mail.set()

    async def write(self) -> None:
        """Send what is posted, until the connection ends or was refused."""
        with contextlib.suppress(OSError, RuntimeError):  # it is closing: its reader sees that
            while True:
                await self._has_mail.wait()
                self._has_mail.clear()
                orders, self._orders = self._orders, None
                wanted, self._wanted = self._wanted, None
                self.sending_since = time.monotonic()
                if self._refusal is not None:
                    await self.websocket.send_bytes(encode(self._refusal))
                    await self.websocket.close(code=WSCloseCode.POLICY_VIOLATION)
                    return
                for message in (orders, wanted):
                    if message is not None:
                        await self.websocket.send_bytes(encode(message))
                self.sending_since = inf

    async def say_goodbye(self) -> None:
        """The server stops: tell the worker, so that it looks for the next one at once."""
        with contextlib.suppress(OSError, RuntimeError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.websocket.close(code=WSCloseCode.GOING_AWAY)

    def note_end(self, writer: "asyncio.Task[None]") -> None:
        """The writer has ended. If the connection has not, that is our bug: it is logged, and the connection is cut."""
        if not writer.cancelled() and (error := writer.exception()) is not None:
            _log.error("the connection to %s ends: %r", self.name, error, exc_info=error)
            self.cut()

    def forget_failure(self) -> None:
        """What ended it knows the websocket, which knows it: without this circle all that it holds goes at once."""
        error = self.websocket.exception()
        if error is not None:
            error.__traceback__ = None

    def cut(self) -> None:
        """Close the connection without a message."""
        self.is_cut = True
        if self._transport is not None:
            self._transport.abort()


# Of each worker only the newest report waits. It is handled as of when it came (`now`), in the order in which
# connections began to wait. So no lease ends while a report waits here.


SLICE_S = 0.002  # at a stretch: an update's decisions take up to that, and a turn of the loop 20 µs


class Decider(Protocol):
    """Who handles what has come, at the time when it came."""

    def decide(self, socket: WorkerSocket, message: ToServer, *, now: float, arrived: float) -> None:
        """Handle one message."""

    def end(self, socket: WorkerSocket, *, now: float) -> None:
        """The connection has ended, and all of its messages were handled."""

    def rest(self) -> None:
        """Called when no message waits any more."""


class Inbox:
    """Messages of one connection that are not handled yet: the newest of each kind."""

    def __init__(self, now: float) -> None:
        self.first_at = self.last_at = now  # when the first and the last of it came
        self.hello: Hello | None = None
        self.layout: LayoutInfo | None = None
        self.report: Report | None = None
        self.is_over = False  # the connection has ended

    def put(self, message: ToServer, now: float) -> None:
        self.last_at = now
        match message:
            case Hello():
                self.hello = message
            case LayoutInfo():
                self.layout = message
            case Report():
                self.report = message

    def messages(self) -> list[ToServer]:
        """Returns the messages in order: a report may need the layout that came before it, never the reverse."""
        return [message for message in (self.hello, self.layout, self.report) if message is not None]


class Intake:
    """The queue of connections with messages, and the task that empties it."""

    def __init__(self, decider: Decider, clock: Callable[[], float] = time.monotonic) -> None:
        self._decider = decider
        self._clock = clock
        self._waiting: deque[tuple[WorkerSocket, Inbox]] = deque()
        self._inboxes: dict[str, Inbox] = {}  # of the connections in the queue, by sender
        self._has_mail = asyncio.Event()
        self.replaced = 0  # reports in whose place a newer one was handled

    @property
    def is_busy(self) -> bool:
        """Something waits."""
        return bool(self._waiting)

    @property
    def now(self) -> float:
        """The time up to which all that came has been handled: the machine's."""
        return self._waiting[0][1].first_at if self._waiting else self._clock()

    def put(self, socket: WorkerSocket, message: ToServer) -> None:
        """The connection has brought this message."""
        inbox = self._inbox(socket)
        self.replaced += isinstance(message, Report) and inbox.report is not None
        inbox.put(message, self._clock())

    def put_back(self, socket: WorkerSocket, report: Report) -> None:
        """An earlier report can be handled now, unless a newer one has come."""
        inbox = self._inbox(socket)
        inbox.report = inbox.report or report

    def end(self, socket: WorkerSocket) -> None:
        """The connection has ended. Its earlier messages count."""
        self._inbox(socket).is_over = True

    def _inbox(self, socket: WorkerSocket) -> Inbox:
        inbox = self._inboxes.get(socket.sender)
        if inbox is None:
            inbox = self._inboxes[socket.sender] = Inbox(self._clock())
            self._waiting.append((socket, inbox))
            self._has_mail.set()
        return inbox

    async def run(self) -> None:
        """Runs until it is cancelled: decides for a slice of time, then lets other tasks run."""
        while True:
            await self._has_mail.wait()
            self._has_mail.clear()
            while self._waiting:
                self._decide_for(SLICE_S)
                await asyncio.sleep(0)
            self._decider.rest()

    def _decide_for(self, seconds: float) -> None:
        until = self._clock() + seconds
        while self._waiting:
            self._take_first()
            if self._clock() >= until:
                return

    def _take_first(self) -> None:
        socket, inbox = self._waiting.popleft()
        del self._inboxes[socket.sender]
        for message in inbox.messages():
            if not socket.is_refused:
                self._decider.decide(socket, message, now=inbox.first_at, arrived=inbox.last_at)
        if inbox.is_over:
            self._decider.end(socket, now=inbox.first_at)


# Reports with an unknown layout wait until a worker sends that layout: ten thousand tensors take a megabyte, so of
# all the workers that wait for one layout, one is asked at a time. After a while their reports are let through: a
# decision needs the digest alone, and a report that waits does not prolong a lease.


ASK_AGAIN_S = 0.5  # a megabyte takes 0.1 s on a link of 100 Mbit/s
WANTS_TOKEN = """this server has another token than the one shown, or wants one and none was shown
hint: the header is "Authorization: Bearer TOKEN"; the token is in the file `token` of the server's state directory
"""
MAX_ASK_AGAIN_S = 8.0  # it doubles up to here: 16 MiB across a slow link take long, and from all workers longer


@dataclass
class _Waiting:
    socket: WorkerSocket
    report: Report | None = None  # the newest; None: it was let through
    is_asked: bool = False


class _Queue:
    """Those who name one layout, the first first."""

    def __init__(self, layout: Digest) -> None:
        self.layout = layout
        self.waiting: dict[str, _Waiting] = {}  # by sender
        self.is_overdue = False
        self.pause_s = ASK_AGAIN_S
        self.next_ask: asyncio.TimerHandle | None = None
        self.overdue: asyncio.TimerHandle | None = None

    def ask(self) -> None:
        """Ask the first who was not asked yet, and the next one if that takes long."""
        if self.next_ask is not None:
            self.next_ask.cancel()
            self.next_ask = None
        first = next((each for each in self.waiting.values() if not each.is_asked), None)
        if first is None:
            return
        first.is_asked = True
        first.socket.ask(self.layout)
        self.next_ask = asyncio.get_running_loop().call_later(self.pause_s, self.ask)
        self.pause_s = min(2 * self.pause_s, MAX_ASK_AGAIN_S)

    def end(self) -> None:
        for timer in (self.next_ask, self.overdue):
            if timer is not None:
                timer.cancel()


class UnknownLayouts:
    """The queues. `is_known` is asked of each report's layout: it must be quick.

    What has waited for `patience_s` is given to `let_through`, and comes back to `holds`, which then lets it pass.
    """

    def __init__(
        self,
        is_known: Callable[[Digest], bool],
        let_through: Callable[[WorkerSocket, Report], None],
        *,
        patience_s: float,
    ) -> None:
        self._is_known = is_known
        self._let_through = let_through
        self._patience_s = patience_s
        self._queues: dict[Digest, _Queue] = {}
        self._waits_for: dict[str, Digest] = {}  # by sender

    def holds(self, socket: WorkerSocket, report: Report) -> bool:
        """Whether the report waits here now. An earlier report of its connection is dropped either way."""
        layout = report.layout
        if not layout or self._is_known(layout):
            if self._waits_for:
                self.take(socket)
            return False
        if self._waits_for.get(socket.sender) != layout:
            self.take(socket)
            self._waits_for[socket.sender] = layout
        queue = self._queues.get(layout) or self._begin(layout)
        waiting = queue.waiting.setdefault(socket.sender, _Waiting(socket))
        waiting.report = None if queue.is_overdue else report
        if queue.next_ask is None:
            queue.ask()
        return not queue.is_overdue

    def take(self, socket: WorkerSocket) -> Report | None:
        """Takes out the report of this connection that waits here, if any."""
        layout = self._waits_for.pop(socket.sender, None)
        if layout is None:
            return None
        queue = self._queues[layout]
        gone = queue.waiting.pop(socket.sender)
        if not queue.waiting:
            queue.end()
            del self._queues[layout]
        elif gone.is_asked:
            queue.ask()  # the others need not wait for who has gone
        return gone.report

    def came(self, layout: Digest) -> None:
        """This layout is known: the reports that wait for it are let through, in their order."""
        queue = self._queues.pop(layout, None)
        if queue is None:
            return
        queue.end()
        for sender in queue.waiting:
            del self._waits_for[sender]
        self._release(queue)

    def _begin(self, layout: Digest) -> _Queue:
        queue = self._queues[layout] = _Queue(layout)
        queue.overdue = asyncio.get_running_loop().call_later(self._patience_s, self._give_up, queue)
        return queue

    def _give_up(self, queue: _Queue) -> None:
        queue.is_overdue = True
        self._release(queue)

    def _release(self, queue: _Queue) -> None:
        for each in queue.waiting.values():
            report, each.report = each.report, None
            if report is not None:
                self._let_through(each.socket, report)


# The machine's time is the time up to which all that came was handled.


HELLO_S = 5.0  # from the connection to its first request, and from there to a worker's first message
HURRY_S = 0.5  # the same, and from one request to the next, where descriptors are short: workers say hello at once
STUCK_S = 5.0  # a worker that takes nothing for that long is cut, and an asker that takes next to nothing
SWEEP_S = 1.0  # how often that is looked at
SPARE_CONNECTIONS = 256  # beyond max_workers: those that reconnect before the old connection was seen to end
ODD_RETRY_S = 1.0  # a worker whose report had an odd number may be back with its next one
EARLY_S = 0.001  # timers of some loops have a resolution of 1 ms and may come before their time


class ServerShell:
    """The aiohttp application, and what connects it to the machine."""

    def __init__(
        self,
        *,
        settings: Settings,
        token: str = "",
        names: Iterable[str] = (),
        fresh: bool = False,
        journal: JournalFile | None = None,
        first: standby.First | None = None,
    ) -> None:
        """`journal`: None where it is to keep none. What a `fresh` one finds there is overwritten.

        `first`: the server that it took over from, which may still be there.
        """
        now, self._journal, self._first = time.monotonic(), journal, first
        history = journal.history(max_versions=settings.max_versions) if journal is not None and not fresh else None
        boot = journal.boot if journal is not None else ""
        self.machine = Server(settings, now, time.time_ns() // 1000, fresh=fresh, history=history, boot=boot)
        self._write_journal()
        self.settings = settings
        self.failure: Exception | None = None
        self.on_failure = asyncio.Event()
        self._token = token.encode()
        self.names = Names(names)
        self.intake = Intake(self)
        self._unknown = UnknownLayouts(
            lambda layout: layout in self.machine.state.layouts, self.intake.put_back, patience_s=settings.lease_s / 4
        )
        self._sockets: dict[str, WorkerSocket] = {}
        self._unknown_clients = UnknownClients()
        self._opened = 0
        self._timer: asyncio.Handle | None = None
        self._timer_at = inf  # by the loop's clock; uvloop's handle of a timer that is due at once does not know it
        self._is_stopping = False
        self.events = EventLog(self.machine.state.numbers.first)
        self._unchecked = UncheckedRefusals(self.events)
        self._answers = Answers(self.machine, self._authorise, self._tick, self.events)
        self._shown = Shown(self.machine, lambda: self.intake.now)
        self.record = server_record()
        self.accepted = Accepted(time.monotonic)
        self.life = self.machine.state.numbers.first
        self._dashboard = Dashboard(
            *(self.machine, lambda: self.intake.now, self.events, self.accepted, self._authorise),
            wants_token=bool(token),
        )

    def application(self) -> web.Application:
        app = web.Application(client_max_size=64 * 1024, middlewares=[self.accepted.note, self._part])
        app.router.add_get("/v1/session", self._session)
        app.router.add_get("/v1/status", self._status)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/targets", self._targets)
        self._answers.add_to(app)
        self._dashboard.add_to(app)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get(standby.PATH, self._show_journal)
        app.cleanup_ctx.append(self._running)
        app.on_shutdown.append(self._shutdown)
        return app

    # --- the machine --------------------------------------------------------------------------------------------------

    def _deliver(self, outbox: list[tuple[str, ToWorker]]) -> None:
        """Send what the machine wants sent, and be back when it wants to be asked again."""
        self._write_journal()
        take(self.record, self.machine.state)
        self.events.take_from(self.machine.state.events)
        for sender, message in outbox:
            socket = self._sockets.get(sender)
            if socket is not None:
                self._post(socket, message)
                if isinstance(message, Orders):
                    self._log_grants(socket, message)
        self._set_timer()
        self._answers.polls.note()

    def _post(self, socket: WorkerSocket, message: ToWorker) -> None:
        if isinstance(message, Refusal) and not socket.is_refused:
            self.record.add(REFUSALS, 1)
        socket.post(message)

    def _write_journal(self) -> None:
        records, is_whole = self.machine.to_journal()
        if self._journal is None or not records:
            return
        if not is_whole and self._journal.is_long:
            records, is_whole = self.machine.whole_journal(), True
        self._journal.write(records, is_whole=is_whole)

    def _set_timer(self) -> None:
        if self.intake.is_busy:
            return  # its time does not pass but with what it hears; `rest` comes after that
        deadline = self.machine.next_deadline()
        loop = asyncio.get_running_loop()
        delay_s = deadline - time.monotonic() + EARLY_S
        at = loop.time() + delay_s
        if self._timer is not None:
            if self._timer_at <= at:
                return  # it comes early enough; then it is set anew
            self._timer.cancel()
        self._timer = loop.call_later(max(0.0, delay_s), self._tick) if delay_s < 1e9 else None
        self._timer_at = at

    def decide(self, socket: WorkerSocket, message: ToServer, *, now: float, arrived: float) -> None:
        """The intake's turn: what a worker has said is handled, a report once its layout is known."""
        if isinstance(message, Report) and self._unknown.holds(socket, message):
            return
        self._handle(socket, message, now=now, arrived=arrived)
        if isinstance(message, LayoutInfo):
            self._unknown.came(message.digest())

    def _handle(self, socket: WorkerSocket, message: ToServer, *, now: float, arrived: float) -> None:
        try:
            self._deliver(self.machine.handle(message, sender=socket.sender, now=now, arrived=arrived))
        except AssertionError as error:  # an invariant: this server stops, the next one starts from reports
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - what this worker said is more than we understand: not to be repeated
            _log.exception("%s said %.500r", socket.name, message)
            self._post(socket, _malformed(f"{type(message).__name__} made no sense: {error!r}"))

    def end(self, socket: WorkerSocket, *, now: float) -> None:
        """The intake's turn: a connection has ended. Its last report counts, though its layout is unknown."""
        held = self._unknown.take(socket)
        if held is not None and not socket.is_refused:
            self._handle(socket, held, now=now, arrived=now)
        try:
            self._deliver(self.machine.disconnected(socket.sender, now=now))
        except Exception as error:  # noqa: BLE001 - our bug: this server stops, the next one starts from reports
            self._fail(error)

    def rest(self) -> None:
        """Called when no message waits: the timer is set again."""
        self._set_timer()

    def _tick(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            self._deliver(self.machine.tick(now=self.intake.now))
        except Exception as error:  # noqa: BLE001 - our bug: this server stops, the next one starts from reports
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        _log.critical("the reference server contradicts itself and stops: %r", error, exc_info=error)
        self.failure = error
        self.on_failure.set()

    def _log_grants(self, socket: WorkerSocket, orders: Orders) -> None:
        grant = orders.grant
        if grant is not None and grant.ticket > socket.logged_ticket:
            whence = named(grant.sources)
            _log.debug("%s is to read version %d from %s: %s", socket.name, grant.version, whence, grant.reason)
            socket.logged_ticket = grant.ticket

    # --- workers ------------------------------------------------------------------------------------------------------

    async def _session(self, request: web.Request) -> web.StreamResponse:
        if self._is_stopping:
            return web.Response(status=503, text="the server stops\n")
        if len(self._sockets) >= self.settings.max_workers + SPARE_CONNECTIONS:
            oldest = next((each for each in self._sockets.values() if not (each.has_said_hello or each.is_cut)), None)
            if oldest is None:
                return web.Response(status=507, text="no room for another connection\n")
            oldest.cut()
        websocket = web.WebSocketResponse(max_msg_size=MAX_LAYOUT_BYTES, compress=False, timeout=1.0)
        self._opened += 1
        socket = WorkerSocket(f"socket-{self._opened}", websocket, request)
        unknown = UnknownClient(
            self._unknown_clients, request, partial(self._post, socket, _malformed("too much before any Hello"))
        )
        self._sockets[socket.sender], socket.address = socket, request.remote or ""
        try:
            if unknown.has_said_too_much:
                return web.Response(status=413, text="too much before any answer\n", headers={"Connection": "close"})
            await websocket.prepare(request)
            self.accepted.release(request)
            await self._converse(socket, unknown)
        finally:
            unknown.leave()
            socket.forget_failure()
            self.accepted.keep(request)  # until it has taken what it was sent last
            del self._sockets[socket.sender]
            if socket.has_said_hello and not self._is_stopping:
                self.intake.end(socket)
        return websocket

    async def _converse(self, socket: WorkerSocket, unknown: UnknownClient) -> None:
        """Until the connection ends. Not in a `TaskGroup`: before Python 3.13 it and its cancellation refer to each
        other, and keep all that was sent until the collector runs, which is seldom."""
        writer = asyncio.create_task(socket.write())
        writer.add_done_callback(socket.note_end)
        try:
            await self._listen(socket, unknown)
            if socket.is_refused:
                await writer
        finally:
            writer.cancel()

    async def _listen(self, socket: WorkerSocket, unknown: UnknownClient) -> None:
        """Hand on messages until the connection ends."""
        async for frame in socket.websocket:
            socket.heard_at = time.monotonic()
            if socket.is_refused:
                continue  # the writer is about to close it
            if frame.type is WSMsgType.ERROR:
                return  # too long, or no frame at all: aiohttp has said so and closes
            if frame.type is not WSMsgType.BINARY:
                self._post(socket, _malformed("a text frame"))
                continue
            try:
                message = decode_to_server(frame.data, is_known=socket.has_said_hello)
            except Malformed as error:
                self._post(socket, _malformed(str(error), retry_s=ODD_RETRY_S if isinstance(error, OddNumber) else 0.0))
                continue
            refusal = self._why_refuse(socket, message) if isinstance(message, Hello) else None
            if refusal is not None and isinstance(message, Hello):
                self._unchecked.add(socket.address, message, refusal.message)
                self._answers.polls.note()
            if refusal is None and not isinstance(message, Hello) and not socket.has_said_hello:
                refusal = _malformed(f"a {type(message).__name__} before any Hello")
            if refusal is not None:
                self._post(socket, refusal)
                continue
            if not socket.has_said_hello:
                socket.has_said_hello = True
                unknown.leave()
            self.intake.put(socket, message)

    def _why_refuse(self, socket: WorkerSocket, hello: Hello) -> Refusal | None:
        if socket.has_said_hello:
            return _malformed("a second Hello")
        if hello.protocol != PROTOCOL:
            text = f"this server speaks {PROTOCOL}, the worker speaks {hello.protocol[:40]!r}"
            return Refusal("refused", text, "install the same TensorHub on both sides")
        if self._token and not hmac.compare_digest(hello.token.encode(), self._token):
            text = "the server has another token" if hello.token else "the server wants a token, and none was given"
            return Refusal("refused", text, OTHER_HOST)
        if hello.token and not self._token:  # its user believes that the token keeps other clients out
            text = "this worker has a token, and the server was started without one: it lets any client in"
            hint = "start the server without --insecure; or open with insecure=True (TENSORHUB_INSECURE=1)"
            return Refusal("refused", text, hint)
        socket.name = str(hello.worker)
        return None

    async def _sweep(self) -> None:
        """Cuts connections without a hello, silent ones, and ones that take nothing; also those of other clients."""
        descriptors = Descriptors()
        silent_s = max(3 * self.settings.lease_s, HELLO_S)
        now = time.monotonic()
        while True:
            await asyncio.sleep(SWEEP_S)
            before, now = now, time.monotonic()
            if now - before > 2 * SWEEP_S:
                continue  # this process stood still: what was sent to it meanwhile has not been read yet
            is_short = descriptors.look(now)
            hello_s = min(HELLO_S, HURRY_S) if is_short else HELLO_S
            for socket in list(self._sockets.values()):
                is_late = not socket.has_said_hello and now - socket.opened_at > hello_s
                if is_late or now - socket.heard_at > silent_s or now - socket.sending_since > STUCK_S:
                    socket.cut()
            self.accepted.sweep(now, hello_s=hello_s, stuck_s=STUCK_S, idle_s=hello_s if is_short else inf)

    # --- questions ----------------------------------------------------------------------------------------------------

    async def _status(self, request: web.Request) -> web.StreamResponse:
        self._authorise(request)
        body = await self._shown.ask(request.query.get("model"))
        return await self.accepted.answer(request, body, content_type="application/json")

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        """What Prometheus reads."""
        self._authorise(request)
        sheet = server_sheet(self.machine, self.record)
        body, content_type = await sheet.page(request.headers.get("Accept", ""))
        return await self.accepted.answer(request, body, content_type=content_type)

    async def _targets(self, request: web.Request) -> web.StreamResponse:
        """The pages of the workers, for Prometheus' `http_sd_configs`."""
        self._authorise(request)
        return web.json_response(targets(self.machine))

    async def _show_journal(self, request: web.Request) -> web.StreamResponse:
        """For a server that stands by, or has taken over."""
        self._authorise(request)
        return standby.answer(request, self._journal, self.life, self.give_way)

    def give_way(self, life: int) -> None:
        """Another server has that life, which is higher."""
        self.failure = standby.other_server(life)
        self.on_failure.set()

    def listen_again(self) -> None:
        """Another server was there until now: workers may read what that has granted."""
        self.machine.listen(now=self.intake.now)
        self._set_timer()

    async def _healthz(self, request: web.Request) -> web.StreamResponse:
        state = {"status": "stopping" if self._is_stopping else "ok", "protocol": PROTOCOL}
        return web.json_response(state, status=503 if self._is_stopping else 200)

    @web.middleware
    async def _part(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answers a client without a token, then closes its connection: a worker may need the descriptor."""
        refused = self.names.why_refuse(request)
        if refused is None and request.body_exists:
            refused = web.Response(status=400, text="no question to a reference server has a body\n")
        if refused is not None:
            refused.force_close()
            return refused
        try:
            answer = await handler(request)
        except web.HTTPException as refusal:
            self._part_after(request, refusal)
            raise
        if not isinstance(answer, web.WebSocketResponse):
            self._part_after(request, answer)
        return answer

    def _part_after(self, request: web.Request, answer: web.StreamResponse) -> None:
        if not self._is_known(request):
            answer.force_close()

    def _is_known(self, request: web.Request) -> bool:
        shown = request.headers.get("Authorization", "").removeprefix("Bearer ")
        return not self._token or hmac.compare_digest(shown.encode(errors="surrogateescape"), self._token)

    def _authorise(self, request: web.Request) -> None:
        if not self._is_known(request):
            self.record.add(REFUSALS, 1)
            raise web.HTTPUnauthorized(text=WANTS_TOKEN, headers={"WWW-Authenticate": "Bearer"})

    # --- its life -----------------------------------------------------------------------------------------------------

    def status(self) -> Status:
        return self.machine.status(now=self.intake.now)

    async def _running(self, _: web.Application) -> AsyncIterator[None]:
        works = [self.intake.run(), self._sweep(), self._answers.polls.run(), watch_loop(self.record, LOOP_LAG)]
        works += [self._dashboard.watch()]
        works += [self._journal.sync()] if self._journal is not None else []
        if self._first is not None:
            works.append(self._first.compare(self.life, self.listen_again, self.give_way))
        tasks = [asyncio.create_task(work) for work in works]
        self.events.take_from(self.machine.state.events)
        self._set_timer()
        yield
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        if self._timer is not None:
            self._timer.cancel()
        if self._journal is not None:
            self._journal.close()

    async def _shutdown(self, _: web.Application) -> None:
        self._is_stopping = True
        self._answers.polls.end()
        self._dashboard.end()
        async with asyncio.TaskGroup() as group:
            for socket in list(self._sockets.values()):
                group.create_task(socket.say_goodbye())
        for socket in self._sockets.values():
            socket.cut()
        self.accepted.abort_writing()


def _malformed(why: str, *, retry_s: float = 0.0) -> Refusal:
    text = f"this is no message of {PROTOCOL}: {why[:200]}"
    return Refusal("refused", text, "is this a TensorHub worker?", retry_s=retry_s)
