"""Messages between server and workers. They state how things are, never what changed.

A worker sends `Hello` once on connecting, and its whole `Report` whenever that changes and once a second. The server
answers each report with the worker's `Orders`, and sends them unasked when they change. Before it takes a report of an
unknown layout it asks for that (`LayoutWanted`, `LayoutInfo`). A lost or late message is mended by the next one.

`Orders.number` rises over the server's lives, so a worker drops late orders. Orders are the *whole* truth at their
number: a ticket below it that they do not name is void.
"""

import re

import msgspec

from .errors import TensorHubError, UsageError, shortened
from .manifest import Layout, decode_layout, digest_of_boxed, digest_of_layout
from .names import Digest, ModelName, Number, ReplicaName, Shard, Ticket, Version, WorkerId

PROTOCOL = "tensorhub/7"
MAX_REPORT_BYTES = 64 * 1024  # a report: bounded texts; 100 for each source of a read
MAX_LAYOUT_BYTES = 16 * 1024 * 1024  # about 150,000 tensors
MAX_TEXT = 2_000  # characters of an error's message on the wire
MAX_HINT = MAX_WORDS = 500  # of its hint; of each text in a report: why a read failed, how one goes
MAX_FAILURES = 4  # ticket failures in one report
MAX_SOURCES = 16  # replicas that a worker names in what it received; what came from others is one sum
OTHERS = "(others)"  # the name of that sum
MAX_COPIES = 16  # host copies of one worker
MAX_CROSS_SITE_VERSIONS = 8  # versions for which a worker says how much came from other sites
MAX_PINS = 64  # versions pinned by one worker
MAX_READ_SOURCES = 256  # of one read: no version is read out of more shards at once
Spec = int | str  # a version number, "latest" or "latest-N"; of an update also "prefetched"
VERBS = ("publish", "unpublish", "replicate", "update")
PREFETCH = ("seed", "always", "never")  # fill a host copy ahead: for the whole site, for oneself too, not at all


class _Message(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=False):
    pass


def shown_fields(message: msgspec.Struct) -> list[tuple[str, object]]:
    """The fields of a message, without its token."""
    fields = ((name, getattr(message, name)) for name in message.__struct_fields__)
    return [(name, "…" if name == "token" and value else value) for name, value in fields]


def shown(message: msgspec.Struct) -> str:
    """A message as a log may show it."""
    return f"{type(message).__name__}({', '.join(f'{name}={value!r}' for name, value in shown_fields(message))})"


# --- the buffer of a worker -------------------------------------------------------------------------------------------


class Empty(_Message, frozen=True, tag="empty"):
    """Nothing that a peer may read. Its owner may change it."""


class Filling(_Message, frozen=True, tag="filling"):
    """Being filled with a version; complete and verified up to `done` of `chunks` (0: not known yet)."""

    version: Version
    done: int = 0
    chunks: int = 0


class Holding(_Message, frozen=True, tag="holding"):
    """Has the version, whole and verified, and promises not to change it.

    `epoch` is the number of its publish: a version is named by number and epoch together.
    """

    version: Version
    root: Digest
    published: bool = False  # by this worker itself, rather than replicated
    epoch: Number = Number(0)
    is_pending: bool = False  # true until the publish has ended well on all shards: it may never be a version


class Withdrawing(_Message, frozen=True, tag="withdrawing"):
    """Wants to take its promise back, and waits until no peer reads any more. `impatient`: cut the readers off."""

    version: Version
    root: Digest
    published: bool = False
    epoch: Number = Number(0)
    is_pending: bool = False
    impatient: bool = False


class Vacated(_Message, frozen=True, tag="vacated"):
    """Withdrawn and still untouched: no peer reads it, and it is held again if nothing is written over it."""

    version: Version
    root: Digest
    published: bool = False
    epoch: Number = Number(0)
    is_pending: bool = False


class Poisoned(_Message, frozen=True, tag="poisoned"):
    """A fill failed half-way: the bytes are no version at all. `version`: what of it peers may still be reading."""

    version: Version | None = None


Buffer = Empty | Filling | Holding | Withdrawing | Vacated | Poisoned


class HostCopy(_Message, frozen=True):
    """A version beside the buffer, in host memory: verified up to `done` of `chunks`, or whole.

    `number` rises with each copy that a worker makes. A copy that is `dropping` is about to go.
    `layout` is named if it is not that of the registered tensors. `unfit`: peers can read it, and it cannot fill the
    buffer here. `shared`: its memory is that of another worker's copy on this host, and counts there.
    """

    number: int
    version: Version
    root: Digest
    done: int = 0
    chunks: int = 0
    whole: bool = False
    dropping: bool = False
    published: bool = False  # by this worker itself: offloaded from what it had published
    layout: Digest = Digest("")
    unfit: bool = False
    shared: bool = False
    epoch: Number = Number(0)  # of its publish


