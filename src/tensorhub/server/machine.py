"""The reference server's machine: messages in, orders out.

`handle` takes in one message and returns what to send to which worker. The server believes what workers report, and
remembers nothing that they could not tell it again. Its journal tells a restarted server which workers may still live
and which publishes have ended well. It waits until these workers have reported, for one lease at most. Until then it
says nothing that could contradict what a former life has said.

Rules it keeps:
- A worker's orders are the whole truth at their number; numbers rise over the lives of the server.
- A read is open from its grant until its reader says that it is closed, or its reader's lease has ended. The end of a
  *source's* lease ends nothing.
- A source is drained when no read from it is open, and no replica was promised what only it has.
- After a restart nothing is drained, resolved or published while a worker is missing. For one lease no version counts
  as lost, and no host copy is dropped.

It must never read a clock, touch a socket, or see a weight byte.
"""

from collections import OrderedDict
from math import inf

from ..protocol.errors import InvariantViolation
from ..protocol.messages import Hello, LayoutInfo, Orders, Refusal, Report, ToServer, ToWorker
from ..protocol.names import Number, WorkerId
from ..protocol.settings import Settings
from ..protocol.status import Status
from . import admission, apply, calls, content, reads, retention, sessions, stalls
from . import state as facts
from .groups import GroupCall, Replica
from .journal import FORMAT, Begun, History, Record
from .members import Member, Told
from .reads import interests_of
from .snapshot import Steps, server_contradiction, statistics, status_of, status_steps
from .sources import wanted_read
from .state import MARGIN, Clock, Numbers, State
from .versions import Model

Outbox = list[tuple[str, ToWorker]]

MAX_ROUNDS = 100  # decisions for one worker in one event: a chain of sources that move takes a few


