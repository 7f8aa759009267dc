"""The same work on many things in a few threads, or in this one where the process may start no more.

It must never: wait for a thread that died before its first step, as a pool of `concurrent.futures` does.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from ..transport.threads import Thread

T = TypeVar("T")
V = TypeVar("V")


def in_parallel(work: Callable[[T], V], items: Sequence[T], *, threads: int, name: str) -> list[V]:
    """What `work` gives for each of the items, in order. What it raises first ends it all and is raised here.

    This thread is one of them, so that all is done where no other can be started.
    """
    shared = _Shared(work, items)
    helpers: list[Thread] = []
    for number in range(1, min(threads, len(items))):
        helper = Thread(shared.run, name=f"tensorhub-{name}_{number}")
        try:
            helper.start()
        except (RuntimeError, MemoryError):
            break
        helpers.append(helper)
    shared.run()
    for helper in helpers:
        helper.join()
    return shared.result()


class _Shared(Generic[T, V]):
    """Items that each thread takes one of, as long as there are any and none has failed."""

    def __init__(self, work: Callable[[T], V], items: Sequence[T]) -> None:
        self._work, self._items = work, items
        self._found: dict[int, V] = {}
        self._error: BaseException | None = None
        self._next = 0
        self._lock = threading.Lock()

    def run(self) -> None:
        """In each of the threads."""
        while (at := self._take()) is not None:
            try:
                self._found[at] = self._work(self._items[at])
            except BaseException as error:  # noqa: BLE001 it is raised where all of it was asked for
                with self._lock:
                    self._error = self._error or error

    def _take(self) -> int | None:
        with self._lock:
            if self._error is not None or self._next == len(self._items):
                return None
            self._next += 1
            return self._next - 1

    def result(self) -> list[V]:
        """Once all threads have ended."""
        error, self._error = self._error, None
        if error is None:
            return [self._found[at] for at in range(len(self._items))]
        try:
            raise error
        finally:
            del error  # it knows this frame
