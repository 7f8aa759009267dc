"""Rows of a stream, and the batches in which a reader of another layout asks for them."""

import ctypes
import sys
import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Protocol, runtime_checkable

from ..protocol.errors import TensorHubError
from .base import ByteStream, Terms
from .native import load, shapes
from .views import Addresses, bare_addresses, gather, is_bare, scatter

# --- Rows: parts of a stream as flat numbers, and the stream that they make, one after another.
#
# A row is two loops around a run of bytes, six numbers:
#
#     for i in range(COUNTS):  for j in range(COUNT):
#         RUN bytes from PLACE + i * STRIDES + j * STRIDE on
#
# Rows make a stream of their own: their runs' bytes in that order. Both ends of a read of pieces speak of that
# stream: it is cut into batches as another stream is cut into chunks, and lies in rows of the source's stream, and in
# other rows of the reader's. Numbers that come from a peer are looked at, every one of them, before anything is done
# with them.
#
# It must never: copy a byte, or believe a number.


PLACE, RUN, COUNT, STRIDE, COUNTS, STRIDES = range(6)
ROW_WORDS = 6
ROW_BYTES = 8 * ROW_WORDS
MAX_BATCH_BYTES = shapes.MAX_BATCH_BYTES

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
            if not 0 < size <= MAX_BATCH_BYTES or row[PLACE] + reach > size_bytes:
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
    if size > MAX_BATCH_BYTES:
        return BadRow(f"row {at} has {size} B, where {MAX_BATCH_BYTES} B are the limit")
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


# --- What a reader wants of one source, where it does not want all: tiles of another layout, in batches.
#
# A reader whose boxes are not the source's wants tiles, of which each lies in rows of the source's stream (`rows`). It
# puts a few whole tiles into a *batch*, which is to such a read what a chunk is to another one: asked for, sent,
# judged and counted by its number. A tile has a digest of its own, so that a batch is judged whatever it was put
# together of.
#
#     reader  PIECES    once on each connection, after the greetings and the manifest: its batches
#     source  WAITING   it has taken them in; or GONE, where there is no room
#     reader  WANT      batches, by number
#     source  CHUNK     a batch's bytes; LENT, WAITING, GONE as ever
#     source  READY     where the reader fetches bytes itself, unless it wants that batch sent
#
# The body of PIECES is numbers of 8 bytes, little-endian: how many batches, how many rows, for each batch how many
# rows it has (and its flags in the upper half), and the rows. A source looks at all of them before it does anything,
# and has room for so many only. It sends a batch as soon as it has all chunks that the batch takes bytes from.
#
# It must never: be trusted before it was checked.


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
    def most_bytes(self) -> int:
        """Of the largest batch."""
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
        """From rows, and how many of them each batch has. Raises `BadPieces`, whoever has made them."""
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
        if found.most_bytes > MAX_BATCH_BYTES:
            raise BadPieces(f"a batch of {found.most_bytes} B, where {MAX_BATCH_BYTES} B are the limit")
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
        """As it travels."""
        heads = (b - a | flag << FLAG_SHIFT for (a, b), flag in zip(pairwise(self.first_row), self.flags, strict=True))
        words = array("Q", [len(self), len(self.rows), *heads])
        words += self.rows.words
        return _little(words).tobytes()

    @classmethod
    def decode(cls, body: bytes | bytearray, source_bytes: int, chunk_bytes: int) -> "Batches":
        """What a peer wants. Raises `BadPieces`."""
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

    def __init__(self, most_bytes: int = ROOM_BYTES) -> None:
        self._left = most_bytes
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
    """Where batches belong at a reader: for a transport that judges them and puts them into place by itself."""

    stream: ByteStream  # the registered tensors
    ours: Rows  # of that stream: where bytes of the batches' stream belong. Nothing for a batch that is kept in part
    first_tile: "array[int]"  # [batches + 1]
    tiles: "array[int]"  # [tiles + 1] where each begins in the batches' stream
    is_kept: bytes  # [batches] 1: it goes into scratch memory, is judged there, and parts of it are kept
    keeps: "array[int]"  # nine for each part: place in the batch and in `stream`, run, and two loops (`reshard`)
    first_keep: "array[int]"  # [batches + 1]
    turns: "array[int]"  # rows of a batch that is kept: how a tile that comes in another order is gone through
    first_turn: "array[int]"  # [tiles + 1]


@runtime_checkable
class Counting(Protocol):
    """A sink of pieces that a device may judge. Its `terms` are known before it begins."""

    def terms(self) -> Terms | None: ...

    def told(self, size_bytes: int) -> None: ...

    def count(self, batches: range) -> None:
        """The transport has judged them by `terms`, and put them in place: they count from now on."""
        ...


@runtime_checkable
class Piecewise(Protocol):
    """A sink that wants pieces. Its `stream` is the batches', its chunks are batches, `chunk_bytes` the largest.

    `begin` returns numbers of batches. `accept` judges each tile of one, and `stored` says that it is in place: also of
    tiles that are kept in part, which `stream.writing` gives scratch memory for.
    """

    @property
    def batches(self) -> Batches:
        """Known once `begin` has returned."""
        ...

    def wrong_tile(self, tile: int) -> TensorHubError:
        """In words: the transport has found that this tile, counted over all batches, is not as announced."""
        ...
