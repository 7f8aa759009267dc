"""Carries out decisions: the one place where a rule's answer changes the server's state."""

from collections.abc import Iterable
from math import inf
from typing import assert_never

from ..protocol.messages import Grant
from ..protocol.names import Ticket, Version, WorkerId
from . import state as facts
from .decisions import (
    AcceptPublish,
    Admit,
    AskToWitness,
    AwaitWord,
    CallSlow,
    CallStuck,
    Cross,
    Decision,
    Fail,
    Finish,
    ForgetCapacity,
    Give,
    GiveWay,
    Leave,
    LookAgain,
    LookedForBetter,
    NoteUsualRates,
    Promise,
    Resolve,
    SettlePlaces,
    StayFor,
    TakeBack,
    Wait,
    Witness,
)
from .groups import GroupCall, Replica
from .members import ARRIVALS, NEWS, Crossing, Cut, Keepers, Line, Member, OpenRead, loss_of, plain_cut, sources_of
from .rules import retention
from .rules.reads import Drained
from .state import State
from .versions import Model, VersionRecord

# --- Which line each worker is of, and what follows when that changes: called when a report names another layout.


MAX_PUBLISHERS = 8  # replicas that publish one version: where more workers are relied on, some are no publishers


def note_line(state: State, member: Member) -> None:
    """What it has registered is not what it was: it may belong to another line, and its replica to another cut."""
    model, replica = state.place(member)
    line = member.line.of(member.report.layout)
    if line != member.line:
        if member.hello.reliable:
            note_company(state, model, line)
            model.reliable[member.line].pop(member.worker)
            note_company(state, model, member.line)
            model.reliable.setdefault(line, {})[member.worker] = None
        member.line = line
    if not member.report.layout:
        return
    if line.is_boxed:
        state.mark_everyone_dirty(model)  # whom one relies on for a version may be of another cut
    if not line.is_boxed:
        model.note_cut(plain_cut(replica.shards))
    lines = _lines_of(state, replica)
    if lines is not None and not _is_mixture(replica.cut, lines):
        note_cut(model, replica, lines)


def note_filled(state: State, model: Model, replica: Replica) -> None:
    """All of its shards have the same version: so what they have registered is all of the model."""
    lines = _lines_of(state, replica)
    if lines is not None and lines != replica.cut:
        note_cut(model, replica, lines)
        state.mark_everyone_dirty(model)


def note_cut(model: Model, replica: Replica, lines: Cut) -> None:
    """Its shards are of that cut."""
    replica.cut = lines
    model.note_cut(lines)


def _lines_of(state: State, replica: Replica) -> Cut | None:
    """Those of its shards, if all of them live and have registered tensors."""
    members = [state.members.get(replica.members[shard]) for shard in sorted(replica.members)]
    lines = tuple(each.line for each in members if each is not None and each.report.layout)
    return lines if len(lines) == replica.shards else None


def _is_mixture(before: Cut | None, lines: Cut) -> bool:
    """Some of its shards have registered other tensors, and the rest has not yet: is that all of the model?"""
    return before is not None and lines != before and any(line in before for line in lines)


def note_company(state: State, model: Model, line: Line) -> None:
    """The only reliable worker of a line will not be, or is now: what it has to copy ahead may be something else."""
    reliable = model.reliable.get(line, {})
    member = state.members.get(next(iter(reliable))) if len(reliable) == 1 else None
    if member is not None and (member.content.copies or member.report.copies_left):
        state.mark_dirty(member.worker)


def note_leaver(model: Model, line: Line) -> None:
    """A worker of the line leaves. If it was the last that one relied on, what spot workers have may be enough now."""
    reliable = [worker for worker in model.reliable.get(line, {}) if worker not in model.closing]
    if len(reliable) > MAX_PUBLISHERS:
        return
    for version, record in model.versions.items():
        if not record.is_established and all(worker.replica in record.publishers for worker in reliable):
            model.changed[version] = None


# --- Carries decisions out: the one place where what the rules decide changes the state.


def carry_out(state: State, decisions: Iterable[Decision]) -> None:
    """Carry out one decision after another. The rule that yields them sees each one done before it goes on."""
    for decision in decisions:
        match decision:
            case Give():
                _give(state, decision)
            case TakeBack(read):
                _take_back(state, read)
            case Cross(reader, version, to_host, cut):
                reader.crossing = Crossing(version, to_host, cut)
            case LookAgain(member, at):
                state.members.wake(member, at)
            case Admit() | Wait() | Fail() | Resolve() | AcceptPublish() | Promise() | Finish():
                _advance(state, decision)
            case Witness(model, upto):
                for worker in model.roll.witness(upto):
                    state.mark_dirty(worker)
            case AskToWitness(member, session, since):
                member.asked, member.asked_since = session, since
                state.mark_dirty(member.worker)
            case AwaitWord(member, reader):
                member.awaited_by[reader] = None
            case _:
                _move(state, decision)


# --- reads ------------------------------------------------------------------------------------------------------------


