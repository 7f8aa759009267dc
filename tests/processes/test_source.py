"""A source that dies or falls silent in mid-transfer: its reader goes on elsewhere, from where it was."""

import time

import pytest

from .memory import CHUNK_BYTES
from .midway import STREAMS, held_midway, read_again, release
from .process import eventually

pytestmark = pytest.mark.processes

SILENCE_S = 5.0  # after which the tcp transport takes a peer for lost


@pytest.mark.parametrize("percent", [10, 50, 75])
def test_the_source_is_killed_and_another_one_takes_over(start, figures, percent):
    cluster = start()
    trainer, first, target = cluster.replicas("trainer", "rollout-1", "rollout-2")
    cluster.publish(trainer, 1)
    assert first.call("replicate", spec="latest") == 1
    calls, at = held_midway(cluster, target, percent=percent)
    assert cluster.sources("rollout-2") == {0: "rollout-1", 1: "rollout-1"}
    killed = first.kill()
    release(target)
    assert [call.result() for call in calls] == [1, 1]
    took_s = max(call.ended for call in calls) - killed
    cluster.judge(target, 1)
    again, received = read_again(target), target.received()
    assert again <= STREAMS * cluster.shards
    assert set(received) == {"rollout-1", "trainer"}
    assert sum(received.values()) <= cluster.size_bytes + again * CHUNK_BYTES
    line = f"source killed at {at:.0f} %: re-read {again} of {cluster.chunks} chunks"
    figures(
        f"{line}, finished from trainer in {took_s:.1f} s",
        killed_at_percent=at,
        chunks_read_again=again,
        chunks=cluster.chunks,
        took_s=took_s,
        received=received,
    )


def test_a_source_that_is_itself_filling_is_killed(start, figures):
    """The trainer serves the first reader, the first serves the second: the chain closes over the gap."""
    cluster = start()
    trainer, first, second = cluster.replicas("trainer", "rollout-1", "rollout-2")
    cluster.publish(trainer, 1)
    first_calls, at = held_midway(cluster, first, percent=50)
    second_calls = second.start("replicate", spec="latest")
    eventually(lambda: cluster.sources("rollout-2") == {0: "rollout-1", 1: "rollout-1"}, "the chain")
    eventually(  # how many chunks there are for it depends on how far the first's streams are apart
        lambda: all(look["writing"]["passed"] > 0 for look in second.looks()), "the second reads behind the first"
    )
    killed = first.kill()
    assert [call.result() for call in second_calls] == [1, 1]
    took_s = max(call.ended for call in second_calls) - killed
    assert all(call.outcome() is not None for call in first_calls)
    cluster.judge(second, 1)
    again, received = read_again(second), second.received()
    assert again <= STREAMS * cluster.shards
    assert set(received) == {"rollout-1", "trainer"}
    line = f"filling source killed at {at:.0f} %: its reader re-read {again} of {cluster.chunks} chunks, "
    figures(f"{line}finished from trainer in {took_s:.1f} s", chunks_read_again=again, took_s=took_s, received=received)


def test_a_silent_source_is_left_within_the_silence_limit(start, figures):
    """SIGSTOP: the connection stays, and nothing comes. Later it goes on, and what it serves is right."""
    cluster = start()
    trainer, first, target = cluster.replicas("trainer", "rollout-1", "rollout-2")
    cluster.publish(trainer, 1)
    assert first.call("replicate", spec="latest") == 1
    calls, at = held_midway(cluster, target, percent=25)
    stopped = max([worker.stop() for worker in first])
    release(target)
    assert [call.result() for call in calls] == [1, 1]
    took_s = max(call.ended for call in calls) - stopped
    cluster.judge(target, 1)
    again, received = read_again(target), target.received()
    assert again <= STREAMS * cluster.shards
    assert set(received) == {"rollout-1", "trainer"}
    assert took_s < SILENCE_S + 4
    for worker in first:
        worker.go_on()
    assert first.call("update", spec="latest") == 1  # it rejoins by itself, and still holds what it held
    trainer.call("unpublish")
    target.call("unpublish")
    (late,) = cluster.replicas("rollout-3")
    assert late.call("replicate", spec=1) == 1
    cluster.judge(late, 1)
    assert set(late.received()) == {"rollout-1"}
    figures(
        f"source silent at {at:.0f} %: left and finished from trainer after {took_s:.1f} s, "
        f"re-read {again} of {cluster.chunks} chunks",
        took_s=took_s,
        chunks_read_again=again,
    )


