"""Versions that are kept: host copies, heirs, the limit on host memory, prefetch, and copies that a host shares."""

import os
import time
from pathlib import Path

import pytest

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


@pytest.mark.long
@pytest.mark.skipif(bool(sealed.why_not()), reason=sealed.why_not() or "there")
def test_eight_workers_fetch_a_version_once_and_have_it_once_in_memory(start):
    cluster = start(shards=1, shard_bytes=SHARD_BYTES)
    trainer = cluster.replica("trainer", transports=("tcp",), prefetch="never")
    rollouts = cluster.replicas(*EIGHT, transports=("local", "tcp"), prefetch="never")

    def host_bytes():
        return sum(each[0].look()["statistics"]["host_bytes"] for each in rollouts)

    def have():
        return all(worker.copies for each in rollouts for worker in cluster.workers(each.name))

    cluster.publish(trainer, 1)
    for asked in [replica[0].ask("prefetch", spec="latest") for replica in rollouts]:
        asked.result()
    eventually(have, "all have a copy")
    eventually(lambda: not cluster.view().transfers(), "and no read goes on")
    assert [each.received() for each in rollouts].count({"trainer": SHARD_BYTES}) == 1
    assert list(memories(rollouts).values()) == [SHARD_BYTES]
    assert host_bytes() == SHARD_BYTES
    for each in [replica.start("update", spec="latest") for replica in rollouts]:
        assert [call.result() for call in each] == [1]
    for replica in rollouts:
        cluster.judge(replica, 1)
    assert trainer[0].look()["statistics"]["sent_bytes"] == SHARD_BYTES
    eventually(lambda: not memories(rollouts), "once nobody needs it its memory is given back")
    eventually(lambda: host_bytes() == 0, "and nobody counts it")
