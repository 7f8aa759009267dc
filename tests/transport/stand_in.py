"""A stand-in for a device: its memory is shared host memory that only this module maps, copies and digests.

What a device does to its users happens here, too: memory that was opened stays readable when its owner frees it or
dies, copies take their time, and may go wrong.
"""

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable

import msgspec
import xxhash

from tensorhub.core.errors import TransportMissing
from tensorhub.memory.host import host_view
from tensorhub.transport.on_device import Shared

during_copy: list[Callable[[int, memoryview], object]] = []  # called with the first byte and what was copied

_descriptors: dict[int, tuple[int, int]] = {}  # by address: of the memory that was allocated, and its size


class _Handle(msgspec.Struct, frozen=True, array_like=True):
    process: int
    descriptor: int
    inside: int
    size_bytes: int


class Memory:
    """One allocation."""

    def __init__(self, size_bytes: int) -> None:
        descriptor = os.memfd_create("stand-in")
        os.ftruncate(descriptor, size_bytes)
        self._map = mmap.mmap(descriptor, size_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        _descriptors[self.address] = (descriptor, size_bytes)
        weakref.finalize(self, _free, self.address)


def _free(address: int) -> None:
    descriptor, _ = _descriptors.pop(address)
    os.close(descriptor)


def allocate(size_bytes: int) -> memoryview:
    """Zeros, as long as a view of them is known."""
    memory = Memory(size_bytes)
    return host_view(memory.address, size_bytes, memory)


def share(view: memoryview) -> Shared:
    """A handle for memory that was allocated here."""
    if not len(view):
        return Shared(msgspec.msgpack.encode(_Handle(os.getpid(), -1, 0, 0)), lambda: None)
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    for base, (descriptor, size_bytes) in _descriptors.items():
        if base <= address and address + len(view) <= base + size_bytes:
            handle = _Handle(os.getpid(), descriptor, address - base, len(view))
            return Shared(msgspec.msgpack.encode(handle), lambda: None)
    raise TransportMissing("this memory cannot be shared")


class Opened:
    """Another process's memory."""

    def __init__(self, body: bytes) -> None:
        try:
            handle = msgspec.msgpack.decode(body, type=_Handle)
        except msgspec.DecodeError as error:
            raise ValueError(str(error)) from error
        self.size_bytes = handle.size_bytes
        self.view = memoryview(b"")
        if handle.size_bytes:
            with open(f"/proc/{handle.process}/fd/{handle.descriptor}", "rb") as file:
                whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self.view = memoryview(whole)[handle.inside : handle.inside + handle.size_bytes]


def copy(source: Opened, target: memoryview, start: int, stop: int, chunk_bytes: int, *, digests: bool) -> list[bytes]:
    """What a kernel does: bytes [start, stop), and the digest of each chunk as it lies in the target."""
    target[start:stop] = source.view[start:stop]
    for hook in during_copy:
        hook(start, target[start:stop])
    if not digests:
        return []
    ends = range(start, stop, chunk_bytes)
    return [xxhash.xxh3_128_digest(target[at : min(at + chunk_bytes, stop)]) for at in ends]
