"""What commands print: numbers and errors as text, terminals as they were before, and the server's log.

A thread of its own writes the log. It keeps neither the event loop nor the end of the process waiting where stderr is
not read: lines wait up to a limit, then they are dropped, and the next line that finds room says how many were. The log
is not written through Python's own buffer of stderr, whose lock the interpreter wants at its end.
"""

import logging
import os
import select
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Protocol, TextIO, TypeVar, cast

import msgspec
import typer

from ..protocol import events
from ..protocol.errors import TensorHubError, printable
from ..transport.threads import Thread, scope, start

size_text = events.size_text


def plain_text(text: str) -> str:
    """As it is, but for what a terminal would obey in place of showing it: `\\x1b`. Line ends stay."""
    return "\n".join(map(printable, text.split("\n")))


def time_text(seconds: float) -> str:
    """`0.3 s`, `59 s`, `3 min 05 s`, `2 h 10 min`, `4 d 03 h`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02} h"


def shards_text(shards: Sequence[int]) -> str:
    """`3`, `0-3`, `0-1, 4`."""
    runs: list[list[int]] = []
    for shard in sorted(shards):
        if runs and shard == runs[-1][-1] + 1:
            runs[-1].append(shard)
        else:
            runs.append([shard])
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def count_text(count: int, noun: str) -> str:
    """`1 shard`, `2 shards`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def some_text(names: Sequence[str], most: int) -> str:
    """The first few of many names: `a, b and 7 more`."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most:,} more"


def between(least: float, most: float, *, help: str, show_default: str | bool = True) -> Any:
    """An option for a number of that range, if one is given. Infinity and nan are outside."""

    def check(value: float | None) -> float | None:
        if value is not None and not least <= value <= most:
            raise typer.BadParameter(f"{value} is not from {least:,} to {most:,}")
        return value

    return typer.Option(help=f"{help} From {least:,} to {most:,}.", show_default=show_default, callback=check)


def descriptor_of(stream: TextIO | None) -> int | None:
    """None if it is no file, or closed."""
    try:
        return stream.fileno() if stream is not None else None
    except (OSError, ValueError):
        return None


def fill_the_first_three() -> None:
    """A socket that took the place of one of them would be sent what is meant for it."""
    descriptor = 0
    while descriptor <= 2:
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)


def lead_nowhere(descriptor: int | None) -> None:
    """Drop all later writes to this file. Does nothing for None."""
    if descriptor is not None:
        with suppress(OSError), open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), descriptor)


LEAVING = (signal.SIGTERM, signal.SIGHUP)  # SIGINT is a KeyboardInterrupt anyway
BY_SIGNAL = 128  # and the signal's number: the exit status that a shell shows


class Display(Protocol):
    """What rich draws with: `Live`, `Progress`, `Status`."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


D = TypeVar("D", bound=Display)


@contextmanager
def shown(display: D) -> Iterator[D]:
    """Draw while the block lasts. SIGTERM and SIGHUP raise `SystemExit` in it. For the main thread."""
    leave = _Leave()
    before = {each: signal.getsignal(each) for each in LEAVING}
    ours = [each for each, handler in before.items() if handler == signal.SIG_DFL]
    for each in ours:
        signal.signal(each, leave)
    try:
        display.start()
        try:
            leave.release()
            yield display
        finally:
            leave.is_held = True
            display.stop()
        leave.release()
    finally:
        for each in ours:
            signal.signal(each, before[each])


class _Leave:
    """What a signal does: it ends the program, once that may be."""

    def __init__(self) -> None:
        self.is_held = True
        self._number = 0

    def __call__(self, number: int, _: FrameType | None) -> None:
        self._number = self._number or number
        if not self.is_held:
            self.release()

    def release(self) -> None:
        """From now on at once; now, if one has come before."""
        self.is_held = self._number != 0  # the first one ends the program, and no other disturbs that
        if self._number:
            raise SystemExit(BY_SIGNAL + self._number)


class ErrorsAreLines(typer.Typer):
    """A command line whose `TensorHubError`s end the program with a clear line on stderr."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the command that the program's arguments name."""
        stdout, ours = sys.stdout, cast(TextIO, _Output(sys.stdout)) if sys.stdout is not None else None
        sys.stdout = ours or stdout
        try:
            return super().__call__(*args, **kwargs)
        except TensorHubError as error:
            text = error_text(error)
        except OutputFailed as error:
            text = f"error: {error}"
            lead_nowhere(descriptor_of(stdout))  # at its end Python would fail to write there once more
        finally:
            if sys.stdout is ours:  # and not what typer puts there once its reader has gone
                sys.stdout = stdout
        with suppress(OSError):  # stderr may lie where stdout does
            typer.echo(text, err=True)
        sys.exit(1)


def error_text(error: TensorHubError) -> str:
    """`error (version-unavailable): …` and, where there is one, `hint: …` below it."""
    text = f"error ({error.code}): {' '.join(str(error).split())}"
    return plain_text(f"{text}\nhint: {' '.join(error.hint.split())}" if error.hint else text)


class OutputFailed(Exception):
    """Standard output takes no more. It is no `OSError`, which a command may take for one of its own."""


class _Output:
    """Standard output, whose failures have a name of their own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with _named():
            return self._stream.write(text)

    def flush(self) -> None:
        with _named():
            self._stream.flush()


@scope
def _named() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # the reader has enough: typer and rich end the command without a word
        raise
    except OSError as error:
        raise OutputFailed(f"cannot write to standard output: {error.strerror or error}") from error


_log = logging.getLogger(__name__)

MAX_WAITING_BYTES = 4 << 20  # some 30,000 lines: all that a version costs the largest fleet
PIECE_BYTES = 1 << 16  # written at a stretch
END_S = 0.5  # at the end, for what still waits
FORMAT = "%(asctime)s %(levelname)-7s %(message)s"


@contextmanager
def log_to_stderr(level: int, *, as_json: bool = False) -> Iterator[None]:
    """Log there while the block lasts. What of stdin, stdout and stderr was closed leads nowhere from now on."""
    fill_the_first_three()
    descriptor = descriptor_of(sys.stderr)
    handler = WaitingLog(descriptor) if descriptor is not None else logging.NullHandler()
    if as_json:
        handler.setFormatter(JsonFormat())
    logging.basicConfig(level=level, handlers=[handler])
    try:
        yield
    finally:
        handler.close()


class JsonFormat(logging.Formatter):
    """A line of the log as a JSON object. What the server tells of an event is in `event`."""

    def format(self, record: logging.LogRecord) -> str:
        """Time in seconds since 1970, level, logger and message; the event or the traceback, if there is one."""
        line: dict[str, object] = {
            "at": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (event := getattr(record, "event", None)) is not None:
            line["event"] = event
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


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
        if self._thread.is_alive():  # it hangs in a write: so would a traceback
            lead_nowhere(self._descriptor)
        super().close()

    def _encoded(self, record: logging.LogRecord) -> bytes:
        try:
            text = self.format(record)
        except Exception as error:  # noqa: BLE001 - a line that cannot be made ends no caller
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
    """Whether all of it was taken. Waits while stderr is not read."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:  # another process that shares it has made it so
            select.select((), (descriptor,), (), 1.0)
        except OSError:
            return False
    return True
