"""Copies registered memory that may be freed at any moment: the kernel does it, and answers where we would crash.

A tensor's storage can be given back while tensors still name it (`untyped_storage().resize_(0)`, as FSDP does between
steps), and a mapped file can be cut short. Whoever then reads there himself dies: SIGSEGV, SIGBUS. No look at the
addresses before helps, for it may happen a moment later. So whatever we read, or write, of the caller's memory goes
through `process_vm_readv` on this very process, which says EFAULT; where a filter forbids that, through a pipe.

What it costs, on one core: to hash a GiB 0.16 s in place of 0.12, to copy one 0.18 in place of 0.16 (numpy).

It cannot tell that memory was freed which the allocator has kept: there the digests, and `Registration.moved`, do.
It must never: touch a byte of registered memory itself, or take a byte for copied that the kernel did not count.
"""

import ctypes
import errno
import mmap
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import cache

from ..core.errors import HostMemoryFull
from ..transport import shortages
from ..transport.base import ByteStream
from ..transport.located import Located
from ..transport.shortages import MEMORY
from ..transport.vectors import IOV_MAX, Addresses

PART_BYTES = 4 << 20  # a chunk of the usual size at once: each part waits twice for the interpreter where it is busy
LEAST_BYTES = 1 << 16  # with less, the calls would cost more than the copying
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
            if room_bytes <= LEAST_BYTES:
                shortages.note(error, did="it made room to read tensors")
                raise HostMemoryFull(f"this process may have no {room_bytes} B to read tensors", hint=MEMORY) from error
        room_bytes = max(LEAST_BYTES, room_bytes // 4)


_is_refused = False  # no process_vm_readv here


def refuse() -> None:
    """From now on through a pipe: for tests of what a filter would do."""
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
        if not shortages.is_shortage(OSError(number, "")):
            refuse()
    return _through_pipe(source, target)


def _through_pipe(source: "array[int]", target: "array[int]") -> int:
    """The same with two copies. The pipe is made anew: what is left in it after an error is nobody's."""
    _, write, read = _calls()
    out, into = os.pipe()
    try:
        os.set_blocking(into, False)  # it takes what it holds: nobody else empties it
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


def _first(pairs: "array[int]", most_bytes: int) -> "array[int]":
    """The first so many bytes of what the iovecs name."""
    found, left = array("Q"), most_bytes
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
