"""The reference server's machine: who is alive, what exists, who reads from whom, who may change its buffer.

`handle` takes in one message and returns what to send to whom. The server believes what workers report, and remembers
nothing that they could not tell it again. After a restart it waits until everybody has reported, for one lease at most.
Until then it says nothing that could contradict what a former life has said.

Rules it keeps:
- A worker's orders are the whole truth at their number; numbers rise over the lives of the server.
- A read is open from its grant until its reader says that it is closed, or its reader's lease has ended. The end of a
  *source's* lease ends nothing.
- A source is drained when no read from it is open, and nobody was promised what only it has.
- After a restart nothing is drained, resolved or published while anybody is missing. For one lease no version counts as
  lost, and no host copy is dropped.

It must never read a clock, touch a socket, or see a weight byte.
"""

from collections import Counter
from math import inf

from msgspec.structs import replace

from ..errors import InvariantViolation
from ..messages import Answer, Hello, LayoutInfo, Orders, Refusal, Report, ToServer, ToWorker
from ..names import Number, Version, WorkerId
from ..settings import Settings
from ..snapshot import Status
from . import apply, evidence, intake, rollcall, sessions
from .clock import Clock
from .invariants import server_contradiction
from .membership import Member
from .numbers import Numbers
from .receipts import Notary
from .rules import admission, calls, draining, grants, retention, witness
from .snapshot import statistics, status_of
from .state import State

Outbox = list[tuple[str, ToWorker]]

MAX_ROUNDS = 100  # decisions for one worker in one event: a chain of sources that move takes a few


