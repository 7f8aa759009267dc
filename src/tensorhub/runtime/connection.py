"""A worker's WebSocket to its server, and messages as bytes: connects, says hello, carries messages, reconnects."""

import asyncio
import contextlib
import logging
import os
import random
import socket
import socket as sockets
import time
from collections.abc import Callable
from functools import partial
from math import inf

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult

from ..protocol.errors import Unavailable, UsageError, printable
from ..protocol.messages import (
    MAX_FAILURES,
    MAX_HINT,
    MAX_LAYOUT_BYTES,
    MAX_READ_SOURCES,
    MAX_REPORT_BYTES,
    MAX_TEXT,
    UNPUBLISHED,
    VERBS,
    CallReport,
    Hello,
    LayoutInfo,
    LayoutWanted,
    Orders,
    Refusal,
    Report,
    Spec,
    Step,
    ToServer,
    ToWorker,
    parse_spec,
)
from ..protocol.names import Undecodable, decoded
from ..transport import threads
from ..transport.tcp.addresses import host_of
from ..worker.events import Connected, Disconnected, Received
from .loops import in_thread

MAX_NUMBER = 2**62  # of anything counted: above every clock in microseconds, and twice it still fits 64 bits
MAX_ENDPOINTS = 16
MAX_WORD = 300  # characters of a host, a site
MAX_ENDPOINT = 2400  # characters of an endpoint: it may have several addresses

_encoder = msgspec.msgpack.Encoder()
_to_server: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(Hello | LayoutInfo | Report)
_to_worker: msgspec.msgpack.Decoder[ToWorker | LayoutWanted] = msgspec.msgpack.Decoder(Orders | Refusal | LayoutWanted)


class Malformed(Exception):
    """The bytes are no message of this protocol."""


class OddNumber(Malformed):
    """A report that is well made but for a number. Its worker may come back: the next one may be right."""


def encode(message: ToServer | ToWorker | LayoutWanted) -> bytes:
    """The message as it travels."""
    return _encoder.encode(message)


def decode_to_server(data: bytes, *, is_known: bool = True) -> ToServer:
    """A message from a worker. A client without a hello (`is_known` false) may not send a long one."""
    if not is_known and len(data) > MAX_REPORT_BYTES:
        raise Malformed(f"a first message of {len(data)} B, where at most {MAX_REPORT_BYTES} B are due")
    try:
        message = decoded(_to_server, data)
    except Undecodable as error:
        raise Malformed(str(error)) from error
    limit = MAX_LAYOUT_BYTES if isinstance(message, LayoutInfo) else MAX_REPORT_BYTES
    if len(data) > limit:
        raise Malformed(f"a {type(message).__name__} of {len(data)} B, where at most {limit} B are due")
    if isinstance(message, Report) and _has_odd_number(message):
        raise OddNumber("a Report with a number out of range")
    wrong = _nonsense_of(message)
    if wrong:
        raise Malformed(f"a {type(message).__name__} with {wrong}")
    return message


def decode_to_worker(data: bytes) -> ToWorker | LayoutWanted:
    """A message from the server."""
    try:
        return decoded(_to_worker, data)
    except Undecodable as error:
        raise Malformed(str(error)) from error


def _nonsense_of(message: ToServer) -> str:
    """The part of a message that no worker could mean; empty if there is none."""
    match message:
        case Hello():
            words = message.life, message.site, message.host, message.metrics
            endpoints = message.endpoints
            if len(endpoints) > MAX_ENDPOINTS or any(len(each) > MAX_ENDPOINT for each in endpoints):
                return "too many or too long endpoints: how many addresses does its worker have?"
            if any(len(word) > MAX_WORD for word in words):
                return "too long words about its worker"
            return ""
        case Report():
            if len(message.failures) > MAX_FAILURES or any(
                len(f.message) > MAX_TEXT or len(f.hint) > MAX_HINT for f in message.failures
            ):
                return "too many or too long failures"
            reading = message.reading
            if reading is not None and len(reading.transport + reading.path + reading.why) > MAX_TEXT:
                return "too long words about its read"
            if reading is not None and not 0 < len(reading.sources) <= MAX_READ_SOURCES:
                return "no source of its read, or too many"
            step = message.step or Step()
            publish = step.publish
            if step.done > UNPUBLISHED or (
                publish is not None and (publish.verb, publish.spec) != ("publish", step.version)
            ):
                return "a step that is not its publish"
            return _nonsense_of_wish(message.prefetch) or _nonsense_of_call(message.call) or _nonsense_of_call(publish)
    return ""


def _nonsense_of_wish(prefetch: Spec | None) -> str:
    if prefetch is None:
        return ""
    try:
        parse_spec(prefetch)
    except UsageError as error:
        return f"a bad version to fetch ahead: {error}"
    return ""