# --- from a worker ----------------------------------------------------------------------------------------------------


class Hello(_Message, frozen=True, tag="hello"):
    """A worker's identity. `life` is unique to one life of the process; `protocol` must be the server's own."""

    protocol: str
    model: ModelName
    replica: ReplicaName
    shard: Shard
    shards: int
    life: str
    endpoints: tuple[str, ...] = ()  # best first: "tcp://host:port"
    revocable: bool = False  # it can cut its readers off itself, by every one of its endpoints
    reliable: bool = True
    site: str = ""
    host: str = ""
    token: str = ""
    prefetch: str = "seed"  # one of PREFETCH
    retain: int = 0  # versions of the model to keep, until all have left; the most that reliable workers ask for counts
    place: str = ""  # workers that name the same one can map each other's host copies; empty: none can
    is_passing: bool = False  # it comes for one version and leaves: no trainer waits for it
    metrics: str = ""  # host:port of the page with its metrics; empty: there is none

    @property
    def worker(self) -> WorkerId:
        return WorkerId(self.model, self.replica, self.shard)

    def __repr__(self) -> str:
        return shown(self)

    def __rich_repr__(self) -> list[tuple[str, object]]:
        return shown_fields(self)


class LayoutInfo(_Message, frozen=True, tag="layout"):
    """The tensors that a worker has registered, so that a mismatch can name the tensor. Sent when asked for.

    `boxes`, which the server never decodes, says which parts of which global tensors they are. If it is empty, the
    shard's number says what they are. `partial`: some of the model is left out.
    """

    layout: msgspec.Raw  # a `Layout`, still encoded
    boxes: bytes = b""
    partial: bool = False

    @classmethod
    def of(cls, layout: Layout, boxes: bytes = b"", *, partial: bool = False) -> "LayoutInfo":
        return cls(msgspec.Raw(layout.encode()), boxes, partial)

    def digest(self) -> Digest:
        """The layout's digest. One that has boxes says so by how it begins (`names.is_boxed`, `is_partial`)."""
        return digest_of_boxed(self.layout, self.boxes, self.partial) if self.boxes else digest_of_layout(self.layout)

    def decode(self) -> Layout:
        """Raises `UsageError` if it is no layout. Ten thousand tensors take 11 ms: only errors are worth that."""
        return decode_layout(self.layout)


class CallReport(_Message, frozen=True):
    """The group call that this worker's caller waits in; `resolved` is the version that the server answered."""

    number: int
    verb: str  # one of VERBS
    spec: Spec  # of an unpublish: ""
    root: Digest = Digest("")  # of a publish: the content's identity
    resolved: Version | None = None
    claim: Version | None = None  # of an unpublish: the number that is to be published next
    waits: bool = False  # of a replicate: for the number to be published, if it may still be
    metadata: Digest = Digest("")  # of what a publish says beside its tensors: the same on all shards
    grid: Digest = Digest("")  # of the tiles of a publish: the same on all shards
    floor: Version | None = None  # of an update: what was held when its caller began to wait
    former: Digest = Digest("")  # of a publish: the same content's root without boxes, published here before
    epoch: Number = Number(0)  # of a publish that is resolved: as the server answered
    hash_s: float = 0.0  # of a publish: that hashing the tensors took


CLAIMED, PUBLISHED, UNPUBLISHED = range(3)


class Step(_Message, frozen=True):
    """How far a shard has come without the server, since a call has ended well with it.

    `version` and `done`: as one of the writer; None: not at all. `alone`: the position of its last call that has ended
    so. `publish`: that one, if it is a publish. The server judges it when all shards of the replica hold the version.
    """

    version: Version | None = None
    done: int = 0  # its number is claimed; 1: it is published; 2: it is unpublished
    alone: int = 0
    publish: CallReport | None = None

    @property
    def place(self) -> tuple[int, int]:
        """Steps of one replica in order."""
        return (self.version, self.done) if self.version is not None else (-1, CLAIMED)


class Source(_Message, frozen=True, array_like=True):
    """A worker that is read from: its buffer, or its host copy. A report names no more than that."""

    worker: WorkerId
    from_host: bool = False
    endpoints: tuple[str, ...] = ()
    root: Digest = Digest("")  # the content's identity in its layout
    is_cross_site: bool = False

    @property
    def place(self) -> tuple[WorkerId, bool]:
        """What of it is read: its host copy if true."""
        return self.worker, self.from_host


