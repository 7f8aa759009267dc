"""Reports from which nothing follows: who sends one is told again what it was told last.

Most reports are such:
- A worker lives and does nothing.
- Its read goes on, and its source is good enough.
- Its caller has got the answer that the server gave.

It must never take a report so while there is something new that its worker could hear of with it. The judge of missed
wake-ups holds it to that.
"""

from msgspec.structs import replace

from ..messages import Filling, Report
from . import apply, facts, intake, judging, rollcall
from .catalog import Model
from .content import Content
from .membership import Member, Told
from .rules import calls, grants, witness
from .rules.wanted import Wanted
from .state import State


def take(state: State, report: Report, sender: str, arrived: float) -> Member | None:
    """Take in such a report, which came at `arrived`, in time awake. Returns who sent it; None: it is not such a one.

    Somebody may have to be decided for afterwards, above all the reporter if its source is not good enough any more.
    """
    member = _known(state, report, sender)
    if member is None or member.told is None:
        return None
    model, told = state.models[member.hello.model], member.told
    if report.call != member.report.call:
        if not _has_heard_the_end(state, model, member, report, told):
            return None
        told = replace(told, answer=None, receipts={})
    elif isinstance(report.buffer, Filling):
        if not _goes_on(state, model, member, report, told):
            return None
    elif not _is_still(state, model, member, report):
        return None
    _take_in(state, model, member, report, arrived)
    member.told = replace(told, witness=witness.is_asked(model, member)) if told.witness else told
    return member


def _known(state: State, report: Report, sender: str) -> Member | None:
    """The member, if it could be told again what it was told last: it is here, and nobody waits for a word of it."""
    hello = state.hellos.get(sender)
    member = state.members.get(state.speakers[sender]) if hello is not None else None
    if member is None or hello is None or state.is_recovering or state.dirty:
        return None
    if member.hello.life != hello.life or report.number <= member.report.number or report.leaving:
        return None
    if report.session != member.session or member.is_doubted or member.awaited_by:
        return None
    model = state.models[hello.model]
    if calls.is_asked(model.replicas[hello.replica], member):
        return None
    is_witnessed = member.worker in model.roll.witnessed
    return member if is_witnessed and facts.is_here(state, member) else None


def _take_in(state: State, model: Model, member: Member, report: Report, arrived: float) -> None:
    """All that follows from it, for its sender alone."""
    intake.count(state, report)
    member.note_heard(max(state.now, arrived), state.settings)
    member.report = report
    intake.note_call(member)
    read = state.reads.current.get(member.worker)
    if read is not None:
        former = member.content
        member.content = Content(report.buffer, former.copies, member.line)
        intake.note_fed(state, member, former)
        intake.note_pace(state, member)
        apply.carry_out(state, grants.decide_read(state, model, member, Wanted(read.version, False)))
    rollcall.hear(state, model, member)


# --- which reports they are -------------------------------------------------------------------------------------------


def _is_still(state: State, model: Model, member: Member, report: Report) -> bool:
    """It waits for nothing, and nothing has happened to anybody since it was decided for."""
    if member.settled_at != state.happened or model.watches.is_waiting(member.worker):
        return False
    return not state.reads.of(member.worker) and is_same(report, member.report)


def _goes_on(state: State, model: Model, member: Member, report: Report, told: Told) -> bool:
    """Its buffer is being filled by the read that it was granted, and it waits for nothing but the end of that."""
    read, before, answer = state.reads.current.get(member.worker), member.report, told.answer
    if read is None or read.grant is not told.grant or read.grant.to_host or not is_progress(report, before):
        return False
    for reading in (report.reading, before.reading):
        if reading is None or reading.ticket != read.ticket or reading.is_opened:
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
    has_heard = told.answer is not None and told.answer.finished and _shows_what_it_was_told(report, before, told)
    is_idle = not model.watches.is_waiting(member.worker) and not state.reads.of(member.worker)
    is_all = report.buffer == before.buffer and report.reading == before.reading and _is_same_else(report, before)
    return has_heard and is_idle and is_all


def _shows_what_it_was_told(report: Report, before: Report, told: Told) -> bool:
    """Each receipt in it is one that the worker has shown before, or that it was given last."""
    known = {**before.receipts, **told.receipts}
    return all(known.get(version) == receipt for version, receipt in report.receipts.items())


# --- what a report tells that the one before did not ------------------------------------------------------------------


def is_same(report: Report, before: Report) -> bool:
    """Nothing new but that its worker lives, and what it has heard. Of one that has no read open."""
    return report.buffer == before.buffer and report.reading == before.reading and _is_same_beside(report, before)


def is_progress(report: Report, before: Report) -> bool:
    """Nothing new but that the fill of its buffer has gone on."""
    now, then = report.buffer, before.buffer
    if not (isinstance(now, Filling) and isinstance(then, Filling) and now.version == then.version):
        return False
    return now.done >= then.done and report.closed == before.closed and _is_same_beside(report, before)


def _is_same_beside(report: Report, before: Report) -> bool:
    """The same call and receipts, and everything else but its buffer and its read."""
    return (
        report.call == before.call
        and (report.ended, report.finished, report.receipts) == (before.ended, before.finished, before.receipts)
        and _is_same_else(report, before)
    )


def _is_same_else(report: Report, before: Report) -> bool:
    return (
        report.session == before.session
        and (report.prefetch, report.stops) == (before.prefetch, before.stops)
        and (report.claim, report.claimed_in) == (before.claim, before.claimed_in)
        and (report.across, report.over, report.missed) == (before.across, before.over, before.missed)
        and (report.failures, report.copy_error, report.copies_left)
        == (before.failures, before.copy_error, before.copies_left)
        and report.size_bytes == before.size_bytes
        and not report.leaving
        and judging.content_beside(report) == judging.content_beside(before)
    )
