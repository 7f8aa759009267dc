"""How a shard with boxes is exported, so that readers of any layout find their tiles in it; and its digests, quickly.

What a reader is told ahead of the bytes is the shard's boxes, the grid, and the digests of its tiles. The root that the
server names is the manifest's (`protocol/manifest.py`), which has the digests of the other two in it.
"""

import ctypes
import threading
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import xxhash

from ..memory.describe import some
from ..memory.digests import ALGORITHM, NO_ALGORITHM, freed
from ..memory.parallel import in_parallel
from ..memory.registration import Registration
from ..memory.streams import Freed, addresses_of, copy
from ..protocol.errors import CorruptTransfer, LayoutMismatch, UsageError
from ..protocol.manifest import DIGEST_BYTES, TileManifest, decode_tile_manifest
from ..protocol.names import Digest, Undecodable, decoded
from ..transport.base import Export, Progress
from ..transport.native import load
from ..transport.ranges import Addresses, Placed, Rows
from .copies import SOURCE, THEIRS, Bytes, Copies, copies_of
from .derive import copy_runs, digests_of, tied_tiles
from .grid import BoxTable, Grid, Ints, Tiles, chunks_of, row_major, spans_of, starts_of
from .plan import words
from .wire import decode_grid, decode_table, encode_grid, encode_table, grid_digest, layout_digest

FEW_TILES = 1 << 18  # what takes at most 64 MiB: more of them only with as many digests
SPREAD = 4  # memory that is this many times longer than the tiles in it is looked at tile by tile


class _Wire(msgspec.Struct, frozen=True, array_like=True):
    layout: bytes
    grid: bytes
    manifest: bytes


@dataclass(frozen=True, eq=False)
class Cut:
    """A shard as it was cut and published."""

    table: BoxTable
    grid: Grid
    manifest: TileManifest

    def encode(self) -> bytes:
        """As it travels ahead of the bytes."""
        return msgspec.msgpack.encode(_Wire(encode_table(self.table), encode_grid(self.grid), self.manifest.encode()))


_decoder = msgspec.msgpack.Decoder(_Wire)


def decode_cut(data: bytes, expected: Digest) -> Cut:
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
    return Cut(table, grid, manifest)


def check_cut(data: bytes, expected: Digest) -> None:
    """Nothing but whether it is what the server named by that root. Raises `CorruptTransfer`."""
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


def publish_cut(
    registration: Registration, tiles: Tiles, *, salt: str = "", metadata: bytes = b"", threads: int | None = None
) -> Cut:
    """What is registered now, tile by tile. Blocks; nobody may write to the tensors meanwhile.

    With a `salt` nothing is read and no digest made. Raises `UsageError` naming tensors whose memory was freed.
    """
    if not tiles.is_whole.all():
        raise UsageError("a layout whose boundaries are no cuts of the grid has tiles that it holds only in part")
    algorithm = NO_ALGORITHM if salt else ALGORITHM
    digests = b"" if salt else tile_digests(registration, tiles, threads=threads)
    layout, grid = layout_digest(tiles.table), grid_digest(tiles.grid)
    manifest = TileManifest(layout, grid, algorithm, len(tiles), digests, salt, metadata)
    return Cut(tiles.table, tiles.grid, manifest)


def export_of(key: str, cut: Cut, registration: Registration, chunk_bytes: int, progress: Progress) -> Export:
    """For any transport. `progress` is by chunks of the stream, as that of every export."""
    return Export(key, cut.encode(), chunk_bytes, registration.stream, progress)


# -- digests -----------------------------------------------------------------------------------------------------------


