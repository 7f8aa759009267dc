"""Words that tell threads to count nothing any more, whether they run Python or not.

A thread looks at its gates before it lets a chunk count. The mover's threads have no interpreter to ask, so a gate is a
word of memory that both know.
"""

import ctypes
import threading
import time

from .native import load, shapes


class Gate:
    """Open at first; shut once, for good."""

    def __init__(self) -> None:
        self.state = shapes.Gate()

    @property
    def is_shut(self) -> bool:
        return bool(self.state.is_shut)

    def shut(self) -> None:
        """When this returns, no thread of the mover is between looking at the gate and counting a chunk."""
        library = load.library()
        if library is None:
            self.state.is_shut = 1
            return
        library.swap(self.address, 0, 1)
        while self.state.inside:  # for less than a microsecond, unless that thread does not get a core
            time.sleep(0)

    @property
    def address(self) -> int:
        """For the mover."""
        return ctypes.addressof(self.state)


class Turn:
    """A word that takes one of two turns, once: who comes first decides."""

    def __init__(self) -> None:
        self._word = ctypes.c_uint32(0)
        self._lock = threading.Lock()

    @property
    def taken(self) -> int:
        """0 while it is open."""
        return self._word.value

    def take(self, turn: int) -> int:
        """Take this turn, unless one was taken before. Returns which it is now."""
        library = load.library()
        if library is not None:
            return int(library.swap(self.address, 0, turn)) or turn
        with self._lock:
            self._word.value = self._word.value or turn
            return self._word.value

    @property
    def address(self) -> int:
        """For the mover."""
        return ctypes.addressof(self._word)


class Until:
    """A moment on the monotonic clock from which on nothing counts."""

    def __init__(self, value: float) -> None:
        self._value = ctypes.c_double(value)

    @property
    def value(self) -> float:
        return self._value.value

    @value.setter
    def value(self, moment: float) -> None:
        self._value.value = moment

    @property
    def address(self) -> int:
        """For the mover."""
        return ctypes.addressof(self._value)
