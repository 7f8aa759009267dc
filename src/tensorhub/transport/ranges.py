"""Where the bytes of a stream lie: views, address tables, rows, and the batches of rows that a reader asks for."""

import ctypes
import sys
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Protocol, runtime_checkable

from ..protocol.errors import TensorHubError
from .base import ByteStream, Terms
from .native import load, shapes

# --- Memory as views: made flat, handed to the kernel, advanced by what it moved.


IOV_MAX = 1024  # of Linux, for one call of the kernel
CALL_BYTES = 1 << 20
Range = tuple[int, int]  # offset or address, and length in bytes


def flat(buffer: bytes | memoryview) -> memoryview:
    """A view of the same memory as bytes in one dimension."""
    view = buffer if isinstance(buffer, memoryview) else memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def one_call(pending: list[memoryview], first: int) -> list[memoryview]:
    """As many as one call takes, but no more than it is likely to move: each costs 50 ns to hand over."""
    most = min(IOV_MAX, max(64, CALL_BYTES // (len(pending[first]) or 1)))
    return pending[first : first + most]


def size_of(buffer: bytes | memoryview) -> int:
    """The size of the buffer in bytes."""
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


# --- Tables of addresses, made once for each stream and cut often: a model may have ten thousand small tensors.


class Addresses:
    """A stream's memory: (address, length) of each piece in stream order, neighbours joined."""

    def __init__(self, pairs: "array[int]", first: int = 0) -> None:
        """`pairs` is address, length, address, length, …; `first` the place in the stream of the first of its bytes."""
        self.pairs = pairs
        self.starts: array[int] = array("Q", accumulate(pairs[1::2], initial=first))
        self.stop: int = self.starts.pop()

    @classmethod
    def of_ranges(cls, ranges: Iterable[Range], first: int = 0) -> "Addresses":
        """Of (address, length) in stream order."""
        pairs, end = array("Q"), -1
        for address, length in ranges:
            if address == end:
                pairs[-1] += length
            elif length:
                pairs.extend((address, length))
            end = address + length if length else end
        return cls(pairs, first)

    @classmethod
    def of_views(cls, views: Sequence[memoryview], first: int) -> "Addresses":
        """Of writable memory of this process; the views must outlive the use."""
        found = ((ctypes.addressof(ctypes.c_char.from_buffer(view)), view.nbytes) for view in views if view.nbytes)
        return cls.of_ranges(found, first)

    @property
    def count(self) -> int:
        """The number of pieces."""
        return len(self.starts)

    def encode(self) -> bytes:
        """Encodes it for another process of this machine."""
        return self.pairs.tobytes()

    @classmethod
    def decode(cls, data: memoryview) -> "Addresses":
        """The table that `encode` gave. Raises `ValueError`."""
        pairs = array("Q")
        if len(data) % (2 * pairs.itemsize):
            raise ValueError(f"addresses with their lengths in {len(data)} B")
        pairs.frombytes(data)
        if 0 in pairs[1::2]:
            raise ValueError("an address without a length")
        try:
            return cls(pairs)
        except OverflowError as error:
            raise ValueError("more bytes than there are addresses") from error

    def whole(self, start: int, stop: int) -> int:
        """The address of bytes [start, stop) of the stream if they lie in one piece, or 0."""
        first = bisect_right(self.starts, start) - 1
        end = self.starts[first + 1] if first + 1 < len(self.starts) else self.stop
        return self.pairs[2 * first] + start - self.starts[first] if stop <= end else 0

    def part(self, start: int, stop: int, most: int = IOV_MAX) -> "array[int]":
        """Bytes [start, stop) of the stream as iovecs (address, length, address, …), at most so many of them."""
        first = bisect_right(self.starts, start) - 1
        last = max(first + 1, min(bisect_left(self.starts, stop), first + most))
        part = self.pairs[2 * first : 2 * last]
        end = self.starts[last - 1] + part[-1]
        if end > stop:
            part[-1] -= end - stop
        before = start - self.starts[first]
        part[0] += before
        part[1] -= before
        return part


@runtime_checkable
class Located(Protocol):
    """A stream whose bytes have addresses in this process."""

    def ranges(self, start: int, stop: int) -> list[Range]:
        """Bytes [start, stop) as (address, length), in order."""
        ...

    def addresses(self) -> Addresses:
        """All of it. Made once for each stream: ten thousand pieces take milliseconds."""
        ...


def is_bare(stream: ByteStream) -> bool:
    """Its blocks do nothing but show memory: its bytes may be read and written without entering one."""
    return bool(getattr(stream, "is_bare", False))


def bare_addresses(stream: ByteStream) -> Addresses | None:
    """Where its bytes lie, if they may be moved without entering its blocks."""
    return stream.addresses() if is_bare(stream) and isinstance(stream, Located) else None


# --- Parts of a stream, copied by way of memory of our own: one block at a time.
#
# A thread that held a block for each part would wait for room that it holds itself. And what is written is written part
# by part: a block over several would write what lies between them too.


SPAN_BYTES = 1 << 20  # parts within that many bytes are read in one block


def gather(stream: ByteStream, ranges: Sequence[Range]) -> memoryview:
    """The bytes of the ranges, one after another."""
    data, at = memoryview(bytearray(sum(length for _, length in ranges))), 0
    for start, stop, inside in _spans(ranges):
        with stream.views_to_read(start, stop) as views:
            block = views[0] if len(views) == 1 else memoryview(b"".join(views))
            for place, length in inside:
                data[at : at + length] = block[place - start : place - start + length]
                at += length
    return data


def scatter(stream: ByteStream, ranges: Sequence[Range], data: memoryview) -> None:
    """Write the bytes to the ranges, in their order, and nothing beside them."""
    at = 0
    for place, length in ranges:
        with stream.views_to_write(place, place + length) as views:
            for view in views:
                view[:] = data[at : at + len(view)]
                at += len(view)


def _spans(ranges: Sequence[Range]) -> Iterator[tuple[int, int, list[Range]]]:
    """(first byte, the one behind the last, the ranges inside), of ranges that follow each other closely."""
    start = stop = 0
    inside: list[Range] = []
    for place, length in ranges:
        if inside and (place < stop or place + length - start > SPAN_BYTES):
            yield start, stop, inside
            inside = []
        if not inside:
            start = place
        stop = place + length
        inside.append((place, length))
    if inside:
        yield start, stop, inside


# --- Rows: parts of a stream as flat numbers, and the stream that they make, one after another.
#
# A row is two loops around a run of bytes, six numbers:
#
#     for i in range(COUNTS):  for j in range(COUNT):
#         RUN bytes from PLACE + i * STRIDES + j * STRIDE on
#
# Both ends of a read of another layout speak of the stream that its rows make: it is cut into batches, and lies in rows
# of the source's stream, and in other rows of the reader's. Every number that comes from a peer is checked first.


PLACE, RUN, COUNT, STRIDE, COUNTS, STRIDES = range(6)
ROW_WORDS = 6
ROW_BYTES = 8 * ROW_WORDS
MAX_BATCH_BYTES = shapes.MAX_BATCH_BYTES


class BadRow(ValueError):
    """A row that cannot be: says which, and why."""


@dataclass(frozen=True, eq=False, repr=False)
class Rows:
    """Rows of one stream, and where each begins in the stream that they make."""

    words: "array[int]"  # six for each row
    starts: "array[int]"  # one more than there are rows, never falling
    needs: "array[int]"  # of checked rows: the first and the last chunk that each takes bytes from

    def __len__(self) -> int:
        return len(self.words) // ROW_WORDS

    @property
    def stop(self) -> int:
        """The end of the last piece."""
        return self.starts[-1]

    @classmethod
    def at(cls, words: "array[int]", starts: "array[int]") -> "Rows":
        """Of our own making. A row may end before the next begins: what lies between is elsewhere."""
        return cls(words, starts, array("Q"))

    @classmethod
    def checked(cls, words: "array[int]", size_bytes: int, chunk_bytes: int = 1 << 62) -> "Rows":
        """Rows of a stream of that size, which is cut into such chunks. Raises `BadRow`."""
        count = len(words) // ROW_WORDS
        starts, needs = array("Q", bytes(8 * count + 8)), array("Q", bytes(16 * count))
        library = load.library()
        if library is not None:
            wrong = int(
                library.check_rows(
                    *(words.buffer_info()[0], count, size_bytes, chunk_bytes),
                    *(starts.buffer_info()[0], needs.buffer_info()[0]),
                )
            )
            if wrong:
                raise _why(wrong - 1, words[ROW_WORDS * (wrong - 1) : ROW_WORDS * wrong], size_bytes)
            return cls(words, starts, needs)
        for at in range(count):
            row = words[ROW_WORDS * at : ROW_WORDS * (at + 1)]
            reach, size = _reach(row), row[RUN] * row[COUNT] * row[COUNTS]
            if not 0 < size <= MAX_BATCH_BYTES or row[PLACE] + reach > size_bytes:
                raise _why(at, row, size_bytes)
            starts[at + 1] = starts[at] + size
            needs[2 * at], needs[2 * at + 1] = row[PLACE] // chunk_bytes, (row[PLACE] + reach - 1) // chunk_bytes
        return cls(words, starts, needs)

    def ranges(self, start: int, stop: int) -> list[Range]:
        """Bytes [start, stop) of the stream that they make, as ranges of the stream they are of, neighbours joined."""
        found: list[Range] = []
        row = bisect_right(self.starts, start) - 1
        while start < stop:
            place, run, count, stride, counts, strides = self.words[ROW_WORDS * row : ROW_WORDS * (row + 1)]
            outer, first = divmod(start - self.starts[row], run * count)
            last = min(run * count, first + stop - start)
            start += last - first
            while first < last:
                each, inside = divmod(first, run)
                length = min(run - inside, last - first)
                at = place + outer * strides + each * stride + inside
                if found and sum(found[-1]) == at:
                    found[-1] = (found[-1][0], found[-1][1] + length)
                else:
                    found.append((at, length))
                first += length
            row += start >= self.starts[row] + run * count * counts
        return found

    def run_bytes(self, first: int, last: int) -> float:
        """How long the runs of rows [first, last) are on an average."""
        words = self.words
        runs = sum(words[6 * at + COUNT] * words[6 * at + COUNTS] for at in range(first, last))
        return (self.starts[last] - self.starts[first]) / max(1, runs)


def _reach(row: Sequence[int]) -> int:
    """From the first byte to behind the last."""
    return row[RUN] + (row[COUNT] - 1) * row[STRIDE] + (row[COUNTS] - 1) * row[STRIDES]


def _why(at: int, row: Sequence[int], size_bytes: int) -> BadRow:
    size = row[RUN] * row[COUNT] * row[COUNTS]
    if not size:
        return BadRow(f"row {at} has no bytes")
    if size > MAX_BATCH_BYTES:
        return BadRow(f"row {at} has {size} B, where {MAX_BATCH_BYTES} B are the limit")
    return BadRow(f"row {at} has bytes {row[PLACE]} to {row[PLACE] + _reach(row)} of a stream of {size_bytes} B")


class RowStream:
    """The stream that rows of another stream make. Each block copies, run by run: nothing between them is touched."""

    def __init__(self, stream: ByteStream, rows: Rows) -> None:
        self.rows = rows
        self._stream = stream

    @property
    def size_bytes(self) -> int:
        return self.rows.stop

    @contextmanager
    def views_to_read(self, start: int, stop: int) -> Iterator[Sequence[memoryview]]:
        yield [gather(self._stream, self.rows.ranges(start, stop))]

    @contextmanager
    def views_to_write(self, start: int, stop: int) -> Iterator[Sequence[memoryview]]:
        data = memoryview(bytearray(stop - start))
        yield [data]
        scatter(self._stream, self.rows.ranges(start, stop), data)


class Placed:
    """Rows as the mover has them: addresses, and loops around each. Holds all memory that it is given."""

    def __init__(self, rows: Rows, memory: Addresses) -> None:
        """Raises `BadRow` for one that lies in several pieces of memory."""
        library = load.library()
        assert library is not None, "addresses of rows are the mover's"
        count = len(rows)
        self._rows = rows
        self._pairs = array("Q", bytes(16 * count))
        self._loops = (shapes.Loop * max(1, count))()
        wrong = int(
            library.place_rows(
                rows.words.buffer_info()[0],
                count,
                table_of(memory),
                self._pairs.buffer_info()[0],
                ctypes.addressof(self._loops),
            )
        )
        if wrong:
            row = rows.words[ROW_WORDS * (wrong - 1) : ROW_WORDS * wrong]
            raise BadRow(f"bytes {row[PLACE]} to {row[PLACE] + _reach(row)} do not lie in one piece of memory")
        self.addresses = self._pairs[0::2]
        self.table = shapes.Table(
            pairs=self._pairs.buffer_info()[0],
            starts=rows.starts.buffer_info()[0],
            count=count,
            size=rows.stop,
            loops=ctypes.addressof(self._loops),
        )


def placed(rows: Rows, stream: ByteStream) -> Placed | None:
    """Rows of a stream for the mover; None where it is not in use, or the memory is not for it to touch."""
    addresses = bare_addresses(stream) if load.library() is not None else None
    if addresses is None or addresses.stop != stream.size_bytes:
        return None
    try:
        return Placed(rows, addresses)
    except BadRow:
        return None  # Python asks the stream, run by run


def table_of(addresses: Addresses) -> shapes.Table:
    """The table for the native library. `addresses` must outlive its use."""
    pairs, starts = addresses.pairs.buffer_info()[0], addresses.starts.buffer_info()[0]
    return shapes.Table(pairs=pairs, starts=starts, count=addresses.count, size=addresses.stop)


def starts_of(sizes: Sequence[int]) -> "array[int]":
    """Where each begins that has these sizes, and where the last one ends."""
    return array("Q", accumulate(sizes, initial=0))


# --- Batches: what a reader of another layout wants of one source.
#
# A tile lies in rows of the source's stream. A few whole tiles make a *batch*, which is asked for, sent, checked and
# counted by its number, as a chunk is. Each tile has a digest of its own.
#
#     reader  PIECES    once on each connection, after the greetings and the manifest: its batches
#     source  WAITING   it has taken them in; or GONE, where there is no room
#     reader  WANT      batches, by number
#     source  CHUNK     a batch's bytes; LENT, WAITING, GONE as ever
#     source  READY     where the reader fetches bytes itself, unless it wants that batch sent
#
# The body of PIECES is numbers of 8 bytes, little-endian: how many batches, how many rows, for each batch how many rows
# it has (and its flags in the upper half), and the rows. A source checks all of them before it does anything, has room
# for so many only, and sends a batch as soon as it has all chunks that the batch takes bytes from.


PIECES = 7
MAX_ROWS = 1 << 17  # of one connection; a read that wants more is made of several
MAX_PIECES_BYTES = 16 + MAX_ROWS * (8 + ROW_BYTES)
ROOM_BYTES = 128 << 20  # of a source for what all its readers want; one takes 0.1 KB for each row
FLAG_SHIFT = 32


class BadPieces(ValueError):
    """What a reader wants cannot be: says why."""


@dataclass(frozen=True, eq=False, repr=False)
class Batches:
    """Rows of a source's stream, put together in batches. Their bytes, one after another, are a stream of their own."""

    rows: Rows
    first_row: "array[int]"  # [batches + 1]
    bounds: "array[int]"  # [batches + 1] where each begins in that stream
    flags: bytes  # [batches]
    source_bytes: int  # of the source's stream

    def __len__(self) -> int:
        return len(self.flags)

    def __repr__(self) -> str:
        return f"<{len(self)} batches of {len(self.rows)} rows, {self.size_bytes} B>"

    @property
    def size_bytes(self) -> int:
        return self.rows.stop

    @cached_property
    def largest_bytes(self) -> int:
        """The size of the largest batch."""
        return max((stop - start for start, stop in pairwise(self.bounds)), default=0)

    @classmethod
    def of(
        cls,
        words: "array[int]",
        counts: Sequence[int],
        source_bytes: int,
        *,
        flags: bytes | None = None,
        chunk_bytes: int = 1 << 62,
    ) -> "Batches":
        """From rows, and how many of them each batch has. Raises `BadPieces`."""
        if not all(counts):
            raise BadPieces(f"batch {list(counts).index(0)} has no rows")
        if sum(counts) != len(words) // ROW_WORDS or len(words) % ROW_WORDS:
            raise BadPieces(f"batches of {sum(counts)} rows, but {len(words) / ROW_WORDS:g} rows")
        try:
            rows = Rows.checked(words, source_bytes, chunk_bytes)
        except (BadRow, OverflowError) as error:
            raise BadPieces(str(error)) from error
        first_row = array("Q", accumulate(counts, initial=0))
        bounds = array("Q", map(rows.starts.__getitem__, first_row))
        found = cls(rows, first_row, bounds, bytes(len(counts)) if flags is None else flags, source_bytes)
        if found.largest_bytes > MAX_BATCH_BYTES:
            raise BadPieces(f"a batch of {found.largest_bytes} B, where {MAX_BATCH_BYTES} B are the limit")
        return found

    def span(self, batch: int) -> tuple[int, int]:
        """Where it lies in the stream of all batches."""
        return self.bounds[batch], self.bounds[batch + 1]

    def is_sent(self, batch: int) -> bool:
        """Over the socket, by any transport."""
        return bool(self.flags[batch] & shapes.IS_SENT)

    def sending(self, wanted: Sequence[bool]) -> "Batches":
        """The same, with those sent that a source would otherwise only announce."""
        flags = (flag | shapes.IS_SENT if is_sent else flag for flag, is_sent in zip(self.flags, wanted, strict=True))
        return replace(self, flags=bytes(flags))

    def encode(self) -> bytes:
        """Encodes it for the wire."""
        heads = (b - a | flag << FLAG_SHIFT for (a, b), flag in zip(pairwise(self.first_row), self.flags, strict=True))
        words = array("Q", [len(self), len(self.rows), *heads])
        words += self.rows.words
        return _little(words).tobytes()

    @classmethod
    def decode(cls, body: bytes | bytearray, source_bytes: int, chunk_bytes: int) -> "Batches":
        """Decodes a peer's request. Raises `BadPieces`."""
        if len(body) % 8 or len(body) < 16:
            raise BadPieces(f"{len(body)} B are no numbers")
        words = array("Q")
        words.frombytes(body)
        words = _little(words)
        count, rows = words[0], words[1]
        if rows > MAX_ROWS or count > rows or len(words) != 2 + count + ROW_WORDS * rows:
            raise BadPieces(f"{count} batches of {rows} rows in {len(body)} B, where {MAX_ROWS} rows are the limit")
        heads = words[2 : 2 + count]
        if any(head >> FLAG_SHIFT & ~shapes.IS_SENT for head in heads):
            raise BadPieces("a batch with flags that are unknown here")
        counts = [head & 0xFFFFFFFF for head in heads]
        flags = bytes(head >> FLAG_SHIFT for head in heads)
        return cls.of(words[2 + count :], counts, source_bytes, flags=flags, chunk_bytes=chunk_bytes)


def _little(words: "array[int]") -> "array[int]":
    if sys.byteorder == "big":
        words.byteswap()
    return words


class Room:
    """What a source has for all that its readers want at a time."""

    def __init__(self, max_bytes: int = ROOM_BYTES) -> None:
        self._left = max_bytes
        self._lock = threading.Lock()

    @contextmanager
    def taken(self, size_bytes: int) -> Iterator[bool]:
        """Within the block that much is taken. False: there is no room."""
        with self._lock:
            is_room = size_bytes <= self._left
            if is_room:
                self._left -= size_bytes
        try:
            yield is_room
        finally:
            if is_room:
                with self._lock:
                    self._left += size_bytes


@dataclass(frozen=True, eq=False, repr=False)
class Scatter:
    """Where batches belong at a reader: for a transport that checks them and puts them into place by itself."""

    stream: ByteStream  # the registered tensors
    ours: Rows  # of that stream: where bytes of the batches' stream belong. Nothing for a batch that is kept in part
    first_tile: "array[int]"  # [batches + 1]
    tiles: "array[int]"  # [tiles + 1] where each begins in the batches' stream
    is_kept: bytes  # [batches] 1: it goes into scratch memory, is checked there, and parts of it are kept
    keeps: "array[int]"  # nine for each part: place in the batch and in `stream`, run, and two loops (`reshard`)
    first_keep: "array[int]"  # [batches + 1]
    reorder_rows: "array[int]"  # rows of a batch that is kept: how a tile that comes in another order is gone through
    first_reorder_row: "array[int]"  # [tiles + 1]


@runtime_checkable
class TrustingBatches(Protocol):
    """A sink that lets the transport check batches. Its `terms` are known before it begins."""

    def terms(self) -> Terms | None: ...

    def told(self, size_bytes: int) -> None: ...

    def count(self, batches: range) -> None:
        """Count these batches: the transport has checked them by `terms` and put them in place."""
        ...


@runtime_checkable
class Piecewise(Protocol):
    """A sink that wants pieces. Its `stream` is the batches', its chunks are batches, `chunk_bytes` the largest.

    `begin` returns numbers of batches. `accept` checks each tile of one, and `stored` says that it is in place: also of
    tiles that are kept in part, which `stream.views_to_write` gives scratch memory for.
    """

    @property
    def batches(self) -> Batches:
        """Known once `begin` has returned."""
        ...

    def wrong_tile(self, tile: int) -> TensorHubError:
        """In words: the transport has found that this tile, counted over all batches, is not as announced."""
        ...
