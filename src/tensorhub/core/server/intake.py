"""What a report changes in the server's tables. Called by the server machine, whose tables these are."""

from collections import deque
from math import inf

from ..messages import (
    Failure,
    Filling,
    Grant,
    Holding,
    HostCopy,
    LayoutInfo,
    Poisoned,
    Report,
    TicketFailure,
)
from ..names import Digest, Ticket, WorkerId
from . import apply, evidence, facts, judging, parts, places, rollcall
from .catalog import Model
from .content import Content
from .groups import Replica
from .membership import TRIES_A_TURN, Avoided, Member
from .open_reads import OpenRead
from .rules import progress
from .state import State
from .watches import NEWS, sources_of

MAX_LATELY = 16  # reads that have ended, of which the usual rate is known: the better half of a small fleet's update


def take_report(state: State, member: Member, report: Report, arrived: float) -> None:
    """Take in a report that came at `arrived`, in time awake."""
    member.note_heard(max(state.now, arrived), state.settings)
    member.is_doubted = False
    before, member.report = member.report, report
    model, replica = state.place(member)
    former = member.content
    if report.layout != before.layout:
        places.note_line(state, member)
    judging.take_content(state, model, replica, member, before)
    note_fed(state, member, former)
    take_reads(state, member, before)
    take_call(state, replica, member, before)
    rollcall.hear(state, model, member)


def count(state: State, report: Report) -> None:
    """A report has come; numbers in it may be above any that this server has heard of."""
    state.counters["reports"] += 1
    if not state.numbers.learn(report):
        state.counters["odd_numbers"] += 1


def take_layout(state: State, layout: LayoutInfo) -> None:
    """The tensors that some worker has registered: to name the one that differs, and for who asks what a version is."""
    state.counters["layouts"] += 1
    state.layouts[layout.digest()] = state.layouts.pop(layout.digest(), layout)  # newest last
    if len(state.layouts) > state.most_layouts:
        _forget_layouts(state)


