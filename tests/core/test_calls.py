"""What a call means, what it waits for, and how many replicas hold a version."""

import pytest

from tensorhub.protocol.messages import (
    CallReport,
    Empty,
    Filling,
    Holding,
    HostCopy,
    Poisoned,
    Vacated,
    Withdrawing,
)
from tensorhub.protocol.names import Digest, ModelName, Number, ReplicaName, Version
from tensorhub.protocol.status import HeldView
from tensorhub.server.calls import held_by
from tensorhub.server.groups import GroupCall

from .kit import LEASE_S, Fleet, worker
from .town import Town

# --- how many replicas hold a version: whom `wait_held` counts, and whom it says to be missing ---

R = Digest("r")
UPDATE = CallReport(1, "update", "latest")


def holding(version: int) -> Holding:
    return Holding(Version(version), R)


def held(fleet: Fleet, version: int, fraction: float = 1.0, asker: str = "trainer") -> HeldView:
    return held_by(fleet.server.state, ModelName("policy"), Version(version), ReplicaName(asker), fraction)


@pytest.fixture
def fleet() -> Fleet:
    """A trainer that has published 1, 2 and 3, and rollouts a, b and c, which hold 3, 2 and 1."""
    found = Fleet()
    found.says(worker("a"))
    found.says(worker("trainer"))
    for version in (1, 2, 3):
        found.publishes(version, worker("trainer"), version)
    for name, version in (("a", 3), ("b", 2), ("c", 1)):
        found.says(worker(name), buffer=holding(version), ended=1, finished=1)
    return found


def test_who_is_behind_is_missing_and_named(fleet: Fleet) -> None:
    found = held(fleet, 3)
    assert (found.is_enough, found.holders, found.counted) == (False, ("a",), 3)
    text = "1 of 3 replicas hold version 3 of policy, and 3 have to; missing: b (holds 2), c (holds 1)"
    assert found.waits_for == text


@pytest.mark.parametrize(
    ("fraction", "is_enough"), [(0.0, True), (0.34, True), (0.66, True), (0.67, False), (1, False)]
)
def test_the_fraction_is_of_those_that_count(fleet: Fleet, fraction: float, is_enough: bool) -> None:
    assert held(fleet, 2, fraction).is_enough is is_enough


def test_who_only_starts_is_not_waited_for_until_it_calls(fleet: Fleet) -> None:
    fleet.says(worker("d"))
    assert held(fleet, 1).is_enough
    fleet.says(worker("d"), call=CallReport(1, "replicate", "latest"))
    assert held(fleet, 1).waits_for.endswith("missing: d (holds nothing)")
    fleet.says(worker("d"), call=CallReport(1, "replicate", "latest"), buffer=Filling(Version(3), 2, 5))
    assert held(fleet, 1).waits_for.endswith("missing: d (has 2 of 5 chunks of 3)")
    fleet.says(worker("d"), buffer=holding(3), ended=1, finished=1)
    assert held(fleet, 1).is_enough


def test_a_fill_counts_once_it_is_whole_and_a_withdrawn_version_while_it_is_there(fleet: Fleet) -> None:
    fleet.says(worker("c"), buffer=Vacated(Version(1), R), call=CallReport(2, "update", "latest"), ended=1, finished=1)
    assert held(fleet, 1).is_enough
    for buffer in (Filling(Version(3)), Poisoned(Version(3)), Empty()):
        fleet.says(worker("c"), buffer=buffer, call=CallReport(2, "update", "latest"), ended=1, finished=1)
        assert held(fleet, 1).holders == ("a", "b")
        assert not held(fleet, 1).is_enough


def test_who_closes_or_has_left_is_not_waited_for(fleet: Fleet) -> None:
    fleet.says(worker("c"), buffer=holding(1), ended=1, finished=1, closing=True)
    assert held(fleet, 2).is_enough
    fleet.says(worker("b"), ended=1, finished=1, left=True)
    assert held(fleet, 3) == HeldView(is_enough=True, holders=("a",), counted=1)


def test_who_has_died_is_waited_for_until_its_lease_ends(fleet: Fleet) -> None:
    living = worker("trainer"), worker("a"), worker("b")
    kept = {"buffer": holding(3), "ended": 3, "finished": 3}
    fleet.passes(LEASE_S - 0.1, *living, **kept)
    assert not held(fleet, 3).is_enough
    fleet.passes(0.2, *living, **kept)
    assert held(fleet, 3).is_enough


