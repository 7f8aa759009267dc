"""Limits on unauthenticated connections, browsers and descriptors, and how refusals are logged."""

import asyncio
import errno
import logging
import os
import re
import resource
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from ipaddress import ip_address
from math import inf
from types import TracebackType

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.typedefs import Handler
from aiohttp.web import RequestHandler, RequestPayloadError

from ..protocol.messages import MAX_REPORT_BYTES
from ..transport.threads import Thread, is_shortage, start

# Connections that are no worker's: each costs a descriptor, and an answer that is not read costs memory.
# A connection has a few seconds for its first request, and an answer has to be taken at some rate.


PIECE_BYTES = 256 * 1024  # of an answer, to be taken in the time after which a reader is stuck: 50 kB/s


class _Caller:
    """One connection to the server."""

    def __init__(self, now: float) -> None:
        self.idle_since = now  # since it came, or since its last request was handled
        self.has_asked = False
        self.is_asking = False  # its request is being handled
        self.is_line = False
        self.transport: asyncio.Transport | None = None
        self.waiting_bytes = 0  # of answers, when it last took enough of them
        self.took_at = now

    def is_stuck(self, now: float, stuck_s: float) -> bool:
        """It has answers to take, and takes too little."""
        assert self.transport is not None
        waiting_bytes = self.transport.get_write_buffer_size()
        if not waiting_bytes or not self.waiting_bytes or waiting_bytes <= self.waiting_bytes - PIECE_BYTES:
            self.waiting_bytes, self.took_at = waiting_bytes, now
        return now - self.took_at > stuck_s and waiting_bytes > 0


class Accepted:
    """All of them. `clock` is the time that `sweep` is told."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.server: web.Server | None = None  # aiohttp's, which knows who is connected
        self._clock = clock
        self._callers: dict[web.RequestHandler, _Caller] = {}

    @web.middleware
    async def note(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """A whole request has come. This stands before every handler."""
        self.keep(request)
        caller = self._callers.get(request.protocol)
        if caller is None:  # it has gone
            return await handler(request)
        caller.is_asking = True
        try:
            return await handler(request)
        finally:
            caller.is_asking, caller.idle_since = False, self._clock()

    def keep(self, request: web.Request) -> None:
        """The connection asks questions now, also if it was a worker's before."""
        if request.transport is None:  # it has gone
            return
        caller = self._callers.setdefault(request.protocol, _Caller(self._clock()))
        caller.has_asked, caller.is_line = True, False
        caller.transport = request.transport
        caller.waiting_bytes = 0  # it took what it was sent before, or this would still wait for that

    async def answer(self, request: web.Request, body: bytes, *, content_type: str) -> web.StreamResponse:
        """Send a long answer, piece by piece: who does not read keeps one piece, and a share in what all are sent."""
        if len(body) <= PIECE_BYTES:
            return web.Response(body=body, headers={"Content-Type": content_type})
        response = web.StreamResponse(headers={"Content-Type": content_type})
        response.content_length = len(body)
        view = memoryview(body)
        try:
            await response.prepare(request)
            for at in range(0, len(body), PIECE_BYTES):
                await response.write(view[at : at + PIECE_BYTES])
                self.keep(request)
        except ConnectionError:
            pass  # it has gone: aiohttp ends what is left
        return response

    def release(self, request: web.Request) -> None:
        """The connection has become a worker's."""
        self._callers.setdefault(request.protocol, _Caller(self._clock())).is_line = True

    def sweep(self, now: float, *, hello_s: float, stuck_s: float, idle_s: float = inf) -> None:
        """End those that have asked nothing in time, now or after a request, or do not take what they asked for."""
        connected = self.server.connections if self.server is not None else []
        self._callers = {each: self._callers.get(each) or _Caller(now) for each in connected}
        for protocol, caller in self._callers.items():
            transport = caller.transport = caller.transport or protocol.transport  # aiohttp forgets one that it closes
            if transport is None or caller.is_line:
                continue
            may_idle_s = idle_s if caller.has_asked else hello_s
            is_idle = not caller.is_asking and now - caller.idle_since > may_idle_s
            if caller.is_stuck(now, stuck_s) or (is_idle and not transport.get_write_buffer_size()):
                transport.abort()

    def abort_writing(self) -> None:
        """The server ends: a client that has not taken its answer yet gets no more of it."""
        for caller in self._callers.values():
            if caller.transport is not None and caller.transport.get_write_buffer_size():
                caller.transport.abort()


# What is kept of a client before its Hello: as much as a Hello may be, and a limit for all of them together.
# What comes after a good Hello is handed on, however long it is.


MAX_OF_ONE_BYTES = MAX_REPORT_BYTES + 4096  # a Hello as long as any may be, in its frame, and some pings
MAX_OF_ALL_BYTES = 16 * 1024 * 1024  # as much as one layout; 20,000 workers' Hellos at once are 10 MB


class UnknownClients:
    """What all clients of one server have sent before their hello."""

    def __init__(self) -> None:
        self.held_bytes = 0


