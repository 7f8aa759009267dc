"""A trainer that waits for its rollouts, and one that is killed and goes on: whoever dies meanwhile."""

import time

import pytest

import tensorhub

pytestmark = pytest.mark.processes


def test_a_rollout_that_is_killed_is_waited_for_until_its_lease_ends(start, figures):
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
    figures(f"wait_held: a killed rollout was waited for {took_s:.1f} s, lease {cluster.lease_s} s", took_s=took_s)


def test_the_server_is_killed_while_a_trainer_waits_for_its_rollouts(start):
    """What nobody has told the new one yet does not let the trainer go on."""
    cluster = start(lease_s=3)
    trainer, rollout = cluster.replicas("trainer", "rollout-1")
    cluster.publish(trainer, 1)
    assert rollout.call("replicate", spec="latest") == 1
    cluster.publish(trainer, 2)
    waiting = trainer.start("wait_held", version=2)
    cluster.server.kill()
    cluster.restart_server()
    with pytest.raises(tensorhub.DeadlineExceeded, match=r"missing: rollout-1\[0\] \(holds 1\)"):
        trainer[0].start("wait_held", version=2, timeout=cluster.lease_s + 3).result()
    assert not any(call.is_over for call in waiting)
    assert rollout.call("update", spec="latest") == 2
    assert [tuple(call.result()) for call in waiting] == [("rollout-1",)] * cluster.shards


def test_a_trainer_that_is_killed_goes_on_above_what_it_had_claimed(start, figures):
    """It dies between unpublish and publish, and the server with it; it is filled again, and asks for its number."""
    cluster = start(lease_s=3)
    trainer, rollout = cluster.replicas("trainer", "rollout-1")
    cluster.publish(trainer, 4)
    assert rollout.call("replicate", spec="latest") == 4
    trainer.call("unpublish")
    killed = trainer.kill()
    cluster.server.kill()
    cluster.restart_server()
    assert cluster.view().next_version("policy", timeout=30) == 5
    took_s = time.monotonic() - killed
    (again,) = cluster.replicas("trainer")
    assert again.call("replicate", spec="latest") == 4
    cluster.judge(again, 4)
    cluster.publish(again, cluster.view().next_version("policy"))
    assert rollout.call("update", spec="latest") == 5
    cluster.judge(rollout, 5)
    figures(f"next_version of a restarted server: known {took_s:.1f} s after the kill, lease {cluster.lease_s} s")