def tile_digests(registration: Registration, tiles: Tiles, *, threads: int | None = None) -> bytes:
    """The digest of each tile, or of what lies here of it, as it lies in registered memory, in the order given.

    Memory is copied first, by the kernel, for it may be freed at any moment. Raises `UsageError` naming its tensors.
    """
    registration.settle()
    chunks, found = chunks_of(tiles), np.zeros((len(tiles), DIGEST_BYTES), np.uint8)
    is_dense = chunks.stop - chunks.start <= SPREAD * chunks.size_bytes
    work = _Hashing(registration, tiles, int(np.max((chunks.stop - chunks.start)[is_dense], initial=0)))

    def one(chunk: int) -> None:
        mine = chunks.order[chunks.first[chunk] : chunks.first[chunk + 1]]
        found[mine] = work.near(mine) if is_dense[chunk] else np.concatenate([work.spread(int(tile)) for tile in mine])

    in_parallel(one, range(len(chunks)), threads=threads or 2, name="digest")
    if work.gone:
        raise UsageError(
            f"the memory of these tensors was freed while they were hashed: {some(freed(registration, work.gone))}",
            hint="register() again what was given other memory, and free it only after unpublish()",
        )
    return found[tied_tiles(tiles)].tobytes()


class _Hashing:
    """Digests of some tiles. Called from several threads, each with room of its own."""

    def __init__(self, registration: Registration, tiles: Tiles, most_bytes: int) -> None:
        self.gone: list[int] = []  # a byte of each piece of memory that was not there any more
        self._stream = registration.stream
        self._tiles = tiles
        self._most_bytes = most_bytes
        self._rooms = threading.local()

    def near(self, tiles: Ints) -> Bytes:
        """Of tiles that lie near each other: their memory is copied as it lies."""
        copies = _gathering(self._tiles.only(tiles))
        first, last = copies.extent(SOURCE)
        room = self._room(self._most_bytes)
        try:
            with self._stream.reading(first, last) as views:
                here = Addresses.of_ranges([(room.ctypes.data, last - first)], first)
                copy(addresses_of(self._stream, views, first), here, first, last)
        except Freed as error:
            self.gone.append(error.at)
            return np.zeros((len(tiles), DIGEST_BYTES), np.uint8)
        return _digests_in(room[: last - first], first, self._tiles.only(tiles), copies)

    def spread(self, tile: int) -> Bytes:
        """Of one whose memory lies between much else: only its own runs are copied."""
        mine = self._tiles.only(np.array([tile]))
        room = self._room(int(mine.size_bytes[0]))[: mine.size_bytes[0]]
        try:
            copy_runs(self._stream, _gathering(mine), room)
        except Freed as error:
            self.gone.append(error.at)
            return np.zeros((1, DIGEST_BYTES), np.uint8)
        return np.frombuffer(xxhash.xxh3_128_digest(room.data), np.uint8)[None]

    def _room(self, size_bytes: int) -> Bytes:
        if not hasattr(self._rooms, "mine") or self._rooms.mine.nbytes < size_bytes:
            self._rooms.mine = np.empty(size_bytes, np.uint8)
        found: Bytes = self._rooms.mine
        return found


def _gathering(tiles: Tiles) -> Copies:
    """From the shard's stream, in row-major order of each tile."""
    item = tiles.item
    packed = row_major(tiles.size) * item[:, None]
    target = (np.zeros_like(item), packed)
    return copies_of(tiles.size, item, tiles.offset, tiles.strides, *target, np.arange(len(tiles)))


def _digests_in(memory: Bytes, first: int, tiles: Tiles, copies: Copies) -> Bytes:
    """Of tiles in memory that begins at byte `first` of their stream."""
    library = load.library()
    if library is None:
        near = replace(tiles, offset=tiles.offset - first)
        digests = digests_of(near, lambda start, stop: memory[start:stop], parts=True)
        return np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES)
    rows = copies.rows[:, THEIRS]
    rows[:, 0] -= first
    placed = Placed(
        Rows.checked(words(rows), memory.nbytes), Addresses.of_ranges([(memory.ctypes.data, memory.nbytes)])
    )
    ends = words(starts_of(tiles.size_bytes))
    out = ctypes.create_string_buffer(len(tiles) * DIGEST_BYTES)
    is_whole = library.digest_tiles(placed.table, ends.buffer_info()[0], len(tiles), out)
    assert is_whole, "rows that are not those of their tiles"
    return np.frombuffer(out.raw, np.uint8).reshape(-1, DIGEST_BYTES)
