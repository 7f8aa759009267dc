"""Which threads of this process use a worker: whether anybody but the thread that waits could still call it.

A thread that holds two shards of one replica and waits for the first one's call waits for itself. It is told so, but
only where it is sure: the program has no other thread, which may be about to.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakSet

OURS = "tensorhub-"  # how the names of this library's threads begin


class Callers:
    """The threads of one worker's callers. Used from any thread."""

    def __init__(self, on_call: Callable[[], object] = lambda: None) -> None:
        """`on_call` is called in the thread that calls, before its call begins."""
        self._on_call = on_call
        self._lock = threading.RLock()  # a finaliser may come while its own thread has it
        self._users: WeakSet[threading.Thread] = WeakSet()
        self.waiting: threading.Thread | None = None  # blocked in a call of this worker

    def note(self) -> None:
        """The present thread uses the worker."""
        thread = threading.current_thread()
        if not thread.name.startswith(OURS):
            with self._lock:
                self._users.add(thread)
            self._on_call()

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """The present thread waits for a call of this worker, and can do nothing else meanwhile."""
        self.note()
        self.waiting = threading.current_thread()
        try:
            yield
        finally:
            self.waiting = None

    def are_only(self, thread: threading.Thread) -> bool:
        """It has used the worker, and there is nobody else who might: also a pool's thread is given its work later."""
        with self._lock:
            is_user = thread in self._users
        return is_user and all(each is thread or each.name.startswith(OURS) for each in threading.enumerate())
