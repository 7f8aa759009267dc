"""What a reader fetches from which source, and the digests of tiles: of memory, and derived from other layouts."""

import ctypes
import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from ..memory import streams
from ..memory.describe import some
from ..memory.digests import ALGORITHM, freed
from ..memory.host_copies import COPY_THREADS
from ..memory.registration import Registration
from ..memory.streams import Freed, addresses_of, copy, copy_pieces, core_count, in_parallel
from ..protocol.errors import Closed, LayoutMismatch, UsageError, VersionConflict
from ..protocol.manifest import DIGEST_BYTES, TileManifest
from ..protocol.names import Digest
from ..transport.base import ByteStream
from ..transport.native import load
from ..transport.ranges import IOV_MAX, MAX_ROWS, Addresses, Batches, Placed, Rows, Scatter, bare_addresses, is_bare
from .copies import (
    COUNT,
    COUNTS,
    OURS,
    OUTER,
    RUN,
    SOURCE,
    SOURCE_STRIDE,
    THEIRS,
    Bytes,
    Copies,
    check_disjoint,
    copies_of,
    hole_text,
    joined,
    kept_from,
    memory_order,
    no_copies,
    turned,
    turned_tiles,
)
from .grid import (
    BAND_BYTES,
    Bools,
    BoxTable,
    Grid,
    Ints,
    Tiles,
    Window,
    cell_of,
    padded,
    ranks_of,
    row_major,
    spans,
    spans_of,
    starts_of,
    tiles_of,
    volumes,
    window_of,
    words,
)

# --- Copies many runs out of memory that may be freed at any moment, in row-major order: as many at once as the kernel
# takes.


BLOCK_BYTES = 32 << 20  # half of the ring through which a device's memory passes


def copy_runs(stream: ByteStream, copies: Copies, room: Bytes) -> None:
    """The runs of these rows into `room`, which is as long as all of them. Raises `Freed` near what is not there."""
    target = room.ctypes.data
    for place, run, count, stride, counts, strides in joined(copies.rows[:, THEIRS]).tolist():
        for first in range(0, count * counts, IOV_MAX):
            rank: Ints = np.arange(first, min(first + IOV_MAX, count * counts))
            places = place + rank % count * stride + rank // count * strides
            _copy_runs(stream, places, run, target + np.arange(len(rank)) * run)
            target += len(rank) * run


def _copy_runs(stream: ByteStream, places: Ints, run: int, targets: Ints) -> None:
    start, stop = int(np.min(places)), int(np.max(places)) + run
    if is_bare(stream) or stop - start <= BLOCK_BYTES:
        with stream.views_to_read(start, stop) as views:
            base = addresses_of(stream, views, start).whole(start, stop)
            if base:
                copy_pieces(_pairs(base + places - start, run), _pairs(targets, run), start)
                return
    for at, target in zip(places.tolist(), targets.tolist(), strict=True):
        with stream.views_to_read(at, at + run) as views:
            copy(addresses_of(stream, views, at), Addresses.of_ranges([(target, run)], at), at, at + run)


def _pairs(addresses: Ints, length: int) -> "array[int]":
    """For the kernel: address and length, again and again."""
    found = np.empty((len(addresses), 2), np.uint64)
    found[:, 0], found[:, 1] = addresses, length
    return array("Q", found.tobytes())


# --- Copies what lies in boxes from one stream into another of the same layout, and no byte between them.
#
# Boxes that fill their memory together are copied as they lie. Where padding lies between rows, each run counts.


Range = tuple[int, int]  # the first byte of the stream, and the one behind the last


def copy_boxes(
    source: ByteStream, target: ByteStream, table: BoxTable, *, chunk_bytes: int, is_over: Callable[[], bool]
) -> None:
    """Copy all boxes, in parallel. Blocks; raises `Closed` once `is_over`, and `Freed` if memory is not there."""
    ranges, loose = inside(table)
    work: list[Range | int] = [part for each in ranges for part in _parts(each, chunk_bytes)]
    work += range(len(loose))
    tables = bare_addresses(source), bare_addresses(target)

    def one(item: Range | int) -> None:
        for part in [[item]] if isinstance(item, tuple) else _runs(loose, item):
            if is_over():
                raise Closed("the copy was given up")
            first, last = part[0][0], part[-1][1]
            taken, given = (_box_pairs(each, part) if each is not None else None for each in tables)
            if taken is not None and given is not None:
                with target.views_to_write(first, last):
                    streams.copy_pieces(taken, given, first)
                continue
            for start, stop in part:
                with source.views_to_read(start, stop) as theirs, target.views_to_write(start, stop) as mine:
                    there = streams.addresses_of(source, theirs, start)
                    streams.copy(there, streams.addresses_of(target, mine, start), start, stop)

    in_parallel(one, work, threads=max(1, min(core_count(), COPY_THREADS, len(work))), name="copy")


