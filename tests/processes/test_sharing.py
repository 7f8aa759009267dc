"""Workers of one host that want the same version ahead: one of them fetches it, and its copy is all of theirs."""

import os
import time
from pathlib import Path

import pytest

from tensorhub.transport import sealed

from .process import eventually

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(sealed.why_not()), reason=sealed.why_not() or "there"),
]
MIB = 1 << 20
SHARD_BYTES = 24 * MIB + 4120
EIGHT = [f"rollout-{number}" for number in range(8)]


@pytest.fixture
def begun(start):
    """A trainer that is reached over sockets, where a test can hold it, and eight rollouts that could map."""
    cluster = start(shards=1, shard_bytes=SHARD_BYTES)
    trainer = cluster.replica("trainer", transports=("tcp",), prefetch="never")
    rollouts = cluster.replicas(*EIGHT, transports=("local", "tcp"), prefetch="never")
    return cluster, trainer, rollouts


def fetch_ahead(rollouts):
    """All of them want the newest version."""
    for asked in [replica[0].ask("prefetch", spec="latest") for replica in rollouts]:
        asked.result()


def holding(cluster, rollouts):
    """How many of them have a whole copy, or hold the version that they copied."""
    replicas = cluster.view().replicas("policy")
    found = {replica.name: worker for replica in replicas for worker in replica.workers}
    return sum(bool(found[each.name].copies) for each in rollouts if each.name in found)


def wait_until_all_have(cluster, rollouts):
    eventually(lambda: holding(cluster, rollouts) == len(rollouts), "everybody has a copy")
    eventually(lambda: not cluster.view().transfers(), "and nobody reads")


def memories(rollouts):
    """The host copies that these processes have mapped: the size of each, by what the kernel calls it."""
    found = {}
    for replica in rollouts:
        folder = Path(f"/proc/{replica[0].process.pid}/map_files")
        for each in folder.iterdir():
            try:
                status, name = os.stat(each), os.readlink(each)
            except FileNotFoundError:  # unmapped since the folder was read
                continue
            if "memfd:tensorhub" in name and status.st_size >= MIB:
                found[status.st_dev, status.st_ino] = status.st_size
    return found


def resident_bytes(rollouts):
    """What the host copies that these processes have mapped take, each page once."""
    total = 0
    for replica in rollouts:
        is_copy = False
        for line in Path(f"/proc/{replica[0].process.pid}/smaps").read_text().splitlines():
            words = line.split()
            if "-" in words[0]:
                is_copy = "memfd:tensorhub" in line
            elif words[0] == "Pss:" and is_copy:
                total += int(words[1]) * 1024
    return total


def counted(rollouts):
    return sum(each[0].look()["statistics"]["host_bytes"] for each in rollouts)


def sent(trainer):
    return trainer[0].look()["statistics"]["sent_bytes"]


def test_eight_workers_fetch_a_version_once_and_have_it_once_in_memory(begun, figures):
    cluster, trainer, rollouts = begun
    cluster.publish(trainer, 1)
    began = time.monotonic()
    fetch_ahead(rollouts)
    wait_until_all_have(cluster, rollouts)
    took_s = time.monotonic() - began
    assert sent(trainer) == SHARD_BYTES
    assert [each.received() for each in rollouts].count({"trainer": SHARD_BYTES}) == 1
    assert list(memories(rollouts).values()) == [SHARD_BYTES]
    in_memory = resident_bytes(rollouts)
    assert SHARD_BYTES - MIB < in_memory < SHARD_BYTES + MIB
    assert counted(rollouts) == SHARD_BYTES
    for each in [replica.start("update", spec="latest") for replica in rollouts]:
        assert [call.result() for call in each] == [1]
    for replica in rollouts:
        cluster.judge(replica, 1)
    assert sent(trainer) == SHARD_BYTES
    eventually(lambda: not memories(rollouts), "once nobody needs it its memory is given back")
    eventually(lambda: counted(rollouts) == 0, "and nobody counts it")
    figures(
        f"8 workers of a host, {SHARD_BYTES / MIB:.0f} MiB: {took_s:.2f} s until all had it ahead, "
        f"{SHARD_BYTES / MIB:.0f} MiB sent, {in_memory / MIB:.0f} MiB in memory"
    )


def test_the_one_that_fetches_is_killed_half_way(begun):
    """Another one fetches, at once; nobody hangs, and it is in memory once."""
    cluster, trainer, rollouts = begun
    cluster.publish(trainer, 1)
    trainer[0].hold("reading", after=3)
    fetch_ahead(rollouts)
    trainer[0].wait_until_held("reading")
    (transfer,) = eventually(lambda: cluster.view().transfers(), "one of them fetches")
    (victim,) = [replica for replica in rollouts if replica.name == transfer.target]
    victim.kill()
    left = [replica for replica in rollouts if replica is not victim]
    eventually(lambda: any(t.target in [r.name for r in left] for t in cluster.view().transfers()), "another one does")
    trainer[0].release("reading")
    wait_until_all_have(cluster, left)
    assert sent(trainer) < 2 * SHARD_BYTES + 4 * MIB
    assert list(memories(left).values()) == [SHARD_BYTES]
    for replica in left:
        assert replica.call("update", spec="latest") == 1
        cluster.judge(replica, 1)


def test_the_one_that_has_fetched_is_killed(begun):
    """The others have what they share, and one of them counts it."""
    cluster, trainer, rollouts = begun
    cluster.publish(trainer, 1)
    fetch_ahead(rollouts)
    wait_until_all_have(cluster, rollouts)
    (owner,) = [replica for replica in rollouts if replica.received()]
    owner.kill()
    left = [replica for replica in rollouts if replica is not owner]
    eventually(lambda: counted(left) == SHARD_BYTES, "one of them counts it")
    assert list(memories(left).values()) == [SHARD_BYTES]
    for replica in left:
        assert replica.call("update", spec="latest") == 1
        cluster.judge(replica, 1)
    assert sent(trainer) == SHARD_BYTES
