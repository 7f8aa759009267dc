"""A stand-in for a device: its memory is shared host memory that only this module maps, copies and digests.

What a device does to its users happens here, too: memory that was opened stays readable when its owner frees it or
dies, copies take their time, and may go wrong.
"""

import ctypes
import mmap
import os
import weakref
from array import array
from collections.abc import Callable

import msgspec
import numpy as np
import xxhash
from numpy.lib.stride_tricks import as_strided

from tensorhub.memory.landing import ROW_WORDS, Landing
from tensorhub.memory.streams import host_view
from tensorhub.memory.xxh3 import CHUNK_WORDS, NoRoom, Spans
from tensorhub.protocol.errors import TransportMissing
from tensorhub.transport.on_device import Shared
from tensorhub.transport.ranges import Batches, Scatter

during_copy: list[Callable[[int, memoryview], object]] = []  # called with the first byte and what was copied
during_fill: list[Callable[[int, memoryview], object]] = []  # the same, of what was copied into a ring
cannot: set[str] = set()  # "share" memory; "open" memory of another device; "ring": have memory for a ring; "pin"
rings: "weakref.WeakSet[Ring]" = weakref.WeakSet()  # that are open in this process

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
    if "share" in cannot:
        raise TransportMissing("this memory cannot be shared")
    return _shared(view)


def _shared(view: memoryview) -> Shared:
    if not len(view):
        return Shared(msgspec.msgpack.encode(_Handle(os.getpid(), -1, 0, 0)))
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    for base, (descriptor, size_bytes) in _descriptors.items():
        if base <= address and address + len(view) <= base + size_bytes:
            handle = _Handle(os.getpid(), descriptor, address - base, len(view))
            return Shared(msgspec.msgpack.encode(handle))
    raise TransportMissing("this memory cannot be shared")


class Opened:
    """Another process's memory."""

    first = 0

    def __init__(self, body: bytes) -> None:
        if "open" in cannot:
            raise TransportMissing("the memory is on another device")
        try:
            handle = msgspec.msgpack.decode(body, type=_Handle)
        except msgspec.DecodeError as error:
            raise ValueError(str(error)) from error
        self.size_bytes = handle.size_bytes
        self.view = memoryview(b"")
        if handle.size_bytes:
            try:
                with open(f"/proc/{handle.process}/fd/{handle.descriptor}", "rb") as file:
                    whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except FileNotFoundError as error:  # a device would keep what its owner has shared
                raise ValueError("its owner has freed it before it was opened") from error
            self.view = memoryview(whole)[handle.inside : handle.inside + handle.size_bytes]


class Part:
    """A part of a ring, seen as bytes of a stream from `first` on."""

    def __init__(self, view: memoryview, first: int) -> None:
        self.view = view
        self.first = first
        self.size_bytes = first + len(view)


class Ring:
    """Memory that two processes have."""

    def __init__(self, view: memoryview, handle: bytes = b"") -> None:
        self._view: memoryview | None = view
        self.handle = handle
        rings.add(self)

    def part(self, at: int, start: int, stop: int) -> Part:
        assert self._view is not None, "a ring is used after its end"
        assert at + stop - start <= len(self._view)
        return Part(self._view[at : at + stop - start], start)

    def close(self) -> None:
        self._view = None
        rings.discard(self)


def make_ring(size_bytes: int) -> Ring:
    """New memory that can be shared."""
    if "ring" in cannot:
        raise TransportMissing("the device is full")
    view = allocate(size_bytes)
    return Ring(view, _shared(view).body)


def open_ring(handle: bytes, size_bytes: int) -> Ring:
    """What another process has made."""
    opened = Opened(handle)
    if opened.size_bytes < size_bytes:
        raise ValueError("a ring that is larger than its memory")
    return Ring(opened.view)


def pin_ring(address: int, size_bytes: int) -> Ring:
    """Host memory."""
    if "pin" in cannot:
        raise TransportMissing("no memory can be pinned")
    return Ring(host_view(address, size_bytes, None))


def fill(target: Part, source: memoryview, start: int, stop: int) -> None:
    """Bytes [start, stop) of the source into a ring."""
    view = target.view[start - target.first : stop - target.first]
    view[:] = source[start:stop]
    for hook in during_fill:
        hook(start, view)


