"""Byte streams over host memory and over staged device memory, with copies that survive freed memory."""

import ctypes
import errno
import mmap
import os
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from itertools import repeat
from typing import Protocol, TypeVar

import msgspec

from ..protocol.errors import DeadlineExceeded, HostMemoryFull, UsageError
from ..transport import threads
from ..transport.base import ByteStream
from ..transport.ranges import IOV_MAX, Addresses, Located
from ..transport.threads import MEMORY, Thread

# --- Registered memory on the host, seen as bytes.
#
# A stream is a list of pieces that cover it without gaps. A range costs a binary search, a slice of ready views, and at
# most two new views. Each view keeps the stream's tensors alive.


class Piece(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A range of memory that is bytes [start, stop) of the logical stream."""

    start: int
    stop: int
    address: int
    device: str
    storage: int
    owners: tuple[object, ...]  # keep the memory alive

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start

    def follows(self, other: "Piece") -> bool:
        """It continues `other` in memory, inside the same allocation."""
        return (
            self.address == other.address + other.size_bytes
            and self.device == other.device
            and self.storage == other.storage
        )

    @staticmethod
    def join(run: Sequence["Piece"]) -> "Piece":
        """One piece for several that follow each other."""
        first = run[0]
        if len(run) == 1:
            return first
        owners = tuple(owner for piece in run for owner in piece.owners)
        return Piece(first.start, run[-1].stop, first.address, first.device, first.storage, owners)


def host_view(address: int, size_bytes: int, owner: object) -> memoryview:
    """Writable bytes at an address; the view, and every slice of it, keeps `owner` alive."""
    memory = (ctypes.c_char * size_bytes).from_address(address)
    memory.owner = owner  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def host_views(pieces: Sequence[Piece]) -> list[memoryview]:
    """Writable bytes of each piece; any of the views keeps all owners alive.

    They are slices of one view from the lowest to the highest address, which is kept here: a slice takes
    0.1 us to make, and a view of its own 3 us.
    """
    if not pieces:
        return []
    lowest = min(piece.address for piece in pieces)
    highest = max(piece.address + piece.size_bytes for piece in pieces)
    every = host_view(lowest, highest - lowest, [piece.owners for piece in pieces])
    return [every[piece.address - lowest : piece.address - lowest + piece.size_bytes] for piece in pieces]


class HostStream:
    """A `ByteStream` over memory of this process."""

    is_bare = True

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._starts = [piece.start for piece in pieces]
        self._stops = [piece.stop for piece in pieces]
        self._addresses = [piece.address for piece in pieces]
        self._sizes = [piece.size_bytes for piece in pieces]
        self._views = host_views(pieces)
        self._size_bytes = pieces[-1].stop if pieces else 0
        self._table = Addresses.of_ranges(zip(self._addresses, self._sizes, strict=True))

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def addresses(self) -> Addresses:
        """All of its memory, for transports that hand it to the kernel."""
        return self._table

    def views_to_read(self, start: int, stop: int) -> AbstractContextManager[Sequence[memoryview]]:
        """The registered memory itself: what is written to it during the block is seen in it."""
        return nullcontext(self.views(start, stop))

    def views_to_write(self, start: int, stop: int) -> AbstractContextManager[Sequence[memoryview]]:
        """The registered memory itself: a byte is in place as soon as it is written."""
        return nullcontext(self.views(start, stop))

    def took(self, size_bytes: int) -> None:
        """Note bytes that were written without `views_to_write`."""

    def views(self, start: int, stop: int) -> list[memoryview]:
        """Bytes [start, stop) of the stream, in order, none of them empty."""
        first, last = self._span(start, stop)
        if first >= last:
            return []
        views = self._views[first:last]
        if stop < self._stops[last - 1]:
            views[-1] = views[-1][: stop - self._starts[last - 1]]
        if start > self._starts[first]:
            views[0] = views[0][start - self._starts[first] :]
        return views

    def ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Bytes [start, stop) as (address, length), for transports that let the kernel or the hardware copy."""
        first, last = self._span(start, stop)
        if first >= last:
            return []
        found = list(zip(self._addresses[first:last], self._sizes[first:last], strict=True))
        address, size = found[-1]
        found[-1] = (address, size - max(0, self._stops[last - 1] - stop))
        address, size = found[0]
        before = start - self._starts[first]
        found[0] = (address + before, size - before)
        return found

    def _span(self, start: int, stop: int) -> tuple[int, int]:
        if not 0 <= start <= stop <= self._size_bytes:
            raise UsageError(f"bytes {start} to {stop} are not in a stream of {self._size_bytes} B")
        if start == stop:
            return 0, 0
        return bisect_right(self._starts, start) - 1, bisect_left(self._starts, stop)


# --- Copies of registered memory that may be freed at any moment.
#
# A storage can be given back while tensors still name it, and a mapped file can be cut short. A process that reads
# there dies of SIGSEGV or SIGBUS. So the kernel copies, by `process_vm_readv` on this very process, which answers
# EFAULT; where a filter forbids that, through a pipe. To hash a GiB takes 0.16 s in place of 0.12 on one core. Freed
# memory that the allocator has kept is found by digests, and by `Registration.moved`.


PART_BYTES = 4 << 20  # a chunk of the usual size at once: each part waits twice for the interpreter where it is busy
MIN_BYTES = 1 << 16  # with less, the calls would cost more than the copying
PIPE_BYTES = 1 << 16  # of one call: what a pipe holds, but for users who have many


class Freed(Exception):
    """Registered memory is not there any more. `at` is the first byte of the stream that could not be copied."""

    def __init__(self, at: int) -> None:
        super().__init__(f"byte {at} of the registered memory is not there any more")
        self.at = at


def copy(source: Addresses, target: Addresses, start: int, stop: int) -> None:
    """Bytes [start, stop) of a stream, from where they are in one memory to where they belong in another.

    Both are of this process. Raises `Freed` if either is not there.
    """
    while start < stop:
        moved = _moved(source.part(start, stop, IOV_MAX), target.part(start, stop, IOV_MAX))
        if moved <= 0:
            raise Freed(start)
        start += moved


def copy_pieces(source: "array[int]", target: "array[int]", start: int) -> None:
    """Pieces of one memory to as many of another, of the same lengths: iovecs, at most as many as the kernel takes.

    Raises `Freed` if one is not there: at byte `start` and what comes before it in those that are there.
    """
    while source:
        moved = _moved(source, target)
        if moved <= 0:
            raise Freed(start)
        source, target = _beyond(source, moved), _beyond(target, moved)


def unwritable(addresses: Sequence[int]) -> list[int]:
    """Which of these bytes, by their places in the row, may not be written. Each is copied onto itself to find out."""
    found, at = list[int](), 0
    while at < len(addresses):
        pairs = array("Q", (word for address in addresses[at : at + IOV_MAX] for word in (address, 1)))
        moved = _moved(pairs, pairs)
        if moved <= 0:
            moved = _moved(pairs[:2], pairs[:2])  # by itself, for a pipe tells nothing of those before a bad one
        if moved <= 0:
            found.append(at)
        at += max(1, moved)
    return found


def parts(source: Addresses, start: int, stop: int, room: bytearray | mmap.mmap) -> Iterator[memoryview]:
    """Bytes [start, stop), copied into `room` one part after another. Each is valid until the next. Raises `Freed`."""
    view = memoryview(room)
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    while start < stop:
        size_bytes = min(len(room), stop - start)
        copy(source, Addresses.of_ranges([(address, size_bytes)], start), start, start + size_bytes)
        yield view[:size_bytes]
        start += size_bytes


def addresses_of(stream: ByteStream, views: Sequence[memoryview], start: int) -> Addresses:
    """Where bytes of a stream are, of which a block has given these views from `start` on."""
    return stream.addresses() if isinstance(stream, Located) else Addresses.of_views(views, start)


def room_for(size_bytes: int) -> mmap.mmap:
    """What `parts` of so many bytes need; less where this process may have no more, and then there are more parts.

    For one thread. The kernel has it back at once: malloc would keep it. Raises `HostMemoryFull`.
    """
    room_bytes = max(1, min(PART_BYTES, size_bytes))
    while True:
        try:
            return mmap.mmap(-1, room_bytes)
        except (OSError, MemoryError) as error:
            if room_bytes <= MIN_BYTES:
                threads.note(error, did="it made room to read tensors")
                raise HostMemoryFull(f"this process may have no {room_bytes} B to read tensors", hint=MEMORY) from error
        room_bytes = max(MIN_BYTES, room_bytes // 4)


_is_refused = False  # no process_vm_readv here


def refuse() -> None:
    """Copy through a pipe from now on. Tests use this in place of a syscall filter."""
    global _is_refused
    _is_refused = True


def _moved(source: "array[int]", target: "array[int]") -> int:
    """One call: how many bytes were copied, or -1 where the first is not there."""
    if not _is_refused:
        theirs, ours = source.buffer_info()[0], target.buffer_info()[0]
        moved = _calls()[0](os.getpid(), ours, len(target) // 2, theirs, len(source) // 2, 0)
        number = ctypes.get_errno()
        if moved >= 0 or number == errno.EFAULT:
            return moved
        if not threads.is_shortage(OSError(number, "")):
            refuse()
    return _through_pipe(source, target)


def _through_pipe(source: "array[int]", target: "array[int]") -> int:
    """Copies through a pipe, which takes two copies. Each call makes a new pipe: an error may leave bytes in one."""
    _, write, read = _calls()
    out, into = os.pipe()
    try:
        os.set_blocking(into, False)  # it takes what it holds: no other thread empties it
        source = _first(source, PIPE_BYTES)
        wrote = write(into, source.buffer_info()[0], len(source) // 2)
        if wrote <= 0:
            return _told(wrote)
        target = _first(target, wrote)
        return _told(read(out, target.buffer_info()[0], len(target) // 2))
    finally:
        os.close(out)
        os.close(into)


def _told(moved: int) -> int:
    number = ctypes.get_errno()
    if moved < 0 and number != errno.EFAULT:
        raise OSError(number, os.strerror(number))
    return moved


def _first(pairs: "array[int]", max_bytes: int) -> "array[int]":
    """The first so many bytes of what the iovecs name."""
    found, left = array("Q"), max_bytes
    for at in range(0, len(pairs), 2):
        size_bytes = min(pairs[at + 1], left)
        found.extend((pairs[at], size_bytes))
        left -= size_bytes
        if not left:
            break
    return found


def _beyond(pairs: "array[int]", moved: int) -> "array[int]":
    """What the iovecs name, without the first so many bytes."""
    at = 0
    while at < len(pairs) and pairs[at + 1] <= moved:
        moved -= pairs[at + 1]
        at += 2
    left = pairs[at:]
    if left and moved:
        left[0] += moved
        left[1] -= moved
    return left


@cache
def _calls() -> tuple[Callable[..., int], Callable[..., int], Callable[..., int]]:
    """process_vm_readv, writev and readv, which let go of the GIL."""
    libc = ctypes.CDLL(None, use_errno=True)
    vectors = (ctypes.c_void_p, ctypes.c_ulong)
    found = []
    for name, arguments in (
        ("process_vm_readv", (ctypes.c_int, *vectors, *vectors, ctypes.c_ulong)),
        ("writev", (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)),
        ("readv", (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)),
    ):
        function = getattr(libc, name, None)
        if function is not None:
            function.argtypes, function.restype = arguments, ctypes.c_ssize_t
        found.append(function or _missing)
    return found[0], found[1], found[2]


def _missing(*_: object) -> int:
    """This C library has no process_vm_readv."""
    ctypes.set_errno(errno.ENOSYS)
    return -1


# --- Device memory as a `ByteStream`: a block of it passes through a small ring of host memory.
#
# 1. A block takes all its slots at once, in order of arrival, and waits for them at most `wait_s`.
# 2. `views_to_read` copies to the host before the block begins. `views_to_write` copies to the device when it ends, and
#    nothing where the block raises.
# 3. Pieces on the host are handed out directly and take no slot.
# 4. Several threads use one stream: each waits for its own copies only.


SLOT_BYTES = 4 << 20  # one chunk of the usual size
SLOT_COUNT = 16  # 64 MiB in all: 8 threads, each with one chunk in a copy and one on the wire
HOLD_S = 0.25  # while a chunk is sent out of its slots: what a slower peer has not taken by then is copied
WAIT_S = 30.0  # for slots: those of a fill are held while one chunk comes, which a silent source ends sooner


class Copy(msgspec.Struct, frozen=True, gc=False):
    """`size_bytes` between a piece, from `inside` on, and the staging memory, from `at` on."""

    piece: int
    inside: int
    at: int
    size_bytes: int


class Copier(Protocol):
    """Moves bytes between pieces and staging memory."""

    def staging(self, size_bytes: int) -> memoryview:
        """Host memory that the device copies from and to fast. Called once."""
        ...

    def to_host(self, copies: Sequence[Copy]) -> None:
        """Returns when the bytes are in the staging memory."""
        ...

    def to_device(self, copies: Sequence[Copy]) -> None:
        """Returns when the bytes are in the pieces."""
        ...


class StagingRing:
    """Slots of equal size, lent in order of arrival."""

    def __init__(self, slot_bytes: int = SLOT_BYTES, slot_count: int = SLOT_COUNT, wait_s: float = WAIT_S) -> None:
        self.slot_bytes = slot_bytes
        self.slot_count = slot_count
        self._wait_s = wait_s
        self._free = list(range(slot_count))
        self._queue: deque[object] = deque()
        self._changed = threading.Condition()

    @property
    def size_bytes(self) -> int:
        return self.slot_bytes * self.slot_count

    @property
    def free_count(self) -> int:
        return len(self._free)

    @contextmanager
    def slots(self, size_bytes: int) -> Iterator[list[int]]:
        """Slots for `size_bytes`, for the length of the block. `DeadlineExceeded` if none come free in time."""
        count = -(-size_bytes // self.slot_bytes)
        if count > self.slot_count:
            raise UsageError(
                f"a block of {size_bytes} B does not fit the staging ring of {self.size_bytes} B",
                hint="use smaller chunks, or a larger ring",
            )
        taken = self._take(count)
        try:
            yield taken
        finally:
            with self._changed:
                self._free.extend(taken)
                self._changed.notify_all()

    def _take(self, count: int) -> list[int]:
        if count == 0:
            return []
        place = object()
        with self._changed:
            self._queue.append(place)
            try:
                if not self._changed.wait_for(
                    lambda: self._queue[0] is place and len(self._free) >= count, self._wait_s
                ):
                    raise DeadlineExceeded(
                        f"no {count} of {self.slot_count} staging slots came free in {self._wait_s} s"
                        f" ({len(self._free)} are free, {len(self._queue)} blocks wait)",
                        hint="a reader or writer keeps its block open; end it, or use fewer threads",
                    )
                self._free.sort()  # neighbouring slots make fewer views
                taken, self._free = self._free[:count], self._free[count:]
                return taken
            finally:
                self._queue.remove(place)
                self._changed.notify_all()  # the next in the queue may have enough


class StagedStream:
    """A `ByteStream` over pieces of device memory, and of host memory among them. `Scarce`: it has one small ring."""

    hold_s = HOLD_S

    def __init__(self, pieces: Sequence[Piece], copier: Copier, ring: StagingRing | None = None) -> None:
        self._pieces = pieces
        self._starts = [piece.start for piece in pieces]
        self._sizes = [piece.size_bytes for piece in pieces]
        self._host = [
            host_view(piece.address, piece.size_bytes, piece.owners) if piece.device == "cpu" else None
            for piece in pieces
        ]
        self._copier = copier
        self._ring = ring or StagingRing()
        self._staging: memoryview | None = None
        self._staging_lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        return self._pieces[-1].stop if self._pieces else 0

    @property
    def ring(self) -> StagingRing:
        return self._ring

    def views_to_read(self, start: int, stop: int) -> AbstractContextManager[Sequence[memoryview]]:
        """A copy of the bytes as they are when the block begins (host pieces: the memory itself)."""
        return self._block(start, stop, writes=False)

    def views_to_write(self, start: int, stop: int) -> AbstractContextManager[Sequence[memoryview]]:
        """Room whose every byte is to be written: what it holds before is not what the device holds."""
        return self._block(start, stop, writes=True)

    def places(self, start: int, stop: int) -> list[tuple[str, int, int]]:
        """Bytes [start, stop) as (device, address, length), in order: for transports that reach devices themselves."""
        return [
            (self._pieces[index].device, self._pieces[index].address + begin, end - begin)
            for index, begin, end in self._portions(start, stop)
        ]

    @contextmanager
    def _block(self, start: int, stop: int, *, writes: bool) -> Iterator[Sequence[memoryview]]:
        portions = self._portions(start, stop)
        staged_bytes = sum(end - begin for index, begin, end in portions if self._host[index] is None)
        with self._ring.slots(staged_bytes) as slots:
            views, copies = self._plan(portions, slots)
            if copies and not writes:
                self._copier.to_host(copies)
            yield views
            if copies and writes:
                self._copier.to_device(copies)

    def _portions(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(piece, begin, end) in stream order, begin and end counted from the piece's first byte."""
        if not 0 <= start <= stop <= self.size_bytes:
            raise UsageError(f"bytes {start} to {stop} are not in a stream of {self.size_bytes} B")
        if start == stop:
            return []
        first, last = bisect_right(self._starts, start) - 1, bisect_left(self._starts, stop)
        found = list(zip(range(first, last), repeat(0), self._sizes[first:last]))  # there may be thousands
        index, _, end = found[-1]
        found[-1] = index, 0, min(end, stop - self._starts[index])
        index, _, end = found[0]
        found[0] = index, start - self._starts[index], end
        return found

    def _plan(
        self, portions: Sequence[tuple[int, int, int]], slots: Sequence[int]
    ) -> tuple[list[memoryview], list[Copy]]:
        """Views in stream order, and the copies that make the staged ones true."""
        slot_bytes = self._ring.slot_bytes
        staging = self._staged_memory() if slots else memoryview(b"")
        views: list[memoryview] = []
        copies: list[Copy] = []
        begun = at = -1  # the first byte of staging memory that the next view shows, if any; where the next copy begins
        left, further = 0, iter(slots)  # bytes in this slot; slots after it
        for index, begin, end in portions:
            host = self._host[index]
            if host is not None:
                if begun >= 0:
                    views.append(staging[begun:at])
                    begun = -1
                views.append(host[begin:end])
                continue
            while begin < end:
                if not left:
                    slot, left = next(further) * slot_bytes, slot_bytes
                    if begun >= 0 and slot != at:
                        views.append(staging[begun:at])
                        begun = -1
                    at = slot
                if begun < 0:
                    begun = at
                size_bytes = end - begin if end - begin < left else left
                copies.append(Copy(index, begin, at, size_bytes))
                at += size_bytes
                begin += size_bytes
                left -= size_bytes
        if begun >= 0:
            views.append(staging[begun:at])
        return views, copies

    def _staged_memory(self) -> memoryview:
        with self._staging_lock:
            if self._staging is None:
                self._staging = self._copier.staging(self._ring.size_bytes)
            return self._staging


T = TypeVar("T")
V = TypeVar("V")


def core_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_parallel(work: Callable[[T], V], items: Sequence[T], *, threads: int, name: str) -> list[V]:
    """What `work` gives for each of the items, in order. What it raises first ends it all and is raised here.

    This thread is one of them, so that all is done where no other can be started.
    """
    found: dict[int, V] = {}
    failed: dict[int, BaseException] = {}
    places = iter(range(len(items)))  # each thread takes the next one: under the interpreter's lock

    def run() -> None:
        for at in places:
            if failed:
                return
            try:
                found[at] = work(items[at])
            except BaseException as error:  # noqa: BLE001 it is raised where all of it was asked for
                failed[at] = error

    helpers: list[Thread] = []
    for number in range(1, min(threads, len(items))):
        helper = Thread(run, name=f"tensorhub-{name}_{number}")
        try:
            helper.start()
        except (RuntimeError, MemoryError):
            break
        helpers.append(helper)
    run()
    for helper in helpers:
        helper.join()
    try:
        if failed:
            raise next(iter(failed.values()))
    finally:
        failed.clear()  # their tracebacks know this frame
    return [found[at] for at in range(len(items))]
