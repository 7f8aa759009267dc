"""The reference server's decisions: who is alive, what exists, who reads from whom, who may change its buffer.

`handle` takes in one message and returns what to send to whom. It believes what workers report and remembers nothing
that they could not tell it again: after a restart it asks nobody, it waits until everybody has reported, one lease at
most, and in that time says nothing that a former life could have contradicted.

Rules it keeps:
- A worker's orders are the whole truth at their number; numbers rise over the lives of the server.
- A read is open from its grant until its reader says that it is closed, or its reader's lease has ended. The end of a
  *source's* lease ends nothing.
- A source is drained when no read from it is open, and nobody was promised what only it has.
- After a restart nothing is drained, resolved or published while anybody is missing; nothing is given up for a lease.

It must never read a clock, touch a socket, or see a weight byte.
"""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from msgspec.structs import replace

from . import admission, establishing, evidence, granting, hearing, operations, retention, rollcall, sessions
from .errors import InvariantViolation
from .groups import Replica
from .invariants import server_contradiction
from .membership import Member, Members
from .messages import (
    Answer,
    Hello,
    LayoutInfo,
    Orders,
    Refusal,
    Report,
    ToServer,
    ToWorker,
    Withdrawing,
)
from .names import Digest, ModelName, Number, Shard, Version, WorkerId
from .numbers import Numbers
from .open_reads import OpenReads
from .receipts import Notary
from .references import Model
from .settings import Settings
from .status import status_of
from .view import Status

Outbox = list[tuple[str, ToWorker]]

LATE = 0.5  # of the time between two reports: to be called later than that is a pause, not a slow timer or loop
MOST_SAID = 100  # lines for the log that nobody has fetched
MOST_ROUNDS = 100  # decisions for one worker in one event: a chain of sources that move takes a few


