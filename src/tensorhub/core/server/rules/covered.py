"""Where a version is, whatever the cut: whether somebody has all of it, and whether a line of it is had elsewhere."""

from collections.abc import Callable

from .. import facts
from ..catalog import Model
from ..lines import Line
from ..membership import Member
from ..records import VersionRecord
from ..state import State
from . import crossing


def is_whole(state: State, model: Model, record: VersionRecord) -> bool:
    """Somebody is known to have each of its shards. Otherwise it seems lost, though who has it may only be cut off."""
    return any(all(_is_line_whole(state, record, line) for line in cut) for cut in model.known_cuts())


def _is_line_whole(state: State, record: VersionRecord, line: Line) -> bool:
    return any(facts.has_whole(state, worker, record.version) for worker in record.holders.get(line, {}))


def by_another_cut(
    state: State, model: Model, record: VersionRecord, line: Line, counts: Callable[[Member], bool]
) -> bool:
    """What is in that line can be had out of another cut, of which somebody who counts has each line."""
    if not line.is_boxed:
        return False
    for cut in crossing.cuts_to_read(model, record, line):
        if all(any(counts(state.known(worker)) for worker in record.whole[each]) for each in cut):
            return True
    return False


def has_company(model: Model, member: Member) -> bool:
    """Somebody else whom one relies on could have the version: one of its line, or all of another cut."""
    if len(model.reliable.get(member.line, {})) > 1:
        return True
    if not member.line.is_boxed:
        return False
    others = [cut for cut in model.cuts if member.line not in cut and all(line.is_boxed for line in cut)]
    return any(all(any(w not in model.closing for w in model.reliable.get(line, {})) for line in cut) for cut in others)


def is_relied_on(member: Member, record: VersionRecord) -> bool:
    """It has the version, and gives it up only when it is told that it may."""
    return member.hello.reliable and member.keeps(record.version)


def is_kept_by_spot(state: State, record: VersionRecord, line: Line) -> bool:
    """A worker that nobody relies on has the version whole and does not leave it: better than nobody."""
    for worker in record.whole.get(line, {}):
        member = state.members.get(worker)
        if member is None or not member.is_connected or member.report.closing or member.hello.reliable:
            continue
        if member.stays(record.version) or member.has_whole_copy(record.version):
            return True
    return False
