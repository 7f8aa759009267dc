"""How boxes, grids and published shards travel: columns of integers, compressed, and the digests that name them.

A layout is sent once, not with each version. What comes from a peer is checked until no number in it can lead out of
the shard's stream or of a tensor. A reader is told the boxes, the grid and the digests of tiles ahead of the bytes. The
server names the root of their manifest.
"""

import zlib
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise

import msgspec
import numpy as np

from ..memory.digests import ALGORITHM
from ..memory.registration import Registration
from ..protocol.errors import CorruptTransfer, LayoutMismatch, UsageError
from ..protocol.layout import MAX_EXTENT, GlobalTensor
from ..protocol.manifest import (
    DIGEST_BYTES,
    MAX_DIMENSIONS,
    MAX_ELEMENTS,
    TileManifest,
    decode_tile_manifest,
    item_bytes,
)
from ..protocol.names import MAX_TEXT, Digest, Undecodable, decoded
from .grid import (
    MAX_SEGMENTS,
    BoxTable,
    Grid,
    Ints,
    Tiles,
    items_of,
    padded_shapes,
    spans_of,
    starts_of,
    table_of_columns,
)
from .plan import tile_digests

LEVEL = 1  # columns repeat so much that higher levels gain little
MAX_PLAIN_BYTES = 128 << 20  # uncompressed: 16 times the largest that is known, 8.1 MB: a shard of 1T parameters as
# every tensor's part: 69,613 boxes of 64 B and their names
MAX_RATIO = 128  # uncompressed to compressed: tables of real models have 5 to 17, regular ones of 8 dimensions up to 62
MAX_TENSORS = 1 << 20  # of one table or grid: 15 times as many as that shard has
MAX_KEPT, MAX_KEPT_BYTES = 1 << 17, 6 << 20  # tensors of a table, and their names, that are kept for the next one
MAX_STREAM_BYTES = 1 << 61  # twice it, and an element, still fit 63 bits


class _Tensors(msgspec.Struct, frozen=True, array_like=True):
    names: list[str]
    kinds: list[tuple[str, tuple[int, ...]]]  # dtype and shape
    kind: bytes  # of each name, 4 bytes


class _Table(msgspec.Struct, frozen=True, array_like=True):
    tensors: bytes  # of `_Tensors`: the same bytes in most shards of a layout, and decoded once
    size_bytes: int
    columns: memoryview  # tensor, offset, at, size, strides; 8 bytes each, column after column


class _Grid(msgspec.Struct, frozen=True, array_like=True):
    tensors: _Tensors
    dimensions: int
    kind: memoryview
    counts: memoryview  # cuts of each kind and dimension
    cuts: memoryview


def encode_table(table: BoxTable) -> bytes:
    """A shard's boxes as they travel. Raises `UsageError` for more than any worker takes."""
    return _deflated(_plain_table(table), f"{len(table)} boxes of {len(table.tensors)} tensors")


def layout_digest(table: BoxTable) -> Digest:
    """Equal for two shards exactly when they have the same boxes in the same places of their streams."""
    return _digest(_plain_table(table))


def _plain_table(table: BoxTable) -> bytes:
    columns = np.empty((2 + 3 * table.dimensions, len(table)), "<i8")
    parts = (table.tensor[None], table.offset[None], table.at.T, table.size.T, table.strides.T)
    np.concatenate(parts, out=columns)
    tensors = msgspec.msgpack.encode(_pack_tensors(table.tensors))
    return msgspec.msgpack.encode(_Table(tensors, table.size_bytes, _bytes_of(columns)))


def decode_table(data: bytes, expected: Digest | None = None) -> BoxTable:
    """Boxes from a peer's bytes. Raises `UsageError` if they are malformed, or reach out of stream or tensor.

    Also if they are not those of the `expected` digest: then no table is made of them.
    """
    plain = _inflated(data, expected)
    try:
        found = msgspec.msgpack.decode(plain, type=_Table)
        tensors, shapes, item = _tensors_of(found.tensors)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UsageError(f"malformed table of boxes: {error}") from error
    if len(tensors) > MAX_KEPT or len(found.tensors) > MAX_KEPT_BYTES:
        _tensors_of.cache_clear()
    dimensions = shapes.shape[1]
    width = 2 + 3 * dimensions
    if len(found.columns) % (8 * width):
        raise UsageError(f"malformed table of boxes: {len(found.columns)} B of columns of {width} numbers")
    columns = _numbers_in(found.columns).reshape(width, -1).T
    _check_columns(shapes, item, found.size_bytes, columns)
    return table_of_columns(tensors, found.size_bytes, columns, item)


