"""One shard of a replica dies in mid-update: the other is told in bounded time, serves nothing, and tries again."""

import pytest

import tensorhub

from .cluster import Replica
from .midway import held_midway, release
from .process import Died, eventually

pytestmark = pytest.mark.processes


def test_one_shard_is_killed_in_mid_update_and_the_other_is_told_and_tries_again(start, figures):
    cluster = start()
    trainer, rollout = cluster.replicas("trainer", "rollout-1")
    cluster.publish(trainer, 1)
    assert rollout.call("replicate", spec="latest") == 1
    cluster.publish(trainer, 2)
    calls, at = held_midway(cluster, rollout, verb="update")
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
    line = f"shard killed at {at:.0f} % of an update: the other got GroupIncomplete {took_s:.2f} s later"
    figures(f"{line}, the lease is {cluster.lease_s} s; both had it on the retry", took_s=took_s)


def test_one_shard_is_killed_before_it_comes_to_the_call_and_the_other_waits_no_longer_than_its_lease(start, figures):
    cluster = start()
    trainer, rollout = cluster.replicas("trainer", "rollout-1")
    cluster.publish(trainer, 1)
    assert rollout.call("replicate", spec="latest") == 1
    cluster.publish(trainer, 2)
    survivor, killed = rollout[0], rollout[1].kill()
    (call,) = Replica("rollout-1", [survivor]).start("update", spec="latest", timeout=60)
    with pytest.raises(tensorhub.GroupIncomplete, match="shard 1 of rollout-1"):
        call.result()
    took_s = call.ended - killed
    assert took_s < cluster.lease_s + 1.5
    whole = Replica("rollout-1", [survivor, cluster.worker("rollout-1", 1)])
    assert whole.call("update", spec="latest") == 2
    cluster.judge(whole, 2)
    figures(f"shard killed before an update: the other got GroupIncomplete {took_s:.2f} s later", took_s=took_s)


def test_one_shard_of_the_trainer_is_killed_while_it_publishes(start, figures):
    """Nobody may get a version of which one shard was never published; the trainer comes back with a higher one."""
    cluster = start()
    trainer, rollout = cluster.replicas("trainer", "rollout-1")
    cluster.publish(trainer, 1)
    assert rollout.call("replicate", spec="latest") == 1
    trainer.call("unpublish")
    cluster.write(trainer, 2)
    trainer[1].hold("reading", after=3)  # it hashes its tensors, and stands still
    calls = trainer.start("publish", version=2, timeout=4)
    trainer[1].wait_until_held("reading")
    killed = trainer[1].kill()
    assert rollout.call("update", spec="latest") == 1
    with pytest.raises(tensorhub.Unavailable):
        calls[0].result()
    took_s = calls[0].ended - killed
    assert took_s < 5
    successor = cluster.worker("trainer", 1)
    whole = Replica("trainer", [trainer[0], successor])
    cluster.write(whole, 2)
    assert whole.call("publish", version=2) == 2  # the same number: it never existed
    assert rollout.call("update", spec="latest") == 2
    cluster.judge(rollout, 2)
    figures(
        f"trainer's shard killed in mid-publish: the other was told {took_s:.2f} s later; both published on the retry"
    )


def test_a_shard_that_stands_still_longer_than_its_lease_comes_back_without_harm(start, figures):
    """SIGSTOP while it serves, for longer than a lease; the version goes on elsewhere and comes back."""
    cluster = start()
    trainer, rollout, reader = cluster.replicas("trainer", "rollout-1", "rollout-2")
    cluster.publish(trainer, 1)
    assert rollout.call("replicate", spec="latest") == 1
    reads, _ = held_midway(cluster, reader)
    rollout[0].stop()
    eventually(lambda: 0 not in cluster.states("rollout-1"), "the lease of the stopped shard ends")
    release(reader)
    assert [read.result() for read in reads] == [1, 1]
    cluster.judge(reader, 1)
    cluster.publish(trainer, 2)
    rollout[0].go_on()
    assert rollout.call("update", spec="latest") == 2
    assert reader.call("update", spec="latest") == 2
    cluster.judge(rollout, 2)
    cluster.judge(reader, 2)
    figures("shard stopped for longer than its lease while it served: reader and shard ended with the right bytes")


def test_a_worker_that_was_replaced_while_it_stood_still_does_no_harm(start, figures):
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
    took_s = call.ended - call.asked
    assert whole.call("update", spec="latest") == 2
    cluster.judge(whole, 2)
    assert cluster.has(former, 0, 1)
    figures(f"shard replaced while it stood still: told so {took_s:.2f} s after its call, and nothing was changed")
