"""A source that dies, stops, hardly runs, or unpublishes in mid-transfer: its reader goes on elsewhere.

Over `tcp` the source sends. Over `local` and, where it is installed, `nixl` the reader takes: no process of the source
notices, and only the seal, the digests and the reader's own limit of silence protect it.
"""

import contextlib
import os
import signal
import threading

import pytest

from tensorhub.transport.nixl import probe

from .memory import CHUNK_BYTES
from .midway import STREAMS, held_midway, read_again, release
from .process import eventually

pytestmark = pytest.mark.processes

SILENCE_S = 5.0  # after which a transport takes a peer for lost
STOPPED_S, RUNNING_S = 4.5, 0.02  # never silent for that long, and it runs long enough to report and to send a little
no_nixl = pytest.mark.skipif(bool(probe.probe().why_not), reason=probe.probe().why_not or "it is here")
by_reader = ["local", pytest.param("nixl", marks=no_nixl)]


def bytes_by_transport(replica):
    """Of all shards together."""
    total = {}
    for look in replica.looks():
        for scheme, size_bytes in look["statistics"]["bytes_by_transport"].items():
            total[scheme] = total.get(scheme, 0) + size_bytes
    return total


def reads_first_midway(cluster, way, percent=50, **options):
    """Version 1 is on a trainer and on rollout-1, of which rollout-2 reads over that transport, and stands still."""
    transports = way if way == "tcp" else f"{way},tcp"
    trainer, first, target = cluster.replicas("trainer", "rollout-1", "rollout-2", transports=transports)
    cluster.publish(trainer, 1)
    assert first.call("replicate", spec="latest") == 1
    calls = held_midway(cluster, target, percent=percent, **options)
    assert set(cluster.sources("rollout-2").values()) == {"rollout-1"}
    return trainer, first, target, calls


@pytest.mark.parametrize("way", ["tcp", *by_reader])
def test_the_source_is_killed_and_another_one_takes_over(start, way):
    cluster = start()
    _, first, target, calls = reads_first_midway(cluster, way)

    def ways():
        """As the readers' reports say."""
        return {(read.transport, bool(read.path)) for read in cluster.view().transfers() if read.target == "rollout-2"}

    eventually(lambda: ways() == {(way, True)}, "the way of its reads is shown")
    first.kill()
    release(target)
    assert [call.result() for call in calls] == [1, 1]
    cluster.judge(target, 1)
    again, received = read_again(target), target.received()
    assert again <= STREAMS * cluster.shards
    assert set(received) == {"rollout-1", "trainer"}
    assert sum(received.values()) <= cluster.size_bytes + again * CHUNK_BYTES
    assert set(bytes_by_transport(target)) == {way}, "the death of a source is no reason to leave the transport"


def test_a_source_that_is_itself_filling_is_killed(start):
    """The trainer serves the first reader, the first serves the second: the chain closes over the gap."""
    cluster = start()
    trainer, first, second = cluster.replicas("trainer", "rollout-1", "rollout-2")
    cluster.publish(trainer, 1)
    first_calls = held_midway(cluster, first, percent=50)
    second_calls = second.start("replicate", spec="latest")
    eventually(lambda: cluster.sources("rollout-2") == {0: "rollout-1", 1: "rollout-1"}, "the chain")
    eventually(  # how many chunks there are for it depends on how far the first's streams are apart
        lambda: all(look["writing"]["passed"] > 0 for look in second.looks()), "the second reads behind the first"
    )
    first.kill()
    assert [call.result() for call in second_calls] == [1, 1]
    assert all(call.outcome() is not None for call in first_calls)
    cluster.judge(second, 1)
    assert read_again(second) <= STREAMS * cluster.shards
    assert set(second.received()) == {"rollout-1", "trainer"}


