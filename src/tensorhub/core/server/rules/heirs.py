"""Who has to fetch a copy of what only such have as want to leave for good.

Rules:
- The heir is another reliable worker of the same line that can begin at once. If need be it drops a copy of what its
  buffer holds too. Where no reliable one can, one that nobody relies on is the heir, for a while: it is better than
  nobody.
- Where nobody of that line can, the heirs are workers of another cut, one for each of its lines that nobody keeps: they
  read across. All of them, or none: a part of a cut is of no use.
- Only where nobody can begin at once somebody is the heir who has tried in vain; or else who will have room, as its
  copy of a version that nobody needs goes when it is read no more.
- Where there are none, who leaves does not wait.
"""

from collections.abc import Iterable, Iterator
from math import inf
from typing import NamedTuple

from ...messages import Filling, HostCopy
from ...names import Version, WorkerId
from .. import facts
from ..catalog import Model
from ..lines import Cut, Line
from ..membership import Member
from ..records import VersionRecord
from ..state import State
from . import covered, crossing, election

MOST_LOOKED_AT = 256  # workers of one line: where none of so many has room, hardly another one has
MOST_COMPARED = 16  # of those that can


class Heirs(NamedTuple):
    """Who they are; and whether they were looked for in other cuts, where they are the same for all lines of one."""

    workers: tuple[WorkerId, ...] = ()
    is_across: bool = False


NOBODY = Heirs()
AT_ONCE, IN_VAIN, WITH_ROOM = range(3)  # when somebody can begin: he tried and failed; he waits for room


class Heir(NamedTuple):
    """Who could be one, and when."""

    member: Member
    when: int


def is_one(state: State, model: Model, record: VersionRecord, member: Member) -> bool:
    """It has to fetch the version, for somebody who leaves."""
    if member.worker in _heirs(state, model, record, member.line).workers:
        return True
    if not crossing.can_cross(record, member.line):
        return False
    seen: dict[Line, None] = {member.line: None}
    for worker in model.closing:
        leaver = state.members.get(worker)
        if leaver is None or leaver.line not in record.whole or leaver.line in seen:
            continue
        found = _heirs(state, model, record, leaver.line)
        if member.worker in found.workers:
            return True
        cuts = _cuts_of(model, leaver.line) if found.is_across else []
        seen = {**seen, leaver.line: None, **{line: None for cut in cuts for line in cut}}
    return False


def are_there(state: State, model: Model, record: VersionRecord, leaver: Member) -> bool:
    """Such as stay are about to have the version. For those that nobody relies on the leaver waits a while only."""
    if _heirs(state, model, record, leaver.line).workers:
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


def _heirs(state: State, model: Model, record: VersionRecord, line: Line) -> Heirs:
    """Of what is in that line: one of it, or several of another cut; none where it is kept, or nobody can."""
    since = _left_since(state, model, record, line)
    if since is None or covered.by_another_cut(state, model, record, line, lambda m: covered.is_relied_on(m, record)):
        return NOBODY
    heir = _heir_of(state, model, record, line, since)
    its_own = Heirs((heir.member.worker,)) if heir is not None else NOBODY
    if heir is not None and heir.when == AT_ONCE:
        return its_own
    if covered.is_kept_by_spot(state, record, line) or not crossing.is_readable(record, line):
        return its_own
    others = [_left_since(state, model, record, each) for cut in _cuts_of(model, line) for each in cut]
    first = min([since, *[each for each in others if each is not None]])
    best: tuple[tuple[int, ...], list[Heir]] | None = None
    for number, cut in enumerate(model.cuts):
        found = _heirs_in(state, model, record, cut, first) if line not in cut else None
        if found:
            begun = sum(_has_copy(heir.member, record) for heir in found)
            is_spot = any(not heir.member.hello.reliable for heir in found)
            rank = (max(heir.when for heir in found), is_spot, -begun, len(found), number)
            best = (rank, found) if best is None or rank < best[0] else best
    if best is None or (heir is not None and heir.when <= best[0][0]):
        return its_own
    return Heirs(tuple([heir.member.worker for heir in best[1]]), is_across=True)


def _cuts_of(model: Model, line: Line) -> list[Cut]:
    return [cut for cut in model.cuts if line in cut]


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