def test_the_trainer_is_killed_and_rollouts_serve_latest_to_a_new_joiner(start, figures):
    cluster = start()
    trainer, *rollouts = cluster.replicas("trainer", "rollout-1", "rollout-2")
    cluster.publish(trainer, 7)
    for rollout in rollouts:
        assert rollout.call("replicate", spec="latest") == 7
    (joiner,) = cluster.replicas("rollout-3")
    killed = trainer.kill()
    calls = joiner.start("replicate", spec="latest")
    assert [call.result() for call in calls] == [7, 7]
    took_s = max(call.ended for call in calls) - killed
    cluster.judge(joiner, 7)
    received = joiner.received()
    assert "trainer" not in received
    eventually(lambda: not cluster.states("trainer"), "the trainer's lease has ended")
    latest = [version.version for version in cluster.view().versions("policy") if version.is_latest]
    (late,) = cluster.replicas("rollout-4")
    assert late.call("replicate", spec="latest") == 7
    cluster.judge(late, 7)
    assert latest == [7]
    figures(f"trainer killed: a joiner had `latest` {took_s:.1f} s later, from {received}", took_s=took_s)


def test_four_readers_that_start_together_cost_the_source_little_more_than_one_copy(start, figures):
    cluster = start()
    trainer, *readers = cluster.replicas("trainer", *(f"rollout-{number}" for number in range(1, 5)))
    cluster.publish(trainer, 1)
    calls = [call for reader in readers for call in reader.start("replicate", spec="latest")]
    began = time.monotonic()
    assert {call.result() for call in calls} == {1}
    took_s = max(call.ended for call in calls) - began
    for reader in readers:
        cluster.judge(reader, 1)
    sent = sum(look["statistics"]["sent_bytes"] for look in trainer.looks()) / cluster.size_bytes
    peers = sum(n for reader in readers for source, n in reader.received().items() if source != "trainer")
    total = sum(n for reader in readers for n in reader.received().values()) / cluster.size_bytes
    assert sent < 1.5
    assert total < 4.5
    figures(
        f"four readers of one source together: it sent {sent:.2f} copies, peers {peers / cluster.size_bytes:.2f}; "
        f"all had it after {took_s:.1f} s",
        source_sent_copies=sent,
        took_s=took_s,
    )


def test_a_dead_rack_of_relays_fails_no_update_beside_a_healthy_trainer(start, figures):
    """Ten relays are killed at once; more failures than a call may have, were each of them to be tried."""
    cluster = start(lease_s=20, shards=1)
    trainer, *relays = cluster.replicas("trainer", *(f"relay-{number:02}" for number in range(10)))
    (late,) = cluster.replicas("rollout")
    cluster.publish(trainer, 1)
    calls = [call for relay in relays for call in relay.start("replicate", spec="latest")]
    assert {call.result() for call in calls} == {1}
    for relay in relays:
        relay.kill()
    began = time.monotonic()
    assert late.call("replicate", spec="latest") == 1
    took_s = time.monotonic() - began
    cluster.judge(late, 1)
    assert set(late.received()) == {"trainer"}
    assert len(cluster.states("relay-00")) == 1  # all this within their lease
    figures(f"ten relays killed: the next reader had the version from the trainer {took_s:.1f} s later", took_s=took_s)