def _nonsense_of_call(call: CallReport | None) -> str:
    if call is None:
        return ""
    if call.verb not in VERBS:
        return "a call that does not exist"
    if call.claim is not None and call.verb != "unpublish":
        return "a claim that no unpublish makes"
    if call.verb == "unpublish":
        return "" if call.spec == "" else "a version to unpublish"
    try:
        is_open = parse_spec(call.spec, call.verb) is None
    except UsageError as error:
        return f"a bad version: {error}"
    return "no version to publish" if call.verb == "publish" and is_open else ""


def _has_odd_number(report: Report) -> bool:
    """A number of it, wherever it stands, is negative or above all that is ever counted."""
    todo: list[object] = [report]
    while todo:
        value = todo.pop()
        if isinstance(value, int):
            if not 0 <= value <= MAX_NUMBER:
                return True
        elif isinstance(value, msgspec.Struct):
            todo += filter(None, msgspec.structs.astuple(value))  # most of it is empty, or zero
        elif isinstance(value, dict):
            todo += [*value, *value.values()]
        elif isinstance(value, tuple):
            todo += value
    return False


# Names are looked up in daemon threads: the interpreter's exit waits for the event loop's own threads.


_NUMERIC = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV


class ThreadResolver(AbstractResolver):
    """Looks names up in daemon threads. Raises `OSError` if it cannot; so aiohttp knows it."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """The addresses of a host, in the order in which they are to be tried."""
        try:
            return await in_thread(partial(_look_up, host, port, family), name="resolve")
        except Unavailable as error:
            raise OSError(str(error)) from error

    async def close(self) -> None:
        """There is nothing to give back."""


def http_session(*, timeout: aiohttp.ClientTimeout | None = None) -> aiohttp.ClientSession:
    """A session that looks names up so; without `timeout`, each request says its own. In a running loop."""
    connector = aiohttp.TCPConnector(resolver=ThreadResolver())
    return aiohttp.ClientSession(connector=connector, timeout=timeout or aiohttp.ClientTimeout())


def _look_up(host: str, port: int, family: socket.AddressFamily) -> list[ResolveResult]:
    found = []
    for kind, _, proto, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, family=family, flags=socket.AI_ADDRCONFIG
    ):
        where = host_of(address)
        found.append(
            ResolveResult(hostname=host, host=where, port=int(address[1]), family=kind, proto=proto, flags=_NUMERIC)
        )
    return found


# Only the newest report waits to be sent. A server that says nothing may be busy, and each new connection would be
# more work for it. So after `SILENCE_S` the worker sends a ping, and keeps the connection while anything comes. TCP
# ends it if the host is gone. Only a server that is silent for `PATIENCE_S` is left, by each worker at another time.


_log = logging.getLogger(__name__)

CONNECT_S = 5.0  # for its kernel to answer: a lost SYN is sent again after 1 s and after 3 s; 2 s spare
SILENCE_S = 5.0  # five reports unanswered, at one a second; longer where reports are rarer
ELSEWHERE_S = 5.0  # for a server's first answer, where another address is left
PATIENCE_S = 30.0  # three leases: a process that was stopped, swapped out or moved is back by then, or never
JITTER = 0.5  # of that, at most, by which one worker waits longer than another
FIRST_RETRY_S = 0.05  # a restarted server is found quickly
GOODBYE_S = 0.25  # for a server that does not answer
LAST_RETRY_S = 2.0  # 10,000 workers then knock 7,500 times a second at most, spread by the jitter
SOON_S = 10.0  # a server that is started again by a supervisor is back by then
SOON_RETRY_S = 0.5  # until then 30,000 times: a refused connection costs its machine 10 us, and each waits 0.2 s less
MAX_MESSAGE_BYTES = 1 << 20  # orders take a few hundred bytes; an error's text is bounded

FULL = "it is full of connections"
CROWDED = "clients that have not said hello send it too much at once"
STOPPING = "it is stopping"
MISNAMED = "it is not called so"
THERE = {  # a reference server says these: what to do then
    FULL: "raise TENSORHUB_MAX_WORKERS on the server, or end workers that are not needed",
    CROWDED: "it is tried again; what else sends to the server's port?",
    STOPPING: "it is tried again: the next server at that address is found by itself",
    MISNAMED: "use the server's IP address, or give the server that name: --name, TENSORHUB_NAMES or names=",
}
STATUSES = {413: CROWDED, 421: MISNAMED, 503: STOPPING, 507: FULL}  # of HTTP, by which it says so
START = "start one with `tensorhub serve`"

ConnectionEvent = Connected | Disconnected | Received


def retry_delay_s(attempt: int, random_0_1: float, *, broken_s: float = inf) -> float:
    """How long to wait before the next try: doubles from 0.05 s to 2 s, less up to half of it.

    If a connection broke only `broken_s` ago, to 0.5 s: the server is likely to be back soon.
    """
    most_s = SOON_RETRY_S if broken_s < SOON_S else LAST_RETRY_S
    return float(min(most_s, FIRST_RETRY_S * 2 ** min(attempt, 16)) * (1.0 - random_0_1 / 2))


def why_away(error: Exception) -> str:
    """The system's reason why a server could not be asked."""
    match error:
        case TimeoutError():
            return "it does not answer"
        case aiohttp.WSServerHandshakeError(status=status):
            return STATUSES.get(status, f"what answers there is no reference server (HTTP {status})")
        case aiohttp.ClientResponseError():
            return "what answers there is no reference server"
        case aiohttp.ServerDisconnectedError():
            return "it closed the connection"
        case aiohttp.ClientPayloadError():
            return "its answer broke off"
        case aiohttp.ClientConnectorError(os_error=system) | (OSError() as system):
            number = system.errno or 0  # that of a name which is not found is below 0, and not the system's
            return os.strerror(number) if number > 0 else system.strerror or str(system)
        case _:
            return printable(str(error)) or type(error).__name__


