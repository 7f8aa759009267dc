"""Readers and sources of other layouts, for the tests of reads of pieces."""

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from memory.cutting import Model, Shard, draw_layout, draw_model
from tensorhub.memory.host_copies import copy_stream, on_host
from tensorhub.memory.registration import Registration
from tensorhub.memory.streams import Copy, Piece, StagedStream, StagingRing
from tensorhub.memory.xxh3 import Spans
from tensorhub.protocol.errors import TensorHubError
from tensorhub.reshard.grid import Cutting, Grid, tiles_of
from tensorhub.reshard.plan import Source, derive_manifest
from tensorhub.reshard.read import Across, TileSink
from tensorhub.reshard.wire import TiledShard, grid_digest, layout_digest, publish_tiled_shard
from tensorhub.transport.base import Export, Progress, Read, Transport

from . import kit
from .kit import Ended, stand_in

BAND_BYTES = 48  # so that even small tensors are cut further
CHUNK = 64


class Columns(NamedTuple):
    """A model, its publishers, a reader of it with another layout, and the grid."""

    model: Model
    publisher: list[Shard]
    reader: Shard
    grid: Grid


def drawn(chance: Random, *, is_known: bool = True) -> Columns:
    """A model, the shards of its publisher, filled, one shard of a reader, and the grid.

    A layout that is not known when the version is published holds tiles in part; tied tensors must be known.
    """
    model = draw_model(chance, has_tie=is_known and chance.random() < 0.3)
    publisher = draw_layout(chance, model, chance.randint(1, 3))
    reader = draw_layout(chance, model, chance.randint(1, 2))[0]
    for shard in publisher:
        shard.fill(model)
    reader.spoil(chance)
    cutting = Cutting(BAND_BYTES, fewest_tiles=1 << 20)
    for shard in publisher:
        cutting.add_publisher(shard.table)
    if is_known:
        cutting.add_other(reader.table)
    return Columns(model, publisher, reader, cutting.grid())


def cuts_of(publisher: Sequence[Shard], grid: Grid) -> list[TiledShard]:
    return [publish_tiled_shard(shard.registration, tiles_of(shard.table, grid)) for shard in publisher]


class Landing(kit.Pieces):
    """A reader's tensors, as if they lay on a device: what is written there has landed before."""

    def __init__(self, registration: Registration) -> None:
        super().__init__(bytearray())
        pieces = registration.pieces
        starts, addresses = [piece.start for piece in pieces], [piece.address for piece in pieces]
        self._spans = Spans(starts, addresses, registration.size_bytes)

    @property
    def size_bytes(self) -> int:
        return self._spans.stop

    def land(self, source: stand_in.Opened, *what: Any, digests: bool) -> Any:
        return stand_in.land(source, self._spans, *what, digests=digests)


