"""TensorHub, used as its documentation says: `mutating` at the trainer, `update("latest")` at the rollouts."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

import tensorhub
from tensorhub import SessionLost, TransferError, Unavailable
from tensorhub.protocol.status import ReplicaView

from ..content import FUSED, Tensors, sizes_of
from ..job import MODEL, Job
from .base import Committed, NotNow
from .choose import STRATEGIES

RETRYABLE = (Unavailable, SessionLost, TransferError)
CALL_S = 60.0
LOOK_S = 0.25


def _boxes(job: Job, tensors: Tensors) -> dict[str, list[tensorhub.Box]] | None:
    """The part of the global tensor that each tensor is, if rollouts have another layout than the trainer."""
    if not STRATEGIES[job.strategy].is_recut:
        return None
    boxes, offset = [], 0
    for name, size in sizes_of(job.size_bytes).items():
        boxes.append(tensorhub.Box(name, (size,), (0,), (size,), offset))
        offset += size
    return {FUSED: boxes} if FUSED in tensors else {}


def _open(job: Job, tensors: Tensors) -> tensorhub.Weights:
    """`transports` is only tcp: all places are on one host, and shared memory would go round the links."""
    weights = tensorhub.open(
        MODEL,
        replica=job.name,
        server=job.server,
        reliable=job.is_reliable,
        site=job.site,
        transports="tcp",
        chunk_bytes=job.chunk_bytes,
        prefetch=job.prefetch,
        host_bytes=job.host_bytes,
        call_timeout=CALL_S,
    )
    weights.register(tensors, boxes=_boxes(job, tensors))
    return weights


def _counts(weights: tensorhub.Weights) -> dict[str, int]:
    return {name: value for name, value in weights.statistics().items() if type(value) is int}


class HubTrainer:
    """Publishes."""

    def __init__(self, job: Job, tensors: Tensors) -> None:
        self._weights = _open(job, tensors)

    def commit(self, version: int, change: Callable[[], None]) -> Committed:
        began = time.monotonic()
        self._weights.unpublish()
        free = time.monotonic()
        change()
        changed = time.monotonic()
        self._weights.publish(version)
        return Committed(free - began, time.monotonic() - changed)

    def statistics(self) -> dict[str, int]:
        return _counts(self._weights)

    def close(self) -> None:
        self._weights.close(timeout=5)


class HubRollout:
    """Updates; to whatever is newest, or only to what has come near already."""

    def __init__(self, job: Job, tensors: Tensors) -> None:
        self._job, self._tensors = job, tensors
        self._weights: tensorhub.Weights | None = None
        self._near: int | None = None  # the newest version that is near
        self._is_over = threading.Event()

    @property
    def weights(self) -> tensorhub.Weights:
        """Opened when it joins, which is part of joining."""
        if self._weights is None:
            self._weights = _open(self._job, self._tensors)
        return self._weights

    def join(self) -> int:
        try:
            version = self.weights.replicate("latest")
            if self._job.only_near == "site":
                threading.Thread(target=self._look_out, daemon=True).start()
            return version
        except RETRYABLE as error:
            raise NotNow(f"{type(error).__name__}: {error}") from error

    def sync(self) -> int:
        held = self.weights.version
        spec: int | str = "prefetched" if self._job.only_near == "self" else "latest"
        if self._job.only_near == "site":
            near = self._near
            if held is not None and (near is None or near <= held):
                return held
            spec = spec if near is None else near
        try:
            return self.weights.update(spec)
        except RETRYABLE as error:
            raise NotNow(f"{type(error).__name__}: {error}") from error

    def bytes_by_source(self) -> dict[str, int]:
        found = self.weights.statistics()["bytes_by_source"]
        assert isinstance(found, dict)
        return dict(found)

    def statistics(self) -> dict[str, int]:
        return _counts(self.weights)

    def close(self) -> None:
        self._is_over.set()
        self.weights.close(timeout=5)

    def _look_out(self) -> None:
        """While the worker computes: ask what is whole anywhere in its site."""
        view = tensorhub.connect(self._job.server)
        while not self._is_over.wait(LOOK_S):
            with contextlib.suppress(Unavailable):
                self._near = newest_near(view.replicas(MODEL), self._job)


def newest_near(replicas: Sequence[ReplicaView], job: Job) -> int | None:
    """The newest version that is whole at anybody of the worker's site."""
    found: list[int] = []
    for replica in replicas:
        for worker in replica.workers:
            if worker.site == job.site:
                found += worker.copies
                if replica.name != job.name and worker.state == "holding" and worker.version is not None:
                    found.append(worker.version)
    return max(found, default=None)
