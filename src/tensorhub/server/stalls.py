"""Stalls: calls that have stood still for more than two seconds, and what each waits for.

A call moves on when a shard comes to it, when its version is known, when a chunk or bytes of one arrive, or when a
shard's buffer becomes something else. The server looks at all open calls twice in the time between two reports.
"""

from math import inf

from msgspec.structs import replace

from ..protocol.events import Stalled
from ..protocol.names import ModelName, Version
from . import reads
from . import state as facts
from .groups import GroupCall, Replica
from .members import Member, OpenCall, replicas_of
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
    why = why_waits(state, model, replica, call)
    if not why:
        return known
    told = Stalled(
        model=model.name,
        replica=replica.name,
        call=str(call),
        version=call.version,
        waits_for=why,
        waited_s=waited_s,
        is_expected=call.version is None and call.verb in facts.FILLS and (call.waits or model.newest is None),
    )
    state.events.append(told)
    return known._replace(told=told)


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


# --- What a call waits for.


def why_waits(state: State, model: Model, replica: Replica, call: GroupCall) -> str:
    """What the call waits for now, in words; empty if that is not known. It is not over."""
    if call.waiting is not None:
        return call.waiting.message
    members = [state.members.get(worker) for _, worker in sorted(replica.members.items())]
    here = [member for member in members if member is not None]
    silent = [member for member in here if not facts.is_here(state, member)]
    if silent:
        heard_s = state.now - silent[0].lease_end + state.settings.lease_s
        return f"{silent[0].worker} has not been heard for {heard_s:.1f} s"
    for member in here:
        drain = reads.drained_version(state, model, member).why
        if drain:
            return drain
    if call.version is not None and call.verb in facts.FILLS:
        return next(
            (_why_unfilled(state, member, call.version) for member in here if not member.holds(call.version)), ""
        )
    return ""


def _why_unfilled(state: State, member: Member, version: Version) -> str:
    """What keeps the worker from the version. It is here."""
    read = state.reads.current.get(member.worker)
    if read is None or read.version != version:
        if member.can_fill_itself(version):
            return f"{member.worker} fills its tensors from its host copy of version {version}"
        return f"{member.worker} has no source for version {version} yet"
    told = member.report.reading
    if told is None or told.ticket != read.ticket:
        return f"{member.worker} has not begun to read version {version} from {replicas_of(read.sources)}"
    for each in read.sources:
        source = state.members.get(each.worker)
        if source is None:
            return f"its source {each.worker} has died"
        if not facts.is_here(state, source):
            heard_s = state.now - source.lease_end + state.settings.lease_s
            return f"its source {each.worker} has not been heard for {heard_s:.1f} s"
    return f"no byte of version {version} comes to {member.worker} from {replicas_of(read.sources)}"
