"""Transports that read the source's memory by themselves, when the source dies, stops, or takes its promise back.

What `test_source.py` shows with sockets, over `local` and, where it is installed, `nixl`: nobody at the source notices
a read there, so what protects the reader is the seal, the digests, and its own limit of silence.
"""

import time

import pytest

from tensorhub.transport.nixl import probe

from .midway import STREAMS, held_midway, read_again, release
from .process import eventually

pytestmark = pytest.mark.processes

SILENCE_S = 5.0  # after which these transports take a peer for lost
no_nixl = pytest.mark.skipif(bool(probe.probe().why_not), reason=probe.probe().why_not or "it is here")
ways = pytest.mark.parametrize("way", ["local", pytest.param("nixl", marks=no_nixl)])


def bytes_by_transport(replica):
    """Of all shards together."""
    total = {}
    for look in replica.looks():
        for scheme, size_bytes in look["statistics"]["bytes_by_transport"].items():
            total[scheme] = total.get(scheme, 0) + size_bytes
    return total


@ways
def test_the_source_is_killed_and_another_one_takes_over(start, figures, way):
    cluster = start()
    trainer, first, target = cluster.replicas("trainer", "rollout-1", "rollout-2", transports=f"{way},tcp")
    cluster.publish(trainer, 1)
    assert first.call("replicate", spec="latest") == 1
    calls, at = held_midway(cluster, target, percent=50)
    assert cluster.sources("rollout-2") == {0: "rollout-1", 1: "rollout-1"}
    reads = [read for read in cluster.view().transfers() if read.target == "rollout-2"]
    assert {read.transport for read in reads} == {way}, "and the server knows"
    assert all(read.path for read in reads)
    killed = first.kill()
    release(target)
    assert [call.result() for call in calls] == [1, 1]
    took_s = max(call.ended for call in calls) - killed
    cluster.judge(target, 1)
    again, received = read_again(target), target.received()
    assert again <= STREAMS * cluster.shards
    assert set(received) == {"rollout-1", "trainer"}
    assert set(bytes_by_transport(target)) == {way}, "the death of a source is no reason to leave the transport"
    line = f"{way}: source killed at {at:.0f} %: re-read {again} of {cluster.chunks} chunks"
    figures(f"{line}, finished from trainer in {took_s:.1f} s", chunks_read_again=again, took_s=took_s)


@ways
def test_a_stopped_source_holds_nobody_up_for_longer_than_the_limit(start, figures, way):
    """SIGSTOP. Its memory can still be read, so a reader may even end; who waits for its word leaves it in time."""
    cluster = start()
    trainer, first, target = cluster.replicas("trainer", "rollout-1", "rollout-2", transports=f"{way},tcp")
    cluster.publish(trainer, 1)
    assert first.call("replicate", spec="latest") == 1
    calls, at = held_midway(cluster, target, percent=25)
    stopped = max([worker.stop() for worker in first])
    release(target)
    assert [call.result() for call in calls] == [1, 1]
    took_s = max(call.ended for call in calls) - stopped
    cluster.judge(target, 1)
    received = target.received()
    assert set(received) <= {"rollout-1", "trainer"}
    assert took_s < SILENCE_S + 4
    for worker in first:
        worker.go_on()
    eventually(lambda: set(cluster.states("rollout-1").values()) == {"holding"}, "it holds again")
    cluster.judge(first, 1)
    share = received.get("trainer", 0) / cluster.size_bytes
    figures(f"{way}: source stopped at {at:.0f} %: {took_s:.1f} s until the end, {share:.0%} from trainer")


@ways
def test_memory_that_is_overwritten_after_unpublish_is_never_taken_for_the_version(start, figures, way):
    """The reader is in the middle, and nobody can call it back: what it copies from now on does not count."""
    cluster = start()
    trainer, target = cluster.replicas("trainer", "rollout-1", transports=f"{way},tcp")
    cluster.publish(trainer, 1)
    calls, at = held_midway(cluster, target, percent=50)
    for worker in target:
        worker.stop()
    began = time.monotonic()
    leaving = trainer.start("unpublish", timeout=30)
    assert [call.result() for call in leaving] == [None, None]
    took_s = max(call.ended for call in leaving) - began
    cluster.write(trainer, 2)
    for worker in target:
        worker.go_on()
    release(target)
    assert trainer.call("publish", version=2) == 2
    assert not any(call.outcome() == 1 for call in calls), "nobody holds version 1 any more"
    assert target.call("replicate", spec="latest") == 2
    cluster.judge(target, 2)
    assert set(bytes_by_transport(target)) == {way}
    figures(
        f"{way}: reader stopped at {at:.0f} %: unpublish took {took_s:.2f} s, and no byte of what came after counted"
    )
