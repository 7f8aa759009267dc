"""The publisher is killed with its newest version: nobody gives up what is left for it, and nobody waits for it."""

import pytest

from .midway import held_midway, release
from .process import eventually

pytestmark = pytest.mark.processes


def two_versions(start, **keeps):
    """Two reliable rollouts hold 1, and the trainer has just published 2."""
    cluster = start(retain=1, **keeps)
    trainer, first, second = cluster.replicas("trainer", "rollout-1", "rollout-2")
    cluster.publish(trainer, 1)
    assert first.call("replicate", spec="latest") == 1
    assert second.call("replicate", spec="latest") == 1
    if keeps.get("keep_established"):
        eventually(lambda: copies(cluster, 1) == ("rollout-1",), "one replica has copied 1 ahead of need")
    cluster.publish(trainer, 2)
    return cluster, trainer, first, second


def copies(cluster, version):
    return next(found.host_copies for found in cluster.view().versions("policy") if found.version == version)


def latest(cluster):
    (model,) = cluster.view().status().models
    return model.latest


@pytest.mark.parametrize("keep_established", [True, False])
def test_one_sigkill_of_the_trainer_loses_no_version_but_its_own(start, figures, keep_established):
    """Both call update within the dead trainer's lease, and hold what they held, bit for bit."""
    cluster, trainer, first, second = two_versions(start, keep_established=keep_established)
    killed = trainer.kill()
    calls = [*first.start("update", spec="latest", timeout=60), *second.start("update", spec="latest", timeout=60)]
    assert [call.result() for call in calls] == [1, 1, 1, 1]
    took_s = max(call.ended for call in calls) - killed
    cluster.judge(first, 1)
    cluster.judge(second, 1)
    assert [look["version"] for look in (*first.looks(), *second.looks())] == [1, 1, 1, 1]
    assert latest(cluster) == 1
    (late,) = cluster.replicas("rollout-3")
    assert late.call("replicate", spec="latest", timeout=60) == 1
    cluster.judge(late, 1)
    figures(
        f"trainer killed with version 2, both rollouts go on with 1 after {took_s:.1f} s, lease {cluster.lease_s} s"
    )


def test_the_trainer_is_killed_while_both_are_being_filled(start, figures):
    """Both have written over 1: it is had back from the one copy that was made ahead of need."""
    cluster, trainer, first, second = two_versions(start, keep_established=True)
    first_calls, _ = held_midway(cluster, first, percent=40, verb="update")
    second_calls = second.start("update", spec="latest", timeout=60)
    eventually(lambda: all(look["writing"]["passed"] > 0 for look in second.looks()), "the second is written too")
    killed = trainer.kill()
    release(first)
    assert [call.result() for call in (*first_calls, *second_calls)] == [1, 1, 1, 1]
    took_s = max(call.ended for call in (*first_calls, *second_calls)) - killed
    cluster.judge(first, 1)
    cluster.judge(second, 1)
    figures(f"trainer killed in mid-transfer of version 2, both rollouts have 1 back after {took_s:.1f} s")


def test_a_trainer_that_closes_at_once_leaves_its_version_with_a_spot_rollout(start, figures):
    cluster = start(retain=1)
    (trainer,) = cluster.replicas("trainer")
    (spot,) = cluster.replicas("rollout-1", reliable=False)
    cluster.publish(trainer, 1)
    calls = trainer.start("close", timeout=60)
    assert [call.result() for call in calls] == [None, None]
    assert spot.call("replicate", spec="latest", timeout=30) == 1
    cluster.judge(spot, 1)
