"""Workers as the server knows them: their sessions, what each holds, and the reads that are open."""

import heapq
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, TypedDict, TypeVar

import msgspec

from ..protocol.events import Cause, Stalled
from ..protocol.messages import (
    Answer,
    Buffer,
    Empty,
    Filling,
    Grant,
    Hello,
    Holding,
    HostCopy,
    Report,
    Source,
    Vacated,
    Withdrawing,
)
from ..protocol.names import Digest, Number, Shard, Ticket, Version, WorkerId, is_boxed
from ..protocol.settings import Settings

# --- Layouts. A `LayoutKey` names a shard and its layout; a `LayoutSet` is the keys of one whole replica.
#
# All workers with one key have the same bytes of a version, chunk by chunk, and read from each other. A layout with
# boxes is its own key; without boxes the key is the shard's number among so many. A version may be held in several
# layout sets: it is there as long as all keys of one of them are held.


class LayoutKey(NamedTuple):
    """One shard of `shards`, in one layout. `layout` is empty for a shard without boxes."""

    shards: int
    shard: Shard
    layout: Digest = Digest("")

    def of(self, layout: Digest) -> "LayoutKey":
        """The key of the same shard with that layout."""
        own = layout if is_boxed(layout) else Digest("")
        return self if own == self.layout else LayoutKey(self.shards, self.shard, own)

    @property
    def is_boxed(self) -> bool:
        """Workers with other layouts can read it, and it can read from them."""
        return bool(self.layout)


LayoutSet = tuple[LayoutKey, ...]  # the keys of one replica, by shard
Place = tuple[Version, LayoutKey]


def plain_layout_set(shards: int) -> LayoutSet:
    """A replica of so many shards without boxes."""
    return tuple(LayoutKey(shards, Shard(shard)) for shard in range(shards))


# --- How a read goes, as its reader reports it: whether anything arrives at all, and how fast.
#
# A read moves on with each chunk, and with each sixteenth of one that has arrived. So a slow link with large chunks
# does not look like a source that sends nothing, or next to nothing. The rate is that of the last few seconds.


Tier = tuple[bool, bool]  # how far a read comes: (from another site, from another host)

PARTS = 16  # of a chunk: less than one of them counts as nothing
MIN_PART_BYTES = 1 << 12  # of what has no chunks yet: a handshake, a manifest


