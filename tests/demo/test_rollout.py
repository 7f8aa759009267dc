"""Which version a rollout that joins late asks for."""

import pytest

from bench.demo.rollout import from_rollouts, received_by
from tensorhub import VersionUnavailable
from tensorhub.protocol.status import ModelView, ReplicaView, Status, VersionView, WorkerView


def status(*replicas: str, held: dict[int, str], copied: dict[int, str] | None = None) -> Status:
    """`held` and `copied`: who has a version, separated by blanks."""
    versions = tuple(
        VersionView(
            version=number,
            is_latest=number == max(held),
            is_complete=True,
            holders=tuple(who.split()),
            filling=(),
            host_copies=tuple((copied or {}).get(number, "").split()),
        )
        for number, who in sorted(held.items(), reverse=True)
    )
    model = ModelView(
        name="policy",
        shards=2,
        latest=max(held),
        size_bytes=1,
        versions=versions,
        replicas=tuple(ReplicaView(name=name, shards=2, workers=(), call=None) for name in replicas),
    )
    return Status(protocol="", uptime_s=1.0, recovering_s=0.0, models=(model,), transfers=(), counters={})


def test_the_newest_that_all_others_hold():
    found = status("trainer", "rollout-0", "rollout-2", "rollout-3", held={7: "rollout-0 rollout-2", 8: "trainer"})
    assert from_rollouts(found, "rollout-3") == 7


def test_what_all_hold_serves_also_while_the_trainer_holds_it():
    assert from_rollouts(status("trainer", "rollout-0", "rollout-3", held={8: "rollout-0 trainer"}), "rollout-3") == 8


def test_what_some_hold_serves_once_the_trainer_has_left_it():
    found = status("trainer", "rollout-0", "rollout-2", held={6: "rollout-0", 7: "rollout-2", 8: "trainer"})
    assert from_rollouts(found, "rollout-3") == 7


@pytest.mark.parametrize(
    "found",
    [
        status("trainer", "rollout-0", "rollout-2", held={8: "trainer rollout-0"}),
        status("trainer", "rollout-0", "rollout-2", held={7: "rollout-0", 8: ""}, copied={7: "trainer"}),
        status("trainer", "rollout-3", held={8: "trainer rollout-3"}),
        status("trainer", held={8: "trainer"}),
    ],
)
def test_nothing_that_the_trainer_might_have_to_send(found: Status):
    with pytest.raises(VersionUnavailable):
        from_rollouts(found, "rollout-3")


def worker(shard: int, received: dict[str, int]) -> WorkerView:
    return WorkerView(
        shard=shard,
        state="holding",
        version=7,
        done=1,
        chunks=1,
        size_bytes=1,
        session=1,
        lease_left_s=1.0,
        connected=True,
        readers=0,
        endpoints=(),
        host="here",
        site="",
        reliable=False,
        received_bytes=received,
    )


def test_what_a_replica_received_is_of_all_its_workers_and_of_nobody_else():
    both = (worker(0, {"trainer": 3, "rollout-1": 4}), worker(1, {"trainer": 5}))
    mine = ReplicaView(name="rollout-0", shards=2, workers=both, call=None)
    other = ReplicaView(name="rollout-1", shards=1, workers=(worker(0, {"trainer": 100}),), call=None)
    assert received_by("rollout-0", [other, mine]) == {"trainer": 8, "rollout-1": 4}
    assert received_by("rollout-2", [other, mine]) == {}