class UnknownClient(asyncio.Protocol):
    """A client before its hello: stands between its connection and aiohttp. Calls `refuse` if it sends too much.

    A message's limit in aiohttp is for the whole life of a connection, and that of a layout is long.
    """

    def __init__(self, clients: UnknownClients, request: web.Request, refuse: Callable[[], None]) -> None:
        self._clients = clients
        self._held_bytes = 0
        self._hold(len(getattr(request.protocol, "_message_tail", b"")))  # it did not wait for our answer
        self._inner = request.protocol
        self._refuse = refuse
        self._is_over = False
        self._rest = b""  # beyond the limit, until it is seen whether a good Hello came before it
        self._transport = request.transport
        if self._transport is not None:
            self._transport.set_protocol(self)

    @property
    def has_said_too_much(self) -> bool:
        """More than any Hello is; or anything, while all of them together hold too much."""
        return self._held_bytes > MAX_OF_ONE_BYTES or (self._held_bytes > 0 and self._are_too_many)

    @property
    def _are_too_many(self) -> bool:
        return self._clients.held_bytes > MAX_OF_ALL_BYTES

    def _hold(self, more_bytes: int) -> None:
        self._held_bytes += more_bytes
        self._clients.held_bytes += more_bytes

    def leave(self) -> None:
        """It is welcome, or gone: aiohttp hears the connection itself again."""
        self._hold(-self._held_bytes)
        transport, self._transport = self._transport, None
        rest, self._rest = self._rest, b""
        if transport is None or transport.is_closing():
            return
        transport.set_protocol(self._inner)
        if self._is_over:
            transport.resume_reading()
        if rest:
            self._inner.data_received(rest)

    def data_received(self, data: bytes) -> None:
        """Hand on as much as a Hello may be, and keep the rest only for a moment."""
        if self._transport is None or self._is_over:
            return
        room_bytes = MAX_OF_ONE_BYTES - self._held_bytes
        self._hold(len(data))
        if not self.has_said_too_much:
            return self._inner.data_received(data)
        self._is_over = True
        self._rest = data[room_bytes:]
        self._transport.pause_reading()
        self._inner.data_received(data[:room_bytes])
        asyncio.get_running_loop().call_soon(self._reconsider)  # after who is woken by what was handed on

    def _reconsider(self) -> None:
        if self._transport is None:
            return  # it is welcome, or gone
        are_too_many = self._are_too_many
        self._hold(-len(self._rest))
        self._rest = b""
        if are_too_many:
            return self._transport.abort()
        self._transport.resume_reading()  # what still comes is dropped; its goodbye is not
        self._refuse()

    def connection_lost(self, error: Exception | None) -> None:
        """Called when the peer has closed the connection."""
        self._inner.connection_lost(error)

    def eof_received(self) -> None:
        """Called when the peer sends no more."""
        self._inner.eof_received()

    def pause_writing(self) -> None:
        """Called when the peer reads too slowly."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Called when the peer has caught up."""
        self._inner.resume_writing()


# Refuses browsers. `Origin` and `Sec-Fetch-Site` say that a page asks. `Host` shows a page whose name was made to lead
# here (DNS rebinding).


_HOST = re.compile(r"(?:\[([^\[\]@]+)\]|([^:\[\]@]+))(?::\d{1,5})?\Z")
OWN_PAGES = ("none", "same-origin")  # what was typed into the address bar, and what follows from it


class Names:
    """What a server is called: by IP address, as localhost, by its machine's name, and by the names it was given."""

    def __init__(self, given: Iterable[str] = ()) -> None:
        self._own = {"localhost"}
        self.add(socket.gethostname(), *given)

    def add(self, *names: str) -> None:
        """It is called so too."""
        self._own.update(name.strip("[]").lower().removesuffix(".") for name in names)

    def look_up(self) -> None:
        """Ask the name service for this machine's full name, in a thread: that may take a while."""
        start(Thread(lambda: self.add(socket.getfqdn()), name="tensorhub-name"))

    def why_refuse(self, request: web.Request) -> web.Response | None:
        """The answer to what a page sends, and to what was sent to another name."""
        headers = request.headers
        is_link = (
            request.path == "/" and headers.get("Sec-Fetch-Dest") == "document"
        )  # to the dashboard: it has no data
        is_own = is_link or headers.get("Sec-Fetch-Site", "none") in OWN_PAGES
        if "Origin" in headers or not is_own:
            return web.Response(status=403, text="a reference server talks to no page\n")
        said = headers.getall("Host", [])
        found = _HOST.match(said[0]) if len(said) == 1 else None
        if found is None or not self._has(found[1] or found[2]):
            text = "this server is not called so: use its IP address, or give it the name (--name, TENSORHUB_NAMES)\n"
            return web.Response(status=421, text=text)
        return None

    def _has(self, host: str) -> bool:
        if host.lower().removesuffix(".") in self._own:
            return True
        try:
            return bool(ip_address(host))
        except ValueError:
            return False


