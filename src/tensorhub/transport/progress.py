"""Which chunks of a shard are complete, shared between the threads that fill it and those that serve it.

Where the native mover is in use it marks chunks and waits for them as well, so the marks are words of memory that both
sides know. Elsewhere they are Python's, under a lock.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Iterable

from .native import load, shapes


class Progress:
    """A growing set of complete chunks. Thread-safe; `mark`, `fail` and `wake` wake a waiter; nobody polls."""

    def __init__(self, chunk_count: int, *, complete: bool = False) -> None:
        self.chunk_count = chunk_count
        self._have = bytearray(b"\x01" * chunk_count if complete else chunk_count)
        self._prefix = chunk_count if complete else 0
        self._failed: str | None = None
        self._changed = threading.Condition()
        self._library = load.library()
        self.marks: shapes.Marks | None = None  # the same for the mover, where it is in use
        if self._library is not None:
            have = (ctypes.c_ubyte * chunk_count).from_buffer(self._have) if chunk_count else None
            self._pinned = have  # while it lives the bytearray stays where it is
            address = ctypes.addressof(have) if have is not None else None
            self.marks = shapes.Marks(have=address, count=chunk_count, prefix=self._prefix)

    @property
    def prefix(self) -> int:
        """How many chunks are complete without a gap from the first on."""
        return self._prefix if self.marks is None else int(self.marks.prefix)

    @property
    def is_complete(self) -> bool:
        return self.prefix == self.chunk_count

    @property
    def failed(self) -> str | None:
        """Why no further chunk will come, or None."""
        return self._failed

    def has(self, chunk: int) -> bool:
        return bool(self._have[chunk])

    def mark(self, chunk: int) -> int:
        """The chunk is complete. Returns the prefix."""
        if self._library is not None:
            if not 0 <= chunk < self.chunk_count:
                raise IndexError(f"chunk {chunk} of {self.chunk_count}")
            return int(self._library.mark(self.marks, chunk))
        with self._changed:
            self._have[chunk] = 1
            while self._prefix < self.chunk_count and self._have[self._prefix]:
                self._prefix += 1
            self._changed.notify_all()
            return self._prefix

    def mark_all(self, chunks: Iterable[int]) -> None:
        """These are complete, one by one."""
        library, marks = self._library, self.marks
        for chunk in chunks:
            if library is None or not 0 <= chunk < self.chunk_count:
                self.mark(chunk)
            else:
                library.mark(marks, chunk)

    def fail(self, reason: str) -> None:
        """No further chunk will come; everybody who waits is told."""
        with self._changed:
            self._failed = self._failed or reason
            if self.marks is not None:
                self.marks.has_failed = 1
            self._changed.notify_all()
        self.wake()

    def wake(self) -> None:
        """Let everybody who waits look again at whether it still wants to."""
        if self._library is not None:
            self._library.wake(self.marks)
            return
        with self._changed:
            self._changed.notify_all()

    def wait(self, chunk: int, timeout_s: float, given_up: Callable[[], bool] | None = None) -> bool:
        """Wait until the chunk is complete (True), or progress failed, time ran out or the waiter gave up (False).

        `given_up` is asked on every wake-up, perhaps with a lock held: it only looks at a flag. Who sets it calls
        `wake`.
        """
        deadline = time.monotonic() + timeout_s
        if self._library is not None and self.marks is not None:
            while True:
                seen = self.marks.changed  # before looking: what changes from here on ends the wait
                if self._have[chunk]:
                    return True
                remaining = deadline - time.monotonic()
                if self._failed is not None or remaining <= 0 or (given_up is not None and given_up()):
                    return False
                self._library.wait(self.marks, seen, remaining)
        with self._changed:
            while not self._have[chunk]:
                remaining = deadline - time.monotonic()
                if self._failed is not None or remaining <= 0 or (given_up is not None and given_up()):
                    return False
                self._changed.wait(remaining)
            return True
