"""Numbers that somebody means to publish: claimed with an unpublish, before the tensors are changed.

A claim is judged before anything is withdrawn: a caller that would get a VersionConflict after a step gets it before.
The replica's workers remember the claim and repeat it in each report, so it outlives the server. It ends with the next
call of the replica that ends well, whatever that is; when it is given back; and with the last session of its workers.
"""

from ...errors import HIGHER, SPOILED, SPOILED_HINT
from ...messages import Failure, Poisoned
from ...names import ReplicaName, Version
from ..catalog import Model
from ..content import WHOLE
from ..groups import Replica
from ..membership import Member
from ..state import State

HINT = "one replica publishes a number: see which other job uses this model name, or publish what next_version() names"


def why_refuse(state: State, model: Model, replica: Replica, version: Version) -> Failure | None:
    """Why the replica may not claim the number, or None. All its shards have come, and the server knows who lives."""
    taken = why_taken(state, model, replica, version)
    return taken or _why_spoiled(state, replica) or _why_apart(state, replica)


def why_taken(state: State, model: Model, replica: Replica, version: Version) -> Failure | None:
    """Somebody else has published the number, or may publish it. Or a newer one is there."""
    return _why_not_claim(model, replica, version) or conflict_with(state, model, replica, version)


def why_wait(state: State, replica: Replica) -> Failure | None:
    """Who is cut off still reads from a shard. When that is over it says whether its tensors are its publisher's."""
    for member in _members(state, replica):
        buffer = member.report.buffer
        if isinstance(buffer, Poisoned) and buffer.version is not None:
            return Failure("not-drained", f"version {buffer.version} of {member.worker} still has readers")
    return None


def _why_spoiled(state: State, replica: Replica) -> Failure | None:
    """The publish after the step would be refused."""
    for member in _members(state, replica):
        if isinstance(member.report.buffer, Poisoned):
            return Failure("usage", f"{member.worker} is {SPOILED}", SPOILED_HINT)
    return None


def _why_apart(state: State, replica: Replica) -> Failure | None:
    """An update has succeeded on some shards only: a step would begin on tensors of different versions.

    After a publish that has failed shards may differ too. What they made is of one step all the same.
    """
    buffers = {member.shard: member.content.buffer for member in _members(state, replica)}
    whole = {shard: buffer for shard, buffer in buffers.items() if isinstance(buffer, WHOLE)}
    if len({buffer.version for buffer in whole.values()}) < 2 or all(buffer.published for buffer in whole.values()):
        return None
    held = ", ".join(f"shard {shard} holds {buffer.version}" for shard, buffer in sorted(whole.items()))
    hint = "update() or replicate() until that succeeds on all shards"
    return Failure("group-mismatch", f"the shards of {replica.name} are not of one version: {held}", hint)


def conflict_with(state: State, model: Model, replica: Replica, version: Version) -> Failure | None:
    """Somebody else has claimed that number, and not before this replica has.

    Of two claims the later one counts: it was granted when the session of who had the other was over.
    """
    mine = claimed_by(state, replica).get(version, 0)
    for name, other in model.replicas.items():
        if name != replica.name and claimed_by(state, other).get(version, -1) >= mine:
            text = f"version {version} of {model.name} is claimed by {name}, which is between its unpublish and publish"
            return Failure("version-conflict", text, HINT)
    return None


def _why_not_claim(model: Model, replica: Replica, version: Version) -> Failure | None:
    name, record = f"version {version} of {model.name}", model.versions.get(version)
    if model.newest is not None and version <= model.newest:
        text = f"{name} is not higher than the newest, {model.newest}: nothing was changed"
        return Failure("version-conflict", text, f"versions only rise: {HIGHER}")
    if (far := model.too_far(version)) is not None:
        return Failure(far.code, f"{far.message}: nothing was changed", far.hint)
    others: list[ReplicaName] = []
    if record is not None:
        others = [*record.claims, *[worker.replica for held in record.holders.values() for worker in held]]
    for other in others:
        if other != replica.name:
            return Failure("version-conflict", f"{name} is being published by {other}: nothing was changed", HINT)
    return None


def claimed_by(state: State, replica: Replica) -> dict[Version, int]:
    """What the replica has claimed: by a call that is under way or has just ended well, or as its workers remember.

    Of each the number of the orders that granted it; they may be on their way yet.
    """
    found: dict[Version, int] = {}
    for worker in replica.members.values():
        member = state.members.get(worker)
        if member is None:
            continue
        report, reported = member.report, member.report.call
        granted_in = min(report.claimed_in, report.seen)
        if report.claim is not None:
            found[report.claim] = max(granted_in, found.get(report.claim, 0))
        call = replica.find(reported.number) if reported is not None else None
        is_granted = call is not None and call.error is None and call.version is not None
        if call is not None and call.claim is not None and is_granted:
            is_heard = reported is not None and reported.resolved is not None
            found[call.claim] = max(granted_in if is_heard else state.numbers.last, found.get(call.claim, 0))
    return found


def _members(state: State, replica: Replica) -> list[Member]:
    return [state.members[worker] for worker in replica.members.values() if worker in state.members]