def inside(table: BoxTable) -> tuple[list[Range], Copies]:
    """The bytes that are in boxes: ranges without a hole; and rows of boxes with something else between them."""
    rows = np.flatnonzero(table.alias_of == np.arange(len(table)))
    if not len(rows):
        return [], no_copies()
    start = table.offset[rows]
    reach = np.maximum.accumulate(start + table.spans[rows])
    firsts = np.concatenate(([0], np.flatnonzero(start[1:] >= reach[:-1]) + 1))
    counts = np.diff(np.append(firsts, len(rows)))
    begin, end = start[firsts], reach[firsts + counts - 1]
    is_full = np.add.reduceat(table.bytes_of_boxes[rows], firsts) == end - begin
    ranges: list[Range] = []
    for first, last in zip(begin[is_full].tolist(), end[is_full].tolist(), strict=True):
        if ranges and ranges[-1][1] == first:
            ranges[-1] = (ranges[-1][0], last)
        else:
            ranges.append((first, last))
    loose = rows[~np.repeat(is_full, counts)]
    size, strides = memory_order(table, loose)
    place, item = table.offset[loose], table.item[table.tensor[loose]]
    return ranges, copies_of(size, item, place, strides, place, strides, np.arange(len(loose)))


def ranges_inside(table: BoxTable) -> list[Range]:
    """All bytes that are in boxes, in order, neighbours joined."""
    ranges, loose = inside(table)
    found: list[Range] = []
    for first, last in sorted(
        [*ranges, *(run for row in range(len(loose)) for part in _runs(loose, row) for run in part)]
    ):
        if found and found[-1][1] >= first:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return found


def _parts(whole: Range, max_bytes: int) -> Iterator[Range]:
    start, stop = whole
    for first in range(start, stop, max_bytes):
        yield first, min(first + max_bytes, stop)


def _runs(copies: Copies, row: int) -> Iterator[list[Range]]:
    """The runs of one row, as many at a time as the kernel takes at once."""
    numbers = copies.rows[row].tolist()
    count, length = numbers[COUNT] * numbers[COUNTS], numbers[RUN]
    for first in range(0, count, IOV_MAX):
        rank: Ints = np.arange(first, min(first + IOV_MAX, count))
        steps = rank % numbers[COUNT] * numbers[SOURCE_STRIDE] + rank // numbers[COUNT] * numbers[SOURCE + OUTER]
        places = np.sort(numbers[SOURCE] + steps)
        yield list(zip(places.tolist(), (places + length).tolist(), strict=True))


def _box_pairs(addresses: Addresses, parts: list[Range]) -> "array[int] | None":
    """Where they lie, for the kernel; None if they lie in several pieces of memory."""
    first, last = parts[0][0], parts[-1][1]
    base = addresses.whole(first, last)
    if not base:
        return None
    return array("Q", [number for start, stop in parts for number in (base + start - first, stop - start)])


# --- Tile digests of memory, and the manifest of one layout derived from those of others, without any data.
#
# 1. A tile's digest is that of its elements in row-major order of the global tensor, wherever they lie.
# 2. All sources of a derivation have the same grid, algorithm and salt. The caller has compared each manifest's root.
# 3. A tile with two digests is a `VersionConflict`, and so are tied boxes that differ. One without a source is a
#    `LayoutMismatch`. Both name tensor and part.


Digests = npt.NDArray[np.void]  # each of 16 bytes


@dataclass(frozen=True, eq=False)
class Source:
    """One shard of a replica that holds the version: its name in messages, its boxes, and its manifest."""

    name: str
    table: BoxTable
    manifest: TileManifest


@dataclass(frozen=True, eq=False, repr=False)
class Wanted:
    """The tiles that a reader needs, each once, and what of each source's tiles may help."""

    tiles: Tiles
    number: Ints  # sorted, each once
    entry: Ints  # [numbers] the first of the reader's tiles with that number
    of_tile: Ints  # [tiles] its place in `number`
    window: Window

    @property
    def grid(self) -> Grid:
        return self.tiles.grid


