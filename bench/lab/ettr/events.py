"""What happened in a run, as each process wrote it down while it happened: one line of JSON each."""

from pathlib import Path

import msgspec

from ...demo.logs import LogReader
from .plan import Role


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """Something happened in `process`, `time` seconds after some fixed moment."""

    time: float
    process: str


class Started(Event, frozen=True, kw_only=True):
    """The director has let a process start."""

    is_again: bool


class Listening(Event, frozen=True, kw_only=True):
    """The server takes connections."""


class Held(Event, frozen=True, kw_only=True):
    """A process has the weights of a step, and hashed them. `first`: it had none since it started."""

    step: int
    version: int
    sha256: str
    is_first: bool
    source: str  # "seed", "peers", "file" or, in a trainer at its end, "steps"


class Kept(Event, frozen=True, kw_only=True):
    """A rollout could not update, and goes on with what it has; -1: with nothing."""

    step: int
    error: str


class Began(Event, frozen=True, kw_only=True):
    """The trainer has the samples for a step, and computes."""

    step: int


class Done(Event, frozen=True, kw_only=True):
    """A step is computed and published."""

    step: int
    version: int
    publish_s: float  # from the end of computing


class Saved(Event, frozen=True, kw_only=True):
    """The trainer wrote a checkpoint file."""

    step: int
    seconds: float


class Ended(Event, frozen=True, kw_only=True):
    """A process has done all it had to do."""


class Killed(Event, frozen=True, kw_only=True):
    """The director killed a process, in that step; with it, perhaps, all others."""

    step: int
    role: Role


AnyEvent = Started | Listening | Held | Kept | Began | Done | Saved | Ended | Killed

_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def read_events(folder: Path) -> LogReader[AnyEvent]:
    """A reader of all logs of a folder."""
    return LogReader(folder, _decoder)
