"""How the living replicas of a model are cut: what whoever publishes it must reckon with before anything is hashed."""

from ...names import ModelName
from ...snapshot import CutsView, ShardView
from ..state import State


def cuts_of(state: State, name: ModelName) -> CutsView:
    """The boxes of every living worker of the model that has said any, each once, and who has them."""
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
    return CutsView(tuple(shards), tuple(numbers))
