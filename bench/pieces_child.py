"""What a process of the benchmarks does for part `pieces`: a source whose rows hold the reader's, and the reader."""

import base64
import os
import time

import numpy as np
import xxhash

from tensorhub.memory.digests import build_manifest
from tensorhub.memory.fill import FillSink
from tensorhub.memory.host_copies import copy_stream, on_host
from tensorhub.memory.registration import Registration, register
from tensorhub.protocol.layout import Box
from tensorhub.reshard.grid import BoxTable, Grid, grid_of, table_of, tiles_of
from tensorhub.reshard.plan import Source, derive_manifest
from tensorhub.reshard.read import Across
from tensorhub.reshard.wire import TiledShard, decode_tiled_shard, grid_digest, layout_digest, publish_tiled_shard
from tensorhub.runtime.config import worker_options
from tensorhub.runtime.opening import make_transport
from tensorhub.transport.base import Export, Progress, Transport, read_to_end

from .converse import converse
from .plain import RawReader, RawSource
from .plain_rows import THREADS, Packed, addresses, read_rows, receive_rows
from .section import MIB

PATIENCE_S = 120.0
CHUNK_BYTES = 4 * MIB


def shard(size_bytes: int, run_bytes: int, *, is_wide: bool) -> tuple[tuple[int, int], dict[str, list[Box]]]:
    """`size_bytes` of a matrix in rows of `run_bytes`: by themselves, or each beside as many other bytes."""
    rows = size_bytes // run_bytes
    shape, part = (rows, run_bytes), ((0, 0), (rows, run_bytes))
    if not is_wide:
        return shape, {"w": [Box("w", shape, *part)]}
    return (rows, 2 * run_bytes), {"w": [Box("w", shape, *part, offset=run_bytes, strides=(2 * run_bytes, 1))]}


