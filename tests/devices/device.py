"""A stand-in for CUDA in one process: tensors whose memory `tensorhub` takes for a device's, in shared host memory.

`install()` replaces what the product asks of a device: to share and to open memory and rings, to copy and digest it, to
copy it from and to the host, to wait. All else is the product's own: its streams, transports and registrations.
What the device refuses is said by `stand_in.cannot`.

As on a device with torch:
1. A reader's mapping stays as it is when the source frees its memory, stops or dies.
2. Memory that was shared and is freed stays with its process until its readers have let it go (torch's "limbo").
3. What was freed is gone: `Freed` says so before a copy, and a later look ends the process.

`hooks` are called beside the copies of this process, so that a test holds them, spoils them or strikes meanwhile.
"""

import ctypes
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import torch
import xxhash

from tensorhub.memory import cuda, cuda_device, cuda_sharing
from tensorhub.memory.streams import Copy, Freed, Piece, host_view
from tensorhub.memory.xxh3 import MIN_BYTES, Chunks, Spans
from tensorhub.protocol.errors import TransportMissing
from tensorhub.transport.nixl import agent
from tensorhub.transport.on_device import Shared
from transport import stand_in

NAME = "cuda:0"
BEGIN, ARRIVE, DEPART = "begin", "arrive", "depart"  # a copy is due; bytes are on the device; bytes are on the host

hooks: list[Callable[[str, int, memoryview], object]] = []  # of the kind, the first byte in the stream, and the bytes

opened: set[str] = set()  # what this process has had open of others, or with them: "memory", "ring", "pinned"

_freed: set[int] = set()  # addresses of memory that its user has freed
_lock = threading.Lock()


class OnDevice(torch.Tensor):
    """A tensor that says that it is on the device."""

    device = property(lambda _: torch.device(NAME))  # type: ignore[assignment]


def empty(size_bytes: int) -> torch.Tensor:
    """Zeros, as an allocation of their own."""
    view = stand_in.allocate(size_bytes)
    _freed.discard(_address_of(view))  # another one was there before
    return torch.frombuffer(view, dtype=torch.uint8).as_subclass(OnDevice)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory itself, for the user's writes and looks: no hook sees them."""
    return host_view(tensor.data_ptr(), tensor.nbytes, tensor)


def free(tensor: torch.Tensor) -> None:
    """What `tensor.untyped_storage().resize_(0)` does on a device: its memory is gone, whoever else has the tensor."""
    with _lock:
        address, size_bytes = tensor.data_ptr(), tensor.nbytes
        descriptor, _ = stand_in._descriptors[address]
        _freed.add(address)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, descriptor)
        os.close(nothing)
        found = _mmap(address, size_bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10, -1, 0)  # MAP_FIXED
        assert found == address, "the stand-in's memory could not be unmapped"
    tensor.set_()


_mmap = ctypes.CDLL(None).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)


def used() -> dict[int, int]:
    """What this process keeps of the device, as the kernel tells it: its own memory, and what it has opened.

    By inode, so that memory that several processes have is counted once.
    """
    found: dict[int, int] = {}
    for number in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{number}"
        if os.path.islink(path) and os.readlink(path).startswith("/memfd:stand-in "):
            found[os.stat(path).st_ino] = pages(os.stat(path).st_size)
    with open("/proc/self/maps") as lines:
        for span, _, _, _, inode, *name in map(str.split, lines):
            if name and name[0] == "/memfd:stand-in":
                first, last = (int(end, 16) for end in span.split("-"))
                found[int(inode)] = last - first
    return found


def pages(size_bytes: int) -> int:
    """What the device takes for so many bytes."""
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


# -- what the product asks of a device ---------------------------------------------------------------------------------


def install() -> None:
    """From now on this process has a device."""
    as_bytes = cuda._as_bytes
    cuda._as_bytes = lambda piece: as_bytes(msgspec.structs.replace(piece, device="cpu"))  # type: ignore[misc]
    cuda.stream_of = lambda *_: None  # type: ignore[assignment]
    cuda.CudaCopier = Copier  # type: ignore[misc]
    cuda.synchronize = cuda.note_call = lambda device: None
    cuda.unmapped = lambda pieces: []
    cuda_device.why_not = lambda index: None
    cuda_device.device_digests = device_digests
    cuda_sharing.share = share
    cuda_sharing.OpenedCuda = Opened  # type: ignore[misc,assignment]
    cuda_sharing.make_ring = lambda _, size_bytes: Ring("ring", stand_in.make_ring(size_bytes))
    cuda_sharing.open_ring = lambda _, handle, size_bytes: Ring("ring", stand_in.open_ring(handle, size_bytes))
    cuda_sharing.pin_ring = lambda _, address, size_bytes: Ring("pinned", stand_in.pin_ring(address, size_bytes))
    agent.has_gpu = lambda *_: True


