"""Device memory through the staging ring, with a copier that stands for the device and remembers what it did."""

import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest

from tensorhub.memory.streams import Copy, Piece, StagedStream, StagingRing
from tensorhub.protocol.errors import CorruptTransfer, DeadlineExceeded, UsageError


class FakeDevice:
    """Pieces of "device" memory that only `to_host` and `to_device` touch."""

    def __init__(self, sizes: Sequence[tuple[str, int]]) -> None:
        rng = np.random.default_rng(3)
        self.memory = [rng.integers(0, 256, size, np.uint8) for _, size in sizes]
        self.pieces: list[Piece] = []
        at = 0
        for (device, size), memory in zip(sizes, self.memory, strict=True):
            self.pieces.append(Piece(at, at + size, memory.ctypes.data, device, id(memory), (memory,)))
            at += size
        self.staged: np.ndarray | None = None
        self.copied_bytes = {"to_host": 0, "to_device": 0}

    @property
    def image(self) -> bytes:
        return b"".join(memory.tobytes() for memory in self.memory)

    def staging(self, size_bytes: int) -> memoryview:
        assert self.staged is None, "staging memory is asked for once"
        self.staged = np.zeros(size_bytes, np.uint8)
        return memoryview(self.staged)

    def to_host(self, copies: Sequence[Copy]) -> None:
        for one in copies:
            self.copied_bytes["to_host"] += one.size_bytes
            self.host(one)[:] = self.device(one)

    def to_device(self, copies: Sequence[Copy]) -> None:
        for one in copies:
            self.copied_bytes["to_device"] += one.size_bytes
            self.device(one)[:] = self.host(one)

    def host(self, one: Copy) -> np.ndarray:
        assert self.staged is not None
        return self.staged[one.at : one.at + one.size_bytes]

    def device(self, one: Copy) -> np.ndarray:
        assert self.pieces[one.piece].device != "cpu", "a host piece is handed out, never copied"
        return self.memory[one.piece][one.inside : one.inside + one.size_bytes]


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
        with stream.reading(start, stop) as views:
            assert b"".join(views) == before[start:stop]
        new = bytes(value ^ 0x5A for value in before[start:stop])
        with stream.writing(start, stop) as views:
            at = 0
            for view in views:
                view[:] = new[at : at + view.nbytes]
                at += view.nbytes
        assert device.image == before[:start] + new + before[stop:]
        assert stream.ring.free_count == stream.ring.slot_count
    with pytest.raises(UsageError, match="are not in a stream"), stream.reading(0, stream.size_bytes + 1):
        pass


def test_neighbours_in_staging_memory_are_one_view() -> None:
    device = FakeDevice(SIZES["many small"])
    stream = StagedStream(device.pieces, device, StagingRing(64, 8))
    with stream.reading(0, 500) as views:
        assert len(views) == 1


def test_host_pieces_take_no_slot_and_are_not_copied() -> None:
    device = FakeDevice(SIZES["mixed"])
    stream = StagedStream(device.pieces, device, StagingRing(1000, 1))
    with stream.writing(100, 150) as views, stream.reading(0, 160):
        views[0][:] = bytes(50)
    assert device.memory[1].tobytes() == bytes(50)
    assert device.copied_bytes == {"to_host": 110, "to_device": 0}


def test_a_block_that_raises_leaves_the_device_as_it_was() -> None:
    device = FakeDevice([("cuda:0", 100)])
    stream = StagedStream(device.pieces, device, StagingRing(100, 1))
    before = device.image

    def receive() -> None:
        with stream.writing(0, 100) as views:
            views[0][:] = bytes(100)
            raise CorruptTransfer("chunk 0 is not as announced")

    with pytest.raises(CorruptTransfer):
        receive()
    assert device.image == before
    assert stream.ring.free_count == 1


def test_staging_memory_is_not_taken_before_the_first_block() -> None:
    device = FakeDevice([("cuda:0", 100)])
    stream = StagedStream(device.pieces, device)
    assert device.staged is None
    with stream.reading(0, 0):
        assert device.staged is None
    with stream.reading(0, 1):
        assert device.staged is not None
    assert stream.ring.size_bytes == device.staged.nbytes == 64 << 20


def test_a_block_larger_than_the_ring_is_refused_at_once() -> None:
    device = FakeDevice([("cuda:0", 1000)])
    stream = StagedStream(device.pieces, device, StagingRing(100, 4, wait_s=60))
    with pytest.raises(UsageError, match="401 B does not fit the staging ring of 400 B"), stream.reading(0, 401):
        pass


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


def test_many_threads_share_a_small_ring() -> None:
    device = FakeDevice([("cuda:0", 5000), ("cpu", 700), ("cuda:0", 4300)])
    stream = StagedStream(device.pieces, device, StagingRing(100, 3, wait_s=30))
    expected = bytes(255 - value for value in device.image)
    errors: list[BaseException] = []

    def invert(which: int) -> None:
        try:
            for start in range(which * 250, 10_000, 1000):
                with stream.reading(start, start + 250) as views:
                    new = bytes(255 - value for value in b"".join(views))
                with stream.writing(start, start + 250) as views:
                    at = 0
                    for view in views:
                        view[:] = new[at : at + view.nbytes]
                        at += view.nbytes
        except BaseException as error:  # noqa: BLE001 - shown by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=invert, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors == []
    assert device.image == expected
    assert stream.ring.free_count == 3
