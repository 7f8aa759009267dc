"""Numbers that somebody means to publish: claimed with an unpublish, before the tensors are changed.

A claim is judged before anything is withdrawn: a caller that would get a VersionConflict after a step gets it before.
The replica's workers remember the claim and repeat it in each report, so it outlives the server. It ends with the next
call of the replica that ends well, whatever that is; when it is given back; and with the last session of its workers.
"""

from ...messages import Failure
from ...names import ReplicaName, Version
from ..catalog import Model
from ..groups import Replica
from ..state import State

HINT = "one replica publishes a number: see which other job uses this model name, or publish a higher number"


def why_refuse(state: State, model: Model, replica: Replica, version: Version) -> Failure | None:
    """Why the replica may not claim the number, or None. All its shards have come, and the server knows who lives."""
    return _why_not_claim(model, replica, version) or conflict_with(state, model, replica, version)


def conflict_with(state: State, model: Model, replica: Replica, version: Version) -> Failure | None:
    """Somebody else has claimed that number."""
    for name, other in model.replicas.items():
        if name != replica.name and version in claimed_by(state, other):
            text = f"version {version} of {model.name} is claimed by {name}, which is between its unpublish and publish"
            return Failure("version-conflict", text, HINT)
    return None


def _why_not_claim(model: Model, replica: Replica, version: Version) -> Failure | None:
    name, record = f"version {version} of {model.name}", model.versions.get(version)
    if model.newest is not None and version <= model.newest:
        text = f"{name} is not higher than the newest, {model.newest}: nothing was changed"
        return Failure("version-conflict", text, "versions only rise: publish a higher number")
    others: list[ReplicaName] = []
    if record is not None:
        others = [*record.claims, *[worker.replica for held in record.holders.values() for worker in held]]
    for other in others:
        if other != replica.name:
            return Failure("version-conflict", f"{name} is being published by {other}: nothing was changed", HINT)
    return None


def claimed_by(state: State, replica: Replica) -> dict[Version, None]:
    """What the replica has claimed: by a call that is under way or has just ended well, or as its workers remember."""
    found: dict[Version, None] = {}
    for worker in replica.members.values():
        member = state.members.get(worker)
        if member is None:
            continue
        if member.report.claim is not None:
            found[member.report.claim] = None
        reported = member.report.call
        call = replica.find(reported.number) if reported is not None else None
        is_granted = call is not None and call.error is None and call.version is not None
        if call is not None and call.claim is not None and is_granted:
            found[call.claim] = None
    return found
