"""What lies in many short runs is copied as one would index it, whichever way it is."""

import mmap
import random

import numpy as np
import pytest

from tensorhub.memory.streams import Freed, HostStream, Piece, StagedStream, StagingRing
from tensorhub.reshard import derive
from tensorhub.reshard.copies import COLUMNS, COUNT, COUNTS, RUN, SOURCE, SOURCE_STRIDE, SOURCE_STRIDES, Copies

from .test_staging import FakeDevice

SIZE = 40_000


def stream_of(kind: str) -> tuple[HostStream | StagedStream, bytes]:
    """In one piece of memory, in two that are apart, or behind a ring; and what is in it."""
    if kind == "device":
        device = FakeDevice([("cuda:0", SIZE)])
        return StagedStream(device.pieces, device, StagingRing(4096, 4)), device.image
    half, memory = SIZE // 2, np.random.default_rng(3).integers(0, 256, 2 * SIZE, np.uint8)
    content, address = memory.tobytes(), memory.ctypes.data
    if kind == "one":
        return HostStream([Piece(0, SIZE, address, "cpu", 1, (memory,))]), content[:SIZE]
    pieces = [Piece(0, half, address, "cpu", 1, (memory,)), Piece(half, SIZE, address + SIZE, "cpu", 2, (memory,))]
    return HostStream(pieces), content[:half] + content[SIZE : SIZE + half]


def drawn_row(chance: random.Random) -> list[int]:
    while True:
        run, count, counts = chance.choice([1, 2, 3, 4, 8, 16, 20]), chance.randint(1, 60), chance.randint(1, 60)
        stride, strides = run * chance.randint(1, 30), run * chance.randint(1, 30)
        reach = run + (count - 1) * stride + (counts - 1) * strides
        if reach <= SIZE:
            row = [0] * COLUMNS
            row[SOURCE], row[RUN] = chance.randrange(SIZE - reach + 1), run
            row[COUNT], row[SOURCE_STRIDE], row[COUNTS], row[SOURCE_STRIDES] = count, stride, counts, strides
            return row


def as_indexed(content: bytes, rows: list[list[int]]) -> bytes:
    found = bytearray()
    for row in rows:
        for i in range(row[COUNTS]):
            for j in range(row[COUNT]):
                at = row[SOURCE] + i * row[SOURCE_STRIDES] + j * row[SOURCE_STRIDE]
                found += content[at : at + row[RUN]]
    return bytes(found)


@pytest.mark.parametrize("kind", ["one", "two", "device"])
@pytest.mark.parametrize(("slab_bytes", "run_bytes"), [(1 << 25, 1024), (3000, 1024), (300, 1 << 20), (1 << 25, 0)])
def test_runs_come_in_order(kind: str, slab_bytes: int, run_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derive, "SLAB_BYTES", min(slab_bytes, 8000 if kind == "device" else slab_bytes))
    monkeypatch.setattr(derive, "RUN_BYTES", run_bytes)
    stream, content = stream_of(kind)
    for seed in range(20):
        chance = random.Random(seed)
        rows = [drawn_row(chance) for _ in range(chance.randint(1, 3))]
        expected = as_indexed(content, rows)
        room = np.zeros(len(expected) + 1, np.uint8)
        derive.copy_runs(stream, Copies(np.array(rows, np.int64), np.zeros(len(rows), np.int64)), room[:-1])
        assert room[:-1].tobytes() == expected, (seed, rows)
        assert room[-1] == 0


@pytest.mark.parametrize("run_bytes", [1024, 0])
def test_memory_that_is_gone_is_told(tmp_path, run_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derive, "RUN_BYTES", run_bytes)
    path = tmp_path / "pages"
    path.write_bytes(bytes(10 * mmap.PAGESIZE))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 10 * mmap.PAGESIZE) as pages:
        memory = np.frombuffer(pages, np.uint8)
        stream = HostStream([Piece(0, len(memory), memory.ctypes.data, "cpu", 1, (memory,))])
        file.truncate(5 * mmap.PAGESIZE)
        row = [0] * COLUMNS
        row[RUN], row[COUNT], row[SOURCE_STRIDE], row[COUNTS] = 4, 10, mmap.PAGESIZE, 1
        with pytest.raises(Freed):
            derive.copy_runs(stream, Copies(np.array([row]), np.zeros(1, np.int64)), np.zeros(40, np.uint8))
        del stream, memory
