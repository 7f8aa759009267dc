"""What a reader wants of one source, where it does not want all: tiles of another layout, in parcels.

A reader whose boxes are not the source's wants tiles, of which each lies in rows of the source's stream (`rows`). It
puts a few whole tiles into a *parcel*, which is to such a read what a chunk is to another one: asked for, sent, judged
and counted by its number. A tile has a digest of its own, so that a parcel is judged whatever it was put together of.

    reader  PIECES    once on each connection, after the greetings and the manifest: its parcels
    source  WAITING   it has taken them in; or GONE, where there is no room
    reader  WANT      parcels, by number
    source  CHUNK     a parcel's bytes; LENT, WAITING, GONE as ever
    source  READY     where the reader fetches bytes itself, unless it wants that parcel sent

The body of PIECES is numbers of 8 bytes, little-endian: how many parcels, how many rows, for each parcel how many rows
it has (and its flags in the upper half), and the rows. A source looks at all of them before it does anything, and has
room for so many only. It sends a parcel as soon as it has all chunks that the parcel takes bytes from.

It must never: be trusted before it was checked.
"""

import sys
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Protocol, runtime_checkable

from ..core.errors import TensorHubError
from .base import ByteStream, Terms
from .native import shapes
from .rows import MAX_PARCEL_BYTES, ROW_BYTES, ROW_WORDS, BadRow, Rows

PIECES = 7
MAX_ROWS = 1 << 17  # of one connection; a read that wants more is made of several
MAX_PIECES_BYTES = 16 + MAX_ROWS * (8 + ROW_BYTES)
ROOM_BYTES = 128 << 20  # of a source for what all its readers want; one takes 0.1 KB for each row
FLAG_SHIFT = 32


class BadPieces(ValueError):
    """What a reader wants cannot be: says why."""


@dataclass(frozen=True, eq=False, repr=False)
class Parcels:
    """Rows of a source's stream, put together in parcels. Their bytes, one after another, are a stream of their own."""

    rows: Rows
    first_row: "array[int]"  # [parcels + 1]
    bounds: "array[int]"  # [parcels + 1] where each begins in that stream
    flags: bytes  # [parcels]
    source_bytes: int  # of the source's stream

    def __len__(self) -> int:
        return len(self.flags)

    def __repr__(self) -> str:
        return f"<{len(self)} parcels of {len(self.rows)} rows, {self.size_bytes} B>"

    @property
    def size_bytes(self) -> int:
        return self.rows.stop

    @cached_property
    def most_bytes(self) -> int:
        """Of the largest parcel."""
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
    ) -> "Parcels":
        """From rows, and how many of them each parcel has. Raises `BadPieces`, whoever has made them."""
        if not all(counts):
            raise BadPieces(f"parcel {list(counts).index(0)} has no rows")
        if sum(counts) != len(words) // ROW_WORDS or len(words) % ROW_WORDS:
            raise BadPieces(f"parcels of {sum(counts)} rows, but {len(words) / ROW_WORDS:g} rows")
        try:
            rows = Rows.checked(words, source_bytes, chunk_bytes)
        except (BadRow, OverflowError) as error:
            raise BadPieces(str(error)) from error
        first_row = array("Q", accumulate(counts, initial=0))
        bounds = array("Q", map(rows.starts.__getitem__, first_row))
        found = cls(rows, first_row, bounds, bytes(len(counts)) if flags is None else flags, source_bytes)
        if found.most_bytes > MAX_PARCEL_BYTES:
            raise BadPieces(f"a parcel of {found.most_bytes} B, where {MAX_PARCEL_BYTES} B are the limit")
        return found

    def span(self, parcel: int) -> tuple[int, int]:
        """Where it lies in the stream of all parcels."""
        return self.bounds[parcel], self.bounds[parcel + 1]

    def is_sent(self, parcel: int) -> bool:
        """Over the socket, by any transport."""
        return bool(self.flags[parcel] & shapes.IS_SENT)

    def sending(self, wanted: Sequence[bool]) -> "Parcels":
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
    def decode(cls, body: bytes | bytearray, source_bytes: int, chunk_bytes: int) -> "Parcels":
        """What a peer wants. Raises `BadPieces`."""
        if len(body) % 8 or len(body) < 16:
            raise BadPieces(f"{len(body)} B are no numbers")
        words = array("Q")
        words.frombytes(body)
        words = _little(words)
        count, rows = words[0], words[1]
        if rows > MAX_ROWS or count > rows or len(words) != 2 + count + ROW_WORDS * rows:
            raise BadPieces(f"{count} parcels of {rows} rows in {len(body)} B, where {MAX_ROWS} rows are the limit")
        heads = words[2 : 2 + count]
        if any(head >> FLAG_SHIFT & ~shapes.IS_SENT for head in heads):
            raise BadPieces("a parcel with flags that are unknown here")
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
    """Where parcels belong at a reader: for a transport that judges them and puts them into place by itself."""

    stream: ByteStream  # the registered tensors
    ours: Rows  # of that stream: where bytes of the parcels' stream belong. Nothing for a parcel that is kept in part
    first_tile: "array[int]"  # [parcels + 1]
    tiles: "array[int]"  # [tiles + 1] where each begins in the parcels' stream
    is_kept: bytes  # [parcels] 1: it goes into scratch memory, is judged there, and parts of it are kept
    keeps: "array[int]"  # nine for each part: place in the parcel and in `stream`, run, and two loops (`memory/tiles`)
    first_keep: "array[int]"  # [parcels + 1]
    turns: "array[int]"  # rows of a parcel that is kept: how a tile that comes in another order is gone through
    first_turn: "array[int]"  # [tiles + 1]


@runtime_checkable
class Counting(Protocol):
    """A sink of pieces that a device may judge. Its `terms` are known before it begins."""

    def terms(self) -> Terms | None: ...

    def told(self, size_bytes: int) -> None: ...

    def count(self, parcels: range) -> None:
        """The transport has judged them by `terms`, and put them in place: they count from now on."""
        ...


@runtime_checkable
class Piecewise(Protocol):
    """A sink that wants pieces. Its `stream` is the parcels', its chunks are parcels, `chunk_bytes` the largest.

    `begin` returns numbers of parcels. `accept` judges each tile of one, and `stored` says that it is in place: also of
    tiles that are kept in part, which `stream.writing` gives scratch memory for.
    """

    @property
    def parcels(self) -> Parcels:
        """Known once `begin` has returned."""
        ...

    def wrong_tile(self, tile: int) -> TensorHubError:
        """In words: the transport has found that this tile, counted over all parcels, is not as announced."""
        ...
