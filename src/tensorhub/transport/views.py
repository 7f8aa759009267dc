"""Memory as views and as tables of addresses, for system calls without the GIL."""

import ctypes
import errno
import os
import struct
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from operator import lt
from typing import Protocol, runtime_checkable

from .base import ByteStream

# --- Memory as a list of views: made flat, handed to the kernel in batches, advanced by what it moved, cut into
# blocks.
#
# It must never: copy a byte.


MAX_VIEWS = min(1024, os.sysconf("SC_IOV_MAX"))
CALL_BYTES = 1 << 20


def flat(buffer: bytes | memoryview) -> memoryview:
    """The same memory as bytes in one dimension."""
    view = buffer if isinstance(buffer, memoryview) else memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def one_call(pending: list[memoryview], first: int) -> list[memoryview]:
    """As many as one call takes, but no more than it is likely to move: each costs 50 ns to hand over."""
    most = min(MAX_VIEWS, max(64, CALL_BYTES // (len(pending[first]) or 1)))
    return pending[first : first + most]


def size_of(buffer: bytes | memoryview) -> int:
    """In bytes."""
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)


def advance(pending: list[memoryview], first: int, moved: int) -> int:
    """Where to go on after `moved` bytes: the index of the first view with something left, cut to what is left."""
    while moved > 0:
        size = len(pending[first])
        if moved < size:
            pending[first] = pending[first][moved:]
            return first
        moved -= size
        first += 1
    return first


def blocks_of(
    views: Sequence[memoryview], size_bytes: int, block_bytes: int
) -> Iterator[tuple[int, Sequence[memoryview]]]:
    """The views, of `size_bytes`, in runs of about `block_bytes`, with the size of each; large views are cut."""
    if size_bytes <= block_bytes:  # nearly always; and then nobody looks at each of a thousand small views
        yield size_bytes, views
        return
    run: list[memoryview] = []
    run_bytes = 0
    for view in views:
        for first in range(0, view.nbytes, block_bytes):
            part = view if view.nbytes <= block_bytes else view[first : first + block_bytes]
            run.append(part)
            run_bytes += part.nbytes
            if run_bytes >= block_bytes:
                yield run_bytes, run
                run, run_bytes = [], 0
    if run:
        yield run_bytes, run


# --- Where the bytes of a stream lie, as the kernel wants to hear it: tables of (address, length), made once, cut
# often.
#
# A model may have ten thousand tensors of a few KiB, each an allocation of its own. So nothing here runs a Python loop
# over them when bytes move: a part of a table is a slice of an array, and it is handed to the kernel as it is.
#
# To read many small pieces of another process costs the kernel 0.7 us for each, whatever its length. But small tensors
# that were allocated one after another lie a few hundred bytes apart. So `Bridged` asks for them in one piece, *with*
# the gaps between them, and lets the gaps' bytes fall into a bin that nobody looks at. A gap is less than a page, so
# each of its bytes shares a page with a tensor's: there is nothing in it that could not be read.
#
# It must never: let a gap's bytes come into a tensor, or into a stream.


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


# --- `sendmsg` and `recvmsg` with a ready table of addresses, through ctypes, without the GIL.
#
# Python's own calls want a memoryview for each piece and look at every one of them, in each call again: 0.1 us, which
# for a tensor of 4 KiB is as much as it takes to copy it. Here the kernel gets the table as it is
# (`vectors.Addresses`).
#
# Linux only, whose layout of `struct msghdr` this is; elsewhere, and for a few large pieces, `Wire` uses Python's
# calls. It must never: keep a table's address beyond the call.


IS_THERE = sys.platform == "linux"


class _Message(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_size", ctypes.c_uint32),
        ("vectors", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_size", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


_Function = Callable[[int, object, int], int]


def _function(name: str) -> _Function | None:
    if not IS_THERE:
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.argtypes = (ctypes.c_int, ctypes.POINTER(_Message), ctypes.c_int)
    function.restype = ctypes.c_ssize_t
    return function  # type: ignore[no-any-return]


_send, _receive = _function("sendmsg"), _function("recvmsg")
_NO_SIGNAL = 0x4000  # MSG_NOSIGNAL: a peer that left is an error here, not the end of the process


def send(descriptor: int, vectors: "array[int]") -> int:
    """Bytes sent, at least one. Raises `OSError` as `socket.sendmsg` does."""
    return _call(_send, descriptor, vectors, _NO_SIGNAL)


def receive(descriptor: int, vectors: "array[int]") -> int:
    """Bytes received; 0 when the peer has closed. Raises `OSError` as `socket.recvmsg_into` does."""
    return _call(_receive, descriptor, vectors, 0)


def _call(function: _Function | None, descriptor: int, vectors: "array[int]", flags: int) -> int:
    assert function is not None, "not on this system"
    address, words = vectors.buffer_info()
    message = _Message(vectors=address, count=words // 2)
    while True:
        moved = function(descriptor, message, flags)
        if moved >= 0:
            return moved
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


# --- Streams whose bytes have addresses in this process, so that the kernel can be told where to copy from and to.


MANY_VIEWS = 16  # of one chunk: from here on a ready table gains more than the second call of the kernel costs


@runtime_checkable
class Located(Protocol):
    """A stream whose bytes have addresses in this process."""

    def ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Bytes [start, stop) as (address, length), in order."""
        ...

    def addresses(self) -> Addresses:
        """All of it. Made once for each stream: ten thousand pieces take milliseconds."""
        ...


@runtime_checkable
class Bare(Protocol):
    """A located stream whose blocks do nothing: its bytes may be read and written without entering one."""

    is_bare: bool


def is_bare(stream: ByteStream) -> bool:
    """Its blocks do nothing but show memory."""
    return isinstance(stream, Bare) and stream.is_bare


def bare_addresses(stream: ByteStream) -> Addresses | None:
    """Where its bytes lie, if they may be moved without entering its blocks."""
    return stream.addresses() if is_bare(stream) and isinstance(stream, Located) else None


class Scattered:
    """Where a stream's small pieces lie, found out once there are so many that Python's calls are too slow for them."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._is_known = False
        self._addresses: Addresses | None = None

    def for_views(self, count: int) -> Addresses | None:
        """The stream's addresses, if this system takes them as they are and so many views are worth it."""
        return self.known() if count >= MANY_VIEWS else None

    def known(self) -> Addresses | None:
        """The stream's addresses, if it has any and this system takes them as they are."""
        if not IS_THERE:
            return None
        if not self._is_known:
            self._addresses = self._stream.addresses() if isinstance(self._stream, Located) else None
            self._is_known = True
        return self._addresses


# --- Parts of a stream that must be entered block by block (memory on a device), by way of memory of one's own.
#
# One block at a time: a thread that held a block for each part would wait for room that it holds itself. And what is
# written is written part by part: a block over several would write what lies between them too.


SPAN_BYTES = 1 << 20  # parts within that many bytes are read in one block

Range = tuple[int, int]  # place and length, in bytes


def gather(stream: ByteStream, ranges: Sequence[Range]) -> memoryview:
    """The bytes of the ranges, one after another."""
    data, at = memoryview(bytearray(sum(length for _, length in ranges))), 0
    for start, stop, inside in _spans(ranges):
        with stream.reading(start, stop) as views:
            block = views[0] if len(views) == 1 else memoryview(b"".join(views))
            for place, length in inside:
                data[at : at + length] = block[place - start : place - start + length]
                at += length
    return data


def scatter(stream: ByteStream, ranges: Sequence[Range], data: memoryview) -> None:
    """Write the bytes to the ranges, in their order, and nothing beside them."""
    at = 0
    for place, length in ranges:
        with stream.writing(place, place + length) as views:
            for view in views:
                view[:] = data[at : at + len(view)]
                at += len(view)


def _spans(ranges: Sequence[Range]) -> Iterator[tuple[int, int, list[Range]]]:
    """(first byte, the one behind the last, the ranges inside), of ranges that follow each other closely."""
    start = stop = 0
    inside: list[Range] = []
    for place, length in ranges:
        if inside and place >= stop and place + length - start <= SPAN_BYTES:
            stop = place + length
            inside.append((place, length))
            continue
        if inside:
            yield start, stop, inside
        start, stop, inside = place, place + length, [(place, length)]
    if inside:
        yield start, stop, inside
