"""Calls whose time runs out in mid-transfer end in time, leave nothing half-done that counts, and harm no peer."""

import random
import time

import pytest

import tensorhub

from .midway import STREAMS, held_midway, read_again, release
from .process import LATE_S, eventually

pytestmark = pytest.mark.processes


def test_close_ends_by_its_deadline_although_a_reader_stands_still(start, figures):
    """The reader's lease is long, so it might still read. It gets nothing of what the memory becomes."""
    cluster = start(lease_s=20)
    trainer, reader = cluster.replicas("trainer", "rollout-1")
    cluster.publish(trainer, 1)
    reads, at = held_midway(cluster, reader, timeout=20)
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
    figures(
        f"close(timeout=2) with a reader stopped at {at:.0f} % took {took_s:.2f} s; "
        f"the reader then got {type(found[0]).__name__}",
        took_s=took_s,
    )


def test_a_source_whose_own_fill_runs_out_of_time_does_not_stop_its_reader(start, figures):
    cluster = start()
    trainer, first, second = cluster.replicas("trainer", "rollout-1", "rollout-2")
    cluster.publish(trainer, 1)
    first_calls, at = held_midway(cluster, first, percent=50, timeout=4)
    second_calls = second.start("replicate", spec="latest")
    eventually(lambda: cluster.sources("rollout-2") == {0: "rollout-1", 1: "rollout-1"}, "the chain")
    found = [call.outcome() for call in first_calls]
    assert all(isinstance(each, tensorhub.Unavailable) for each in found), found
    release(first)
    retry = first.start("replicate", spec="latest")  # writes its buffer again, as soon as nobody reads from it
    assert [call.result() for call in second_calls] == [1, 1]
    assert [call.result() for call in retry] == [1, 1]
    cluster.judge(first, 1)
    cluster.judge(second, 1)
    again = read_again(second)
    assert again <= STREAMS * cluster.shards
    figures(f"filling source gave up at {at:.0f} %: its reader re-read {again} of {cluster.chunks} chunks; both right")


def test_impatient_callers_get_in_time_what_they_asked_for_or_an_error(start, figures):
    """Forty calls of a few milliseconds up to a third of a second, while versions change; then a patient one."""
    cluster, dice = start(), random.Random(3)
    trainer, *rollouts = cluster.replicas("trainer", "rollout-1", "rollout-2")
    version = 1
    cluster.publish(trainer, version)
    good = bad = 0
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
                good += 1
            else:
                assert isinstance(found, tensorhub.Unavailable | tensorhub.TransferError), found
                bad += 1
    for rollout in rollouts:
        assert rollout.call("update", spec="latest") == version
        cluster.judge(rollout, version)
    assert bad
    figures(f"impatient callers: {good} calls succeeded with right bytes, {bad} ended in time with an error")
