"""What happened in the laboratory, as each process wrote it down while it happened: one line of JSON each.

Everything that is shown is computed from these lines afterwards. Times are those of the machine's monotonic clock.
"""

from pathlib import Path

import msgspec

from ..demo.logs import LogReader
from .interpreter import Slices


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """Something happened in `process`, `time` seconds after some fixed moment."""

    time: float
    process: str


class Published(Event, frozen=True, kw_only=True):
    """The trainer made a version readable; `sha256` is its own hash of the tensors. The rest is its stall, in parts."""

    version: int
    sha256: str
    unpublish_s: float  # before it could change the tensors
    publish_s: float  # before it could train again


class Updated(Event, frozen=True, kw_only=True):
    """A rollout looked for a new version, and now runs `version`. Without `sha256` it is the one that it ran before."""

    version: int
    stall_s: float
    sha256: str = ""
    is_first: bool = False
    bytes_by_source: dict[str, int] = {}  # since this rollout began
    ended: float = 0.0  # when the stall was over; the hash came after that


class Kept(Event, frozen=True, kw_only=True):
    """An update failed, and the rollout goes on with what it holds."""

    version: int | None
    stall_s: float
    error: str


class Computed(Event, frozen=True, kw_only=True):
    """A worker has computed until it looked for weights, or made some; its slices of the interpreter took so long."""

    slices: Slices


class Ended(Event, frozen=True, kw_only=True):
    """A process has done all it had to do."""

    descriptors: int = 0  # open then
    statistics: dict[str, int] = {}


class Fault(Event, frozen=True, kw_only=True):
    """The director did something to a process."""

    what: str  # "killed", "started"


class SeenRead(msgspec.Struct, frozen=True):
    """Who reads what from whom, and how far it is."""

    target: str
    source: str
    version: int
    done: int  # chunks
    chunks: int
    is_cross_site: bool


class Seen(Event, frozen=True, kw_only=True):
    """What the reference server showed."""

    latest: int  # -1: nothing yet
    has_latest: list[str]  # replicas that hold all of it, in their tensors or in host memory
    copies: dict[str, list[int]]  # host copies: versions by replica
    cross_site_bytes: dict[int, int]  # that crossed between sites, by version
    reads: list[SeenRead]


AnyEvent = Published | Updated | Kept | Computed | Ended | Fault | Seen

_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def read_events(folder: Path) -> LogReader[AnyEvent]:
    """A reader of all logs of a folder."""
    return LogReader(folder, _decoder)
