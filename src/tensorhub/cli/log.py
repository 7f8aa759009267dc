"""What `tensorhub serve` prints: a log that waits to be written by a thread of its own, so that the server never waits.

Whoever reads stderr may stop: a pipe that nobody empties, a terminal that is held. Lines wait then, up to a limit.
Beyond it they are dropped, and the next line that finds room says how many were.

It must never: keep the event loop or the end of the process waiting, or write the log through Python's own buffer of
stderr, whose lock the interpreter wants at its end.
"""

import contextlib
import logging
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Iterator

import typer

from ..transport.threads import Thread, start
from .output import OutputFailed, descriptor_of, fill_the_first_three, lead_nowhere, plain_text

_log = logging.getLogger(__name__)

MAX_WAITING_BYTES = 4 << 20  # some 30,000 lines: all that a version costs the largest fleet
PIECE_BYTES = 1 << 16  # written at a stretch
END_S = 0.5  # at the end, for what still waits
FORMAT = "%(asctime)s %(levelname)-7s %(message)s"


@contextlib.contextmanager
def log_to_stderr(level: int) -> Iterator[None]:
    """Log there while the block lasts. What of stdin, stdout and stderr was closed leads nowhere from now on."""
    fill_the_first_three()
    descriptor = descriptor_of(sys.stderr)
    handler = WaitingLog(descriptor) if descriptor is not None else logging.NullHandler()
    logging.basicConfig(level=level, handlers=[handler])
    try:
        yield
    finally:
        handler.close()


def say(text: str) -> None:
    """Print a line. Where stdout takes none, the log says so, and nothing is printed there any more."""
    try:
        typer.echo(text)
    except (OSError, OutputFailed) as error:
        why = error.__cause__ or error
        _log.warning("stdout takes nothing more (%s). It was to say: %s", getattr(why, "strerror", None) or why, text)
        lead_nowhere(descriptor_of(sys.stdout))  # Python writes there once more when it ends


class WaitingLog(logging.Handler):
    """Writes lines to a file descriptor, later. `close` gives what waits a moment, and takes nothing more."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(FORMAT))
        self._descriptor = descriptor
        self._waiting: deque[tuple[bytes, int]] = deque()  # text, and for how many lines it stands
        self._waiting_bytes = 0  # with what is being written
        self._dropped = 0
        self._is_over = False
        self._has_news = threading.Condition()
        self._thread = Thread(self._run, name="tensorhub-log")
        start(self._thread)

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line, or drop it where too much waits."""
        line = self._encoded(record)
        with self._has_news:
            if self._is_over:
                return
            if self._waiting_bytes + len(line) > MAX_WAITING_BYTES:
                self._dropped += 1
                return
            self._confess()
            self._put(line, 1)
            self._has_news.notify()

    def close(self) -> None:
        """Write what waits, as far as a moment goes. What is not written then is lost."""
        with self._has_news:
            was_over, self._is_over = self._is_over, True
            self._has_news.notify()
        if was_over:
            return
        self._thread.join(END_S)
        if self._thread.is_alive():  # it hangs in a write; so would whoever writes there next, a traceback for one
            lead_nowhere(self._descriptor)
        super().close()

    def _encoded(self, record: logging.LogRecord) -> bytes:
        try:
            text = self.format(record)
        except Exception as error:  # noqa: BLE001 - a line that cannot be made must not end who wanted to log it
            text = f"a line of this log could not be made ({error!r}): {record.msg!r:.200}"
        return f"{plain_text(text)}\n".encode(errors="backslashreplace")

    def _put(self, text: bytes, lines: int) -> None:
        self._waiting.append((text, lines))
        self._waiting_bytes += len(text)

    def _confess(self) -> None:
        """Say what was dropped, if anything was."""
        if self._dropped:
            text = f"{self._dropped} lines of this log were dropped: stderr was read too slowly, or took none"
            record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None)
            self._put(self._encoded(record), self._dropped)
            self._dropped = 0

    def _run(self) -> None:
        is_taken = True
        while piece := self._next(is_taken=is_taken):
            text = b"".join(text for text, _ in piece)
            is_taken = _write_all(self._descriptor, text)
            with self._has_news:
                self._waiting_bytes -= len(text)
                if not is_taken:
                    self._dropped += sum(lines for _, lines in piece)

    def _next(self, *, is_taken: bool) -> list[tuple[bytes, int]]:
        """What is to be written next; nothing at the end. `is_taken`: what was written last was."""
        with self._has_news:
            if is_taken and not self._waiting:
                self._confess()
            while not self._waiting and not self._is_over:
                self._has_news.wait()
            piece: list[tuple[bytes, int]] = []
            size_bytes = 0
            while self._waiting and size_bytes < PIECE_BYTES:
                piece.append(self._waiting.popleft())
                size_bytes += len(piece[-1][0])
            return piece


def _write_all(descriptor: int, data: bytes) -> bool:
    """Whether all of it was taken. Waits as long as nobody reads."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:  # whoever shares it has made it so
            select.select((), (descriptor,), (), 1.0)
        except OSError:
            return False
    return True
