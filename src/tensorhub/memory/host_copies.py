"""Host memory for copies of a shard: its pool, its pinned part, and the copying."""

import ctypes
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from typing import Any, Protocol, runtime_checkable

from ..protocol.errors import Closed, HostMemoryFull, InvariantViolation
from ..protocol.manifest import Manifest
from ..transport import sealed
from ..transport.base import ByteStream
from ..transport.native import load, shapes
from ..transport.ranges import bare_addresses, table_of
from ..transport.sealed import AT_ONCE_BYTES, Sealed, Shared, large_of
from ..transport.threads import Thread, beside_captures
from . import streams
from .describe import InPlace
from .digests import ALGORITHM, MAX_THREADS, OnDevice
from .fill import FillSink
from .host_memory import (
    HINT,
    MAX_COPIES,
    SPARE_BYTES,
    STEP_BYTES,
    Footing,
    Room,
    copies_that_fit,
    room,
    size_text,
    untouched,
)
from .registration import Registration
from .streams import Freed, HostStream, Piece, core_count, in_parallel

# --- Host memory that is registered with CUDA: devices copy to and from it at the bus' rate.
#
# 1. Memory is touched and registered in steps, so the driver's own lock is held for milliseconds only. A copy stays
#    within one step: CUDA refuses to cross from one registration to the next.
# 2. One limit holds for the process. A host copy beyond it is pageable, at a seventh of the rate.
# 3. Memory stays registered as long as its `PinnedMemory` is known, and is unregistered before it is given back.
# 4. Memory that other workers have mapped for good is not registered.


_log = logging.getLogger(__name__)

PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of this process
POPULATE_WRITE = 23  # for madvise, since Linux 5.14: touch without a change of the content
TOUCH_BYTES = 2 << 20  # at once: other threads start, and map memory, between two such steps
PIN_STEP_BYTES = 32 << 20  # 0.6 ms of a bus of 51 GiB/s, 3 ms of hashing, 2 ms of registering
# A process with one of eight devices and two copies of 80 GiB on a host of 2 TiB needs a twelfth. The rest of the
# host's memory stays movable. What is pinned belongs to host copies, so `host_bytes` and `room` limit it too.
SHARE_OF_HOST = 4


class Registrar(Protocol):
    """Registers host memory with a device's driver. Knows no tensors."""

    def register(self, address: int, size_bytes: int) -> None:
        """Raises `RuntimeError`."""
        ...

    def unregister(self, address: int) -> None:
        """Unregister the memory at that address. Raises `RuntimeError`."""
        ...


@runtime_checkable
class Direct(Protocol):
    """A stream on devices that copy directly to and from registered host memory."""

    @property
    def size_bytes(self) -> int: ...

    def registrar(self) -> Registrar: ...

    def copy_to_host(self, start: int, stop: int, address: int) -> None:
        """Bytes [start, stop) of the stream to that address. Returns when they are there.

        Raises `Freed`, and `TransferError`.
        """
        ...

    def copy_to_device(self, start: int, stop: int, address: int) -> None:
        """Copies from host memory to the device."""
        ...


class CudaRegistrar:
    """Registers with CUDA, by torch."""

    def __init__(self, device: str) -> None:
        self._device = device

    def register(self, address: int, size_bytes: int) -> None:
        import torch

        with beside_captures(), torch.cuda.device(self._device):
            _check(_cudart().cudaHostRegister(address, size_bytes, PORTABLE))

    def unregister(self, address: int) -> None:
        import torch

        with beside_captures(), torch.cuda.device(self._device):
            _check(_cudart().cudaHostUnregister(address))