class Server:
    """One life of the reference server. Only `handle`, `disconnected` and `tick` change it.

    `first_number` must be above every number of any former life that no journal tells of (wall-clock microseconds will
    do). `fresh` says that there was no former life, so that there is nothing to wait for. `history` is what the journal
    of former lives says, if there is one; `boot` names the boot of this machine. All times inside are times awake (see
    `clock`).
    """

    def __init__(
        self,
        settings: Settings,
        now: float,
        first_number: int,
        *,
        fresh: bool = False,
        history: History | None = None,
        boot: str = "",
    ) -> None:
        told_upto = history.last if history is not None else Number(0)
        is_untold = not fresh and (history is None or not history.is_whole)
        self.state = State(
            settings,
            Clock(now, started=now),
            Numbers(max(first_number, told_upto + MARGIN if told_upto else 0)),
            recovered_at=now if fresh else now + settings.lease_s,
            is_recovering=is_untold,
            is_untold=is_untold,
            told_upto=told_upto,
            boot=boot,
        )
        if history is not None:
            sessions.remember(self.state, history)
        self.state.events.append(sessions.started(self.state, is_fresh=fresh))

    # --- the seam -----------------------------------------------------------------------------------------------------

    def handle(self, message: ToServer, *, sender: str, now: float, arrived: float | None = None) -> Outbox:
        """Take in one message from the connection `sender`. All that came before `now` has been handled.

        `arrived` is when this message came: after `now`, if it has taken the place of an older one that waited.
        """
        reply: ToWorker | None = None
        reporter: Member | None = None
        outbox = self.tick(now=now)
        match message:
            case Hello():
                reply = self._take_hello(message, sender)
            case LayoutInfo():
                sessions.take_layout(self.state, message)
            case Report():
                arrived_at = max(now, arrived or now) - self.state.clock.paused_s
                reporter = sessions.take(self.state, message, sender, arrived_at)
                if reporter is None:
                    reply, reporter = self._take_report(message, sender, arrived_at)
                elif not self.state.dirty:
                    return [*outbox, self._say_again(reporter)]
        if isinstance(reply, Refusal):
            hello = message if isinstance(message, Hello) else self.state.hellos.get(sender)
            admission.note_refusal(self.state, hello, reply)
        if reply is not None:
            outbox.append((sender, reply))
        return outbox + self._settle(reporter)

    def disconnected(self, sender: str, *, now: float) -> Outbox:
        """The connection is gone. Its worker may live, but a source that can cut it off need not wait for it."""
        outbox = self.tick(now=now)
        sessions.disconnect(self.state, sender)
        return outbox + self._settle()

    def tick(self, *, now: float) -> Outbox:
        """Time has passed (see `next_deadline`)."""
        self._advance_clock(now)
        state = self.state
        if state.members.next_time() <= state.now:
            ended, woken = state.members.due(state.now)
            for member in ended:
                sessions.end(state, member, "lease over" if member.is_connected else "connection closed")
            for member in woken:
                state.mark_dirty(member.worker)
        if state.now >= state.forget_at:
            sessions.forget_models(state)
        if state.is_recovering and state.now >= state.recovered_at:
            sessions.end_recovery(state)
        if state.now >= state.stalls_at:
            stalls.look(state)
        return self._settle() if state.dirty else []

    def listen(self, *, now: float) -> None:
        """Workers may come that another server has promised something: wait for a lease, as after a restart."""
        self._advance_clock(now)
        sessions.listen_anew(self.state)

    def to_journal(self) -> tuple[list[Record], bool]:
        """Records to be written before anything is sent, and whether they are the whole journal, to be begun anew."""
        state = self.state
        if state.numbers.last > state.numbers.named + MARGIN // 2:
            state.journal.append(self._begun())
        if not state.is_journal_old and not state.journal:
            return [], False
        is_whole, state.is_journal_old = state.is_journal_old, False
        records, state.journal = self.whole_journal() if is_whole else state.journal, []
        return records, is_whole

    def whole_journal(self) -> list[Record]:
        """The journal in as few records as it takes."""
        return [self._begun(), *sessions.records_of(self.state)]

    def _begun(self) -> Record:
        state = self.state
        state.numbers.named = state.numbers.last
        return Begun(FORMAT, Number(state.numbers.last), "" if state.is_untold else state.boot)

    def next_deadline(self) -> float:
        """When to call `tick` if nothing is heard before."""
        return self.state.clock.paused_s + self._due()

    def _due(self) -> float:
        """The same in the time awake."""
        state = self.state
        if not len(state.members) and not state.is_recovering:
            return inf  # no lease is running
        soon = state.now + state.settings.report_s
        return min(soon, state.members.next_time(), state.recovered_at if state.is_recovering else inf)

    def _advance_clock(self, now: float) -> None:
        state, clock = self.state, self.state.clock
        is_pause = clock.advance(now, due=self._due(), report_s=state.settings.report_s)
        state.now = clock.now
        if is_pause:
            state.counters["pauses"] += 1

    @property
    def is_recovering(self) -> bool:
        return self.state.is_recovering

    def status(self, *, now: float) -> Status:
        """Builds the status for people. Changes nothing but the time."""
        self._advance_clock(now)
        return status_of(self.state)

    def status_steps(self, *, now: float) -> Steps:
        """Builds the status in small steps. The server may handle messages between them."""
        self._advance_clock(now)
        return status_steps(self.state)

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

    def _take_report(self, report: Report, sender: str, arrived: float) -> tuple[ToWorker | None, Member | None]:
        """(a reply that says all there is to say, the member that is to be answered)."""
        state = self.state
        hello = state.hellos.get(sender)
        if hello is None:
            return Refusal("refused", "a report before any hello", "is this a TensorHub worker?"), None
        member = state.members.get(state.speakers[sender])
        if member is None:
            sessions.note_stale(state, hello, report)
        is_ours = sessions.count(state, report)
        odd = admission.why_odd(hello, report, is_ours=is_ours)
        if odd is not None:
            state.counters["odd_numbers"] += 1
            return odd, None
        if member is not None and member.hello.life != hello.life:
            return admission.taken(state, member), None
        if member is None:
            for newcomer in admission.giving_way(state, hello, report):
                sessions.end(state, newcomer, "replaced")
            refusal = admission.why_refuse(state, hello, report)
            if refusal is None and sender in state.spent:
                model = state.models.get(hello.model)
                if model is not None and report.left:  # it has left, and did not hear that
                    gone = Member(hello, sender, report.session, state.now, report=report)
                    return self._orders(model, gone, Told()), None
                refusal = admission.spent(hello)
            if refusal is not None:
                return refusal, None
            member = sessions.begin(state, hello, sender, report)
        if report.number <= member.report.number:
            return None, None  # late or repeated
        is_progress = sessions.is_progress(report, member.report) and not calls.is_asked(state.place(member)[1], member)
        state.happened += not (is_progress or sessions.is_same(report, member.report))
        sessions.take_report(state, member, report, arrived)
        if not is_progress:
            state.to_advance[member.worker.model, member.worker.replica] = None
        if report.left:
            model = state.models[hello.model]
            sessions.end(state, member, "left")
            return self._orders(model, member, Told()), None
        return None, member

    # --- what follows -------------------------------------------------------------------------------------------------

    def _settle(self, reporter: Member | None = None) -> Outbox:
        """Decide for the reporter and all dirty workers until nothing changes any more, then send what is new.

        Rules that contradict each other would go on for ever: a worker that was decided for `MAX_ROUNDS` times waits
        for the next event.
        """
        state = self.state
        if not state.dirty and reporter is None:
            return []
        state.happened += bool(state.dirty)
        decided: dict[WorkerId, bool] = {}
        rounds: dict[WorkerId, int] = {}
        unsettled: OrderedDict[WorkerId, bool] = OrderedDict()
        apply.note_changed_versions(state)
        if reporter is not None:
            if state.to_advance.pop((reporter.worker.model, reporter.worker.replica), 0) is None:
                self._advance(*state.place(reporter))
            state.mark_answered(reporter.worker)
        while state.dirty or apply.note_changed_versions(state):
            worker, must_answer = state.dirty.popitem(last=False)
            rounds[worker] = rounds.get(worker, 0) + 1
            if rounds[worker] > MAX_ROUNDS:
                unsettled[worker] = must_answer
                continue
            member = state.members.get(worker)
            if member is not None:
                decided[worker] = decided.get(worker, False) or must_answer
                self._decide(member)
        state.dirty, goes_round = unsettled, bool(unsettled)
        state.counters["unsettled"] += len(unsettled)
        state.happened += len(decided) > 1
        outbox: Outbox = []
        for worker, must_answer in decided.items():
            member = state.members.get(worker)
            if member is not None:
                outbox += self._say(member, must_answer)
        if state.dirty and not goes_round:  # a worker was told to drop a copy
            outbox += self._settle()
        state.to_advance.clear()
        return outbox

    def _decide(self, member: Member) -> None:
        state = self.state
        model, replica = state.place(member)
        if state.to_advance and state.to_advance.pop((model.name, replica.name), 0) is None:
            self._advance(model, replica)
        is_here = facts.is_here(state, member)
        wanted = wanted_read(state, model, replica, member) if is_here else None
        if is_here:
            reads.decide_read(state, model, member, wanted)
        model.watches.watch(member.worker, interests_of(state, model, replica, member, wanted))
        member.settled_at = state.happened

    def _advance(self, model: Model, replica: Replica) -> None:
        """Take the replica's call as far as the facts allow. All its members hear of it if that is far."""
        state, call = self.state, replica.call
        if calls.judge(state, model, replica):
            state.mark_replica_dirty(replica)
        if call is None:
            return
        before = _progress(call)
        calls.advance(state, model, replica, call)
        if call.is_over:
            replica.ended = max(replica.ended, call.number)
            apply.release(state, model, call, replica)
        if call.verb in facts.FILLS and replica.note_progress(call):
            content.judge_withdrawals(state, model, replica)
        if before != _progress(call):
            state.mark_callers_dirty(replica)
            if call.error is not None:
                for worker in replica.members.values():
                    state.mark_readers_dirty(worker)  # what it fills goes on no more

    # --- what goes out ------------------------------------------------------------------------------------------------

    def _say(self, member: Member, must_answer: bool) -> Outbox:
        state = self.state
        model, replica = state.place(member)
        reported = member.report.call
        needless = retention.copies_to_let_go(state, model, member)
        apply.let_go(state, model, member, needless)  # that makes room, for which it may wait
        drained = reads.drained_version(state, model, member)
        apply.note_drained(state, member, drained)  # what it keeps no more, it may have to fetch
        if (record := retention.given_up(state, model, member)) is not None:
            model.note_given_up(record)
        offload = retention.version_to_copy(state, model, member)
        release = retention.copies_to_release(state, model, member)
        current = state.reads.current.get(member.worker)
        is_whole = not model.is_listening
        told = Told(
            position=replica.ended if is_whole else None,
            answer=calls.answer_passed(state, model, replica, member)
            or replica.answer(member.shard, reported, is_whole=is_whole)
            if reported is not None
            else None,
            grant=current.grant if current is not None else None,
            drained=drained.version,
            offload=offload,
            fetch=retention.version_to_fetch(state, model, replica, member),
            release=release,
            superseded=member.superseded,
            judged=replica.answer_judged(replica.unjudged.get(member.shard)),
            report_at_once=sessions.awaited_as(model, member.worker, member.session) is not None
            or calls.is_asked(replica, member),
            box=model.has_boxes and member.report.can_box,
        )
        if not must_answer and told == member.told:
            return []
        member.told = told
        return [(member.sender, self._orders(model, member, told))]

    def _say_again(self, member: Member) -> tuple[str, ToWorker]:
        """Sends the last orders again."""
        assert member.told is not None
        return member.sender, self._orders(self.state.models[member.hello.model], member, member.told)

    def _orders(self, model: Model, member: Member, told: Told) -> Orders:
        state = self.state
        if member.report_s != state.report_s:
            member.note_pace(state.report_s, state.settings)
        return Orders(
            number=state.next_number(),
            session=member.session,
            acknowledged=member.report.number,
            lease_s=state.settings.lease_s,
            trust_s=state.settings.trust_s,
            report_s=member.report_s,
            position=told.position,
            answer=told.answer,
            grant=told.grant,
            drained=told.drained,
            newest=model.newest,
            offload=told.offload,
            fetch=told.fetch,
            release=told.release,
            newest_epoch=model.newest_epoch,
            superseded=told.superseded,
            judged=told.judged,
            report_at_once=told.report_at_once,
            box=told.box,
        )


def _progress(call: GroupCall) -> tuple[object, ...]:
    """How far it has come: what all its callers should hear at once. What exactly is missing they hear in time."""
    return call.is_over, call.version, call.waiting.code if call.waiting is not None else ""
