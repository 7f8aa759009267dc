"""Tile digests of memory, and manifests of one layout derived from those of others."""

import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from ..memory import streams
from ..memory.digests import ALGORITHM, NO_ALGORITHM
from ..memory.host_copies import COPY_THREADS
from ..memory.parallel import in_parallel
from ..memory.streams import addresses_of, copy, copy_pieces
from ..protocol.errors import Closed, LayoutMismatch, UsageError, VersionConflict
from ..protocol.manifest import DIGEST_BYTES, TileManifest
from ..protocol.names import Digest
from ..transport.base import ByteStream
from ..transport.ranges import IOV_MAX, Addresses, bare_addresses, is_bare
from .copies import (
    COUNT,
    COUNTS,
    OUTER,
    RUN,
    SOURCE,
    SOURCE_STRIDE,
    THEIRS,
    Bytes,
    Copies,
    copies_of,
    hole_text,
    joined,
    memory_order,
    no_copies,
)
from .grid import BoxTable, Grid, Ints, Tiles, Window, row_major, spans, spans_of, tiles_of, window_of

# --- Copies many short runs out of memory that may be freed at any moment, one after another, in row-major order.
#
# To hand one run to the kernel takes as long as to copy a kilobyte. So where runs lie close to each other, memory is
# copied as it lies, slab by slab, and picked from here; where they do not, the kernel gets as many at once as it takes.
#
# It must never: touch registered memory itself, or copy far more than is wanted of it.


SLAB_BYTES = 32 << 20  # half of the ring through which a device's memory passes
RUN_BYTES = 1024  # to hand a run to the kernel takes as long as to copy so many
WORDS = (1, 2, 4, 8)  # bytes of a run that is one number to numpy


def copy_runs(stream: ByteStream, copies: Copies, room: Bytes) -> None:
    """The runs of these rows into `room`, which is as long as all of them. Raises `Freed` near what is not there."""
    at = 0
    for row in joined(copies.rows[:, THEIRS]).tolist():
        size = row[1] * row[2] * row[4]
        if not _by_slabs(stream, row, room[at : at + size]):
            _by_runs(stream, row, room[at : at + size])
        at += size


def _by_slabs(stream: ByteStream, row: list[int], room: Bytes) -> bool:
    """Of the row's two loops, that with the longer stride slab by slab. False: it would copy too much."""
    place, run, *inner, counts, outer = row
    shape, steps = [counts, inner[0]], [outer, inner[1]]
    long = int(steps[1] > steps[0])
    lines, step = shape[long], steps[long]
    line = (shape[1 - long] - 1) * steps[1 - long] + run
    step = step if lines > 1 else line
    if line > SLAB_BYTES or lines * min(step, line) > RUN_BYTES * counts * inner[0]:
        return False
    most = 1 + (SLAB_BYTES - line) // step if step <= line * 2 else 1  # what lies far apart is copied line by line
    kind, tail = (np.dtype(f"u{run}"), []) if run in WORDS else (np.dtype(np.uint8), [run])
    target: npt.NDArray[np.unsignedinteger] = np.ndarray((*shape, *tail), kind, room.data)
    slab = np.empty((min(most, lines) - 1) * step + line, np.uint8)
    for first in range(0, lines, most):
        number = min(most, lines - first)
        start, size = place + first * step, (number - 1) * step + line
        with stream.reading(start, start + size) as views:
            here = Addresses.of_ranges([(slab.ctypes.data, size)], start)
            copy(addresses_of(stream, views, start), here, start, start + size)
        shape[long] = number
        found: npt.NDArray[np.unsignedinteger] = np.ndarray(
            (*shape, *tail), kind, slab.data, strides=(*steps, *(1 for _ in tail))
        )
        target[(slice(None),) * long + (slice(first, first + number),)] = found
    return True


def _by_runs(stream: ByteStream, row: list[int], room: Bytes) -> None:
    place, run, count, stride, counts, strides = row
    for first in range(0, count * counts, IOV_MAX):
        rank: Ints = np.arange(first, min(first + IOV_MAX, count * counts))
        places = place + rank % count * stride + rank // count * strides
        targets = room.ctypes.data + rank * run
        start, stop = int(np.min(places)), int(np.max(places)) + run
        if is_bare(stream) or stop - start <= SLAB_BYTES:
            with stream.reading(start, stop) as views:
                base = addresses_of(stream, views, start).whole(start, stop)
                if base:
                    copy_pieces(_pairs(base + places - start, run), _pairs(targets, run), start)
                    continue
        for at, target in zip(places.tolist(), targets.tolist(), strict=True):
            with stream.reading(at, at + run) as views:
                copy(addresses_of(stream, views, at), Addresses.of_ranges([(target, run)], at), at, at + run)