def wanted_by(tiles: Tiles) -> Wanted:
    """Of all tiles of a reader."""
    number, entry, of_tile = np.unique(tiles.number, return_index=True, return_inverse=True)
    spans = spans_of(tiles.table, tiles.grid)
    return Wanted(tiles, number, entry, of_tile.reshape(-1), window_of(tiles.grid, spans))


def offered(wanted: Wanted, source: Source) -> tuple[Tiles, Ints]:
    """The whole tiles of a source that are wanted, and the place of each in `wanted`, in that order."""
    spans = spans_of(source.table, wanted.grid, here=f"at {source.name}")
    found = tiles_of(source.table, wanted.grid, spans, wanted.window)
    place = np.searchsorted(wanted.number, found.number)
    place[place == len(wanted.number)] = 0
    is_wanted = (
        found.is_whole & (wanted.number[place] == found.number) if len(wanted.number) else found.is_whole & False
    )
    picked = np.flatnonzero(is_wanted)
    picked = picked[np.argsort(place[picked], kind="stable")]
    return found.only(picked), place[picked]


def derive_manifest(tiles: Tiles, sources: Sequence[Source], *, layout: Digest, grid: Digest) -> TileManifest:
    """The manifest of the reader whose tiles these are. `layout` and `grid` are the digests of its table and grid."""
    for source in sources:
        if source.manifest.grid != grid:
            raise UsageError(f"{source.name} has the grid {source.manifest.grid}, the version {grid}")
    facts = sorted({(one.manifest.algorithm, one.manifest.salt, one.manifest.metadata) for one in sources})
    if len(facts) != 1:
        raise UsageError(f"the sources' manifests are not of one version: {facts}")
    algorithm, salt, metadata = facts[0]
    if algorithm != ALGORITHM:
        raise UsageError(f"the digests of this version's tiles are {algorithm!r}, which is unknown here")
    wanted = wanted_by(tiles)
    digests = np.zeros(len(wanted.number), f"V{DIGEST_BYTES}")
    known_from = np.full(len(wanted.number), -1)
    for index, source in enumerate(sources):
        found, place = offered(wanted, source)
        theirs = np.frombuffer(source.manifest.digests, digests.dtype)
        slots = found.slot
        if len(slots) and int(np.max(slots)) >= len(theirs):
            raise UsageError(f"the manifest of {source.name} has {len(theirs)} tiles, its layout more")
        values = theirs[slots]
        is_known = known_from[place] >= 0
        differs = np.flatnonzero(is_known & (digests[place] != values))
        if len(differs):
            at = int(place[differs[0]])
            other = sources[int(known_from[at])].name
            raise VersionConflict(
                f"{found.text(int(differs[0]))} has other content at {source.name} than at {other}",
                hint="wherever a part of a tensor lies, on several ranks too, it must be the same when it is published",
            )
        digests[place] = values
        known_from[place] = index
        twice = np.flatnonzero(digests[place] != values)  # the same tile in two boxes of this source
        if len(twice):
            raise VersionConflict(f"{found.text(int(twice[0]))} lies twice at {source.name}, with different content")
    refuse_holes(wanted, known_from >= 0)
    mine = digests[wanted.of_tile]
    check_ties(tiles, mine)
    return TileManifest(layout, grid, algorithm, len(tiles), mine.tobytes(), salt, metadata)


def refuse_holes(wanted: Wanted, is_known: npt.NDArray[np.bool_]) -> None:
    """Raises `LayoutMismatch`, naming tensor and part, if a wanted tile is not known."""
    if not is_known.all():
        part, others = hole_text(wanted.grid, wanted.number[~is_known])
        raise LayoutMismatch(
            f"no source has {part}{others}",
            hint="the boxes of all shards of the publisher together cover every global tensor",
        )


