"""Tensors changed while they are published: found by `check`, and by every reader; nobody accepts a wrong byte."""

import threading

import pytest

import tensorhub

from .cluster import Replica
from .midway import held_midway, release
from .process import eventually

pytestmark = pytest.mark.processes


def spoil(worker, *, at=0.7):
    """Change one bit of a tensor in place, as a careless trainer would. Returns the word, to mend it."""
    index = int(len(worker.memory.words) * at)
    worker.memory.words[index] ^= 1 << 17
    return index


def test_changed_tensors_are_found_by_check_and_by_readers(start, figures):
    cluster = start()
    trainer, reader = cluster.replicas("trainer", "rollout-1")
    cluster.publish(trainer, 1)
    trainer.call("check")
    index = spoil(trainer[1])
    assert trainer[0].call("check") is None
    with pytest.raises(tensorhub.NotDrained, match="'mlp'"):
        trainer[1].call("check")
    reads = reader.start("replicate", spec="latest", timeout=30)
    found = [read.outcome() for read in reads]
    assert all(isinstance(each, tensorhub.TensorHubError) for each in found), found
    assert any(isinstance(each, tensorhub.CorruptTransfer) for each in found), found
    assert reader[1].look()["version"] is None
    with pytest.raises(tensorhub.UsageError, match="poisoned"):
        reader[1].call("publish", version=2, timeout=5)
    trainer[1].memory.words[index] ^= 1 << 17
    trainer.call("check")
    assert reader.call("replicate", spec="latest") == 1
    cluster.judge(reader, 1)
    names = "/".join(type(each).__name__ for each in found)
    figures(f"one bit changed while published: check() named the tensor, the reader's shards got {names}")


def test_a_reader_of_changed_tensors_is_given_good_ones_by_another_holder(start, figures):
    cluster = start()
    (trainer,) = cluster.replicas("trainer", site="here")
    (holder,) = cluster.replicas("rollout-1", site="there")
    (reader,) = cluster.replicas("rollout-2", site="here")  # reads from the trainer first
    cluster.publish(trainer, 1)
    assert holder.call("replicate", spec="latest") == 1
    reads, at = held_midway(cluster, reader)
    assert cluster.sources("rollout-2") == {0: "trainer", 1: "trainer"}
    for worker in trainer:
        worker.memory.words[len(worker.memory.words) // 2 :] = 0  # in mid-transfer, and half of it
    release(reader)
    assert [read.result() for read in reads] == [1, 1]
    cluster.judge(reader, 1)
    received = reader.received()
    assert set(received) == {"trainer", "rollout-1"}
    share = received["rollout-1"] / cluster.size_bytes
    figures(f"tensors overwritten at {at:.0f} % of a transfer: {share:.0%} came from another holder, all right")


def test_two_trainers_publish_one_number_with_different_content(start, figures):
    """One of them wins on all shards; the other is told; readers get the winner's bytes."""
    cluster = start()
    first, second = cluster.replicas("trainer-1", "trainer-2")
    reader = cluster.replica("rollout-1")
    cluster.write(first, 1)
    for shard, worker in enumerate(second):
        cluster.contents.write(worker.memory, "other", shard)
    calls = [*first.start("publish", version=1, timeout=20), *second.start("publish", version=1, timeout=20)]
    found = [call.outcome() for call in calls]
    won = [each == 1 for each in found]
    assert won in ([True, True, False, False], [False, False, True, True]), found
    assert all(each == 1 or isinstance(each, tensorhub.VersionConflict) for each in found), found
    assert reader.call("replicate", spec=1) == 1
    cluster.judge(reader, 1 if won[0] else "other")
    figures("two trainers, one number, different content: one published it, the other got VersionConflict")


def test_replicas_that_fill_each_other_in_turns(start, figures):
    """Each holds its own model and reads the other's: two directions at once, on the same links."""
    cluster = start()
    trainer, rollout = cluster.replicas("trainer", "rollout-1")
    (critic,) = cluster.replicas("critic", model="value")
    (reader,) = cluster.replicas("rollout-1", model="value")
    cluster.write(trainer, 1)
    for shard, worker in enumerate(critic):
        cluster.contents.write(worker.memory, "value", shard)
    published = [*trainer.start("publish", version=1), *critic.start("publish", version=5)]
    assert [call.result() for call in published] == [1, 1, 5, 5]
    reads = [*rollout.start("replicate", spec="latest"), *reader.start("replicate", spec="latest")]
    assert [read.result() for read in reads] == [1, 1, 5, 5]
    cluster.judge(rollout, 1)
    cluster.judge(reader, "value")
    trainer.call("unpublish")
    for worker in trainer:
        worker.memory.words[:] = 0
    assert trainer.call("replicate", spec="latest") == 1  # the trainer gets its own weights back, from the rollout
    cluster.judge(trainer, 1)
    assert set(trainer.received()) == {"rollout-1"}
    figures("two models at once, and a trainer refilled from its rollout: every byte right")


def test_a_worker_killed_while_it_registers_or_opens_is_soon_forgotten(start, figures):
    cluster = start()
    trainer = cluster.replica("trainer")
    cluster.publish(trainer, 1)
    doomed = Replica("rollout-1", [cluster.begin("rollout-1", shard) for shard in range(2)])
    for worker in doomed:
        worker.ready.result()
    given = {"model": "policy", "server": cluster.address, "shards": 2, "replica": "rollout-1"}
    opening = [worker.ask("open", **given, shard=shard) for shard, worker in enumerate(doomed)]
    opening[0].result()
    doomed.kill()
    rollout = cluster.replica("rollout-1")  # the same name: waits for the lease, not longer
    assert rollout.call("replicate", spec="latest") == 1
    cluster.judge(rollout, 1)
    eventually(lambda: cluster.states("rollout-1") == {0: "holding", 1: "holding"}, "the successor holds it")
    assert threading.active_count() < 200
    figures("killed while it opened: its successor of the same name joined and filled")
