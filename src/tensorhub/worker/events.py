"""Events that a worker's machine takes in, and effects that its shell carries out."""

from dataclasses import dataclass

from ..protocol.messages import Failure, Grant, LayoutInfo, Orders, Refusal, Report, Spec
from ..protocol.names import Digest, Ticket, Version, WorkerId

# --- events: the shell tells ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connected:
    """A connection to a reference server stands and `Hello` was sent on it."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection is gone."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message came from the server."""

    message: Orders | Refusal


@dataclass(frozen=True, slots=True)
class Registered:
    """The caller has put (other) tensors into registered memory. Check `Worker.may_register` first."""

    layout: LayoutInfo
    digest: Digest
    size_bytes: int
    max_copies: int = 0  # so many fit under the limit on host memory
    can_box: bool = False  # it has no boxes, and could be registered with boxes={}


@dataclass(frozen=True, slots=True)
class Called:
    """The caller makes a call, and waits for its end until `deadline` (same clock as `now`)."""

    verb: str
    spec: Spec
    deadline: float
    root: Digest = Digest("")  # of a publish
    claim: Version | None = None  # of an unpublish
    waits: bool = False  # of a replicate
    metadata: Digest = Digest("")  # of a publish: of what it says beside its tensors
    grid: Digest = Digest("")  # of a publish: of its tiles
    missed: Failure | None = None  # why it is none: it failed before it was made, and counts all the same
    former: Digest = Digest("")  # of a publish: the same content's root without boxes, published here before
    hash_s: float = 0.0  # of a publish: that hashing the tensors took


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The caller does not wait for its call any more."""


@dataclass(frozen=True, slots=True)
class Closing:
    """The caller wants to leave: withdraw, wait for readers until `deadline`, then go."""

    deadline: float


@dataclass(frozen=True, slots=True)
class ReadOpened:
    """After `OpenRead`: the sources are there, with the manifests of the granted version. Nothing was written.

    `root`: of a read across, what the registered tensors will be, as follows from those manifests.
    """

    ticket: Ticket
    root: Digest = Digest("")


@dataclass(frozen=True, slots=True)
class ReadTouched:
    """From now on a byte of this read may be written: what the registered memory held before is gone."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class ReadBarred:
    """The answer to `StopRead`, at once: the read may write nothing that it was not allowed to write before.

    `is_touched`: it was allowed to write something, which may still land.
    """

    ticket: Ticket
    is_touched: bool


@dataclass(frozen=True, slots=True)
class ReadAdvanced:
    """Chunks [0, done) of `chunks` are in place, each verified against the manifest with the granted root."""

    ticket: Ticket
    done: int
    chunks: int


@dataclass(frozen=True, slots=True)
class ReadMeasured:
    """How the open read goes: by which transport, how and why so, at what rate, how many bytes came so far."""

    ticket: Ticket
    transport: str
    path: str
    why: str
    rate_bytes_per_s: int
    arrived_bytes: int = 0
    is_verified: bool = True  # the digest of each chunk is checked


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """No byte of this read can land any more. `complete`: every chunk of the version is in place, verified in time.

    `failure` is None if it was complete, or was stopped because we asked. `source`: which of several failed.
    """

    ticket: Ticket
    complete: bool = False
    failure: Failure | None = None
    source: WorkerId | None = None


@dataclass(frozen=True, slots=True)
class NotShared:
    """The host copy that this read was to share cannot be mapped: it is read instead, as any other."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class ServingStopped:
    """No peer reads this version out of our memory any more, and none can begin."""

    version: Version


@dataclass(frozen=True, slots=True)
class CopiedOut:
    """After `CopyOut`: the version is in host memory, verified and readable there, or why it is not."""

    version: Version
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class CopiedIn:
    """After `CopyIn`: the registered memory is as the host copy, verified, or why it is not."""

    version: Version
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class CopyDropped:
    """After `DropCopy`: no peer reads that host copy any more, and its memory is free."""

    version: Version


@dataclass(frozen=True, slots=True)
class CopyCounted:
    """The memory of that shared host copy counts here now: the worker that counted it has let it go."""

    version: Version


@dataclass(frozen=True, slots=True)
class Wished:
    """The caller wants a host copy filled ahead with what `prefetch` names (None: no longer), and `pins` kept."""

    prefetch: Spec | None
    pins: tuple[Version, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed (see `Worker.next_deadline`)."""


