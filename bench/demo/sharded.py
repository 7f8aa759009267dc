"""All shards of one replica of the policy, in one process.

On GPUs each shard has a process of its own and calls `publish` or `update` there. A group call returns when all
shards of the replica have it, so whoever has several shards in one process calls it on all of them at the same time:
here with a thread for each.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from types import TracebackType
from typing import TypeVar

import tensorhub

from .policy import SHARDS, Policy, split

MODEL = "policy"
CHUNK_BYTES = "256KiB"  # some chunks to each small shard, so that rollouts pass them on while they fill
CONNECT_S = 60.0
CALL_S = 60.0  # the reference server's restart takes a few seconds of it

T = TypeVar("T")


class ShardedWeights:
    """A replica: the policy's own tensors, registered in place, shard by shard. `stall_s` is the last call's time."""

    def __init__(self, policy: Policy, *, replica: str, server: str, reliable: bool) -> None:
        def join(shard: int) -> tensorhub.Weights:
            return tensorhub.open(
                MODEL,
                replica=replica,
                shard=shard,
                shards=SHARDS,
                server=server,
                reliable=reliable,
                chunk_bytes=CHUNK_BYTES,
                timeout=CONNECT_S,
            )

        self.stall_s = 0.0
        self._threads = ThreadPoolExecutor(SHARDS)
        self._shards = list(self._threads.map(join, range(SHARDS)))
        for weights, tensors in zip(self._shards, split(policy), strict=True):
            weights.register(tensors)

    def __enter__(self) -> "ShardedWeights":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._on_all(lambda weights: weights.close(timeout=10.0))
        self._threads.shutdown()

    def publish(self, version: int) -> None:
        """Let everybody read the policy as it is now."""
        self._on_all(lambda weights: weights.publish(version, timeout=CALL_S))

    @contextmanager
    def mutating(self, *, version: int) -> Iterator[None]:
        """Unpublish, let the block change the policy, publish it as `version`."""
        self._on_all(lambda weights: weights.unpublish(timeout=CALL_S))
        unpublish_s = self.stall_s
        yield
        self.publish(version)
        self.stall_s += unpublish_s

    def replicate(self, spec: int | str, *, timeout_s: float) -> int:
        """Fill the policy with a version for the first time. Returns the version."""
        return self._on_all(lambda weights: weights.replicate(spec, timeout=timeout_s))[0]

    def update(self, spec: int | str = "latest", *, timeout_s: float) -> int:
        """Replicate a newer version, if there is one. Returns the version now held."""
        return self._on_all(lambda weights: weights.update(spec, timeout=timeout_s))[0]

    @property
    def version(self) -> int | None:
        """The version that the whole policy is; None if it is none, and must not be run."""
        versions = {weights.version for weights in self._shards}
        return versions.pop() if len(versions) == 1 else None

    def bytes_by_source(self) -> dict[str, int]:
        """How much this process has received so far, from which replica."""
        total: dict[str, int] = {}
        for weights in self._shards:
            received = weights.statistics()["bytes_by_source"]
            assert isinstance(received, dict)
            for source, size_bytes in received.items():
                total[source] = total.get(source, 0) + size_bytes
        return total

    def _on_all(self, call: Callable[[tensorhub.Weights], T]) -> list[T]:
        began = time.monotonic()
        calls = [self._threads.submit(call, weights) for weights in self._shards]
        wait(calls)  # all of them, also where one fails: the next call must find none under way
        self.stall_s = time.monotonic() - began
        return [each.result() for each in calls]