def _pairs(addresses: Ints, length: int) -> "array[int]":
    """For the kernel: address and length, again and again."""
    found = np.empty((len(addresses), 2), np.uint64)
    found[:, 0], found[:, 1] = addresses, length
    return array("Q", found.tobytes())


# --- Copies what lies in boxes from one stream into another of the same layout, and nothing of what lies between
# them.
#
# Boxes that fill their memory together are copied as they lie, however they interleave. Only where padding lies between
# the rows of one does each run of bytes count; many of them are one question to the kernel.
#
# It must never: read or write a byte that is in no box.


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
                with target.writing(first, last):
                    streams.copy_pieces(taken, given, first)
                continue
            for start, stop in part:
                with source.reading(start, stop) as theirs, target.writing(start, stop) as mine:
                    there = streams.addresses_of(source, theirs, start)
                    streams.copy(there, streams.addresses_of(target, mine, start), start, stop)

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    in_parallel(one, work, threads=max(1, min(cores, COPY_THREADS, len(work))), name="copy")


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


def _parts(whole: Range, most_bytes: int) -> Iterator[Range]:
    start, stop = whole
    for first in range(start, stop, most_bytes):
        yield first, min(first + most_bytes, stop)


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
# Rules:
# 1. A tile's digest is that of its elements in row-major order of the global tensor, wherever they lie.
# 2. All sources of a derivation have the same grid, algorithm and salt: they are parts of one version. The caller has
#    compared each manifest's root with the one that the server named.
# 3. A tile that two sources have with different digests is a `VersionConflict`; one that no source has is a
#    `LayoutMismatch`. Both name tensor and part. So are tied boxes of the reader whose contents differ.


Digests = npt.NDArray[np.void]  # each of 16 bytes
Memory = Callable[[int, int], Bytes]  # bytes [start, stop) of a shard's stream, as they lie there


@dataclass(frozen=True, eq=False)
class Source:
    """One shard of a replica that holds the version: its name in messages, its boxes, and its manifest where known."""

    name: str
    table: BoxTable
    manifest: TileManifest | None = None


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
    manifests = [_manifest_of(source, grid) for source in sources]
    facts = sorted({(manifest.algorithm, manifest.salt, manifest.metadata) for manifest in manifests})
    if len(facts) != 1:
        raise UsageError(f"the sources' manifests are not of one version: {facts}")
    algorithm, salt, metadata = facts[0]
    if algorithm == NO_ALGORITHM:
        return TileManifest(layout, grid, algorithm, len(tiles), b"", salt, metadata)
    wanted = wanted_by(tiles)
    digests = np.zeros(len(wanted.number), f"V{DIGEST_BYTES}")
    known_from = np.full(len(wanted.number), -1)
    for index, (source, manifest) in enumerate(zip(sources, manifests, strict=True)):
        found, place = offered(wanted, source)
        theirs = np.frombuffer(manifest.digests, digests.dtype)
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


def _manifest_of(source: Source, grid: Digest) -> TileManifest:
    if source.manifest is None:
        raise UsageError(f"nothing can be derived from {source.name}, whose manifest is unknown")
    if source.manifest.grid != grid:
        raise UsageError(f"{source.name} has the grid {source.manifest.grid}, the version {grid}")
    return source.manifest


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
                " was published: nobody can tell that they are equal",
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


def digests_of(tiles: Tiles, memory: Memory, algorithm: str = ALGORITHM, *, parts: bool = False) -> bytes:
    """The digest of each tile, 16 bytes each, in the order given. All must be whole; or with `parts` what lies here."""
    if algorithm != ALGORITHM:
        raise UsageError(f"digests of tiles are by {ALGORITHM}, not by {algorithm!r}")
    if not parts and not tiles.is_whole.all():
        raise UsageError("a layout whose boundaries are no cuts of the grid has tiles that it holds only in part")
    strides, item = tiles.strides, tiles.item
    span = spans(tiles.size, strides, item)
    is_run = ((strides == row_major(tiles.size) * item[:, None]) | (tiles.size == 1)).all(axis=1)
    found = bytearray()
    rows = zip(tiles.offset.tolist(), span.tolist(), is_run.tolist(), strict=True)
    for tile, (offset, length, is_simple) in enumerate(rows):
        data = memory(offset, offset + length)
        if not is_simple:
            data = _in_order(data, tiles.size[tile], strides[tile], int(item[tile]))
        found += xxhash.xxh3_128_digest(data.data)
    return bytes(found)


def _in_order(data: Bytes, size: Ints, strides: Ints, item: int) -> Bytes:
    """The elements of a tile in row-major order, as bytes of their own."""
    shape, steps = (*size.tolist(), item), (*strides.tolist(), 1)
    return np.ascontiguousarray(np.lib.stride_tricks.as_strided(data, shape, steps)).reshape(-1)
