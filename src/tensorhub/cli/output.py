"""Numbers and errors as a terminal shows them, and terminals as they were before."""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Protocol, TextIO, TypeVar, cast

import typer

from ..protocol.errors import TensorHubError, printable
from ..transport.threads import scope

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def plain_text(text: str) -> str:
    """As it is, but for what a terminal would obey in place of showing it: `\\x1b`. Line ends stay."""
    return "\n".join(map(printable, text.split("\n")))


def size_text(size_bytes: float) -> str:
    """`0 B`, `1023 B`, `1.5 GiB`."""
    step = 0
    while step + 1 < len(UNITS) and abs(size_bytes) >= 1023.95:
        size_bytes, step = size_bytes / 1024, step + 1
    return f"{size_bytes:.0f} B" if step == 0 else f"{size_bytes:.1f} {UNITS[step]}"


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
    """What is written there from now on is gone, and nobody waits for it. None: there is nothing to do."""
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
            if sys.stdout is ours:  # and not what typer puts there once nobody reads any more
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
    except BrokenPipeError:  # who reads has enough: typer and rich end the command without a word
        raise
    except OSError as error:
        raise OutputFailed(f"cannot write to standard output: {error.strerror or error}") from error
