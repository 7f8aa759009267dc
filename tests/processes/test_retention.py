"""Retained versions with real processes: offload, heirs, pins, the limit on host memory, spot replicas, prefetch."""

import time

import pytest

import tensorhub

from .midway import release
from .process import eventually

pytestmark = pytest.mark.processes


def versions(cluster):
    """What the server says of each version, by number."""
    return {found.version: found for found in cluster.view().versions("policy")}


def copies(cluster, name):
    """The host copies of a replica's workers, by shard."""
    found = {replica.name: replica for replica in cluster.view().replicas("policy")}
    return [worker.copies for worker in found[name].workers]


def host_bytes(cluster, *replicas):
    """Host memory that holds copies now, or is kept for the next."""
    return sum(look["statistics"]["host_bytes"] for replica in replicas for look in replica.looks())


def offloaded_bytes(replica):
    """What its workers have copied to their host memory so far."""
    return sum(look["statistics"]["offloaded_bytes"] for look in replica.looks())


def timed(replica, verb, *, gives, **arguments):
    """A call on all shards, and the seconds until the last of them had its answer."""
    began = time.monotonic()
    calls = replica.start(verb, timeout=30, **arguments)
    assert [call.result() for call in calls] == [gives] * len(calls)
    return max(call.ended for call in calls) - began


def test_the_trainer_moves_on_while_its_only_reader_is_slow(start, figures):
    """The reader goes on from the trainer's host copy, at its own prefix, and gets the version that it began."""
    cluster = start(retain=1)
    trainer, slow = cluster.replicas("trainer", "rollout-1")
    cluster.publish(trainer, 1)
    for worker in slow:
        worker.slow_down(pace_s=0.5)  # 8 s for a shard
    reads = slow.start("replicate", spec="latest", timeout=60)
    eventually(lambda: all(look["writing"]["passed"] > 2 for look in slow.looks()), "it has begun")
    took_s = timed(trainer, "unpublish", gives=None)
    is_reading = not any(read.is_over for read in reads)
    cluster.write(trainer, 2)
    assert trainer.call("publish", version=2) == 2
    release(slow)
    assert [read.result() for read in reads] == [1, 1]
    cluster.judge(slow, 1)
    assert is_reading
    eventually(lambda: not versions(cluster)[1].host_copies, "the copy of 1 is released once nobody reads it")
    assert took_s < 5.0  # one copy in memory, on machines under load; without it, 8 s
    figures(
        f"unpublish with one slow reader and nobody else: {took_s:.2f} s, {cluster.shard_bytes >> 20} MiB offloaded"
    )


def test_a_trainer_beside_spot_replicas_copies_while_it_rests(start, figures):
    """Each version is in its host memory before `unpublish` is called, which then copies nothing."""
    cluster = start(retain=1)
    (trainer,) = cluster.replicas("trainer")
    (spot,) = cluster.replicas("rollout-1", reliable=False)
    took_s = []
    cluster.write(trainer, 1)
    for version in range(1, 5):
        assert trainer.call("publish", version=version) == version
        assert spot.call("update", spec="latest") == version
        eventually(lambda: versions(cluster)[version].host_copies == ("trainer",), "it is copied ahead")  # noqa: B023
        eventually(lambda: offloaded_bytes(trainer) == version * cluster.size_bytes, "by all shards")  # noqa: B023
        before = offloaded_bytes(trainer)
        took_s.append(timed(trainer, "unpublish", gives=None))
        assert offloaded_bytes(trainer) == before
        cluster.write(trainer, version + 1)
        cluster.judge(spot, version)
    spot.kill()
    (late,) = cluster.replicas("rollout-2", reliable=False)
    assert late.call("replicate", spec="latest") == 4
    cluster.judge(late, 4)
    figures(
        f"unpublish of what was copied ahead: {took_s[0]:.3f} s the first time, then at most {max(took_s[1:]):.3f} s"
    )


def test_the_trainer_closes_with_nobody_else_holding_the_latest(start, figures):
    """Another reliable replica, which holds an older version, inherits it."""
    cluster = start(retain=1)
    trainer, heir = cluster.replicas("trainer", "rollout-1")
    cluster.publish(trainer, 1)
    assert heir.call("replicate", spec="latest") == 1
    cluster.publish(trainer, 2)
    took_s = timed(trainer, "close", gives=None)
    for worker in trainer:
        worker.memory.words[:] = 0  # the caller's alone from now on
    cluster.judge(heir, 1)  # untouched: the copy lies beside it
    (late,) = cluster.replicas("rollout-2", reliable=False)
    assert late.call("replicate", spec="latest") == 2
    cluster.judge(late, 2)
    assert set(late.received()) == {"rollout-1"}
    assert heir.call("update", spec="latest") == 2
    cluster.judge(heir, 2)
    figures(f"close() of the last holder, with an heir: {took_s:.2f} s")


def test_a_pinned_version_is_served_however_old(start):
    cluster = start(retain=1)
    (trainer,) = cluster.replicas("trainer")
    cluster.publish(trainer, 1)
    assert trainer.call("pin", version=1) is None
    cluster.publish(trainer, 2)
    cluster.publish(trainer, 3)
    assert versions(cluster)[1].host_copies == ("trainer",)
    assert versions(cluster)[2].host_copies == ()
    (reader,) = cluster.replicas("rollout-1")
    assert reader.call("replicate", spec=1) == 1
    cluster.judge(reader, 1)
    assert trainer.call("unpin", version=1) is None
    eventually(lambda: not versions(cluster)[1].host_copies, "a copy that nobody wants goes")


