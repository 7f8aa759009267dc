"""A trainer that is killed, closes, or waits for its rollouts: no version is lost but its own, and it goes on."""

import pytest

from .midway import held_midway, release

pytestmark = pytest.mark.processes

SAID = {"step": 1, "loss": 0.25, "notes": "é" * 4000}


def test_one_sigkill_of_the_trainer_loses_no_version_but_its_own(start):
    """It had just published 2. Both rollouts call update within its lease, and hold what they held, bit for bit."""
    cluster = start(retain=1, keep_established=True)
    trainer, first, second = cluster.replicas("trainer", "rollout-1", "rollout-2")
    cluster.publish(trainer, 1)
    assert first.call("replicate", spec="latest") == 1
    assert second.call("replicate", spec="latest") == 1
    cluster.publish(trainer, 2)
    trainer.kill()
    calls = [*first.start("update", spec="latest", timeout=60), *second.start("update", spec="latest", timeout=60)]
    assert [call.result() for call in calls] == [1, 1, 1, 1]
    cluster.judge(first, 1)
    cluster.judge(second, 1)
    assert [look["version"] for look in (*first.looks(), *second.looks())] == [1, 1, 1, 1]
    assert cluster.versions()[1].is_latest
    (late,) = cluster.replicas("rollout-3")
    assert late.call("replicate", spec="latest", timeout=60) == 1
    cluster.judge(late, 1)


@pytest.mark.parametrize("is_midway", [False, pytest.param(True, marks=pytest.mark.long)])
def test_four_rollouts_go_on_with_what_they_hold_when_the_trainer_is_killed(start, is_midway):
    """Their updates do not wait for its lease, which is 10 s. One that has begun to overwrite its tensors does."""
    cluster = start(lease_s=10, report_s=1.0, retain=1, shards=1)
    trainer, first, *others = cluster.replicas("trainer", *(f"rollout-{number}" for number in range(1, 5)))
    cluster.publish(trainer, 1)
    for rollout in (first, *others):
        assert rollout.call("replicate", spec="latest") == 1
    cluster.publish(trainer, 2)
    begun = held_midway(cluster, first, verb="update") if is_midway else []
    killed = trainer.kill()
    calls = [call for rollout in others for call in rollout.start("update", spec="latest")]
    calls += first.start("update", spec="latest") if not is_midway else []
    assert [call.result() for call in calls] == [1] * len(calls)
    longest_s = max(call.ended - killed for call in calls)
    assert longest_s < cluster.lease_s / 2
    if is_midway:
        release(first)
        assert [call.result() for call in begun] == [1]
        assert begun[0].ended - killed > cluster.lease_s / 2
    else:
        shown = next(each.call for each in cluster.view().replicas("policy") if each.name == "rollout-1")
        assert "rollout-1 keeps version 1: no source of version 2 of policy has answered for 2 s" in shown.waiting_for
        assert "keeps version 1: no source of version 2 of policy has answered" in first[0].log
    again = first.start("update", spec="latest")
    assert [call.result() for call in again] == [1]
    for rollout in (first, *others):
        cluster.judge(rollout, 1)


@pytest.mark.long
def test_a_rollout_that_is_killed_is_waited_for_until_its_lease_ends(start):
    cluster = start(lease_s=3)
    trainer, quick, dead = cluster.replicas("trainer", "quick", "dead")
    cluster.publish(trainer, 1)
    for rollout in (quick, dead):
        assert rollout.call("replicate", spec="latest") == 1
    cluster.publish(trainer, 2)
    waiting = trainer.start("wait_held", version=2)
    assert quick.call("update", spec="latest") == 2
    half = trainer.start("wait_held", version=2, fraction=0.5)
    assert [tuple(call.result()) for call in half] == [("quick",)] * cluster.shards
    assert not any(call.is_over for call in waiting)
    killed = dead.kill()
    assert [tuple(call.result()) for call in waiting] == [("quick",)] * cluster.shards
    took_s = max(call.ended for call in waiting) - killed
    assert took_s < cluster.lease_s + 2.0


@pytest.mark.long
def test_a_trainer_that_is_killed_goes_on_above_what_it_had_claimed(start):
    """It dies between unpublish and publish, and the server with it; it is filled again, and asks for its number."""
    cluster = start(lease_s=3)
    trainer, rollout = cluster.replicas("trainer", "rollout-1")
    cluster.write(trainer, 4)
    assert trainer.call("publish", version=4, metadata=SAID) == 4
    assert rollout.call("replicate", spec="latest") == 4
    trainer.call("unpublish")
    trainer.kill()
    cluster.server.kill()
    cluster.restart_server()
    assert cluster.view().next_version("policy", timeout=30) == 5
    (again,) = cluster.replicas("trainer")
    assert again.call("replicate", spec="latest") == 4
    cluster.judge(again, 4)
    assert [look["metadata"] for look in again.looks()] == [SAID] * cluster.shards  # it outlives publisher and server
    cluster.publish(again, cluster.view().next_version("policy"))
    assert rollout.call("update", spec="latest") == 5
    cluster.judge(rollout, 5)