def unreached(address: str, why: str, *, hint: str = START, within: str = "") -> tuple[str, str]:
    """The error and the hint for a server that could not be asked. One that is there, but full, is not missing."""
    if why in THERE:
        return f"the reference server at {address} let no client in{within}: {why}", THERE[why]
    return f"no reference server at {address}{within}: {why}", threads.REMEDIES.get(why, hint)


def _patience_s() -> float:
    return PATIENCE_S * (1.0 + JITTER * random.random())


def _limit_untaken(socket: aiohttp.ClientWebSocketResponse) -> None:
    """Lets TCP end the connection when the other host takes nothing. The kernel of a busy process takes it."""
    raw = socket.get_extra_info("socket")
    option = getattr(sockets, "TCP_USER_TIMEOUT", None)  # Linux
    if raw is not None and option is not None:
        raw.setsockopt(sockets.IPPROTO_TCP, option, int(SILENCE_S * 1000))


class Connection:
    """A worker's connection to the server. `run` is its whole life; `send` may be called at any time, in the loop."""

    def __init__(self, address: str, hello: Hello, on_event: Callable[[ConnectionEvent], None]) -> None:
        self.address = address  # all of them, with commas
        self._addresses = address.split(",")
        self._at = 0  # which of them is tried, or has answered
        self.why = "it does not answer"  # what was wrong when it was last tried, for the caller's error
        self.is_connected = False
        self.connects = 0
        self._hello = hello
        self._on_event = on_event
        self._layout: LayoutInfo | None = None
        self._is_layout_wanted = False
        self._report: Report | None = None
        self._has_mail = asyncio.Event()
        self._heard_at, self._silence_s = 0.0, SILENCE_S
        self._away_since = 0.0  # when it was last heard, once it was said that it is away
        self._refused = ""  # what was said of a refusal that may pass

    def send(self, message: Report | LayoutInfo) -> None:
        """Send it if there is a connection, a layout when asked for it; the newest replaces what still waits."""
        if not self.is_connected:
            return
        if isinstance(message, LayoutInfo):
            self._layout = message
            return
        self._report = message
        self._has_mail.set()

    @property
    def _first_s(self) -> float:
        """How long a server may take to say the first word."""
        return _patience_s() if len(self._addresses) == 1 else ELSEWHERE_S

    @property
    def _answering(self) -> str:
        """The address that is tried, or has answered."""
        return self._addresses[self._at]

    def _asked(self, wanted: LayoutWanted) -> None:
        """If other tensors were registered meanwhile, the next report names theirs."""
        if self._layout is not None and self._layout.digest() == wanted.layout:
            self._is_layout_wanted = True
            self._has_mail.set()

    async def run(self) -> None:
        """Connect and connect again, until refused for good or cancelled.

        Addresses are tried in order, from the one that answered last, with a pause when all of them have failed.
        """
        attempt, tried, broken_at, now = 0, 0, -inf, asyncio.get_running_loop().time
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        async with http_session(timeout=timeout) as http:
            while True:
                refusal, has_heard = None, False
                try:
                    async with asyncio.timeout(self._first_s):
                        socket = await self._connect(http)
                except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
                    self._note_failure(error, is_last=tried + 1 == len(self._addresses))
                else:
                    refusal, has_heard = await self._converse(socket)
                if refusal is not None and refusal.retry_s <= 0:
                    return
                if not has_heard:
                    tried += 1
                    self._at = (self._at + 1) % len(self._addresses)
                    if tried < len(self._addresses):
                        continue
                tried = 0
                attempt, broken_at = (0, now()) if has_heard else (attempt + 1, broken_at)
                delay_s = retry_delay_s(attempt, random.random(), broken_s=now() - broken_at)
                await asyncio.sleep(max(delay_s, refusal.retry_s if refusal is not None else 0.0))

    async def _connect(self, http: aiohttp.ClientSession) -> aiohttp.ClientWebSocketResponse:
        socket = await http.ws_connect(
            f"http://{self._answering}/v1/session",
            max_msg_size=MAX_MESSAGE_BYTES,
            timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
        )
        _limit_untaken(socket)
        await socket.send_bytes(encode(self._hello))
        return socket

    def _note_failure(self, error: Exception, *, is_last: bool = True) -> None:
        """Logs once that the server is away, at each of its addresses, until there is a session again."""
        if isinstance(error, aiohttp.ClientConnectorError):
            threads.note(error.os_error, did="it connected to the reference server")
        self.why = why_away(error)
        if is_last and not self._away_since:
            self._away_since = self._heard_at or time.monotonic()  # a host that is gone takes its time to be missed
            _log.warning("%s: %s", self._hello.worker, unreached(self.address, self.why)[0])

    def _note_refusal(self, refusal: Refusal) -> None:
        """A worker that waits for another's place says so at once, and once."""
        if refusal.retry_s > 0 and refusal.code != "refused" and refusal.code != self._refused:
            self._refused = refusal.code
            hint = f" ({refusal.hint})" if refusal.hint else ""
            _log.warning("%s waits to be let in: %s%s", self._hello.worker, refusal.message, hint)

    def _note_back(self) -> None:
        """It has a session."""
        if self._away_since:
            away_s = time.monotonic() - self._away_since
            _log.warning(
                "%s: the reference server at %s is back after %.1f s", self._hello.worker, self._answering, away_s
            )
        self._away_since, self._refused = 0.0, ""

    async def _converse(self, socket: aiohttp.ClientWebSocketResponse) -> tuple[Refusal | None, bool]:
        """Carry messages until the connection ends: (the refusal that ended it, whether anything was heard)."""
        refusal, has_heard, self.why = None, False, "it does not answer"
        patience_s = _patience_s()
        self._heard_at, self._silence_s = time.monotonic(), SILENCE_S
        self.is_connected, self._layout, self._report, self._is_layout_wanted = True, None, None, False
        self._has_mail.clear()
        self.connects += 1
        self._on_event(Connected())
        async with asyncio.TaskGroup() as group:
            helpers = [group.create_task(self._write(socket)), group.create_task(self._ask(socket))]
            try:
                while refusal is None:
                    # the answer to a ping begins it anew
                    frame = await socket.receive(timeout=patience_s if has_heard else self._first_s)
                    if frame.type is not aiohttp.WSMsgType.BINARY:
                        self.why = "it closed the connection"
                        break
                    message = decode_to_worker(frame.data)
                    has_heard, self._heard_at = True, time.monotonic()
                    if isinstance(message, LayoutWanted):
                        self._asked(message)
                        continue
                    if isinstance(message, Refusal):
                        refusal = message
                        self._note_refusal(message)
                    else:
                        self._silence_s = SILENCE_S * max(1.0, message.report_s)
                        self._note_back()
                    self._on_event(Received(message))
            except TimeoutError:
                self.why = f"it was silent for {patience_s:.0f} s"
            except Malformed as error:
                self.why = f"it sent what is no message: {error}"
            finally:
                for helper in helpers:
                    helper.cancel()
                self.is_connected = False
                self._on_event(Disconnected())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(GOODBYE_S):
                        await socket.close()
        why = refusal.message if refusal is not None else self.why
        _log.info("%s: the connection to %s ended: %s", self._hello.worker, self._answering, why)
        return refusal, has_heard

    async def _ask(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Ask for a sign of life whenever nothing has come for a while."""
        try:
            while True:
                silent_s = time.monotonic() - self._heard_at
                if silent_s >= self._silence_s:
                    await socket.ping()
                    silent_s = 0.0
                await asyncio.sleep(self._silence_s - silent_s)
        except (aiohttp.ClientError, OSError):
            pass  # the reader of this connection sees that it ended

    async def _write(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        try:
            while True:
                await self._has_mail.wait()
                self._has_mail.clear()
                if self._is_layout_wanted and self._layout is not None:
                    self._is_layout_wanted = False
                    await socket.send_bytes(encode(self._layout))
                report, self._report = self._report, None
                if report is not None:
                    await socket.send_bytes(encode(report))
        except (aiohttp.ClientError, OSError):
            pass  # the reader of this connection sees that it ended
