"""Who could make a host copy of a version ahead of need, the best first. One table for each shard of a version."""

import heapq
from collections.abc import Callable

from ..names import WorkerId

ROOM = 16  # former ranks that may stay
Rank = tuple[bool, bool, WorkerId]  # smaller is better


class Keepers:
    """Whoever was offered stays until it is found to be unable, or offered with another rank."""

    def __init__(self) -> None:
        self.chosen: WorkerId | None = None  # who was found to be the best last
        self._ranks: dict[WorkerId, Rank] = {}
        self._heap: list[Rank] = []

    def offer(self, rank: Rank) -> bool:
        """This one may be able to; the worker is the last part of its rank. Returns whether that is news."""
        worker = rank[-1]
        if self._ranks.get(worker) == rank:
            return False
        self._ranks[worker] = rank
        heapq.heappush(self._heap, rank)
        if len(self._heap) > 2 * len(self._ranks) + ROOM:
            self._heap = sorted(self._ranks.values())  # which is a heap
        return True

    def withdraw(self, worker: WorkerId) -> bool:
        """This one is not able to any more. Returns whether it was the chosen one."""
        self._ranks.pop(worker, None)
        return self.chosen == worker

    def best(self, is_able: Callable[[WorkerId], bool]) -> WorkerId | None:
        """The best of those who are able; the others are forgotten on the way."""
        while self._heap:
            rank = self._heap[0]
            worker = rank[-1]
            is_present = self._ranks.get(worker) == rank
            if is_present and is_able(worker):
                return worker
            heapq.heappop(self._heap)
            if is_present:
                del self._ranks[worker]
        return None
