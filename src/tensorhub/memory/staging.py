"""Device memory as a `ByteStream`: a block of it passes through a small ring of host memory.

Rules:
1. A block takes as many slots as its device bytes need, all at once and in order of arrival, and gives them back when
   it ends. It waits for them at most `wait_s`; a block that could never fit is refused at once.
2. `reading` copies to the host before the block begins; `writing` copies to the device when it ends, and returns when
   the bytes are in place. A `writing` block that raises copies nothing: the device keeps what it had.
3. Pieces that lie on the host are handed out directly, between the staged ones, and take no slot.
4. Several threads use one stream at once; each waits for its own copies only, so one's copy overlaps another's sending.

Knows no device: a `Copier` does the copying. Never: hold more host memory than the ring, or use it before it is needed.
"""

import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import repeat
from typing import Protocol

import msgspec

from ..core.errors import DeadlineExceeded, UsageError
from .host import Piece, host_view

SLOT_BYTES = 4 << 20  # one chunk of the usual size
SLOT_COUNT = 16  # 64 MiB in all: 8 threads, each with one chunk in a copy and one on the wire
HOLD_S = 0.25  # while a chunk is sent out of its slots: what a slower peer has not taken by then is copied
WAIT_S = 30.0  # for slots: those of a fill are held while one chunk comes, which a silent source ends sooner


class Copy(msgspec.Struct, frozen=True, gc=False):
    """`size_bytes` between a piece, from `inside` on, and the staging memory, from `at` on."""

    piece: int
    inside: int
    at: int
    size_bytes: int


class Copier(Protocol):
    """Moves bytes between pieces and staging memory."""

    def staging(self, size_bytes: int) -> memoryview:
        """Host memory that the device copies from and to fast. Called once."""
        ...

    def to_host(self, copies: Sequence[Copy]) -> None:
        """Returns when the bytes are in the staging memory."""
        ...

    def to_device(self, copies: Sequence[Copy]) -> None:
        """Returns when the bytes are in the pieces."""
        ...


