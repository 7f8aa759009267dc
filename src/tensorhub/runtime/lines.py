"""One worker's WebSocket as the reference server sees it.

Orders are the whole truth at their number, so only the newest wait to be sent: a worker that does not read costs one
message of memory, and its line is cut after a while. It must never: block whoever posts, or let one line delay another.
"""

import asyncio
import contextlib
import logging
import time
from math import inf

from aiohttp import WSCloseCode, web

from ..core.messages import LayoutWanted, Orders, Refusal, ToWorker
from ..core.names import Digest, Ticket
from .codec import encode

_log = logging.getLogger(__name__)

CLOSE_S = 1.0  # for the other side's goodbye


class Line:
    """A connection. `sender` is its name towards the machine."""

    def __init__(self, sender: str, socket: web.WebSocketResponse, request: web.Request) -> None:
        self.sender = sender
        self.name = "a stranger"
        self.socket = socket
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
        """Send it soon. After a refusal nothing more is sent, and the line is closed."""
        if self._refusal is not None:
            return
        if isinstance(message, Refusal):
            self._refusal = message
        else:
            self._orders = message
        self._has_mail.set()

    def ask(self, layout: Digest) -> None:
        """Let it say what this layout is, the one that its newest report names."""
        self._wanted = LayoutWanted(layout)
        self._has_mail.set()

    async def write(self) -> None:
        """Send what is posted, until the line ends or was refused."""
        with contextlib.suppress(OSError, RuntimeError):  # it is closing: whoever reads it sees that
            while True:
                await self._has_mail.wait()
                self._has_mail.clear()
                orders, self._orders = self._orders, None
                wanted, self._wanted = self._wanted, None
                self.sending_since = time.monotonic()
                if self._refusal is not None:
                    await self.socket.send_bytes(encode(self._refusal))
                    await self.socket.close(code=WSCloseCode.POLICY_VIOLATION)
                    return
                for message in (orders, wanted):
                    if message is not None:
                        await self.socket.send_bytes(encode(message))
                self.sending_since = inf

    async def say_goodbye(self) -> None:
        """The server stops: tell the worker, so that it looks for the next one at once."""
        with contextlib.suppress(OSError, RuntimeError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.socket.close(code=WSCloseCode.GOING_AWAY)

    def note_end(self, writer: "asyncio.Task[None]") -> None:
        """What wrote to it has ended. If not by the line's end, that is our bug: it is said, and the line cut."""
        if not writer.cancelled() and (error := writer.exception()) is not None:
            _log.error("the line to %s ends: %r", self.name, error, exc_info=error)
            self.cut()

    def forget_failure(self) -> None:
        """What ended it knows the socket, which knows it: without this circle all that it holds goes at once."""
        error = self.socket.exception()
        if error is not None:
            error.__traceback__ = None

    def cut(self) -> None:
        """End it without a word."""
        self.is_cut = True
        if self._transport is not None:
            self._transport.abort()
