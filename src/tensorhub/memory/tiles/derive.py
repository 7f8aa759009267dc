"""Tile digests of memory, and the manifest of one layout derived from those of others, without any data.

Rules:
1. A tile's digest is that of its elements in row-major order of the global tensor, wherever they lie.
2. All sources of a derivation have the same grid, algorithm and salt: they are parts of one version. The caller has
   compared each manifest's root with the one that the server named.
3. A tile that two sources have with different digests is a `VersionConflict`; one that no source has is a
   `LayoutMismatch`. Both name tensor and part. So are tied boxes of the reader whose contents differ.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from ...core.errors import LayoutMismatch, UsageError, VersionConflict
from ...core.manifest import DIGEST_BYTES
from ...core.names import Digest
from ...core.tile_manifest import TileManifest
from ..digests import ALGORITHM, NO_ALGORITHM
from .arrays import Ints, row_major, spans
from .cells import Tiles, Window, spans_of, tiles_of, window_of
from .copies import Bytes
from .coverage import hole_text
from .grid import Grid
from .table import BoxTable

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
