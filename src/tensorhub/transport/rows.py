"""Rows: parts of a stream as flat numbers, and the stream that they make, one after another.

A row is two loops around a run of bytes, six numbers:

    for i in range(COUNTS):  for j in range(COUNT):
        RUN bytes from PLACE + i * STRIDES + j * STRIDE on

Rows make a stream of their own: their runs' bytes in that order. Both ends of a read of pieces speak of that stream: it
is cut into parcels as another stream is cut into chunks, and lies in rows of the source's stream, and in other rows of
the reader's. Numbers that come from a peer are looked at, every one of them, before anything is done with them.

It must never: copy a byte, or believe a number.
"""

import ctypes
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate

from .base import ByteStream
from .gathered import gather, scatter
from .located import bare_addresses, is_bare
from .native import load, shapes
from .vectors import Addresses

PLACE, RUN, COUNT, STRIDE, COUNTS, STRIDES = range(6)
ROW_WORDS = 6
ROW_BYTES = 8 * ROW_WORDS
MAX_PARCEL_BYTES = shapes.MAX_PARCEL_BYTES

Block = Callable[[int, int], AbstractContextManager[Sequence[memoryview]]]


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
        """Where the last one ends."""
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
            if not 0 < size <= MAX_PARCEL_BYTES or row[PLACE] + reach > size_bytes:
                raise _why(at, row, size_bytes)
            starts[at + 1] = starts[at] + size
            needs[2 * at], needs[2 * at + 1] = row[PLACE] // chunk_bytes, (row[PLACE] + reach - 1) // chunk_bytes
        return cls(words, starts, needs)

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int, int]]:
        """Bytes [start, stop) of the stream that they make, as series of runs: place, run, count, stride, skipped.

        Of the bytes of such a series the first `skipped` come before `start`.
        """
        row = bisect_right(self.starts, start) - 1
        while start < stop:
            place, run, count, stride, _, strides = self.words[ROW_WORDS * row : ROW_WORDS * (row + 1)]
            series = run * count
            outer, skipped = divmod(start - self.starts[row], series)
            taken = min(series - skipped, stop - start)
            yield place + outer * strides, run, count, stride, skipped
            start += taken
            if start >= self.starts[row] + series * self.words[ROW_WORDS * row + COUNTS]:
                row += 1

    def series(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int, int, int]]:
        """Inner loops: place, run, count, stride; and which of their bytes are meant, [first, last)."""
        for place, run, count, stride, skipped in self.runs(start, stop):
            last = min(run * count, skipped + stop - start)
            yield place, run, count, stride, skipped, last
            start += last - skipped

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
    if size > MAX_PARCEL_BYTES:
        return BadRow(f"row {at} has {size} B, where {MAX_PARCEL_BYTES} B are the limit")
    return BadRow(f"row {at} has bytes {row[PLACE]} to {row[PLACE] + _reach(row)} of a stream of {size_bytes} B")


class RowStream:
    """The stream that rows of another stream make."""

    def __init__(self, stream: ByteStream, rows: Rows) -> None:
        self.rows = rows
        self._stream = stream
        self._is_bare = is_bare(stream)

    @property
    def size_bytes(self) -> int:
        return self.rows.stop

    @contextmanager
    def reading(self, start: int, stop: int) -> Iterator[Sequence[memoryview]]:
        if not self._is_bare:
            yield [gather(self._stream, self.ranges_of(self.rows, start, stop))]
            return
        with ExitStack() as stack:
            yield self._views(stack, self._stream.reading, start, stop)

    @contextmanager
    def writing(self, start: int, stop: int) -> Iterator[Sequence[memoryview]]:
        if not self._is_bare:
            data = memoryview(bytearray(stop - start))
            yield [data]
            scatter(self._stream, self.ranges_of(self.rows, start, stop), data)
            return
        with ExitStack() as stack:
            yield self._views(stack, self._stream.writing, start, stop)

    def _views(self, stack: ExitStack, block: Block, start: int, stop: int) -> list[memoryview]:
        """Run by run, so that nothing between them is touched. Blocks do nothing here but show memory."""
        found: list[memoryview] = []
        for place, run, _, stride, first, last in self.rows.series(start, stop):
            begin, end = first // run, -(-last // run)  # runs that have bytes of it
            near = stack.enter_context(block(place + begin * stride, place + (end - 1) * stride + run))
            if len(near) == 1:
                views = [near[0][at * stride : at * stride + run] for at in range(end - begin)]
            else:
                views = []
                for each in range(begin, end):
                    views += stack.enter_context(block(place + each * stride, place + each * stride + run))
            found += _cut(views, first - begin * run, last - begin * run, (end - begin) * run)
        return found

    @staticmethod
    def ranges_of(rows: Rows, start: int, stop: int) -> list[tuple[int, int]]:
        """The same as (place, length) in the stream that the rows are of, neighbours joined."""
        found: list[tuple[int, int]] = []
        for place, run, _, stride, first, last in rows.series(start, stop):
            while first < last:
                each, inside = divmod(first, run)
                length = min(run - inside, last - first)
                at = place + each * stride + inside
                if found and sum(found[-1]) == at:
                    found[-1] = (found[-1][0], found[-1][1] + length)
                else:
                    found.append((at, length))
                first += length
        return found


def _cut(views: list[memoryview], first: int, last: int, size_bytes: int) -> list[memoryview]:
    """Without what comes before `first` and from `last` on."""
    found = list(views)
    while first > 0 and found:
        taken = min(first, found[0].nbytes)
        found[0] = found[0][taken:]
        first -= taken
        if not found[0].nbytes:
            del found[0]
    beyond = size_bytes - last
    while beyond > 0 and found:
        taken = min(beyond, found[-1].nbytes)
        found[-1] = found[-1][: found[-1].nbytes - taken]
        beyond -= taken
        if not found[-1].nbytes:
            del found[-1]
    return found


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
    """For the library. `addresses` must outlive its use."""
    pairs, starts = addresses.pairs.buffer_info()[0], addresses.starts.buffer_info()[0]
    return shapes.Table(pairs=pairs, starts=starts, count=addresses.count, size=addresses.stop)


def starts_of(sizes: Sequence[int]) -> "array[int]":
    """Where each begins that has these sizes, and where the last one ends."""
    return array("Q", accumulate(sizes, initial=0))