Event = (
    Connected
    | Disconnected
    | Received
    | Registered
    | Called
    | Cancelled
    | Closing
    | ReadOpened
    | ReadTouched
    | ReadBarred
    | ReadAdvanced
    | ReadMeasured
    | ReadEnded
    | NotShared
    | ServingStopped
    | CopiedOut
    | CopiedIn
    | CopyDropped
    | CopyCounted
    | Wished
    | Tick
)

# --- effects: the machine wants ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send it to the server if there is a connection; forget it otherwise."""

    message: Report | LayoutInfo


@dataclass(frozen=True, slots=True)
class OpenRead:
    """Fetch the manifest of the grant's version from each source and check it, and write nothing; answer with
    `ReadOpened`, or with `ReadEnded` and why not. From then on peers may open the version here too.

    Across layouts: derive the manifest of the registered layout from them, and check whether they have all of that (a
    `LayoutMismatch` names tensor and part)."""

    grant: Grant


@dataclass(frozen=True, slots=True)
class StartRead:
    """Read what is missing of the grant's version from its sources into the registered memory, or into a host copy
    (`grant.to_host`); answer with `ReadTouched` right before the first byte, `ReadAdvanced` now and then, and
    `ReadEnded` once. While it runs, and afterwards, serve what has been verified. It may have been opened before, and
    was if it is one across. Where one source fails, all of it ends.

    `grant.shares`: map the source's host copy, verify it, and serve it: `ReadEnded` says that it is there. Where it
    cannot be mapped answer with `NotShared`, and read as said above."""

    grant: Grant


@dataclass(frozen=True, slots=True)
class Trust:
    """Accept no chunk that arrives at `until` or later (same clock as `now`), unless told a later time by then."""

    until: float


@dataclass(frozen=True, slots=True)
class StopRead:
    """Let the read write nothing that it was not allowed to write before, and answer at once with `ReadBarred`. End it
    soon, and answer with `ReadEnded`."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class StartServing:
    """The registered memory holds this version, whole (or again, after it was withdrawn): let peers read it."""

    version: Version
    root: Digest


@dataclass(frozen=True, slots=True)
class StopServing:
    """Let no peer read this version any more, whether it was whole or being filled; answer with `ServingStopped`."""

    version: Version


@dataclass(frozen=True, slots=True)
class CopyOut:
    """Copy the version from the registered memory to host memory and serve it there; answer with `CopiedOut`."""

    version: Version
    is_ahead: bool = False  # no call waits for it yet: only memory that can be spared is taken


@dataclass(frozen=True, slots=True)
class CopyIn:
    """Fill the registered memory from the host copy; answer with `CopiedIn`."""

    version: Version


@dataclass(frozen=True, slots=True)
class DropCopy:
    """Let no peer read that host copy any more and free its memory; answer with `CopyDropped`."""

    version: Version


@dataclass(frozen=True, slots=True)
class Finished:
    """The caller's call has ended: with a version (None after an unpublish), or with an error."""

    number: int
    version: Version | None = None
    error: Failure | None = None


@dataclass(frozen=True, slots=True)
class Delayed:
    """The caller's call has waited for longer than a lease, for this reason, and goes on. Told once for each call."""

    number: int
    why: Failure


@dataclass(frozen=True, slots=True)
class Warn:
    """Something has gone wrong here that no call can tell the caller: for the log, once."""

    text: str


@dataclass(frozen=True, slots=True)
class Left:
    """After `Closing`: the connection may be closed. `drained` is False if readers had to be cut off."""

    drained: bool


Effect = (
    Send
    | OpenRead
    | StartRead
    | Trust
    | StopRead
    | StartServing
    | StopServing
    | CopyOut
    | CopyIn
    | DropCopy
    | Finished
    | Delayed
    | Left
    | Warn
)
