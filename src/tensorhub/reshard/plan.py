"""Plans of a read across layouts: which tile from which source, as which copies."""

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from ..memory.digests import NO_ALGORITHM
from ..protocol.errors import CorruptTransfer, UsageError
from ..protocol.manifest import TileManifest
from ..transport.base import ByteStream
from ..transport.ranges import MAX_ROWS, Batches, Rows, Scatter
from .copies import (
    COUNT,
    COUNTS,
    OURS,
    RUN,
    SOURCE,
    TARGET,
    THEIRS,
    Bytes,
    Copies,
    carry_out,
    check_disjoint,
    copies_of,
    joined,
    kept_from,
    no_copies,
    turned,
    turned_tiles,
)
from .derive import Memory, Source, Wanted, offered, refuse_holes, tied_tiles, wanted_by
from .grid import (
    BAND_BYTES,
    Bools,
    Chunks,
    Ints,
    Tiles,
    cell_of,
    chunks_of,
    padded,
    ranks_of,
    row_major,
    starts_of,
    volumes,
)

# --- What a reader fetches: which tile from which source, and as which strided copies.
#
# Rules:
# 1. Each tile is fetched once, whole, from one source, and judged by its digest. Where several sources have it, they
#    share the bytes evenly, in runs of neighbours; the first named one is preferred in a tie.
# 2. A tile that lies whole in one box of the reader is copied straight there (`is_direct`). One that the reader keeps
#    only a part of, or in several places, is fetched into scratch memory of its size, judged there, and kept by
#    further copies.
# 3. Fetches are in the order of the reader's chunks, so that its prefix grows while several sources deliver.
# 4. A plan covers all boxes of the reader, or it is a `LayoutMismatch` that names tensor and part. So is memory that
# two
#    boxes share in part. Nothing in a plan reaches memory that is in no box.
#
# A plan is arrays: about 0.2 KB for each tile, whatever its size.


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


# --- A plan carried out by one thread with numpy: what native code does faster, and what it is compared with.
#
# One tile at a time: gathered from its source into scratch memory, judged there, and only then written to where it
# belongs. So a byte that is not what was published never reaches the reader's memory.


def carry_out_plan(plan: Plan, manifest: TileManifest, sources: Sequence[Memory], target: Memory) -> None:
    """Fetch every tile. Raises `CorruptTransfer`, naming the tile, at the first one that is not what was announced."""
    scratch = np.zeros(int(np.max(plan.size_bytes, initial=0)), np.uint8)
    slots = plan.tiles.slot[plan.tile].tolist()
    for fetch, (slot, source) in enumerate(zip(slots, plan.source.tolist(), strict=True)):
        data = scratch[: int(plan.size_bytes[fetch])]
        copies = plan.copies.only(fetch, fetch + 1)
        _move(copies.gathering(), SOURCE, sources[source], data)
        if manifest.algorithm != NO_ALGORITHM:
            found = xxhash.xxh3_128_digest(data.data)
            if found != manifest.digest_of(slot):
                raise CorruptTransfer(
                    f"{plan.tiles.text(int(plan.tile[fetch]))} has digest {found.hex()},"
                    f" announced was {manifest.digest_of(slot).hex()}"
                )
        keeps = copies.scattering() if plan.is_direct[fetch] else plan.keeps.only(fetch, fetch + 1)
        _move(keeps, TARGET, target, data)


def _move(copies: Copies, side: int, memory: Memory, data: Bytes) -> None:
    """Between a shard's stream, on that side, and `data` on the other: row by row, for each lies in one tensor."""
    for index in range(len(copies)):
        row = Copies(copies.rows[index : index + 1].copy(), copies.of[index : index + 1])
        first, last = row.extent(side)
        row.rows[:, side] -= first
        lent = memory(first, last)
        if side == SOURCE:
            carry_out(row, lent, data)
        else:
            carry_out(row, data, lent)


# --- Part of a plan as a transport wants to hear it: what one source is asked for, in batches, and where that
# belongs.
#
# Rules:
# 1. A batch is some fetches that follow each other in the plan, whole tiles, as many as fit `batch_bytes`. A tile
# that
#    is longer is a batch of its own. Tiles that are kept in part are not put together with others.
# 2. What a source is asked for are runs of its stream, joined where they follow each other there; where they belong is
#    said apart from it, in runs of the reader's stream. Both go through a tile in its row-major order.
# 3. Elements of a tensor that is stored transposed at one end come in the order of the source's memory (`turning`).
# 4. An order has at most `MAX_ROWS` rows; what needs more is several orders.


BATCH_BYTES = 1 << 20  # what is read again when a source dies, of each stream; its header and seal cost 5 us


@dataclass(frozen=True, eq=False, repr=False)
class Order:
    """What one source is asked for by one read."""

    batches: Batches
    scatter: Scatter
    fetches: Ints  # of the plan, in order: fetch n is tile n of the read

    def tiles_of(self, batch: int) -> range:
        """Which of `fetches` it has."""
        return range(self.scatter.first_tile[batch], self.scatter.first_tile[batch + 1])


