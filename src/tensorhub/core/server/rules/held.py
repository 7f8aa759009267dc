"""How many replicas hold a version by now: back-pressure for a trainer that must not run ahead of its rollouts.

Whom it counts: replicas other than the asker's own and other than trainers, all of whose shards live and none of which
is closing, once they follow the model: they hold something, or have called `replicate` or `update`. Who only loads a
version and leaves (`load`) does not follow it. So a dead replica is waited for until its lease ends, and one that still
starts is not waited for. A newer version is as good; it counts once it is whole in the tensors, not in a host copy.
"""

from math import ceil

from ...messages import Empty, Filling
from ...names import ModelName, ReplicaName, Version
from ...snapshot import HeldView
from .. import facts
from ..catalog import Model
from ..content import version_in
from ..groups import Replica
from ..membership import Member
from ..state import State

MOST_NAMED = 8  # of those that are missing
EXACT = 1e-9  # 0.7 of 10 is 7, though 0.7 * 10 is a little more


def held_by(state: State, name: ModelName, version: Version, asker: ReplicaName, fraction: float) -> HeldView:
    """Who holds the version or a newer one, and whether that is this fraction of all who count."""
    model = state.models.get(name)
    if model is None or not model.roll.is_over:
        return HeldView(waits_for="the reference server has restarted, and not everybody has reported to it yet")
    if model.newest is None or model.newest < version:
        newest = f"its newest version is {model.newest}" if model.newest is not None else "nothing was published yet"
        return HeldView(waits_for=f"{name} has no version {version} yet; {newest}")
    holders: list[str] = []
    missing: list[tuple[str, list[Member]]] = []
    for replica in model.replicas.values():
        members = _members(state, replica)
        if replica.name == asker or not _counts(replica, members):
            continue
        if all(member.is_full and _is_past(member, version) for member in members):
            holders.append(replica.name)
        else:
            missing.append((replica.name, members))
    counted = len(holders) + len(missing)
    needed = ceil(fraction * counted - EXACT)
    is_enough = len(holders) >= needed
    waits_for = "" if is_enough else _words(model, version, missing, needed, counted)
    return HeldView(is_enough, tuple(sorted(holders)), counted, waits_for)


def _members(state: State, replica: Replica) -> list[Member]:
    members = [state.members.get(worker) for _, worker in sorted(replica.members.items())]
    return [member for member in members if member is not None]


def _counts(replica: Replica, members: list[Member]) -> bool:
    """It is no trainer, all of it lives and stays, and it follows the model."""
    if replica.publishes or len(members) < replica.shards:
        return False
    if any(member.report.closing or member.hello.is_passing for member in members):
        return False
    call = replica.call
    is_called = replica.finished > 0 or (call is not None and call.verb in facts.FILLS)
    return is_called or any(not isinstance(member.content.buffer, Empty) for member in members)


def _is_past(member: Member, version: Version) -> bool:
    held = version_in(member.content.buffer)
    return held is not None and held >= version


def _words(model: Model, version: Version, missing: list[tuple[str, list[Member]]], needed: int, counted: int) -> str:
    """Who is missing, and how far each of them is."""
    said = [f"{name}{_how_far(members, version)}" for name, members in sorted(missing)[:MOST_NAMED]]
    more = f", and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
    have = counted - len(missing)
    text = f"{have} of {counted} replicas hold version {version} of {model.name}, and {needed} have to"
    return f"{text}; missing: {', '.join(said)}{more}"


def _how_far(members: list[Member], version: Version) -> str:
    """Of the shard that is furthest behind."""
    behind = [member for member in members if not (member.is_full and _is_past(member, version))]
    buffer = behind[0].content.buffer
    shard = f"[{behind[0].shard}] " if len(members) > 1 else " "
    if isinstance(buffer, Filling):
        return f"{shard}(has {buffer.done} of {buffer.chunks or '?'} chunks of {buffer.version})"
    held = version_in(buffer)
    return f"{shard}(holds {held if held is not None else 'nothing'})"