def tied_tiles(tiles: Tiles) -> Ints:
    """For each tile of an alias the tile with the same memory that stands for it; for all others themselves.

    Raises `LayoutMismatch` where two tied boxes are not cut alike, so that their tiles cannot be compared.
    """
    table = tiles.table
    tied_to = np.arange(len(tiles))
    aliases = np.flatnonzero(table.alias_of != np.arange(len(table)))
    if not len(aliases):
        return tied_to
    order = np.argsort(tiles.box, kind="stable")
    ends = np.searchsorted(tiles.box[order], np.arange(len(table) + 1))
    for row in aliases.tolist():
        first = int(table.alias_of[row])
        mine, theirs = (order[ends[n] : ends[n + 1]] for n in (row, first))
        if len(mine) != len(theirs) or not _are_alike(tiles.only(mine), tiles.only(theirs)):
            raise LayoutMismatch(
                f"{table.text(first)} and {table.text(row)} lie in the same memory here, and are not cut alike in what"
                " was published: they cannot be compared",
                hint="register this layout before the version is published",
            )
        tied_to[mine] = theirs
    return tied_to


def _are_alike(mine: Tiles, theirs: Tiles) -> bool:
    """What lies here of each is the same part of a tile of the same size: else their digests are of different bytes."""
    (begin, size), (its_begin, its_size) = mine.cell(), theirs.cell()
    is_same = (mine.size == theirs.size) & (size == its_size) & (mine.start - begin == theirs.start - its_begin)
    return bool(is_same.all())


def check_ties(tiles: Tiles, digests: Digests) -> None:
    """Raises unless boxes with the same memory have equal digests: the memory can hold only one content."""
    tied_to = tied_tiles(tiles)
    wrong = np.flatnonzero(digests != digests[tied_to])
    if len(wrong):
        one, other = int(tied_to[wrong[0]]), int(wrong[0])
        raise VersionConflict(
            f"{tiles.text(one)} and {tiles.text(other)} lie in the same memory here, and were published with different"
            " content",
            hint="do not tie them",
        )


SPREAD = 4  # memory that is this many times longer than the tiles in it is looked at tile by tile


def tile_digests(registration: Registration, tiles: Tiles) -> bytes:
    """The digest of each tile, or of what lies here of it, as it lies in registered memory, in the order given.

    Memory is copied first, by the kernel, for it may be freed at any moment. Raises `UsageError` naming its tensors.
    """
    registration.settle()
    if not len(tiles):
        return b""
    found = np.zeros((len(tiles), DIGEST_BYTES), np.uint8)
    own = np.flatnonzero(tiles.table.alias_of[tiles.box] == tiles.box)
    own = own[np.argsort(tiles.offset[own], kind="stable")]
    start, sizes = tiles.offset[own], tiles.size_bytes[own]
    bounds = _batches(sizes, np.zeros(len(own), np.bool_), BAND_BYTES)
    reach = start + spans(tiles.size, tiles.strides, tiles.item)[own]
    lengths = np.maximum.reduceat(reach, bounds[:-1]) - start[bounds[:-1]]
    is_dense = (lengths <= SPREAD * np.add.reduceat(sizes, bounds[:-1])) & (load.library() is not None)
    longest_bytes = int(np.max(lengths[is_dense], initial=0))
    gone: list[int] = []  # a byte of each piece of memory that was not there any more
    rooms = threading.local()

    def one(batch: int) -> None:
        mine = own[bounds[batch] : bounds[batch + 1]]
        try:
            if is_dense[batch]:
                if not hasattr(rooms, "mine"):
                    rooms.mine = np.empty(longest_bytes, np.uint8)
                found[mine] = _near(registration.stream, tiles.only(mine), rooms.mine)
            else:
                for tile in mine[:, None]:
                    found[tile] = _spread(registration.stream, tiles.only(tile))
        except Freed as error:
            gone.append(error.at)

    in_parallel(one, range(len(is_dense)), threads=2, name="digest")
    if gone:
        raise UsageError(
            f"the memory of these tensors was freed while they were hashed: {some(freed(registration, gone))}",
            hint="register() again what was given other memory, and free it only after unpublish()",
        )
    return found[tied_tiles(tiles)].tobytes()


def _near(stream: ByteStream, tiles: Tiles, room: Bytes) -> Bytes:
    """Digests of tiles that lie near each other: their memory is copied as it lies."""
    library, copies = load.library(), _gathering(tiles)
    assert library is not None, "the mover hashes rows"
    first, last = copies.extent(SOURCE)
    with stream.views_to_read(first, last) as views:
        here = Addresses.of_ranges([(room.ctypes.data, last - first)], first)
        copy(addresses_of(stream, views, first), here, first, last)
    rows = copies.rows[:, THEIRS]
    rows[:, 0] -= first
    placed = Placed(Rows.checked(words(rows), last - first), Addresses.of_ranges([(room.ctypes.data, last - first)]))
    ends = words(starts_of(tiles.size_bytes))
    out = ctypes.create_string_buffer(len(tiles) * DIGEST_BYTES)
    is_whole = library.digest_tiles(placed.table, ends.buffer_info()[0], len(tiles), out)
    assert is_whole, "rows that are not those of their tiles"
    return np.frombuffer(out.raw, np.uint8).reshape(-1, DIGEST_BYTES)


