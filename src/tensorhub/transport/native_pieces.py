"""Where the bytes of a read belong, as the native mover sees it: in chunks of a stream, or in parcels (`parcels`).

It must never: give the mover a number that could lead it out of the memory that it was given.
"""

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import add, le, mul

from .base import ByteStream, Terms
from .located import bare_addresses
from .native import shapes
from .parcels import Parcels, Scatter
from .rows import COUNT, COUNTS, ROW_WORDS, RUN, BadRow, Rows, placed
from .sealed import large_of

KEEP_WORDS = 9  # from, to, run, count, and its strides; counts, and its strides
FROM, TO = (0, 2, 3, 4, 6, 7), (1, 2, 3, 5, 6, 8)  # of a keep, what is a row on either side


@dataclass(frozen=True, eq=False, repr=False)
class Goal:
    """Where a read's bytes belong. Holds that memory."""

    table: shapes.Table
    count: int  # of chunks, or parcels
    chunk_bytes: int  # of one of them, about
    digest_count: int
    held: object
    parcels: shapes.Parcels | None = None
    scratch_bytes: int = 0  # that each stream needs
    large: "ctypes._Pointer[shapes.Large] | None" = None  # what all of it lies in


def goal_of_parcels(terms: Terms, parcels: Parcels) -> Goal | None:
    """Of a read of pieces. None where something does not fit: Python finds out what."""
    scatter = terms.scatter
    if scatter is None or not _fits(scatter, parcels):
        return None
    spans = zip(pairwise(parcels.bounds), scatter.is_kept, strict=True)
    scratch_bytes = max((stop - start for (start, stop), is_kept in spans if is_kept), default=0)
    ours, keeps = placed(scatter.ours, scatter.stream), _placed_keeps(scatter.keeps, scatter.stream, scratch_bytes)
    if ours is None or keeps is None or not _are_within(scatter.turns, scratch_bytes):
        return None
    both = zip(parcels.flags, scatter.is_kept, strict=True)
    flags = bytes(flag | shapes.IS_KEPT if is_kept else flag for flag, is_kept in both)
    held_flags = ctypes.create_string_buffer(flags, len(flags))
    state = shapes.Parcels(
        bounds=parcels.bounds.buffer_info()[0],
        flags=ctypes.addressof(held_flags),
        count=len(parcels),
        first_tile=scatter.first_tile.buffer_info()[0],
        tiles=scatter.tiles.buffer_info()[0],
        first_keep=scatter.first_keep.buffer_info()[0],
        keeps=keeps.buffer_info()[0],
        first_turn=scatter.first_turn.buffer_info()[0],
        turns=scatter.turns.buffer_info()[0],
    )
    return Goal(
        table=ours.table,
        count=len(parcels),
        chunk_bytes=max(1, parcels.size_bytes // max(1, len(parcels))),
        digest_count=len(scatter.tiles) - 1,
        held=(ours, keeps, held_flags, scatter, parcels),
        parcels=state,
        scratch_bytes=scratch_bytes,
        large=large_of(addresses) if (addresses := bare_addresses(scatter.stream)) is not None else None,
    )


def _fits(scatter: Scatter, parcels: Parcels) -> bool:
    """Parcels are made of whole tiles and lie in rows, or are kept; and keeps belong to parcels."""
    count, tiles = len(parcels), scatter.tiles
    if {len(scatter.first_tile), len(scatter.first_keep)} != {count + 1} or len(scatter.is_kept) != count or not tiles:
        return False
    numbers = (scatter.first_tile, scatter.first_keep, scatter.first_turn, tiles)
    if not all(all(map(le, row, row[1:])) for row in numbers):
        return False
    if scatter.first_tile[-1] != len(tiles) - 1 or scatter.first_keep[-1] * KEEP_WORDS != len(scatter.keeps):
        return False
    if len(scatter.first_turn) != len(tiles) or scatter.first_turn[-1] * ROW_WORDS != len(scatter.turns):
        return False
    if not all(tiles[tile] == at for tile, at in zip(scatter.first_tile, parcels.bounds, strict=True)):
        return False
    placed_whole = zip(pairwise(parcels.bounds), scatter.is_kept, strict=True)
    return _stretches(scatter.ours) == _joined([span for span, is_kept in placed_whole if not is_kept])


def _stretches(rows: Rows) -> list[tuple[int, int]]:
    """Which bytes of the stream that they make have a place in one of these rows."""
    runs, counts, outer = (rows.words[column::ROW_WORDS] for column in (RUN, COUNT, COUNTS))
    stops = map(add, rows.starts, map(mul, map(mul, runs, counts), outer))
    return _joined(list(zip(rows.starts, stops, strict=False)))


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes in as few spans as can be, where each goes on where the one before ended."""
    if not spans:
        return []
    gaps = [at for at, (one, other) in enumerate(pairwise(spans), start=1) if one[1] != other[0]]
    return [(spans[first][0], spans[last - 1][1]) for first, last in pairwise([0, *gaps, len(spans)])]


def _are_within(rows: "array[int]", size_bytes: int) -> bool:
    try:
        Rows.checked(rows, size_bytes)
    except (BadRow, OverflowError):
        return False
    return True


def _placed_keeps(keeps: "array[int]", stream: ByteStream, scratch_bytes: int) -> "array[int] | None":
    """The same with addresses to copy to. None if one reaches out of scratch memory, or of a piece of the stream."""
    found = array("Q", keeps)
    if not _are_within(_side(found, FROM), scratch_bytes):
        return None
    try:
        theirs = Rows.checked(_side(found, TO), stream.size_bytes)
    except (BadRow, OverflowError):
        return None
    there = placed(theirs, stream)
    if there is None:
        return None
    found[1::KEEP_WORDS] = there.addresses
    return found


def _side(keeps: "array[int]", columns: Sequence[int]) -> "array[int]":
    words = array("Q", bytes(8 * ROW_WORDS * (len(keeps) // KEEP_WORDS)))
    for at, column in enumerate(columns):
        words[at::ROW_WORDS] = keeps[column::KEEP_WORDS]
    return words
