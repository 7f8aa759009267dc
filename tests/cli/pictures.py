"""Synthetic pictures of a reference server, to draw."""

from typing import Any

from tensorhub.protocol.status import CallView, ModelView, ReplicaView, Status, Transfer, VersionView, WorkerView

MIB = 1 << 20


def worker(shard: int, state: str = "holding", version: int | None = 7, **changes: Any) -> WorkerView:
    """A worker in good health; `changes` make it ill."""
    fields: dict[str, Any] = {
        "shard": shard,
        "state": state,
        "version": version,
        "done": 0,
        "chunks": 0,
        "size_bytes": 256 * MIB,
        "session": 5,
        "lease_left_s": 9.3,
        "connected": True,
        "readers": 0,
        "endpoints": (f"tcp://10.0.0.{shard}:41234",),
        "host": "node-a",
        "site": "",
        "reliable": True,
        "received_bytes": {},
    }
    return WorkerView(**(fields | changes))


def transfer(shard: int, done: int, **changes: Any) -> Transfer:
    """rollout-2 reads version 7 from rollout-1."""
    fields: dict[str, Any] = {
        "model": "policy",
        "version": 7,
        "shard": shard,
        "target": "rollout-2",
        "source": "rollout-1",
        "ticket": 100 + shard,
        "done": done,
        "chunks": 64,
        "size_bytes": 256 * MIB,
        "reason": "relay, full, idle, same host; best of 3",
    }
    return Transfer(**(fields | changes))


def busy(done: int = 32) -> Status:
    """A trainer, a rollout that has the latest, one that is filling, one that is poisoned and lacks a shard."""
    latest = VersionView(7, True, True, ("rollout-1", "trainer"), ("rollout-2",))
    gone = VersionView(6, False, True, (), (), "policy/rollout-3[0]")
    waiting = CallView(5, "update", "latest", 7, "waiting", "shard 1 has not arrived")
    failed = CallView(5, "replicate", 7, 7, "failed", "shard 1 of rollout-3 died")
    replicas = (
        ReplicaView(
            "rollout-1",
            2,
            (worker(0, readers=1, received_bytes={"trainer": 256 * MIB}), worker(1, received_bytes={"trainer": MIB})),
            CallView(5, "update", "latest", 7, "finished"),
        ),
        ReplicaView(
            "rollout-2",
            2,
            (
                worker(0, "filling", done=done, chunks=64),
                worker(1, "filling", done=1, chunks=64, connected=False, lease_left_s=3.2),
            ),
            waiting,
        ),
        ReplicaView("rollout-3", 2, (worker(0, "poisoned", None, reliable=False),), failed),
        ReplicaView("trainer", 2, (worker(0), worker(1)), None),
    )
    model = ModelView("policy", 2, 7, 512 * MIB, (latest, gone), replicas)
    reads = (transfer(0, done), transfer(1, 1, is_void=True, source="trainer"))
    return Status("tensorhub/5", 192.4, 0.0, (model,), reads, {"workers": 7})


def quiet(recovering_s: float = 0.0) -> Status:
    """Nobody is there."""
    return Status("tensorhub/5", 1.0, recovering_s, (), (), {})
