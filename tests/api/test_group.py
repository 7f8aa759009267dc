"""All shards of a replica in one process: calls of all of them together, and one error for all."""

import inspect

import numpy as np
import pytest

import tensorhub

SHARDS = 3


def made(value: float) -> list[dict[str, np.ndarray]]:
    """What each shard registers: tensors of its own, all of them that number."""
    return [{f"w{shard}": np.full(40_000 + shard, value, np.float32)} for shard in range(SHARDS)]


def numbers(tensors: list[dict[str, np.ndarray]]) -> set[float]:
    return {float(number) for each in tensors for array in each.values() for number in np.unique(array)}


@pytest.fixture
def group(server):
    """`group(replica, value)` joins as all shards of that replica; returns it and its tensors."""
    opened = []

    def joined(replica, value=0.0, **options):
        found = tensorhub.open_group("m", replica=replica, shards=SHARDS, server=server.address, **options)
        opened.append(found)
        tensors = made(value)
        found.register(tensors)
        return found, tensors

    yield joined
    for each in reversed(opened):
        each.close(timeout=3)


def test_a_replica_of_several_shards_in_one_process(group, server):
    trainer, trained = group("t", 1.0)
    assert trainer.publish(1, metadata={"step": 7}) == 1
    rollout, engine = group("r", reliable=False)
    assert rollout.version is None
    assert rollout.wait_for(1) == 1
    assert rollout.replicate(1) == 1
    assert numbers(engine) == {1.0}
    assert rollout.metadata == {"step": 7}
    with trainer.mutating(version=2):
        for each in trained:
            for array in each.values():
                array += 1.0
    assert rollout.update() == 2
    assert (rollout.version, trainer.version) == (2, 2)
    assert numbers(engine) == {2.0}
    rollout.check()
    (view,) = (each for each in tensorhub.connect(server.address).replicas("m") if each.name == "r")
    assert len(view.workers) == SHARDS == len(rollout)
    assert [each["received_bytes"] for each in rollout.statistics()] != []


def test_the_error_is_the_cause_and_all_shards_end_with_it(group, server):
    trainer, tensors = group("t", 1.0)
    trainer.publish(1)
    rollout = tensorhub.open_group("m", replica="r", shards=SHARDS, server=server.address, reliable=False)
    with rollout:
        wrong = made(0.0)
        wrong[1] = {"w1": np.zeros(7, np.float32)}
        rollout.register(wrong)
        with pytest.raises(tensorhub.LayoutMismatch, match="w1"):
            rollout.replicate(1, timeout=20)
        rollout.unpublish(timeout=20)  # a shard may have got all of it before another one failed
        rollout.register(made(0.0))
        assert rollout.replicate(1, timeout=20) == 1
    assert numbers(tensors) == {1.0}


def test_tensors_are_refused_for_all_shards_or_none(group):
    trainer, tensors = group("t", 1.0)
    with pytest.raises(tensorhub.UsageError, match="for 3 shards, in order, not 2"):
        trainer.register(made(2.0)[:2])
    with pytest.raises(tensorhub.UsageError, match="for 3 shards"):
        trainer.register({"w0": np.zeros(3), "w1": np.zeros(3), "w2": np.zeros(3)})
    wrong = made(2.0)
    wrong[2] = {"w2": np.zeros((4, 4), np.float32)[:, ::3]}
    with pytest.raises(tensorhub.UsageError, match="w2"):
        trainer.register(wrong)
    trainer.publish(1)
    trainer.check()
    assert numbers(tensors) == {1.0}


def test_where_one_shard_is_taken_nobody_joins(group, server, join):
    taken = tensorhub.open("m", replica="r", shard=1, shards=SHARDS, server=server.address)
    with taken, pytest.raises(tensorhub.ShardTaken, match=r"r\[1\]"):
        tensorhub.open_group("m", replica="r", shards=SHARDS, server=server.address, timeout=2)
    found, _ = group("r", 1.0)
    assert found.publish(1) == 1


def test_what_a_group_can_do_is_what_its_shards_can():
    """And takes the same, but where tensors are handed over: they are handed over for each shard."""
    alone = {name: getattr(tensorhub.Weights, name) for name in dir(tensorhub.Weights) if name[0] != "_"}
    together = {name: getattr(tensorhub.Group, name) for name in dir(tensorhub.Group) if not name.startswith("_")}
    assert sorted(together) == sorted(alone)
    for name, call in alone.items():
        if callable(call) and name not in ("register", "resume"):
            assert list(inspect.signature(call).parameters) == list(inspect.signature(together[name]).parameters), name
