"""What happened, as each process wrote it down while it happened: one line of JSON each.

Everything that the demo shows or proves is computed from these lines afterwards. A process that is killed loses at
most the line it was writing. Times are those of the machine's monotonic clock, which all its processes share.
"""

import time
from pathlib import Path
from types import TracebackType
from typing import Literal

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """Something happened in `process`, `time` seconds after some fixed moment."""

    time: float
    process: str


class Published(Event, frozen=True, kw_only=True):
    """The trainer published a version; `sha256` is its own hash over the parameters."""

    version: int
    sha256: str
    stall_s: float  # in unpublish and publish, not in the optimizer


class Trained(Event, frozen=True, kw_only=True):
    """The trainer took a step, which made `version`, from samples of policies `lag` versions older on average."""

    version: int
    reward: float
    lag: float


class Updated(Event, frozen=True, kw_only=True):
    """A rollout called replicate or update, and now holds `version`; it hashed the parameters before running them."""

    version: int
    sha256: str
    stall_s: float
    bytes_by_source: dict[str, int]  # since this rollout began
    is_first: bool = False


class Kept(Event, frozen=True, kw_only=True):
    """An update failed for now, and the rollout went on with the version it had; None if it had none and waited."""

    version: int | None
    stall_s: float
    error: str


class Generated(Event, frozen=True, kw_only=True):
    """A rollout answered prompts with `version`, and hashed the parameters once more after having run them."""

    version: int
    sha256: str
    reward: float
    samples: int


class Ended(Event, frozen=True, kw_only=True):
    """A process has done all it had to do; the trainer goes on serving until it is told to leave."""


class Fault(Event, frozen=True, kw_only=True):
    """The director did something to `process` when the trainer had published `version`."""

    what: Literal["killed", "started late", "restarted"]
    version: int


SERVER, TRAINER, DIRECTOR = "server", "trainer", "director"  # the others are "rollout-0", "rollout-1", …

AnyEvent = Published | Trained | Updated | Kept | Generated | Ended | Fault

_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def now() -> float:
    """The time of an event."""
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

    def write(self, event: AnyEvent) -> None:
        """One line, in one piece."""
        self._file.write(msgspec.json.encode(event) + b"\n")


class EventReader:
    """Reads all logs of a folder as they grow."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read_bytes: dict[Path, int] = {}

    def new(self) -> list[AnyEvent]:
        """What was written since the last call, in the order of time; a line that is not yet whole waits."""
        found: list[AnyEvent] = []
        for path in sorted(self._folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read_bytes.get(path, 0))
                text = file.read()
            whole = text.rfind(b"\n") + 1
            self._read_bytes[path] = self._read_bytes.get(path, 0) + whole
            found += [_decoder.decode(line) for line in text[:whole].splitlines()]
        return sorted(found, key=lambda event: event.time)
