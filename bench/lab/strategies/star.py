"""The star: point to point, every rollout reads from the trainer.

The trainer copies each version aside and serves it from there, so that it never waits for a reader. It needs memory for
each version that is still being read; its one uplink carries every copy.
"""

from collections.abc import Callable

from ..content import Tensors
from ..job import Job
from .base import Committed
from .depot import Customer, Depot, copy, timed


class StarTrainer:
    """Serves copies of its tensors."""

    def __init__(self, job: Job, tensors: Tensors) -> None:
        port = int(job.trainer.rpartition(":")[2])
        self._tensors = tensors
        self._depot = Depot(job.address, port, job.chunk_bytes)

    def commit(self, version: int, change: Callable[[], None]) -> Committed:
        change()

        def publish() -> None:
            space = self._depot.space(self._tensors)
            copy(self._tensors, space)
            self._depot.offer(version, space)

        return Committed(0.0, timed(publish))

    def statistics(self) -> dict[str, int]:
        return self._depot.statistics()

    def close(self) -> None:
        self._depot.close()


class StarRollout:
    """Reads from wherever `origin` is: the trainer, or a store."""

    def __init__(self, job: Job, tensors: Tensors) -> None:
        self._job, self._tensors = job, tensors
        self._customer: Customer | None = None
        self._version = -1

    @property
    def customer(self) -> Customer:
        """Opened when it joins, which is part of joining."""
        if self._customer is None:
            self._customer = Customer(self._job.address, self._job.origin, self._tensors)
        return self._customer

    def join(self) -> int:
        return self.sync()

    def sync(self) -> int:
        held, self._version = self._version, -1  # a read that fails leaves no version
        self._version = self.customer.get(held)
        return self._version

    def bytes_by_source(self) -> dict[str, int]:
        return {"origin": self.customer.transport.statistics()["received_bytes"]}

    def statistics(self) -> dict[str, int]:
        return self.customer.transport.statistics()

    def close(self) -> None:
        self.customer.close()
