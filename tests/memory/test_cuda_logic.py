"""CUDA memory without a device: torch and the driver are replaced, the bytes move on the host."""

import ctypes
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xxhash

from tensorhub.memory import cast, cuda, cuda_device, cuda_sharing, xxh3
from tensorhub.memory.host_copies import CudaRegistrar
from tensorhub.memory.registration import register
from tensorhub.memory.streams import Freed, Piece, StagingRing
from tensorhub.memory.xxh3 import Chunks, Spans
from tensorhub.protocol.errors import TransferError, TransportMissing, UsageError
from tensorhub.transport import threads


class Device:
    """What would be torch.cuda: remembers which streams were used and which events were waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lock = threading.Lock()
        self.streams: list[str] = []
        self.recorded: list[object] = []
        self.waited_for: list[object] = []
        self.capturing: set[str] = set()  # streams
        self.here = threading.local()  # the current stream of each thread
        self.full = False  # no memory is left
        device = self

        class Event:
            def __init__(self, *, blocking: bool) -> None:
                assert blocking

            def record(self, stream: object) -> None:
                assert stream not in device.capturing, "a graph would have it"
                self.stream = stream
                device.recorded.append(stream)

            def query(self) -> bool:
                return self.stream in device.waited_for

            def synchronize(self) -> None:
                with device.lock:
                    device.waited_for.append(self.stream)

        def stream(device: torch.device) -> str:
            self.streams.append(f"{device}/{len(self.streams)}")
            return self.streams[-1]

        empty = torch.empty

        def empty_here(*args: object, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            is_on_device = torch.device(options.pop("device", "cpu")).type == "cuda"
            assert is_on_device != pin_memory
            if is_on_device and self.full:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return empty(*args, **options)  # type: ignore[no-any-return]

        monkeypatch.setattr(torch.cuda, "Stream", stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "default_stream", lambda device: f"{device}/default")
        monkeypatch.setattr(torch.cuda, "current_stream", self.current)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.here.stream in self.capturing)
        monkeypatch.setattr(torch, "empty", empty_here)
        monkeypatch.setattr(cuda, "_as_bytes", lambda piece: piece.owners[0])
        monkeypatch.setattr(cuda, "_launched", {})
        monkeypatch.setattr(cuda_device, "_streams", {})

    @property
    def waited(self) -> int:
        return len(self.waited_for)

    def current(self, device: torch.device) -> str:
        return getattr(self.here, "stream", None) or f"{device}/default"

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before, self.here.stream = getattr(self.here, "stream", None), stream
        try:
            yield
        finally:
            self.here.stream = before


def pieces_on(*devices: str) -> tuple[list[torch.Tensor], list[Piece]]:
    memory = [torch.arange(100, dtype=torch.uint8) + index for index in range(len(devices))]
    return memory, [
        Piece(100 * index, 100 * index + 100, tensor.data_ptr(), device, 0, (tensor,))
        for index, (device, tensor) in enumerate(zip(devices, memory, strict=True))
    ]


def test_bytes_cross_on_one_stream_for_each_device_and_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    memory, pieces = pieces_on("cuda:0", "cpu", "cuda:1", "cuda:0")
    stream = cuda.CudaStream(pieces, StagingRing(64, 8))
    assert len(device.streams) == 4
    with stream.views_to_read(50, 350) as views:
        assert b"".join(views) == b"".join(bytes(tensor.numpy()) for tensor in memory)[50:350]
    assert sorted(device.recorded) == ["cuda:0/0", "cuda:1/2"]
    assert device.waited == 2
    with stream.views_to_write(50, 350) as views:
        for view in views:
            view[:] = bytes(view.nbytes)
    assert sorted(device.recorded[2:]) == ["cuda:0/1", "cuda:1/3"]
    whole = torch.cat(memory)
    assert not whole[50:350].any()
    assert whole[:50].tolist() == list(range(50))
    assert whole[350:].tolist() == list(range(53, 103))


def test_host_memory_is_copied_to_and_from_without_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    memory, pieces = pieces_on("cuda:0", "cpu", "cuda:1", "cuda:0")
    stream = cuda.CudaStream(pieces, StagingRing(64, 1))
    before = bytes(torch.cat(memory).tolist())
    host = torch.zeros(300, dtype=torch.uint8)
    stream.copy_to_host(50, 350, host.data_ptr())
    assert bytes(host.numpy()) == before[50:350]
    assert sorted(device.recorded) == ["cuda:0/0", "cuda:1/2"]
    assert device.waited == 2
    host.zero_()
    stream.copy_to_device(50, 350, host.data_ptr())
    assert sorted(device.recorded[2:]) == ["cuda:0/1", "cuda:1/3"]
    assert bytes(torch.cat(memory).tolist()) == before[:50] + bytes(300) + before[350:]
    memory[2].untyped_storage().resize_(0)
    host = torch.zeros(400, dtype=torch.uint8)
    with pytest.raises(Freed, match="byte 200"):
        stream.copy_to_host(0, 400, host.data_ptr())
    assert stream.registrar()._device == "cuda:0"


def test_copy_engines_fill_and_read_a_pinned_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    memory, pieces = pieces_on("cuda:0", "cuda:0")
    stream = cuda.CudaStream(pieces, StagingRing(200, 1))
    before = bytes(torch.cat(memory).tolist())
    hashed: list[tuple[Chunks, Spans | None, bool]] = []

    def made(
        index: int, source: Spans, chunks: Chunks, target: Spans | None, *, check: object, is_hashing: bool
    ) -> bytes:
        hashed.append((chunks, target, is_hashing))
        return b"d" * 16

    monkeypatch.setattr(cuda_device, "device_digests", made)
    host = torch.zeros(180, dtype=torch.uint8)
    slot = cuda_sharing.CudaRing(0, 0, b"", lambda driver: (0,), host.data_ptr()).part(30, 50, 200)
    stream.copy_to(slot, 50, 200, 150)
    assert bytes(host.numpy()) == bytes(30) + before[50:200]
    host.zero_()
    assert stream.copy_from(slot, 50, 200, 150, digests=False) == b""
    assert not hashed
    stream.copy_from(slot, 50, 200, 150, digests=True)
    assert hashed == [(Chunks(50, 200, 150), None, True)]
    assert bytes(torch.cat(memory).tolist()) == before[:50] + bytes(150)
    assert sorted(device.recorded)[:1] == ["cuda:0/0"]


def test_a_failed_copy_is_a_transfer_error_and_waits_for_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    _, pieces = pieces_on("cuda:0", "cuda:0")
    stream = cuda.CudaStream(pieces, StagingRing(200, 1))

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with stream.views_to_read(0, 1):
        pass
    monkeypatch.setattr(torch.Tensor, "copy_", fail)
    with pytest.raises(TransferError, match="between host and cuda:0 failed: CUDA error"), stream.views_to_read(0, 200):
        pass
    assert device.waited == 2
    assert stream.ring.free_count == 1


def test_a_piece_is_bytes_over_the_storage_that_contains_it() -> None:
    memory = torch.arange(100, dtype=torch.uint8)
    start = memory.untyped_storage().data_ptr()
    piece = Piece(0, 20, memory.data_ptr() + 30, "cpu", start, (torch.ones(1), memory))
    assert torch.equal(cuda._as_bytes(piece), memory[30:50])
    with pytest.raises(UsageError, match="belong to different storages"):
        cuda._as_bytes(Piece(0, 20, memory.data_ptr() + 90, "cpu", start, (memory,)))


def test_storage_that_was_freed_is_not_copied_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that was told to would fail in all that it does afterwards."""
    device = Device(monkeypatch)
    memory, pieces = pieces_on("cuda:0", "cuda:0")
    stream = cuda.CudaStream(pieces, StagingRing(200, 1))
    memory[1].untyped_storage().resize_(0)
    with stream.views_to_read(0, 100) as views:
        assert bytes(views[0]) == bytes(memory[0].numpy())
    copies = device.waited
    with pytest.raises(Freed, match="byte 100"), stream.views_to_read(50, 150):
        pass
    assert device.waited == copies + 1  # the piece before it was on its way
    assert stream.ring.free_count == 1