@dataclass
class Server:
    """One life of the reference server. Only `handle`, `disconnected` and `tick` change it.

    `first_number` must be above every number of any former life (wall-clock microseconds will do). `fresh` says that
    there was no former life, so that there is nothing to wait for.

    All its times are times awake. While a lease runs it asks to be called once a report; how much later than that it is
    called, it stood still: swapped out, stopped, moved. It heard nobody then, so that time passes for nobody.
    """

    settings: Settings
    now: float
    first_number: int
    fresh: bool = False
    key: bytes = b""  # of its receipts: the same for all lives of one cluster's server
    models: dict[ModelName, Model] = field(default_factory=dict)
    members: Members = field(default_factory=Members)
    reads: OpenReads = field(default_factory=OpenReads)
    layouts: dict[Digest, LayoutInfo] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.paused_s = 0.0  # how far the time awake lags behind the caller's
        self.started = self.now
        self.recovered_at = self.now if self.fresh else self.now + self.settings.lease_s
        self.notary = Notary(self.key)
        self.numbers = Numbers(self.first_number, self.notary)
        self._hellos: dict[str, Hello] = {}
        self._dirty: dict[WorkerId, bool] = {}  # True: answer it in any case
        self._has_recovered = self.fresh
        self.said: deque[str] = deque(maxlen=MOST_SAID)

    # --- the seam -----------------------------------------------------------------------------------------------------

    def handle(self, message: ToServer, *, sender: str, now: float, arrived: float | None = None) -> Outbox:
        """Take in one message that came over the connection `sender`: at `now`, up to which all that came was handled,
        or at `arrived`, which may be later if this one took the place of an older one that waited."""
        reply: ToWorker | None = None
        outbox = self.tick(now=now)
        match message:
            case Hello():
                reply = self._take_hello(message, sender)
            case LayoutInfo():
                self._take_layout(message)
            case Report():
                reply = self._take_report(message, sender, max(now, arrived or now) - self.paused_s)
        if reply is not None:
            self.counters["refusals"] += isinstance(reply, Refusal)
            outbox.append((sender, reply))
        return outbox + self._settle()

    def disconnected(self, sender: str, *, now: float) -> Outbox:
        """The connection is gone. Nobody has died by that, but a source that can cut this reader off need not wait."""
        outbox = self.tick(now=now)
        hello = self._hellos.pop(sender, None)
        member = self.members.get(hello.worker) if hello is not None else None
        if member is not None and member.sender == sender:
            member.is_connected = False
            self.touch_model(self.models[member.hello.model])  # a source need not wait for it any more
        return outbox + self._settle()

    def tick(self, *, now: float) -> Outbox:
        """Time has passed (see `next_deadline`)."""
        self._wake(now)
        ended, woken = self.members.due(self.now)
        for member in ended:
            sessions.end(self, member, "died (its lease ended)")
        for member in woken:
            self.touch(member.worker)
        if not self._has_recovered and self.now >= self.recovered_at:
            self._has_recovered = True
            for model in self.models.values():
                model.is_listening = False
                if not model.roll.is_over:
                    rollcall.close(self, model)
                model.changed.update(dict.fromkeys(model.versions))
                self.touch_all(model)
        return self._settle()

    def next_deadline(self) -> float:
        """When to call `tick` if nothing is heard before."""
        return self.paused_s + self._due()

    def _due(self) -> float:
        """The same in the time awake."""
        if not len(self.members) and self._has_recovered:
            return inf  # nobody's time is running
        soon = self.now + self.settings.report_s
        return min(soon, self.members.next_time(), inf if self._has_recovered else self.recovered_at)

    def _wake(self, now: float) -> None:
        """It is `now` by the caller's clock.

        A pause counts from when it wanted to be called, so a lease loses a report's time between two of them: however
        often it stands still, the dead are gone after as many calls as there are reports in a lease.
        """
        due = self._due()
        late_s = now - (self.paused_s + due)
        if late_s > LATE * self.settings.report_s:
            self.paused_s += late_s
            self.counters["pauses"] += 1
        awake = now - self.paused_s
        self.now = max(self.now, awake if late_s < 0 else max(awake, due))  # what was due is due, however it rounds

    @property
    def is_recovering(self) -> bool:
        return not self._has_recovered

    def status(self, *, now: float) -> Status:
        """What there is, for people; changes nothing but the time."""
        self._wake(now)
        return status_of(self)

    def check_invariants(self) -> None:
        """Raise `InvariantViolation` if this machine contradicts itself. Looks at every table."""
        wrong = server_contradiction(self)
        if wrong is not None:
            raise InvariantViolation(f"the reference server: {wrong}")

    def statistics(self) -> dict[str, int]:
        return {
            "workers": len(self.members),
            "models": len(self.models),
            "connections": len(self._hellos),
            "open_reads": len(self.reads.all()),
            **self.counters,
        }

    # --- what comes in ------------------------------------------------------------------------------------------------

    def _take_hello(self, hello: Hello, sender: str) -> Refusal | None:
        refusal = admission.why_refuse(self, hello)
        if refusal is not None:
            return refusal
        self._hellos[sender] = hello
        member = self.members.get(hello.worker)
        if member is not None:
            member.sender, member.is_connected, member.hello = sender, True, hello
        return None

    def _take_layout(self, layout: LayoutInfo) -> None:
        self.layouts[layout.digest()] = self.layouts.pop(layout.digest(), layout)  # newest last
        if len(self.layouts) > self.settings.most_versions:
            del self.layouts[next(iter(self.layouts))]

    def _take_report(self, report: Report, sender: str, arrived: float) -> ToWorker | None:
        hello = self._hellos.get(sender)
        if hello is None:
            return Refusal("refused", "a report before any hello", "is this a TensorHub worker?")
        self.counters.update(reports=1, odd_numbers=int(not self.numbers.learn(report)))
        member = self.members.get(hello.worker)
        if member is not None and member.hello.life != hello.life:
            return admission.taken(self, member)
        if member is None:
            for newcomer in admission.giving_way(self, hello, report):
                sessions.end(self, newcomer, "gave way to who had lived before")
            refusal = admission.why_refuse(self, hello, report)
            if refusal is not None:
                return refusal
            member = sessions.begin(self, hello, sender, report)
        if report.number <= member.report.number:
            return None  # late or repeated
        member.lease_end, member.is_doubted = max(self.now, arrived) + self.settings.lease_s, False
        before, member.report = member.report, report
        model, replica = self.place(member)
        hearing.take_content(self, model, replica, member, before)
        hearing.take_reads(self, member)
        hearing.take_operation(self, replica, member)
        rollcall.hear(self, model, member)
        self._dirty[member.worker] = True
        if report.leaving:
            sessions.end(self, member, "left")
            return self._orders(member, None, None, None, retention.Duties())
        return None

    # --- what follows -------------------------------------------------------------------------------------------------

    def _settle(self) -> Outbox:
        """Decide for everybody who is touched until nothing changes any more, then say what is new.

        Rules that contradict each other would go round for ever: who was decided for so often waits for the next event.
        """
        if not self._dirty:
            return []
        decided: dict[WorkerId, bool] = {}
        rounds: Counter[WorkerId] = Counter()
        unsettled: dict[WorkerId, bool] = {}
        establishing.note_changes(self)
        while self._dirty:
            worker, must_answer = next(iter(self._dirty.items()))
            del self._dirty[worker]
            rounds[worker] += 1
            if rounds[worker] > MOST_ROUNDS:
                unsettled[worker] = must_answer
                continue
            member = self.members.get(worker)
            if member is not None:
                decided[worker] = decided.get(worker, False) or must_answer
                self._decide(member)
        self._dirty = unsettled
        self.counters["unsettled"] += len(unsettled)
        outbox: Outbox = []
        for worker, must_answer in decided.items():
            member = self.members.get(worker)
            if member is not None:
                outbox += self._say(member, must_answer)
        return outbox

    def _decide(self, member: Member) -> None:
        model, replica = self.place(member)
        rollcall.seek_witness(self, model, member)
        operation = replica.operation
        if operation is not None:
            was_over, version = operation.is_over, operation.version
            operations.advance(self, model, replica, operation)
            if operation.is_over:
                replica.ended = max(replica.ended, operation.number)
                operations.release(model, operation, replica)
            if operation.is_over != was_over or operation.version != version:
                self.touch_model(model) if operation.is_over else self.touch_replica(replica)
        granting.decide_read(self, model, replica, member)

    # --- what goes out ------------------------------------------------------------------------------------------------

    def _say(self, member: Member, must_answer: bool) -> Outbox:
        model, replica = self.place(member)
        told = member.report.operation
        answer = replica.answer(member.shard, told) if told is not None else None
        duties = retention.duties_of(self, model, replica, member)  # a release makes room, for which it may wait
        drained = granting.drained_version(self, model, member)
        member.is_drained = drained is not None
        position = replica.ended if rollcall.is_whole(self, model, replica) else None
        orders = self._orders(member, answer, position, drained, duties)
        quiet = {"number": Number(0), "acknowledged": 0, "newest": None, "newest_receipt": "", "report_s": 0.0}
        news = replace(orders, roster=None, **quiet)
        if not must_answer and news == member.sent:
            return []
        member.sent, member.report_s = news, orders.report_s
        return [(member.sender, orders)]

    def _orders(
        self,
        member: Member,
        answer: Answer | None,
        position: int | None,
        drained: Version | None,
        duties: retention.Duties,
    ) -> Orders:
        current, model = self.reads.current(member.worker), self.models[member.hello.model]
        roster = rollcall.roster_for(self, model, member)  # its number is below that of the orders
        return Orders(
            number=self.next_number(),
            session=member.session,
            acknowledged=member.report.number,
            lease_s=self.settings.lease_s,
            trust_s=self.settings.trust_s,
            report_s=self.settings.report_s_of(len(self.members)),
            position=position,
            answer=answer,
            grant=current.grant if current is not None else None,
            drained=drained,
            roster=roster,
            witness=rollcall.is_asked(model, member),
            **evidence.given(self, model, member)._asdict(),
            **duties._asdict(),
        )

    # --- small things -------------------------------------------------------------------------------------------------

    def next_number(self) -> Number:
        return self.numbers.next()

    def place(self, member: Member) -> tuple[Model, Replica]:
        model = self.models[member.hello.model]
        return model, model.replicas[member.hello.replica]

    def known(self, worker: WorkerId) -> Member:
        member = self.members.get(worker)
        assert member is not None, f"{worker} is no member"
        return member

    def is_here(self, member: Member) -> bool:
        """It seems to live: it would hear what it is told, and was heard lately. A dead host leaves its lines open."""
        return member.is_connected and not member.is_silent(self.now, self.settings)

    def is_doubtful(self, source: Member) -> bool:
        """There is reason to think that nobody can read from it. What one reader has learned of it helps the others."""
        return source.is_doubted or not self.is_here(source)

    def forget(self, worker: WorkerId) -> None:
        """It is no member any more: nothing is said to it."""
        self._dirty.pop(worker, None)

    def touch(self, worker: WorkerId) -> None:
        self._dirty.setdefault(worker, False)

    def touch_replica(self, replica: Replica) -> None:
        for worker in replica.members.values():
            self.touch(worker)

    def touch_all(self, model: Model) -> None:
        """Something rare happened after which any member of the model may have other duties."""
        for replica in model.replicas.values():
            self.touch_replica(replica)

    def members_of(self, model: Model, shard: Shard) -> Iterator[Member]:
        """Those that live of one shard, by replica."""
        for replica in model.replicas.values():
            member = self.members.get(replica.members[shard]) if shard in replica.members else None
            if member is not None:
                yield member

    def touch_model(self, model: Model) -> None:
        """Something changed that others of the model may be waiting for."""
        for replica in model.replicas.values():
            for worker in replica.members.values():
                member = self.known(worker)
                reads = self.reads.load(worker) or self.reads.of(worker)
                is_busy = member.report.operation is not None or reads or member.report.copies
                if is_busy or isinstance(member.report.buffer, Withdrawing):
                    self.touch(worker)
