"""What a reader fetches: which tile from which source, and as which strided copies.

Rules:
1. Each tile is fetched once, whole, from one source, and judged by its digest. Where several sources have it, they
   share the bytes evenly, in runs of neighbours; the first named one is preferred in a tie.
2. A tile that lies whole in one box of the reader is copied straight there (`is_direct`). One that the reader keeps
   only a part of, or in several places, is fetched into scratch memory of its size, judged there, and kept by further
   copies.
3. Fetches are in the order of the reader's chunks, so that its prefix grows while several sources deliver.
4. A plan covers all boxes of the reader, or it is a `LayoutMismatch` that names tensor and part. So is memory that two
   boxes share in part. Nothing in a plan reaches memory that is in no box.

A plan is arrays: about 0.2 KB for each tile, whatever its size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .arrays import Bools, Ints, row_major, volumes
from .cells import Tiles, cell_of, padded
from .chunks import Chunks, chunks_of
from .copies import Copies, copies_of, no_copies
from .derive import Source, Wanted, offered, refuse_holes, tied_tiles, wanted_by
from .grid import BAND_BYTES
from .overlaps import check_disjoint


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """Fetches, in order, and the copies that carry them out. All places and lengths in bytes."""

    tiles: Tiles  # the reader's
    chunks: Chunks
    source: Ints  # [fetches] which of the sources
    tile: Ints  # [fetches] the first of the reader's tiles that it fills; its `slot` is its digest in the manifest
    chunk: Ints  # [fetches] the chunk of that tile; never falls
    size_bytes: Ints  # [fetches]
    is_direct: Bools  # [fetches]
    fetch_of: Ints  # [tiles of the reader] the fetch that fills it
    copies: Copies  # from a source's stream to the reader's, or to scratch memory
    keeps: Copies  # from scratch memory to the reader's stream

    def __len__(self) -> int:
        return len(self.source)

    def __repr__(self) -> str:
        return f"<Plan of {len(self)} fetches, {int(self.size_bytes.sum())} B>"

    def bytes_from(self, sources: int) -> list[int]:
        """What each of so many sources sends."""
        found = np.zeros(sources, np.int64)
        np.add.at(found, self.source, self.size_bytes)
        return [int(size) for size in found]


def plan_reads(tiles: Tiles, sources: Sequence[Source], chunk_bytes: int = BAND_BYTES) -> Plan:
    """The plan of a reader for all its tiles. Sources are looked at one after another, as one pass over their boxes."""
    check_disjoint(tiles.table)
    tied_to = tied_tiles(tiles)
    is_own = tied_to == np.arange(len(tiles))
    wanted = wanted_by(tiles)
    chunks = chunks_of(tiles, chunk_bytes)
    chunk = chunks.of_tiles(len(tiles))
    offers = [offered(wanted, source) for source in sources]
    source, offer = _assigned(wanted, [place for _, place in offers], is_own)
    own = np.flatnonzero(is_own)
    own = own[np.lexsort([tiles.offset[own], chunk[own]])]
    number, first = np.unique(wanted.of_tile[own], return_index=True)  # the earliest place of each tile
    number, tile = number[np.argsort(first, kind="stable")], own[np.sort(first)]
    rank = np.full(len(wanted.number), -1)
    rank[number] = np.arange(len(number))
    fetch_of = rank[wanted.of_tile[tied_to]]
    is_direct = _is_direct(tiles, fetch_of, is_own, len(number))
    size = tiles.cell()[1][tile]
    places = _places(source[number], offer[number], [found for found, _ in offers], tiles.grid.dimensions)
    return Plan(
        tiles=tiles,
        chunks=chunks,
        source=source[number],
        tile=tile,
        chunk=chunk[tile],
        size_bytes=volumes(size) * tiles.item[tile],
        is_direct=is_direct,
        fetch_of=fetch_of,
        copies=_fetches(tiles, tile, size, is_direct, *places),
        keeps=_keeps(tiles, fetch_of, is_own & ~is_direct[fetch_of]),
    )


def _places(source: Ints, offer: Ints, offers: Sequence[Tiles], dimensions: int) -> tuple[Ints, Ints]:
    """Offset and strides of each fetched tile at its source."""
    offset, strides = np.zeros(len(source), np.int64), np.zeros((len(source), dimensions), np.int64)
    for number, found in enumerate(offers):
        mine = np.flatnonzero(source == number)
        offset[mine] = found.offset[offer[mine]]
        strides[mine] = padded(found.table.strides, found.pad, 0)[found.box[offer[mine]]]
    return offset, strides


def _fetches(tiles: Tiles, tile: Ints, size: Ints, is_direct: Bools, offset: Ints, strides: Ints) -> Copies:
    item = tiles.item[tile]
    packed = row_major(size) * item[:, None]
    target = np.where(is_direct, tiles.offset[tile], 0)
    target_strides = np.where(is_direct[:, None], tiles.strides[tile], packed)
    return copies_of(size, item, offset, strides, target, target_strides, np.arange(len(tile)))


def _keeps(tiles: Tiles, fetch_of: Ints, is_kept: Bools) -> Copies:
    """From scratch memory, where a whole tile lies packed, to each place where the reader has a part of it."""
    kept = np.flatnonzero(is_kept)
    if not len(kept):
        return no_copies()
    kept = kept[np.argsort(fetch_of[kept], kind="stable")]
    start, size = cell_of(tiles.grid, tiles.number[kept])
    item = tiles.item[kept]
    packed = row_major(size) * item[:, None]
    inside = ((tiles.start[kept] - start) * packed).sum(axis=1)
    places = (inside, packed, tiles.offset[kept], tiles.strides[kept])
    return copies_of(tiles.size[kept], item, *places, fetch_of[kept])


def _assigned(wanted: Wanted, places: Sequence[Ints], is_own: Bools) -> tuple[Ints, Ints]:
    """For each wanted tile its source, and its position among what that source offers. Rule 1."""
    source = np.repeat(np.arange(len(places)), [len(place) for place in places])
    place = np.concatenate(places) if places else np.zeros(0, np.int64)
    offer = np.concatenate([np.arange(len(one)) for one in places]) if places else place
    order = np.lexsort([offer, source, place])
    source, place, offer = source[order], place[order], offer[order]
    is_first = np.ones(len(place), np.bool_)  # a source that has a tile twice offers it once
    is_first[1:] = (place[1:] != place[:-1]) | (source[1:] != source[:-1])
    source, place, offer = source[is_first], place[is_first], offer[is_first]
    ends = np.searchsorted(place, np.arange(len(wanted.number) + 1))
    holders = np.diff(ends)
    refuse_holes(wanted, holders > 0)
    chosen = ends[:-1].copy()
    sizes = volumes(wanted.tiles.cell()[1][wanted.entry]) * wanted.tiles.item[wanted.entry]
    is_needed = np.zeros(len(sizes), np.bool_)
    is_needed[wanted.of_tile[is_own]] = True
    sizes[~is_needed] = 0  # tied to another one, which is fetched in its place
    load = np.zeros(len(places), np.int64)
    np.add.at(load, source[chosen[holders == 1]], sizes[holders == 1])
    for count in range(2, int(holders.max(initial=0)) + 1):
        at = np.flatnonzero(holders == count)
        if not len(at):
            continue
        sets, which = np.unique(source[ends[at][:, None] + np.arange(count)], axis=0, return_inverse=True)
        for number, members in enumerate(sets):
            mine = at[which.reshape(-1) == number]
            mine = mine[np.argsort(wanted.tiles.offset[wanted.entry[mine]], kind="stable")]
            chosen[mine] += _shared(sizes[mine], load, members)
    return source[chosen], offer[chosen]


def _shared(sizes: Ints, load: Ints, members: Ints) -> Ints:
    """Which of the members each tile goes to: runs of neighbours, so that their loads come out even. Adds to `load`."""
    total = int(sizes.sum())
    order = np.argsort(load[members], kind="stable")
    loads = load[members][order]
    level = 0
    for count in range(len(members), 0, -1):  # fill the emptiest ones up to one level
        level = -(-(total + int(loads[:count].sum())) // count)
        if level >= loads[count - 1]:
            break
    room = np.maximum(0, level - loads)
    middles = np.cumsum(sizes) - sizes // 2
    picked = order[np.minimum(np.searchsorted(np.cumsum(room), middles), len(members) - 1)]
    np.add.at(load, members[picked], sizes)
    return picked


def _is_direct(tiles: Tiles, fetch_of: Ints, is_own: Bools, count: int) -> Bools:
    """It fills one place, wholly."""
    places = np.bincount(fetch_of[is_own], minlength=count)
    parts = np.bincount(fetch_of[is_own & ~tiles.is_whole], minlength=count)
    found: Bools = (places == 1) & (parts == 0)
    return found