class Driver:
    """NVIDIA's, as far as captures of graphs go: whether a thread may copy while another one captures."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mode = 0  # of this thread; 0 is the strictest, which every thread begins with
        monkeypatch.setattr(threads, "mode_exchange", lambda: self.exchange)

    def exchange(self, mode: Any) -> int:
        self.mode, mode._obj.value = mode._obj.value, self.mode
        return 0


def test_all_that_the_device_does_is_allowed_beside_a_capture_and_nothing_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, driver = Device(monkeypatch), Driver(monkeypatch)
    modes: dict[str, int] = {}

    def noting(what: str, call: Callable[..., object]) -> Callable[..., object]:
        def noted(*args: object, **options: object) -> object:
            modes[what] = driver.mode
            return call(*args, **options)

        return noted

    monkeypatch.setattr(torch, "empty", noting("pinned memory", torch.empty))
    monkeypatch.setattr(torch.cuda, "Stream", noting("a stream", torch.cuda.Stream))
    monkeypatch.setattr(torch.cuda.Event, "synchronize", noting("a wait", torch.cuda.Event.synchronize))
    _, pieces = pieces_on("cuda:0")
    stream = cuda.CudaStream(pieces, StagingRing(200, 1))
    with stream.views_to_read(0, 100):
        assert driver.mode == 0, "what is done with the bytes is the caller's"
    assert modes == dict.fromkeys(("pinned memory", "a stream", "a wait"), threads.RELAXED)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError), stream.views_to_write(0, 100):
        pass
    assert device.waited == 2
    assert driver.mode == 0


def called_from(device: Device, stream: str | None) -> None:
    """A user's thread calls with this as its current stream, and another thread of ours waits for it."""
    if stream is None:
        cuda.note_call(["cpu", "cuda:0"])
    else:
        with device.on(stream):
            cuda.note_call(["cpu", "cuda:0"])
    failed: list[UsageError] = []

    def settle() -> None:
        try:
            cuda.synchronize("cuda:0")
        except UsageError as error:
            failed.append(error)

    ours = threading.Thread(target=settle)
    ours.start()
    ours.join(20)
    for error in failed:
        raise error