class Pieces:
    """One side."""

    def __init__(self) -> None:
        self._transports: dict[str, Transport] = {}
        self._array = np.zeros(0, np.uint8)
        self._registration: Registration | None = None
        self._table: BoxTable | None = None
        self._grid: Grid | None = None
        self._cut: TiledShard | None = None
        self._rows = self._array  # what the other side has, or wants: rows of equal length
        self._raw_source: RawSource | None = None
        self._raw_reader: RawReader | None = None
        self._raw_pid = 0
        self._vectors = (self._array, self._array)  # of the source's rows and of its own

    def cpu(self) -> float:
        """Seconds of CPU of this process so far."""
        return time.process_time()

    def _transport(self, kind: str) -> Transport:
        if kind not in self._transports:
            self._transports[kind] = make_transport(kind, "127.0.0.1", worker_options())
        return self._transports[kind]

    def cut(self, size_bytes: int, run_bytes: int, is_wide: bool, is_publisher: bool) -> None:
        """Allocate, fill, and agree on the grid: what is narrow here is wide there."""
        shape, boxes = shard(size_bytes, run_bytes, is_wide=is_wide)
        self._array = np.ones(shape, np.uint8)
        self._rows = self._array[:, -run_bytes:]
        if is_publisher:
            noise = np.random.default_rng(1).integers(0, 256, size=8 * MIB + 4099, dtype=np.uint8)
            flat = self._array.reshape(-1)
            for start in range(0, flat.size, len(noise)):
                flat[start : start + len(noise)] = noise[: flat.size - start]
        self._registration = register({"w": self._array})
        self._table = table_of(self._registration.layout, boxes)
        shape, boxes = shard(size_bytes, run_bytes, is_wide=not is_wide)
        there = table_of(register({"w": np.empty(shape, np.uint8)}).layout, boxes)
        self._grid = grid_of(*([self._table], [there]) if is_publisher else ([there], [self._table]))

    def serve(self, kinds: list[str], size_bytes: int) -> dict[str, object]:
        """Let the other side read pieces, and as many bytes of the same layout, also out of host copies."""
        assert self._registration is not None
        assert self._table is not None
        assert self._grid is not None
        self._cut = publish_tiled_shard(self._registration, tiles_of(self._table, self._grid))
        plain = register({"plain": self._array.reshape(-1)[:size_bytes]})
        manifest = build_manifest(plain, CHUNK_BYTES)
        endpoints = {}
        for kind in kinds:
            transport = self._transport(kind)
            for suffix in ("", "copied") if kind == "local" else ("",):
                for key, registration in (("pieces", self._registration), ("plain", plain)):
                    if suffix:
                        tensors, registration = registration, on_host(registration)
                        copy_stream(tensors.stream, registration.stream, CHUNK_BYTES, lambda *_: None)
                    progress = Progress(-(-registration.size_bytes // CHUNK_BYTES), complete=True)
                    if key == "pieces":
                        transport.export(
                            Export(key + suffix, self._cut.encode(), CHUNK_BYTES, registration.stream, progress)
                        )
                    else:
                        body = manifest.encode()
                        transport.export(Export(key + suffix, body, CHUNK_BYTES, registration.stream, progress))
            endpoints[kind] = transport.endpoint
        cut = base64.b64encode(self._cut.encode()).decode()
        return {
            "endpoints": endpoints,
            "root": str(manifest.root()),
            "cut": cut,
            "cut_root": str(self._cut.manifest.root()),
        }

    def know(self, cut: str, cut_root: str) -> None:
        """What the source has published."""
        self._cut = decode_tiled_shard(base64.b64decode(cut), cut_root)  # type: ignore[arg-type]

    def read_pieces(self, kind: str, endpoint: str, key: str) -> dict[str, object]:
        """All that this side wants. Planned beforehand; timed from the first word to the last tile."""
        assert self._registration is not None
        assert self._table is not None
        assert self._grid is not None
        assert self._cut is not None
        source = Source("source", self._cut.table, self._cut.manifest)
        tiles = tiles_of(self._table, self._grid)
        manifest = derive_manifest(tiles, [source], layout=layout_digest(self._table), grid=grid_digest(self._grid))
        across = Across(self._registration, tiles, manifest)
        tile_sinks = across.tile_sinks([source])
        transport = self._transport(kind)
        began, cpu = time.monotonic(), time.process_time()
        paths = [read_to_end(transport, endpoint, key, tile_sink, within_s=PATIENCE_S) for tile_sink in tile_sinks]
        found = time.monotonic() - began
        for tile_sink in tile_sinks:
            across.ended(tile_sink)
        if across.missing:
            raise RuntimeError(f"{across.missing} tiles are missing")
        return {"seconds": found, "cpu_s": time.process_time() - cpu, "path": paths[0]}

    def serve_rows(self) -> dict[str, int]:
        """Let plain programs read the same rows."""
        is_all = self._rows.shape == self._array.shape
        self._raw_source = RawSource(memoryview(self._array.reshape(-1)) if is_all else Packed(self._rows))
        at, apart = self._rows.ctypes.data, self._rows.strides[0]
        return {"pid": os.getpid(), "port": self._raw_source.port, "at": at, "apart": apart}

    def know_rows(self, pid: int, port: int, at: int, apart: int) -> None:
        """Where a plain program finds them."""
        self._raw_reader = RawReader("127.0.0.1", port, THREADS)
        ours = addresses(self._rows)
        theirs = ours.copy()
        theirs[:, 0] = at + np.arange(len(ours), dtype=np.uint64) * np.uint64(apart)
        self._vectors, self._raw_pid = (theirs, ours), pid

    def read_rows(self, kind: str) -> dict[str, object]:
        """As a plain program does."""
        assert self._raw_reader is not None
        self._rows[:] = 0
        began, cpu = time.monotonic(), time.process_time()
        if kind == "local":
            read_rows(self._raw_pid, *self._vectors)
        elif self._rows.shape == self._array.shape:
            self._raw_reader.read(memoryview(self._array.reshape(-1)))
        else:
            receive_rows(self._raw_reader, self._rows)
        return {"seconds": time.monotonic() - began, "cpu_s": time.process_time() - cpu}

    def digest_rows(self) -> str:
        """Of what both sides have in the end."""
        return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(self._rows))

    def read_plain(self, kind: str, endpoint: str, key: str, root: str, size_bytes: int) -> dict[str, object]:
        """As many bytes of the same layout."""
        registration = register({"plain": self._array.reshape(-1)[:size_bytes]})
        sink = FillSink(registration, root)  # type: ignore[arg-type]
        began, cpu = time.monotonic(), time.process_time()
        path = read_to_end(self._transport(kind), endpoint, key, sink, within_s=PATIENCE_S)
        if not sink.progress.is_complete:
            raise RuntimeError("the read ended before its last chunk")
        return {"seconds": time.monotonic() - began, "cpu_s": time.process_time() - cpu, "path": path}


if __name__ == "__main__":
    converse(Pieces())
