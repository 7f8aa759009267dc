"""Connections to a reference server that are no worker's line: strangers that ask nothing, and askers that do not read.

Each costs a descriptor, and an answer that nobody reads costs memory. So a connection has a few seconds for its first
whole request, and an answer has to be taken at some rate. Where descriptors are short, a connection has as little time
between two requests. A worker's line is none of these; its sweep is the server's.

It must never: end a connection that asks and reads, however long it waits for an answer.
"""

import asyncio
from collections.abc import Callable
from math import inf

from aiohttp import web
from aiohttp.typedefs import Handler

PIECE_BYTES = 256 * 1024  # of an answer, to be taken in the time after which a reader is stuck: 50 kB/s


class _Caller:
    """A connection."""

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
        """It is an asker, also where it was a worker's line before."""
        if request.transport is None:  # it has gone
            return
        caller = self._callers.setdefault(request.protocol, _Caller(self._clock()))
        caller.has_asked, caller.is_line = True, False
        caller.transport = request.transport
        caller.waiting_bytes = 0  # it took what it was sent before, or this would still wait for that

    async def answer(self, request: web.Request, body: bytes, *, content_type: str) -> web.StreamResponse:
        """Send a long answer, piece by piece: who does not read keeps one piece, and a share in what all are sent."""
        if len(body) <= PIECE_BYTES:
            return web.Response(body=body, content_type=content_type)
        response = web.StreamResponse()
        response.content_type, response.content_length = content_type, len(body)
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
        """It has become a worker's line."""
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
        """The server ends: whoever has not taken its answer yet gets no more of it."""
        for caller in self._callers.values():
            if caller.transport is not None and caller.transport.get_write_buffer_size():
                caller.transport.abort()
