"""A source that lives and brings next to nothing, beside one that could: its reader leaves it.

It is stopped for 4.5 of every 4.52 seconds: never for as long as a transport takes for silence, and it runs long
enough to report, to renew its lease and to send a few chunks.
"""

import contextlib
import threading

import pytest

from .midway import STREAMS, held_midway, read_again, release
from .process import eventually

pytestmark = pytest.mark.processes

STOPPED_S, RUNNING_S = 4.5, 0.02
DEADLINE_S = 20.0  # of a call that would take several times that beside such a source
ways = pytest.mark.parametrize("way", ["tcp", "local"])


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


@ways
def test_a_whole_source_that_hardly_runs_is_left_for_an_idle_one(start, figures, way):
    cluster = start(shards=1, lease_s=10, patience_s=None)
    trainer, slow, target = cluster.replicas("trainer", "rollout-1", "rollout-2", transports=way)
    cluster.publish(trainer, 1)
    assert slow.call("replicate", spec="latest") == 1
    (call,), at = held_midway(cluster, target, percent=25, timeout=DEADLINE_S)
    with stop_and_go(slow[0]):
        eventually(lambda: slow[0].stops > 0, "it is stopped")
        release(target)
        assert call.result() == 1
    cluster.judge(target, 1)
    again, received = read_again(target), target.received()
    assert set(received) == {"rollout-1", "trainer"}
    assert again <= STREAMS
    took_s = call.ended - call.asked
    share = received["trainer"] / cluster.size_bytes
    figures(
        f"{way}: a source stopped for {STOPPED_S} of every {STOPPED_S + RUNNING_S} s at {at:.0f} %: its reader had all "
        f"after {took_s:.1f} s, {share:.0%} of it from the trainer",
        took_s=took_s,
        chunks_read_again=again,
        received=received,
    )


@ways
def test_a_filling_source_that_hardly_runs_is_left_for_the_trainer(start, figures, way):
    """It waits for nobody: the trainer has everything for it. Its reader does not wait for it to wake up."""
    cluster = start(shards=1, lease_s=10, patience_s=None)
    trainer, slow, target = cluster.replicas("trainer", "rollout-1", "rollout-2", transports=way)
    cluster.publish(trainer, 1)
    (first,), _ = held_midway(cluster, slow, percent=50)
    (call,), at = held_midway(cluster, target, percent=25, timeout=DEADLINE_S)
    with stop_and_go(slow[0]):
        eventually(lambda: slow[0].stops > 0, "it is stopped")
        release(target)
        assert call.result() == 1
    release(slow)
    assert first.result() == 1
    cluster.judge(target, 1)
    cluster.judge(slow, 1)
    received = target.received()
    assert set(received) == {"rollout-1", "trainer"}
    took_s = call.ended - call.asked
    share = received["trainer"] / cluster.size_bytes
    figures(
        f"{way}: a filling source stopped for {STOPPED_S} of every {STOPPED_S + RUNNING_S} s at {at:.0f} %: its reader "
        f"had all after {took_s:.1f} s, {share:.0%} of it from the trainer",
        took_s=took_s,
        received=received,
    )
