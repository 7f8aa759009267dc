"""What the reference server keeps of those who have not said yet who they are: a little of each, and of all together.

Whoever can connect may be a stranger, and what one sends is kept until a message of it is whole. So a stranger is heard
up to the length of a Hello, and cut where all strangers together hold too much. A good Hello that came before the limit
makes welcome: then all that came after it is handed on too.

It must never: look into what is said, or touch a byte of those who are welcome.
"""

import asyncio
from collections.abc import Callable

from aiohttp import web

from ..core.messages import MAX_REPORT_BYTES

MOST_OF_ONE_BYTES = MAX_REPORT_BYTES + 4096  # a Hello as long as any may be, in its frame, and some pings
MOST_OF_ALL_BYTES = 16 * 1024 * 1024  # as much as one layout; 20,000 workers' Hellos at once are 10 MB


class Strangers:
    """All strangers of one server."""

    def __init__(self) -> None:
        self.held_bytes = 0


class Stranger(asyncio.Protocol):
    """Stands between a connection and aiohttp until it leaves. `refuse` is called for one that has said too much.

    A message's limit in aiohttp is for the whole life of a connection, and that of a layout is long.
    """

    def __init__(self, strangers: Strangers, request: web.Request, refuse: Callable[[], None]) -> None:
        self._strangers = strangers
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
        """More than any Hello is; or anything, while all strangers together hold too much."""
        return self._held_bytes > MOST_OF_ONE_BYTES or (self._held_bytes > 0 and self._are_too_many)

    @property
    def _are_too_many(self) -> bool:
        return self._strangers.held_bytes > MOST_OF_ALL_BYTES

    def _hold(self, more_bytes: int) -> None:
        self._held_bytes += more_bytes
        self._strangers.held_bytes += more_bytes

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
        room_bytes = MOST_OF_ONE_BYTES - self._held_bytes
        self._hold(len(data))
        if not self.has_said_too_much:
            return self._inner.data_received(data)
        self._is_over = True
        self._rest = data[room_bytes:]
        self._transport.pause_reading()
        self._inner.data_received(data[:room_bytes])
        asyncio.get_running_loop().call_soon(self._judge)  # after who is woken by what was handed on

    def _judge(self) -> None:
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
        """It has gone."""
        self._inner.connection_lost(error)

    def eof_received(self) -> None:
        """It says nothing more."""
        self._inner.eof_received()

    def pause_writing(self) -> None:
        """It reads too slowly."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """It has caught up."""
        self._inner.resume_writing()
