"""How the living replicas of a model are cut: what whoever publishes it must reckon with before anything is hashed."""

from ...names import ModelName, ReplicaName
from ...snapshot import CutsView, ShardView
from ..groups import Replica
from ..state import State


def cuts_of(state: State, name: ModelName, asker: ReplicaName | None = None) -> CutsView:
    """The boxes of every living worker of the model that has said any, each once, and who has them.

    And who of the asker's replica is there.
    """
    model = state.models.get(name)
    numbers: dict[bytes, int] = {}
    shards: list[ShardView] = []
    replicas = model.replicas.values() if model is not None else ()
    for replica in replicas:
        for shard, worker in replica.members.items():
            member = state.members.get(worker)
            layout = state.layouts.get(member.report.layout) if member is not None else None
            if layout is not None and layout.boxes:
                number = numbers.setdefault(layout.boxes, len(numbers))
                shards.append(ShardView(replica.name, shard, replica.shards, number))
    mine = model.replicas.get(asker) if model is not None and asker is not None else None
    here, missed = _siblings(state, mine) if mine is not None else ((), "")
    patience_s = state.settings.lease_s if not state.is_recovering else None
    return CutsView(tuple(shards), tuple(numbers), here, missed, patience_s)


def _siblings(state: State, replica: Replica) -> tuple[tuple[int, ...], str]:
    members = [(shard, state.members.get(worker)) for shard, worker in replica.members.items()]
    here = tuple(sorted(shard for shard, member in members if member is not None and not member.report.closing))
    if replica.missed is None or replica.missed[0] in here:
        return here, ""
    shard, why = replica.missed
    return here, f"shard {shard} of {replica.name} could not make its last call, and has left: {why.message}"