class Copier(cuda.CudaCopier):
    """Copies between memory of the device and staging memory."""

    def staging(self, size_bytes: int) -> memoryview:
        self._ring = memoryview(mmap.mmap(-1, size_bytes))
        return self._ring

    def spans(self) -> list[tuple[str, Spans]]:
        _tell(BEGIN, 0, memoryview(b""))
        for index in range(len(self._pieces)):
            self.memory_of(index)
        return self.runs

    def memory_of(self, piece: int) -> torch.Tensor | None:
        if self._pieces[piece].address in _freed:
            raise Freed(self._pieces[piece].start)
        return super().memory_of(piece)

    def to_host(self, copies: Sequence[Copy]) -> None:
        self._move(copies, DEPART)

    def to_device(self, copies: Sequence[Copy]) -> None:
        self._move(copies, ARRIVE)

    def _move(self, copies: Sequence[Copy], kind: str) -> None:
        for one in copies:
            _tell(BEGIN, self._pieces[one.piece].start + one.inside, memoryview(b""))
            with _lock:  # what is freed meanwhile waits for it
                memory = self.memory_of(one.piece)
                assert memory is not None
                there = bytes_of(memory)[one.inside : one.inside + one.size_bytes]
                here = self._ring[one.at : one.at + one.size_bytes]
                source, target = (there, here) if kind == DEPART else (here, there)
                target[:] = source
            _tell(kind, self._pieces[one.piece].start + one.inside, target)


def device_digests(
    index: int,
    source: Spans,
    chunks: Chunks,
    target: Spans | None = None,
    *,
    check: Callable[[], object],
    is_hashing: bool = True,
) -> bytes:
    """As that of `cuda_device`. A hook comes between a chunk's copy and its digest."""
    check()
    found = b""
    for start in range(chunks.start, chunks.stop, chunks.chunk_bytes):
        stop = min(start + chunks.chunk_bytes, chunks.stop)
        if target is not None:
            copied = b"".join(_views(source, start, stop))
            at = start
            for view in _views(target, start, stop):
                view[:] = copied[at - start : at - start + len(view)]
                _tell(ARRIVE, at, view)
                at += len(view)
        if not is_hashing:
            continue
        hasher = xxhash.xxh3_128()
        for view in _views(source if target is None else target, start, stop):
            hasher.update(view)
        found += hasher.digest() if stop - start >= MIN_BYTES else bytes(16)
    return found


def _views(spans: Spans, start: int, stop: int) -> Iterator[memoryview]:
    """Bytes [start, stop) of a stream."""
    for first, address, last in zip(spans.starts, spans.addresses, (*spans.starts[1:], spans.stop), strict=True):
        if first < stop and start < last:
            begin, end = max(first, start), min(last, stop)
            yield host_view(address + begin - first, end - begin, None)


def _tell(kind: str, start: int, copied: memoryview) -> None:
    for hook in hooks:
        hook(kind, start, copied)


class _Handles(msgspec.Struct, frozen=True, array_like=True):
    process: int
    pieces: list[bytes]


class Limbo:
    """Memory that was shared: torch keeps it, whoever frees it, until this is forgotten."""

    def __init__(self, addresses: Sequence[int]) -> None:
        kept = [os.dup(stand_in._descriptors[address][0]) for address in addresses]
        weakref.finalize(self, deque, map(os.close, kept), 0)


def share(pieces: Sequence[Piece], memory: Sequence[torch.Tensor]) -> Shared:
    """As that of `cuda_sharing`."""
    bodies = [stand_in.share(bytes_of(tensor)).body for tensor in memory]
    with _lock:
        limbo = Limbo([piece.address for piece in pieces])
    return Shared(msgspec.msgpack.encode(_Handles(os.getpid(), bodies)), limbo)


class Opened:
    """Another process's memory."""

    def __init__(self, body: bytes, index: int) -> None:
        try:
            handles = msgspec.msgpack.decode(body, type=_Handles)
        except msgspec.DecodeError as error:
            raise ValueError(str(error)) from error
        if handles.process == os.getpid():
            raise TransportMissing("a device opens no memory of its own process")
        try:
            self._opened = [stand_in.Opened(piece) for piece in handles.pieces]
        except OSError as error:
            raise TransportMissing(f"the source's memory cannot be opened here: {error}") from error
        opened.add("memory")
        starts, at = [], 0
        for piece in self._opened:
            starts.append(at)
            at += piece.size_bytes
        self.size_bytes = at
        self.spans = Spans(starts, [_address_of(piece.view) for piece in self._opened], at)


class Ring:
    """A ring of the stand-in, whose parts are as `device_digests` takes them."""

    def __init__(self, kind: str, ring: stand_in.Ring) -> None:
        opened.add(kind)
        self._ring = ring
        self.handle = ring.handle
        self.close = ring.close

    def part(self, at: int, start: int, stop: int) -> cuda_sharing.Part:
        view = self._ring.part(at, start, stop).view
        return cuda_sharing.Part(Spans([start], [_address_of(view)], stop))


def _address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)
