"""TensorHub, used as its documentation says: `mutating` at the trainer, `update("latest")` at the rollouts."""

import time
from collections.abc import Callable

import tensorhub
from tensorhub import SessionLost, TransferError, Unavailable

from ..content import Tensors
from ..job import MODEL, Job
from .base import Committed, NotNow

RETRYABLE = (Unavailable, SessionLost, TransferError)
CALL_S = 60.0


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
        call_timeout=CALL_S,
    )
    weights.register(tensors)
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
    """Updates."""

    def __init__(self, job: Job, tensors: Tensors) -> None:
        self._job, self._tensors = job, tensors
        self._weights: tensorhub.Weights | None = None

    @property
    def weights(self) -> tensorhub.Weights:
        """Opened when it joins, which is part of joining."""
        if self._weights is None:
            self._weights = _open(self._job, self._tensors)
        return self._weights

    def join(self) -> int:
        try:
            return self.weights.replicate("latest")
        except RETRYABLE as error:
            raise NotNow(f"{type(error).__name__}: {error}") from error

    def sync(self) -> int:
        try:
            return self.weights.update("latest")
        except RETRYABLE as error:
            raise NotNow(f"{type(error).__name__}: {error}") from error

    def bytes_by_source(self) -> dict[str, int]:
        found = self.weights.statistics()["bytes_by_source"]
        assert isinstance(found, dict)
        return dict(found)

    def statistics(self) -> dict[str, int]:
        return _counts(self.weights)

    def close(self) -> None:
        self.weights.close(timeout=5)