class Reading(_Message, frozen=True):
    """The one read that this worker has open; it may be about to stop.

    `is_opened`: the manifests of its sources are here, and it waits for the buffer. `shares`: it maps the source's host
    copy, and copies nothing. `is_across`: its sources are a whole replica with another layout; `root` is then the
    content's identity in this worker's own layout, once their manifests are here. What follows `root` is for people.
    """

    ticket: Ticket
    sources: tuple[Source, ...]
    version: Version
    to_host: bool = False
    is_opened: bool = False
    arrived_bytes: int = 0  # so far, of chunks under way too
    shares: bool = False
    is_across: bool = False
    root: Digest = Digest("")
    transport: str = ""  # "local", "tcp", …
    path: str = ""  # how that transport moves the bytes, in a few words
    why: str = ""  # why this transport, and none that is usually better
    rate_bytes_per_s: int = 0  # over the last second or so


class ReadDone(_Message, frozen=True):
    """The last read of a worker that has brought a version to its end. For people."""

    ticket: Ticket
    arrived_bytes: int
    seconds: float  # from the beginning of the read to its last chunk in place
    transport: str = ""
    path: str = ""
    is_verified: bool = True


class TicketFailure(_Message, frozen=True):
    """A read that failed, and why: a code of the error tree, a sentence, and what to do about it."""

    ticket: Ticket
    source: WorkerId
    code: str
    message: str
    hint: str = ""


class Failure(_Message, frozen=True):
    """An error of the tree, as it travels."""

    code: str
    message: str
    hint: str = ""

    @classmethod
    def of(cls, error: TensorHubError) -> "Failure":
        """Encodes an error for the wire, without its cause."""
        return cls(error.code, str(error), error.hint or "")

    def bounded(self) -> "Failure":
        """The failure with its texts shortened to the limit of a message."""
        return Failure(self.code, shortened(self.message, MAX_TEXT), shortened(self.hint, MAX_HINT))


class Report(_Message, frozen=True, tag="report"):
    """How things are at this worker.

    `ended` is the position of the last call that ended here (`missed`: why it was never made), `finished` that of the
    last one that ended well. `writes` is the highest epoch or lease that this worker was given as the writer of its
    model: of two replicas the one with the higher number is the writer.
    `closing`: close() was called, and nothing that it holds can be relied on. `stops`: no peer reads from its buffer
    any more, and it stops serving it. `can_box`: it registered whole tensors without boxes, and takes them as boxes
    where others need that.
    """

    number: int  # rises by one with each report
    session: Number = Number(0)  # as the server last named it
    seen: Number = Number(0)  # the highest number of orders so far
    buffer: Buffer = Empty()
    layout: Digest = Digest("")
    size_bytes: int = 0
    call: CallReport | None = None
    ended: int = 0
    finished: int = 0
    step: Step | None = None
    reading: Reading | None = None
    closed: Ticket = Ticket(0)  # no ticket up to this one is being read any more
    newest: Version | None = None  # ever heard of: with it `latest` survives a restart of the server
    failures: tuple[TicketFailure, ...] = ()  # of the current call, newest last
    received_bytes: dict[str, int] = {}  # by source replica, over this life: the latest few, and OTHERS
    cross_site_bytes: dict[int, int] = {}  # by version: of these, those from other sites; the latest few
    copies: tuple[HostCopy, ...] = ()
    copies_left: int = 0  # so many more would fit into host memory
    copy_error: Failure | None = None  # why a copy could not be made
    pins: tuple[Version, ...] = ()  # versions to be kept
    prefetch: Spec | None = None  # what to fill a copy with ahead
    newest_epoch: Number = Number(0)
    writes: Number = Number(0)
    closing: bool = False
    left: bool = False  # true once close() was called and no peer reads any more: forget this worker
    stops: bool = False
    missed: Failure | None = None
    can_box: bool = False
    read: ReadDone | None = None  # the last one


# --- from the server --------------------------------------------------------------------------------------------------


class Grant(_Message, frozen=True):
    """Permission to read one version of one shard into the buffer or a host copy.

    It has one source, with the same layout. `is_across`: its sources have another one, one worker for each shard of
    that layout, and are read as one. `shares`: both ends are host copies on one host. Map the source's, which is whole;
    where that cannot be, read it at once.
    """

    ticket: Ticket
    version: Version
    sources: tuple[Source, ...]
    reason: str
    epoch: Number = Number(0)  # of the version's publish
    encoding: str = "full"
    to_host: bool = False
    shares: bool = False
    is_across: bool = False

    @property
    def source(self) -> Source:
        """The only source; the first one of a read across."""
        return self.sources[0]

    @property
    def root(self) -> Digest:
        """The content's identity in the reader's layout; empty while that is to be found out."""
        return Digest("") if self.is_across else self.source.root