class Server:
    """One life of the reference server. Only `handle`, `disconnected` and `tick` change it.

    `first_number` must be above every number of any former life (wall-clock microseconds will do). `fresh` says that
    there was no former life, so that there is nothing to wait for. `key` is that of its receipts: the same for all
    lives of one cluster's server. All times inside are times awake (see `clock`).
    """

    def __init__(
        self, settings: Settings, now: float, first_number: int, *, fresh: bool = False, key: bytes = b""
    ) -> None:
        notary = Notary(key)
        self.state = State(
            settings,
            Clock(now, started=now),
            Numbers(first_number, notary),
            notary,
            recovered_at=now if fresh else now + settings.lease_s,
            is_recovering=not fresh,
        )

    # --- the seam -----------------------------------------------------------------------------------------------------

    def handle(self, message: ToServer, *, sender: str, now: float, arrived: float | None = None) -> Outbox:
        """Take in one message from the connection `sender`. All that came before `now` has been handled.

        `arrived` is when this message came: after `now`, if it has taken the place of an older one that waited.
        """
        reply: ToWorker | None = None
        outbox = self.tick(now=now)
        match message:
            case Hello():
                reply = self._take_hello(message, sender)
            case LayoutInfo():
                intake.take_layout(self.state, message)
            case Report():
                reply = self._take_report(message, sender, max(now, arrived or now) - self.state.clock.paused_s)
        if reply is not None:
            self.state.counters["refusals"] += isinstance(reply, Refusal)
            outbox.append((sender, reply))
        return outbox + self._settle()

    def disconnected(self, sender: str, *, now: float) -> Outbox:
        """The connection is gone. Its worker may live, but a source that can cut it off need not wait for it."""
        outbox = self.tick(now=now)
        sessions.disconnect(self.state, sender)
        return outbox + self._settle()

    def tick(self, *, now: float) -> Outbox:
        """Time has passed (see `next_deadline`)."""
        self._advance_clock(now)
        state = self.state
        ended, woken = state.members.due(state.now)
        for member in ended:
            sessions.end(state, member, "died (its lease ended)")
        for member in woken:
            state.mark_dirty(member.worker)
        if state.is_recovering and state.now >= state.recovered_at:
            rollcall.end_recovery(state)
        return self._settle()

    def next_deadline(self) -> float:
        """When to call `tick` if nothing is heard before."""
        return self.state.clock.paused_s + self._due()

    def _due(self) -> float:
        """The same in the time awake."""
        state = self.state
        if not len(state.members) and not state.is_recovering:
            return inf  # nobody's time is running
        soon = state.now + state.settings.report_s
        return min(soon, state.members.next_time(), state.recovered_at if state.is_recovering else inf)

    def _advance_clock(self, now: float) -> None:
        is_pause = self.state.clock.advance(now, due=self._due(), report_s=self.state.settings.report_s)
        if is_pause:
            self.state.counters["pauses"] += 1

    @property
    def is_recovering(self) -> bool:
        return self.state.is_recovering

    def status(self, *, now: float) -> Status:
        """What there is, for people; changes nothing but the time."""
        self._advance_clock(now)
        return status_of(self.state)

    def check_invariants(self) -> None:
        """Raise `InvariantViolation` if this machine contradicts itself. Looks at every table."""
        wrong = server_contradiction(self.state)
        if wrong is not None:
            raise InvariantViolation(f"the reference server: {wrong}")

    def statistics(self) -> dict[str, int]:
        return statistics(self.state)

    # --- what comes in ------------------------------------------------------------------------------------------------

    def _take_hello(self, hello: Hello, sender: str) -> Refusal | None:
        refusal = admission.why_refuse(self.state, hello)
        if refusal is None:
            sessions.connect(self.state, hello, sender)
        return refusal

    def _take_report(self, report: Report, sender: str, arrived: float) -> ToWorker | None:
        state = self.state
        hello = state.hellos.get(sender)
        if hello is None:
            return Refusal("refused", "a report before any hello", "is this a TensorHub worker?")
        state.counters.update(reports=1, odd_numbers=int(not state.numbers.learn(report)))
        member = state.members.get(hello.worker)
        if member is not None and member.hello.life != hello.life:
            return admission.taken(state, member)
        if member is None:
            for newcomer in admission.giving_way(state, hello, report):
                sessions.end(state, newcomer, "gave way to who had lived before")
            refusal = admission.why_refuse(state, hello, report)
            if refusal is not None:
                return refusal
            member = sessions.begin(state, hello, sender, report)
        if report.number <= member.report.number:
            return None  # late or repeated
        intake.take_report(state, member, report, arrived)
        if report.leaving:
            sessions.end(state, member, "left")
            return self._orders(member, None, None, None, retention.HostCopyOrders(), ())
        return None

    # --- what follows -------------------------------------------------------------------------------------------------

    def _settle(self) -> Outbox:
        """Decide for everybody who is dirty until nothing changes any more, then say what is new.

        Rules that contradict each other would go on for ever: a worker that was decided for `MAX_ROUNDS` times waits
        for the next event.
        """
        state = self.state
        if not state.dirty:
            return []
        decided: dict[WorkerId, bool] = {}
        rounds: Counter[WorkerId] = Counter()
        unsettled: dict[WorkerId, bool] = {}
        apply.note_changed_versions(state)
        while state.dirty:
            worker, must_answer = next(iter(state.dirty.items()))
            del state.dirty[worker]
            rounds[worker] += 1
            if rounds[worker] > MAX_ROUNDS:
                unsettled[worker] = must_answer
                continue
            member = state.members.get(worker)
            if member is not None:
                decided[worker] = decided.get(worker, False) or must_answer
                self._decide(member)
        state.dirty = unsettled
        state.counters["unsettled"] += len(unsettled)
        outbox: Outbox = []
        for worker, must_answer in decided.items():
            member = state.members.get(worker)
            if member is not None:
                outbox += self._say(member, must_answer)
        return outbox

    def _decide(self, member: Member) -> None:
        state = self.state
        model, replica = state.place(member)
        apply.carry_out(state, witness.seek_witness(state, model, member))
        call = replica.call
        if call is not None:
            was_over, version = call.is_over, call.version
            apply.carry_out(state, calls.advance(state, model, replica, call))
            if call.is_over:
                replica.ended = max(replica.ended, call.number)
                apply.release(model, call, replica)
            if call.is_over != was_over or call.version != version:
                state.mark_busy_dirty(model) if call.is_over else state.mark_replica_dirty(replica)
        apply.carry_out(state, grants.decide_read(state, model, replica, member))

    # --- what goes out ------------------------------------------------------------------------------------------------

    def _say(self, member: Member, must_answer: bool) -> Outbox:
        state = self.state
        model, replica = state.place(member)
        reported = member.report.call
        answer = replica.answer(member.shard, reported) if reported is not None else None
        copies = retention.host_copy_orders(state, model, replica, member)
        apply.let_go(member, copies.let_go)  # that makes room, for which it may wait
        release = retention.copies_to_release(state, model, member)
        drained = draining.drained_version(state, model, member)
        apply.note_drained(state, member, drained)
        position = replica.ended if witness.is_whole(state, model, replica) else None
        orders = self._orders(member, answer, position, drained.version, copies, release)
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
        copies: retention.HostCopyOrders,
        release: tuple[int, ...],
    ) -> Orders:
        state = self.state
        current, model = state.reads.current(member.worker), state.models[member.hello.model]
        roster = rollcall.roster_for(state, model, member)  # its number is below that of the orders
        return Orders(
            number=state.next_number(),
            session=member.session,
            acknowledged=member.report.number,
            lease_s=state.settings.lease_s,
            trust_s=state.settings.trust_s,
            report_s=state.report_s,
            position=position,
            answer=answer,
            grant=current.grant if current is not None else None,
            drained=drained,
            roster=roster,
            witness=witness.is_asked(model, member),
            **evidence.given(state, model, member)._asdict(),
            offload=copies.offload,
            fetch=copies.fetch,
            release=release,
        )
