"""What a report tells of a read across: its parts, which of them have brought their share, and what it will be.

Called when a report is taken in, before what it says is over is closed.
"""

from ..messages import Across, Grant
from ..names import Digest, Shard, is_tiled
from .lines import Line
from .membership import Avoided, Member
from .open_reads import OpenRead
from .rules import progress
from .state import State
from .watches import sources_of


def take_across(state: State, member: Member, across: Across | None) -> None:
    """The worker reads that across; None: nothing."""
    crossing = member.crossing
    is_of_plan = (
        crossing is not None
        and across is not None
        and (crossing.version, crossing.to_host) == (across.version, across.to_host)
    )
    if crossing is not None and not is_of_plan:
        crossing.done.clear()  # whatever it reads next across needs every line of the cut anew
    if across is None:
        return
    if state.is_recovering:
        _adopt(state, member, across)
    mine = {read.ticket: read for read in state.reads.of(member.worker)}
    for ticket in across.brought:
        read = mine.get(ticket)
        if read is not None and read.part is not None and crossing is not None and is_of_plan:
            crossing.done[read.part] = None
    for part in across.parts:
        read = mine.get(part.ticket)
        if read is None:
            continue
        if across.is_opened:
            read.pace.rest(state.now)  # it waits for the buffer
        else:
            arrived = max(0, part.arrived_bytes)
            window_s = progress.window_s(state)
            read.pace.note(state.now, arrived_bytes=arrived, done=0, chunk_bytes=0, over_s=window_s)
    if across.root:
        _bind(state, member, across)


def _adopt(state: State, member: Member, across: Across) -> None:
    """A server before this one has granted it. Out of which cut is not known: the parts are given anew in time."""
    current = state.reads.current.get(member.worker)
    if current is not None and current.part is None:
        return
    known = [read.ticket for read in state.reads.of(member.worker)]
    for number, part in enumerate(across.parts):
        if part.ticket in known or part.ticket <= member.report.closed or not state.numbers.is_ours(part.ticket):
            continue
        text = "granted before a restart"
        grant = Grant(
            *(part.ticket, across.version, Digest(""), part.source, (), text),
            from_host=part.from_host,
            to_host=across.to_host,
        )
        is_void = part.source in state.reads.readers_behind(member.worker, across.version)
        unknown = Line(0, Shard(number))
        state.open_read(OpenRead(grant, member.worker, member.line, is_void, part=unknown))


def _bind(state: State, member: Member, across: Across) -> None:
    """The first of a line to read across says what the version is in that line. All others have to say the same."""
    model, line = state.models[member.hello.model], member.line
    record = model.record(across.version)
    known = record.roots.get(line)
    if known == across.root:
        return
    if known is None and is_tiled(across.root) and line.is_boxed:
        record.roots[line], record.layouts[line] = across.root, member.report.layout
        if member.crossing is not None and all(each in record.proved for each in member.crossing.cut):
            record.proved[line] = None
        state.mark_waiting_dirty(model, sources_of(across.version, line))
        return
    state.counters["conflicting_holders"] += 1
    for part in across.parts:
        avoided = member.avoided.setdefault(part.source, Avoided(0.0, 0))
        avoided.until = max(avoided.until, state.now + state.settings.leave_s)
