"""A holder takes its promise back: readers who die, stop or dawdle do not keep it, and read on elsewhere."""

import time

import pytest

import tensorhub

from .midway import held_midway, read_again, release
from .process import Died, eventually

pytestmark = pytest.mark.processes

ROUND_TRIPS_S = 4.0  # a lease that ended must still be noticed and told, by machines under load


def draining(cluster, replica):
    """Begin to unpublish, and wait until the server knows it."""
    calls = replica.start("unpublish", timeout=30)
    eventually(lambda: set(cluster.states(replica.name).values()) == {"withdrawing"}, f"{replica.name} withdraws")
    return calls


def test_the_reader_is_killed_while_its_source_drains(start, figures):
    cluster = start()
    trainer, reader = cluster.replicas("trainer", "rollout-1")
    cluster.publish(trainer, 1)
    reads, at = held_midway(cluster, reader)
    calls = draining(cluster, trainer)
    assert not any(call.is_over for call in calls)  # nobody else holds it: the reader is awaited
    killed = reader.kill()
    assert [call.result() for call in calls] == [None, None]
    took_s = max(call.ended for call in calls) - killed
    found = [call.outcome() for call in reads]
    assert all(isinstance(each, Died) for each in found), found
    assert took_s < cluster.lease_s + ROUND_TRIPS_S
    cluster.publish(trainer, 2)  # and the trainer goes on
    line = f"reader killed at {at:.0f} % while its source drained: unpublish returned {took_s:.2f} s later"
    figures(f"{line}, the lease is {cluster.lease_s} s", took_s=took_s, lease_s=cluster.lease_s)


def test_a_reader_that_stands_still_cannot_keep_its_source_and_accepts_no_byte_of_the_next_version(start, figures):
    """SIGSTOP for longer than its lease, while the source's memory becomes another version. Then SIGCONT."""
    cluster = start()
    trainer, reader = cluster.replicas("trainer", "rollout-1")
    cluster.publish(trainer, 1)
    reads, at = held_midway(cluster, reader)
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
    figures(
        f"reader stopped at {at:.0f} %: unpublish returned after {took_s:.2f} s, the lease is {cluster.lease_s} s; "
        f"back again, the reader got {found[0]!r:.40} and then version 2",
        took_s=took_s,
    )


@pytest.mark.parametrize("source", ["trainer", "rollout-1"])
def test_unpublish_does_not_wait_for_a_slow_reader_when_there_is_another_holder(start, figures, source):
    """The memory is overwritten as soon as unpublish returns: the reader must have left it by then."""
    cluster = start()
    (trainer,) = cluster.replicas("trainer", site="here" if source == "trainer" else "there")
    (holder,) = cluster.replicas("rollout-1", site="there" if source == "trainer" else "here")
    (slow,) = cluster.replicas("rollout-2", site="here")  # sources of the same site come first
    cluster.publish(trainer, 1)
    assert holder.call("replicate", spec="latest") == 1
    leaving, staying = (trainer, holder) if source == "trainer" else (holder, trainer)
    for worker in slow:
        worker.slow_down(pace_s=0.5)  # 8 s for a shard
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
    again, received = read_again(slow), slow.received()
    assert is_reading
    assert took_s < 4.0  # with the reader: 8 s
    assert set(received) == {leaving.name, staying.name}
    figures(
        f"unpublish of {source} with a slow reader: {took_s:.2f} s; it re-read {again} of {cluster.chunks} chunks and "
        f"ended with {received[staying.name] / cluster.size_bytes:.0%} from {staying.name}",
        took_s=took_s,
        chunks_read_again=again,
    )


def test_close_while_peers_read_leaves_in_order_and_the_reader_goes_on(start, figures):
    cluster = start()
    trainer, first, reader = cluster.replicas("trainer", "rollout-1", "rollout-2")
    cluster.publish(trainer, 1)
    assert first.call("replicate", spec="latest") == 1
    for worker in reader:
        worker.slow_down(pace_s=0.1)
    reads = reader.start("replicate", spec="latest")
    eventually(lambda: cluster.sources("rollout-2") == {0: "rollout-1", 1: "rollout-1"}, "it reads from rollout-1")
    eventually(lambda: all(look["writing"]["passed"] > 2 for look in reader.looks()), "it has begun")
    began = time.monotonic()
    calls = first.start("close", timeout=20)
    assert [call.result() for call in calls] == [None, None]
    took_s = max(call.ended for call in calls) - began
    for worker in first:
        worker.memory.words[:] = 0  # the caller's alone from now on
    release(reader)
    assert [read.result() for read in reads] == [1, 1]
    cluster.judge(reader, 1)
    assert "left without" not in first[0].log + first[1].log
    figures(f"close() with a reader in mid-transfer took {took_s:.2f} s; the reader ended with the right bytes")
