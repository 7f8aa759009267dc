"""Versions that are kept: host copies, heirs, the limit on host memory, prefetch, and copies that a host shares."""

import os
import time
from pathlib import Path

import pytest

import tensorhub
from tensorhub.transport import sealed

from .midway import release
from .process import eventually

pytestmark = pytest.mark.processes

MIB = 1 << 20
SHARD_BYTES = 24 * MIB + 4120
EIGHT = [f"rollout-{number}" for number in range(8)]


def timed(replica, verb, *, gives, **arguments):
    """A call on all shards, and the seconds until the last of them had its answer."""
    began = time.monotonic()
    calls = replica.start(verb, timeout=30, **arguments)
    assert [call.result() for call in calls] == [gives] * len(calls)
    return max(call.ended for call in calls) - began


@pytest.mark.long
def test_the_trainer_moves_on_while_its_only_reader_is_slow(start):
    """The reader goes on from the trainer's host copy, at its own prefix, and gets the version that it began."""
    cluster = start(retain=1)
    trainer, slow = cluster.replicas("trainer", "rollout-1")
    cluster.publish(trainer, 1)
    for worker in slow:
        worker.slow_down(pace_s=1.0)  # 8 s for a shard
    reads = slow.start("replicate", spec="latest", timeout=60)
    eventually(lambda: all(look["writing"]["passed"] > 2 for look in slow.looks()), "it has begun")
    took_s = timed(trainer, "unpublish", gives=None)
    is_reading = not any(read.is_over for read in reads)
    cluster.write(trainer, 2)
    assert trainer.call("publish", version=2) == 2
    release(slow)
    assert [read.result() for read in reads] == [1, 1]
    cluster.judge(slow, 1)
    assert is_reading
    eventually(lambda: not cluster.versions()[1].host_copies, "the copy of 1 is released once nobody reads it")
    assert took_s < 5.0  # one copy in memory, on machines under load; without it, 8 s


def test_the_trainer_closes_with_nobody_else_holding_the_latest(start):
    """Another reliable replica, which holds an older version, inherits it."""
    cluster = start(retain=1)
    trainer, heir = cluster.replicas("trainer", "rollout-1")
    cluster.publish(trainer, 1)
    assert heir.call("replicate", spec="latest") == 1
    cluster.publish(trainer, 2)
    timed(trainer, "close", gives=None)
    for worker in trainer:
        worker.memory.words[:] = 0  # the caller's alone from now on
    cluster.judge(heir, 1)  # untouched: the copy lies beside it
    (late,) = cluster.replicas("rollout-2", reliable=False)
    assert late.call("replicate", spec="latest") == 2
    cluster.judge(late, 2)
    assert set(late.received()) == {"rollout-1"}
    assert heir.call("update", spec="latest") == 2
    cluster.judge(heir, 2)


def test_the_limit_on_host_memory_is_a_refusal_that_loses_nothing(start):
    cluster = start(retain=1)
    (trainer,) = cluster.replicas("trainer", host_bytes=cluster.shard_bytes - 1)
    cluster.publish(trainer, 1)
    found = [call.outcome() for call in trainer.start("unpublish", timeout=30)]
    assert [type(each) for each in found] == [tensorhub.HostMemoryFull] * 2, found
    assert "host_bytes" in found[0].hint
    (reader,) = cluster.replicas("rollout-1")
    assert reader.call("replicate", spec="latest") == 1  # it is still served
    cluster.judge(reader, 1)
    cluster.publish(trainer, 2)  # and now somebody else keeps it
    assert [look["statistics"]["host_bytes"] for look in trainer.looks()] == [0, 0]


def test_an_update_after_a_prefetch_is_a_local_copy(start):
    cluster = start(retain=1)
    trainer, rollout = cluster.replicas("trainer", "rollout-1")
    cluster.publish(trainer, 1)
    assert rollout.call("replicate", spec="latest") == 1
    for each in rollout:
        each.ask("prefetch", spec="latest").result()
    assert rollout.call("update", spec="prefetched") == 1
    cluster.publish(trainer, 2)
    eventually(lambda: "rollout-1" in cluster.versions()[2].host_copies, "it is fetched ahead")
    eventually(lambda: [worker.copies for worker in cluster.workers("rollout-1")] == [(2,), (2,)], "by both shards")
    cluster.judge(rollout, 1)  # and what it computes with is untouched
    before = rollout.received()
    timed(rollout, "update", gives=2, spec="prefetched")
    assert rollout.received() == before
    cluster.judge(rollout, 2)


