"""Events that a worker's machine takes in, and effects that its shell carries out.

A read across layouts has several *parts*, one from each source. A part has its own ticket; the read as a whole writes
the memory as any other read does.
"""

from dataclasses import dataclass

from ..protocol.messages import Failure, Grant, LayoutInfo, Orders, Refusal, Report, Spec
from ..protocol.names import Digest, Ticket, Version

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


@dataclass(frozen=True, slots=True)
class ClaimDropped:
    """The caller will not publish the version that its last unpublish has claimed."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The caller does not wait for its call any more."""


@dataclass(frozen=True, slots=True)
class Closing:
    """The caller wants to leave: withdraw, wait for readers until `deadline`, then go."""

    deadline: float


@dataclass(frozen=True, slots=True)
class ReadOpened:
    """After `OpenRead`: the source is there, and its manifest is that of the granted version. Nothing was written."""

    ticket: Ticket


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


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """No byte of this read can land any more. `complete`: every chunk of the version is in place, verified in time.

    `failure` is None if it was complete, or was stopped because we asked.
    """

    ticket: Ticket
    complete: bool = False
    failure: Failure | None = None


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


@dataclass(frozen=True, slots=True)
class AcrossOpened:
    """After `OpenAcross`: the manifests of all sources are those of the granted content, the registered tensors can be
    filled from them, and this is the root of what they will be. Nothing was written. `ticket` is the read's."""

    ticket: Ticket
    root: Digest


@dataclass(frozen=True, slots=True)
class PartEnded:
    """No byte of this part can land any more, and its source need not serve it. Said once for each part that has not
    ended with the whole read. `brought`: all that was wanted of it is in place. `failure` is None if so, or if the part
    was stopped because we asked; then another part may bring what it has not."""

    ticket: Ticket  # the read's
    part: Ticket
    brought: bool = False
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class PartMeasured:
    """How many bytes have come by this part so far."""

    ticket: Ticket  # the read's
    part: Ticket
    arrived_bytes: int


Event = (
    Connected
    | Disconnected
    | Received
    | Registered
    | Called
    | ClaimDropped
    | Cancelled
    | Closing
    | ReadOpened
    | ReadTouched
    | ReadBarred
    | ReadAdvanced
    | ReadMeasured
    | ReadEnded
    | AcrossOpened
    | PartEnded
    | PartMeasured
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
    """Fetch the manifest of the grant's version from its source and judge it, and write nothing; answer with
    `ReadOpened`, or with `ReadEnded` and why not. From then on peers may open the version here too."""

    grant: Grant


@dataclass(frozen=True, slots=True)
class StartRead:
    """Read what is missing of the grant's version from its source into the registered memory, or into a host copy
    (`grant.to_host`); answer with `ReadTouched` right before the first byte, `ReadAdvanced` now and then, and
    `ReadEnded` once. While it runs, and afterwards, serve what has been verified. It may have been opened before.

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


@dataclass(frozen=True, slots=True)
class OpenAcross:
    """Fetch the manifest of each grant's content from its source and compare its root with the grant's, derive the
    manifest of the registered layout, and judge whether all of that is covered. Write nothing. Answer with
    `AcrossOpened`; with `ReadEnded` and why not, where no other source could help (a `LayoutMismatch` names tensor and
    part); with `PartEnded` for a source that fails, and go on once `AddPart` has named another.

    The read is known by `ticket`, the lowest of these grants': `ReadTouched`, `ReadAdvanced` (by chunks of the
    registered layout), `ReadBarred` and `ReadEnded` name that one. `ReadEnded` tells once of all parts together."""

    ticket: Ticket
    grants: tuple[Grant, ...]


@dataclass(frozen=True, slots=True)
class StartAcross:
    """Read what is missing out of these sources, into the registered memory or into a host copy (`to_host` of each
    grant); answer as after `StartRead`, and with `PartEnded` for each part that ends before all is in place. Serve what
    has been verified under the root that `AcrossOpened` said. It has been opened before. While something is missing
    that no part brings, wait for `AddPart`; end the read only when all is there, when it is stopped, or when no other
    source could help."""

    ticket: Ticket
    grants: tuple[Grant, ...]


@dataclass(frozen=True, slots=True)
class AddPart:
    """One more source for that read: what is missing and no part brings is planned anew, over this one too. If it is
    not needed, say so with `PartEnded` (`brought`)."""

    ticket: Ticket
    grant: Grant


@dataclass(frozen=True, slots=True)
class StopPart:
    """Let this part of that read begin nothing more; end it soon, and answer with `PartEnded`. It may just have ended
    by itself: then there is no further answer."""

    ticket: Ticket
    part: Ticket


Effect = (
    Send
    | OpenRead
    | StartRead
    | OpenAcross
    | StartAcross
    | AddPart
    | StopPart
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