def _take_back(state: State, read: OpenRead) -> None:
    state.reads.take_back(read)
    state.mark_dirty(read.reader)
    for behind in state.reads.from_source(read.reader):
        state.mark_dirty(behind.reader)
    if read.grant.to_host:  # others of its host may have waited for what it fetched
        state.mark_waiting_dirty(state.models[read.reader.model], sources_of(read.version, read.line))


def _give(state: State, give: Give) -> None:
    reader, record, now = give.reader, give.record, state.now
    source = state.known(give.source)
    grant = Grant(
        ticket=Ticket(state.next_number()),
        version=record.version,
        root=record.roots[give.part or reader.line],
        source=give.source,
        endpoints=source.hello.endpoints,
        reason=give.reason,
        from_host=give.from_host,
        to_host=give.to_host,
        is_cross_site=source.hello.site != reader.hello.site,
        shares=give.shares,
        parts=0 if give.part is None or reader.crossing is None else len(reader.crossing.cut),
    )
    done, chunks, _ = reader.filled(record.version, to_host=give.to_host)
    read = OpenRead(grant, reader.worker, reader.line, looked_at=now, began_at=now, had=done / max(chunks, done, 1))
    read.instead_of, read.must_beat, read.pace.is_stuck = give.instead_of, give.must_beat, give.is_stuck
    read.shares, read.part = give.shares, give.part
    model = state.models[reader.hello.model]
    state.open_read(read)
    model.add_holder(record, reader.worker, reader.line)  # others may read behind it from now on
    state.counters["grants"] += 1
    if give.counted_as:
        state.counters[give.counted_as] += 1
    state.mark_waiting_dirty(model, sources_of(record.version, reader.line))


def _move(
    state: State,
    decision: LookedForBetter
    | Leave
    | StayFor
    | CallStuck
    | CallSlow
    | ForgetCapacity
    | SettlePlaces
    | GiveWay
    | NoteUsualRates,
) -> None:
    """What belongs to readers that leave slow sources."""
    match decision:
        case LookedForBetter(read):
            read.looked_at = state.now
        case Leave(reader, read, may_move_at):
            _leave(state, reader, read, may_move_at)
        case StayFor(reader, until):
            reader.may_move_at = until
        case CallStuck(read, is_stuck):
            if is_stuck and not read.pace.is_stuck:
                state.mark_dirty(read.reader)  # whose call may be in vain
                for behind in state.reads.from_source(read.reader):
                    state.mark_dirty(behind.reader)  # who need not wait for it any more
            read.pace.is_stuck = is_stuck
        case CallSlow(source, until):
            source.slow_until = until
        case ForgetCapacity(source):
            source.capacity.forget(state.now)
        case SettlePlaces(read):
            read.instead_of = None
        case GiveWay(member, to):
            member.gives_way_to = to
            if to is not None:
                state.mark_dirty(member.worker)
        case NoteUsualRates(record, rates, until):
            record.usual, record.usual_until = rates, until
        case _:
            assert_never(decision)


def _leave(state: State, reader: Member, read: OpenRead, may_move_at: float) -> None:
    until = state.now + state.settings.leave_s
    reader.may_move_at = may_move_at
    reader.moves += 1
    reader.left = {worker: spared for worker, spared in reader.left.items() if spared > state.now}
    reader.left[read.source] = until
    source = state.members.get(read.source)
    if source is not None:
        source.slow_until = until


# --- group calls ------------------------------------------------------------------------------------------------------


def _advance(state: State, decision: Admit | Wait | Fail | Resolve | AcceptPublish | Promise | Finish) -> None:
    match decision:
        case Admit(replica, call):
            for shard, root in call.pending.items():
                call.arrived[shard] = root
                state.mark_dirty(replica.members[shard])
            call.pending = {}
        case Wait(call, waiting):
            call.waiting = waiting
        case Fail(call, failure):
            call.fail(failure)
        case Resolve(call, version):
            call.version, call.is_resolved_here = version, True
        case AcceptPublish(model, replica, call, version):
            _accept_publish(state, model, replica, call, version)
        case Promise(model, replica, version):
            model.record(version).promised[replica.name] = None
        case Finish(model, replica, call):
            call.finish()
            replica.finished = max(replica.finished, call.number)
            if call.version is not None:
                note_filled(state, model, replica)
            if call.verb == "publish" and call.version is not None:
                if model.note_exists(call.version):
                    state.mark_waiting_dirty(model, NEWS)
                model.record(call.version).note_published(facts.roots_of(state, replica, call), replica.name)
        case _:
            assert_never(decision)


def _accept_publish(state: State, model: Model, replica: Replica, call: GroupCall, version: Version) -> None:
    record = model.record(version)
    if not record.exists:  # what a publish before this one has left is not what the version is
        record.roots = {}
        still = {worker.replica: None for held in record.holders.values() for worker in held}
        record.publishers = {name: None for name in record.publishers if name in still}
        record.taken = None
    roots = record.accepted[replica.name] = facts.roots_of(state, replica, call)
    record.roots.update(roots)
    for worker in replica.members.values():
        member = state.members.get(worker)
        if member is not None:
            record.layouts[member.line] = member.report.layout
    record.claims[replica.name] = None
    call.version = version