def _heirs_in(state: State, model: Model, record: VersionRecord, cut: Cut, since: float) -> list[Heir] | None:
    """One for each line of that cut that nobody keeps; None where a line has nobody who could."""
    found = []
    for line in cut:
        if any(covered.is_relied_on(state.known(worker), record) for worker in record.whole.get(line, {})):
            continue
        if not any(crossing.cuts_to_read(model, record, line)):
            return None  # it has too many shards to be read at once
        heir = _heir_of(state, model, record, line, since)
        if heir is not None:
            found.append(heir)
        elif not covered.is_kept_by_spot(state, record, line):
            return None
    return found


def _heir_of(state: State, model: Model, record: VersionRecord, line: Line, since: float) -> Heir | None:
    """One of that line; None where nobody can, or where such as nobody relies on would be nothing new, or too late."""
    reliable = _living(state, model.reliable.get(line, {}))
    heir = _best_of(state, model, record, line, reliable, is_reliable=True)
    if heir is not None and heir.when == AT_ONCE:
        return heir
    is_too_late = heir is None and state.now >= since + state.settings.spot_heir_s
    if is_too_late or covered.is_kept_by_spot(state, record, line):
        return heir
    spot = _best_of(state, model, record, line, facts.members_of(state, model, line), is_reliable=False)
    return spot if heir is None or (spot is not None and spot.when < heir.when) else heir


def _best_of(
    state: State, model: Model, record: VersionRecord, line: Line, others: Iterator[Member], *, is_reliable: bool
) -> Heir | None:
    """Of those that have a copy of it already, though not whole, and of the first others: the best that can."""
    able: list[Heir] = []
    for members, has_begun in ((_living(state, record.holders.get(line, {})), True), (others, False)):
        seen = at_once = 0
        for member in members:
            is_meant = (member.hello.reliable or not is_reliable) and (not has_begun or _has_copy(member, record))
            if not is_meant or not _is_staying(member, record):
                continue
            when = _when(state, model, member, record)
            if when is not None:
                able.append(Heir(member, when))
                at_once += when == AT_ONCE
            seen += 1
            if seen == MOST_LOOKED_AT or at_once == MOST_COMPARED:
                break
        if at_once:
            break
    return min(able, key=lambda heir: _rank(heir, record), default=None)


def _living(state: State, workers: Iterable[WorkerId]) -> Iterator[Member]:
    for worker in workers:
        member = state.members.get(worker)
        if member is not None:
            yield member


def _has_copy(member: Member, record: VersionRecord) -> bool:
    return member.copy(record.version) is not None


def _rank(heir: Heir, record: VersionRecord) -> tuple[object, ...]:
    """Who has begun, or has room, before one that has to make it; and a reliable worker before others."""
    member = heir.member
    makes_room = not _has_copy(member, record) and not member.report.copies_left
    return heir.when, member.turns_lost, not member.hello.reliable, makes_room, member.worker


def _when(state: State, model: Model, member: Member, record: VersionRecord) -> int | None:
    """When it can begin to fetch the version; None: never, as far as is known."""
    if not crossing.may_fit(model, record, member):
        return None
    filled = facts.wanted_version(state.place(member)[1], member)
    copies = member.content.copies
    if member.report.copies_left or any(_gives_way(state, member, copy, record, filled) for copy in copies):
        return IN_VAIN if member.turns_lost else AT_ONCE
    is_making_room = any(
        copy.leaving
        or copy.number in member.releasing
        or member.stays(copy.version)
        or copy.version == filled
        or _is_needless(state, model, member, copy)
        for copy in copies
    )
    return WITH_ROOM if is_making_room else None


def _gives_way(state: State, member: Member, copy: HostCopy, record: VersionRecord, filled: Version | None) -> bool:
    """It is one of the version itself, or goes at once: nobody reads it, and its buffer has the same, or soon will."""
    if copy.version == record.version:
        return True
    if any(not read.is_void for read in state.reads.from_copy(member.worker, copy.version)):
        return False
    is_going = copy.leaving or copy.number in member.releasing or member.stays(copy.version)
    return is_going or (copy.version == filled and member.fills_itself(copy.version))


def _is_needless(state: State, model: Model, member: Member, copy: HostCopy) -> bool:
    """Its worker does not want it, and it need not be kept, or others do that: it goes once nobody reads it."""
    version = copy.version
    if version in model.glance().outliving:
        return False
    if version in model.retained() and not any(
        other.hello.reliable and not other.report.closing and other is not member
        for other in map(state.known, model.staying.at(version, member.line))
    ):
        return False
    return not election.is_wanted_ahead(state, model, member, version)


def _is_staying(member: Member, record: VersionRecord) -> bool:
    """It is there, and does not leave. Who has begun may be away for a moment: its lease is the limit."""
    return not member.report.closing and (member.is_connected or _has_copy(member, record))
