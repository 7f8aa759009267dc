"""The CUDA copier without a device: torch's streams and events are replaced, the bytes move on the host."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tensorhub.core.errors import TransferError, UsageError
from tensorhub.memory import cuda, cuda_device
from tensorhub.memory.guarded import Freed
from tensorhub.memory.host import Piece
from tensorhub.memory.staging import StagingRing
from tensorhub.memory.xxh3 import Chunks, Spans
from tensorhub.transport import captures


class Device:
    """What would be torch.cuda: remembers which streams were used and which events were waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lock = threading.Lock()
        self.streams: list[str] = []
        self.recorded: list[object] = []
        self.waited = 0
        device = self

        class Event:
            def __init__(self, *, blocking: bool) -> None:
                assert blocking

            def record(self, stream: object) -> None:
                device.recorded.append(stream)

            def synchronize(self) -> None:
                with device.lock:
                    device.waited += 1

        def stream(device: torch.device) -> str:
            self.streams.append(f"{device}/{len(self.streams)}")
            return self.streams[-1]

        empty = torch.empty

        def empty_unpinned(*args: object, pin_memory: bool = False, **options: object) -> torch.Tensor:
            assert pin_memory
            return empty(*args, **options)  # type: ignore[call-overload,no-any-return]

        monkeypatch.setattr(torch.cuda, "Stream", stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch, "empty", empty_unpinned)
        monkeypatch.setattr(cuda, "_as_bytes", lambda piece: piece.owners[0])


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
    with stream.reading(50, 350) as views:
        assert b"".join(views) == b"".join(bytes(tensor.numpy()) for tensor in memory)[50:350]
    assert sorted(device.recorded) == ["cuda:0/0", "cuda:1/2"]
    assert device.waited == 2
    with stream.writing(50, 350) as views:
        for view in views:
            view[:] = bytes(view.nbytes)
    assert sorted(device.recorded[2:]) == ["cuda:0/1", "cuda:1/3"]
    whole = torch.cat(memory)
    assert not whole[50:350].any()
    assert whole[:50].tolist() == list(range(50))
    assert whole[350:].tolist() == list(range(53, 103))


def test_a_failed_copy_is_a_transfer_error_and_waits_for_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    _, pieces = pieces_on("cuda:0", "cuda:0")
    stream = cuda.CudaStream(pieces, StagingRing(200, 1))

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with stream.reading(0, 1):
        pass
    monkeypatch.setattr(torch.Tensor, "copy_", fail)
    with pytest.raises(TransferError, match="between host and cuda:0 failed: CUDA error"), stream.reading(0, 200):
        pass
    assert device.waited == 2
    assert stream.ring.free_count == 1


def test_pinned_memory_that_cannot_be_had_is_a_transfer_error(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch)
    _, pieces = pieces_on("cuda:0")

    def fail(*args: object, **options: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "empty", fail)
    stream = cuda.CudaStream(pieces, StagingRing(200, 1))
    with pytest.raises(TransferError, match="200 B of pinned host memory"), stream.reading(0, 1):
        pass
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
    with stream.reading(0, 100) as views:
        assert bytes(views[0]) == bytes(memory[0].numpy())
    copies = device.waited
    with pytest.raises(Freed, match="byte 100"), stream.reading(50, 150):
        pass
    assert device.waited == copies + 1  # the piece before it was on its way
    assert stream.ring.free_count == 1


class Driver:
    """NVIDIA's, as far as captures of graphs go: whether a thread may copy while another one captures."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mode = 0  # of this thread; 0 is the strictest, which every thread begins with
        monkeypatch.setattr(captures, "mode_exchange", lambda: self.exchange)

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
    with stream.reading(0, 100):
        assert driver.mode == 0, "what is done with the bytes is the caller's"
    assert modes == dict.fromkeys(("pinned memory", "a stream", "a wait"), captures.RELAXED)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError), stream.writing(0, 100):
        pass
    assert device.waited == 2
    assert driver.mode == 0


def test_a_capture_that_forbids_the_wait_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(device: torch.device) -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "synchronize", refused)
    with pytest.raises(UsageError, match="a CUDA graph is being captured in this process") as raised:
        cuda.synchronize("cuda:1")
    assert "cuda:1" in str(raised.value)
    assert "before the capture or after it" in (raised.value.hint or "")


def test_chunks_on_devices_are_hashed_there_and_the_others_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch)
    _, pieces = pieces_on("cuda:0", "cuda:0", "cpu", "cuda:1", "cuda:1", "cuda:1", "cuda:1")
    asked: list[tuple[int, Spans, Chunks]] = []

    def hashed(index: int, spans: Spans, chunks: Chunks) -> list[bytes]:
        asked.append((index, spans, chunks))
        is_last_short = (chunks.stop - chunks.start) % chunks.chunk_bytes > 0
        return [b"%d" % index] * (chunks.count - is_last_short) + [b""] * is_last_short

    monkeypatch.setattr(cuda_device, "why_not", lambda index: None)
    monkeypatch.setattr(cuda_device, "device_digests", hashed)
    stream = cuda.CudaStream(pieces, StagingRing(64, 8))
    assert stream.device_digests(90) == {0: b"0", 1: b"0", 4: b"1", 5: b"1", 6: b"1"}
    assert [(index, chunks) for index, _, chunks in asked] == [(0, Chunks(0, 180, 90)), (1, Chunks(360, 700, 90))]
    assert list(asked[1][1].starts) == [300, 400, 500, 600]
    assert stream.device_digests(115) == {0: b"0", 3: b"1", 4: b"1", 5: b"1"}  # the last one, of 10 B, is the host's
    monkeypatch.setattr(cuda_device, "why_not", lambda index: "no compiler")
    assert stream.device_digests(90) == {}
