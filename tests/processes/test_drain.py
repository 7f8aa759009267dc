"""A holder takes its promise back, changes what it has promised, or runs out of time: no wrong byte is accepted."""

import random
import time

import pytest

import tensorhub

from .midway import held_midway, release
from .process import LATE_S, eventually

pytestmark = pytest.mark.processes

ROUND_TRIPS_S = 4.0  # a lease that ended must still be noticed and told, by machines under load


def test_a_reader_that_stands_still_cannot_keep_its_source_and_accepts_no_byte_of_the_next_version(start):
    """SIGSTOP for longer than its lease, while the source's memory becomes another version. Then SIGCONT."""
    cluster = start()
    trainer, reader = cluster.replicas("trainer", "rollout-1")
    cluster.publish(trainer, 1)
    reads = held_midway(cluster, reader)
    for worker in reader:
        worker.stop()
    began = time.monotonic()
    calls = trainer.start("unpublish", timeout=30)
    assert [call.result() for call in calls] == [None, None]
    took_s = max(call.ended for call in calls) - began
    assert took_s < cluster.lease_s + ROUND_TRIPS_S
    cluster.write(trainer, 2)
    for worker in reader:
        worker.go_on()
    release(reader)
    assert trainer.call("publish", version=2) == 2
    found = [call.outcome() for call in reads]
    # what it read is gone for good: it is told so, or its call goes on to the next version, on both shards alike
    assert all(isinstance(each, tensorhub.Unavailable) for each in found) or found == [2, 2], found
    if found == [2, 2]:
        cluster.judge(reader, 2)
    assert reader.call("replicate", spec="latest") == 2
    cluster.judge(reader, 2)


@pytest.mark.parametrize("source", [pytest.param("trainer", marks=pytest.mark.long), "rollout-1"])
def test_unpublish_does_not_wait_for_a_slow_reader_when_there_is_another_holder(start, source):
    """The memory is overwritten as soon as unpublish returns: the reader must have left it by then."""
    cluster = start()
    (trainer,) = cluster.replicas("trainer", site="here" if source == "trainer" else "there")
    (holder,) = cluster.replicas("rollout-1", site="there" if source == "trainer" else "here")
    (slow,) = cluster.replicas("rollout-2", site="here")  # sources of the same site come first
    cluster.publish(trainer, 1)
    assert holder.call("replicate", spec="latest") == 1
    leaving, staying = (trainer, holder) if source == "trainer" else (holder, trainer)
    for worker in slow:
        worker.slow_down(pace_s=1.0)  # 8 s for a shard
    reads = slow.start("replicate", spec="latest")
    eventually(lambda: cluster.sources("rollout-2") == {0: leaving.name, 1: leaving.name}, "it reads where it should")
    eventually(lambda: all(look["writing"]["passed"] > 2 for look in slow.looks()), "it has begun")
    began = time.monotonic()
    calls = leaving.start("unpublish", timeout=30)
    assert [call.result() for call in calls] == [None, None]
    took_s = max(call.ended for call in calls) - began
    cluster.write(leaving, 2)
    is_reading = not any(read.is_over for read in reads)
    release(slow)
    assert [read.result() for read in reads] == [1, 1]
    cluster.judge(slow, 1)
    received = slow.received()
    assert is_reading
    assert took_s < 4.0  # with the reader: 8 s
    assert set(received) == {leaving.name, staying.name}


@pytest.mark.long
def test_close_ends_by_its_deadline_although_a_reader_stands_still(start):
    """The reader's lease is long, so it might still read. It gets nothing of what the memory becomes."""
    cluster = start(lease_s=20)
    trainer, reader = cluster.replicas("trainer", "rollout-1")
    cluster.publish(trainer, 1)
    reads = held_midway(cluster, reader, timeout=20)
    for worker in reader:
        worker.stop()
    began = time.monotonic()
    calls = trainer.start("close", timeout=2)
    assert [call.result() for call in calls] == [None, None]
    took_s = max(call.ended for call in calls) - began
    cluster.write(trainer, 2)
    for worker in reader:
        worker.go_on()
    release(reader)
    found = [call.outcome() for call in reads]
    assert all(isinstance(each, tensorhub.Unavailable | tensorhub.TransferError) for each in found), found
    assert took_s <= 2 + LATE_S
    assert [look["version"] for look in reader.looks()] == [None, None]


@pytest.mark.long
def test_impatient_callers_get_in_time_what_they_asked_for_or_an_error(start):
    """Forty calls of a few milliseconds up to a third of a second, while versions change; then a patient one."""
    cluster, dice = start(), random.Random(3)
    trainer, *rollouts = cluster.replicas("trainer", "rollout-1", "rollout-2")
    version = 1
    cluster.publish(trainer, version)
    refused = 0
    for attempt in range(40):
        if attempt % 10 == 9:
            version += 1
            cluster.publish(trainer, version)
        rollout = dice.choice(rollouts)
        calls = rollout.start("update", spec="latest", timeout=dice.choice([0.005, 0.03, 0.1, 0.3]))
        for shard, call in enumerate(calls):
            found = call.outcome()
            if isinstance(found, int):
                assert found == version
                assert cluster.has(rollout[shard], shard, found)
            else:
                assert isinstance(found, tensorhub.Unavailable | tensorhub.TransferError), found
                refused += 1
    for rollout in rollouts:
        assert rollout.call("update", spec="latest") == version
        cluster.judge(rollout, version)
    assert refused