def _check_columns(shapes: Ints, item: Ints, size_bytes: int, columns: Ints) -> None:
    dimensions = shapes.shape[1]
    tensor, offset = columns[:, 0], columns[:, 1]
    at, size, strides = (columns[:, 2 + n * dimensions : 2 + (n + 1) * dimensions] for n in range(3))
    if not 0 <= size_bytes <= MAX_STREAM_BYTES:
        raise UsageError(f"table of boxes in a stream of {size_bytes} B")
    if not len(columns):
        return
    is_good = (tensor >= 0) & (tensor < len(shapes)) & (offset >= 0) & (offset <= size_bytes)
    is_good &= ((at >= 0) & (at <= MAX_EXTENT) & (size >= 1) & (size <= MAX_EXTENT)).all(axis=1)
    is_good &= ((strides >= 0) & ((strides > 0) == (size > 1))).all(axis=1)
    if is_good.all():
        reach = np.zeros(len(columns))  # as floats first: products may pass 64 bits
        for d in range(dimensions):
            reach += (size[:, d] - 1.0) * strides[:, d]
        is_good &= (at + size <= shapes[tensor]).all(axis=1) & (reach <= size_bytes)
    if is_good.all():
        last = offset + item[tensor]
        for d in range(dimensions):
            last += (size[:, d] - 1) * strides[:, d]
        is_good &= last <= size_bytes
    if not is_good.all():
        raise UsageError(
            f"table of boxes whose row {int(np.flatnonzero(~is_good)[0])} lies outside of stream or tensor"
        )


def encode_grid(grid: Grid) -> bytes:
    """A grid as it travels. Raises `UsageError` for more than any worker takes."""
    return _deflated(_plain_grid(grid), f"{len(grid.cuts)} cuts of {len(grid.tensors)} tensors")


def grid_digest(grid: Grid) -> Digest:
    """Equal exactly for equal grids."""
    return _digest(_plain_grid(grid))


def _plain_grid(grid: Grid) -> bytes:
    counts = grid.cells.ravel() + 1
    packed = (_bytes_of(np.asarray(column, "<i8")) for column in (grid.kind, counts, grid.cuts))
    return msgspec.msgpack.encode(_Grid(_pack_tensors(grid.tensors), grid.dimensions, *packed))


def decode_grid(data: bytes, expected: Digest | None = None) -> Grid:
    """A grid from a peer's bytes. Raises `UsageError` if it is malformed, or not that of the `expected` digest."""
    plain = _inflated(data, expected)
    try:
        found = msgspec.msgpack.decode(plain, type=_Grid)
        kind, counts, cuts = (_numbers_in(column).copy() for column in (found.kind, found.counts, found.cuts))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UsageError(f"malformed grid: {error}") from error
    tensors, dimensions = _unpack_tensors(found.tensors), found.dimensions
    if dimensions != (max((len(tensor.shape) for tensor in tensors), default=1) or 1):
        raise UsageError(f"malformed grid: {dimensions} dimensions")
    kinds = len(counts) // max(1, dimensions)
    is_good = dimensions >= 1 and len(counts) == kinds * dimensions and len(kind) == len(tensors)
    is_good = is_good and bool((counts >= 1).all() and (counts <= len(cuts)).all() and counts.sum() == len(cuts))
    if not is_good or not bool(((kind >= 0) & (kind < kinds)).all()):
        raise UsageError("malformed grid: its columns do not fit each other")
    ends = starts_of(counts)
    grid = Grid(tensors, kind, cuts, ends[:-1].reshape(kinds, dimensions), (counts - 1).reshape(kinds, dimensions))
    _check_cuts(grid, ends)
    return grid


