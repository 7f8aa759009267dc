"""Rates of copies and digests within one process, beside bare copies: for `tensorhub doctor`."""

import ctypes
import mmap
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..transport.sealed import Sealed
from .host_copies import within_steps
from .registration import Registration, register
from .streams import host_view, in_parallel
from .xxh3 import Spans

ROUNDS = 4  # the first one also touches the memory
RING_THREADS = 4  # as many streams as tcp has to a device
ON_DEVICE = 16  # times as many bytes: a device moves 256 MiB in the time that a read takes to begin
FREE_SHARE = 8  # of a device's free memory, at most this part

Way = tuple[str, float, float]


def best(work: Callable[[], object], size_bytes: int) -> float:
    """Bytes a second, the best of a few rounds."""
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return size_bytes / max(min(seconds[1:]), 1e-9)


def on_host(size_bytes: int) -> Registration:
    """Memory with its pages present."""
    return register({"w": np.full(size_bytes, 7, np.uint8)})


def on_host_mapped(size_bytes: int) -> Registration:
    """Memory that readers map. Raises `Unmappable`."""
    memory = Sealed(size_bytes)
    array = np.frombuffer(host_view(memory.address, size_bytes, memory), np.uint8)
    array.fill(7)
    return register({"w": array})


def on_device(size_bytes: int) -> Registration:
    """Random bytes on the first GPU."""
    import torch

    return register({"w": torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, device="cuda")})


def for_device(size_bytes: int) -> int:
    """More bytes, as far as the device has room."""
    import torch

    return max(1, min(ON_DEVICE * size_bytes, torch.cuda.mem_get_info()[0] // FREE_SHARE))


def bare_copy(mine: Registration) -> float:
    """The rate of a copy within one process."""
    (piece,), size_bytes = mine.pieces, mine.size_bytes
    if piece.device != "cpu":
        import torch

        source = piece.owners[0]
        assert isinstance(source, torch.Tensor)
        return best(partial(_copy_and_wait, torch.empty_like(source), source), size_bytes)
    target = mmap.mmap(-1, size_bytes)
    there = ctypes.addressof(ctypes.c_char.from_buffer(target))
    return best(lambda: ctypes.memmove(there, piece.address, size_bytes), size_bytes)


def _copy_and_wait(target: Any, source: Any) -> None:
    import torch

    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()


def device_ways(size_bytes: int, chunk_bytes: int) -> tuple[str, list[Way]]:
    """What the first GPU does beside bare copies on it and over its bus; or why nothing can be measured."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}", []
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device", []
    large, other = (on_device(for_device(size_bytes)) for _ in range(2))
    ways = on_device_ways(large.stream, other.pieces[0].address, bare_copy(large), chunk_bytes)
    del large, other
    small = on_device(size_bytes)
    pinned = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    bus = best(partial(_copy_and_wait, pinned, small.pieces[0].owners[0]), size_bytes)
    return "", ways + bus_ways(small.stream, pinned.data_ptr(), bus, chunk_bytes)


def on_device_ways(stream: Any, other: int, copy: float, chunk_bytes: int) -> list[Way]:
    """Of a `CudaStream`, and as many bytes at address `other`. Nothing where this device hashes nothing."""
    from .cuda_sharing import Part

    size_bytes = stream.size_bytes
    if not stream.hashes(0, size_bytes):
        return []
    source = Part(Spans([0], [other], size_bytes))
    hashed = best(lambda: stream.device_digests(chunk_bytes), size_bytes)
    both = best(lambda: stream.copy_from(source, 0, size_bytes, chunk_bytes, digests=True), size_bytes)
    return [("digest on the device", hashed, 2 * copy), ("copy with digest", both, copy)]  # a copy reads and writes


def bus_ways(stream: Any, pinned: int, bus: float, chunk_bytes: int) -> list[Way]:
    """Of a `CudaStream`, and as many bytes of pinned memory."""
    size_bytes = stream.size_bytes

    def to_host() -> None:
        for start, stop in within_steps(0, size_bytes):
            stream.copy_to_host(start, stop, pinned + start)

    def one(start: int) -> None:
        with stream.views_to_read(start, min(start + chunk_bytes, size_bytes)):
            pass

    def through_ring() -> None:
        in_parallel(one, range(0, size_bytes, chunk_bytes), threads=RING_THREADS, name="doctor")

    return [("host copy", best(to_host, size_bytes), bus), ("pinned ring", best(through_ring, size_bytes), bus)]
