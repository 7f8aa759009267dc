"""One shard of a replica dies in mid-update: the other is told in bounded time, serves nothing, and tries again."""

import pytest

import tensorhub

from .cluster import Replica
from .midway import held_midway
from .process import Died, eventually

pytestmark = pytest.mark.processes


def test_one_shard_is_killed_in_mid_update_and_the_other_is_told_and_tries_again(start):
    cluster = start()
    trainer, rollout = cluster.replicas("trainer", "rollout-1")
    cluster.publish(trainer, 1)
    assert rollout.call("replicate", spec="latest") == 1
    cluster.publish(trainer, 2)
    calls = held_midway(cluster, rollout, verb="update")
    killed = rollout[1].kill()
    survivor = rollout[0]
    with pytest.raises(tensorhub.GroupIncomplete, match="shard 1 of rollout-1"):
        calls[0].result()
    took_s = calls[0].ended - killed
    assert took_s < cluster.lease_s + 1.5
    assert isinstance(calls[1].outcome(), Died)
    survivor.release()
    assert survivor.look()["version"] is None
    eventually(lambda: cluster.states("rollout-1") == {0: "poisoned"}, "the survivor says that it is poisoned")
    with pytest.raises(tensorhub.UsageError, match="poisoned"):
        survivor.call("publish", version=3, timeout=5)
    assert not cluster.has(survivor, 0, 2)
    successor = cluster.worker("rollout-1", 1)
    whole = Replica("rollout-1", [survivor, successor])
    assert whole.call("update", spec="latest") == 2
    cluster.judge(whole, 2)


@pytest.mark.long
def test_a_worker_that_was_replaced_while_it_stood_still_does_no_harm(start):
    """SIGSTOP for longer than a lease; meanwhile somebody else becomes that shard. Back again, it is told so."""
    cluster = start()
    trainer, rollout = cluster.replicas("trainer", "rollout-1")
    cluster.publish(trainer, 1)
    assert rollout.call("replicate", spec="latest") == 1
    former = rollout[0]
    former.stop()
    eventually(lambda: cluster.is_silent(former.name), "the server misses its reports")
    successor = cluster.worker("rollout-1", 0)  # waits until the lease has ended, although the line is still open
    whole = Replica("rollout-1", [successor, rollout[1]])
    assert whole.call("update", spec="latest") == 1
    cluster.publish(trainer, 2)
    former.go_on()
    call = former.start("update", spec="latest", timeout=10)
    with pytest.raises(tensorhub.ShardTaken, match="another live worker"):
        call.result()
    assert whole.call("update", spec="latest") == 2
    cluster.judge(whole, 2)
    assert cluster.has(former, 0, 1)
