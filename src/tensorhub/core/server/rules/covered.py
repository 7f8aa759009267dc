"""Where a version is, whatever the cut: whether somebody has all of it, and whether a line of it is had elsewhere."""

from ..catalog import Model, VersionRecord
from ..lines import Line
from ..state import State


def is_whole(state: State, model: Model, record: VersionRecord) -> bool:
    """Somebody is known to have each of its shards. Otherwise it seems lost, though who has it may only be cut off."""
    return any(all(_is_line_whole(state, record, line) for line in cut) for cut in model.known_cuts())


def _is_line_whole(state: State, record: VersionRecord, line: Line) -> bool:
    holders = (state.members.get(worker) for worker in record.holders.get(line, {}))
    return any(m is not None and (m.holds(record.version) or m.has_whole_copy(record.version)) for m in holders)
