"""A shard's tiles in the order of its memory, in chunks of at most 4 MiB: the unit of progress among equal layouts.

A chunk is nearly always one run of bytes that consists of whole tiles, so that readers of one layout exchange it as
they exchange any bytes. Where tiles lie between each other in too long a stretch, or beside memory that is in no box,
it is just a set of tiles (`is_run` is false) and is moved row by row. Chunks follow from layout and grid alone.
"""

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from .arrays import EMPTY, Bools, Ints, ints, spans, starts_of
from .cells import Tiles
from .grid import BAND_BYTES


@dataclass(frozen=True, eq=False, repr=False)
class Chunks:
    """Chunk c has the tiles `order[first[c] : first[c + 1]]`, within bytes [start[c], stop[c]) of the stream."""

    order: Ints  # tiles (positions in `Tiles`) sorted by place; aliases are left out, for they need no bytes
    first: Ints  # [chunks + 1]
    start: Ints
    stop: Ints
    size_bytes: Ints  # of its tiles; less than stop - start where other memory lies between them
    is_run: Bools

    def __len__(self) -> int:
        return len(self.start)

    def of_tiles(self, count: int) -> Ints:
        """The chunk of each of `count` tiles; -1 for aliases."""
        found = np.full(count, -1, np.int64)
        found[self.order] = np.repeat(np.arange(len(self)), np.diff(self.first))
        return found


def chunks_of(tiles: Tiles, chunk_bytes: int = BAND_BYTES) -> Chunks:
    """The chunks of a shard: of all its tiles. A single tile is never cut, whatever its size."""
    is_own = tiles.table.alias_of[tiles.box] == tiles.box
    order = np.flatnonzero(is_own)
    order = order[np.argsort(tiles.offset[order], kind="stable")]
    if not len(order):
        return Chunks(EMPTY, np.zeros(1, np.int64), EMPTY, EMPTY, EMPTY, np.zeros(0, np.bool_))
    size_bytes = tiles.size_bytes[order]
    start = tiles.offset[order]
    span = spans(tiles.size, tiles.strides, tiles.item)
    reach = np.maximum.accumulate(start + span[order])
    atoms = np.flatnonzero(np.concatenate([[True], start[1:] >= reach[:-1]]))  # between two of them nothing interleaves
    ends = np.concatenate([reach[atoms[1:] - 1], reach[-1:]])
    total = np.add.reduceat(size_bytes, atoms)
    is_long = total > chunk_bytes
    lengths = np.diff(np.append(atoms, len(order)))
    is_start = np.zeros(len(order), np.bool_)
    is_start[atoms] = True
    is_start |= np.repeat(is_long, lengths)  # a long one is taken tile by tile
    units = np.flatnonzero(is_start)
    atom = np.searchsorted(atoms, units, "right") - 1
    is_run = ~is_long[atom] & (ends[atom] - start[units] == total[atom])
    is_run |= is_long[atom] & (lengths[atom] == 1) & (ends[atom] - start[units] == total[atom])
    follows = is_run[1:] & is_run[:-1] & (start[units[1:]] == ends[atom[:-1]])
    follows |= ~is_run[1:] & ~is_run[:-1]
    segment = np.concatenate([[0], np.cumsum(~follows)])
    first = _packed(np.add.reduceat(size_bytes, units), segment, chunk_bytes)
    bounds = np.append(units[first], len(order))
    return Chunks(
        order,
        bounds,
        start[bounds[:-1]],
        np.maximum.reduceat(start + span[order], bounds[:-1]),
        np.add.reduceat(size_bytes, bounds[:-1]),
        is_run[first],
    )


def _packed(sizes: Ints, segment: Ints, most: int) -> Ints:
    """The first unit of each chunk: as many as fit, none across the end of a segment."""
    ends: list[int] = starts_of(sizes).tolist()
    last: list[int] = np.searchsorted(segment, segment, "right").tolist()  # the unit behind each unit's segment
    first, at = [], 0
    while at < len(sizes):
        first.append(at)
        fitting = bisect_right(ends, ends[at] + most) - 1
        at = min(max(fitting, at + 1), last[at])
    return ints(first)