def _spread(stream: ByteStream, tile: Tiles) -> Bytes:
    """The digest of one whose memory lies between much else: only its own runs are copied."""
    room = np.empty(int(tile.size_bytes[0]), np.uint8)
    copy_runs(stream, _gathering(tile), room)
    return np.frombuffer(xxhash.xxh3_128_digest(room.data), np.uint8)


def _gathering(tiles: Tiles) -> Copies:
    """From the shard's stream, in row-major order of each tile."""
    item = tiles.item
    packed = row_major(tiles.size) * item[:, None]
    target = (np.zeros_like(item), packed)
    return copies_of(tiles.size, item, tiles.offset, tiles.strides, *target, np.arange(len(tiles)))


# --- What a reader fetches: which tile from which source, and as which strided copies.
#
# 1. Each tile is fetched once, whole, from one source. Sources that have the same tiles share the bytes evenly.
# 2. A tile that lies whole in one box of the reader is copied straight there (`is_direct`). Another is fetched into
#    scratch memory, checked there, and kept by further copies.
# 3. Fetches are in the order of the reader's stream, so that its prefix grows while several sources deliver.
# 4. A plan covers all boxes of the reader, or it is a `LayoutMismatch` that names tensor and part.


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """Fetches, in order, and the copies that carry them out. All places and lengths in bytes."""

    tiles: Tiles  # the reader's
    source: Ints  # [fetches] which of the sources
    tile: Ints  # [fetches] the first of the reader's tiles that it fills; its `slot` is its digest in the manifest
    size_bytes: Ints  # [fetches]
    is_direct: Bools  # [fetches]
    fetch_of: Ints  # [tiles of the reader] the fetch that fills it
    copies: Copies  # from a source's stream to the reader's, or to scratch memory
    keeps: Copies  # from scratch memory to the reader's stream

    def __len__(self) -> int:
        return len(self.source)


def plan_reads(tiles: Tiles, sources: Sequence[Source]) -> Plan:
    """The plan of a reader for all its tiles. Sources are looked at one after another, as one pass over their boxes."""
    check_disjoint(tiles.table)
    tied_to = tied_tiles(tiles)
    is_own = tied_to == np.arange(len(tiles))
    wanted = wanted_by(tiles)
    offers = [offered(wanted, source) for source in sources]
    source, offer = _assigned(wanted, [place for _, place in offers], is_own)
    own = np.flatnonzero(is_own)
    own = own[np.argsort(tiles.offset[own], kind="stable")]
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
        source=source[number],
        tile=tile,
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
    """For each tile: true if it fills one whole place."""
    places = np.bincount(fetch_of[is_own], minlength=count)
    parts = np.bincount(fetch_of[is_own & ~tiles.is_whole], minlength=count)
    found: Bools = (places == 1) & (parts == 0)
    return found


# --- Part of a plan as a transport takes it: what one source is asked for, in batches, and where that belongs.
#
# 1. A batch is some fetches that follow each other in the plan, as many as fit `batch_bytes`. Tiles that are kept in
#    part are not put together with others.
# 2. A source is asked for runs of its stream. Where they belong is said in runs of the reader's stream. Both go through
#    a tile in row-major order; elements of a tensor stored transposed come in the order of the source's memory.
# 3. An order has at most `MAX_ROWS` rows. What needs more is several orders.


BATCH_BYTES = 1 << 20  # what is read again when a source dies, of each stream; its header and seal cost 5 us


@dataclass(frozen=True, eq=False, repr=False)
class Order:
    """What one source is asked for by one read."""

    batches: Batches
    scatter: Scatter
    fetches: Ints  # of the plan, in order: fetch n is tile n of the read


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
        reorder_rows=words(joined(turn[seen])),
        first_reorder_row=words(np.searchsorted(of[seen], np.arange(len(fetches) + 1))),
    )
    return Order(batches, scatter, fetches)


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
