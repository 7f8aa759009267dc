"""Short waits for the interpreter while a transfer begins and ends.

A thread that wants the interpreter beside one that computes in Python waits until that one is made to hand it over:
5 ms by default (`sys.setswitchinterval`), after each call that has let go of it. A read has some twenty of these before
its bytes move and after; beside a busy thread they took as long as half a GiB takes to come. So while anybody is brisk
the interval is `BRISK_S`, for all threads of the process: who computes is interrupted more often, and only when
somebody else has something to do (decision 0037).

It must never: last while bytes move, but until the first chunk is there and while a further stream connects; or undo an
interval that the program has set meanwhile.
"""

import os
import sys
import threading
from types import TracebackType

BRISK_S = 0.000103  # to hand over takes some 10 us; a number that nobody else would choose
_ROUNDING_S = 1.5e-6  # Python keeps whole microseconds


class Brisk:
    """From the block's beginning to its end, but not between `over()` and `again()`. For one thread."""

    def __init__(self) -> None:
        self._is_on = False

    def over(self) -> None:
        """Idempotent."""
        if self._is_on:
            self._is_on = False
            _interval.leave()

    def again(self) -> None:
        """Idempotent."""
        if not self._is_on:
            self._is_on = True
            _interval.enter()

    def __enter__(self) -> "Brisk":
        self.again()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.over()


class _Interval:
    """This process's one interval, and how many want it short."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._wanting = 0
        self._before_s = 0.0  # what it was when the first came

    def enter(self) -> None:
        with self._lock:
            self._wanting += 1
            if self._wanting == 1:
                self._shorten()

    def leave(self) -> None:
        with self._lock:
            if self._wanting == 1:
                self._restore()
            self._wanting = max(0, self._wanting - 1)  # who forked inside its block leaves where it never entered

    def forked(self) -> None:
        """In a child: none of those threads is here, and one of them may have had the lock."""
        self._restore()
        self._forget()

    def _shorten(self) -> None:
        if not self._is_ours():  # else somebody kept it while it was ours, and has put it back since
            self._before_s = sys.getswitchinterval()
        if self._before_s > BRISK_S:
            sys.setswitchinterval(BRISK_S)

    def _restore(self) -> None:
        if self._is_ours() and self._before_s > BRISK_S:
            sys.setswitchinterval(self._before_s)

    def _is_ours(self) -> bool:
        return abs(sys.getswitchinterval() - BRISK_S) < _ROUNDING_S


_interval = _Interval()
os.register_at_fork(after_in_child=_interval.forked)
