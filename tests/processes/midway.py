"""Transfers that stand still at a known point: what is done to them then happens in mid-transfer, on any machine."""

from .memory import chunks_of

STREAMS = 2  # of one read: each may have one chunk in flight


def held_midway(cluster, replica, *, percent=40, verb="replicate", timeout=60):
    """Begin to fill a replica and hold it at about that point of every shard. Returns the calls."""
    chunks = chunks_of(cluster.shard_bytes)
    for worker in replica:
        worker.hold(after=chunks * percent // 100)
    calls = replica.start(verb, spec="latest", timeout=timeout)
    passed = sum(worker.wait_until_held() for worker in replica)
    at = 100 * passed / cluster.chunks
    assert percent - 10 < at < percent + 10
    return calls


def release(replica):
    """Let it go on."""
    for worker in replica:
        worker.release()


def read_again(replica):
    """Chunks of which reading began more than once, all shards together."""
    return sum(look["writing"]["again"] for look in replica.looks())
