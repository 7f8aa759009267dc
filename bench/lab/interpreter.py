"""The interpreter of a worker that computes: held for a part of the time, as a trainer's or an engine's Python does.

It is held by a sleep that does not let go of it (`ctypes.PyDLL`): no other thread of the process runs Python meanwhile,
and no processor is used, so that many workers fit on few cores. A slice begins when it is due and ends when it has been
held for `SLICE_S`. What it takes longer comes from other threads of the process that have the interpreter, and from a
processor that wakes the worker late. To tell what transfers have to do with it, slices during which bytes moved over
the worker's own link are counted apart from the others.
"""

import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

SLICE_S = 0.005  # the interpreter's switch interval: so long a busy thread keeps the lock from others that want it
MOVING_BYTES = 8 * 1024  # between two ends of slices: more than reports and orders; 10 ms at 10 Mbit/s
IDLE_POLL_S = 0.02

_libc = ctypes.PyDLL(None)


def hold(seconds: float) -> None:
    """Sleep, and keep the interpreter. A signal ends it early."""
    _libc.usleep(ctypes.c_uint(round(seconds * 1e6)))


class LinkCounter:
    """All bytes that a network interface of this process's namespace has sent and received."""

    def __init__(self, interface: str = "eth0") -> None:
        self._name = f"{interface}:".encode()
        self._file = os.open("/proc/self/net/dev", os.O_RDONLY | os.O_CLOEXEC)

    def __call__(self) -> int:
        for line in os.pread(self._file, 65536, 0).splitlines():
            name, *counts = line.split()
            if name == self._name:
                return int(counts[0]) + int(counts[8])
        return 0


class Slices(msgspec.Struct, frozen=True):
    """How many slices, and how many seconds they took together: while bytes moved over the link, and while none did."""

    moving: int = 0
    moving_s: float = 0.0
    still: int = 0
    still_s: float = 0.0

    @property
    def ratio(self) -> float:
        """One while bytes moved, over one while none did. There must be both."""
        return self.moving_s / self.moving * self.still / self.still_s

    def __add__(self, other: "Slices") -> "Slices":
        return Slices(
            self.moving + other.moving,
            self.moving_s + other.moving_s,
            self.still + other.still,
            self.still_s + other.still_s,
        )


@dataclass
class Interpreter:
    """Computes, and holds the interpreter for `held_share` of the time; 0: it sleeps, and holds nothing."""

    held_share: float
    link_bytes: Callable[[], int] = field(default_factory=LinkCounter)

    def compute(self, until: float, is_over: Callable[[], bool]) -> Slices:
        """Until that moment, or until it is over."""
        if not self.held_share:
            while not is_over() and (left := until - time.monotonic()) > 0:
                time.sleep(min(left, IDLE_POLL_S))
            return Slices()
        found, gap_s, carried = Slices(), SLICE_S * (1 - self.held_share) / self.held_share, self.link_bytes()
        while not is_over() and (left := until - time.monotonic()) > 0:
            if left < gap_s + SLICE_S:
                time.sleep(left)
                break
            due = time.monotonic() + gap_s
            time.sleep(gap_s)
            hold(SLICE_S)
            took_s, before, carried = time.monotonic() - due, carried, self.link_bytes()
            found += Slices(1, took_s, 0, 0.0) if carried - before >= MOVING_BYTES else Slices(0, 0.0, 1, took_s)
        return found
