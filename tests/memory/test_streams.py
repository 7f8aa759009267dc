"""Byte streams over host memory and staged device memory, and copies of memory that may be freed."""

import ctypes
import fcntl
import mmap
import os
import threading
import time
from array import array
from collections.abc import Callable

import numpy as np
import pytest

from tensorhub.memory import streams
from tensorhub.memory.streams import StagedStream, StagingRing
from tensorhub.protocol.errors import CorruptTransfer, DeadlineExceeded, UsageError
from tensorhub.transport.ranges import Addresses, Batches, RowStream

from .kit import FakeDevice
from .kit import scatter as put

# --- Device memory through the staging ring, with a copier that stands for the device and remembers what it did.


SIZES = {
    "one piece": [("cuda:0", 1000)],
    "many small": [("cuda:0", 1 + index % 7) for index in range(250)],
    "mixed": [("cuda:0", 100), ("cpu", 50), ("cuda:0", 3), ("cuda:1", 200), ("cpu", 1), ("cpu", 90), ("cuda:0", 500)],
}
RANGES = [(0, 900), (0, 1), (99, 101), (100, 150), (0, 0), (64, 128), (63, 129), (140, 260), (5, 700)]


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("slot_bytes", [1000, 64, 7])
def test_blocks_read_and_write_any_range(sizes: list[tuple[str, int]], slot_bytes: int) -> None:
    device = FakeDevice(sizes)
    stream = StagedStream(device.pieces, device, StagingRing(slot_bytes, -(-1024 // slot_bytes)))
    for start, stop in RANGES:
        before = device.image
        with stream.views_to_read(start, stop) as views:
            assert b"".join(views) == before[start:stop]
        new = bytes(value ^ 0x5A for value in before[start:stop])
        with stream.views_to_write(start, stop) as views:
            put(new, views)
        assert device.image == before[:start] + new + before[stop:]
        assert stream.ring.free_count == stream.ring.slot_count
    with pytest.raises(UsageError, match="are not in a stream"), stream.views_to_read(0, stream.size_bytes + 1):
        pass


def test_a_block_that_raises_leaves_the_device_as_it_was() -> None:
    device = FakeDevice([("cuda:0", 100)])
    stream = StagedStream(device.pieces, device, StagingRing(100, 1))
    before = device.image

    def receive() -> None:
        with stream.views_to_write(0, 100) as views:
            views[0][:] = bytes(100)
            raise CorruptTransfer("chunk 0 is not as announced")

    with pytest.raises(CorruptTransfer):
        receive()
    assert device.image == before
    assert stream.ring.free_count == 1


def test_waiting_for_a_slot_is_bounded() -> None:
    ring = StagingRing(100, 2, wait_s=0.05)
    with (
        ring.slots(150),
        pytest.raises(DeadlineExceeded, match=r"no 1 of 2 staging slots came free in 0.05 s"),
        ring.slots(1),
    ):
        pass
    assert ring.free_count == 2
    with ring.slots(200) as slots:
        assert slots == [0, 1]


def test_slots_are_lent_in_order_of_arrival() -> None:
    """A block that needs many slots is not overtaken for ever by blocks that need one."""
    ring = StagingRing(1, 2, wait_s=20)
    order: list[str] = []

    def take(name: str, count: int) -> threading.Thread:
        def run() -> None:
            with ring.slots(count):
                order.append(name)

        waiting = len(ring._queue)
        thread = threading.Thread(target=run)
        thread.start()
        deadline = time.monotonic() + 10
        while len(ring._queue) == waiting and time.monotonic() < deadline:
            time.sleep(0.001)
        return thread

    with ring.slots(1):
        threads = [take("both", 2), take("one", 1)]
        assert order == []
    for thread in threads:
        thread.join(10)
    assert order == ["both", "one"]


# --- Memory of our own that the kernel copies for us: whole where it is there, an error where it is not.


PAGE = mmap.PAGESIZE


@pytest.fixture(params=["kernel", "pipe"])
def way(request, monkeypatch):
    """Both ways: as usual, and where a filter forbids that."""
    monkeypatch.setattr(streams, "_is_refused", request.param == "pipe")


def scattered(memory: bytearray, sizes: list[int]) -> Addresses:
    """Of pieces of these sizes, with a byte between each and the next."""
    views, at = [], 0
    for size in sizes:
        views.append(memoryview(memory)[at : at + size])
        at += size + 1
    return Addresses.of_views(views, 0)


def joined(memory: bytearray, sizes: list[int]) -> bytes:
    found, at = b"", 0
    for size in sizes:
        found += memory[at : at + size]
        at += size + 1
    return found


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("sizes", [[300_000], [1, 7, 100_000, 3, 199_989], [100] * 3000])
def test_bytes_go_where_they_belong_however_both_sides_are_cut(sizes: list[int]) -> None:
    source = bytearray(index * 7 % 251 for index in range(310_000))
    other = [123_456, 1, 176_543]
    target = bytearray(310_000)
    streams.copy(scattered(source, sizes), scattered(target, other), 5, 299_990)
    assert joined(target, other)[5:299_990] == joined(source, sizes)[5:299_990]
    assert joined(target, other)[:5] == bytes(5)
    assert not any(target[at] for at in (123_456, 123_458))  # between the pieces


@pytest.mark.usefixtures("way")
def test_what_is_not_there_is_told_with_its_place(tmp_path) -> None:
    path = tmp_path / "pages"
    path.write_bytes(bytes(8 * PAGE))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 8 * PAGE) as pages:
        view, room = memoryview(pages), bytearray(8 * PAGE)
        lost, kept = Addresses.of_views([view], 0), Addresses.of_views([memoryview(room)], 0)
        streams.copy(lost, kept, 0, 8 * PAGE)
        file.truncate(5 * PAGE)
        for source, target in ((lost, kept), (kept, lost)):
            streams.copy(source, target, 0, 5 * PAGE)
            with pytest.raises(streams.Freed) as caught:
                streams.copy(source, target, PAGE, 8 * PAGE)
            assert caught.value.at == 5 * PAGE
        view.release()


@pytest.mark.usefixtures("way")
def test_a_user_with_many_pipes_gets_small_ones(monkeypatch) -> None:
    """From `pipe-user-pages-soft` on: a copy waited for ever for somebody else to empty its own pipe."""
    pipe = os.pipe

    def small() -> tuple[int, int]:
        out, into = pipe()
        fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, PAGE)
        return out, into

    monkeypatch.setattr(os, "pipe", small)
    source, target = bytearray(os.urandom(20 * PAGE + 1)), bytearray(20 * PAGE + 1)
    addresses = [Addresses.of_views([memoryview(each)], 0) for each in (source, target)]
    copying = threading.Thread(target=streams.copy, args=(*addresses, 0, len(source)), daemon=True)
    copying.start()
    copying.join(20)
    assert not copying.is_alive()
    assert source == target


@pytest.mark.usefixtures("way")
def test_bytes_that_may_not_be_written_are_found_and_the_others_stay_as_they_are() -> None:
    fixed = mmap.mmap(-1, 4096)
    free = bytearray(range(1, 256))
    here = ctypes.addressof(ctypes.c_char.from_buffer(free))
    there = ctypes.addressof(ctypes.c_char.from_buffer(fixed))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(there), 4096, mmap.PROT_READ) == 0
    addresses = [here + at for at in range(110)] * 10
    for place in (0, 1, 1023, 1024):
        addresses[place] = there
    assert streams.unwritable(addresses) == [0, 1, 1023, 1024]
    assert streams.unwritable([]) == []
    assert free == bytearray(range(1, 256))


# --- Rows of memory on a device: read and written one block at a time, and nothing beside them.


ROW_SIZES = [("cuda:0", 700), ("cpu", 90), ("cuda:1", 3), ("cuda:0", 4000)]
SIZE = sum(size for _, size in ROW_SIZES)
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
def test_runs_are_read_and_written_and_nothing_between_them(runs: int, run: int, stride: int) -> None:
    """More of them than there is room for at once."""
    device = FakeDevice(ROW_SIZES)
    image, found = bytearray(device.image), []
    data = np.random.default_rng(4).integers(0, 256, runs * run, np.uint8).tobytes()

    def both() -> None:
        rows = RowStream(staged(device), rows_of(runs, run, stride).rows)
        with rows.views_to_read(0, runs * run) as views:
            found.append(b"".join(views))
        with rows.views_to_write(0, runs * run) as (view,):
            view[:] = data

    in_time(both)
    assert found == [b"".join(image[5 + each * stride : 5 + each * stride + run] for each in range(runs))]
    for each in range(runs):
        image[5 + each * stride : 5 + each * stride + run] = data[each * run : (each + 1) * run]
    assert device.image == bytes(image)
