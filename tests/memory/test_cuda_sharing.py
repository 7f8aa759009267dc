"""Rings of CUDA memory without a device: the driver's bindings are replaced."""

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from tensorhub.memory import cuda_sharing
from tensorhub.memory.streams import Piece
from tensorhub.memory.xxh3 import Spans
from tensorhub.protocol.errors import TransportMissing
from tensorhub.transport import threads


class Handle:
    """Of memory, as the driver's bindings have it."""

    def __init__(self) -> None:
        self.bytes = ctypes.create_string_buffer(b"h" * cuda_sharing.HANDLE_BYTES, cuda_sharing.HANDLE_BYTES)

    def getPtr(self) -> int:
        return ctypes.addressof(self.bytes)


class Bindings:
    """What would be cuda.bindings.driver: every call is noted, one may fail, and contexts are counted."""

    CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP = 1, 2
    CUipcMemHandle = Handle
    CUipcMem_flags = SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=SimpleNamespace(value=1))

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mode = 0  # of this thread, while graphs are captured; 0 is the strictest, which every thread begins with
        self.calls: list[str] = []
        self.failing = ""
        self.depth = 0
        self.free_bytes = 1 << 30
        self.ranges = [(0x2000, 4 << 20)]  # of memory that is there
        monkeypatch.setattr(threads, "mode_exchange", lambda: self.exchange)
        monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
        bindings = ModuleType("cuda.bindings")
        bindings.driver = self  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)

    def exchange(self, mode: Any) -> int:
        self.mode, mode._obj.value = mode._obj.value, self.mode
        return 0

    def __getattr__(self, name: str) -> Callable[..., tuple[object, ...]]:
        answers = {
            "cuDeviceGet": ("device",),
            "cuDevicePrimaryCtxRetain": ("context",),
            "cuMemGetInfo": (self.free_bytes, 1 << 37),
            "cuMemAlloc": (0x1000,),
            "cuIpcGetMemHandle": (Handle(),),
            "cuIpcOpenMemHandle": (0x2000,),
            "cuMemHostGetDevicePointer": (0x3000,),
        }

        def call(*arguments: object) -> tuple[object, ...]:
            assert self.mode == threads.RELAXED
            if name != self.failing:
                self.depth += {"cuDevicePrimaryCtxRetain": 1, "cuCtxPushCurrent": 1}.get(name, 0)
                self.depth -= {"cuDevicePrimaryCtxRelease": 1, "cuCtxPopCurrent": 1}.get(name, 0)
            if "Ctx" not in name and "Device" not in name.removesuffix("DevicePointer"):
                assert self.depth >= 2, f"{name} without the device's context"
                self.calls.append(name + "".join(f" {each:#x}" for each in arguments if isinstance(each, int)))
            if name == "cuMemGetAddressRange":
                (address,) = arguments
                assert isinstance(address, int)
                return next(((0, base, size) for base, size in self.ranges if base <= address < base + size), (1, 0, 0))
            return (2 if name == self.failing else 0, *answers.get(name, ()))

        return call


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bindings]:
    found = Bindings(monkeypatch)
    yield found
    assert found.depth == 0, "every context is given back"
    assert found.mode == 0


def test_a_ring_on_a_device_is_made_opened_and_given_back(bindings: Bindings) -> None:
    ring = cuda_sharing.make_ring(0, (2 << 20) + 1)
    assert ring.handle == b"h" * 64
    assert ring.part(100, 7000, 7500).spans == Spans([7000], [0x1000 + 100], 7500)
    opened = cuda_sharing.open_ring(0, ring.handle, 4 << 20)
    for each in (opened, opened, ring):
        each.close()
    assert bindings.calls == [
        *("cuMemGetInfo", "cuMemAlloc 0x400000", "cuIpcGetMemHandle 0x1000"),  # a multiple of a device's pages
        *("cuIpcOpenMemHandle 0x1", "cuMemGetAddressRange 0x2000"),
        *("cuIpcCloseMemHandle 0x2000", "cuMemFree 0x1000"),
    ]


def test_a_ring_of_host_memory_is_registered_and_given_back(bindings: Bindings) -> None:
    ring = cuda_sharing.pin_ring(0, 0x7000, 8192)
    assert ring.part(4096, 0, 10).spans == Spans([0], [0x3000 + 4096], 10)
    ring.close()
    calls = [
        "cuMemHostRegister 0x7000 0x2000 0x3",
        "cuMemHostGetDevicePointer 0x7000 0x0",
        "cuMemHostUnregister 0x7000",
    ]
    assert bindings.calls == calls


@pytest.mark.parametrize(
    ("failing", "undone"),
    [
        ("cuMemAlloc", ""),
        ("cuIpcGetMemHandle", "cuMemFree 0x1000"),
        ("cuCtxPushCurrent", ""),
        ("cuDevicePrimaryCtxRetain", ""),
    ],
)
def test_a_ring_that_cannot_be_made_leaves_nothing(bindings: Bindings, failing: str, undone: str) -> None:
    bindings.failing = failing
    with pytest.raises(TransportMissing, match="the CUDA driver says 2"):
        cuda_sharing.make_ring(0, 4096)
    assert not undone or bindings.calls[-1] == undone


