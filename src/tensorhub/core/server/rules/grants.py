"""Who may read what now: gives a worker its read, takes it back, and looks for another source where its own leaves.

`decide_read` yields one decision after another. Each is carried out before it goes on, so the next follows from it.
"""

from collections.abc import Generator, Iterator

from ...messages import Withdrawing
from ...names import Version
from .. import facts
from ..catalog import Model
from ..decisions import Decision, Give, LookAgain
from ..membership import Member
from ..open_reads import OpenRead
from ..records import VersionRecord
from ..state import State
from . import across, crossing, moving, progress, retention, sharing, sources, witness
from .selection import Candidate, choose_source
from .wanted import Wanted


def decide_read(state: State, model: Model, member: Member, wanted: Wanted | None) -> Iterator[Decision]:
    """Give this worker the read that it should have now, or none. It is here.

    One that has gone keeps what it has until it is back or its lease ends: it would not hear of another, and a source
    would wait in vain.
    """
    current = state.reads.current.get(member.worker)
    record = model.versions.get(wanted.version) if wanted is not None else None
    if wanted is None or record is None:
        if current is not None:
            yield from across.take_back(state, member)
        return
    is_wanted = current is not None and (current.version, current.grant.to_host) == wanted
    if current is not None and is_wanted and current.part is not None:
        yield from across.keep_up(state, model, record, member, wanted)
        if across.is_short(state, member) and _is_had_in_its_line(state, model, record, member):
            yield from _begin_anew(state, model, record, member, wanted)
        return
    if (
        current is not None
        and is_wanted
        and facts.serves(state, current.source, current.version, current.grant.from_host)
    ):
        may_come_back = state.is_recovering and current.source not in state.members
        is_fixed = current.shares or may_come_back
        if not is_fixed and (yield from _moves(state, model, record, member, current)):
            return
        source = state.members.get(current.source)
        if source is None or not _is_to_be_left(state, source, current):
            return
        waits_for_us = not current.grant.from_host and retention.waits_for_its_readers(state, source, current.version)
        # it has a part and does nothing for the rest: where that is all read, any that has the whole is better
        is_paused = not facts.is_leaving(source, current.version, current.grant.from_host)
        is_stuck = is_paused and progress.is_held_up(state, current)
        may_leave, may_doubt = waits_for_us, not facts.is_here(state, source)
        others = [
            candidate
            for candidate in sources.candidates(state, model, record, member)
            if (is_stuck and candidate.is_full)
            or ((may_leave or not candidate.is_withdrawing) and (may_doubt or not candidate.is_doubtful))
        ]
        is_cut = _is_impatient(source, current.version) and not current.grant.from_host
        if choose_source(others, now=state.now) is None and not is_cut:
            if is_stuck or source.turns_lost > member.turns_lost:  # it was to read for both, and does not
                yield from across.instead_of(state, model, record, member, current, is_in_need=is_stuck)
            return
    yield from _begin_anew(state, model, record, member, wanted)


def _begin_anew(
    state: State, model: Model, record: VersionRecord, member: Member, wanted: Wanted
) -> Iterator[Decision]:
    """Instead of what it reads it is given the best that there is."""
    yield from across.take_back(state, member)
    if wanted.to_host and any(read.is_void for read in state.reads.of(member.worker)):
        return  # in its own time: were it stopped, each new version would leave one more source waiting for it
    yield from _grant(state, model, record, member, to_host=wanted.to_host)


def _is_had_in_its_line(state: State, model: Model, record: VersionRecord, member: Member) -> bool:
    """Somebody of its own line has all of the version, and lives.

    Better one that was too slow for it, or that wants to leave the version, than none.
    """
    return member.line in record.roots and any(
        candidate.is_full
        and candidate.avoided_until <= state.now
        and not facts.is_doubtful(state, state.known(candidate.worker))
        for candidate in sources.candidates(state, model, record, member)
    )


def _moves(
    state: State, model: Model, record: VersionRecord, member: Member, current: OpenRead
) -> Generator[Decision, None, bool]:
    """It is given a better source.

    Also if its own has no session any more: that may well go on serving. But nothing may come from it for ever, and the
    reader need not find out: one that was filling still says that it has no more yet, or its memory alone is read.
    """
    if (yield from moving.leave_slow(state, model, record, member, current)):
        return True
    is_in_vain = progress.is_in_vain(state, current)
    is_tried = current.pace.is_stuck or is_in_vain
    if is_tried and (yield from across.instead_of(state, model, record, member, current, is_in_need=is_in_vain)):
        return True
    return current.source in state.members and (yield from moving.to_idle(state, model, record, member, current))


