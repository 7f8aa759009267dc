"""Which chunks of a shard are complete, shared between the threads that fill it and those that serve it."""

import threading
import time
from collections.abc import Callable


class Progress:
    """A growing set of complete chunks. Thread-safe; `mark`, `fail` and `wake` wake a waiter; nobody polls."""

    def __init__(self, chunk_count: int, *, complete: bool = False) -> None:
        self.chunk_count = chunk_count
        self._have = bytearray(b"\x01" * chunk_count if complete else chunk_count)
        self._prefix = chunk_count if complete else 0
        self._failed: str | None = None
        self._changed = threading.Condition()

    @property
    def prefix(self) -> int:
        """How many chunks are complete without a gap from the first on."""
        return self._prefix

    @property
    def is_complete(self) -> bool:
        return self._prefix == self.chunk_count

    @property
    def failed(self) -> str | None:
        """Why no further chunk will come, or None."""
        return self._failed

    def has(self, chunk: int) -> bool:
        return bool(self._have[chunk])

    def mark(self, chunk: int) -> int:
        """The chunk is complete. Returns the prefix."""
        with self._changed:
            self._have[chunk] = 1
            while self._prefix < self.chunk_count and self._have[self._prefix]:
                self._prefix += 1
            self._changed.notify_all()
            return self._prefix

    def fail(self, reason: str) -> None:
        """No further chunk will come; everybody who waits is told."""
        with self._changed:
            self._failed = self._failed or reason
            self._changed.notify_all()

    def wake(self) -> None:
        """Let everybody who waits look again at whether it still wants to."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, chunk: int, timeout_s: float, given_up: Callable[[], bool] | None = None) -> bool:
        """Wait until the chunk is complete (True), or progress failed, time ran out or the waiter gave up (False).

        `given_up` is asked on every wake-up, with the lock held: it only looks at a flag. Who sets it calls `wake`.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._have[chunk]:
                remaining = deadline - time.monotonic()
                if self._failed is not None or remaining <= 0 or (given_up is not None and given_up()):
                    return False
                self._changed.wait(remaining)
            return True