@dataclass
class Pace:
    """The pace of one read. It is unknown until the reader has reported twice."""

    moved_at: float = -inf  # when it last moved on, or began
    told_at: float = -inf  # when its reader last reported
    waited_at: float = -inf  # when its source last had nothing more for it
    came_at: float = -inf  # when bytes came last, whatever its source had for it
    done: int = 0
    arrived_bytes: int = 0
    rate: float | None = None  # bytes/s over the last few seconds, the most that it may be; None: not known yet
    first: int | None = None  # chunks in place when it began
    _part_bytes: int = 0  # that had come when it last moved on
    _marks: deque[tuple[float, int]] = field(default_factory=deque)

    def restart(self, now: float) -> None:
        """Starts measuring anew: it can bring nothing now, or its reader could not report."""
        self.moved_at = self.told_at = now
        self.rate, self._part_bytes = None, self.arrived_bytes
        self._marks.clear()

    def wait(self, now: float) -> None:
        """Its source has nothing more for it now: it does not count as stalled."""
        self.moved_at = self.waited_at = now

    def note(self, now: float, *, arrived_bytes: int, done: int, chunk_bytes: int, over_s: float) -> None:
        """What its reader has just reported. The rate is taken over `over_s`; `chunk_bytes` is 0 while unknown."""
        self.first = done if self.first is None else self.first
        quantum_bytes = 0 if arrived_bytes else chunk_bytes
        arrived_bytes = arrived_bytes or (done - self.first) * chunk_bytes
        is_other = arrived_bytes < self.arrived_bytes or done < self.done  # another transport, another fill
        self.arrived_bytes = arrived_bytes
        if is_other or not self._marks or self.told_at < now - over_s:
            self.restart(now)  # it began at some time after its reader's last report
        part_bytes = max(MIN_PART_BYTES if not chunk_bytes else 1, chunk_bytes // PARTS)
        if done > self.done or arrived_bytes >= self._part_bytes + part_bytes:
            self.moved_at, self._part_bytes = now, arrived_bytes
            self.came_at = now
        self.done, self.told_at = done, now
        marks = self._marks
        marks.append((now, arrived_bytes))
        while len(marks) > 2 and marks[1][0] <= now - over_s:
            marks.popleft()
        took_s = now - marks[0][0]
        if took_s >= over_s:
            self.rate = (arrived_bytes - marks[0][1] + quantum_bytes) / took_s

    def is_still(self, now: float, patience_s: float) -> bool:
        """True if it has brought nothing for that long, although its reader has reported."""
        return now - self.moved_at >= patience_s and self.told_at - self.moved_at >= patience_s / 2


@dataclass(frozen=True)
class Avoided:
    """Until when a worker is avoided as a source because reads from it were slow."""

    until: float = -inf
    times: int = 0  # that it was left in a row

    def again(self, now: float, first_s: float, max_doublings: int) -> "Avoided":
        """Count that a reader has left the source once more."""
        return Avoided(now + first_s * 2.0 ** min(self.times, max_doublings), self.times + 1)


def upper_quartile(rates: Collection[float]) -> float | None:
    """The rate that a quarter of them reach; the highest of up to four."""
    return sorted(rates)[3 * len(rates) // 4] if rates else None


# --- What a worker has: its buffer and its host copies, as far as the server believes it.


WHOLE = (Holding, Withdrawing, Vacated)  # buffers that have all of a version


@dataclass(slots=True)
class Content:
    """What a worker has, as far as the server believes it. What differs from its version counts as poisoned."""

    buffer: Buffer
    copies: tuple[HostCopy, ...]
    layout_key: LayoutKey  # of the tensors that are registered now
    held: Version | None = field(init=False)  # the version all of which is in the buffer
    held_place: Place | None = field(init=False)  # the same with its layout key, unless the worker withdraws it
    kept: tuple[Version, ...] = field(init=False)  # whole, in the buffer or in a copy, and not to be taken back
    versions: dict[Version, bool] = field(init=False)  # of which it has anything, and whether that is all of it
    places: dict[Place, bool] = field(init=False)  # the same by layout key: a copy may be of tensors registered before

    def __post_init__(self) -> None:
        self.held = self.buffer.version if isinstance(self.buffer, WHOLE) else None
        self.held_place = (self.buffer.version, self.layout_key) if isinstance(self.buffer, Holding) else None
        copied = tuple(copy.version for copy in self.copies if copy.whole and not copy.dropping)
        self.kept = copied if self.held_place is None else (self.held_place[0], *copied)
        self.places = _places_in(self.buffer, self.copies, self.layout_key)
        self.versions = {}
        for (version, _), is_whole in self.places.items():
            self.versions[version] = is_whole or self.versions.get(version, False)

    def layout_key_of(self, version: Version, *, is_copy: bool) -> LayoutKey:
        """The layout key of its buffer or host copy of that version."""
        layout = next((copy.layout for copy in self.copies if copy.version == version), NO_LAYOUT) if is_copy else ""
        return self.layout_key.of(Digest(layout)) if layout else self.layout_key


@dataclass
class BufferHolders:
    """By place: the workers that hold it in their buffer and do not withdraw it."""

    by_place: dict[Place, dict[WorkerId, None]] = field(default_factory=dict)

    def at(self, version: Version, key: LayoutKey) -> dict[WorkerId, None]:
        """The holders of that place."""
        return self.by_place.get((version, key), {})

    def has_other(self, worker: WorkerId, place: Place) -> bool:
        """Another worker holds it too."""
        those = self.by_place.get(place, {})
        return len(those) > (worker in those)

    def move(self, worker: WorkerId, old: Content, new: Content) -> None:
        """Notes that the content of the worker has changed."""
        before, after = old.held_place, new.held_place
        if before == after:
            return
        if before is not None:
            those = self.by_place[before]
            del those[worker]
            if not those:
                del self.by_place[before]
        if after is not None:
            self.by_place.setdefault(after, {})[worker] = None


def _places_in(buffer: Buffer, copies: tuple[HostCopy, ...], key: LayoutKey) -> dict[Place, bool]:
    found: dict[Place, bool] = {}
    for copy in copies:
        place = copy.version, key.of(copy.layout) if copy.layout else key
        found[place] = copy.whole or found.get(place, False)
    if isinstance(buffer, WHOLE):
        found[buffer.version, key] = True
    elif isinstance(buffer, Filling):
        found.setdefault((buffer.version, key), False)
    return found


def are_other_copies(former: tuple[HostCopy, ...], copies: tuple[HostCopy, ...]) -> bool:
    """True if they differ in something that concerns other workers."""
    return former != copies and [_kind(copy) for copy in former] != [_kind(copy) for copy in copies]


def _kind(copy: HostCopy) -> tuple[object, ...]:
    return copy.number, copy.version, copy.whole, copy.dropping


NO_LAYOUT = Digest("")
NOTHING = Content(Empty(), (), LayoutKey(1, Shard(0)))


def held_in(buffer: Buffer) -> Version | None:
    """The version that the buffer has whole."""
    return buffer.version if isinstance(buffer, WHOLE) else None


def version_in(buffer: Buffer | None) -> Version | None:
    """The version that the buffer has, whole or in part."""
    return buffer.version if isinstance(buffer, (Filling, *WHOLE)) else None


# --- Watches: the topics that each member of a model waits for.
#
# A member that is decided for says what it waits for from then on, as topics. A change of a topic
# makes only the members dirty that wait for it.


# What may change: its kind, version and layout key. Without version and key it concerns the whole model.
Topic = tuple[str, Version | None, LayoutKey | None]

NEWS: Topic = ("news", None, None)  # which versions there are, and which of them are to be kept
SERVICE: Topic = ("service", None, None)  # whether an existing version is served
ARRIVALS: Topic = ("arrivals", None, None)  # whether others still are on their way to a version


def loss_of(version: Version) -> Topic:
    """Whether the version is lost."""
    return "loss", version, None


def sources_of(version: Version, key: LayoutKey) -> Topic:
    """From which workers that key of the version may be read."""
    return "sources", version, key


def references_of(version: Version, key: LayoutKey) -> Topic:
    """Which workers keep that key of the version, and which are to get it yet."""
    return "references", version, key


class Watches:
    """The members by topic, and the topics by member. Each call takes as long as what it is given or returns."""

    def __init__(self) -> None:
        self._of: dict[WorkerId, tuple[Topic, ...]] = {}
        self._by: dict[Topic, dict[WorkerId, None]] = {}

    def watch(self, worker: WorkerId, topics: tuple[Topic, ...]) -> None:
        """The member waits for these, and for nothing else."""
        former = self._of.get(worker, ())
        if topics == former:
            return
        for topic in former:
            if topic not in topics:
                waiting = self._by[topic]
                del waiting[worker]
                if not waiting:
                    del self._by[topic]
        for topic in topics:
            self._by.setdefault(topic, {})[worker] = None
        if topics:
            self._of[worker] = topics
        else:
            del self._of[worker]

    def waiting_for(self, topic: Topic) -> list[WorkerId]:
        """The members that wait for it, in the order in which they came."""
        return list(self._by.get(topic, ()))

    def waits_for_more(self, worker: WorkerId, than: str) -> bool:
        """It waits for something else too than topics of that kind."""
        return any(topic[0] != than for topic in self._of.get(worker, ()))

    def is_waiting(self, worker: WorkerId) -> bool:
        """It waits for something."""
        return worker in self._of


# --- The reads that may be going on: every grant from when it is given until its reader says that it is closed.
#
# A read that was taken back is *void*. It no longer counts, but it stays open until its reader confirms that it has
# stopped: its sources must not change a buffer that a reader may still read.
#
# A read *across* has one ticket for all shards of another layout. Its sources have all of the version, so no worker
# reads behind it in turn. Where one of them is gone, the read ends as a whole, and the next one goes on with the rest.


Key = TypeVar("Key")


@dataclass
class OpenRead:
    """One grant, and whether it is still valid."""

    grant: Grant
    reader: WorkerId
    layout_key: LayoutKey  # of its reader
    given_at: float  # when it was granted, or heard of
    is_void: bool = False
    began_at: float = inf  # when it could bring something
    pace: Pace = field(default_factory=Pace)
    moves: int = 0  # how often its reader has left a source for another one, in a row
    left: WorkerId | None = None  # the slow source that its reader has left for this one
    is_stuck: bool = False  # true if it is slow and no other source would help
    shares: bool = False  # it maps the host copy of its source: there is nothing to read behind it

    def __post_init__(self) -> None:
        self.ticket: Ticket = self.grant.ticket
        self.sources: tuple[Source, ...] = self.grant.sources
        self.source: WorkerId = self.grant.source.worker  # the only one, or the first
        self.from_host: bool = self.grant.source.from_host
        self.version: Version = self.grant.version

    @property
    def is_across(self) -> bool:
        """Its sources have another layout than its reader."""
        return self.grant.is_across

    def reads_copy_of(self, worker: WorkerId) -> bool:
        """True if it reads a host copy of that worker."""
        return any(each.worker == worker and each.from_host for each in self.sources)


class LeftRead(NamedTuple):
    """A read that its reader has left before the version was complete, and why."""

    version: Version
    to_host: bool
    sources: tuple[Source, ...]
    why: str
    cause: Cause


def replicas_of(sources: Collection[Source]) -> str:
    """The replicas of these sources, for people."""
    return ", ".join(dict.fromkeys(each.worker.replica for each in sources))


class OpenCall(NamedTuple):
    """A replica's call that is not over, as it was when the server last looked whether it stands still."""

    number: int
    moved_at: float  # since then it is as it is now
    how_far: tuple[object, ...] = ()
    told: Stalled | None = None  # the event of that it stands still, if there was one


class WorkerName(TypedDict):
    """The fields of an event that name its worker."""

    model: str
    replica: str
    shard: int


def name_of(worker: WorkerId) -> WorkerName:
    """The worker as events name it."""
    return WorkerName(model=worker.model, replica=worker.replica, shard=worker.shard)


class OpenReads:
    """All open reads, found by reader and by each source. Each method takes as long as the reads it returns."""

    def __init__(self) -> None:
        self.current: dict[WorkerId, OpenRead] = {}  # by reader: the one read that it may go on with, which is not void
        self._of_reader: dict[WorkerId, dict[Ticket, OpenRead]] = {}
        # by reader and ticket: a worker that lies may repeat a ticket number
        self._from_source: dict[WorkerId, dict[tuple[WorkerId, Ticket], OpenRead]] = {}

    def add(self, read: OpenRead) -> None:
        self._of_reader.setdefault(read.reader, {})[read.ticket] = read
        for source in read.sources:
            self._from_source.setdefault(source.worker, {})[read.reader, read.ticket] = read
        if not read.is_void:
            self.current[read.reader] = read

    def take_back(self, read: OpenRead) -> None:
        """Makes the read void."""
        read.is_void = True
        if self.current.get(read.reader) is read:
            del self.current[read.reader]

    def of(self, reader: WorkerId) -> list[OpenRead]:
        return list(self._of_reader.get(reader, {}).values())

    def from_source(self, source: WorkerId) -> list[OpenRead]:
        return list(self._from_source.get(source, {}).values())

    def from_buffer(self, source: WorkerId, version: Version) -> list[OpenRead]:
        """Those that read that version from its buffer, which may not change meanwhile."""
        reads = self._from_source.get(source, {}).values()
        return [read for read in reads if read.version == version and not read.reads_copy_of(source)]

    def from_copy(self, source: WorkerId, version: Version) -> list[OpenRead]:
        """Those that read its host copy of that version."""
        reads = self._from_source.get(source, {}).values()
        return [read for read in reads if read.version == version and read.reads_copy_of(source)]

    def load(self, source: WorkerId) -> int:
        """The number of reads that are open on it."""
        return len(self._from_source.get(source, {}))

    def close(self, reader: WorkerId, upto: Ticket | None) -> list[OpenRead]:
        """The reader's reads up to that ticket (None: all of them) are over. Returns them."""
        if reader not in self._of_reader:
            return []
        over = [read for read in self.of(reader) if upto is None or read.ticket <= upto]
        for read in over:
            if self.current.get(reader) is read:
                del self.current[reader]
            _forget(self._of_reader, reader, read.ticket)
            for source in read.sources:
                _forget(self._from_source, source.worker, (reader, read.ticket))
        return over

    def readers_behind(self, worker: WorkerId, version: Version) -> dict[WorkerId, None]:
        """The worker itself, its readers of the version, their readers, and so on."""
        found: dict[WorkerId, None] = {worker: None}
        queue = [worker]
        while queue:
            for read in self._from_source.get(queue.pop(), {}).values():
                if read.version == version and read.reader not in found:
                    found[read.reader] = None
                    queue.append(read.reader)
        return found

    def chain(self, reader: WorkerId) -> list[WorkerId]:
        """The source of the reader, the source of that one for the same version, and so on; each of them once."""
        found: list[WorkerId] = []
        read = self.current.get(reader)
        version = read.version if read is not None else None
        while read is not None and read.version == version and read.source not in found:
            found.append(read.source)
            read = self.current.get(read.source)
        return found

    def all(self) -> list[OpenRead]:
        return [read for reads in self._of_reader.values() for read in reads.values()]


def _forget(table: dict[WorkerId, dict[Key, OpenRead]], key: WorkerId, name: Key) -> None:
    reads = table.get(key, {})
    reads.pop(name, None)  # a worker that lies may have named one source twice
    if not reads:
        table.pop(key, None)


# --- Sessions: one `Member` for each, and when its lease ends.
#
# A session is one life of a worker as the server knows it. It begins with the first report of that life, and ends when
# no report came for a lease, or when the worker says that it leaves. A broken connection is not a death.


TRIES_A_TURN = 3  # reads that fail, without a chunk between them, and it is another one's turn


@dataclass
class FailedSource:
    """A source that failed this reader: when it may be tried again."""

    until: float
    times: int = 1

    @property
    def is_for_good(self) -> bool:
        """It is not tried again by this call.

        It brought wrong bytes, and not for the first time: to this reader, or lately to another one. Or it has another
        layout, of which it cannot show all the tiles that this reader wants.
        """
        return self.until == inf


@dataclass
class Tries:
    """What has failed in one call of a worker."""

    call: int = 0  # its number; 0: reads without a call
    sources: dict[WorkerId, FailedSource] = field(default_factory=dict)
    failures: int = 0  # failed reads since the last new chunk
    chunks: int = 0  # in place at the last failed read


class Told(msgspec.Struct, frozen=True):
    """The part of a member's orders that may be news to it."""

    position: int | None = None
    answer: Answer | None = None
    grant: Grant | None = None
    drained: Version | None = None
    offload: Version | None = None
    fetch: Version | None = None
    release: tuple[int, ...] = ()
    superseded: Number = Number(0)
    judged: Answer | None = None
    report_at_once: bool = False
    box: bool = False


@dataclass
class Member:
    """One session of a worker."""

    hello: Hello
    sender: str
    session: Number
    lease_end: float
    silent_at: float = inf  # from then on two reports are overdue
    report: Report = field(default_factory=lambda: Report(number=0))  # as it came, never changed
    content: Content = field(default_factory=lambda: NOTHING)  # what the server believes of it
    is_connected: bool = True
    has_lived_before: bool = False  # its life had a session before this one, perhaps with a former server
    tries: Tries = field(default_factory=Tries)  # of its present or last call
    reads_without_progress: int = 0  # failed reads since the last new chunk, of any call
    alone_until: float = -inf  # until then it fetches copies itself: it could not map one
    avoided: Avoided = Avoided()  # as a source
    left_read: LeftRead | None = None  # since then it was given no other
    has_failed_a_reader: bool = False  # true until its next report after a read from it failed
    told: Told | None = None  # its last orders, as far as they may differ from the next
    settled_at: int = -1  # `State.happened` when it was last decided for
    report_s: float = 0.0  # the pause between reports that it was last told
    is_drained: bool = False  # true once it was told that its buffer has no readers: none may begin
    releasing: dict[int, None] = field(default_factory=dict)  # numbers of host copies that it was told to drop
    superseded: Number = Number(0)  # the epoch of its buffer, if another publish of that version is finished
    wakes_at: float = inf  # when to decide for it again without a report
    queued_at: float = inf  # its valid entry in the queue of times

    def __post_init__(self) -> None:
        self.worker: WorkerId = self.hello.worker
        self.shard: Shard = self.hello.shard
        self.layout_key = LayoutKey(self.hello.shards, self.shard)  # of the tensors that it has registered

    def note_heard(self, at: float, settings: Settings) -> None:
        """It was heard at that time: its lease begins anew."""
        self.lease_end = at + settings.lease_s
        self.note_pace(self.report_s, settings)

    def note_pace(self, report_s: float, settings: Settings) -> None:
        """It is told to report so often."""
        self.report_s = report_s
        self.silent_at = self.lease_end - settings.lease_s + 2 * max(settings.report_s, report_s)

    @property
    def turns_lost(self) -> int:
        """How often it was elected to read, and nothing came: workers with fewer come first."""
        return self.reads_without_progress // TRIES_A_TURN

    @property
    def is_full(self) -> bool:
        """Its buffer has all of some version."""
        return self.content.held is not None

    @property
    def may_drop(self) -> bool:
        """True once a server has told it that its buffer has no readers."""
        return self.is_drained or self.report.stops

    def fits(self, layout: Digest | None) -> bool:
        """Its registered tensors have that layout, as far as is known."""
        return bool(self.report.layout) and layout in (None, self.report.layout)

    def holds(self, version: Version) -> bool:
        """Its buffer has all of the version."""
        return self.content.held == version

    def will_hold(self, version: Version) -> bool:
        """Its buffer has all of the version, and does not withdraw it."""
        return self.content.held_place is not None and self.content.held == version

    def will_stay(self, version: Version) -> bool:
        """Its buffer has all of the version, withdraws nothing, and the worker is not closing."""
        return self.will_hold(version) and not self.report.closing

    def holds_until_told(self, version: Version) -> bool:
        """Its buffer has all of the version, and was not told that it may drop it."""
        buffer = self.content.buffer
        is_kept = isinstance(buffer, Holding) or (isinstance(buffer, Withdrawing) and not self.may_drop)
        return is_kept and self.holds(version)

    def will_keep(self, version: Version) -> bool:
        """Its buffer or a host copy has all of the version until the server says that it may drop it."""
        return not self.report.closing and (self.holds_until_told(version) or self.has_whole_copy(version))

    def copy(self, version: Version) -> HostCopy | None:
        """Its host copy of the version, whole or not, unless it is being dropped."""
        for copy in self.content.copies:
            if copy.version == version and not copy.dropping and copy.number not in self.releasing:
                return copy
        return None

    def has_copy(self, version: Version) -> bool:
        """It has a host copy of the version that the server has not released, though it may want to drop it."""
        return any(copy.version == version and copy.number not in self.releasing for copy in self.content.copies)

    def is_dropping_copy(self, version: Version) -> bool:
        """Its only host copies of the version are being dropped."""
        return self.copy(version) is None and any(copy.version == version for copy in self.content.copies)

    def has_whole_copy(self, version: Version) -> bool:
        copy = self.copy(version)
        return copy is not None and copy.whole

    def can_fill_itself(self, version: Version) -> bool:
        """It has a whole host copy of the version from which it can fill its buffer."""
        copy = self.copy(version)
        return copy is not None and copy.whole and not copy.unfit

    def gives_up(self, copy: HostCopy) -> bool:
        """It drops that host copy whatever the other workers need."""
        return copy.dropping and (not copy.whole or self.report.closing)

    def filled(self, version: Version, *, to_host: bool) -> tuple[int, int, bool]:
        """Of its buffer or host copy: (chunks in place, chunks in all, whether it is filled with that version)."""
        place = self.copy(version) if to_host else self.content.buffer
        if isinstance(place, (HostCopy, Filling)) and place.version == version:
            return place.done, place.chunks, True
        return 0, 0, False

    @property
    def chunks_in_place(self) -> int:
        """Chunks in place of all that it is filling now."""
        copies = sum(copy.done for copy in self.content.copies if not copy.dropping)
        return copies + (self.content.buffer.done if isinstance(self.content.buffer, Filling) else 0)

    def done(self, *, from_host: bool, version: Version) -> int:
        """Chunks in place of a version that its buffer or host copy is being filled with."""
        if from_host:
            copy = self.copy(version)
            return copy.done if copy is not None else 0
        buffer = self.content.buffer
        return buffer.done if isinstance(buffer, Filling) and buffer.version == version else 0


class Members(dict[WorkerId, Member]):
    """The sessions, by worker, and a queue of the times at which one of them needs to be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self._times: list[tuple[float, WorkerId]] = []

    def all(self) -> list[Member]:
        return list(self.values())

    def add(self, member: Member) -> None:
        self[member.worker] = member
        self._queue(member)

    def wake(self, member: Member, at: float) -> None:
        """Look at this member again at that time."""
        if at < member.wakes_at:
            member.wakes_at = at
            self._queue(member)

    def _queue(self, member: Member) -> None:
        at = min(member.lease_end, member.wakes_at)
        if at < member.queued_at:
            member.queued_at = at
            heapq.heappush(self._times, (at, member.worker))

    def next_time(self) -> float:
        return self._times[0][0] if self._times else inf

    def due(self, now: float) -> tuple[list[Member], list[Member]]:
        """(members whose lease has ended, members to look at). Cheap while leases are renewed: one step a lease."""
        ended: list[Member] = []
        woken: list[Member] = []
        while self._times and self._times[0][0] <= now:
            at, worker = heapq.heappop(self._times)
            member = self.get(worker)
            if member is None or member.queued_at != at:
                continue  # of a former session, or it was queued for an earlier time since
            member.queued_at = inf
            if member.lease_end <= now:
                ended.append(member)
                continue
            if member.wakes_at <= now:
                member.wakes_at = inf
                woken.append(member)
            self._queue(member)
        return ended, woken
