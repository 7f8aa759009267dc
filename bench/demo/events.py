"""What happened, as each process wrote it down while it happened: one line of JSON each.

Everything that the demo shows or proves is computed from these lines afterwards. A process that is killed loses at
most the line it was writing. Times are those of the machine's monotonic clock, which all its processes share.
"""

from pathlib import Path
from typing import Literal

import msgspec

from .logs import LogReader


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """Something happened in `process`, `time` seconds after some fixed moment."""

    time: float
    process: str


class Made(Event, frozen=True, kw_only=True):
    """The trainer has made a version that nobody can read yet, and may never publish it; `sha256` is its own hash."""

    version: int
    sha256: str


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
    computed_s: float = 0.0  # gradient and optimizer: without the wait for samples, and without publishing


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


class Sampled(Event, frozen=True, kw_only=True):
    """Some of the answers of a batch, to be looked at afterwards: a row of tokens, prompt and answer, and for each of
    the answer's tokens the log-probability that the engine said it had.
    """

    version: int
    told: str  # by the engine itself: which version it has
    tokens: list[list[int]]
    log_probabilities: list[list[float]]


class Refilled(Event, frozen=True, kw_only=True):
    """A trainer that was started again holds what its rollouts held, and goes on there. It hashed what it has got."""

    version: int
    sha256: str
    bytes_by_source: dict[str, int]


class Ended(Event, frozen=True, kw_only=True):
    """A process has done all it had to do; the trainer goes on serving until it is told to leave."""


class Fault(Event, frozen=True, kw_only=True):
    """The director did something to `process` when the trainer had published `version`."""

    what: Literal["killed", "started late", "restarted"]
    version: int


SERVER, TRAINER, DIRECTOR = "server", "trainer", "director"  # the others are "rollout-0", "rollout-1", …

AnyEvent = Made | Published | Trained | Updated | Kept | Generated | Sampled | Refilled | Ended | Fault

_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


class EventReader(LogReader[AnyEvent]):
    """Reads all logs of the demo as they grow."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, _decoder)
