"""Sessions and reports: how a worker joins, reports and leaves, and what a restarted server waits for."""

from collections.abc import Iterator
from math import inf

from msgspec.structs import replace

from ..protocol import events
from ..protocol.errors import BY_CODE, TensorHubError, shortened
from ..protocol.messages import (
    MAX_WORDS,
    Failure,
    Filling,
    Grant,
    Hello,
    Holding,
    HostCopy,
    LayoutInfo,
    Poisoned,
    Report,
    TicketFailure,
)
from ..protocol.names import Number, ReplicaName, Ticket, WorkerId
from . import admission, apply, calls, content, reads, slow, stalls
from . import state as facts
from .groups import Replica
from .journal import History, Joined, ModelHistory, Over, Published, Record, Sessions, Writes
from .members import (
    ARRIVALS,
    NEWS,
    NOTHING,
    TRIES_A_TURN,
    Content,
    FailedSource,
    LeftRead,
    Member,
    OpenRead,
    Place,
    Told,
    Tries,
    name_of,
    replicas_of,
    sources_of,
)
from .sources import Wanted
from .state import MARGIN, State
from .versions import Model, Writer

# --- A restarted server *listens*: until all workers have reported that may still live, for a lease at most.
#
# A journal names the sessions of these workers. Without a journal any worker may come, and every model listens for a
# lease. While a model listens, none of its workers is drained, no call of its replicas is resolved, none of its
# versions counts as lost, and its writer stays. A worker is awaited until it has reported that it has heard this life
# of the server: until then it may begin a read that a former life has granted.


def remember(state: State, history: History) -> None:
    """Restores what a journal says of former lives of the server."""
    for name, told in history.models.items():
        model = state.models[name] = Model(name, 1, state.settings.max_versions)
        model.keeps_established, model.began = state.settings.keep_established, told.began
        if told.writer is not None and any(worker.replica == told.writer.replica for worker in told.sessions):
            model.writer = Writer(told.writer.replica, told.writer.number, state.now)
        for version, published in told.versions.items():
            record = model.record(version)
            record.begin(published.epoch)
            record.publisher = published.replica or None
            model.note_exists(record)
        if told.established in model.versions and told.established is not None:
            model.note_established(model.versions[told.established])
        model.awaited = {} if state.is_untold else told.sessions
        model.is_listening = state.is_untold or bool(model.awaited)
        model.changed = {}
        state.empty_models[name] = state.now
    state.is_recovering = state.is_untold or any(model.is_listening for model in state.models.values())


def started(state: State, *, is_fresh: bool) -> events.ServerStarted:
    """The event of this life's beginning."""
    awaited = sum(len(model.awaited) for model in state.models.values())
    return events.ServerStarted(
        life=state.numbers.first,
        journal="fresh" if is_fresh else "none" if state.is_untold else "found",
        awaited=awaited,
        listens_s=max(0.0, state.recovered_at - state.now) if state.is_recovering else 0.0,
    )


def records_of(state: State) -> Iterator[Record]:
    """The journal records for what this life of the server knows."""
    for name, model in state.models.items():
        living = [member for member in state.members.all() if member.hello.model == name]
        told = ModelHistory({worker: list(each) for worker, each in model.awaited.items()}, began=model.began)
        for member in living:
            if awaited_as(model, member.worker, member.session) is None:
                told.sessions.setdefault(member.worker, []).append([member.session])
        if model.writer is not None:
            told.writer = Writes(name, model.writer.replica, model.writer.number)
        finished = [record for _, record in sorted(model.versions.items()) if record.exists]
        told.versions = {
            each.version: Published(name, each.version, each.epoch, each.publisher or ReplicaName(""))
            for each in finished
        }
        if model.newest is not None and model.newest not in told.versions:
            told.versions[model.newest] = Published(name, model.newest, model.newest_epoch, ReplicaName(""))
        told.established = max((each.version for each in finished if each.is_established), default=None)
        yield from told.records(name)


def await_session(model: Model, member: Member, report: Report) -> None:
    """A session has begun, with that report. A worker that is awaited has come, and is to hear of that."""
    found = awaited_as(model, member.worker, report.session)
    if found is not None:
        found.append(member.session)