def test_the_limit_on_host_memory_is_a_refusal_that_loses_nothing(start, figures):
    cluster = start(retain=1)
    (trainer,) = cluster.replicas("trainer", host_bytes=cluster.shard_bytes - 1)
    cluster.publish(trainer, 1)
    began = time.monotonic()
    found = [call.outcome() for call in trainer.start("unpublish", timeout=30)]
    took_s = time.monotonic() - began
    assert [type(each) for each in found] == [tensorhub.HostMemoryFull] * 2, found
    assert "host_bytes" in found[0].hint
    (reader,) = cluster.replicas("rollout-1")
    assert reader.call("replicate", spec="latest") == 1  # it is still served
    cluster.judge(reader, 1)
    cluster.publish(trainer, 2)  # and now somebody else keeps it
    assert host_bytes(cluster, trainer) == 0
    figures(f"no host memory for the last copy: {type(found[0]).__name__} after {took_s:.2f} s; nothing lost")


def test_spot_holders_do_not_count(start):
    cluster = start(retain=1)
    (trainer,) = cluster.replicas("trainer")
    (spot,) = cluster.replicas("rollout-1", reliable=False)
    cluster.publish(trainer, 1)
    assert spot.call("replicate", spec="latest") == 1
    assert trainer.call("unpublish") is None
    cluster.write(trainer, 2)
    assert versions(cluster)[1].host_copies == ("trainer",)
    spot.kill()
    (late,) = cluster.replicas("rollout-2")
    assert late.call("replicate", spec="latest") == 1
    cluster.judge(late, 1)


def test_the_last_reliable_holder_dies(start):
    """Nothing can be done about that; the error says who held it last, and what still is there."""
    cluster = start(retain=1)
    (trainer,) = cluster.replicas("trainer")
    (old,) = cluster.replicas("rollout-1")
    cluster.publish(trainer, 1)
    assert old.call("replicate", spec="latest") == 1
    cluster.publish(trainer, 2)
    trainer.kill()
    eventually(lambda: not cluster.is_known("trainer/0"), "its lease ends")
    found = [call.outcome() for call in old.start("replicate", spec=2, timeout=10)]
    assert [type(each) for each in found] == [tensorhub.VersionUnavailable] * 2, found
    assert "trainer" in str(found[0])
    assert "replicate version 1" in found[0].hint


def test_an_update_after_a_prefetch_is_a_local_copy(start, figures):
    cluster = start(retain=1)
    trainer, rollout = cluster.replicas("trainer", "rollout-1")
    cluster.publish(trainer, 1)
    assert rollout.call("replicate", spec="latest") == 1
    for each in rollout:
        each.ask("prefetch", spec="latest").result()
    assert rollout.call("update", spec="prefetched") == 1
    cluster.publish(trainer, 2)
    eventually(lambda: "rollout-1" in versions(cluster)[2].host_copies, "it is fetched ahead")
    eventually(lambda: copies(cluster, "rollout-1") == [(2,), (2,)], "by both shards")
    cluster.judge(rollout, 1)  # and what it computes with is untouched
    before = rollout.received()
    took_s = timed(rollout, "update", gives=2, spec="prefetched")
    assert rollout.received() == before
    cluster.judge(rollout, 2)
    size = f"{cluster.shard_bytes >> 20} MiB a shard"
    figures(f"update() after a prefetch: {took_s:.2f} s for {size}, no byte from a peer")


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_rollout_that_fetches_ahead_and_is_gone_hinders_nobody(start, how):
    """Until its lease ends it is thought to live: no new version may wait for it in the trainer's host memory."""
    cluster = start(retain=1, lease_s=90.0, shards=1, shard_bytes=8 << 20)
    (trainer,) = cluster.replicas("trainer")
    gone, alive = cluster.replicas("rollout-1", "rollout-2", prefetch="always")
    cluster.publish(trainer, 1)
    for rollout in (gone, alive):
        assert rollout.call("replicate", spec="latest") == 1
    for worker in gone:
        getattr(worker, how)()
    for version in range(2, 9):
        trainer.call("unpublish", timeout=20)
        cluster.write(trainer, version)
        assert trainer.call("publish", version=version) == version
        eventually(lambda: alive.call("update", spec="prefetched") == version, f"{version} comes")  # noqa: B023
        cluster.judge(alive, version)
    if how == "stop":
        for worker in gone:
            worker.go_on()
        eventually(lambda: gone.call("update", spec="prefetched") == 8, "it comes back")
        cluster.judge(gone, 8)


def test_one_copy_crosses_into_a_site(start, figures):
    """Four replicas of another site: what they get comes across once, whoever asks first."""
    cluster = start(retain=1)
    (trainer,) = cluster.replicas("trainer", site="a")
    far = cluster.replicas("rollout-1", "rollout-2", "rollout-3", "rollout-4", site="b")
    cluster.publish(trainer, 1)
    calls = [call for replica in far for call in replica.start("replicate", spec="latest", timeout=60)]
    assert [call.result() for call in calls] == [1] * 8
    for replica in far:
        cluster.judge(replica, 1)
    across = sum(replica.received().get("trainer", 0) for replica in far) / cluster.size_bytes
    eventually(
        lambda: versions(cluster)[1].cross_site_bytes.get("b") == round(across * cluster.size_bytes), "it is counted"
    )
    assert across == 1.0
    figures(f"into a site of four replicas: {across:.2f} copies came from the other site")