@pytest.mark.long
def test_one_copy_crosses_into_a_site(start):
    """Four replicas of another site: what they get comes across once, whoever asks first."""
    cluster = start(retain=1)
    (trainer,) = cluster.replicas("trainer", site="a")
    far = cluster.replicas("rollout-1", "rollout-2", "rollout-3", "rollout-4", site="b")
    cluster.publish(trainer, 1)
    calls = [call for replica in far for call in replica.start("replicate", spec="latest", timeout=60)]
    assert [call.result() for call in calls] == [1] * 8
    for replica in far:
        cluster.judge(replica, 1)
    across = sum(replica.received().get("trainer", 0) for replica in far) / cluster.size_bytes
    eventually(
        lambda: cluster.versions()[1].cross_site_bytes.get("b") == round(across * cluster.size_bytes), "it is counted"
    )
    assert across == 1.0


needs_sealed = pytest.mark.skipif(bool(sealed.why_not()), reason=sealed.why_not() or "there")


@pytest.fixture
def begun(start):
    """A trainer that is reached over sockets, where a test can hold it, and eight rollouts that could map."""
    cluster = start(shards=1, shard_bytes=SHARD_BYTES)
    trainer = cluster.replica("trainer", transports=("tcp",), prefetch="never")
    rollouts = cluster.replicas(*EIGHT, transports=("local", "tcp"), prefetch="never")
    return cluster, trainer, rollouts


def fetch_ahead(rollouts):
    """All of them want the newest version."""
    for asked in [replica[0].ask("prefetch", spec="latest") for replica in rollouts]:
        asked.result()


def wait_until_all_have(cluster, rollouts):
    """Each of them has a whole copy, and no read goes on."""

    def have():
        return all(worker.copies for each in rollouts for worker in cluster.workers(each.name))

    eventually(have, "all have a copy")
    eventually(lambda: not cluster.view().transfers(), "and no read goes on")


def memories(rollouts):
    """The host copies that these processes have mapped: the size of each, by what the kernel calls it."""
    found = {}
    for replica in rollouts:
        folder = Path(f"/proc/{replica[0].process.pid}/map_files")
        for each in folder.iterdir():
            try:
                status, name = os.stat(each), os.readlink(each)
            except FileNotFoundError:  # unmapped since the folder was read
                continue
            if "memfd:tensorhub" in name and status.st_size >= MIB:
                found[status.st_dev, status.st_ino] = status.st_size
    return found


def counted(rollouts):
    return sum(each[0].look()["statistics"]["host_bytes"] for each in rollouts)


def sent(trainer):
    return trainer[0].look()["statistics"]["sent_bytes"]


@pytest.mark.long
@needs_sealed
def test_eight_workers_fetch_a_version_once_and_have_it_once_in_memory(begun):
    cluster, trainer, rollouts = begun
    cluster.publish(trainer, 1)
    fetch_ahead(rollouts)
    wait_until_all_have(cluster, rollouts)
    assert sent(trainer) == SHARD_BYTES
    assert [each.received() for each in rollouts].count({"trainer": SHARD_BYTES}) == 1
    assert list(memories(rollouts).values()) == [SHARD_BYTES]
    assert counted(rollouts) == SHARD_BYTES
    for each in [replica.start("update", spec="latest") for replica in rollouts]:
        assert [call.result() for call in each] == [1]
    for replica in rollouts:
        cluster.judge(replica, 1)
    assert sent(trainer) == SHARD_BYTES
    eventually(lambda: not memories(rollouts), "once nobody needs it its memory is given back")
    eventually(lambda: counted(rollouts) == 0, "and nobody counts it")


@pytest.mark.long
@needs_sealed
def test_the_one_that_fetches_is_killed_half_way(begun):
    """Another one fetches, at once; nobody hangs, and it is in memory once."""
    cluster, trainer, rollouts = begun
    cluster.publish(trainer, 1)
    trainer[0].hold("reading", after=3)
    fetch_ahead(rollouts)
    trainer[0].wait_until_held("reading")
    (transfer,) = eventually(lambda: cluster.view().transfers(), "one of them fetches")
    (victim,) = [replica for replica in rollouts if replica.name == transfer.target]
    victim.kill()
    left = [replica for replica in rollouts if replica is not victim]
    eventually(lambda: any(t.target in [r.name for r in left] for t in cluster.view().transfers()), "another one does")
    trainer[0].release("reading")
    wait_until_all_have(cluster, left)
    assert sent(trainer) < 2 * SHARD_BYTES + 4 * MIB
    assert list(memories(left).values()) == [SHARD_BYTES]
    for replica in left:
        assert replica.call("update", spec="latest") == 1
        cluster.judge(replica, 1)