def awaited_as(model: Model, worker: WorkerId, session: Number) -> Sessions | None:
    """The process that is awaited, if that is a session of it."""
    return next((numbers for numbers in model.awaited.get(worker, ()) if session in numbers), None)


def hear(state: State, model: Model, member: Member) -> None:
    """What follows if its report shows that it has heard this life of the server."""
    if model.awaited and member.report.session == member.session:
        _await_no_more(state, model, member)


def _await_no_more(state: State, model: Model, member: Member) -> None:
    found = awaited_as(model, member.worker, member.session)
    if found is None:
        return
    model.awaited[member.worker].remove(found)
    if not model.awaited[member.worker]:
        del model.awaited[member.worker]
    state.journal += [Over(*member.worker, member.session), Joined(*member.worker, member.session)]
    if not model.awaited and not state.is_untold:
        state.counters["restarts_heard"] += 1
        _end_listening(state, model)
        state.is_recovering = any(each.is_listening for each in state.models.values())


def _end_listening(state: State, model: Model) -> None:
    model.is_listening, model.awaited = False, {}
    model.changed.update(dict.fromkeys(model.versions))
    state.mark_everyone_dirty(model)


def end_recovery(state: State) -> None:
    """A lease is over: a worker that has not reported has no session any more."""
    state.is_journal_old |= state.is_untold
    state.is_recovering = state.is_untold = False
    for model in state.models.values():
        if model.is_listening:
            state.events += [events.Died(**name_of(worker), seen="not back") for worker in model.awaited]
            model.has_died |= bool(model.awaited)
            _end_listening(state, model)


def note_stale(state: State, hello: Hello, report: Report) -> None:
    """A worker that begins a session has heard of a life that the journal does not know: the journal is too old."""
    if state.is_untold or not state.told_upto or state.now >= state.recovered_at:
        return
    model = state.models.get(hello.model)
    if model is not None and awaited_as(model, hello.worker, report.session) is not None:
        is_stale = report.seen > state.told_upto + MARGIN
    else:
        is_stale = report.session > state.told_upto and not state.numbers.first <= report.session <= state.numbers.last
    if not is_stale:
        return
    text = "the journal is older than what workers have heard: the server listens for a lease"
    state.events.append(events.Warned(what=text))
    state.is_untold = state.is_recovering = state.is_journal_old = True
    for model in state.models.values():
        model.is_listening = True


def listen_anew(state: State) -> None:
    """Another server may have promised something to any worker: listen for a lease."""
    state.is_untold = state.is_recovering = state.is_journal_old = True
    state.recovered_at = state.now + state.settings.lease_s
    for model in state.models.values():
        model.is_listening = True


# --- What a report changes in the server's tables. Called by the server machine, whose tables these are.


def take_report(state: State, member: Member, report: Report, arrived: float) -> None:
    """Take in a report that came at `arrived`, in time awake."""
    member.note_heard(max(state.now, arrived), state.settings)
    member.has_failed_a_reader = False
    before, member.report = member.report, report
    model, replica = state.place(member)
    former = member.content
    if report.layout != before.layout:
        apply.note_layout_key(state, member)
    content.take_content(state, model, replica, member, before)
    note_fed(state, member, former)
    take_reads(state, member, before)
    admission.note_writer(state, model, replica, report)
    take_call(state, replica, member, before)
    hear(state, model, member)


def count(state: State, report: Report) -> bool:
    """A report has come. Returns whether a server may have given out its numbers."""
    state.counters["reports"] += 1
    return state.numbers.learn(report)


def take_layout(state: State, layout: LayoutInfo) -> None:
    """The tensors that a worker has registered: to name the one that differs, and to describe a version."""
    state.counters["layouts"] += 1
    state.layouts[layout.digest()] = state.layouts.pop(layout.digest(), layout)  # newest last
    if len(state.layouts) > state.max_layouts:
        _forget_layouts(state)


