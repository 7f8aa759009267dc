"""Who has to fetch a copy of what only such have as want to leave for good.

Rules:
- The heir is another reliable worker of the same line. If need be it drops a copy of what its buffer holds too. Where
  no reliable one can be, one that nobody relies on is the heir, for a while: it is better than nobody.
- Where nobody of that line can, the heirs are workers of another cut, one for each of its lines that nobody keeps: they
  read across. All of them, or none: a part of a cut is of no use.
- Where there are none, who leaves does not wait.
"""

from math import inf

from ...messages import Filling
from ...names import WorkerId
from .. import facts
from ..catalog import Model, VersionRecord
from ..lines import Cut, Line
from ..membership import Member
from ..state import State
from . import covered, crossing


def is_one(state: State, model: Model, record: VersionRecord, member: Member) -> bool:
    """It has to fetch the version, for somebody who leaves."""
    lines = [member.line]
    if crossing.can_cross(record, member.line):
        leavers = [state.members.get(worker) for worker in model.closing]
        lines += [leaver.line for leaver in leavers if leaver is not None and leaver.line in record.whole]
    return any(member.worker in _heirs(state, model, record, line) for line in dict.fromkeys(lines))


def are_there(state: State, model: Model, record: VersionRecord, leaver: Member) -> bool:
    """Such as stay are about to have the version. For those that nobody relies on the leaver waits a while only."""
    if _heirs(state, model, record, leaver.line):
        return True
    for worker in record.holders.get(leaver.line, {}):
        member = state.members.get(worker)
        if member is None or not member.is_connected or member.report.closing:
            continue
        buffer = member.content.buffer
        is_filling = isinstance(buffer, Filling) and buffer.version == record.version
        is_soon_enough = state.now < leaver.closing_since + state.settings.spot_heir_s
        if is_filling and (member.hello.reliable or is_soon_enough):
            return True
    return False


def _heirs(state: State, model: Model, record: VersionRecord, line: Line) -> tuple[WorkerId, ...]:
    """Of what is in that line: one of it, or several of another cut; none where it is kept, or nobody can."""
    since = _left_since(state, model, record, line)
    if since is None or covered.by_another_cut(state, model, record, line, lambda m: covered.is_relied_on(m, record)):
        return ()
    able = [member for member in facts.members_of(state, model, line) if _can_inherit(state, model, member, record)]
    if able:
        heir = _heir_of(state, record, line, able, since)
        return (heir.worker,) if heir is not None else ()
    if covered.is_kept_by_spot(state, record, line) or not crossing.is_readable(record, line):
        return ()
    best: tuple[tuple[object, ...], list[Member]] | None = None
    for number, cut in enumerate(model.cuts):
        found = _heirs_in(state, model, record, cut, since) if line not in cut else None
        if found:
            rank = (any(not heir.hello.reliable for heir in found), len(found), number)
            best = (rank, found) if best is None or rank < best[0] else best
    return tuple([heir.worker for heir in best[1]]) if best is not None else ()


def _left_since(state: State, model: Model, record: VersionRecord, line: Line) -> float | None:
    """When the first of those reliable ones wanted to leave who alone have it whole in that line; None: one stays."""
    if not model.closing:
        return None
    since = inf
    for worker in record.whole.get(line, {}):
        member = state.members.get(worker)
        if member is None or not member.hello.reliable:
            continue
        if member.keeps(record.version):
            return None
        if member.report.closing:
            since = min(since, member.closing_since)
    return since if since < inf else None


def _heirs_in(state: State, model: Model, record: VersionRecord, cut: Cut, since: float) -> list[Member] | None:
    """One for each line of that cut that nobody keeps; None where a line has nobody who could."""
    found = []
    for line in cut:
        if any(covered.is_relied_on(state.known(worker), record) for worker in record.whole.get(line, {})):
            continue
        if not any(crossing.cuts_to_read(model, record, line)):
            return None  # it has too many shards to be read at once
        able = [member for member in facts.members_of(state, model, line) if _can_inherit(state, model, member, record)]
        heir = _heir_of(state, record, line, able, since)
        if heir is not None:
            found.append(heir)
        elif not covered.is_kept_by_spot(state, record, line):
            return None
    return found


def _heir_of(state: State, record: VersionRecord, line: Line, able: list[Member], since: float) -> Member | None:
    """The best of them; None where a copy at such as nobody relies on would be nothing new, or comes too late."""
    is_enough = covered.is_kept_by_spot(state, record, line) or state.now >= since + state.settings.spot_heir_s
    if is_enough and not any(member.hello.reliable for member in able):
        return None
    return min(able, key=lambda m: _rank(m, record)) if able else None


def _rank(member: Member, record: VersionRecord) -> tuple[object, ...]:
    """A reliable worker where there is one; of those who have nothing of it yet, one that has room."""
    has_copy = member.copy(record.version) is not None
    return not member.hello.reliable, not has_copy, not has_copy and not member.report.copies_left, member.worker


def _can_inherit(state: State, model: Model, member: Member, record: VersionRecord) -> bool:
    report = member.report
    filled = facts.wanted_version(state.place(member)[1], member)
    # where a copy of it goes there is room again; and one of what the buffer holds too, or soon will, gives way
    may_have_room = any(
        copy.version == record.version
        or member.stays(copy.version)
        or (copy.version == filled and member.fills_itself(copy.version))
        for copy in member.content.copies
    )
    is_making_room = any(copy.leaving or copy.number in member.releasing for copy in member.content.copies)
    has_room = report.copies_left > 0 or may_have_room or is_making_room
    is_staying = member.is_connected and not report.closing
    return is_staying and has_room and crossing.may_fit(model, record, member)