def orders_of(
    plan: Plan, source: int, source_bytes: int, stream: ByteStream, *, batch_bytes: int = BATCH_BYTES
) -> Iterator[Order]:
    """All that a plan wants of one source, whose stream has so many bytes; `stream` is the reader's."""
    mine = np.flatnonzero(plan.source == source)
    rows = _counts(plan.copies, len(plan))[mine]
    _check_rows(plan, mine, rows)
    at = 0
    ends = np.cumsum(rows)
    while at < len(mine):
        before = int(ends[at - 1]) if at else 0
        stop = max(at + 1, int(np.searchsorted(ends, before + MAX_ROWS, "right")))
        yield _order(plan, mine[at:stop], source_bytes, stream, batch_bytes)
        at = stop


def _check_rows(plan: Plan, fetches: Ints, rows: Ints) -> None:
    """Raises `UsageError`, naming the tile, for one that no order has room for: another source would not help."""
    if len(rows) and int(np.max(rows)) > MAX_ROWS:
        text = plan.tiles.text(int(plan.tile[fetches[int(np.argmax(rows))]]))
        raise UsageError(
            f"{text} lies in {int(np.max(rows))} series of runs at its source and here, where {MAX_ROWS} are the limit:"
            " its dimensions are stored in too different an order",
            hint="store it in the same order of dimensions on both sides, or in one that keeps some of them together",
        )


def _order(plan: Plan, fetches: Ints, source_bytes: int, stream: ByteStream, batch_bytes: int) -> Order:
    sizes = plan.size_bytes[fetches]
    rows, of = _rows_of(plan.copies, fetches)
    is_turned = turned_tiles(rows, of, plan.is_direct[fetches])
    is_near = plan.is_direct[fetches] & ~is_turned  # straight to where it belongs
    first_tile = _batches(sizes, is_near, batch_bytes)
    tiles = starts_of(sizes)
    starts = starts_of(rows[:, RUN] * rows[:, COUNT] * rows[:, COUNTS])
    theirs, turn = turned(rows, is_turned[of])
    counts = np.add.reduceat(np.bincount(of, minlength=len(fetches)), first_tile[:-1])
    batches = Batches.of(words(joined(theirs)), counts.tolist(), source_bytes)
    near = np.flatnonzero(is_near[of])
    ours = Rows.at(words(joined(rows[near][:, OURS])), words(np.append(starts[near], starts[-1])))
    begins = tiles[first_tile[np.searchsorted(first_tile, np.arange(len(fetches)), "right") - 1]]  # each tile's batch
    turn[:, 0] = starts[:-1] - begins[of]
    keeps, kept = _rows_of(plan.keeps, fetches)
    keeps[:, SOURCE] += (tiles[:-1] - begins)[kept]
    far = np.flatnonzero(is_turned[of])
    keeps, kept = np.concatenate([keeps, kept_from(turn[far], rows[far])]), np.concatenate([kept, of[far]])
    order = np.argsort(kept, kind="stable")
    is_reordered = np.zeros(len(fetches), np.bool_)
    is_reordered[of[(theirs[:, 1:] != rows[:, THEIRS][:, 1:]).any(axis=1)]] = True
    seen = np.flatnonzero(is_reordered[of])
    scatter = Scatter(
        stream=stream,
        ours=ours,
        first_tile=words(first_tile),
        tiles=words(tiles),
        is_kept=(~is_near[first_tile[:-1]]).astype(np.uint8).tobytes(),
        keeps=words(keeps[order]),
        first_keep=words(np.searchsorted(kept[order], first_tile)),
        turns=words(joined(turn[seen])),
        first_turn=words(np.searchsorted(of[seen], np.arange(len(fetches) + 1))),
    )
    return Order(batches, scatter, fetches)


def words(numbers: Ints) -> "array[int]":
    """As a transport takes them."""
    found = array("Q")
    found.frombytes(np.ascontiguousarray(numbers, np.int64).tobytes())
    return found


def _counts(copies: Copies, fetches: int) -> Ints:
    return np.bincount(copies.of, minlength=fetches)


def _rows_of(copies: Copies, fetches: Ints) -> tuple[Ints, Ints]:
    """The rows of these fetches, in order, and which of `fetches` each belongs to."""
    first, last = np.searchsorted(copies.of, fetches), np.searchsorted(copies.of, fetches, "right")
    counts = last - first
    of = np.repeat(np.arange(len(fetches)), counts)
    return copies.rows[np.repeat(first, counts) + ranks_of(counts)], of


def _batches(sizes: Ints, is_direct: npt.NDArray[np.bool_], most: int) -> Ints:
    """The first fetch of each batch, and behind the last one how many there are."""
    ends: list[int] = starts_of(sizes).tolist()  # bisect in lists is ten times as fast as numpy for one number
    changes = np.flatnonzero(is_direct[1:] != is_direct[:-1]) + 1
    limits: list[int] = [*changes.tolist(), len(sizes)]
    first, at = [], 0
    while at < len(sizes):
        first.append(at)
        fitting = bisect_right(ends, ends[at] + most) - 1
        at = min(max(fitting, at + 1), limits[bisect_right(limits, at)])
    return np.array([*first, len(sizes)], np.int64)