def test_a_call_waits_for_its_callers_stream_and_the_default_one_and_for_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(monkeypatch)
    called_from(device, None)
    assert device.waited_for == ["cuda:0/default"]
    called_from(device, "mine")
    assert sorted(device.waited_for[1:]) == ["cuda:0/default", "mine"]
    for _ in range(100):
        called_from(device, "mine")
    assert len(cuda._launched[torch.device("cuda:0")]) == 1, "what is done is forgotten"
    cuda.synchronize("cuda:1")
    assert device.waited_for[-1] == "cuda:1/default"


def test_a_capture_on_the_callers_stream_is_named_and_another_is_none_of_its_business(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(monkeypatch)
    device.capturing = {"mine"}
    called_from(device, None)
    with pytest.raises(UsageError, match="a CUDA graph is being captured on a stream of cuda:0") as raised:
        called_from(device, "mine")
    assert "before the capture or after it" in (raised.value.hint or "")
    with device.on("mine"), pytest.raises(UsageError, match="a CUDA graph is being captured"):
        cuda.synchronize("cuda:0")
    assert "mine" not in device.recorded
    device.capturing.clear()
    called_from(device, "mine")
    assert "mine" in device.waited_for


def test_memory_that_an_engine_has_unmapped_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch)
    registration = register({"a": np.zeros(10, np.uint8), "b": np.zeros(10, np.uint8), "c": np.zeros(10, np.uint8)})
    places = {"a": (1 << 30) + 5, "b": (1 << 31) + 5, "c": (1 << 31) + 20}
    pieces = [
        Piece(10 * at, 10 * at + 10, address, "cuda:0", address, ()) for at, address in enumerate(places.values())
    ]
    gone: set[int] = set()
    monkeypatch.setattr(cuda, "_pointer_question", lambda: None)
    cuda._can_tell.cache_clear()
    assert cuda.unmapped(pieces) == [], "no driver says so"
    asked: list[int] = []

    def is_mapped(answer: Any, attribute: int, address: Any) -> int:
        asked.append(address.value)
        assert attribute == cuda.MAPPED
        answer._obj.value = address.value >> 21 not in {it >> 21 for it in gone}
        return 0

    monkeypatch.setattr(cuda, "_pointer_question", lambda: is_mapped)
    cuda._can_tell.cache_clear()
    on_device = replace(registration, pieces=tuple(pieces), devices=("cuda:0",))
    on_device.settle()
    assert asked[1:] == [places["a"], places["b"]], (
        "one question for 2 MiB, after one that shows what answers are worth"
    )
    gone.add(places["c"])
    with pytest.raises(UsageError, match="on cuda:0 is unmapped: 'b', 'c'"):
        on_device.settle()
    cuda._can_tell.cache_clear()


