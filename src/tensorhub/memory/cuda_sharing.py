"""Memory of CUDA devices, shared between processes of one host as torch.multiprocessing shares it.

Torch's allocators are both served: default segments by CUDA IPC, expandable segments by file descriptors. Torch keeps a
block that was shared until its counter is 0, also where its owner frees it. The source shares each storage once for all
readers, and counts them itself. Handles are numbers and bytes, so they travel in messages of our own.

What cannot be shared (cudaMallocAsync, memory that an engine made with cuMemCreate) is `TransportMissing`. It goes
through a ring: memory that this library takes from the driver itself, because torch's allocator may be the very one
that cannot share. A ring of host memory is registered with the driver at both ends.

When torch shares memory it records an event on the current stream. When it opens memory it makes that stream wait for
the event, and when it closes memory it waits for the stream. So all three happen on a stream of this library.
"""

import ctypes
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import torch
from msgspec.structs import replace

from ..protocol.errors import TransportMissing
from ..protocol.names import Undecodable, decoded
from ..transport.on_device import Shared
from ..transport.threads import beside_captures, scope
from .cuda_device import stream_of
from .host_copies import populate
from .streams import Piece
from .xxh3 import Spans

_log = logging.getLogger(__name__)

HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
PAGE_BYTES = (
    2 << 20
)  # of a device: what is no multiple of it may lie in a block with memory of others, which is shared too
FREE_SHARE = 4  # a ring takes at most this part of what is free on the device

_Natural = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Storage(msgspec.Struct, frozen=True, array_like=True):
    """What `UntypedStorage._share_cuda_` returns, less the device's number, which is another one elsewhere."""

    handle: bytes
    size_bytes: _Natural
    offset_bytes: _Natural
    counter_handle: bytes
    counter_offset: _Natural
    event_handle: bytes
    is_event_waited_for: bool


class _Handles(msgspec.Struct, frozen=True, array_like=True):
    process: int
    device: str  # its UUID
    storages: list[_Storage]
    pieces: list[tuple[_Natural, _Natural, _Natural]]  # of the stream, in order: length, storage, first byte in it


_handles = msgspec.msgpack.Decoder(_Handles)

# The source counts its readers itself, by pipes. Torch finds no counter of this name, and counts nothing.
NO_COUNTER = {"counter_handle": b"/tensorhub-counts-itself", "counter_offset": 0}


class SharedStorages:
    """Storages that torch has shared. It keeps their memory, also where its owner frees it, until this is forgotten."""

    def __init__(self) -> None:
        self.handles: list[_Storage] = []
        weakref.finalize(self, _give_up, os.getpid(), self.handles).atexit = False


def _give_up(process: int, storages: Sequence[_Storage]) -> None:
    """Readers count nothing, so torch's counter of each storage is 1 until now."""
    if os.getpid() == process:
        for it in storages:
            torch.UntypedStorage._release_ipc_counter_cuda(it.counter_handle, it.counter_offset)


def share(pieces: Sequence[Piece], memory: Sequence[torch.Tensor]) -> Shared:
    """Share the memory with all readers. Call it once: torch wraps a storage each time. `memory`: each piece as bytes.

    Raises `TransportMissing`.
    """
    storages = SharedStorages()
    numbers: dict[int, int] = {}
    places: list[tuple[int, int, int]] = []
    with _beside_all(memory[0].device.index):
        for piece, tensor in zip(pieces, memory, strict=True):
            storage = tensor.untyped_storage()
            base = storage.data_ptr()
            if base not in numbers:
                numbers[base] = len(storages.handles)
                try:
                    _, *rest = storage._share_cuda_()  # type: ignore[no-untyped-call]
                except RuntimeError as error:
                    raise TransportMissing(
                        f"memory on {piece.device} cannot be shared with another process: {error}",
                        hint="torch's default allocator and expandable_segments can; cudaMallocAsync cannot",
                    ) from error
                storages.handles.append(_Storage(*rest))
            places.append((piece.size_bytes, numbers[base], piece.address - base))
    body = msgspec.msgpack.encode(_Handles(os.getpid(), _uuid(memory[0].device), storages.handles, places))
    return Shared(body, storages)


class OpenedCuda:
    """Another process's memory, on a device of this one."""

    def __init__(self, body: bytes, index: int) -> None:
        """Raises `TransportMissing`, and `ValueError` where `body` is malformed."""
        try:
            handles = decoded(_handles, body)
        except Undecodable as error:
            raise ValueError(str(error)) from error
        if handles.process == os.getpid():
            raise TransportMissing("a device opens no memory of its own process", hint="use tcp")
        if handles.device != _uuid(torch.device("cuda", index)):
            raise TransportMissing("the source's tensors are on another device")
        sizes = [it.size_bytes for it in handles.storages]
        for length, number, first in handles.pieces:
            if number >= len(sizes) or first + length > sizes[number]:
                raise ValueError(f"a piece of {length} B at {first} is not inside its storage")
        opened: list[torch.UntypedStorage] = []
        weakref.finalize(self, _close, os.getpid(), index, opened)  # also where opening fails half-way
        with _beside_all(index):
            try:
                opened.extend(
                    torch.UntypedStorage._new_shared_cuda(index, *msgspec.structs.astuple(replace(it, **NO_COUNTER)))
                    for it in handles.storages
                )
            except RuntimeError as error:
                raise TransportMissing(f"the source's memory cannot be opened here: {error}", hint="use tcp") from error
        with _driver(index) as driver:
            for it, storage in zip(handles.storages, opened, strict=True):
                _check_is_there(driver, storage.data_ptr() - it.offset_bytes, it.offset_bytes + it.size_bytes)
        starts, addresses, at = [], [], 0
        for length, number, first in handles.pieces:
            starts.append(at)
            addresses.append(opened[number].data_ptr() + first)
            at += length
        self._storages = opened  # what keeps the memory open; nothing else may
        self.size_bytes = at
        self.spans = Spans(starts, addresses, at)


