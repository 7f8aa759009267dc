"""The server's state: its clock, its numbers, its tables, and the questions that several rules ask of them."""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from ..protocol.events import MAX_EVENTS, Cause, Event, ReadMoved, Warned
from ..protocol.messages import (
    Buffer,
    Filling,
    Grant,
    Hello,
    Holding,
    LayoutInfo,
    Poisoned,
    Report,
    Source,
    Withdrawing,
)
from ..protocol.names import Digest, ModelName, Number, ReplicaName, Ticket, Version, WorkerId
from ..protocol.settings import Settings
from .groups import GroupCall, Replica
from .journal import Forgotten, Record
from .members import (
    LayoutKey,
    LayoutSet,
    LeftRead,
    Member,
    Members,
    OpenCall,
    OpenRead,
    OpenReads,
    Place,
    Topic,
    name_of,
    references_of,
    replicas_of,
    sources_of,
)
from .versions import Model, VersionRecord

# --- The time awake: the caller's clock, less the time for which the server stood still.
#
# While a lease runs, the server asks to be called at least as often as workers report. When it is called much later, it
# stood still for that long: it was stopped, swapped out or moved. It heard no worker meanwhile, so that time does
# not count.


LATE = 0.5  # of the time between two reports: to be called later than that is a pause, not a slow timer or loop


@dataclass
class Clock:
    """The clock of one life of the server."""

    now: float  # awake
    started: float
    paused_s: float = 0.0  # how far it lags behind the caller's

    def advance(self, caller_now: float, *, due: float, report_s: float) -> bool:
        """The caller's clock says `caller_now`; it was to call at `due`, in time awake. Returns whether it paused.

        A pause counts from when the server wanted to be called, so between two pauses a lease loses the time of one
        report: however often the server stands still, the dead are gone after as many calls as a lease has reports.
        """
        late_s = caller_now - (self.paused_s + due)
        is_pause = late_s > LATE * report_s
        if is_pause:
            self.paused_s += late_s
        awake = caller_now - self.paused_s
        self.now = max(self.now, awake if late_s < 0 else max(awake, due))  # what was due is due, however it rounds
        return is_pause


# --- The numbers of one life of the server: they rise over all its lives.
#
# A life begins at the microseconds of the clock, or above all numbers of its journal, and gives out far fewer than one
# a microsecond. Where there is no journal and the clock has gone back, it learns from the workers how far the one
# before it had come.


MARGIN = 2**22  # so many numbers may have been given out since the journal last named one: 20 minutes of a large fleet
MAX_AHEAD = 2**42  # by so much a clock may have gone back: 50 days. Higher numbers are not believed


class Numbers:
    """Gives out the numbers of sessions, tickets, epochs and orders."""

    def __init__(self, first: int) -> None:
        self.first = self.last = self.named = first

    def next(self) -> Number:
        """The next number, above all that were given out."""
        self.last += 1
        return Number(self.last)

    def is_ours(self, number: int) -> bool:
        """This life or one before it has given it out."""
        return number <= self.last

    def learn(self, report: Report) -> bool:
        """Learn what a worker has heard from former lives. False: it names a number that no server has given out."""
        ticket = report.reading.ticket if report.reading is not None else 0
        epochs = [getattr(one, "epoch", 0) for one in (report.buffer, report.call, *report.copies)]
        told = (report.seen, report.session, report.closed, ticket, report.newest_epoch, report.writes, *epochs)
        most = self.first + MAX_AHEAD
        if max(told) > self.last:
            self.last = max(self.last, *[number for number in told if number <= most], 0)
        return max(told) <= max(self.last, most)


# --- All that the server knows: its clock, its numbers, its tables, and the dirty workers.
#
# A function that changes it marks as dirty the members whose orders may change with it.