def test_a_replica_of_which_a_shard_is_gone_does_not_count() -> None:
    fleet = Fleet()
    shards = worker("r", 0), worker("r", 1)
    trainer = worker("trainer", 0), worker("trainer", 1)
    for each in (*shards, *trainer):
        fleet.says(each, shards=2)
    call = CallReport(1, "publish", 1, R)
    for each in (*trainer, *trainer):
        fleet.says(each, shards=2, call=call, buffer=Holding(Version(1), R, published=True))
    fleet.says(shards[0], shards=2, call=UPDATE)
    assert held(fleet, 1).waits_for.endswith("missing: r[0] (holds nothing)")
    fleet.says(shards[0], shards=2, buffer=holding(1), ended=1, finished=1)
    assert held(fleet, 1).waits_for.endswith("missing: r[1] (holds nothing)")
    fleet.says(shards[1], shards=2, left=True)
    assert held(fleet, 1) == HeldView(is_enough=True)


def test_another_trainer_is_not_waited_for_and_who_asks_is_not_either(fleet: Fleet) -> None:
    fleet.says(worker("second"), call=CallReport(1, "unpublish", "", claim=Version(9)))
    assert held(fleet, 1).is_enough
    assert held(fleet, 3, asker="c").counted == 2, "a and b"


@pytest.mark.parametrize("is_passing", [True, False])
def test_who_only_loads_a_version_is_not_waited_for(fleet: Fleet, is_passing: bool) -> None:
    late = worker("load-1")
    fleet.says(late, call=CallReport(1, "replicate", 1), is_passing=is_passing)
    found = held(fleet, 1)
    assert (found.is_enough, found.counted) == ((True, 3) if is_passing else (False, 4))


# --- which version a call means, of which the transcripts show the rest ---

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


# --- who waits for a version that all its holders want to leave hears of it when one of them stays after all ---

OLD = Digest("old")
HOLDER, NEWCOMER, NEXT = worker("holder"), worker("newcomer"), worker("next")
UNPUBLISH = CallReport(Number(1), "unpublish", "")


@pytest.fixture
def town() -> Town:
    """The only holder takes its version back, and is not let go yet: the newcomer waits for somebody who has it."""
    town = Town()
    town.joins(HOLDER, buffer=Holding(ONE, OLD))
    town.says(HOLDER, buffer=Withdrawing(ONE, OLD), call=UNPUBLISH)
    town.joins(NEWCOMER)
    town.says(NEWCOMER, call=CallReport(Number(1), "replicate", "latest"))
    assert is_waiting(town)
    return town


def is_waiting(town: Town) -> bool:
    answer = town.orders[NEWCOMER].answer
    assert answer is not None
    return answer.version is None and answer.waiting is not None


def test_it_reads_when_the_holder_has_changed_its_mind(town: Town) -> None:
    town.says(HOLDER, buffer=Holding(ONE, OLD), ended=1)
    assert not is_waiting(town)


def test_it_reads_when_somebody_else_comes_with_it(town: Town) -> None:
    town.joins(NEXT, buffer=Holding(ONE, OLD))
    assert not is_waiting(town)


def test_it_reads_when_the_holder_has_a_copy_of_it(town: Town) -> None:
    town.says(HOLDER, buffer=Withdrawing(ONE, OLD), call=UNPUBLISH, copies=(HostCopy(1, ONE, OLD, whole=True),))
    assert not is_waiting(town)


# --- an operator sees what a withdrawal waits for ---


def why(town: Town) -> str:
    (model,) = town.server.status(now=town.now).models
    (call,) = (replica.call for replica in model.replicas if replica.name == HOLDER.replica)
    assert call is not None
    assert call.state == "running"
    return call.waiting_for


def test_a_withdrawal_says_that_the_last_copy_is_kept() -> None:
    town = Town()
    town.joins(HOLDER, buffer=Holding(ONE, OLD), copies_left=1)
    town.says(HOLDER, buffer=Withdrawing(ONE, OLD), call=UNPUBLISH, copies_left=1)
    assert why(town) == "it has the last copy of version 1, which must be kept, until there is one in host memory"


def test_a_withdrawal_names_who_reads_and_who_is_to_read() -> None:
    town = Town(default_retain=0)
    town.joins(HOLDER, buffer=Holding(ONE, OLD))
    town.joins(NEWCOMER)
    town.says(NEWCOMER, call=CallReport(Number(1), "replicate", "latest"))
    town.says(HOLDER, buffer=Withdrawing(ONE, OLD), call=UNPUBLISH)
    assert why(town) == "version 1 is read by policy/newcomer[0]"
    grant = town.orders[NEWCOMER].grant
    assert grant is not None
    town.says(NEWCOMER, call=CallReport(Number(1), "replicate", "latest"), closed=grant.ticket)
    assert "policy/newcomer[0]" in why(town)
