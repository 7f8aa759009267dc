"""Which version of a set a call means: all shards hear it before anything is given up, and then all models get it.

The replica that asks is that of the set's first model; those of the same name in the others have their own calls for
that version afterwards. An update of a set never goes behind what all of its members have held.
"""

from collections.abc import Iterator, Sequence

from ...messages import Failure, Holding
from ...names import Version
from ...version_spec import PREFETCHED
from ..catalog import Model
from ..companions import Names
from ..decisions import Decision, Fail, Resolve, Wait
from ..groups import GroupCall, Replica
from ..state import State
from . import witness
from .resolving import all_older, is_enough, may_come


def advance(state: State, model: Model, replica: Replica, call: GroupCall) -> Iterator[Decision]:
    """Once all shards have come they hear the same number."""
    if call.version is not None or call.waiting is not None:
        return
    companions = companions_of(state, replica)
    if companions is None:
        text = f"the shards of {replica.name} say that {model.name} is of different sets"
        yield Fail(call, Failure("group-mismatch", text, "all shards name the same models"))
        return
    others = [state.models.get(name) for name in companions]
    is_heard = all(other.roll.is_over if other is not None else not state.is_recovering for other in others)
    if not (is_heard and witness.is_whole(state, model, replica)):
        yield Wait(call, witness.recovering(state))
        return
    version, failure = chosen(state, model, replica, call, companions)
    if version is not None:
        yield Resolve(call, version)
        return
    assert failure is not None
    never = _why_never((model, *others), call.spec) if isinstance(call.spec, int) else None
    if never is not None or (isinstance(call.spec, int) and not call.waits):
        yield Fail(call, never or failure)
    else:
        yield Wait(call, failure)


def _why_never(models: Sequence[Model | None], number: int) -> Failure | None:
    """One of them has no such version, and numbers only rise."""
    for model in models:
        if model is not None and not may_come(model, number):
            version, failure = model.resolve(number)
            if version is None:
                return failure
    return None


def companions_of(state: State, replica: Replica) -> Names | None:
    """The other models of the set that the replica is of, if all of its shards say the same."""
    named = [state.known(worker).hello.companions for worker in replica.members.values()]
    return named[0] if named.count(named[0]) == len(named) else None


def chosen(
    state: State, model: Model, replica: Replica, call: GroupCall, companions: Names
) -> tuple[Version, None] | tuple[None, Failure]:
    """The version of the set that the call means, for which all shards have come. Never behind its floor."""
    asked = [state.known(worker).report.call for worker in replica.members.values()]
    floors = [each.floor for each in asked if each is not None and each.floor is not None]
    floor = min(floors) if len(floors) == len(asked) else None  # after half an update one of them may have had more
    replicas = [(model, replica), *_in_the_set(state, replica, companions)]
    held = _held_in_all(state, replicas) if floor is not None and len(replicas) == 1 + len(companions) else None
    version: Version | None
    if call.spec == PREFETCHED:
        version, failure = _prefetched_in_all(state, replicas, companions), None
        if version is None:
            version, failure = (held, None) if held is not None else model.resolve("latest", companions)
    else:
        version, failure = model.resolve(call.spec, companions)
    if held is not None and is_enough(call.spec, held, version):
        return held, None
    if version is None:
        assert failure is not None
        return None, failure
    if floor is None or version >= floor:
        return version, None
    newer = [each for each in model.available(companions) if each >= floor]
    return (newer[-1], None) if newer else (None, all_older(model, replica, floor))


def _in_the_set(state: State, replica: Replica, companions: Names) -> list[tuple[Model, Replica]]:
    """The replicas of that name in the other models, as far as they are there."""
    models = [state.models[name] for name in companions if name in state.models]
    return [(model, model.replicas[replica.name]) for model in models if replica.name in model.replicas]


def _held_in_all(state: State, replicas: list[tuple[Model, Replica]]) -> Version | None:
    """What each shard of each of them holds, if that is one version."""
    held: list[Version | None] = []
    for _, replica in replicas:
        members = [state.known(worker) for worker in replica.members.values()]
        if len(members) < replica.shards:
            return None
        buffers = [member.content.buffer for member in members]
        held += [buffer.version if isinstance(buffer, Holding) else None for buffer in buffers]
    return held[0] if held.count(held[0]) == len(held) else None


def _prefetched_in_all(state: State, replicas: list[tuple[Model, Replica]], companions: Names) -> Version | None:
    """The newest version of the set of which each shard of each of them has a whole copy, or that it holds already."""
    model = replicas[0][0]
    if len(replicas) <= len(companions) or any(len(each.members) < each.shards for _, each in replicas):
        return None
    members = [state.known(worker) for _, each in replicas for worker in each.members.values()]
    for version in model.available(companions):
        if all(member.fills_itself(version) or member.holds(version) for member in members):
            return version
    return None