@pytest.mark.parametrize("way", ["tcp", pytest.param("local", marks=pytest.mark.long)])
def test_a_silent_source_is_left_within_the_silence_limit(start, way):
    """SIGSTOP: the connection stays, and nothing comes. Later it goes on, and what it serves is right."""
    cluster = start()
    trainer, first, target, calls = reads_first_midway(cluster, way, percent=25)
    stopped = max([worker.stop() for worker in first])
    release(target)
    assert [call.result() for call in calls] == [1, 1]
    assert max(call.ended for call in calls) - stopped < SILENCE_S + 4
    cluster.judge(target, 1)
    assert set(target.received()) <= {"rollout-1", "trainer"}  # over local, its memory can be read to the end
    for worker in first:
        worker.go_on()
    assert first.call("update", spec="latest") == 1  # it rejoins by itself, and still holds what it held
    trainer.call("unpublish")
    target.call("unpublish")
    (late,) = cluster.replicas("rollout-3")
    assert late.call("replicate", spec=1) == 1
    cluster.judge(late, 1)
    assert set(late.received()) == {"rollout-1"}


@pytest.mark.parametrize("way", by_reader)
def test_memory_that_is_overwritten_after_unpublish_is_never_taken_for_the_version(start, way):
    """The reader is in the middle, and no message reaches it: what it copies from now on does not count."""
    cluster = start()
    trainer, target = cluster.replicas("trainer", "rollout-1", transports=f"{way},tcp")
    cluster.publish(trainer, 1)
    calls = held_midway(cluster, target, percent=50)
    for worker in target:
        worker.stop()
    assert [call.result() for call in trainer.start("unpublish", timeout=30)] == [None, None]
    cluster.write(trainer, 2)
    for worker in target:
        worker.go_on()
    release(target)
    assert trainer.call("publish", version=2) == 2
    assert not any(call.outcome() == 1 for call in calls), "no replica holds version 1 any more"
    assert target.call("replicate", spec="latest") == 2
    cluster.judge(target, 2)
    assert set(bytes_by_transport(target)) == {way}


@pytest.mark.long
def test_four_readers_that_start_together_cost_the_source_little_more_than_one_copy(start):
    cluster = start()
    trainer, *readers = cluster.replicas("trainer", *(f"rollout-{number}" for number in range(1, 5)))
    cluster.publish(trainer, 1)
    calls = [call for reader in readers for call in reader.start("replicate", spec="latest")]
    assert {call.result() for call in calls} == {1}
    for reader in readers:
        cluster.judge(reader, 1)
    sent = sum(look["statistics"]["sent_bytes"] for look in trainer.looks())
    assert sent < 1.5 * cluster.size_bytes
    assert sum(size for reader in readers for size in reader.received().values()) < 4.5 * cluster.size_bytes


@contextlib.contextmanager
def stop_and_go(worker):
    """SIGSTOP for most of the time, from now on."""
    is_over = threading.Event()

    def run():
        while not is_over.is_set():
            worker.stop()
            is_over.wait(STOPPED_S)
            worker.go_on()
            is_over.wait(RUNNING_S)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.long
@pytest.mark.parametrize("way", ["tcp", "local"])
def test_a_source_that_hardly_runs_is_left_for_an_idle_one(start, way):
    """The call's deadline is a small part of the time that this source alone would take."""
    cluster = start(shards=1, lease_s=10, patience_s=None)
    _, slow, target, (call,) = reads_first_midway(cluster, way, percent=25, timeout=20.0)
    with stop_and_go(slow[0]):
        eventually(lambda: slow[0].stops > 0, "it is stopped")
        release(target)
        assert call.result() == 1
    cluster.judge(target, 1)
    assert set(target.received()) == {"rollout-1", "trainer"}
    assert read_again(target) <= STREAMS


@pytest.mark.long
def test_a_source_that_has_forked_is_killed_and_left_at_once(start):
    """Its children live on, and keep no connection open."""
    cluster = start(lease_s=20)
    _, first, target, calls = reads_first_midway(cluster, "tcp")
    children = [worker.ask("fork").result() for worker in first]
    try:
        killed = first.kill()
        release(target)
        assert [call.result() for call in calls] == [1, 1]
        took_s = max(call.ended for call in calls) - killed
        eventually(lambda: all(not worker.connected for worker in cluster.workers("rollout-1")), "it is cut off")
        assert all(os.path.exists(f"/proc/{child}") for child in children)
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
    cluster.judge(target, 1)
    assert took_s < SILENCE_S - 1