@dataclass
class State:
    """All tables of one life of the server."""

    settings: Settings
    clock: Clock
    numbers: Numbers
    recovered_at: float  # until then promises of a former life may be unknown
    is_recovering: bool  # a model listens, or any worker may come: no journal says which workers live
    is_untold: bool = False  # no journal says which workers live
    told_upto: Number = Number(0)  # the highest number in the journal of former lives
    boot: str = ""  # of the machine
    journal: list[Record] = field(default_factory=list)  # to be written before anything is sent
    is_journal_old: bool = True  # true if it is to be written anew
    models: dict[ModelName, Model] = field(default_factory=dict)
    empty_models: dict[ModelName, float] = field(
        default_factory=dict
    )  # without a worker, since then; the longest first
    forget_at: float = inf  # when the first of those without a version is forgotten
    members: Members = field(default_factory=Members)
    reads: OpenReads = field(default_factory=OpenReads)
    hellos: dict[str, Hello] = field(default_factory=dict)  # by connection
    speakers: dict[str, WorkerId] = field(default_factory=dict)  # its worker, by connection
    refused: dict[WorkerId | None, str] = field(default_factory=dict)  # codes of workers that were refused lately
    spent: dict[str, None] = field(default_factory=dict)  # connections of sessions that have ended
    layouts: dict[Digest, LayoutInfo] = field(default_factory=dict)
    max_layouts: int = field(init=False)  # above that, unused ones are forgotten
    counters: Counter[str] = field(default_factory=Counter)
    failed_reads: Counter[str] = field(default_factory=Counter)  # by code of the error
    waited: deque[tuple[str, float]] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))  # verb, s; not taken yet
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))  # that the shell has not taken yet
    dirty: OrderedDict[WorkerId, bool] = field(
        default_factory=OrderedDict
    )  # workers to decide for; true: answer even without news
    open_calls: dict[tuple[ModelName, ReplicaName], OpenCall] = field(default_factory=dict)
    stalls_at: float = inf  # when to look whether one of them stands still
    happened: int = 0  # events that may concern other workers, counted
    to_advance: dict[tuple[ModelName, ReplicaName], None] = field(default_factory=dict)  # calls that may proceed
    report_s: float = field(init=False)  # the pause between a worker's reports; see `note_size`

    def __post_init__(self) -> None:
        self.now: float = self.clock.now  # the time awake
        self.max_layouts = self.settings.max_versions
        self.note_size()

    def note_size(self) -> None:
        """Called when members have joined or left."""
        self.report_s = self.settings.report_s_of(len(self.members))

    def next_number(self) -> Number:
        return self.numbers.next()

    def place(self, member: Member) -> tuple[Model, Replica]:
        """The model and the replica that it belongs to."""
        model = self.models[member.hello.model]
        return model, model.replicas[member.hello.replica]

    def known(self, worker: WorkerId) -> Member:
        """The member, which must be there."""
        member = self.members.get(worker)
        assert member is not None, f"{worker} is no member"
        return member

    # --- reads --------------------------------------------------------------------------------------------------------

    def open_read(self, read: OpenRead) -> None:
        self.reads.add(read)
        self._note_load(read)

    def give(
        self,
        reader: Member,
        record: VersionRecord,
        sources: Sequence[tuple[WorkerId, bool]],
        reason: str,
        *,
        to_host: bool,
        moves: int = 0,
        left: WorkerId | None = None,
        shares: bool = False,
        across: LayoutSet = (),
    ) -> None:
        """Let the reader read the version from these workers (true: from a host copy), for that reason.

        `moves`: how often the reader has left slow sources for this read, and `left` the last one.
        `shares`: the memory of a host copy, rather than to make another. `across`: their layout keys, if those are not
        the reader's.
        """
        named, site = [], reader.hello.site
        for (worker, from_host), key in zip(sources, across or [reader.layout_key], strict=True):
            its = self.known(worker).hello
            named.append(Source(worker, from_host, its.endpoints, record.roots[key], its.site != site))
        ticket = Ticket(self.next_number())
        grant = Grant(
            *(ticket, record.version, tuple(named), reason, record.epoch),
            to_host=to_host,
            shares=shares,
            is_across=bool(across),
        )
        read = OpenRead(grant, reader.worker, reader.layout_key, self.now, began_at=self.now)
        read.shares, read.moves, read.left = shares, moves, left
        self._note_move(reader, read)
        model = self.models[reader.hello.model]
        self.open_read(read)
        model.add_holder(record, reader.worker, reader.layout_key)  # others may read behind it from now on
        self.counters["grants"] += 1
        self.mark_waiting_dirty(model, sources_of(record.version, reader.layout_key))

    def _note_move(self, reader: Member, read: OpenRead) -> None:
        """The reader has been given that read. It is a move if it has left another one of the same version."""
        left, reader.left_read = reader.left_read, None
        if left is not None and (left.version, left.to_host) == (read.version, read.grant.to_host):
            moved = ReadMoved(
                **name_of(reader.worker),
                version=read.version,
                source=replicas_of(read.sources),
                former=replicas_of(left.sources),
                why=left.why,
                cause=left.cause,
                to_host=left.to_host,
            )
            self.events.append(moved)

    def take_back(self, read: OpenRead, why: str = "", cause: Cause = "withdrawn") -> None:
        """The read is void: its reader gets another source, for that reason, or none."""
        reader = self.members.get(read.reader)
        if reader is not None:
            left = LeftRead(read.version, read.grant.to_host, read.sources, why, cause)
            reader.left_read = left if why else None
        self.reads.take_back(read)
        self.mark_dirty(read.reader)
        self.mark_readers_dirty(read.reader)
        if read.grant.to_host:  # others of its host may have waited for what it fetched
            self.mark_waiting_dirty(self.models[read.reader.model], sources_of(read.version, read.layout_key))

    def call_stuck(self, read: OpenRead, *, is_stuck: bool = True) -> None:
        """The read is slow and no other source would help: readers behind it need not wait. Or that is over."""
        if is_stuck and not read.is_stuck:
            self.mark_dirty(read.reader)  # its call may have no source that brings anything
            self.mark_readers_dirty(read.reader)
        read.is_stuck = is_stuck

    def close_reads(self, reader: WorkerId, upto: Ticket | None) -> list[OpenRead]:
        """The reader's reads up to that ticket (None: all of them) are over. Returns them."""
        over = self.reads.close(reader, upto)
        for read in over:
            self._note_load(read)
        return over

    def _note_load(self, read: OpenRead) -> None:
        for source in read.sources:
            model = self.models.get(source.worker.model)
            if model is not None:
                model.note_load(source.worker, self.reads.load(source.worker))

    # --- dirty workers: those to decide for again ---------------------------------------------------------------------

    def mark_dirty(self, worker: WorkerId) -> None:
        """Decide for this worker and its replica again, and tell it what is new."""
        self.dirty.setdefault(worker, False)
        self.to_advance[worker.model, worker.replica] = None

    def mark_answered(self, worker: WorkerId) -> None:
        """Decide for this worker, and tell it how things are although nothing may be new."""
        self.dirty[worker] = True

    def mark_replica_dirty(self, replica: Replica) -> None:
        for worker in replica.members.values():
            self.mark_dirty(worker)

    def mark_callers_dirty(self, replica: Replica) -> None:
        """The call of the replica has gone as far as it can for now: decide for its members."""
        for worker in replica.members.values():
            self.dirty.setdefault(worker, False)

    def mark_everyone_dirty(self, model: Model) -> None:
        """Something rare has happened, which may change the orders of any member of the model."""
        for replica in model.replicas.values():
            self.mark_replica_dirty(replica)

    def mark_waiting_dirty(self, model: Model, *topics: Topic) -> None:
        """Something of these topics has changed."""
        for topic in topics:
            for worker in model.watches.waiting_for(topic):
                self.mark_dirty(worker)

    def mark_concerned_dirty(self, model: Model, places: Iterable[Place]) -> None:
        """What some member has there, or whether it can be reached, is not what it was."""
        for version, key in places:
            self.mark_waiting_dirty(model, sources_of(version, key), references_of(version, key))

    def mark_readers_dirty(self, source: WorkerId) -> None:
        """Its readers may need another source."""
        for read in self.reads.from_source(source):
            self.mark_dirty(read.reader)

    def model_to_forget(self) -> ModelName | None:
        """The model whose place a new one may have: the longest left without a version, else the longest left.

        The numbers of a model that has had a version are kept for a lease at least: its trainer may be started again.
        """
        unnamed = next((name for name in self.empty_models if self.models[name].newest is None), None)
        oldest = next(iter(self.empty_models), None)
        if unnamed is None and oldest is not None and self.now >= self.empty_models[oldest] + self.settings.lease_s:
            return oldest
        return unnamed

    def forget_model(self, name: ModelName) -> None:
        """No worker is of it any more: a worker that comes begins the model anew."""
        if self.models[name].newest is not None:
            text = f"{name} is forgotten, with its numbers: {len(self.models)} models is the most here"
            self.events.append(Warned(model=name, what=text))
        del self.models[name], self.empty_models[name]
        self.journal.append(Forgotten(name))

    def forget(self, worker: WorkerId) -> None:
        """It is no member any more: nothing is said to it."""
        self.dirty.pop(worker, None)


