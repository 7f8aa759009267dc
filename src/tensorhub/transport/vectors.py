"""Where the bytes of a stream lie, as the kernel wants to hear it: tables of (address, length), made once, cut often.

A model may have ten thousand tensors of a few KiB, each an allocation of its own. So nothing here runs a Python loop
over them when bytes move: a part of a table is a slice of an array, and it is handed to the kernel as it is.

To read many small pieces of another process costs the kernel 0.7 us for each, whatever its length. But small tensors
that were allocated one after another lie a few hundred bytes apart. So `Bridged` asks for them in one piece, *with* the
gaps between them, and lets the gaps' bytes fall into a bin that nobody looks at. A gap is less than a page, so each of
its bytes shares a page with a tensor's: there is nothing in it that could not be read.

It must never: let a gap's bytes come into a tensor, or into a stream.
"""

import ctypes
import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import lt

IOV_MAX = 1024  # of the kernel, for both sides of one call
GAP_BYTES = 4096  # a larger one costs more to copy than to ask for two pieces; and no page is smaller
SHARE = 4  # pieces in one span, at least, on an average; with fewer, asking for each is as cheap
COUNTS = struct.Struct("=QQ")  # both ends are one machine: its own byte order

_bin = ctypes.create_string_buffer(GAP_BYTES)


class Addresses:
    """A stream's memory: (address, length) of each piece in stream order, neighbours joined."""

    def __init__(
        self,
        pairs: "array[int]",
        first: int = 0,
        *,
        gaps: "array[int]",
        breaks: "array[int]",
        like: "Addresses | None" = None,
    ) -> None:
        """`pairs` is address, length, address, length, …; `first` the place in the stream of the first of its bytes.

        `gaps` has the bytes between each piece and the next, 0 where they are not near; `breaks` the numbers of those
        pieces that the next is not near to, the last piece's among them. `like` has pieces of the same lengths.
        """
        self.pairs = pairs
        self.gaps = gaps
        self.breaks = breaks
        if like is not None:
            self.starts: array[int] = like.starts
            self.stop: int = like.stop
            return
        self.starts = array("Q", accumulate(pairs[1::2], initial=first))
        self.stop = self.starts.pop()

    @classmethod
    def of_ranges(cls, ranges: Iterable[tuple[int, int]], first: int = 0) -> "Addresses":
        pairs, gaps, breaks = array("Q"), array("Q"), array("Q")
        end = -1
        for address, length in ranges:
            if not length:
                continue
            if address == end:
                pairs[-1] += length
            else:
                if pairs:
                    is_near = 0 < address - end < GAP_BYTES
                    gaps.append(address - end if is_near else 0)
                    if not is_near:
                        breaks.append(len(gaps) - 1)
                pairs.extend((address, length))
            end = address + length
        if pairs:
            gaps.append(0)
            breaks.append(len(gaps) - 1)
        return cls(pairs, first, gaps=gaps, breaks=breaks)

    @classmethod
    def of_views(cls, views: Sequence[memoryview], first: int) -> "Addresses":
        """Of writable memory of this process; the views must outlive the use."""
        return cls.of_ranges(((_address_of(view), view.nbytes) for view in views if view.nbytes), first)

    @property
    def count(self) -> int:
        """How many pieces."""
        return len(self.gaps)

    def encode(self) -> bytes:
        """For another process of this machine."""
        counts = COUNTS.pack(len(self.gaps), len(self.breaks))
        return b"".join((counts, self.pairs.tobytes(), self.gaps.tobytes(), self.breaks.tobytes()))

    @classmethod
    def decode(cls, data: memoryview, mine: "Addresses | None" = None) -> "Addresses":
        """What `encode` gave; sooner if `mine` has pieces of the same lengths. Raises `ValueError`."""
        if len(data) < COUNTS.size:
            raise ValueError(f"addresses of {len(data)} B")
        count, breaks_count = COUNTS.unpack_from(data)
        if count > len(data) or len(data) != COUNTS.size + 8 * (3 * count + breaks_count):
            raise ValueError(f"{count} addresses with their lengths in {len(data)} B")
        words = array("Q")
        words.frombytes(data[COUNTS.size :])
        pairs, gaps, breaks = words[: 2 * count], words[2 * count : 3 * count], words[3 * count :]
        lengths = pairs[1::2]
        like = mine if mine is not None and mine.pairs[1::2] == lengths else None
        if like is None and 0 in lengths:
            raise ValueError("an address without a length")
        if max(gaps, default=0) >= GAP_BYTES:
            raise ValueError("a gap between two pieces that are not near")
        if breaks[-1:] != array("Q", [count - 1] if count else ()) or not all(map(lt, breaks, breaks[1:])):
            raise ValueError("the addresses' breaks are not in order")
        try:
            return cls(pairs, gaps=gaps, breaks=breaks, like=like)
        except OverflowError as error:
            raise ValueError("more bytes than there are addresses") from error

    def whole(self, start: int, stop: int) -> int:
        """The address of bytes [start, stop) of the stream if they lie in one piece, or 0."""
        first = bisect_right(self.starts, start) - 1
        end = self.starts[first + 1] if first + 1 < len(self.starts) else self.stop
        return self.pairs[2 * first] + start - self.starts[first] if stop <= end else 0

    def span(self, start: int, stop: int, most: int) -> tuple[int, int]:
        """The pieces [first, last) with bytes of [start, stop) of the stream, at most that many."""
        first = bisect_right(self.starts, start) - 1
        if first + 1 == len(self.starts) or self.starts[first + 1] >= stop:  # one piece, as most parts are
            return first, first + 1
        return first, min(bisect_left(self.starts, stop), first + most)

    def part(self, start: int, stop: int, most: int = IOV_MAX) -> "array[int]":
        """Bytes [start, stop) of the stream as iovecs (address, length, address, …), at most so many of them."""
        first, last = self.span(start, stop, most)
        part = self.pairs[2 * first : 2 * last]
        end = self.starts[last - 1] + part[-1]
        if end > stop:
            part[-1] -= end - stop
        before = start - self.starts[first]
        part[0] += before
        part[1] -= before
        return part