# Descriptors: without one, the event loop turns clients away and logs nothing that a user understands.


_log = logging.getLogger(__name__)

FEW = 4096  # most fleets are smaller, and `Descriptors` says when it comes to that
RESERVE = 64  # a server with no worker has about ten open
SAY_EVERY_S = 60.0
HINT = "raise `ulimit -n` (LimitNOFILE of systemd)"


def raise_limit() -> int:
    """Let this process open as many as it may. Returns how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or soft == hard:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # the system has another limit below
        return soft
    return hard


def check_limit(limit: int, connections: int) -> None:
    """Say so if so many connections are more than it may open: a warning only where that is few."""
    if limit != resource.RLIM_INFINITY and limit < connections + RESERVE:
        text = "this process may open %d files and connections, and a full server needs %d: %s,"
        level = logging.WARNING if limit < FEW else logging.INFO
        _log.log(level, f"{text} or lower TENSORHUB_MAX_WORKERS", limit, connections + RESERVE, HINT)


class Descriptors:
    """Looks whether any are left. A new one has the lowest number that is free, so that one tells of all."""

    def __init__(self) -> None:
        self._was_short = False
        self._said_at = -inf

    def look(self, now: float) -> bool:
        """Whether next to none are left. Says so once until there are again, and once a minute at most."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        was_short, self._was_short = self._was_short, _lowest_free() >= limit - min(RESERVE, limit // 8)
        if self._was_short and not was_short and now - self._said_at >= SAY_EVERY_S:
            self._said_at = now
            _log.warning(
                "next to all of the %d files and connections that this process may open are open: "
                "workers are turned away. Is that all workers? Then %s",
                *(limit, HINT),
            )
        return self._was_short


def _lowest_free() -> float:
    try:
        found = os.open(os.devnull, os.O_RDONLY)
    except OSError as error:
        return inf if error.errno in (errno.EMFILE, errno.ENFILE) else 0
    os.close(found)
    return found


# The log of requests that went wrong: each kind seldom, with how many were left out. aiohttp logs a traceback for each.
# Before 3.14.4 an address such as "http://[" was an exception in aiohttp's parser, which asyncio logs.


MALFORMED, SHORTAGE, FAILED = range(3)
EVERY_S = {MALFORMED: 60.0, SHORTAGE: 60.0, FAILED: 10.0}  # a defect is to be found by its first traceback

ErrorInfo = (
    bool
    | BaseException
    | tuple[type[BaseException], BaseException, TracebackType | None]
    | tuple[None, None, None]
    | None
)  # as `logging` takes it


class Seldom(logging.LoggerAdapter[logging.Logger]):
    """One server's, for aiohttp to log to. It writes each kind once in a while."""

    def __init__(self) -> None:
        super().__init__(_log, {})
        self._written_at = dict.fromkeys(EVERY_S, -inf)
        self._left_out = dict.fromkeys(EVERY_S, 0)

    def log(
        self,
        level: int,
        msg: object,
        *args: object,
        exc_info: ErrorInfo = None,
        stack_info: bool = False,
        stacklevel: int = 1,
        extra: Mapping[str, object] | None = None,
        **more: object,
    ) -> None:
        """Write it, or leave it out; what is written says what was left out since the last."""
        text = str(msg) % args if args else str(msg)
        if level >= logging.WARNING:
            error = exc_info[1] if isinstance(exc_info, tuple) else exc_info
            kind = _kind(error)
            if not self._is_due(kind):
                return
            if kind != FAILED:
                level, exc_info = logging.WARNING, None
                text += f": it is no HTTP ({type(error).__name__})" if kind == MALFORMED else f": {error}"
            if left_out := self._left_out[kind]:
                text = f"{text}; {left_out} more like it since the last one said"
            self._left_out[kind] = 0
        above = stacklevel + 1  # the caller of this
        super().log(level, text, exc_info=exc_info, stack_info=stack_info, stacklevel=above, extra=extra, **more)

    def listen_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """Say what this server's loop has to say of connections, too."""
        before = loop.get_exception_handler()

        def handle(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
            error = context.get("exception")
            if isinstance(context.get("protocol"), RequestHandler) and isinstance(error, ValueError):
                self.error("Error handling request", exc_info=HttpProcessingError(code=400, message=str(error)))
            elif isinstance(error, OSError) and is_shortage(error):  # for each connection that waits to be accepted
                self.warning(str(context.get("message")), exc_info=error)
            elif before is not None:
                before(loop, context)
            else:
                loop.default_exception_handler(context)

        loop.set_exception_handler(handle)

    def _is_due(self, kind: int) -> bool:
        now = time.monotonic()
        if now - self._written_at[kind] < EVERY_S[kind]:
            self._left_out[kind] += 1
            return False
        self._written_at[kind] = now
        return True


def _kind(error: object) -> int:
    if isinstance(error, HttpProcessingError | RequestPayloadError):
        return MALFORMED
    return SHORTAGE if isinstance(error, OSError) and is_shortage(error) else FAILED
