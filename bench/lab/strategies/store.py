"""The object store: the trainer's versions go to one store process, and every rollout reads from there.

The store fetches from a copy that the trainer sets aside, in the background, and offers whole objects only. Trainer and
rollouts never wait for each other; every byte travels twice, and the store's one link carries every copy.
"""

import time

from ..content import make_tensors
from ..job import Job
from .base import NotNow
from .depot import Customer, Depot, copy

POLL_S = 0.02


class Store:
    """The store's process."""

    def __init__(self, job: Job) -> None:
        self._tensors = make_tensors(job.size_bytes)
        self._depot = Depot(job.address, int(job.origin.rpartition(":")[2]), job.chunk_bytes)
        self._customer = Customer(job.address, job.trainer, self._tensors)
        self._version = -1

    def work(self) -> None:
        """Take what is new, if anything is."""
        try:
            version = self._customer.get(self._version)
        except NotNow:
            version = self._version
        if version == self._version:
            time.sleep(POLL_S)
            return
        self._version = version
        space = self._depot.space(self._tensors)
        copy(self._tensors, space)
        self._depot.offer(version, space)

    def statistics(self) -> dict[str, int]:
        """The transport's counters."""
        return self._depot.statistics()

    def close(self) -> None:
        """End."""
        self._customer.close()
        self._depot.close()
