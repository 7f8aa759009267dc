"""Stalls: calls that have stood still for more than two seconds, and what each call waits for.

A call moves on when a shard comes to it, when its version is known, when a chunk or bytes of one arrive, or when a
shard's buffer becomes something else. The server looks at all open calls twice in the time between two reports.
"""

from collections.abc import Iterable
from itertools import islice
from math import inf

from msgspec.structs import replace

from ..protocol.events import Stalled
from ..protocol.messages import Empty, Filling, Holding, Poisoned, Vacated
from ..protocol.names import ModelName, WorkerId
from . import layouts, reads, slow
from . import state as facts
from .groups import GroupCall, Replica
from .members import Member, OpenCall, OpenRead, replicas_of
from .state import State
from .versions import Model

STALL_S = 2.0
LOOKS = 0.5  # of the time between two reports
REPORTS = 2  # a reader says so often that bytes have come: fewer reports show no stall


def note_call(state: State, replica: Replica, model: ModelName) -> None:
    """The replica may have a new call."""
    call = replica.call
    if call is not None and not call.is_over:
        state.open_calls.setdefault((model, replica.name), OpenCall(0, state.now))
        state.stalls_at = min(state.stalls_at, state.now + LOOKS * state.report_s)


def look(state: State) -> None:
    """Tell of each call that stands still, and of each that did and does not any more."""
    for place, known in list(state.open_calls.items()):
        model = state.models.get(place[0])
        replica = model.replicas.get(place[1]) if model is not None else None
        call = replica.call if replica is not None else None
        if model is None or replica is None or call is None or call.is_over:
            _tell_end(state, known)
            del state.open_calls[place]
        else:
            state.open_calls[place] = _looked_at(state, model, replica, call, known)
    state.stalls_at = state.now + LOOKS * state.report_s if state.open_calls else inf


def _looked_at(state: State, model: Model, replica: Replica, call: GroupCall, known: OpenCall) -> OpenCall:
    how_far = _how_far(state, replica, call)
    if call.number != known.number:
        _tell_end(state, known)
        return OpenCall(call.number, max(call.began, state.recovered_at if model.is_listening else call.began), how_far)
    if how_far != known.how_far:
        _tell_end(state, known)
        return OpenCall(call.number, state.now, how_far)
    waited_s = state.now - known.moved_at
    if known.told is not None or waited_s <= max(STALL_S, REPORTS * state.report_s):
        return known
    why = why_waits(replica, call, reasons_of(state, model, replica))
    if not why:
        return known
    told = Stalled(
        model=model.name,
        replica=replica.name,
        call=str(call),
        version=call.version,
        waits_for=why,
        waited_s=waited_s,
        is_expected=is_expected(model, call),
    )
    state.events.append(told)
    return known._replace(told=told)


def is_expected(model: Model, call: GroupCall) -> bool:
    """It waits for a version that is not published yet."""
    return call.version is None and call.verb in facts.FILLS and (call.waits or model.newest is None)


def _tell_end(state: State, known: OpenCall) -> None:
    if known.told is not None:
        state.events.append(replace(known.told, is_over=True, waited_s=state.now - known.moved_at))


def _how_far(state: State, replica: Replica, call: GroupCall) -> tuple[object, ...]:
    """How far the call has come: what it is now, for as long as it stands still."""
    shards = []
    for worker in replica.members.values():
        member = state.members.get(worker)
        if member is not None:
            reading = member.report.reading
            arrived = (reading.ticket, reading.arrived_bytes) if reading is not None else None
            buffer = type(member.content.buffer).__name__
            shards.append((buffer, member.chunks_in_place, arrived, state.reads.load(worker)))
    return call.version, len(call.arrived), len(replica.members), tuple(shards)


# --- Why a call has not ended. The status asks it of every worker of a fleet, so nothing here looks at all sources of a
# version.


MAX_REASONS = 64  # of one replica: what its shards wait for may depend on all of them
MAX_HOLDERS = 256  # of a version that are looked at
Reasons = list[tuple[Member, str]]


def why_waits(replica: Replica, call: GroupCall, reasons: Reasons) -> str:
    """What the call waits for, in words; empty if bytes come, or all its shards are done. It is not over."""
    if call.waiting is not None:
        return call.waiting.message
    member, why = next((each for each in reasons if each[1]), (None, ""))
    return f"shard {member.shard}: {why}" if member is not None and replica.shards > 1 else why


def reasons_of(state: State, model: Model, replica: Replica) -> Reasons:
    """For each member, why its part of the call, or of a close(), is not done. Empty: it is, or is above the limit."""
    found: Reasons = []
    left = MAX_REASONS
    for _, worker in sorted(replica.members.items()):
        member = state.members.get(worker)
        if member is not None:
            why = _why_shard_waits(state, model, replica, member) if left else ""
            left -= bool(why)
            found.append((member, why))
    return found