def is_looking(state: State, member: Member, wanted: Wanted) -> bool:
    """It has no source for what it should be reading, or one that it is to leave as soon as there is another."""
    current = state.reads.current.get(member.worker)
    if current is None or (current.version, current.grant.to_host) != wanted:
        return True
    if current.part is not None:
        return across.is_looking(state, member, wanted)
    source = state.members.get(current.source)
    if source is None or not facts.serves(state, current.source, current.version, current.grant.from_host):
        return True
    return _is_to_be_left(state, source, current)


def _is_to_be_left(state: State, source: Member, read: OpenRead) -> bool:
    """Its source wants to leave what is read there; or it is paused.

    A source is paused that has only a part of the version, and nothing to read the rest from: it has something else to
    do.
    """
    from_host = read.grant.from_host
    if facts.is_undecided_there(state, source, read.version, from_host):
        return False  # as far as is known it serves
    if facts.is_leaving(source, read.version, from_host):
        return True
    if facts.is_full(source, read.version, from_host):
        return False
    its_own = state.reads.current.get(read.source)
    if its_own is None or its_own.version != read.version or its_own.grant.to_host != from_host:
        return True
    return not from_host and retention.waits_for_its_readers(state, source, read.version)


def _is_impatient(source: Member, version: Version) -> bool:
    buffer = source.content.buffer
    return isinstance(buffer, Withdrawing) and buffer.version == version and buffer.impatient


def _grant(state: State, model: Model, record: VersionRecord, member: Member, *, to_host: bool) -> Iterator[Decision]:
    if (yield from _read_across(state, model, record, member, to_host=to_host)):
        return
    if member.line not in record.roots:  # only such as are filling have reported: nobody could say what is good
        if crossing.can_cross(record, member.line):
            yield from across.see_that_it_begins(state, model, record, member)
        return
    if to_host and (yield from _share(state, model, record, member)):
        return
    possible = sources.to_choose_from(state, model, record, member)
    found = witness.allowed(state, model, member, possible)
    choice = choose_source(found, now=state.now)
    if choice is None:
        best = choose_source(possible, now=state.now)
        if found:
            yield LookAgain(member, min(candidate.avoided_until for candidate in found))
        elif best is not None:
            yield from witness.wait_for(state, model, member, possible, best[0])
        return
    source, reason = choice
    yield Give(member, record, source.worker, reason, source.from_host, to_host)


def _read_across(
    state: State, model: Model, record: VersionRecord, member: Member, *, to_host: bool
) -> Generator[Decision, None, bool]:
    if not crossing.can_cross(record, member.line) or _has_sound_source(state, model, record, member):
        return False
    return (yield from across.set_out(state, model, record, member, to_host=to_host))


def _has_sound_source(state: State, model: Model, record: VersionRecord, member: Member) -> bool:
    """Somebody of its own line has the version, or is getting it, and nothing is to be said against him."""
    return any(
        not candidate.is_doubtful
        and not candidate.is_withdrawing
        and candidate.avoided_until <= state.now
        and not _waits_to_begin(state, record, candidate)
        for candidate in sources.to_choose_from(state, model, record, member)
    )


def _waits_to_begin(state: State, record: VersionRecord, source: Candidate) -> bool:
    """It has nothing of the version yet, and cannot begin to read it."""
    read = state.reads.current.get(source.worker)
    return read is not None and read.version == record.version and progress.cannot_begin(state, read)


def _share(state: State, model: Model, record: VersionRecord, member: Member) -> Generator[Decision, None, bool]:
    """Let it map the host copy of another worker of its host, or wait for one that is being fetched."""
    found = witness.allowed(state, model, member, sharing.copies_to_share(state, model, record, member))
    choice = choose_source(found, now=state.now)
    if choice is not None:
        source, reason = choice
        yield Give(member, record, source.worker, f"{reason}; shared", source.from_host, to_host=True, shares=True)
        return True
    until = sharing.awaited_until(state, model, record, member)
    if until is not None:
        yield LookAgain(member, until)
    return until is not None