class StagingRing:
    """Slots of equal size, lent in order of arrival."""

    def __init__(self, slot_bytes: int = SLOT_BYTES, slot_count: int = SLOT_COUNT, wait_s: float = WAIT_S) -> None:
        self.slot_bytes = slot_bytes
        self.slot_count = slot_count
        self._wait_s = wait_s
        self._free = list(range(slot_count))
        self._queue: deque[object] = deque()
        self._changed = threading.Condition()

    @property
    def size_bytes(self) -> int:
        return self.slot_bytes * self.slot_count

    @property
    def free_count(self) -> int:
        return len(self._free)

    @contextmanager
    def slots(self, size_bytes: int) -> Iterator[list[int]]:
        """Slots for `size_bytes`, for the length of the block. `DeadlineExceeded` if none come free in time."""
        count = -(-size_bytes // self.slot_bytes)
        if count > self.slot_count:
            raise UsageError(
                f"a block of {size_bytes} B does not fit the staging ring of {self.size_bytes} B",
                hint="use smaller chunks, or a larger ring",
            )
        taken = self._take(count)
        try:
            yield taken
        finally:
            with self._changed:
                self._free.extend(taken)
                self._changed.notify_all()

    def _take(self, count: int) -> list[int]:
        if count == 0:
            return []
        place = object()
        with self._changed:
            self._queue.append(place)
            try:
                if not self._changed.wait_for(
                    lambda: self._queue[0] is place and len(self._free) >= count, self._wait_s
                ):
                    raise DeadlineExceeded(
                        f"no {count} of {self.slot_count} staging slots came free in {self._wait_s} s"
                        f" ({len(self._free)} are free, {len(self._queue)} blocks wait)",
                        hint="a reader or writer keeps its block open; end it, or use fewer threads",
                    )
                self._free.sort()  # neighbouring slots make fewer views
                taken, self._free = self._free[:count], self._free[count:]
                return taken
            finally:
                self._queue.remove(place)
                self._changed.notify_all()  # the next in the queue may have enough


class StagedStream:
    """A `ByteStream` over pieces of device memory, and of host memory among them. `Scarce`: it has one small ring."""

    hold_s = HOLD_S

    def __init__(self, pieces: Sequence[Piece], copier: Copier, ring: StagingRing | None = None) -> None:
        self._pieces = pieces
        self._starts = [piece.start for piece in pieces]
        self._sizes = [piece.size_bytes for piece in pieces]
        self._host = [
            host_view(piece.address, piece.size_bytes, piece.owners) if piece.device == "cpu" else None
            for piece in pieces
        ]
        self._copier = copier
        self._ring = ring or StagingRing()
        self._staging: memoryview | None = None
        self._staging_lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        return self._pieces[-1].stop if self._pieces else 0

    @property
    def ring(self) -> StagingRing:
        return self._ring

    def reading(self, start: int, stop: int) -> AbstractContextManager[Sequence[memoryview]]:
        """A copy of the bytes as they are when the block begins (host pieces: the memory itself)."""
        return self._block(start, stop, writes=False)

    def writing(self, start: int, stop: int) -> AbstractContextManager[Sequence[memoryview]]:
        """Room whose every byte is to be written: what it holds before is not what the device holds."""
        return self._block(start, stop, writes=True)

    def places(self, start: int, stop: int) -> list[tuple[str, int, int]]:
        """Bytes [start, stop) as (device, address, length), in order: for transports that reach devices themselves."""
        return [
            (self._pieces[index].device, self._pieces[index].address + begin, end - begin)
            for index, begin, end in self._portions(start, stop)
        ]

    @contextmanager
    def _block(self, start: int, stop: int, *, writes: bool) -> Iterator[Sequence[memoryview]]:
        portions = self._portions(start, stop)
        staged_bytes = sum(end - begin for index, begin, end in portions if self._host[index] is None)
        with self._ring.slots(staged_bytes) as slots:
            views, copies = self._plan(portions, slots)
            if copies and not writes:
                self._copier.to_host(copies)
            yield views
            if copies and writes:
                self._copier.to_device(copies)

    def _portions(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(piece, begin, end) in stream order, begin and end counted from the piece's first byte."""
        if not 0 <= start <= stop <= self.size_bytes:
            raise UsageError(f"bytes {start} to {stop} are not in a stream of {self.size_bytes} B")
        if start == stop:
            return []
        first, last = bisect_right(self._starts, start) - 1, bisect_left(self._starts, stop)
        found = list(zip(range(first, last), repeat(0), self._sizes[first:last]))  # there may be thousands
        index, _, end = found[-1]
        found[-1] = index, 0, min(end, stop - self._starts[index])
        index, _, end = found[0]
        found[0] = index, start - self._starts[index], end
        return found

    def _plan(
        self, portions: Sequence[tuple[int, int, int]], slots: Sequence[int]
    ) -> tuple[list[memoryview], list[Copy]]:
        """Views in stream order, and the copies that make the staged ones true."""
        slot_bytes = self._ring.slot_bytes
        staging = self._staged_memory() if slots else memoryview(b"")
        views: list[memoryview] = []
        copies: list[Copy] = []
        begun = at = -1  # the first byte of staging memory that the next view shows, if any; where the next copy begins
        left, further = 0, iter(slots)  # bytes in this slot; slots after it
        for index, begin, end in portions:
            host = self._host[index]
            if host is not None:
                if begun >= 0:
                    views.append(staging[begun:at])
                    begun = -1
                views.append(host[begin:end])
                continue
            while begin < end:
                if not left:
                    slot, left = next(further) * slot_bytes, slot_bytes
                    if begun >= 0 and slot != at:
                        views.append(staging[begun:at])
                        begun = -1
                    at = slot
                if begun < 0:
                    begun = at
                size_bytes = end - begin if end - begin < left else left
                copies.append(Copy(index, begin, at, size_bytes))
                at += size_bytes
                begin += size_bytes
                left -= size_bytes
        if begun >= 0:
            views.append(staging[begun:at])
        return views, copies

    def _staged_memory(self) -> memoryview:
        with self._staging_lock:
            if self._staging is None:
                self._staging = self._copier.staging(self._ring.size_bytes)
            return self._staging