def _close(process: int, index: int, opened: list[torch.UntypedStorage]) -> None:
    """The driver refuses this to a thread beside a capture, as it does copies."""
    if os.getpid() == process:  # a fork must not touch the device
        with _beside_all(index):
            opened.clear()


@scope
def _beside_all(index: int) -> Iterator[None]:
    with (
        beside_captures(),
        torch.cuda.device(index),
        torch.cuda.stream(stream_of(torch.device("cuda", index), "sharing")),
    ):
        yield


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


@dataclass(frozen=True)
class Part:
    """A part of a ring, seen as bytes of a stream."""

    spans: Spans
    host_address: int | None = None  # of pinned host memory: the device's copy engines go there, not its kernels

    @property
    def size_bytes(self) -> int:
        return self.spans.stop - self.spans.starts[0]


class CudaRing:
    """Memory that two processes have, as one device sees it."""

    def __init__(
        self, index: int, address: int, handle: bytes, undo: Callable[[Any], Any], host_address: int | None = None
    ) -> None:
        """`undo` gets the driver's functions, and gives back what `address` is."""
        self._host_address = host_address
        self.handle = handle
        self._index = index
        self._address = address
        self._undo: Callable[[Any], Any] | None = undo

    def part(self, at: int, start: int, stop: int) -> Part:
        host_address = None if self._host_address is None else self._host_address + at
        return Part(Spans([start], [self._address + at], stop), host_address)

    def close(self) -> None:
        undo, self._undo = self._undo, None
        if undo is None:
            return
        try:
            with _driver(self._index) as driver:
                _done(undo(driver))
        except TransportMissing as error:  # a device that has failed gives nothing back before its process ends
            _log.warning("a ring on cuda:%d was not given back: %s", self._index, error)


def make_ring(index: int, size_bytes: int) -> CudaRing:
    """New memory that another process can open. Raises `TransportMissing`."""
    size_bytes = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
    with _driver(index) as driver:
        free_bytes, _ = _done(driver.cuMemGetInfo())
        if size_bytes > free_bytes // FREE_SHARE:
            raise TransportMissing(f"cuda:{index} has {free_bytes} B free, too little for a ring of {size_bytes} B")
        memory = _done(driver.cuMemAlloc(size_bytes))
        try:
            handle = _done(driver.cuIpcGetMemHandle(memory))
        except TransportMissing:
            driver.cuMemFree(memory)
            raise
        body = ctypes.string_at(handle.getPtr(), HANDLE_BYTES)
        return CudaRing(index, int(memory), body, lambda driver: driver.cuMemFree(memory))


def open_ring(index: int, body: bytes, size_bytes: int) -> CudaRing:
    """Opens a ring that another process has made. It lies on this device, or on one with peer access.

    Raises `TransportMissing`, and `ValueError` where `body` is malformed.
    """
    if len(body) != HANDLE_BYTES:
        raise ValueError(f"a handle of {len(body)} B")
    with _driver(index) as driver:
        handle = driver.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), body, HANDLE_BYTES)
        peers = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
        memory = _done(driver.cuIpcOpenMemHandle(handle, peers))
        try:
            _check_is_there(driver, int(memory), size_bytes)
        except TransportMissing:
            driver.cuIpcCloseMemHandle(memory)
            raise
        return CudaRing(index, int(memory), b"", lambda driver: driver.cuIpcCloseMemHandle(memory))


def pin_ring(index: int, address: int, size_bytes: int) -> CudaRing:
    """Host memory that stays mapped until this is closed. Raises `TransportMissing`."""
    populate(address, size_bytes)
    with _driver(index) as driver:
        flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
        _done(driver.cuMemHostRegister(address, size_bytes, flags))
        try:
            there = _done(driver.cuMemHostGetDevicePointer(address, 0))
        except TransportMissing:
            driver.cuMemHostUnregister(address)
            raise
        return CudaRing(index, int(there), b"", lambda driver: driver.cuMemHostUnregister(address), address)


@scope
def _driver(index: int) -> Iterator[Any]:
    """The driver's functions. In this block the device's primary context, which is torch's, is the thread's."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise TransportMissing(f"the package cuda-bindings is not there: {error}", hint="use tcp") from error
    with beside_captures():
        device = _done(driver.cuDeviceGet(index))
        context = _done(driver.cuDevicePrimaryCtxRetain(device))
        try:
            _done(driver.cuCtxPushCurrent(context))
            try:
                yield driver
            finally:
                driver.cuCtxPopCurrent()
        finally:
            driver.cuDevicePrimaryCtxRelease(device)


def _check_is_there(driver: Any, address: int, size_bytes: int) -> None:
    """Raises `TransportMissing` unless all of this is memory: a kernel that reads elsewhere ends the context.

    Expandable segments lie in several allocations, one after another.
    """
    at, stop = address, address + size_bytes
    while at < stop:
        status, base, there_bytes = driver.cuMemGetAddressRange(at)
        if int(status) and at == address:
            return  # such a driver does not tell of memory that it has opened
        if int(status):
            raise TransportMissing(f"the source names {size_bytes} B, outside of what it has shared", hint="use tcp")
        at = int(base) + int(there_bytes)


def _done(answer: tuple[Any, ...]) -> Any:
    """Unpacks the result of a driver call. Raises `TransportMissing` if the call failed."""
    status, *found = answer
    if int(status):
        raise TransportMissing(f"the CUDA driver says {getattr(status, 'name', status)}", hint="use tcp")
    return found[0] if len(found) == 1 else tuple(found)