# --- Questions about the state that several rules ask. None of them changes anything.


FILLS = ("replicate", "update")


def is_silent(state: State, member: Member) -> bool:
    """True if it has missed more than two reports."""
    return state.now > member.silent_at


def is_here(state: State, member: Member) -> bool:
    """It seems to live: its connection is open, and it was heard lately. A dead host leaves its connections open."""
    return member.is_connected and state.now <= member.silent_at


def answers_until(state: State, member: Member) -> float:
    """Until then it counts as a source that answers. Its connection may be a new one in a moment."""
    until = member.lease_end - state.settings.lease_s + state.settings.keep_held_s
    return max(until, member.silent_at) if member.is_connected else until


def is_doubtful(state: State, source: Member) -> bool:
    """A reader may fail to read from it. What one reader has learned helps the others."""
    return source.has_failed_a_reader or not is_here(state, source)


def is_read_though_poisoned(buffer: Buffer) -> bool:
    """A fill has failed there, and others may still read its chunks: they may not change yet."""
    return isinstance(buffer, Poisoned) and buffer.version is not None


def is_retained(state: State, model: Model, member: Member, version: Version) -> bool:
    """The member keeps the version though it has no room."""
    return model.is_retained(version, _retain_of(state, member))


def gives_way(state: State, model: Model, member: Member, version: Version) -> bool:
    """The member's copy of the version goes where there is no room."""
    return model.gives_way(version, _retain_of(state, member))