def test_many_small_pieces_cross_the_bus_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    memory, pieces = pieces_on(*["cuda:0"] * 40)
    stream = cuda.CudaStream(pieces, StagingRing(1000, 4))
    copies: list[int] = []
    copy = torch.Tensor.copy_

    def noted(tensor: torch.Tensor, source: torch.Tensor, **options: bool) -> torch.Tensor:
        copies.append(tensor.numel())
        return copy(tensor, source, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    right = b"".join(bytes(tensor.numpy()) for tensor in memory)
    for device.full in (False, True):  # then there is no room to gather them
        with stream.ring.slots(1000), stream.views_to_read(30, 2970) as views:
            assert b"".join(views) == right[30:2970]
        with stream.views_to_write(30, 2970) as views:
            for view in views:
                view[:] = bytes(view.nbytes)
        assert not torch.cat(memory)[30:2970].any()
        assert bytes(memory[0][:30].numpy()) + bytes(memory[29][70:].numpy()) == right[:30] + right[2970:3000]
        assert (copies == [2940, 2940]) != device.full
        for at, tensor in enumerate(memory):
            tensor[:] = torch.frombuffer(bytearray(right[100 * at : 100 * at + 100]), dtype=torch.uint8)
        copies.clear()


def test_host_memory_is_registered_on_the_device_beside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, called = Driver(monkeypatch), list[object]()

    class Runtime:
        """As torch shows CUDA's."""

        def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
            called.append((address, size_bytes, flags, driver.mode))
            return 0 if size_bytes else 1

        def cudaHostUnregister(self, address: int) -> int:
            called.append((address, driver.mode))
            return 713

        def cudaGetErrorString(self, error: int) -> str:
            return "invalid" if error == 1 else "not registered"

    monkeypatch.setattr(torch.cuda, "device", lambda name: nullcontext(called.append(name)))
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    registrar = CudaRegistrar("cuda:1")
    registrar.register(4096, 8192)
    with pytest.raises(RuntimeError, match=r"invalid \(CUDA error 1\)"):
        registrar.register(4096, 0)
    with pytest.raises(RuntimeError, match="not registered"):
        registrar.unregister(4096)
    relaxed, portable = threads.RELAXED, 1
    registered = [(4096, size_bytes, portable, relaxed) for size_bytes in (8192, 0)]
    assert called == ["cuda:1", registered[0], "cuda:1", registered[1], "cuda:1", (4096, relaxed)]
    assert driver.mode == 0


def test_chunks_on_devices_are_hashed_there_in_one_go_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, or some that are no neighbours. What lies on the host in part is the host's."""
    Device(monkeypatch)
    memory, pieces = pieces_on("cuda:0", "cuda:0", "cpu", "cuda:1", "cuda:1", "cuda:1", "cuda:1")
    whole = b"".join(bytes(tensor.numpy()) for tensor in memory)
    calls: list[int] = []

    def hashed(index: int, spans: Spans, chunks: Chunks, **_: object) -> bytes:
        calls.append(index)
        ends = [*spans.starts[1:], spans.stop]
        runs = zip(spans.starts, spans.addresses, ends, strict=True)
        data = b"".join(ctypes.string_at(address, end - start) for start, address, end in runs)
        cuts = [(at - spans.starts[0], min(at + chunks.chunk_bytes, chunks.stop)) for at in chunks.starts]
        parts = [data[at : end - spans.starts[0]] for at, end in cuts]
        return b"".join(xxhash.xxh3_128_digest(part) for part in parts)

    monkeypatch.setattr(xxh3, "MIN_BYTES", 11)
    monkeypatch.setattr(cuda_device, "why_not", lambda index: None)
    monkeypatch.setattr(cuda_device, "device_digests", hashed)
    stream = cuda.CudaStream(pieces, StagingRing(64, 8))

    def check(chunk_bytes: int, wanted: list[int] | None, found: list[int], asked: list[int]) -> None:
        right = {it: xxhash.xxh3_128_digest(whole[it * chunk_bytes : (it + 1) * chunk_bytes]) for it in found}
        if wanted is None:
            made = stream.device_digests(chunk_bytes)
            runs = [(chunk, each[16 * at : 16 * at + 16]) for run, each in made for at, chunk in enumerate(run)]
            assert dict(runs) == right
        else:
            assert stream.device_digests_of(chunk_bytes, wanted) == right
        assert calls == asked
        calls.clear()

    check(90, None, [0, 1, 4, 5, 6, 7], [0, 1])
    check(115, None, [0, 3, 4, 5], [0, 1])  # the last one is too short
    check(90, [7, 6, 1, 4], [7, 6, 1, 4], [0, 1])
    check(30, [22, 0, 5, 2, 11, 23], [22, 0, 5, 2, 11], [0, 1])
    check(700, [], [], [])
    check(299, [2], [2], [1])
    check(90, [2, 3], [], [])
    assert [stream.hashes(*part) for part in ((0, 9), (150, 250), (200, 300), (299, 301))] == [True, True, False, True]
    monkeypatch.setattr(cuda_device, "why_not", lambda index: "no compiler")
    assert not stream.hashes(0, 9)
    check(90, None, [], [])


def test_memory_is_shared_opened_and_closed_on_a_stream_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch records, waits for and waits on the current stream there. The default one has the user's kernels."""
    seen: list[tuple[str, object]] = []
    stream: list[object] = ["the user's"]

    @contextmanager
    def on(found: object) -> Iterator[None]:
        stream.append(found)
        yield
        stream.pop()

    class Opened:
        def data_ptr(self) -> int:
            return 64

        def __del__(self) -> None:
            seen.append(("close", stream[-1]))

    def opened(*handle: object) -> Opened:
        seen.append(("open", stream[-1]))
        assert b"c" not in handle, "the source counts its readers itself"
        return Opened()

    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", opened)
    monkeypatch.setattr(cuda_sharing, "stream_of", lambda device, purpose: "the library's")
    monkeypatch.setattr(cuda_sharing, "_uuid", lambda device: "one")
    driver = SimpleNamespace(cuMemGetAddressRange=lambda address: (0, 64, 100))
    monkeypatch.setattr(cuda_sharing, "_driver", lambda index: nullcontext(driver))
    storage = cuda_sharing._Storage(b"h", 100, 0, b"c", 0, b"e", True)
    body = msgspec.msgpack.encode(cuda_sharing._Handles(1, "one", [storage, storage], [(40, 0, 0), (60, 1, 40)]))
    memory = cuda_sharing.OpenedCuda(body, 0)
    assert memory.spans == Spans([0, 40], [64, 104], 100)
    del memory
    assert seen == [(what, "the library's") for what in ("open", "open", "close", "close")]


@pytest.mark.parametrize("what", ["copy_from", "copy_to", "device_digests"])
def test_memory_that_is_freed_while_a_call_waits_for_its_turn_is_not_touched(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    Device(monkeypatch)
    memory, pieces = pieces_on("cuda:0", "cuda:0")
    stream = cuda.CudaStream(pieces, StagingRing(64, 8))

    class Turn:
        """Another call has it, and memory is freed before it is over."""

        def __enter__(self) -> None:
            memory[1].untyped_storage().resize_(0)

        def __exit__(self, *_: object) -> None:
            pass

    launched: list[object] = []
    kernels = SimpleNamespace(turn=Turn(), device="cuda:0", streams=())
    monkeypatch.setattr(cuda_device, "_kernels", lambda index: kernels)
    monkeypatch.setattr(cuda_device, "_working", lambda index: kernels)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(cuda_device, "digests", lambda *call: launched.append(call) or b"d")
    part = cuda_sharing.Part(Spans([0], [4096], 200))
    call: dict[str, Callable[[], object]] = {
        "device_digests": lambda: stream.device_digests(100),
        "copy_to": lambda: stream.copy_to(part, 0, 200, 100),
        "copy_from": lambda: stream.copy_from(part, 0, 200, 100, digests=False),
    }
    with pytest.raises(Freed, match="byte 100"):
        call[what]()
    assert not launched


def test_a_cast_runs_on_a_stream_of_the_library_beside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    device, driver = Device(monkeypatch), Driver(monkeypatch)
    masters, memory = torch.ones(8), torch.zeros(8, dtype=torch.bfloat16)
    block = SimpleNamespace(device="cuda:0", elements=8)
    monkeypatch.setattr(cast, "flat_of", lambda block: masters)
    launched: list[object] = []
    copy = torch.Tensor.copy_

    def noted(target: torch.Tensor, source: torch.Tensor, **options: bool) -> torch.Tensor:
        launched.append((device.current(torch.device("cuda:0")), driver.mode))
        return copy(target, source, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    cast.cast_on_device(block, memory, None, to_buffer=True)  # type: ignore[arg-type]
    assert launched == [("cuda:0/0", threads.RELAXED)]
    assert device.waited_for == ["cuda:0/0"]
    assert memory.tolist() == [1.0] * 8


# -- memory and rings that are shared ----------------------------------------------------------------------------------


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
        self.captures = Driver(monkeypatch)
        self.calls: list[str] = []
        self.failing = ""
        self.depth = 0
        self.free_bytes = 1 << 30
        self.ranges = [(0x2000, 4 << 20)]  # of memory that is there
        monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
        bindings = ModuleType("cuda.bindings")
        bindings.driver = self  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)

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
            assert self.captures.mode == threads.RELAXED
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
    assert found.captures.mode == 0


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