class Answer(_Message, frozen=True):
    """What became of one call: its version once resolved, then `finished` or `error`; else what it awaits.

    `waiting` of a finished one: why an update has kept what was held. Its version is that one, whatever it was before.
    `instead`: its position was over before this shard came to it; if nothing was resolved it goes on there, no error.
    `past`: another shard is past it, without the server, and how far. This one ends it by itself, too.
    `epoch`: of a publish, that of its version; of a claim, the number of the writer's lease.
    """

    number: int
    version: Version | None = None
    finished: bool = False
    error: Failure | None = None
    waiting: Failure | None = None
    instead: int = 0
    epoch: Number = Number(0)
    past: Step | None = None


class Orders(_Message, frozen=True, tag="orders"):
    """What the server wants of one worker, whole.

    `position` is that of the last call that ended anywhere in the replica, None while the server cannot know it.
    `release`: the host copies of these numbers are not needed any more. Each is named until it is gone, and dropped
    when orders that answer a report of it as `dropping` still name it. `superseded`: what is held with that epoch is
    not its version, of which another publish is finished. `box`: other workers of the model have boxes. What this one
    publishes it is to publish with boxes too.
    """

    number: Number
    session: Number
    acknowledged: int  # the number of the latest report taken in
    lease_s: float
    trust_s: float
    report_s: float
    position: int | None = None
    answer: Answer | None = None
    grant: Grant | None = None
    drained: Version | None = None  # no peer reads it from this worker any more
    newest: Version | None = None  # of the model, so that all workers remember it
    offload: Version | None = None  # to be copied from the buffer to host memory before leaving it
    fetch: Version | None = None  # to fill a host copy with, as grants allow
    release: tuple[int, ...] = ()
    newest_epoch: Number = Number(0)
    superseded: Number = Number(0)
    judged: Answer | None = None  # what became of the publish that the worker has ended without the server
    report_at_once: bool = False  # say at once that this is known
    box: bool = False


class Refusal(_Message, frozen=True, tag="refusal"):
    """The server will not talk to this worker; the connection ends. `retry_s` > 0: it may help to come back then.

    A connection carries one session. A worker whose session has ended is refused with a pause when it reports
    again. By then it has heard all earlier orders, and begins the next session with them.
    """

    code: str
    message: str
    hint: str = ""
    retry_s: float = 0.0


class LayoutWanted(_Message, frozen=True, tag="layout-wanted"):
    """The server does not know what this layout is. One worker that has it answers."""

    layout: Digest


ToServer = Hello | LayoutInfo | Report
ToWorker = Orders | Refusal


def named(sources: tuple[Source, ...]) -> str:
    """The sources of a read, for people."""
    more = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
    return f"{sources[0].worker}{more}"


# --- sums by name -----------------------------------------------------------------------------------------------------


def add_up(table: dict[str, int], name: str, amount: int, *, most: int) -> None:
    """Count the amount under that name. Beyond `most` names, those not heard of for longest become one sum."""
    table[name] = table.pop(name, 0) + amount
    named = [each for each in table if each != OTHERS]
    for each in named[: max(0, len(named) - most)]:
        table[OTHERS] = table.get(OTHERS, 0) + table.pop(each)


# --- how a caller names a version -------------------------------------------------------------------------------------


_LATEST = re.compile(r"latest(?:-(\d{1,9}))?\Z")
PREFETCHED = "prefetched"
HIGHEST_VERSION = 2**62  # fits every integer type on the way
MAX_FIRST_VERSION = 2**53  # JSON has it exactly; microseconds since 1970 are far below
MAX_VERSION_JUMP = 10**9  # a large step has 10**8 tokens, a day 86_400_000 ms


def parse_spec(spec: Spec, verb: str = "") -> Version | None:
    """The version that the spec of this verb names outright, or None if the server has to say. Raises `UsageError`."""
    if isinstance(spec, int) and not isinstance(spec, bool):
        if 0 <= spec <= HIGHEST_VERSION:
            return Version(spec)
        raise UsageError(f"version {spec} is out of range: versions are integers from 0 to 2**62")
    if isinstance(spec, str) and _LATEST.match(spec):
        return None
    if verb == "update" and spec == PREFETCHED:
        return None
    if spec == PREFETCHED:
        raise UsageError(f"{spec!r} is for update() only", hint='use an integer, "latest" or "latest-N"')
    more = ', or for update() "prefetched"' if verb == "update" else ""
    raise UsageError(f"{spec!r} names no version", hint=f'use an integer, "latest" or "latest-N"{more}')


def steps_back(spec: str) -> int:
    """How far before the latest: 0 for "latest", N for "latest-N"."""
    found = _LATEST.match(spec)
    assert found is not None
    return int(found.group(1) or 0)


def call_text(verb: str, spec: Spec, claim: Version | None, *, waits: bool = False) -> str:
    """A call as its caller would write it."""
    if claim is not None:
        return f"mutating(version={claim})"
    return f"{verb}({spec!r}{', wait=True' if waits else ''})" if spec != "" else f"{verb}()"
