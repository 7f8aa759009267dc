"""Registered memory on the host, seen as bytes: no copy, no dtype, no limit of numpy's.

A stream is a list of pieces that cover it without gaps. Asking for a range costs a binary search, a slice of a ready
list of views, and at most two new views at its ends, however many small pieces lie between them.

Never hand out a view that can outlive its memory: each keeps the stream's tensors alive.
"""

import ctypes
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import msgspec

from ..core.errors import UsageError
from ..transport.vectors import Addresses


class Piece(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A range of memory that is bytes [start, stop) of the logical stream."""

    start: int
    stop: int
    address: int
    device: str
    storage: int
    owners: tuple[object, ...]  # keep the memory alive

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start

    def follows(self, other: "Piece") -> bool:
        """It continues `other` in memory, inside the same allocation."""
        return (
            self.address == other.address + other.size_bytes
            and self.device == other.device
            and self.storage == other.storage
        )

    @staticmethod
    def join(run: Sequence["Piece"]) -> "Piece":
        """One piece for several that follow each other."""
        first = run[0]
        if len(run) == 1:
            return first
        owners = tuple(owner for piece in run for owner in piece.owners)
        return Piece(first.start, run[-1].stop, first.address, first.device, first.storage, owners)


def host_view(address: int, size_bytes: int, owner: object) -> memoryview:
    """Writable bytes at an address; the view, and every slice of it, keeps `owner` alive."""
    memory = (ctypes.c_char * size_bytes).from_address(address)
    memory.owner = owner  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def host_views(pieces: Sequence[Piece]) -> list[memoryview]:
    """Writable bytes of each piece; any of the views keeps all owners alive.

    They are slices of one view from the lowest to the highest address, of which nobody else gets hold: a slice takes
    0.1 us to make, and a view of its own 3 us.
    """
    if not pieces:
        return []
    lowest = min(piece.address for piece in pieces)
    highest = max(piece.address + piece.size_bytes for piece in pieces)
    every = host_view(lowest, highest - lowest, [piece.owners for piece in pieces])
    return [every[piece.address - lowest : piece.address - lowest + piece.size_bytes] for piece in pieces]


class HostStream:
    """A `ByteStream` over memory of this process."""

    is_bare = True

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._starts = [piece.start for piece in pieces]
        self._stops = [piece.stop for piece in pieces]
        self._addresses = [piece.address for piece in pieces]
        self._sizes = [piece.size_bytes for piece in pieces]
        self._views = host_views(pieces)
        self._size_bytes = pieces[-1].stop if pieces else 0
        self._table = Addresses.of_ranges(zip(self._addresses, self._sizes, strict=True))

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def piece_count(self) -> int:
        return len(self._views)

    def addresses(self) -> Addresses:
        """All of its memory, for transports that hand it to the kernel."""
        return self._table

    def reading(self, start: int, stop: int) -> AbstractContextManager[Sequence[memoryview]]:
        """The registered memory itself: what is written to it during the block is seen in it."""
        return nullcontext(self.views(start, stop))

    def writing(self, start: int, stop: int) -> AbstractContextManager[Sequence[memoryview]]:
        """The registered memory itself: a byte is in place as soon as it is written."""
        return nullcontext(self.views(start, stop))

    def took(self, size_bytes: int) -> None:
        """So much more of it has been written by whoever enters no blocks."""

    def views(self, start: int, stop: int) -> list[memoryview]:
        """Bytes [start, stop) of the stream, in order, none of them empty."""
        first, last = self._span(start, stop)
        if first >= last:
            return []
        views = self._views[first:last]
        if stop < self._stops[last - 1]:
            views[-1] = views[-1][: stop - self._starts[last - 1]]
        if start > self._starts[first]:
            views[0] = views[0][start - self._starts[first] :]
        return views

    def ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The same as (address, length): for transports that let the kernel or the hardware copy."""
        first, last = self._span(start, stop)
        if first >= last:
            return []
        found = list(zip(self._addresses[first:last], self._sizes[first:last], strict=True))
        address, size = found[-1]
        found[-1] = (address, size - max(0, self._stops[last - 1] - stop))
        address, size = found[0]
        before = start - self._starts[first]
        found[0] = (address + before, size - before)
        return found

    def _span(self, start: int, stop: int) -> tuple[int, int]:
        if not 0 <= start <= stop <= self._size_bytes:
            raise UsageError(f"bytes {start} to {stop} are not in a stream of {self._size_bytes} B")
        if start == stop:
            return 0, 0
        return bisect_right(self._starts, start) - 1, bisect_left(self._starts, stop)
