"""Everything that the server knows, in one place: its clock, its numbers, its tables, and whom to decide for again.

The rules read it. Only `intake`, `evidence`, `sessions`, `rollcall`, `apply` and the machine itself change it. Whoever
changes it marks as dirty the members whose orders may change with it.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

from ..messages import Hello, LayoutInfo, Withdrawing
from ..names import Digest, ModelName, Number, WorkerId
from ..settings import Settings
from .catalog import Model
from .clock import Clock
from .groups import Replica
from .membership import Member, Members
from .numbers import Numbers
from .open_reads import OpenReads
from .receipts import Notary

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
    members: Members = field(default_factory=Members)
    reads: OpenReads = field(default_factory=OpenReads)
    hellos: dict[str, Hello] = field(default_factory=dict)  # by connection
    layouts: dict[Digest, LayoutInfo] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)
    said: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_SAID))  # for the log
    dirty: dict[WorkerId, bool] = field(default_factory=dict)  # whom to decide for again; True: answer it in any case

    @property
    def now(self) -> float:
        """The time awake."""
        return self.clock.now

    @property
    def report_s(self) -> float:
        """How often each worker is to report."""
        return self.settings.report_s_of(len(self.members))

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

    # --- whom to decide for again -------------------------------------------------------------------------------------

    def mark_dirty(self, worker: WorkerId, *, must_answer: bool = False) -> None:
        """Decide for this worker again, and tell it what is new. `must_answer`: tell it although nothing is."""
        self.dirty[worker] = must_answer or self.dirty.get(worker, False)

    def mark_replica_dirty(self, replica: Replica) -> None:
        for worker in replica.members.values():
            self.mark_dirty(worker)

    def mark_everyone_dirty(self, model: Model) -> None:
        """Something rare has happened, which may change the orders of any member of the model."""
        for replica in model.replicas.values():
            self.mark_replica_dirty(replica)

    def mark_busy_dirty(self, model: Model) -> None:
        """Something has changed, for which busy members of the model may be waiting."""
        for replica in model.replicas.values():
            for worker in replica.members.values():
                member = self.known(worker)
                reads = self.reads.load(worker) or self.reads.of(worker)
                is_busy = member.report.call is not None or reads or member.content.copies
                if is_busy or isinstance(member.content.buffer, Withdrawing):
                    self.mark_dirty(worker)

    def forget(self, worker: WorkerId) -> None:
        """It is no member any more: nothing is said to it."""
        self.dirty.pop(worker, None)
