"""Rows of memory on a device: read and written one block at a time, and nothing beside them."""

import threading
from array import array
from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from memory.test_staging import FakeDevice
from tensorhub.memory.streams import StagedStream, StagingRing
from tensorhub.transport.ranges import SPAN_BYTES, Batches, RowStream, gather, scatter

SIZES = [("cuda:0", 700), ("cpu", 90), ("cuda:1", 3), ("cuda:0", 4000)]
SIZE = sum(size for _, size in SIZES)
DEADLINE_S = 30.0


def rows_of(runs: int, run: int, stride: int) -> Batches:
    return Batches.of(array("Q", [5, run, runs, stride, 1, 0]), [1], SIZE, chunk_bytes=SIZE)


def staged(device: FakeDevice) -> StagedStream:
    return StagedStream(device.pieces, device, StagingRing(slot_bytes=256, slot_count=24))


def in_time(work: Callable[[], None]) -> None:
    """A thread that waits for room that it holds itself would wait for ever."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


@pytest.mark.parametrize(("runs", "run", "stride"), [(40, 9, 100), (1, 200, 200), (300, 1, 13), (8, 64, 64)])
def test_more_runs_than_there_is_room_are_read(runs: int, run: int, stride: int) -> None:
    device = FakeDevice(SIZES)
    image, found = device.image, []

    def read() -> None:
        rows = RowStream(staged(device), rows_of(runs, run, stride).rows)
        with rows.reading(0, runs * run) as views:
            found.append(b"".join(views))

    in_time(read)
    assert found == [b"".join(image[5 + each * stride : 5 + each * stride + run] for each in range(runs))]


@pytest.mark.parametrize(("runs", "run", "stride"), [(40, 9, 100), (1, 200, 200), (300, 1, 13), (8, 64, 64)])
def test_what_is_written_is_written_and_nothing_between_it(runs: int, run: int, stride: int) -> None:
    device = FakeDevice(SIZES)
    expected = bytearray(device.image)
    data = np.random.default_rng(4).integers(0, 256, runs * run, np.uint8).tobytes()

    def write() -> None:
        rows = RowStream(staged(device), rows_of(runs, run, stride).rows)
        with rows.writing(0, runs * run) as (view,):
            view[:] = data

    in_time(write)
    for each in range(runs):
        expected[5 + each * stride : 5 + each * stride + run] = data[each * run : (each + 1) * run]
    assert device.image == bytes(expected)


def test_what_fails_meanwhile_is_not_written() -> None:
    device = FakeDevice(SIZES)
    image = device.image
    writing = RowStream(staged(device), rows_of(4, 9, 100).rows).writing(0, 36)
    (view,) = writing.__enter__()
    view[:] = bytes(36)
    error = ValueError("no")
    assert not writing.__exit__(ValueError, error, None)
    assert device.image == image


def test_ranges_in_any_order_come_and_go_as_they_are() -> None:
    chance = Random(5)
    for _ in range(50):
        device = FakeDevice(SIZES)
        ranges = [(place, chance.randint(1, 50)) for place in chance.sample(range(SIZE - 50), 20)]
        image = device.image
        data = gather(staged(device), ranges)
        assert bytes(data) == b"".join(image[place : place + length] for place, length in ranges)
        other = FakeDevice(SIZES)
        scatter(staged(other), ranges, data)
        assert other.image == image, "the same content to begin with, and the same bytes written"


def test_far_parts_are_read_in_blocks_of_their_own() -> None:
    device = FakeDevice([("cuda:0", 3 * SPAN_BYTES)])
    stream = StagedStream(device.pieces, device, StagingRing())
    gather(stream, [(0, 10), (3 * SPAN_BYTES - 10, 10)])
    assert device.copied_bytes["to_host"] == 20
