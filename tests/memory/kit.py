"""What several tests of tensors need: bytes of a stream, and a stand-in for device memory."""

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from tensorhub.memory.registration import Registration
from tensorhub.memory.streams import Copy, Piece
from tensorhub.transport.base import ByteStream


def image_of(registration: Registration) -> bytes:
    """All bytes of a registration's stream."""
    with registration.stream.views_to_read(0, registration.size_bytes) as views:
        return b"".join(views)


def scatter(data: bytes | bytearray, views: Sequence[memoryview]) -> None:
    """Data into views, one after another."""
    at = 0
    for view in views:
        view[:] = data[at : at + view.nbytes]
        at += view.nbytes
    assert at == len(data)


def put_into(stream: ByteStream, start: int, data: bytes) -> None:
    with stream.views_to_write(start, start + len(data)) as views:
        scatter(data, views)


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


Views = list[tuple[int, int, int, bool]]  # storage, start, stop in elements, transposed


@st.composite
def views_of_storages(draw: st.DrawFn) -> tuple[list[int], Views]:
    """Sizes of storages, and views of them: tied, overlapping, transposed and empty ones."""
    sizes = draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))
    views: Views = []
    for _ in range(draw(st.integers(1, 12))):
        storage = draw(st.integers(0, len(sizes) - 1))
        start = draw(st.integers(0, sizes[storage]))
        views.append((storage, start, draw(st.integers(start, sizes[storage])), draw(st.booleans())))
    return sizes, views