def _check_cuts(grid: Grid, ends: Ints) -> None:
    """Checks that cuts rise from 0 to the extent of each tensor, and that there are not too many tiles."""
    rises = np.diff(grid.cuts) > 0
    rises[ends[1:-1] - 1] = True  # from one dimension to the next
    first, last = grid.cuts[ends[:-1]].reshape(grid.cells.shape), grid.cuts[ends[1:] - 1].reshape(grid.cells.shape)
    is_good = bool(rises.all() and (first == 0).all() and (last <= MAX_EXTENT).all() and len(ends) <= MAX_SEGMENTS)
    if is_good and grid.tensors:
        is_good = bool((last[grid.kind] == padded_shapes(grid.tensors, grid.dimensions)).all())
        is_good = is_good and float(np.prod(grid.cells.astype(np.float64), axis=1)[grid.kind].sum()) < 1 << 40
    if not is_good:
        raise UsageError("malformed grid: cuts that are not those of its tensors")


def _check_count(tensors: int, dimensions: int) -> None:
    most = min(MAX_TENSORS, MAX_SEGMENTS // max(1, dimensions))
    if tensors > most:
        raise UsageError(
            f"{tensors} tensors of up to {dimensions} dimensions are too many for one shard: {most} are the limit"
        )


def _pack_tensors(tensors: tuple[GlobalTensor, ...]) -> _Tensors:
    _check_count(len(tensors), max((len(tensor.shape) for tensor in tensors), default=0))
    kinds: dict[tuple[str, tuple[int, ...]], int] = {}
    kind = [kinds.setdefault((tensor.dtype, tensor.shape), len(kinds)) for tensor in tensors]
    return _Tensors([tensor.name for tensor in tensors], list(kinds), np.array(kind, "<i4").tobytes())


@lru_cache(maxsize=8)
def _tensors_of(packed: bytes) -> tuple[tuple[GlobalTensor, ...], Ints, Ints]:
    """With their filled-up shapes and bytes of an element.

    Equal bytes give the same object, so that what was found out about one shard's tensors serves for the next.
    """
    tensors = _unpack_tensors(msgspec.msgpack.decode(packed, type=_Tensors))
    dimensions = max((len(tensor.shape) for tensor in tensors), default=1) or 1
    return tensors, padded_shapes(tensors, dimensions), items_of(tensors)


def _unpack_tensors(packed: _Tensors) -> tuple[GlobalTensor, ...]:
    if len(packed.kind) != 4 * len(packed.names):
        raise UsageError("malformed table of tensors: its columns do not fit each other")
    _check_count(len(packed.names), max((len(shape) for _, shape in packed.kinds), default=0))
    for dtype, shape in packed.kinds:
        item_bytes(dtype)  # raises for a dtype that is none
        size = 1.0
        for extent in shape:  # one of 0 makes the others no smaller: strides are made of them
            size *= max(extent, 1) if 0 <= extent <= MAX_EXTENT else MAX_ELEMENTS * 2.0
        if len(shape) > MAX_DIMENSIONS or size > MAX_ELEMENTS:
            raise UsageError(f"malformed table of tensors: shape {list(shape)}")
    kind = np.frombuffer(packed.kind, "<i4").tolist()
    if any(not 0 <= number < len(packed.kinds) for number in kind):
        raise UsageError("malformed table of tensors: a kind that is none")
    names = packed.names
    if not "".join(names).isprintable() or max(map(len, names), default=0) > MAX_TEXT:
        raise UsageError("malformed table of tensors: a name with unprintable characters, or one that is too long")
    if any(one >= other for one, other in pairwise(names)):
        raise UsageError("malformed table of tensors: names that are not sorted, or twice there")
    return tuple(GlobalTensor(name, *packed.kinds[number]) for name, number in zip(names, kind, strict=True))


def _deflated(plain: bytes, what: str) -> bytes:
    """Compresses data for `_inflated`. Very regular data are packed less tightly: the ratio has a limit."""
    if len(plain) > MAX_PLAIN_BYTES:
        raise UsageError(f"{what} take {len(plain)} B, and {MAX_PLAIN_BYTES} B are the limit of one shard")
    packed = zlib.compress(plain, LEVEL)
    if len(plain) > len(packed) * MAX_RATIO:
        packing = zlib.compressobj(LEVEL, strategy=zlib.Z_HUFFMAN_ONLY)  # at least a bit for each byte
        packed = packing.compress(plain) + packing.flush()
    return packed


def _inflated(data: bytes, expected: Digest | None) -> bytes:
    """Never more than the limits say, and what has another digest than is expected is not looked at."""
    unpacking, most = zlib.decompressobj(), min(MAX_PLAIN_BYTES, len(data) * MAX_RATIO)
    try:
        plain = unpacking.decompress(data, most + 1)
    except zlib.error as error:
        raise UsageError(f"malformed layout: {error}") from error
    if len(plain) > most:
        raise UsageError(
            f"malformed layout: {len(data)} B unpack to more than {most} B; the limit is {MAX_RATIO} times their"
            f" length, and {MAX_PLAIN_BYTES} B"
        )
    if not unpacking.eof:
        raise UsageError("malformed layout: it is cut off")
    if expected is not None and _digest(plain) != expected:
        raise UsageError(f"a layout with another digest than {expected}")
    return plain


def _bytes_of(numbers: Ints) -> memoryview:
    """The numbers' own memory."""
    return np.ascontiguousarray(numbers).reshape(-1).view(np.uint8).data


def _numbers_in(column: memoryview) -> Ints:
    """The numbers where they lie. Raises `ValueError` for a part of one."""
    return np.frombuffer(column, "<i8").astype(np.int64, copy=False)


def _digest(plain: bytes) -> Digest:
    return Digest(blake2b(plain, digest_size=DIGEST_BYTES).hexdigest())


FEW_TILES = 1 << 18  # what takes at most 64 MiB: more of them only with as many digests


class _Wire(msgspec.Struct, frozen=True, array_like=True):
    layout: bytes
    grid: bytes
    manifest: bytes


@dataclass(frozen=True, eq=False)
class TiledShard:
    """A shard as it was published: its boxes, the grid, and a digest of each tile."""

    table: BoxTable
    grid: Grid
    manifest: TileManifest

    def encode(self) -> bytes:
        """Encodes it for the wire. It is sent before the bytes."""
        return msgspec.msgpack.encode(_Wire(encode_table(self.table), encode_grid(self.grid), self.manifest.encode()))


_decoder = msgspec.msgpack.Decoder(_Wire)


def decode_tiled_shard(data: bytes, expected: Digest) -> TiledShard:
    """A source's shard. Raises `CorruptTransfer` unless it is what the server named by that root."""
    found, manifest = _checked(data, expected)
    try:
        table = decode_table(found.layout, manifest.layout)
        grid = decode_grid(found.grid, manifest.grid)
        tile_count = spans_of(table, grid, here="in its boxes", there="in its grid").tile_count
    except (UsageError, LayoutMismatch) as error:
        raise CorruptTransfer(f"the source sent a malformed shard: {error}") from error
    if layout_digest(table) != manifest.layout or grid_digest(grid) != manifest.grid:
        raise CorruptTransfer("the source's boxes or grid are not written as workers write them")
    if tile_count != manifest.tile_count or tile_count > max(FEW_TILES, len(manifest.digests) // DIGEST_BYTES):
        text = f"of which its manifest names {manifest.tile_count}, with {len(manifest.digests)} B of digests"
        raise CorruptTransfer(f"the source's boxes have {tile_count} tiles, {text}")
    return TiledShard(table, grid, manifest)


def check_tiled_shard(data: bytes, expected: Digest) -> None:
    """Checks only that it has the root that the server named. Raises `CorruptTransfer`."""
    _checked(data, expected)


def _checked(data: bytes, expected: Digest) -> tuple[_Wire, TileManifest]:
    try:
        found = decoded(_decoder, data)
        manifest = decode_tile_manifest(found.manifest)
    except (Undecodable, UsageError) as error:
        raise CorruptTransfer(f"the source sent a malformed shard: {error}") from error
    if manifest.root() != expected:
        raise CorruptTransfer(f"the source's content has root digest {manifest.root()}, the server named {expected}")
    return found, manifest


def publish_tiled_shard(registration: Registration, tiles: Tiles, *, metadata: bytes = b"") -> TiledShard:
    """Makes a tiled shard of the registered tensors. Blocks. The tensors must not be written meanwhile.

    Raises `UsageError` naming tensors whose memory was freed.
    """
    if not tiles.is_whole.all():
        raise UsageError("a layout whose boundaries are no cuts of the grid has tiles that it holds only in part")
    layout, grid, digests = layout_digest(tiles.table), grid_digest(tiles.grid), tile_digests(registration, tiles)
    manifest = TileManifest(layout, grid, ALGORITHM, len(tiles), digests, "", metadata)
    return TiledShard(tiles.table, tiles.grid, manifest)