def _retain_of(state: State, member: Member) -> int:
    return state.settings.retain_of(member.hello.retain, is_reliable=member.hello.reliable)


def members_of(state: State, model: Model, key: LayoutKey) -> Iterator[Member]:
    """The living members with that layout key, one of each replica."""
    for replica in model.replicas.values():
        member = state.members.get(replica.members[key.shard]) if key.shard in replica.members else None
        if member is not None and member.layout_key == key:
            yield member


def is_full(member: Member, version: Version, from_host: bool) -> bool:
    """It has all of the version, in its host copy or in its buffer."""
    return member.has_whole_copy(version) if from_host else member.content.held == version


def is_leaving(source: Member, version: Version, from_host: bool) -> bool:
    """The source wants to give up what it has of the version there."""
    buffer = source.content.buffer
    if from_host:
        return source.report.closing
    return isinstance(buffer, Withdrawing) and buffer.version == version


def serves(state: State, source: WorkerId, version: Version, from_host: bool) -> bool:
    """As far as is known, the source still has the version. One whose lease has ended may well go on serving."""
    member = state.members.get(source)
    if member is None:
        return True
    if from_host:
        is_about_to = _is_granted(state, source, version, to_host=True)
        return member.has_copy(version) or (is_about_to and not member.is_dropping_copy(version))
    buffer = member.content.buffer
    if isinstance(buffer, (Holding, Filling)) and buffer.version == version:
        return True
    if isinstance(buffer, Withdrawing) and buffer.version == version:
        return not buffer.impatient and not member.may_drop
    if isinstance(buffer, Filling):
        return False
    return _is_granted(state, source, version, to_host=False)  # it fills the buffer with it next


def is_served(state: State, read: OpenRead) -> bool:
    """As far as is known, each of its sources still has the version."""
    return all(serves(state, each.worker, read.version, each.from_host) for each in read.sources)


def _is_granted(state: State, reader: WorkerId, version: Version, *, to_host: bool) -> bool:
    current = state.reads.current.get(reader)
    return current is not None and current.version == version and current.grant.to_host == to_host


def is_full_source(state: State, member: Member, version: Version) -> bool:
    """It has all of the version and may serve it."""
    is_held = member.holds(version) and serves(state, member.worker, version, from_host=False)
    return is_held or member.has_whole_copy(version)


def has_whole(state: State, worker: WorkerId, version: Version) -> bool:
    """It has all of the version, in its buffer or as a host copy that is not about to go."""
    member = state.members.get(worker)
    return member is not None and (member.holds(version) or member.has_whole_copy(version))


def will_hold(state: State, worker: WorkerId, version: Version) -> bool:
    """It is there, and has the version in its buffer, which it does not want to take back."""
    member = state.members.get(worker)
    return member is not None and member.will_hold(version)


def roots_of(state: State, replica: Replica, call: GroupCall) -> dict[LayoutKey, Digest]:
    """The roots that the shards of a publish bring, by layout key."""
    members = [state.members.get(worker) for worker in replica.members.values()]
    return {m.layout_key: call.arrived[m.shard] for m in members if m is not None and m.shard in call.arrived}


def wanted_version(replica: Replica, member: Member) -> Version | None:
    """The version that this worker is to be filled with now."""
    reported = member.report.call
    call = replica.find(reported.number) if reported is not None else None
    if call is None or call.is_over or call.verb not in FILLS or member.shard not in call.arrived:
        return None
    buffer = member.content.buffer
    if isinstance(buffer, Filling) and buffer.version != call.version:
        return None
    return call.version


def must_wait(state: State, source: Member, reads: list[OpenRead]) -> bool:
    """The source has to keep what these read.

    A source that can cut its readers off waits neither for those whose read was taken back (they have another source,
    or none can help them) nor for readers that seem to be gone. Any other source waits until each of them has stopped.
    """
    if not source.hello.revocable:
        return bool(reads)
    readers = [state.members.get(read.reader) for read in reads if not read.is_void]
    return any(reader is not None and is_here(state, reader) for reader in readers)