def _forget_layouts(state: State) -> None:
    """Those of no worker and no version, but for the newest: their workers may be about to report."""
    used = {member.report.layout for member in state.members.all()}
    for model in state.models.values():
        used.update(layout for record in model.versions.values() for layout in record.layouts.values())
    newest = list(state.layouts)[-max(1, state.settings.most_versions // 2) :]
    used.update(newest)
    state.layouts = {digest: layout for digest, layout in state.layouts.items() if digest in used}
    state.most_layouts = max(state.settings.most_versions, 2 * len(state.layouts))  # so this is seldom


def take_reads(state: State, member: Member, before: Report) -> None:
    """What the worker reads, what it does not read any more, and what has failed."""
    report, worker = member.report, member.worker
    if report.across is not None or member.crossing is not None:
        parts.take_across(state, member, report.across)
    reads = state.reads.of(worker) if report.failures else []
    close_reads(state, member, report.closed, report.over)
    reading = report.reading
    if reading is not None and state.is_recovering and _may_adopt(state, worker, report):
        text = "granted before a restart"
        grant = Grant(
            *(reading.ticket, reading.version, Digest(""), reading.source, (), text),
            from_host=reading.from_host,
            to_host=reading.to_host,
            shares=reading.shares,
        )
        behind = state.reads.readers_behind(worker, reading.version)
        is_void = reading.source in behind or state.reads.current.get(worker) is not None
        state.open_read(OpenRead(grant, worker, member.line, is_void, shares=reading.shares))
    _note_sharing(state, member)
    note_pace(state, member)
    note_call(member)
    known = [failure.ticket for failure in before.failures]
    for failure in report.failures:
        if failure.ticket not in known:
            _count_failure(state, member, failure, reads)


def _note_sharing(state: State, member: Member) -> None:
    """It could not map the host copy that it was to share, and reads it now: others may read behind it."""
    reading = member.report.reading
    for read in state.reads.of(member.worker) if reading is not None and not reading.shares else ():
        if reading is not None and read.ticket == reading.ticket and read.shares:
            read.shares, member.alone_until = False, state.now + state.settings.leave_s
            state.counters["unshared"] += 1
            state.mark_waiting_dirty(state.models[member.hello.model], sources_of(read.version, read.line))


def note_call(member: Member) -> None:
    """What has failed is counted for each call."""
    call = member.report.call
    number = call.number if call is not None else 0
    if number != member.call_number:
        member.call_number, member.failures, member.chunks, member.avoided = number, 0, 0, {}


def _count_failure(state: State, reader: Member, failure: TicketFailure, reads: list[OpenRead]) -> None:
    """What follows from a failed read: for its reader, and for all who might choose that source too.

    `reads`: those that its reader had until then.
    """
    if reader.chunks_in_place > reader.chunks:
        reader.chunks, reader.failures = reader.chunks_in_place, 0
    reader.failures += 1
    reader.in_vain += 1
    if reader.in_vain % TRIES_A_TURN == 0:
        model = state.models[reader.hello.model]
        state.mark_waiting_dirty(model, NEWS)  # another one may be elected
        if model.closing and reader.told is not None and reader.told.fetch is not None:
            state.mark_everyone_dirty(model)  # or be the heir
    avoided = reader.avoided.setdefault(failure.source, Avoided(0.0, 0))
    avoided.times += 1
    read = next((read for read in reads if read.ticket == failure.ticket), None)
    record = state.models[reader.hello.model].versions.get(read.version) if read is not None else None
    is_for_good = failure.code == "corrupt-transfer" and (
        avoided.times > 1 or (record is not None and record.refused.get(failure.source, -inf) > state.now)
    )
    avoided.until = inf if is_for_good else state.now + state.settings.avoid_s
    if record is not None and failure.code == "corrupt-transfer":
        record.refused[failure.source] = state.now + state.settings.leave_s
    source = state.members.get(failure.source)
    has_ended = read is not None and read.part is not None and reader.report.across is None
    if failure.code == "source-lost" and has_ended and avoided.times > 1:
        # A source that is here and ends the read again cannot show all that this reader wants.
        avoided.until = inf if source is not None and facts.is_here(state, source) else avoided.until
    if source is not None:
        source.is_doubted = True
    state.counters["failed_reads"] += 1


def _may_adopt(state: State, worker: WorkerId, report: Report) -> bool:
    """A server before this one may have granted what the worker reads."""
    reading = report.reading
    if reading is None or any(read.ticket == reading.ticket for read in state.reads.of(worker)):
        return False  # it is known
    return reading.ticket > report.closed and state.numbers.is_ours(reading.ticket)


def close_reads(state: State, member: Member, upto: Ticket | None, beside: tuple[Ticket, ...] = ()) -> None:
    """The member reads no ticket up to this one any more; it counts as a holder only by what it has."""
    model = state.models[member.hello.model]
    for read in state.close_reads(member.worker, upto, beside):
        _note_one_reader_less(state, model, read)
        state.mark_waiting_dirty(model, sources_of(read.version, read.line))  # it is behind nobody any more
        record = model.versions.get(read.version)
        _note_ended(state, model, member, read)
        still = state.reads.current.get(member.worker)
        is_read = still is not None and still.version == read.version
        if record is not None and not is_read and (read.version, read.line) not in member.content.places:
            model.remove_holder(record, member.worker, read.line)


def _note_one_reader_less(state: State, model: Model, read: OpenRead) -> None:
    """Its source may have waited for that, if it wants to leave what it has."""
    source = state.members.get(read.source)
    is_poisoned = source is not None and isinstance(source.content.buffer, Poisoned)
    if is_poisoned or model.watches.is_waiting(read.source):
        state.mark_dirty(read.source)


def take_call(state: State, replica: Replica, member: Member, before: Report) -> None:
    """What the worker's caller waits for."""
    report, is_first = member.report, not before.number
    former = replica.call
    was_over, was_ended, was_finished = former is None or former.is_over, replica.ended, replica.finished
    held = report.buffer.version if isinstance(report.buffer, Holding) else None
    ended, seen, missed = (report.ended, report.finished), report.seen, report.missed
    replica.note_ended(member.shard, *ended, seen=seen, missed=missed, held=held)
    if report.call is None or report.ended != before.ended:
        replica.bereft.pop(member.shard, None)  # the call that another could not make is over here
    if missed is not None and replica.ended != was_ended and not state.is_recovering:
        _note_bereft(state, replica, member, missed)
    if report.call is not None:
        is_put = report.ended != report.call.number - 1
        seen, last = report.seen, state.numbers.last
        replica.arrive(member.shard, report.call, now=state.now, is_first=is_first, is_put=is_put, seen=seen, last=last)
        _note_doubt(state, replica)
        _take_inherited(state, replica, member)
    if replica.finished != was_finished:
        for sibling in [state.members.get(worker) for worker in replica.members.values()]:
            if sibling is not None:
                _take_inherited(state, replica, sibling)
    if former is not replica.call:
        apply.release(state, state.models[member.hello.model], former, replica)
    if (former is not None and former.is_over and not was_over) or replica.ended != was_ended:
        state.mark_replica_dirty(replica)


def _take_inherited(state: State, replica: Replica, member: Member) -> None:
    model = state.models[member.hello.model]
    if evidence.take_inherited(state, model, replica, member):
        judging.judge_content(state, model, replica, member, member.report)


def _note_bereft(state: State, replica: Replica, member: Member, missed: Failure) -> None:
    """It could not make its call. Its siblings were in theirs, as was heard before: there, or on their way there."""
    for shard, worker in replica.members.items():
        sibling = state.members.get(worker)
        if shard != member.shard and sibling is not None and sibling.report.call is not None:
            replica.note_bereft(shard, member.shard, sibling.report.call, missed)


def _note_doubt(state: State, replica: Replica) -> None:
    """The siblings of a shard that has come may have ended the call that they were in: all are asked."""
    call = replica.call
    if call is not None and call.is_doubted and not call.doubted:
        call.doubted = state.next_number()
        state.mark_replica_dirty(replica)


# --- how a read goes --------------------------------------------------------------------------------------------------


def note_fed(state: State, source: Member, former: Content) -> None:
    """It has more of a version than before: a reader that had all of that until now can get something only now."""
    for had in (former.buffer, *former.copies):
        if not isinstance(had, (Filling, HostCopy)) or (isinstance(had, HostCopy) and had.whole):
            continue
        from_host = isinstance(had, HostCopy)
        is_whole = facts.is_full(source, had.version, from_host)
        if not is_whole and source.done(from_host=from_host, version=had.version) <= had.done:
            continue
        source.in_vain = 0
        for read in state.reads.from_source(source.worker):
            reader = state.members.get(read.reader)
            if reader is None or (read.version, read.grant.from_host) != (had.version, from_host):
                continue
            if reader.filled(read.version, to_host=read.grant.to_host)[0] >= had.done:
                read.pace.wait(state.now)


def note_pace(state: State, reader: Member) -> None:
    """What the reader's report says of its open read."""
    told, now = reader.report.reading, state.now
    read = state.reads.current.get(reader.worker)
    if told is None or read is None or told.ticket != read.ticket:
        return
    done, chunks, is_filled = reader.filled(read.version, to_host=read.grant.to_host)
    if told.is_opened and not is_filled:
        read.pace.rest(now)  # it has the manifest, and waits for its buffer
        read.began_at = now
        return
    chunk_bytes = reader.report.size_bytes // chunks if chunks > 0 else 0
    arrived = max(0, told.arrived_bytes)
    window_s = progress.window_s(state)
    read.pace.note(now, arrived_bytes=arrived, done=done, chunk_bytes=chunk_bytes, over_s=window_s)
    if reader.paced != read.version:
        reader.paced, reader.best, reader.moves, reader.may_move_at = read.version, {}, 0, -inf
    source = state.members.get(read.source)
    if source is not None and read.pace.rate is not None:
        tier = progress.tier(state, read)
        reader.best[tier] = max(reader.best.get(tier, 0.0), read.pace.rate)
    if source is not None:
        its_own = progress.its_own(state, read)
        is_hopeless = its_own is not None and (
            progress.cannot_begin(state, its_own) or (its_own.pace.is_stuck and progress.is_held_up(state, its_own))
        )
        has_no_more = source.filled(read.version, to_host=read.grant.from_host)[0] <= done
        if its_own is not None and has_no_more and not is_hopeless:
            read.pace.wait(now)
        rates = [one.pace.rate or 0.0 for one in state.reads.from_source(read.source) if not one.is_void]
        source.capacity.note(now, sum(rates), 4 * window_s)


def _note_ended(state: State, model: Model, reader: Member, read: OpenRead) -> None:
    """A read is over. If it has brought all that was missing, those that come later are compared with it."""
    is_whole = reader.has_whole_copy(read.version) if read.grant.to_host else reader.holds(read.version)
    took_s = state.now - read.began_at
    if read.is_void or read.part is not None or not is_whole or took_s <= 0.0 or state.members.get(read.source) is None:
        return
    rates = model.lately.setdefault(progress.tier(state, read), deque(maxlen=MAX_LATELY))
    rates.append(reader.report.size_bytes * (1.0 - read.had) / took_s)