def call_of(replica: Replica, member: Member) -> GroupCall | None:
    """The call that the worker is in, unless that is over."""
    reported, call = member.report.call, replica.call
    is_in_it = reported is not None and call is not None and reported.number == call.number
    return call if is_in_it and call is not None and not call.is_over else None


def heard_s(state: State, member: Member) -> float:
    """How long ago the worker reported."""
    return max(0.0, state.now - (member.lease_end - state.settings.lease_s))


def _why_shard_waits(state: State, model: Model, replica: Replica, member: Member) -> str:
    """Why its part is not done; empty: it is, or bytes come."""
    call = call_of(replica, member)
    if call is None and not member.report.closing:
        return ""
    if not facts.is_here(state, member):
        why = "it was not heard" if member.is_connected else "its connection is gone, and it was not heard"
        return f"{why} for {heard_s(state, member):.1f} s"
    drain = reads.drained_version(state, model, member).why
    if drain or call is None or call.waiting is not None:
        return drain
    if call.verb in facts.FILLS:
        return _why_not_filled(state, model, replica, member, call)
    if model.is_listening and not call.is_resolved_here:
        return "the server has restarted, and has not heard all workers yet"
    if call.verb == "publish":
        is_done = isinstance(member.content.buffer, Holding) and member.content.held == call.version
    else:
        buffer = member.report.buffer
        is_done = isinstance(buffer, (Empty, Vacated, Poisoned)) and not facts.is_read_though_poisoned(buffer)
    return "" if is_done else f"it has yet to report that its {call.verb} is done"


def _why_not_filled(state: State, model: Model, replica: Replica, member: Member, call: GroupCall) -> str:
    version, buffer = call.version, member.content.buffer
    if version is None or (isinstance(buffer, Holding) and buffer.version == version):
        return ""
    if member.can_fill_itself(version):
        return f"it copies version {version} from its own host memory"
    read = state.reads.current.get(member.worker)
    if read is not None:
        return why_nothing_comes(state, read, member)
    if isinstance(buffer, Filling) and buffer.version != version:
        return f"it has yet to stop reading version {buffer.version}"
    record = model.look_up(version)
    if (unreadable := layouts.why_unreadable(state, model, record, member)) is not None:
        return unreadable.message
    failed = [str(worker) for worker, failure in member.tries.sources.items() if failure.until > state.now]
    if failed:
        more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        return f"it has no source of version {version}: its read from {failed[0]}{more} failed lately"
    whole = record.whole.get(member.layout_key)
    if not whole and layouts.can_cross(record, member.layout_key):
        return f"another worker of its layout reads version {version} from another layout first"
    if whole and len(model.sites) > 1 and member.hello.site not in _sites_of(state, whole):
        return f"another worker of its site reads version {version} from another site first"
    return f"no worker can give it version {version} now"


def _sites_of(state: State, holders: Iterable[WorkerId]) -> list[str]:
    """The sites of the first few holders."""
    members = [state.members.get(worker) for worker in islice(holders, MAX_HOLDERS)]
    return [member.hello.site for member in members if member is not None]


def still_s(state: State, read: OpenRead) -> float:
    """How long ago the last bytes came, or else the read was granted."""
    return max(0.0, state.now - max(read.given_at, read.pace.came_at))


def why_nothing_comes(state: State, read: OpenRead, reader: Member) -> str:
    """Why the read has brought nothing for a while; empty: bytes come, or it has just begun."""
    waited_s, source = still_s(state, read), replicas_of(read.sources)
    if waited_s < STALL_S or read.is_void:
        return ""
    told = reader.report.reading
    if not facts.is_here(state, reader):
        return f"its reader was not heard for {heard_s(state, reader):.1f} s"
    if told is not None and told.ticket < read.ticket:
        return f"its read from {told.sources[0].worker.replica} has yet to stop"
    if told is None or told.ticket != read.ticket:
        return f"it has yet to begin to read from {source}"
    if told.is_opened and not reader.filled(read.version, to_host=read.grant.to_host)[2]:
        return "its tensors still have another version"
    for each in read.sources:
        giver = state.members.get(each.worker)
        if giver is None:
            return f"{each.worker.replica} is gone"
        if not facts.is_here(state, giver):
            return f"{each.worker.replica} was not heard for {heard_s(state, giver):.1f} s"
    if slow.waits_for_source(state, read):
        return f"{source} has no more of it yet"
    return f"{source} sends nothing"