def copy(source: Opened | Part, target: memoryview, start: int, stop: int, chunk_bytes: int, *, digests: bool) -> bytes:
    """What a kernel does: bytes [start, stop), and the digest of each chunk as it lies in the target."""
    target[start:stop] = source.view[start - source.first : stop - source.first]
    for hook in during_copy:
        hook(start, target[start:stop])
    return digests_of(target, start, stop, chunk_bytes) if digests else b""


def digests_of(target: memoryview, start: int, stop: int, chunk_bytes: int) -> bytes:
    """Of each chunk as it lies there."""
    ends = range(start, stop, chunk_bytes)
    return b"".join(xxhash.xxh3_128_digest(target[at : min(at + chunk_bytes, stop)]) for at in ends)


# -- tiles of another layout -------------------------------------------------------------------------------------------

during_landing: list[Callable[[np.ndarray], object]] = []  # called with each tile that has landed, before it is hashed
room_bytes, most_room_bytes = 0, 0  # of the device, for landing: now, and at most so far


def land(source: Opened, target: Spans, batches: Batches, scatter: Scatter, *, digests: bool) -> Landing:
    """Landing memory for one read."""
    spans = Spans([0], [np.frombuffer(source.view, np.uint8).ctypes.data], source.size_bytes)
    try:
        return Landing(Launcher, spans, target, batches, scatter, is_hashing=digests)
    except (NoRoom, ValueError) as error:
        raise TransportMissing(str(error)) from error


class Launcher:
    """Does what the kernels do, at once."""

    def __init__(self) -> None:
        self._kept: list[np.ndarray] = []

    def room(self, size_bytes: int, *, lane: int = 0) -> int:
        global room_bytes, most_room_bytes
        self._kept.append(memory := np.zeros(size_bytes + 16, np.uint8))
        room_bytes += size_bytes
        most_room_bytes = max(most_room_bytes, room_bytes)
        weakref.finalize(self, _give_back, size_bytes)
        return -(-memory.ctypes.data // 16) * 16

    def upload(self, words: "array[int]", *, lane: int = 0, at: int | None = None) -> int:
        address = self.room(8 * len(words)) if at is None else at
        ctypes.memmove(address, words.buffer_info()[0], 8 * len(words))
        return address

    def launch(self, kernel: str, threads: int, job: int, *, lane: int) -> None:
        if kernel == "move":
            _move(job)
        elif kernel == "chain":
            _digest(job)
        else:
            assert kernel == "sum_only"

    def wait(self, lane: int) -> None:
        """It was done when it was launched."""

    def download(self, address: int, count: int, *, lane: int | None = None) -> "array[int]":
        return array("Q", ctypes.string_at(address, 8 * count))


def _give_back(size_bytes: int) -> None:
    global room_bytes
    room_bytes -= size_bytes


def _words(address: int, count: int) -> list[int]:
    return list(array("Q", ctypes.string_at(address, 8 * count)))


def _memory(address: int, size_bytes: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_ubyte * size_bytes).from_address(address % (1 << 64)), np.uint8)


def _move(job: int) -> None:
    rows, count, source, target = _words(job, 4)
    for at in range(count):
        its = _words(rows + 8 * ROW_WORDS * at, ROW_WORDS)
        run, loops, steps, outer, outer_steps = its[2], its[3], its[4:6], its[6], its[7:9]
        blocks = []
        for side, base in enumerate((source, target)):
            reach = run + (loops - 1) * steps[side] + (outer - 1) * outer_steps[side]
            memory = _memory(base + its[side], reach)
            blocks.append(as_strided(memory, (outer, loops, run), (outer_steps[side], steps[side], 1)))
        blocks[1][...] = blocks[0]


def _digest(job: int) -> None:
    segment, _, _, _, chunks, count, _, _, _, _, found = _words(job, 11)
    first, address = _words(segment, 2)
    for at in range(count):
        start, size, _ = _words(chunks + 8 * CHUNK_WORDS * at, CHUNK_WORDS)
        tile = _memory(address + start - first, size)
        for hook in during_landing:
            hook(tile)
        digest = xxhash.xxh3_128_intdigest(tile)
        _memory(found + 16 * at, 16)[:] = np.frombuffer(digest.to_bytes(16, "little"), np.uint8)