class PinnedMemory:
    """The memory of one host copy, as far as it is registered."""

    def __init__(self, memory: Sealed, registrar: Registrar) -> None:
        self.address, self.size_bytes = memory.address, memory.size_bytes
        self.why_not = ""  # why no more of it can be registered
        self._registrar = registrar
        self._registered = dict[int, int]()  # sizes by address
        _pinned[memory.address] = memory.size_bytes, self._registered
        self._lock = threading.Lock()
        ending = weakref.finalize(self, _unregister, registrar, self._registered, memory, os.getpid())
        ending.atexit = False  # threads that copy may outlive the interpreter

    def missing(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The steps with these bytes that are not registered yet."""
        for at in range(start - start % PIN_STEP_BYTES, stop, PIN_STEP_BYTES):
            if self.address + at not in self._registered:
                yield at, min(at + PIN_STEP_BYTES, self.size_bytes)

    def register(self, start: int, stop: int) -> bool:
        """Touch and register one step. Returns whether it is registered now."""
        address, size_bytes = self.address + start, stop - start
        populate(address, size_bytes)
        with self._lock:
            if address not in self._registered and not self.why_not:
                try:
                    self._registrar.register(address, size_bytes)
                except RuntimeError as error:
                    self.why_not = f"{size_text(size_bytes)} of host memory could not be registered: {error}"
                else:
                    self._registered[address] = size_bytes
        return address in self._registered


_pinned: dict[int, tuple[int, dict[int, int]]] = {}  # by address: what counts, and what is registered of it
_reserving = threading.Lock()


def reserve(memory: Sealed, registrar: Registrar, limit_bytes: int | None) -> PinnedMemory | str:
    """Memory that may be registered; or the reason why it may not."""
    if memory.is_frozen:
        return "other workers have mapped this memory for good"
    limit_bytes = default_limit() if limit_bytes is None else limit_bytes
    with _reserving:
        taken_bytes = sum(size_bytes for size_bytes, _ in _pinned.copy().values())
        if taken_bytes + memory.size_bytes > limit_bytes:
            text = f"{size_text(memory.size_bytes)} more than {size_text(taken_bytes)} would be beyond the limit"
            return f"{text} of {size_text(limit_bytes)} on pinned memory (TENSORHUB_PINNED_BYTES)"
        return PinnedMemory(memory, registrar)


def pinned_bytes() -> int:
    """Bytes that this process has pinned now."""
    return sum(sum(registered.copy().values()) for _, registered in _pinned.copy().values())


def default_limit() -> int:
    """A quarter of the host's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // SHARE_OF_HOST


def within_steps(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """These bytes in parts, none of which crosses the end of a step."""
    while start < stop:
        end = min(stop, start - start % PIN_STEP_BYTES + PIN_STEP_BYTES)
        yield start, end
        start = end


def _unregister(registrar: Registrar, registered: dict[int, int], memory: Sealed, owner: int) -> None:
    """`memory` is known here, so it is given back afterwards. Takes no lock: any thread may run this at any point."""
    if os.getpid() != owner:
        return  # a forked child has no such registration
    for address in registered:
        try:
            registrar.unregister(address)
        except RuntimeError as error:
            _log.warning("host memory could not be unregistered: %s", error)
    _pinned.pop(memory.address, None)


def populate(address: int, size_bytes: int) -> None:
    """Have the pages now. Where the kernel does not know how, the registration has them."""
    for at in range(address, address + size_bytes, TOUCH_BYTES):
        touched_bytes = min(TOUCH_BYTES, address + size_bytes - at)
        _libc().madvise(ctypes.c_void_p(at), ctypes.c_size_t(touched_bytes), ctypes.c_int(POPULATE_WRITE))


def _check(result: Any) -> None:
    """Raises `RuntimeError` unless it is cudaSuccess."""
    if int(result):
        raise RuntimeError(f"{_cudart().cudaGetErrorString(result)} (CUDA error {int(result)})")


def _cudart() -> Any:
    import torch

    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)  # it lets go of the interpreter


# --- Host memory for copies of a shard: as many as the limit allows, laid out as the registered tensors' stream.
#
# A copy that is given back is kept for the next, because fresh memory costs more than the copy. When other tensors are
# registered none is kept. Readers on this host can map it (`transport.sealed`). Memory that other workers have mapped
# for good is not used again. Before a new copy is touched, the room is looked at: the kernel kills a process that
# touches more than its limit.


COPY_THREADS = 4  # for one copy: more only fight for the memory bus
DIRECT_THREADS = 2 * MAX_THREADS  # of a copy from or to devices: half of them wait for the bus, the others hash


class HostMemory:
    """The pool of one registration's host copies."""

    def __init__(
        self,
        registration: Registration,
        limit_bytes: int | None,
        *,
        look: Callable[[], Room | None] = room,
        most: int = MAX_COPIES,
        had: int = 0,
        taken_bytes: int = 0,
        pinned_bytes: int | None = None,
    ) -> None:
        """`limit_bytes` for all copies together; None: `most` copies, or as many as there is room for now.

        `pinned_bytes` limits the pinned memory of this process; None: a share of the host's memory.
        `look` says what is left to take. Beside that, `taken_bytes` are in copies that are there already, of former
        tensors: `had` of them have this layout, and so many are allowed in any case.
        """
        size_bytes, found = registration.size_bytes, look() if limit_bytes is None else None
        self._shape = without_memory(registration)
        if limit_bytes is None:
            there = found._replace(left_bytes=found.left_bytes + taken_bytes) if found is not None else None
            self.most = max(had, copies_that_fit(size_bytes, there, most))
        else:
            self.most = max(had, limit_bytes // max(1, size_bytes))
        self.why_none = ""  # why there will never be a copy of these tensors
        if not self.most:
            leaves = f"{found.limit} left {size_text(found.left_bytes)} at register()" if found is not None else ""
            self.why_none = leaves or f"host_bytes is {limit_bytes} B"
        self._look = look
        self._free: Registration | None = None
        self._used = 0
        self._is_retired = False
        self._lock = threading.Lock()
        self.why_pageable = ""  # why the newest copy is pageable, for tensors on devices
        self._said: set[str] = set()
        self._pinned_limit = pinned_bytes
        self._preparing: Thread | None = None
        self._is_taken = threading.Event()  # nothing is prepared any more

    @property
    def used_bytes(self) -> int:
        """Taken now, whether there is something in it or not."""
        with self._lock:
            return (self._used + (self._free is not None)) * self._shape.size_bytes

    @property
    def limit_bytes(self) -> int:
        """What all copies together may take."""
        return self.most * self._shape.size_bytes

    def retire(self) -> None:
        """Other tensors are registered: what is free, or will be, is given back."""
        with self._lock:
            self._free, self._is_retired = None, True
            self._is_taken.set()

    def close(self) -> None:
        """Nothing is prepared any more. Blocks until the thread that prepares has ended; any thread may call it."""
        self._is_taken.set()
        if self._preparing is not None:
            self._preparing.join()

    def prepare(self, registrar: Registrar) -> None:
        """Touch and register memory for the first copy, in a thread of its own.

        Does nothing where there is a copy already, or no room for two.
        """
        with self._lock:
            is_wanted = self.most and self._shape.size_bytes and not self._is_taken.is_set()
            if not is_wanted or self._preparing is not None:
                return
            thread = Thread(self._prepare, name="tensorhub-prepare", args=(registrar,))
            try:
                thread.start()
            except (RuntimeError, MemoryError) as error:
                _log.debug("no host copy is prepared: %s", error)  # the copy itself registers what it needs
            else:
                self._preparing = thread

    def _prepare(self, registrar: Registrar) -> None:
        try:
            copy = on_host(self._shape, self._look, self._shape.size_bytes)
        except (HostMemoryFull, MemoryError) as error:
            _log.info("no host copy is prepared: %s", error)
            return
        if not self.pin(copy, registrar):
            return
        with self._lock:
            if self._is_taken.is_set():
                return
            self._free = copy
        stream = copy.stream
        assert isinstance(stream, CopyStream), "new memory"
        try:
            for start, stop in within_steps(0, stream.size_bytes):
                if self._is_taken.is_set() or not stream.register(start, stop):
                    break
        except HostMemoryFull as error:
            _log.info("no host copy is prepared: %s", error)
            with self._lock:
                self._free = self._free if self._free is not copy else None
        self.note_pageable(stream.why_pageable)

    def pin(self, copy: Registration, registrar: Registrar) -> bool:
        """Its memory may be registered with CUDA. Where it may not, `why_pageable` says why, and the log once."""
        assert isinstance(copy.stream, CopyStream), "a copy of another pool"
        why = copy.stream.pin(registrar, self._pinned_limit)
        self.note_pageable(why)
        return not why  # what another thread has noted meanwhile is of another copy

    def note_pageable(self, why: str) -> None:
        """Why a copy is pageable; empty where it is not."""
        if why and why not in self._said:
            self._said.add(why)
            _log.warning("host copies are pageable, at about a seventh of the bus' rate: %s", why)
        self.why_pageable = why

    def take(self, *, is_ahead: bool = False) -> Registration:
        """Memory for one copy, as a registration of the same layout. Raises `HostMemoryFull`.

        Ahead of need only where as much again is left: others of this host may want memory before it is needed.
        """
        with self._lock:
            free, self._free = self._free, None
            if free is None and self._used >= self.most:
                raise HostMemoryFull(f"{self._used} host copies are the most under the limit on host memory")
            self._used += 1
            self._is_taken.set()  # it registers by itself what it needs
        if free is not None:
            return free
        try:
            return on_host(self._shape, self._look, self._shape.size_bytes if is_ahead else 0)
        except (HostMemoryFull, MemoryError) as error:
            with self._lock:
                self._used -= 1
            if isinstance(error, HostMemoryFull):
                raise
            text = f"this process may have no {size_text(self._shape.size_bytes)} more for a host copy"
            raise HostMemoryFull(text, hint=HINT) from error

    @property
    def cost(self) -> str:
        """What all copies together may take and what is there, in words."""
        size_bytes, found = self._shape.size_bytes, self._look()
        text = f"{size_text(self.limit_bytes)} of host memory ({self.most} of {size_text(size_bytes)})"
        text = f"{text}, pageable: {self.why_pageable}" if self.why_pageable else text
        return f"{text}; {found.limit} leaves {size_text(found.left_bytes)}" if found is not None else text

    @property
    def is_short(self) -> bool:
        """There is no room for one copy now."""
        return not copies_that_fit(self._shape.size_bytes, self._look())

    def give(self, copy: Registration) -> None:
        """The copy is not needed any more."""
        with self._lock:
            self._used -= 1
            is_bad = isinstance(copy.stream, CopyStream) and (copy.stream.is_short or copy.stream.is_frozen)
            is_kept = not self._is_retired and not is_bad
            self._free = self._free or (copy if is_kept else None)


class CopyStream(HostStream):
    """New host memory, of which a block may be written only while there is room for its pages."""

    def __init__(self, pieces: tuple[Piece, ...], footing: Footing) -> None:
        super().__init__(pieces)
        self.pieces = pieces
        self._footing = footing
        self._pinned: PinnedMemory | None = None
        self._pinning = threading.Lock()

    @property
    def is_short(self) -> bool:
        """There was no room for all of it: what there is had better be given back."""
        return self._footing.is_short

    @property
    def is_frozen(self) -> bool:
        """True if other workers have mapped it for good: it must not be written."""
        owners = (owner for piece in self.pieces for owner in piece.owners)
        return any(isinstance(owner, Sealed) and owner.is_frozen for owner in owners)

    def views_to_write(self, start: int, stop: int) -> AbstractContextManager[Sequence[memoryview]]:
        """Raises `HostMemoryFull`."""
        self._footing.step(stop - start)
        for piece in self.pieces:  # one, or none; its memory begins with it
            for owner in piece.owners:
                if isinstance(owner, Sealed):
                    owner.have_large_pages(start - start % AT_ONCE_BYTES, min(stop + -stop % AT_ONCE_BYTES, piece.stop))
        return super().views_to_write(start, stop)

    def pin(self, registrar: Registrar, limit_bytes: int | None) -> str:
        """Let it be registered with CUDA from now on. Returns why it may not; empty where it may."""
        with self._pinning:
            if self._pinned is None:
                owner = next((each for piece in self.pieces for each in piece.owners), None)
                if not isinstance(owner, Sealed):
                    return f"this memory has no file: {sealed.why_not()}"
                found = reserve(owner, registrar, limit_bytes)
                if isinstance(found, str):
                    return found
                self._pinned = found
        return self._pinned.why_not

    def register(self, start: int, stop: int) -> bool:
        """Have these bytes touched and registered, after `pin`. Raises `HostMemoryFull`.

        Returns False, with `why_pageable`, where CUDA refuses.
        """
        assert self._pinned is not None, "memory that may not be registered"
        for first, last in self._pinned.missing(start, stop):
            with self.views_to_write(first, last):
                if not self._pinned.register(first, last):
                    return False
        return True

    @property
    def why_pageable(self) -> str:
        """Why CUDA has refused some of it."""
        return self._pinned.why_not if self._pinned is not None else ""

    def took(self, size_bytes: int) -> None:
        """Raises `HostMemoryFull` where there is no room to go on: the writer stops there."""
        self._footing.step(size_bytes)


class Nowhere:
    """The stream of tensors that have no memory now. It has a length."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    def views_to_read(self, start: int, stop: int) -> AbstractContextManager[Sequence[memoryview]]:
        """Raises `InvariantViolation`."""
        raise InvariantViolation(f"bytes {start} to {stop} of tensors that have no memory now")

    def views_to_write(self, start: int, stop: int) -> AbstractContextManager[Sequence[memoryview]]:
        """Raises `InvariantViolation`."""
        return self.views_to_read(start, stop)


class SharedStream(HostStream):
    """Memory of another worker's copy."""

    def views_to_write(self, start: int, stop: int) -> AbstractContextManager[Sequence[memoryview]]:
        raise InvariantViolation("memory that other workers have too was to be written")


def over_shared(registration: Registration, memory: Shared, address: int) -> Registration:
    """Lays the tensors over another worker's host copy, which begins at that address."""
    pieces = (Piece(0, registration.size_bytes, address, "cpu", 0, (memory,)),)
    return _over(registration, SharedStream(pieces), pieces)


def on_host(registration: Registration, look: Callable[[], Room | None] = room, left_bytes: int = 0) -> Registration:
    """Lays the tensors over new host memory, of which `left_bytes` stay free. Copies nothing.

    Raises `HostMemoryFull`, `MemoryError`.
    """
    size_bytes = registration.size_bytes
    footing = Footing(size_bytes, look, SPARE_BYTES + left_bytes)
    address, owner = untouched(size_bytes, may_freeze=True)
    pieces = (Piece(0, size_bytes, address, "cpu", 0, (owner,)),) if size_bytes else ()
    return _over(registration, CopyStream(pieces, footing), pieces)


def without_memory(registration: Registration) -> Registration:
    """The same layout without references to its memory or tensors."""
    return _over(registration, Nowhere(registration.size_bytes), ())


def _over(registration: Registration, stream: ByteStream, pieces: tuple[Piece, ...]) -> Registration:
    """Lays the tensors over other memory."""
    ours = InPlace([], [])
    return replace(
        registration,
        stream=stream,
        pieces=pieces,
        devices=("cpu",),
        _in_place=ours,
        casts=None,
        _held=None,
        given=None,
        may_have=False,
    )


def copy_stream(
    source: ByteStream,
    target: ByteStream,
    chunk_bytes: int,
    on_chunk: Callable[[int, Sequence[memoryview], Sequence[memoryview]], None],
    *,
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Copy one stream into another of the same size, in parallel. Blocks; raises `Closed` once `is_over`.

    `on_chunk` gets each chunk's number, its views in the source and those in the target as soon as it is copied, in
    several threads; what it raises ends the copy and is raised here. Raises `Freed` if memory on either side is not
    there any more; of the two only what is not registered memory may be looked at in `on_chunk`.
    """
    chunks = range(-(-source.size_bytes // chunk_bytes))

    def one(chunk: int) -> None:
        if is_over():
            raise Closed("the copy was given up")
        start, stop = chunk * chunk_bytes, min((chunk + 1) * chunk_bytes, source.size_bytes)
        with source.views_to_read(start, stop) as theirs, target.views_to_write(start, stop) as mine:
            streams.copy(
                streams.addresses_of(source, theirs, start), streams.addresses_of(target, mine, start), start, stop
            )
            on_chunk(chunk, theirs, mine)

    count = min(core_count(), COPY_THREADS)
    in_parallel(one, chunks, threads=count, name="copy")


# --- Copies between registered memory and host copies at the machine's rate.
#
# 1. Of tensors on the host the mover's threads copy, without the interpreter. Python looks at the room that is left
#    before each 64 MiB.
# 2. Of tensors on devices the device copies to and from pinned memory. Several threads wait, each for its own run, and
#    hash what has arrived.
# Elsewhere `copy_stream` does it in Python.


TILE_BYTES = 256 << 10  # copied, then hashed in the near cache


def can_offload(source: ByteStream, target: ByteStream, manifest: Manifest) -> bool:
    """True if the native library can copy it."""
    is_known = not manifest.digests or manifest.algorithm == ALGORITHM
    is_placed = bare_addresses(source) is not None and isinstance(target, HostStream)
    return load.library() is not None and is_known and is_placed and source.size_bytes == manifest.size_bytes > 0


def offload(
    source: ByteStream,
    target: ByteStream,
    manifest: Manifest,
    *,
    verify: bool,
    check: Callable[[int, Sequence[memoryview]], None],
    is_over: Callable[[], bool],
) -> bool:
    """Copy and check everything. Blocks. False: this machine refuses, and Python has to do it.

    `check` says what is wrong with a chunk whose digest differs. Raises what it raises, `Freed`, and `Closed`.
    """
    library, theirs = load.library(), bare_addresses(source)
    assert library is not None, "no library"
    assert theirs is not None, "bytes that lie nowhere"
    assert isinstance(target, HostStream), "a host copy that lies elsewhere"
    ours = target.addresses()
    digests = ctypes.c_char_p(manifest.digests) if verify and manifest.digests else None
    state = shapes.OffloadState(
        source=table_of(theirs),
        into=table_of(ours),
        chunk_bytes=manifest.chunk_bytes,
        tile_bytes=TILE_BYTES,
        digests=ctypes.cast(digests, ctypes.c_void_p) if digests is not None else None,
        large=large_of(ours),
        threads=min(core_count(), COPY_THREADS),
    )
    step = max(1, STEP_BYTES // manifest.chunk_bytes)
    for first in range(0, manifest.chunk_count, step):
        if is_over():
            raise Closed("the copy was given up")
        state.next, state.stop = first, min(first + step, manifest.chunk_count)
        start, (_, stop) = manifest.chunk_range(first)[0], manifest.chunk_range(int(state.stop) - 1)
        target.took(stop - start)
        status = library.offload(state)
        if status == shapes.LOST:
            return False
        if status == shapes.UNREADABLE:
            raise Freed(int(state.at))
        if status == shapes.CORRUPT:
            chunk = int(state.chunk)
            with target.views_to_read(*manifest.chunk_range(chunk)) as views:
                check(chunk, views)
            raise InvariantViolation(f"chunk {chunk} has two digests")
    return True


# --- Tensors on devices.


def copy_directly(
    device: ByteStream,
    copy: Registration,
    pool: HostMemory | None,
    chunk_bytes: int,
    *,
    to_host: bool,
    on_chunk: Callable[[int, int], None],
    is_over: Callable[[], bool],
) -> bool:
    """Copy all of it between devices and a host copy of this pool. Blocks. False: the host copy is pageable.

    `on_chunk` gets the first byte of each chunk and its end once it is copied, in several threads. Raises what it
    raises, `Freed`, `Closed`, and `HostMemoryFull`.
    """
    if pool is None or not isinstance(device, Direct) or not device.size_bytes:
        return False
    if not pool.pin(copy, device.registrar()):
        return False
    host, size_bytes = copy.stream, device.size_bytes
    assert isinstance(host, CopyStream), "a host copy that lies elsewhere"
    move, address = device.copy_to_host if to_host else device.copy_to_device, host.pieces[0].address
    run_bytes = max(1, PIN_STEP_BYTES // chunk_bytes) * chunk_bytes  # for which one thread waits

    def one(start: int) -> None:
        if is_over():
            raise Closed("the copy was given up")
        stop = min(start + run_bytes, size_bytes)
        if host.why_pageable or not host.register(start, stop):
            return
        for first, last in within_steps(start, stop):
            move(first, last, address + first)
        for at in range(start, stop, chunk_bytes):
            on_chunk(at, min(at + chunk_bytes, stop))

    in_parallel(one, range(0, size_bytes, run_bytes), threads=min(core_count(), DIRECT_THREADS), name="copy")
    pool.note_pageable(host.why_pageable)
    return not host.why_pageable


def check_filled(fill: FillSink, target: ByteStream, source: ByteStream) -> None:
    """Judge what was copied directly: on the device, where it hashes. What it does not hash as it lies in the copy.

    Raises `Freed`, and `CorruptTransfer`.
    """
    manifest = fill.manifest
    rest = set(range(manifest.chunk_count))
    for run, digests in target.device_digests(manifest.chunk_bytes) if isinstance(target, OnDevice) else ():
        fill.take(run, digests)
        rest.difference_update(run)

    def one(chunk: int) -> None:
        with source.views_to_read(*manifest.chunk_range(chunk)) as views:
            fill.accept(chunk, views)

    in_parallel(one, sorted(rest), threads=_thread_count(), name="digest")


def _thread_count() -> int:
    return min(core_count(), MAX_THREADS)
