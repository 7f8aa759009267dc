"""Which line each worker is of, and what follows when that changes: called when a report names another layout."""

from .catalog import Model
from .lines import Line, plain_cut
from .membership import Member
from .state import State


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
    members = [state.members.get(replica.members[shard]) for shard in sorted(replica.members)]
    lines = tuple(each.line for each in members if each is not None and each.report.layout)
    if len(lines) == replica.shards:
        model.note_cut(lines)


def note_company(state: State, model: Model, line: Line) -> None:
    """The only reliable worker of a line will not be, or is now: what it has to copy ahead may be something else."""
    reliable = model.reliable.get(line, {})
    member = state.members.get(next(iter(reliable))) if len(reliable) == 1 else None
    if member is not None and (member.content.copies or member.report.copies_left):
        state.mark_dirty(member.worker)