def test_a_ring_leaves_most_of_what_is_free_to_others(bindings: Bindings) -> None:
    bindings.free_bytes = (8 << 20) - 1
    with pytest.raises(TransportMissing, match="too little for a ring"):
        cuda_sharing.make_ring(0, 1)
    assert bindings.calls == ["cuMemGetInfo"]


@pytest.mark.parametrize(("body", "size_bytes"), [(b"h" * 63, 1), (b"h" * 64, (4 << 20) + 1)])
def test_a_ring_that_is_not_what_was_said_is_refused(bindings: Bindings, body: bytes, size_bytes: int) -> None:
    with pytest.raises((ValueError, TransportMissing)):
        cuda_sharing.open_ring(0, body, size_bytes)
    assert not bindings.calls or bindings.calls[-1] == "cuIpcCloseMemHandle 0x2000"


class Shared:
    """Torch's sharing of storages, as far as this library uses it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, base: int = 0x2000, cannot: int = -1) -> None:
        self.shared: list[int] = []
        self.released: list[tuple[bytes, int]] = []
        self.opened = 0
        its = self

        class Storage:
            def __init__(self, address: int) -> None:
                self.address = address

            def data_ptr(self) -> int:
                return self.address

            def _share_cuda_(self) -> tuple[object, ...]:
                if self.address == cannot:
                    raise RuntimeError("cudaMallocAsync")
                its.shared.append(self.address)
                return (0, b"h", 100, 0, b"counter", len(its.shared), b"e", True)

        class Opened(Storage):
            def __del__(self) -> None:
                its.opened -= 1

        def opened(index: int, handle: bytes, size_bytes: int, offset_bytes: int, *_: object) -> object:
            its.opened += 1
            return Opened(base + offset_bytes)

        self.storage = Storage
        monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", opened)
        monkeypatch.setattr(
            torch.UntypedStorage, "_release_ipc_counter_cuda", lambda *counter: self.released.append(counter)
        )
        monkeypatch.setattr(cuda_sharing, "_beside_all", lambda index: nullcontext())
        monkeypatch.setattr(cuda_sharing, "_uuid", lambda device: "one")


def tensor(storage: Any) -> Any:
    return SimpleNamespace(device=SimpleNamespace(index=0), untyped_storage=lambda: storage)


def test_storages_are_shared_once_and_kept_until_no_reader_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    torchs = Shared(monkeypatch)
    pieces = [Piece(0, 10, 64, "cuda:0", 64, ()), Piece(10, 20, 128, "cuda:0", 128, ())]
    shared = cuda_sharing.share(pieces, [tensor(torchs.storage(64)), tensor(torchs.storage(128))])
    readers = [shared, shared]
    del shared
    assert torchs.shared == [64, 128]
    while readers:
        assert torchs.released == []
        readers.pop()
    assert torchs.released == [(b"counter", 1), (b"counter", 2)]


def test_what_was_shared_is_given_up_where_a_later_storage_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    torchs = Shared(monkeypatch, cannot=128)
    pieces = [Piece(0, 10, 64, "cuda:0", 64, ()), Piece(10, 20, 128, "cuda:0", 128, ())]
    with pytest.raises(TransportMissing, match="cudaMallocAsync"):
        cuda_sharing.share(pieces, [tensor(torchs.storage(64)), tensor(torchs.storage(128))])
    gc.collect()
    assert torchs.released == [(b"counter", 1)]


@pytest.mark.parametrize(
    ("size_bytes", "offset_bytes", "is_there"),
    [
        (4 << 20, 0, True),
        (1 << 20, 3 << 20, True),
        (5 << 20, 2 << 20, True),  # segments that follow each other
        ((8 << 20) + 1, 0, False),
        (1, 8 << 20, False),
        (1 << 20, 7 << 20, True),
        (1 << 40, 0, False),
        (1, 1 << 62, False),
    ],
)
def test_memory_outside_of_what_was_opened_is_refused(
    bindings: Bindings, monkeypatch: pytest.MonkeyPatch, size_bytes: int, offset_bytes: int, is_there: bool
) -> None:
    torchs = Shared(monkeypatch)
    bindings.ranges = [(0x2000, 4 << 20), (0x2000 + (4 << 20), 4 << 20)]
    storage = cuda_sharing._Storage(b"h", size_bytes, offset_bytes, b"c", 0, b"e", True)
    body = msgspec.msgpack.encode(cuda_sharing._Handles(1, "one", [storage], [(size_bytes, 0, 0)]))
    if not is_there:
        with pytest.raises(TransportMissing, match="outside of what it has shared"):
            cuda_sharing.OpenedCuda(body, 0)
        gc.collect()
        bindings.ranges = []  # a driver that does not tell of it at all
    assert cuda_sharing.OpenedCuda(body, 0).spans.addresses == [0x2000 + offset_bytes]
    assert torchs.opened == 0
