"""Which line each worker is of, and what follows when that changes: called when a report names another layout."""

from .catalog import Model
from .groups import Replica
from .lines import Cut, Line, plain_cut
from .membership import Member
from .state import State

MOST_PUBLISHERS = 8  # replicas that publish one version: where more workers are relied on, some are no publishers


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
    if len(reliable) > MOST_PUBLISHERS:
        return
    for version, record in model.versions.items():
        if not record.is_established and all(worker.replica in record.publishers for worker in reliable):
            model.changed[version] = None