def _forget_layouts(state: State) -> None:
    """Drops layouts that no worker and no version has. Keeps the newest: their workers may be about to report."""
    used = {member.report.layout for member in state.members.all()}
    for model in state.models.values():
        used.update(layout for record in model.versions.values() for layout in record.layouts.values())
    newest = list(state.layouts)[-max(1, state.settings.max_versions // 2) :]
    used.update(newest)
    state.layouts = {digest: layout for digest, layout in state.layouts.items() if digest in used}
    state.max_layouts = max(state.settings.max_versions, 2 * len(state.layouts))  # so this is seldom


def take_reads(state: State, member: Member, before: Report) -> None:
    """What the worker reads, what it does not read any more, and what has failed."""
    report, worker = member.report, member.worker
    reading = report.reading
    if reading is not None and reading.root:
        content.bind(state, member, reading)
    reads = state.reads.of(worker) if report.failures else []
    close_reads(state, member, report.closed)
    model = state.models[member.hello.model]
    if reading is not None and model.is_listening and _may_adopt(state, worker, report):
        text = "granted before a restart"
        grant = Grant(
            *(reading.ticket, reading.version, reading.sources, text),
            to_host=reading.to_host,
            shares=reading.shares,
            is_across=reading.is_across,
        )
        behind = state.reads.readers_behind(worker, reading.version)
        is_behind = any(each.worker in behind for each in reading.sources)
        is_void = is_behind or state.reads.current.get(worker) is not None
        state.open_read(OpenRead(grant, worker, member.layout_key, state.now, is_void, shares=reading.shares))
    _note_sharing(state, member)
    slow.note(state, member)
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
            state.mark_waiting_dirty(state.models[member.hello.model], sources_of(read.version, read.layout_key))


def note_call(member: Member) -> None:
    """Note a new call. Failures are counted for each call."""
    call = member.report.call
    number = call.number if call is not None else 0
    if number != member.tries.call:
        member.tries, member.left_read = Tries(number), None


def _count_failure(state: State, reader: Member, failure: TicketFailure, reads: list[OpenRead]) -> None:
    """Counts a failed read: for its reader, and for all others that might choose that source.

    `reads`: those that its reader had until then.
    """
    tries = reader.tries
    if reader.chunks_in_place > tries.chunks:
        tries.chunks, tries.failures = reader.chunks_in_place, 0
    tries.failures += 1
    reader.reads_without_progress += 1
    if reader.reads_without_progress % TRIES_A_TURN == 0:
        model = state.models[reader.hello.model]
        state.mark_waiting_dirty(model, NEWS)  # the server may elect another worker
        if model.closing and reader.told is not None and reader.told.fetch is not None:
            state.mark_everyone_dirty(model)  # or choose another one for a handover
    failed = tries.sources.setdefault(failure.source, FailedSource(0.0, 0))
    failed.times += 1
    read = next((read for read in reads if read.ticket == failure.ticket), None)
    if read is not None and not read.is_void:
        why = shortened(failure.message, MAX_WORDS)
        reader.left_read = LeftRead(read.version, read.grant.to_host, read.sources, why, "failed")
    record = state.models[reader.hello.model].versions.get(read.version) if read is not None else None
    is_for_good = failure.code == "transfer" or (  # it cannot show all tiles
        failure.code == "corrupt-transfer"
        and (failed.times > 1 or (record is not None and record.refused.get(failure.source, -inf) > state.now))
    )
    failed.until = inf if is_for_good else state.now + state.settings.avoid_s
    if record is not None and failure.code == "corrupt-transfer":
        record.refused[failure.source] = state.now + state.settings.leave_s
    source = state.members.get(failure.source)
    if source is not None:
        source.has_failed_a_reader = True
        if is_for_good and source.report.closing:
            state.mark_dirty(source.worker)  # it need not wait for this reader
    state.counters["failed_reads"] += 1
    state.failed_reads[failure.code if failure.code in BY_CODE else TensorHubError.code] += 1


def _may_adopt(state: State, worker: WorkerId, report: Report) -> bool:
    """A server before this one may have granted what the worker reads."""
    reading = report.reading
    if reading is None or any(read.ticket == reading.ticket for read in state.reads.of(worker)):
        return False  # it is known
    return reading.ticket > report.closed and state.numbers.is_ours(reading.ticket)


def close_reads(state: State, member: Member, upto: Ticket | None) -> None:
    """The member reads no ticket up to this one any more; it counts as a holder only by what it has."""
    model, over = state.models[member.hello.model], state.close_reads(member.worker, upto)
    _tell_read(state, member, over)
    for read in over:
        _note_one_reader_less(state, model, read)
        state.mark_waiting_dirty(
            model, sources_of(read.version, read.layout_key)
        )  # it is behind no other reader any more
        record = model.versions.get(read.version)
        if record is not None:
            slow.note_end(state, record, member, read)
        still = state.reads.current.get(member.worker)
        is_read = still is not None and still.version == read.version
        if record is not None and not is_read and (read.version, read.layout_key) not in member.content.places:
            model.remove_holder(record, member.worker, read.layout_key)


def _tell_read(state: State, member: Member, over: list[OpenRead]) -> None:
    """Tells of the read that has brought its version to the end, if one of these has."""
    done = member.report.read
    read = next((each for each in over if done is not None and each.ticket == done.ticket), None)
    if read is None or done is None:
        return
    member.left_read, to_host = None, read.grant.to_host
    found = events.ReadFinished(
        **name_of(member.worker),
        version=read.version,
        source=replicas_of(read.sources),
        size_bytes=done.arrived_bytes,
        seconds=done.seconds,
        transport=shortened(done.transport, MAX_WORDS),
        path=shortened(done.path, MAX_WORDS),
        is_verified=done.is_verified,
        to_host=to_host,
        is_cross_site=any(each.is_cross_site for each in read.sources),
    )
    state.events.append(found)


def _note_one_reader_less(state: State, model: Model, read: OpenRead) -> None:
    """Its sources may have waited for that, if they want to leave what they have."""
    for worker in (each.worker for each in read.sources):
        source = state.members.get(worker)
        is_poisoned = source is not None and isinstance(source.content.buffer, Poisoned)
        if is_poisoned or model.watches.is_waiting(worker):
            state.mark_dirty(worker)


def take_call(state: State, replica: Replica, member: Member, before: Report) -> None:
    """What the worker's caller waits for."""
    report, is_first = member.report, not before.number
    former = replica.call
    was_over, was_ended = former is None or former.is_over, replica.ended
    held = report.buffer.version if isinstance(report.buffer, Holding) else None
    model, has_come = state.models[member.hello.model], replica.note_step(member.shard, report.step)
    finished = report.finished if report.finished > replica.alone else 0  # else perhaps without the server
    seen, missed = report.seen, report.missed
    replica.note_ended(member.shard, report.ended, finished, seen=seen, missed=missed, held=held)
    if report.call is None or report.ended != before.ended:
        replica.bereft.pop(member.shard, None)  # the call that another could not make is over here
    if missed is not None and replica.ended != was_ended and not model.is_listening:
        _note_bereft(state, replica, member, missed)
    if report.call is not None and calls.passed_by(state, model, replica, member) is None:
        is_put = report.ended != report.call.number - 1
        seen, last = report.seen, state.numbers.last
        replica.arrive(member.shard, report.call, now=state.now, is_first=is_first, is_put=is_put, seen=seen, last=last)
        _note_doubt(state, replica)
        stalls.note_call(state, replica, member.hello.model)
    if former is not replica.call:
        apply.release(state, model, former, replica)
    if (former is not None and former.is_over and not was_over) or replica.ended != was_ended or has_come:
        state.mark_replica_dirty(replica)


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
    """It has more of a version than before: it was not elected in vain."""
    for had in (former.buffer, *former.copies):
        if isinstance(had, Filling) or (isinstance(had, HostCopy) and not had.whole):
            from_host = isinstance(had, HostCopy)
            is_whole = facts.is_full(source, had.version, from_host)
            if is_whole or source.done(from_host=from_host, version=had.version) > had.done:
                source.reads_without_progress = 0


# --- Reports that change nothing: their sender is told again what it was told last.
#
# Most reports change nothing:
# - A worker lives and does nothing.
# - Its read goes on, and its source is good enough.
# - Its caller has got the answer that the server gave.
#
# It must never take a report so while there is something new that its worker could hear of with it. The judge of missed
# wake-ups holds it to that.


def take(state: State, report: Report, sender: str, arrived: float) -> Member | None:
    """Takes in a report that changes nothing, and came at `arrived`. Returns its sender; None if it changes something.

    Workers may have to be decided for afterwards, above all the reporter if its source is not good enough any more.
    """
    member = _known(state, report, sender)
    if member is None or member.told is None:
        return None
    model, told = state.models[member.hello.model], member.told
    if report.call != member.report.call:
        if not _has_heard_the_end(state, model, member, report, told):
            return None
        told = replace(told, answer=None)
    elif isinstance(report.buffer, Filling):
        if not _goes_on(state, model, member, report, told):
            return None
    elif not _is_still(state, model, member, report):
        return None
    _take_in(state, model, member, report, arrived)
    member.told = replace(told, report_at_once=False) if told.report_at_once else told
    return member


def _known(state: State, report: Report, sender: str) -> Member | None:
    """The member, if it could be told again what it was told last: it is here, and no worker waits for its report."""
    hello = state.hellos.get(sender)
    member = state.members.get(state.speakers[sender]) if hello is not None else None
    if member is None or hello is None or state.is_recovering or state.dirty:
        return None
    if member.hello.life != hello.life or report.number <= member.report.number or report.left:
        return None
    if report.session != member.session or member.has_failed_a_reader:
        return None
    model = state.models[hello.model]
    if calls.is_asked(model.replicas[hello.replica], member):
        return None
    return member if facts.is_here(state, member) else None


def _take_in(state: State, model: Model, member: Member, report: Report, arrived: float) -> None:
    """Takes in the parts of a report that concern its sender alone."""
    count(state, report)
    member.note_heard(max(state.now, arrived), state.settings)
    member.report = report
    note_call(member)
    read = state.reads.current.get(member.worker)
    if read is not None:
        former = member.content
        member.content = Content(report.buffer, former.copies, member.layout_key)
        note_fed(state, member, former)
        slow.note(state, member)
        reads.decide_read(state, model, member, Wanted(read.version, False))
    hear(state, model, member)


# --- which reports they are -------------------------------------------------------------------------------------------


def _is_still(state: State, model: Model, member: Member, report: Report) -> bool:
    """It waits for nothing, and nothing has happened since it was decided for."""
    if member.settled_at != state.happened or model.watches.is_waiting(member.worker):
        return False
    return not state.reads.of(member.worker) and is_same(report, member.report)


def _goes_on(state: State, model: Model, member: Member, report: Report, told: Told) -> bool:
    """Its buffer is being filled by the read that it was granted, and it waits for nothing but the end of that."""
    read, before, answer = state.reads.current.get(member.worker), member.report, told.answer
    if read is None or read.grant is not told.grant or read.grant.to_host or not is_progress(report, before):
        return False
    if report.reading is None or before.reading is None or report.reading.root != before.reading.root:
        return False
    if any(reading.ticket != read.ticket or reading.is_opened for reading in (report.reading, before.reading)):
        return False
    has_its_answer = answer is not None and answer.version == read.version and answer.waiting is None
    return has_its_answer and not model.watches.waits_for_more(member.worker, than="loss")


def _has_heard_the_end(state: State, model: Model, member: Member, report: Report, told: Told) -> bool:
    """Its caller has the version of its call, as the server has said, and calls nothing more yet."""
    before, call = member.report, model.replicas[member.hello.replica].call
    if report.call is not None or before.call is None or call is None or not call.is_finished:
        return False
    if not before.call.number == call.number == report.ended == report.finished:
        return False
    has_heard = told.answer is not None and told.answer.finished
    is_idle = not model.watches.is_waiting(member.worker) and not state.reads.of(member.worker)
    is_all = report.buffer == before.buffer and report.reading == before.reading and _is_same_else(report, before)
    return has_heard and is_idle and is_all


# --- what a report tells that the one before did not ------------------------------------------------------------------


def is_same(report: Report, before: Report) -> bool:
    """True if the report says only that the worker lives, and which message it has received. It has no read open."""
    return report.buffer == before.buffer and report.reading == before.reading and _is_same_beside(report, before)


def is_progress(report: Report, before: Report) -> bool:
    """True if the report says only that the fill of its buffer has gone on."""
    now, then = report.buffer, before.buffer
    if not (isinstance(now, Filling) and isinstance(then, Filling) and now.version == then.version):
        return False
    return now.done >= then.done and report.closed == before.closed and _is_same_beside(report, before)


def _is_same_beside(report: Report, before: Report) -> bool:
    """Both reports agree in all fields except the buffer and the read."""
    return (
        report.call == before.call
        and (report.ended, report.finished, report.step) == (before.ended, before.finished, before.step)
        and _is_same_else(report, before)
    )


def _is_same_else(report: Report, before: Report) -> bool:
    return (
        (report.session, report.can_box) == (before.session, before.can_box)
        and (report.prefetch, report.stops) == (before.prefetch, before.stops)
        and report.writes == before.writes
        and report.missed == before.missed
        and (report.failures, report.copy_error, report.copies_left)
        == (before.failures, before.copy_error, before.copies_left)
        and report.size_bytes == before.size_bytes
        and not report.left
        and content.content_beside(report) == content.content_beside(before)
    )


# --- How a session begins and ends in the server's tables. Called by the server machine, whose tables these are.


def begin(state: State, hello: Hello, sender: str, report: Report) -> Member:
    """A worker without a session has reported."""
    model = state.models.get(hello.model)
    state.empty_models.pop(hello.model, None)
    if model is None:
        if len(state.models) >= state.settings.max_models and (old := state.model_to_forget()) is not None:
            state.forget_model(old)
        model = state.models[hello.model] = Model(hello.model, hello.shards, state.settings.max_versions)
        model.is_listening, model.keeps_established = state.is_untold, state.settings.keep_established
    if not model.replicas:
        model.layout_sets, model.has_boxes = {}, False
        if not report.session:  # a new job: what those before it wanted kept is over with them
            model.retain = 0
    model.shards = hello.shards
    replica = model.replicas.setdefault(hello.replica, Replica(hello.replica, hello.shards))
    member = Member(hello, sender, state.next_number(), state.now + state.settings.lease_s)
    member.note_heard(state.now, state.settings)
    member.has_lived_before = report.session > 0
    replica.join(hello.shard, member.worker, is_in_call=report.call is not None)
    state.members.add(member)
    state.refused.pop(member.worker, None)
    state.note_size()
    await_session(model, member, report)
    state.journal.append(Joined(*member.worker, member.session, report.session))
    _take_place(state, model, member)
    if hello.retain > state.settings.max_retain:
        text = f"{hello.worker} asks to keep {hello.retain} versions, and may ask for {state.settings.max_retain}"
        state.events.append(events.Warned(model=hello.model, what=f"{text}: TENSORHUB_MAX_RETAIN of this server"))
    model.retain = max(model.retain, state.settings.retain_of(hello.retain, is_reliable=hello.reliable))
    state.counters["sessions"] += 1
    joined = events.Joined(
        **name_of(member.worker),
        shards=hello.shards,
        host=hello.host,
        site=hello.site,
        reliable=hello.reliable,
        is_back=member.has_lived_before,
    )
    state.events.append(joined)
    return member


ENDS = {  # how a session may end → what its siblings hear of it
    "left": "left",
    "lease over": "died (its lease ended)",
    "connection closed": "died (its lease ended)",
    "replaced": "gave way to a worker that had lived before",
}


def end(state: State, member: Member, how: str) -> None:
    """It has left, or died, or gave way: one of `ENDS`."""
    model, replica = state.place(member)
    model.has_died = how != "left"
    if model.has_died:
        silent_s = max(0.0, state.now - member.lease_end + state.settings.lease_s)
        state.events.append(events.Died(**name_of(member.worker), seen=how, silent_s=silent_s))
    else:
        state.events.append(events.Left(**name_of(member.worker)))
    had = concerned(state, member)
    if member.is_connected:
        state.spent[member.sender] = None
    close_reads(state, member, None)
    model.move(member.worker, member.content, NOTHING)
    awaited_since = state.now if _is_of_a_former_job(state, replica, member) else None
    replica.lose(member.shard, ENDS[how], is_awaited_since=awaited_since)
    model.forget(member.worker)
    _leave_place(state, model, member)
    del state.members[member.worker]
    state.note_size()
    _await_no_more(state, model, member)
    state.journal.append(Over(*member.worker, member.session))
    state.forget(member.worker)
    if replica.is_empty:
        apply.release(state, model, replica.call, replica)
        del model.replicas[replica.name]
        if model.writer is not None and model.writer.replica == replica.name:
            model.writer = None
    if not model.replicas:
        state.empty_models[model.name] = state.now
        state.forget_at = min(state.forget_at, state.now + state.settings.lease_s)
    if model.closing or len(model.sites) > 1:
        state.mark_everyone_dirty(model)
    else:
        state.mark_replica_dirty(replica)
        state.mark_concerned_dirty(model, had)
        state.mark_readers_dirty(member.worker)
        state.mark_waiting_dirty(model, ARRIVALS)
    apply.note_changed_versions(state)  # what is lost with it is told at once, though no worker may be dirty
    model.has_died &= model.is_listening


def forget_models(state: State) -> None:
    """Models that no worker was of for a lease are forgotten.

    One that has had a version is not: its numbers are used once only (G3), as long as this server lives (G9).
    """
    named = [name for name, model in state.models.items() if model.newest is not None or model.began]
    unnamed = {name: since for name, since in state.empty_models.items() if name not in named}
    state.forget_at = inf
    for name, since in unnamed.items():
        if since + state.settings.lease_s > state.now:
            state.forget_at = since + state.settings.lease_s
            break
        state.forget_model(name)


def _take_place(state: State, model: Model, member: Member) -> None:
    """It is where its hello says, and counts for retention if it says so."""
    hello = member.hello
    model.take_place(member.worker, hello.site, hello.host)
    if hello.reliable:
        apply.note_company(state, model, member.layout_key)
        model.reliable.setdefault(member.layout_key, {})[member.worker] = None


def _leave_place(state: State, model: Model, member: Member) -> None:
    if model.reliable.get(member.layout_key, {}).pop(member.worker, 0) is None:
        apply.note_company(state, model, member.layout_key)
    model.leave_place(member.worker, member.hello.site, member.hello.host)


def _is_of_a_former_job(state: State, replica: Replica, member: Member) -> bool:
    """It has made calls, and no shard in the present call ever has: it belongs to the job before.

    A job that is started again at once meets what is left of its former self, until the leases of that end.
    """
    call = replica.call
    if call is None or call.is_over or member.shard in call.arrived or not member.report.ended:
        return False
    others = [state.members.get(replica.members[shard]) for shard in call.arrived if shard in replica.members]
    return bool(others) and all(other is not None and not other.report.ended for other in others)


def connect(state: State, hello: Hello, sender: str) -> None:
    """A worker has said hello over that connection."""
    state.hellos[sender], state.speakers[sender] = hello, hello.worker
    member = state.members.get(hello.worker)
    if member is not None:
        was_reached, member.is_connected = member.is_connected, True
        if member.sender != sender and member.sender in state.hellos:
            state.spent[member.sender] = None  # late messages of the former connection begin no session
        model = state.models[hello.model]
        _leave_place(state, model, member)
        member.sender, member.hello = sender, hello
        _take_place(state, model, member)  # one that lies may be elsewhere now, or count where it did not
        if not was_reached:
            _note_reach(state, member)


def disconnect(state: State, sender: str) -> None:
    """Called when the connection has ended."""
    state.spent.pop(sender, None)
    hello = state.hellos.pop(sender, None)
    member = state.members.get(state.speakers.pop(sender)) if hello is not None else None
    if member is not None and member.sender == sender:
        member.is_connected = False
        _note_reach(state, member)


def _note_reach(state: State, member: Member) -> None:
    """Whether it can be reached is not what it was: a source need not wait for it any more, or has to."""
    model, replica = state.place(member)
    state.mark_replica_dirty(replica)
    state.mark_concerned_dirty(model, concerned(state, member))
    state.mark_readers_dirty(member.worker)
    state.mark_waiting_dirty(model, ARRIVALS)
    for read in state.reads.of(member.worker):
        for source in read.sources:
            state.mark_dirty(source.worker)


def concerned(state: State, member: Member) -> list[Place]:
    """The versions, with their layout keys, for which the member matters to other workers."""
    found = dict.fromkeys(member.content.places)
    found.update(((read.version, read.layout_key), None) for read in state.reads.of(member.worker))
    _, replica = state.place(member)
    if replica.call is not None and replica.call.version is not None:
        found[replica.call.version, member.layout_key] = None
    return list(found)