def release(state: State, model: Model, call: GroupCall | None, replica: Replica) -> None:
    """The call is over: what it claimed or was promised is free."""
    record = model.versions.get(call.version) if call is not None and call.version is not None else None
    if record is None:
        return
    was_claimed = record.claims.pop(replica.name, 0) is None
    was_promised = record.promised.pop(replica.name, 0) is None
    if was_claimed or was_promised:
        lines = [line for cut in model.known_cuts() for line in cut if line.shards == replica.shards]
        state.mark_concerned_dirty(model, [(record.version, line) for line in lines])  # nobody of it wants it now
    if was_promised:
        state.mark_waiting_dirty(model, ARRIVALS)


# --- what is said -----------------------------------------------------------------------------------------------------


def note_drained(state: State, member: Member, drained: Drained) -> None:
    """The member is about to be told whether anybody still reads from its buffer."""
    member.is_drained = drained.version is not None
    if drained.look_again_at < inf:
        state.members.wake(member, drained.look_again_at)


def let_go(state: State, model: Model, member: Member, numbers: tuple[int, ...]) -> None:
    """These host copies of the member are to go, and never count again. What follows from it is decided next."""
    if not numbers:
        return
    going = [copy for copy in member.content.copies if copy.number in numbers and copy.number not in member.releasing]
    if going:
        member.releasing.update((copy.number, None) for copy in going)
        state.mark_dirty(member.worker)
        state.mark_readers_dirty(member.worker)
        concerned = [(copy.version, member.content.line_of(copy.version, is_copy=True)) for copy in going]
        state.mark_concerned_dirty(model, concerned)


def note_changed_versions(state: State) -> bool:
    """Where somebody has got or lost all of a version: what follows for everybody. Returns whether that is anything."""
    for model in state.models.values():
        if not model.changed:
            continue
        if model.roll.is_over:
            lost, back = model.news_of_losses()
            safe = retention.newly_established(state, model)
            _say_losses(state, model, lost, back)
            for record in safe:
                model.note_established(record)
            _wake_for_news(state, model)
        model.changed = {}
    return bool(state.dirty)


def _wake_for_news(state: State, model: Model) -> None:
    """Which versions there are, which of them are to be kept, or which is established is not what it was."""
    former, now = model.noted, model.glance()
    if former is now:
        return
    model.noted = now
    before = dict.fromkeys(former.available if former is not None else ())
    after = dict.fromkeys(now.available)
    turned = [version for version in {**before, **after} if (version in before) != (version in after)]
    if former is None or former[1:] != now[1:]:
        state.mark_waiting_dirty(model, NEWS, *map(loss_of, turned))
    if former is None or former.newest_established != now.newest_established:
        choose_keepers(state, model)


def _say_losses(state: State, model: Model, lost: list[Version], back: list[Version]) -> None:
    model.note_said(lost, back)
    failures = [model.loss(model.look_up(version)) for version in lost]
    state.said += [f"{failure.message}; {failure.hint}" for failure in failures]
    state.said += [f"version {version} of {model.name} is back" for version in back]
    state.counters["lost_versions"] += len(lost)


# --- who makes a host copy ahead of need ------------------------------------------------------------------------------


def offer_keeper(state: State, model: Model, member: Member) -> None:
    """The member may be the one to make a copy of the newest established version, or not be it any more."""
    version = model.newest_established
    if version is not None:
        record = model.look_up(version)
        keepers = record.keepers.get(member.line)
        if retention.may_keep(state, model, record, member):
            keepers = keepers or record.keepers.setdefault(member.line, Keepers())
            is_news = keepers.offer(retention.rank(member, record))
        else:
            is_news = keepers is not None and keepers.withdraw(member.worker)
        if is_news:
            choose_keeper(state, model, record, member.line)


def choose_keepers(state: State, model: Model) -> None:
    """Another version is the newest established one."""
    version = model.newest_established
    if version is None:
        return
    record = model.look_up(version)
    for line, whole in record.whole.items():
        keepers = record.keepers.setdefault(line, Keepers())
        for member in map(state.members.get, whole):
            if member is not None and retention.may_keep(state, model, record, member):
                keepers.offer(retention.rank(member, record))
        choose_keeper(state, model, record, line)


def choose_keeper(state: State, model: Model, record: VersionRecord, line: Line) -> None:
    """Of those who were offered; who is it now, and who was, are decided for again."""
    keepers = record.keepers.get(line)
    if keepers is None:
        return

    def is_able(worker: WorkerId) -> bool:
        member = state.members.get(worker)
        return member is not None and retention.may_keep(state, model, record, member)

    chosen = keepers.best(is_able)
    if chosen == keepers.chosen:
        return
    for worker in (keepers.chosen, chosen):
        if worker is not None and worker in state.members:
            state.mark_dirty(worker)
    keepers.chosen = chosen
