"""Host memory for copies of a shard: as many as the limit allows, laid out as the registered tensors' stream.

One that is given back is kept for the next, because memory that was never touched costs more than the copy. When other
tensors are registered none is kept any more, and what is in use goes as its copies do: they count against the limit.

It is memory that readers on this host can map (`transport.sealed`), where there is such. Memory of a copy that was
dropped may be used for the next at once: what somebody still reads there does not count any more. Not so memory that
other workers have mapped for good: it is theirs too, and is given back when the last of them lets it go.

Memory that is not there is not taken either: what the limits of our cgroups and the host leave is looked at before, and
again while a new copy is written (`room`), for whoever touches more is killed.

Memory for copies of tensors on devices is registered with CUDA, as far as the limit on pinned memory allows (`pinned`):
ahead of need by `prepare`, in a thread that ends by itself, and otherwise by the copy that needs it.

Never: take memory beyond the limit, or hand out memory that somebody else has; or keep alive the tensors whose layout
the memory has.
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np

from ..core.errors import Closed, HostMemoryFull, InvariantViolation
from ..transport import sealed
from ..transport.base import ByteStream
from ..transport.sealed import AT_ONCE_BYTES, Sealed, Shared, Unmappable
from ..transport.threads import Thread
from . import guarded
from .host import HostStream, Piece
from .in_place import InPlace
from .parallel import in_parallel
from .pinned import PinnedMemory, Registrar, reserve, within_steps
from .registration import Registration
from .room import HINT, MOST_COPIES, SPARE_BYTES, Footing, Room, copies_that_fit, room, size_text

_log = logging.getLogger(__name__)

MOST_THREADS = 4  # for one copy: more only fight for the memory bus


class HostMemory:
    """The pool of one registration's host copies."""

    def __init__(
        self,
        registration: Registration,
        limit_bytes: int | None,
        *,
        look: Callable[[], Room | None] = room,
        most: int = MOST_COPIES,
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
        self.note_pageable(copy.stream.pin(registrar, self._pinned_limit))
        return not self.why_pageable

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
        """Others have it too, and nobody may write to it any more."""
        owners = (owner for piece in self.pieces for owner in piece.owners)
        return any(isinstance(owner, Sealed) and owner.is_frozen for owner in owners)

    def writing(self, start: int, stop: int) -> AbstractContextManager[Sequence[memoryview]]:
        """Raises `HostMemoryFull`."""
        self._footing.step(stop - start)
        for piece in self.pieces:  # one, or none; its memory begins with it
            for owner in piece.owners:
                if isinstance(owner, Sealed):
                    owner.have_large_pages(start - start % AT_ONCE_BYTES, min(stop + -stop % AT_ONCE_BYTES, piece.stop))
        return super().writing(start, stop)

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
            with self.writing(first, last):
                if not self._pinned.register(first, last):
                    return False
        return True

    @property
    def why_pageable(self) -> str:
        """Why CUDA has refused some of it."""
        return self._pinned.why_not if self._pinned is not None else ""

    def took(self, size_bytes: int) -> None:
        """Raises `HostMemoryFull` where there is no room to go on: whoever has written that much stops there."""
        self._footing.step(size_bytes)


class Nowhere:
    """The stream of tensors that have no memory now. Whoever maps another's copy of them asks how long it is."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    def reading(self, start: int, stop: int) -> AbstractContextManager[Sequence[memoryview]]:
        """Raises `InvariantViolation`: nobody reads what is not there."""
        raise InvariantViolation(f"bytes {start} to {stop} of tensors that have no memory now")

    def writing(self, start: int, stop: int) -> AbstractContextManager[Sequence[memoryview]]:
        """Raises `InvariantViolation`: nobody writes there."""
        return self.reading(start, stop)


class SharedStream(HostStream):
    """Memory of another worker's copy."""

    def writing(self, start: int, stop: int) -> AbstractContextManager[Sequence[memoryview]]:
        raise InvariantViolation("memory that other workers have too was to be written")


def over_shared(registration: Registration, memory: Shared, address: int) -> Registration:
    """The same layout over memory of another worker's copy, in which all of it begins there."""
    pieces = (Piece(0, registration.size_bytes, address, "cpu", 0, (memory,)),)
    return _over(registration, SharedStream(pieces), pieces)


def on_host(registration: Registration, look: Callable[[], Room | None] = room, left_bytes: int = 0) -> Registration:
    """The same layout over new host memory, beside which so much is left; nothing is copied.

    Raises `HostMemoryFull`, `MemoryError`.
    """
    stream = _copy_stream(registration.size_bytes, look, left_bytes)
    return _over(registration, stream, stream.pieces)


def _copy_stream(size_bytes: int, look: Callable[[], Room | None], left_bytes: int) -> CopyStream:
    footing = Footing(size_bytes, look, SPARE_BYTES + left_bytes)
    address, owner = _memory(size_bytes)
    pieces = (Piece(0, size_bytes, address, "cpu", 0, (owner,)),) if size_bytes else ()
    return CopyStream(pieces, footing)


def _memory(size_bytes: int) -> tuple[int, object]:
    """Untouched memory, its address and who keeps it. Raises `MemoryError`."""
    try:
        found = Sealed(size_bytes, may_freeze=True)
    except Unmappable:
        memory = np.empty(size_bytes, dtype=np.uint8)
        return int(memory.ctypes.data), memory
    return found.address, found


def without_memory(registration: Registration) -> Registration:
    """How it is laid out, and nothing that holds its memory, or the tensors."""
    return _over(registration, Nowhere(registration.size_bytes), ())


def _over(registration: Registration, stream: ByteStream, pieces: tuple[Piece, ...]) -> Registration:
    """The same layout over other memory."""
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
    )


def copy_stream(
    source: ByteStream,
    target: ByteStream,
    chunk_bytes: int,
    on_chunk: Callable[[int, Sequence[memoryview], Sequence[memoryview]], None],
    *,
    is_over: Callable[[], bool] = lambda: False,
    threads: int | None = None,
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
        with source.reading(start, stop) as theirs, target.writing(start, stop) as mine:
            guarded.copy(
                guarded.addresses_of(source, theirs, start), guarded.addresses_of(target, mine, start), start, stop
            )
            on_chunk(chunk, theirs, mine)

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = max(1, min(threads or min(cores, MOST_THREADS), len(chunks)))
    in_parallel(one, chunks, threads=count, name="copy")