def exported(transport: Transport, key: str, shard: Shard, cut: TiledShard, progress: Progress | None = None) -> None:
    """What the shard has now; a host copy of it where the kind under test maps such."""
    registration = shard.registration
    progress = progress or Progress(-(-registration.size_bytes // CHUNK), complete=True)
    if kit.maps():
        tensors, registration = registration, on_host(registration)
        copy_stream(tensors.stream, registration.stream, 1 << 20, lambda *_: None)
    if kit.is_on_device():
        memory = kit.memory(registration.size_bytes)
        with registration.stream.views_to_read(0, registration.size_bytes) as views:
            memory[:] = b"".join(views)
        registration = replace(registration, stream=kit.Pieces(memory))
    transport.export(Export(key, cut.encode(), CHUNK, registration.stream, progress))


def sources_of(cuts: Sequence[TiledShard]) -> list[Source]:
    return [Source(f"trainer[{number}]", cut.table, cut.manifest) for number, cut in enumerate(cuts)]


def across_for(reader: Shard, grid: Grid, sources: Sequence[Source], **options: object) -> Across:
    tiles = tiles_of(reader.table, grid)
    manifest = derive_manifest(tiles, sources, layout=layout_digest(reader.table), grid=grid_digest(grid))
    registration = reader.registration
    if kit.is_on_device():
        registration = replace(registration, stream=Landing(registration))
    return Across(registration, tiles, manifest, **options)


class Reading:
    """A tile sink under way."""

    def __init__(self, across: Across, tile_sink: TileSink, transport: Transport, endpoint: str, key: str) -> None:
        self.across, self.tile_sink = across, tile_sink
        self.ended = Ended()
        self.read: Read = transport.read(endpoint, key, tile_sink, self.ended)

    def wait(self) -> TensorHubError | None:
        """How it ended, once what it has brought is noted."""
        error = self.ended.wait()
        self.left = self.across.ended(self.tile_sink)
        return error


def read_all(across: Across, sources: Sequence[Source], transport: Transport, endpoints: Sequence[str]) -> None:
    """All of it; the source with number n exports as "n"."""
    readings = [
        Reading(across, tile_sink, transport, endpoints[tile_sink.number], str(tile_sink.number))
        for tile_sink in across.tile_sinks(sources)
    ]
    errors = [reading.wait() for reading in readings]
    assert errors == [None] * len(errors), [f"{e!r}: {e.__cause__!r}" for e in errors if e]
    kit.until(lambda: across.missing == 0, "every tile is noted")
    assert across.progress.is_complete


ROWS, COLUMNS = 1024, 4096


def columns(sources: int = 2, *, array: np.ndarray | None = None, run: int = COLUMNS // 2) -> Columns:
    """One matrix of 4 MiB, which its publishers hold whole each, and a reader of its last `run` columns."""
    chance = Random(7)
    model = {"w": np.frombuffer(chance.randbytes(ROWS * COLUMNS), np.uint8).reshape(ROWS, COLUMNS)}
    publisher = []
    for number in range(sources):
        shard = Shard()
        memory = np.zeros((ROWS, COLUMNS), np.uint8) if array is None or number else array
        shard.add_array("w", memory, [("w", (ROWS, COLUMNS), ((0, 0), (ROWS, COLUMNS)), memory)])
        publisher.append(shard.finish())
        shard.fill(model)
    reader, memory = Shard(), np.zeros((ROWS, run), np.uint8)
    reader.add_array("part", memory, [("w", (ROWS, COLUMNS), ((0, COLUMNS - run), (ROWS, run)), memory)])
    reader.finish()
    cutting = Cutting(1 << 18, fewest_tiles=1 << 20)
    for shard in publisher:
        cutting.add_publisher(shard.table)
    cutting.add_other(reader.table)
    return Columns(model, publisher, reader, cutting.grid())


def transposed(rows: int, columns: int, *, is_here: bool) -> Columns:
    """One matrix that lies transposed at its reader (`is_here`), or at its publisher."""
    chance = Random(rows)
    whole = np.frombuffer(chance.randbytes(rows * columns * 4), np.float32).reshape(rows, columns)
    model, shape, ends = {"w": whole}, (rows, columns), []
    for is_turned in (not is_here, is_here):
        memory = np.zeros((columns, rows) if is_turned else shape, np.float32)
        shard = Shard()
        shard.add_array("w", memory, [("w", shape, ((0, 0), shape), memory.T if is_turned else memory)])
        ends.append(shard.finish())
    publisher, reader = ends
    publisher.fill(model)
    cutting = Cutting(1 << 14, fewest_tiles=1 << 20)
    cutting.add_publisher(publisher.table)
    cutting.add_other(reader.table)
    return Columns(model, [publisher], reader, cutting.grid())


def half_of(shard: Shard) -> Progress:
    """What a source that is itself filling has."""
    progress = Progress(-(-shard.registration.size_bytes // CHUNK))
    for chunk in range(progress.chunk_count // 2):
        progress.mark(chunk)
    return progress


class OnDevice:
    """Moves bytes between memory that stands for a device's and the staging ring."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = [structs.replace(piece, device="cuda:0") for piece in pieces]
        self._staged: np.ndarray | None = None

    def staging(self, size_bytes: int) -> memoryview:
        self._staged = np.zeros(size_bytes, np.uint8)
        return self._staged.data

    def to_host(self, copies: Sequence[Copy]) -> None:
        for one in copies:
            ctypes.memmove(self._host(one), self._device(one), one.size_bytes)

    def to_device(self, copies: Sequence[Copy]) -> None:
        for one in copies:
            ctypes.memmove(self._device(one), self._host(one), one.size_bytes)

    def _host(self, one: Copy) -> int:
        assert self._staged is not None
        return self._staged.ctypes.data + one.at

    def _device(self, one: Copy) -> int:
        return self.pieces[one.piece].address + one.inside


def on_device(registration: Registration) -> Registration:
    """The same tensors, as if they could be reached only by way of a small staging ring."""
    device = OnDevice(registration.pieces)
    stream = StagedStream(device.pieces, device, StagingRing(slot_bytes=1 << 16, slot_count=4))
    return replace(registration, stream=stream)