class Bridged:
    """Two tables of the same stream, theirs with small gaps, to be read across the gaps. Immutable: for any thread."""

    def __init__(self, theirs: Addresses, ours: Addresses) -> None:
        """`can_help` says whether it is worth anything; if not, it must not be asked."""
        self._theirs = theirs
        self.can_help = theirs.count >= SHARE * len(theirs.breaks) and (
            theirs.starts is ours.starts or theirs.starts == ours.starts
        )
        if not self.can_help:
            return
        self._ours = array("Q", bytes(32 * ours.count))  # each piece of ours, and the bin for what follows it there
        self._ours[0::4], self._ours[1::4] = ours.pairs[0::2], ours.pairs[1::2]
        self._ours[2::4] = array("Q", [ctypes.addressof(_bin)]) * ours.count
        self._ours[3::4] = theirs.gaps

    def part(self, start: int, stop: int) -> tuple["array[int]", "array[int]", int]:
        """Iovecs for the first bytes of [start, stop), theirs and ours, and how many of the stream's bytes they are.

        A call that moves all of them has moved more than that, by the gaps.
        """
        theirs, pairs = self._theirs, self._theirs.pairs
        first, last = theirs.span(start, stop, IOV_MAX // 2)
        end = theirs.starts[last - 1] + pairs[2 * last - 1]
        beyond, before = max(0, end - stop), start - theirs.starts[first]
        ours = self._ours[4 * first : 4 * last - 2]
        ours[-1] -= beyond
        ours[0] += before
        ours[1] -= before
        asked = array("Q")
        for at in range(bisect_left(theirs.breaks, first), len(theirs.breaks)):
            piece = min(theirs.breaks[at], last - 1)
            address = pairs[2 * first]
            asked.extend((address, pairs[2 * piece] + pairs[2 * piece + 1] - address))
            first = piece + 1
            if first == last:
                break
        asked[-1] -= beyond
        asked[0] += before
        asked[1] -= before
        return asked, ours, end - beyond - start


def _address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
