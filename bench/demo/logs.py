"""Logs of events: each process appends lines of JSON to a file of its own, and one reads them all as they grow."""

import time
from pathlib import Path
from types import TracebackType
from typing import Generic, Protocol, TypeVar

import msgspec


class Timed(Protocol):
    """An event: it happened at a time."""

    @property
    def time(self) -> float: ...


E = TypeVar("E", bound=Timed)


def now() -> float:
    """The time of an event, by the clock that all processes of this machine share."""
    return time.monotonic()


class EventLog:
    """Where one process writes its events."""

    def __init__(self, folder: Path, process: str) -> None:
        self.process = process
        self._file = (folder / f"{process}.jsonl").open("ab", buffering=0)

    def __enter__(self) -> "EventLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, event: msgspec.Struct) -> None:
        """One line, in one piece."""
        self._file.write(msgspec.json.encode(event) + b"\n")


class LogReader(Generic[E]):
    """Reads all logs of a folder as they grow."""

    def __init__(self, folder: Path, decoder: "msgspec.json.Decoder[E]") -> None:
        self._folder = folder
        self._decoder = decoder
        self._read_bytes: dict[Path, int] = {}

    def new(self) -> list[E]:
        """What was written since the last call, in the order of time; a line that is not yet whole waits."""
        found: list[E] = []
        for path in sorted(self._folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read_bytes.get(path, 0))
                text = file.read()
            whole = text.rfind(b"\n") + 1
            self._read_bytes[path] = self._read_bytes.get(path, 0) + whole
            found += [self._decoder.decode(line) for line in text[:whole].splitlines()]
        return sorted(found, key=lambda event: event.time)
