"""Which version a call means, of which the transcripts show the rest."""

from tensorhub.protocol.messages import CallReport, Holding, Poisoned
from tensorhub.protocol.names import Digest, ModelName, ReplicaName, Version
from tensorhub.server.groups import GroupCall

from .kit import Fleet, worker

ONE, TWO = Version(1), Version(2)
FIRST, SECOND = worker("r", 0), worker("r", 1)


def call_of(fleet: Fleet) -> GroupCall:
    """The call of the replica `r`."""
    call = fleet.server.state.models[ModelName("policy")].replicas[ReplicaName("r")].call
    assert call is not None
    return call


def holds(fleet: Fleet, replica: str, version: Version) -> None:
    for shard in range(2):
        fleet.says(worker(replica, shard), shards=2, buffer=Holding(version, Digest(f"{version}/{shard}")))


def test_who_is_in_the_call_before_and_was_cut_short_may_have_had_more() -> None:
    """A version was lost, and then the one after it: one shard has made its call once more, and the other not yet."""
    fleet = Fleet()
    holds(fleet, "old", ONE)
    former, again = (CallReport(number, "update", "latest", floor=TWO) for number in (3, 4))
    for who in (FIRST, SECOND):
        fleet.says(who, shards=2, buffer=Poisoned(), call=former, ended=2)
    assert call_of(fleet).version is None
    fleet.says(FIRST, shards=2, buffer=Poisoned(), call=again, ended=3)
    assert (call_of(fleet).number, call_of(fleet).version) == (4, None), "it would go back behind what both have had"
    holds(fleet, "new", TWO)
    fleet.says(SECOND, shards=2, buffer=Poisoned(), call=again, ended=3)
    assert call_of(fleet).version == TWO
