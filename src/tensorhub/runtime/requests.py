"""What a reference server's log says of requests that went wrong: each kind seldom, whoever sends how many.

aiohttp logs a traceback for each. A stranger must not fill the log with them, nor hide in them what matters. What is no
HTTP is one line, and so is a connection for which there is no descriptor. What fails is a defect of ours with its
traceback. Each says how many like it were left out.

Before 3.14.4 an address such as "http://[" went through aiohttp's parser as an exception: asyncio logs that one.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from math import inf
from types import TracebackType

from aiohttp.http import HttpProcessingError
from aiohttp.web import RequestHandler, RequestPayloadError

from ..transport.shortages import is_shortage

MALFORMED, SHORTAGE, FAILED = range(3)
EVERY_S = {MALFORMED: 60.0, SHORTAGE: 60.0, FAILED: 10.0}  # a defect is to be found by its first traceback

ErrorInfo = (
    bool
    | BaseException
    | tuple[type[BaseException], BaseException, TracebackType | None]
    | tuple[None, None, None]
    | None
)  # as `logging` takes it

_log = logging.getLogger(__name__)


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
        above = stacklevel + 1  # whoever called this
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
