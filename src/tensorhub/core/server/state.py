"""Everything that the server knows, in one place: its clock, its numbers, its tables, and whom to decide for again.

The rules read it. Only `intake`, `evidence`, `sessions`, `rollcall`, `apply` and the machine itself change it. Whoever
changes it marks as dirty the members whose orders may change with it.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from math import inf

from ..messages import Hello, LayoutInfo
from ..names import Digest, ModelName, Number, ReplicaName, Ticket, WorkerId
from ..settings import Settings
from .catalog import Model
from .clock import Clock
from .groups import Replica
from .lines import Place
from .membership import Member, Members
from .numbers import Numbers
from .open_reads import OpenRead, OpenReads
from .receipts import Notary
from .watches import Topic, references_of, sources_of

MAX_SAID = 100  # lines for the log that nobody has fetched


@dataclass
class State:
    """All tables of one life of the server."""

    settings: Settings
    clock: Clock
    numbers: Numbers
    notary: Notary
    recovered_at: float  # until then it listens: it may not have heard yet what a former life has promised
    is_recovering: bool
    models: dict[ModelName, Model] = field(default_factory=dict)
    left: dict[ModelName, float] = field(default_factory=dict)  # models without a worker, longest first, and since when
    forget_at: float = inf  # when the first of those without a version is forgotten
    bound: dict[ModelName, dict[ModelName, None]] = field(default_factory=dict)  # by model: those of whose sets it is
    members: Members = field(default_factory=Members)
    reads: OpenReads = field(default_factory=OpenReads)
    hellos: dict[str, Hello] = field(default_factory=dict)  # by connection
    speakers: dict[str, WorkerId] = field(default_factory=dict)  # who has said so
    spent: dict[str, None] = field(default_factory=dict)  # connections whose session has ended
    layouts: dict[Digest, LayoutInfo] = field(default_factory=dict)
    most_layouts: int = field(init=False)  # above that, those that nobody uses are forgotten
    counters: Counter[str] = field(default_factory=Counter)
    said: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_SAID))  # for the log
    dirty: OrderedDict[WorkerId, bool] = field(
        default_factory=OrderedDict
    )  # whom to decide for again; True: and answer
    happened: int = 0  # how often something happened from which anything may follow for anybody
    to_advance: dict[tuple[ModelName, ReplicaName], None] = field(default_factory=dict)  # whose call may go on
    report_s: float = field(init=False)  # how often each worker is to report: see `note_size`

    def __post_init__(self) -> None:
        self.now: float = self.clock.now  # the time awake
        self.most_layouts = self.settings.most_versions
        self.note_size()

    def note_size(self) -> None:
        """Members have come or gone."""
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
        self._note_load(read.source)

    def close_reads(self, reader: WorkerId, upto: Ticket | None, beside: Collection[Ticket] = ()) -> list[OpenRead]:
        """The reader's reads up to that ticket (None: all of them) are over, and those. Returns them."""
        over = self.reads.close(reader, upto, beside)
        for read in over:
            self._note_load(read.source)
        return over

    def _note_load(self, source: WorkerId) -> None:
        model = self.models.get(source.model)
        if model is not None:
            model.note_load(source, self.reads.load(source))

    # --- whom to decide for again -------------------------------------------------------------------------------------

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
        for version, line in places:
            self.mark_waiting_dirty(model, sources_of(version, line), references_of(version, line))

    def mark_readers_dirty(self, source: WorkerId) -> None:
        """Those who read from it may need another source."""
        for read in self.reads.from_source(source):
            self.mark_dirty(read.reader)

    def model_to_forget(self) -> ModelName | None:
        """The model whose place a new one may have: the longest left without a version, else the longest left.

        The numbers of a model that has had a version are kept for a lease at least: its trainer may be started again.
        """
        unnamed = next((name for name in self.left if self.models[name].newest is None), None)
        oldest = next(iter(self.left), None)
        if unnamed is None and oldest is not None and self.now >= self.left[oldest] + self.settings.lease_s:
            return oldest
        return unnamed

    def forget_model(self, name: ModelName) -> None:
        """No worker is of it any more: a worker that comes begins the model anew."""
        if self.models[name].newest is not None:
            self.said.append(f"{name} is forgotten, with its numbers: {len(self.models)} models is the most here")
        del self.models[name], self.left[name]
        self.notary.forget(name)

    def forget(self, worker: WorkerId) -> None:
        """It is no member any more: nothing is said to it."""
        self.dirty.pop(worker, None)
