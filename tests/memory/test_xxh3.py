"""The kernels that hash device memory, run on the host warp by warp: the same digests as the package `xxhash`."""

import ctypes
import random
import shutil
import subprocess
from array import array
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import xxhash

from tensorhub.memory import landing, xxh3
from tensorhub.memory.landing import Landing, row_table
from tensorhub.memory.registration import Registration
from tensorhub.memory.xxh3 import BLOCK_BYTES, LANES, MIN_BYTES, Chunks, NoRoom, Spans, digests
from tensorhub.reshard.copies import COLUMNS
from tensorhub.reshard.grid import Cutting, tiles_of
from tensorhub.reshard.plan import Source, derive_manifest
from tensorhub.reshard.read import Across
from tensorhub.reshard.wire import grid_digest, layout_digest, publish_tiled_shard

from .cutting import draw_layout, draw_model

EMULATED = Path(__file__).parent / "emulated"
KERNELS = Path(xxh3.__file__).with_name("xxh3.cu")
BLOCKS = 2  # of threads; two warps each


class Emulator:
    """A `Launcher` whose device is this process: memory with holes of 64 bytes that nothing may write.

    Lanes run late, and in any order that `follow` allows.
    """

    def __init__(self, library: ctypes.CDLL, room_bytes: int = 1 << 30) -> None:
        self.library = library
        self.room_bytes = room_bytes
        self.kept: list[object] = []
        self.lanes: list[list[Callable[[], bool]]] = [[] for _ in range(LANES)]  # each: whether it could run
        self.done = [0] * LANES
        self.rng = random.Random(LANES)

    def room(self, size_bytes: int, *, lane: int = 0) -> int:
        if size_bytes > self.room_bytes:
            raise NoRoom
        self.kept.append(memory := np.full(size_bytes + 16, 0xA5, np.uint8))
        return -(-memory.ctypes.data // 16) * 16

    def upload(self, words: "array[int]", *, lane: int = 0, at: int | None = None) -> int:
        place = self.room(8 * len(words)) if at is None else at
        self.kept.append(copy := array("Q", words))
        self.lanes[lane].append(lambda: bool(ctypes.memmove(place, copy.buffer_info()[0], 8 * len(copy)) or True))
        return place

    def launch(self, kernel: str, threads: int, job: int, *, lane: int) -> None:
        blocks = -(-threads // 64) if threads else BLOCKS
        self.lanes[lane].append(lambda: self.library.run(kernel.encode(), blocks, 64, ctypes.c_void_p(job)) == 0)

    def mark(self, lane: int) -> object:
        return lane, self.done[lane] + len(self.lanes[lane])

    def follow(self, lane: int, mark: object) -> None:
        assert isinstance(mark, tuple)
        other, count = mark
        self.lanes[lane].append(lambda: self.done[other] >= count)

    def wait(self, lane: int) -> None:
        while self.lanes[lane]:
            its = self.rng.choice([its for its in range(LANES) if self.lanes[its]])
            if self.lanes[its][0]():
                self.lanes[its].pop(0)
                self.done[its] += 1

    def download(self, address: int, count: int, *, lane: int) -> "array[int]":
        self.wait(lane)
        return array("Q", ctypes.string_at(address, 8 * count))


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler to run the kernels on the host with")
    made = tmp_path_factory.mktemp("kernels") / "run.so"
    define = f'-DKERNELS="{KERNELS}"'
    flags = ["-O1", "-std=c++17", "-fPIC", "-shared", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-Wno-sign-compare"]
    subprocess.run([compiler, *flags, define, str(EMULATED / "run.cpp"), "-o", str(made)], check=True)
    return ctypes.CDLL(str(made))


class Scattered:
    """Bytes that lie in several pieces of memory, each at an address of any alignment."""

    def __init__(self, content: np.ndarray, cuts: list[int], rng: random.Random, *, filled: bool) -> None:
        self.pieces = []
        bounds = [0, *cuts, len(content)]
        for start, stop in pairwise(bounds):
            room = np.zeros(stop - start + 64, np.uint8)
            inside = -room.ctypes.data % 16 + rng.choice([0, 0, 8, 4, 1, 3, 15])
            if filled:
                room[inside : inside + stop - start] = content[start:stop]
            self.pieces.append((start, stop, room, inside))
        addresses = [room.ctypes.data + inside for _, _, room, inside in self.pieces]
        self.spans = Spans([start for start, *_ in self.pieces], addresses, len(content))

    def content(self) -> np.ndarray:
        return np.concatenate([room[inside : inside + stop - start] for start, stop, room, inside in self.pieces])

    def margins(self) -> int:
        """How many bytes beside the pieces are not 0 any more."""
        return sum(
            int(np.count_nonzero(room[:inside]) + np.count_nonzero(room[inside + stop - start :]))
            for start, stop, room, inside in self.pieces
        )


def expected(content: np.ndarray, chunks: Chunks) -> bytes:
    ends = range(chunks.start, chunks.stop, chunks.chunk_bytes)
    step = chunks.chunk_bytes
    return b"".join(xxhash.xxh3_128_digest(content[at : min(at + step, chunks.stop)].tobytes()) for at in ends)


def cut(rng: random.Random, size_bytes: int) -> list[int]:
    return sorted(rng.sample(range(1, size_bytes), min(size_bytes - 1, rng.choice([0, 0, 1, 3, 12]))))


def check(library: ctypes.CDLL, rng: random.Random, content: np.ndarray, chunks: Chunks, *, copies: bool) -> None:
    source = Scattered(content, cut(rng, len(content)), rng, filled=True)
    target = Scattered(content, cut(rng, len(content)), rng, filled=False)
    is_hashing = not copies or rng.random() < 0.5
    found = digests(Emulator(library), source.spans, chunks, target.spans if copies else None, is_hashing=is_hashing)
    assert found == (expected(content, chunks) if is_hashing else b""), (chunks, source.spans.starts)
    if copies:
        wanted = np.zeros_like(content)
        wanted[chunks.start : chunks.stop] = content[chunks.start : chunks.stop]
        assert (target.content() == wanted).all()
        assert target.margins() == 0, "bytes were written beside the target"


BOUNDARIES = [k * BLOCK_BYTES + d for k in (4, 5, 8, 16, 17, 32) for d in (-65, -64, -63, -1, 0, 1, 63, 64, 65)]


def test_any_length_has_the_digest_of_the_host(library: ctypes.CDLL) -> None:
    rng, random_bytes = random.Random(1), np.random.default_rng(1)
    for length in [*range(MIN_BYTES, 5001, 41), *BOUNDARIES]:
        content = random_bytes.integers(0, 256, length, np.uint8)
        check(library, rng, content, Chunks(0, length, length), copies=rng.random() < 0.3)


def test_chunks_of_any_size_in_pieces_of_any_size(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xxh3, "WINDOW_BYTES", 20_000)  # several windows
    rng, random_bytes = random.Random(2), np.random.default_rng(2)
    for _ in range(50):
        size_bytes = rng.choice([241, 300, 1000, 1024, 4096, 4100, 9000, 16384])
        total = rng.randrange(size_bytes, 60_000)
        start = rng.randrange(0, total // size_bytes) * size_bytes
        stop = min(total, start + rng.randrange(1, 8) * size_bytes)
        if (stop - start - 1) % size_bytes + 1 < MIN_BYTES:
            stop = start + size_bytes
        content = random_bytes.integers(0, 256, total, np.uint8)
        check(library, rng, content, Chunks(start, stop, size_bytes), copies=rng.random() < 0.6)


def test_extreme_bytes(library: ctypes.CDLL) -> None:
    rng = random.Random(3)
    for value in (0, 255):
        check(library, rng, np.full(20_000, value, np.uint8), Chunks(0, 20_000, 8192), copies=True)


def test_a_device_that_is_nearly_full_gets_smaller_windows(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xxh3, "MIN_WINDOW_BYTES", 8192)
    content = np.random.default_rng(4).integers(0, 256, 100_000, np.uint8)
    source = Scattered(content, [], random.Random(4), filled=True)
    chunks = Chunks(0, 100_000, 4096)
    assert digests(Emulator(library, room_bytes=4096), source.spans, chunks) == expected(content, chunks)
    with pytest.raises(NoRoom):
        digests(Emulator(library, room_bytes=64), source.spans, chunks)


def rows_at_random(rng: random.Random) -> tuple[np.ndarray, int, int]:
    """Copies of nine columns whose targets do not overlap, and how much memory they reach on both sides."""
    rows, ends = [], [rng.choice([0, 16, 3]), rng.choice([0, 16, 5])]
    for _ in range(rng.randrange(1, 12)):
        unit = rng.choice([1, 2, 4, 8, 16, 16])  # of all its places: what a lane can copy at once
        run, count, counts = rng.choice([1, 1, 3, 40, 800]), rng.choice([1, 1, 7, 50]), rng.choice([1, 1, 2, 5])
        run, count = (run, count) if run * count < 5000 else (run, 2)
        sides = []
        for side in range(2):
            loops = [(count, 0), (counts, 1)]
            rng.shuffle(loops)  # transposed, or not
            strides, reach = [0, 0], run
            for times, loop in loops:
                strides[loop] = reach + rng.choice([0, 0, 2])
                reach += (times - 1) * strides[loop]
            at = -(-ends[side] // unit) * unit
            ends[side] = at + reach * unit
            sides.append((at, strides[0] * unit, strides[1] * unit))
        (source, stride, strides_), (target, to_stride, to_strides) = sides
        rows.append((source, target, run * unit, count, stride, to_stride, counts, strides_, to_strides))
    return np.array(rows, np.int64).reshape(-1, COLUMNS), *ends


def carry_out(rows: np.ndarray, source: np.ndarray, target: np.ndarray) -> None:
    """The same with numpy."""
    strided = np.lib.stride_tricks.as_strided
    for theirs, ours, run, count, stride, to_stride, counts, strides, to_strides in rows.tolist():
        shape = (counts, count, run)
        strided(target[ours:], shape, (to_strides, to_stride, 1))[...] = strided(
            source[theirs:], shape, (strides, stride, 1)
        )


def test_rows_are_copied_whatever_their_runs_and_alignment(library: ctypes.CDLL) -> None:
    rng, random_bytes = random.Random(6), np.random.default_rng(6)
    for _ in range(60):
        rows, size_bytes, room_bytes = rows_at_random(rng)
        source = random_bytes.integers(0, 256, size_bytes + 32, np.uint8)
        target, wanted = np.zeros((2, room_bytes + 64), np.uint8)
        shift, base = rng.choice([0, 16, 8, 1]), -target.ctypes.data % 16 + 16
        carry_out(rows, source[shift:], wanted[base:])
        device = Emulator(library)
        first, last = (0, len(rows)) if rng.random() < 0.5 else (len(rows) // 2, len(rows))
        if first:
            wanted[:] = 0
            carry_out(rows[first:], source[shift:], wanted[base:])
        table = device.upload(row_table(rows)) + 8 * (COLUMNS + 1) * first
        job = array("Q", (table, last - first, source.ctypes.data + shift, target.ctypes.data + base))
        device.launch("move", 0, device.upload(job), lane=0)
        device.wait(0)
        assert (target == wanted).all(), rows[first:]


def spans_of(registration: Registration) -> Spans:
    pieces = registration.pieces
    return Spans([it.start for it in pieces], [it.address for it in pieces], registration.size_bytes)


def test_tiles_of_any_layout_land_and_go_to_their_places(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landing, "MIN_WINDOW_BYTES", 4096)
    for seed in range(6):
        chance = random.Random(seed)
        monkeypatch.setattr(landing, "MAX_BYTES", chance.choice((16, 3000)) * 4096)  # several windows, or room for all
        model = draw_model(chance) | {"long": np.frombuffer(chance.randbytes(20_000), np.int16).reshape(100, 100)}
        (publisher,), (reader,) = draw_layout(chance, model, 1), draw_layout(chance, model, 1)
        publisher.fill(model)
        reader.spoil(chance)
        outside = reader.outside()
        cutting = Cutting(1000, fewest_tiles=1 << 20)
        cutting.add_publisher(publisher.table)
        if seed % 3:
            cutting.add_other(reader.table)
        grid = cutting.grid()
        cut = publish_tiled_shard(publisher.registration, tiles_of(publisher.table, grid))
        source, tiles = Source("trainer", cut.table, cut.manifest), tiles_of(reader.table, grid)
        layout = layout_digest(reader.table)
        manifest = derive_manifest(tiles, [source], layout=layout, grid=grid_digest(grid))
        for tile_sink in Across(reader.registration, tiles, manifest, batch_bytes=1).tile_sinks([source]):
            terms, at = tile_sink.terms(), 0
            ends = spans_of(publisher.registration), spans_of(reader.registration)
            its = Landing(lambda: Emulator(library), *ends, tile_sink.batches, terms.scatter, is_hashing=True)
            under_way: list[range] = []
            while at < len(tile_sink.batches) or under_way:
                if at < len(tile_sink.batches) and len(under_way) < chance.choice((1, 2, 2)):
                    under_way.append(window := range(at, chance.randint(at + 1, its.reach(at))))
                    its.gather(window)
                    at = window.stop
                elif under_way:
                    window = under_way.pop(0)
                    first, last = (terms.scatter.first_tile[batch] for batch in (window.start, window.stop))
                    assert its.digests() == terms.digests[16 * first : 16 * last], (seed, window)
                    its.scatter()
            its.close()
            elsewhere = replace(ends[1], addresses=[address + 8 for address in ends[1].addresses])
            for target, is_known in ((replace(ends[1]), True), (elsewhere, False)):  # tables are made anew only then
                other = Landing(
                    lambda: Emulator(library), ends[0], target, tile_sink.batches, terms.scatter, is_hashing=True
                )
                assert (other._its is its._its) == is_known
                other.close()
        assert not reader.wrong(model)
        assert all((one == other).all() for one, other in zip(reader.outside(), outside, strict=True))
