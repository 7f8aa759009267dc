"""A *set*: models whose versions belong together by number, such as the target and the draft of speculative decoding.

A worker names the others of its set, its model's *companions*, when it joins. A version of the set is a number that
each of its models has. The server knows a set for as long as one of its workers lives.
"""

from ..names import ModelName, WorkerId

Names = tuple[ModelName, ...]


class Companions:
    """Of one model: which sets its living workers are of."""

    def __init__(self) -> None:
        self._by: dict[Names, dict[WorkerId, None]] = {}

    def join(self, worker: WorkerId, names: Names) -> bool:
        """The worker is of the set with these models. Returns whether it is the first one."""
        if not names:
            return False
        workers = self._by.setdefault(names, {})
        workers[worker] = None
        return len(workers) == 1

    def leave(self, worker: WorkerId, names: Names) -> bool:
        """It does not live any more, or is of another set now. Returns whether it was the last one."""
        workers = self._by.get(names)
        if workers is None or worker not in workers:
            return False
        del workers[worker]
        if not workers:
            del self._by[names]
        return not workers

    @property
    def sets(self) -> tuple[Names, ...]:
        """The other models of each set, each set once."""
        return tuple(self._by)

    @property
    def names(self) -> Names:
        """All of these models."""
        return tuple(dict.fromkeys(name for names in self._by for name in names))
