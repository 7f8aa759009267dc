"""Memory of this process that others on this host can map: a memfd with a size that can never change.

A reader that maps a file is killed (SIGBUS) if the file is cut short under it. Such memory is sealed when it is made,
and a reader maps only what has these seals:

    SHRINK, GROW   the size stays: no mapping of it ever loses a page
    FUTURE_WRITE   no new mapping is writable, and no write by a descriptor. Our own mapping, made before, stays
                   writable: that is how the owner fills it
    SEAL           and no seal is added

Memory that is whole can be *frozen*: its owner maps it read-only too, and it can never be written to again. Others may
map it for good, and hand it on: it lives as long as one of them does. One of them *counts* it.

A mapping keeps pages alive. A reader's mapping lasts as long as its read, and a forked child inherits none
(`MADV_DONTFORK`), unless the memory is a tensor's (`is_inherited`), which a child may want to look at.

Where there is no `memfd_create`, or a filter refuses it, or descriptors have run out, there is ordinary memory.
It must never: map what may be cut short, or unmap in a forked child what is not there.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import sys
import threading
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache

from .native import load, shapes
from .ranges import Addresses
from .threads import track

# As the kernel numbers them; Python knows them where the C library did when it was built.
ADD_SEALS, GET_SEALS = 1033, 1034
SEAL_SEAL, SEAL_SHRINK, SEAL_GROW, SEAL_FUTURE_WRITE = 0x1, 0x2, 0x4, 0x10
SEALS = SEAL_SEAL | SEAL_SHRINK | SEAL_GROW | SEAL_FUTURE_WRITE
CLOEXEC, ALLOW_SEALING, NOEXEC_SEAL = 0x1, 0x2, 0x8
DONTFORK, HUGEPAGE = 10, 14  # for madvise
FIXED = 0x10  # for mmap
HUGE_BYTES = 2 << 20  # a large page: memory that begins at a multiple of it can have such, on either side
AT_ONCE_BYTES = 4 * HUGE_BYTES  # that the kernel is asked for: each time it waits for all processors
APART_BYTES = mmap.PAGESIZE  # behind it nothing is mapped: no neighbour is so near that both would be read as one
MAX_REGIONS = 8  # that one stream may lie in and be mapped: each costs a descriptor on its way


class Unmappable(Exception):
    """There is no such memory, or it is none that may be mapped."""


class MappedPages:
    """Pages of a descriptor at an address of this process."""

    def __init__(self, descriptor: int, size_bytes: int, protection: int) -> None:
        """Raises `OSError`."""
        aligned_bytes = HUGE_BYTES if size_bytes > HUGE_BYTES else 0
        self._reserved = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE + aligned_bytes + APART_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._at = _mapped(None, self._reserved, 0, flags, -1)
        self.address = self._at
        if size_bytes > HUGE_BYTES:
            self.address += -self._at % HUGE_BYTES
        try:
            _mapped(self.address, size_bytes, protection, mmap.MAP_SHARED | FIXED, descriptor)
        except OSError:
            self.close()
            raise

    def protect(self, descriptor: int, size_bytes: int) -> None:
        """From now on it is there to be read only; a thread that reads it meanwhile goes on. Raises `OSError`."""
        _mapped(self.address, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED | FIXED, descriptor)
        self.advise(size_bytes, DONTFORK)
        if size_bytes >= HUGE_BYTES:
            self.advise(size_bytes, HUGEPAGE)

    def advise(self, size_bytes: int, advice: int) -> None:
        """Gives advice that an older kernel may ignore."""
        _libc().madvise(ctypes.c_void_p(self.address), ctypes.c_size_t(size_bytes), ctypes.c_int(advice))

    def close(self) -> None:
        """No thread may look there any more."""
        reserved, self._reserved = self._reserved, 0
        if reserved:
            _libc().munmap(ctypes.c_void_p(self._at), ctypes.c_size_t(reserved))


class Count:
    """A lock on memory that several processes have: the one that has the lock counts the memory."""

    def __init__(self, descriptor: int) -> None:
        """Of the memory. Raises `OSError` where there is no /proc."""
        self._own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)  # a lock is not shared with it
        ending = weakref.finalize(self, _close, self._own, os.getpid())
        ending.atexit = False
        track(self)

    def is_mine(self) -> bool:
        """It counts here, from now on at the latest."""
        try:
            fcntl.flock(self._own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def descriptors(self) -> tuple[int, ...]:
        """Descriptors that a forked child closes: it would keep the lock."""
        return (self._own,)


class Sealed:
    """New memory of this process, of zeros, that others can map. Given back with its last reference."""

    def __init__(self, size_bytes: int, *, is_inherited: bool = False, may_freeze: bool = False) -> None:
        """`is_inherited`: a forked child has it too, and the same one. `may_freeze`: its owner does not mind.

        Raises `Unmappable`.
        """
        if size_bytes <= 0:
            raise Unmappable("memory of no bytes")
        with ExitStack() as undo:
            fails = "memfd_create"
            try:
                descriptor = _memfd()
                undo.callback(os.close, descriptor)
                fails = f"{size_bytes} B of a memfd cannot be mapped"
                os.ftruncate(descriptor, size_bytes)
                mapping = MappedPages(descriptor, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
                undo.callback(mapping.close)
                fails = "a memfd cannot be sealed"  # by a kernel before 5.1
                fcntl.fcntl(descriptor, ADD_SEALS, SEALS)
            except OSError as error:
                raise Unmappable(f"{fails}: {os.strerror(error.errno or 0)}") from error
            undo.pop_all()
        if size_bytes >= HUGE_BYTES:
            mapping.advise(size_bytes, HUGEPAGE)
        if not is_inherited:
            mapping.advise(size_bytes, DONTFORK)
        self.descriptor = descriptor
        self.address = mapping.address
        self.size_bytes = size_bytes
        self.is_frozen = False
        self.large = _large(mapping.address, size_bytes)
        self.is_a_copy = not is_inherited  # and no arena: all of it is written sooner or later
        self._may_freeze = may_freeze and not is_inherited
        self._count: Count | None = None
        self._mapping = mapping
        _know(self, mapping)

    def freeze(self) -> bool:
        """Make it read-only for good; it counts here. Returns whether that is so now.

        The caller knows that no thread is writing, or will: that would end the process.
        """
        if not self.is_frozen and self._may_freeze:
            try:
                self._count = Count(self.descriptor)
                self._mapping.protect(self.descriptor, self.size_bytes)
            except OSError:
                return False
            self.is_frozen = self._count.is_mine()
        return self.is_frozen

    def have_large_pages(self, start: int, stop: int) -> bool:
        """These bytes will be written: have their memory now, in large pages, where that can be. Keeps what is there.

        False: there is no whole one, or the kernel would not, or memory is short, or there is no mover. Then small
        pages come one by one.
        """
        library = load.library()
        if library is None or self.large is None:
            return False
        return bool(library.have_large(self.large, self.address + start, stop - start))

    def descriptors(self) -> tuple[int, ...]:
        """Descriptors that a forked child closes."""
        return (self.descriptor,)


class Shared:
    """Frozen memory that another process has made and this one has mapped, to read and to hand on.

    Given back with its last reference.
    """

    is_frozen = True

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        """The descriptor stays the caller's. Raises `Unmappable`."""
        try:
            if fcntl.fcntl(descriptor, GET_SEALS) & SEALS != SEALS:
                raise Unmappable("another process may yet map it to write")
            self.descriptor = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 0)
        except OSError as error:
            raise Unmappable(os.strerror(error.errno or 0)) from error
        try:
            self._count = Count(self.descriptor)
            foreign = Foreign(self.descriptor, size_bytes)
        except (OSError, Unmappable) as error:
            os.close(self.descriptor)
            raise Unmappable(str(error)) from error
        self.address, self.size_bytes = foreign.address, size_bytes
        _know(self, foreign)

    @property
    def counts_here(self) -> bool:
        """No other process counts this memory: then it does here from now on."""
        return self._count.is_mine()

    def freeze(self) -> bool:
        """It is."""
        return True

    def descriptors(self) -> tuple[int, ...]:
        """Descriptors that a forked child closes."""
        return (self.descriptor,)


class Foreign:
    """Sealed memory of another process, mapped to be read from. Its owner closes it."""

    def __init__(self, descriptor: int, size_bytes: int, *, is_writable: bool = False) -> None:
        """The descriptor stays the caller's. Raises `Unmappable`."""
        try:
            seals = fcntl.fcntl(descriptor, GET_SEALS)
            if not seals & SEAL_SHRINK:
                raise Unmappable("its size may change: it is not sealed")
            found = os.fstat(descriptor).st_size
            if not 0 < size_bytes <= found:
                raise Unmappable(f"it has {found} B, not {size_bytes} B")
            if os.fstatvfs(descriptor).f_bsize != mmap.PAGESIZE:
                raise Unmappable("its pages are of a kind that may be missing")  # hugetlbfs: SIGBUS where none is left
            protection = mmap.PROT_READ | mmap.PROT_WRITE if is_writable else mmap.PROT_READ
            self._mapping = MappedPages(descriptor, size_bytes, protection)
        except OSError as error:
            raise Unmappable(os.strerror(error.errno or 0)) from error
        self._mapping.advise(size_bytes, DONTFORK)
        self.address = self._mapping.address
        self.size_bytes = size_bytes

    def close(self) -> None:
        """Its pages are not kept alive by us any more."""
        self._mapping.close()


def scratch(size_bytes: int) -> int:
    """The descriptor of new memory that every process that has it may map and write. Raises `Unmappable`."""
    with ExitStack() as undo:
        try:
            descriptor = _memfd()
            undo.callback(os.close, descriptor)
            os.ftruncate(descriptor, size_bytes)
            fcntl.fcntl(descriptor, ADD_SEALS, SEAL_SEAL | SEAL_SHRINK | SEAL_GROW)
        except OSError as error:
            raise Unmappable(f"a memfd of {size_bytes} B: {os.strerror(error.errno or 0)}") from error
        undo.pop_all()
    return descriptor


Region = Sealed | Shared
_all: "weakref.WeakSet[Region]" = weakref.WeakSet()
_adding = threading.Lock()


def _know(region: Region, mapping: MappedPages | Foreign) -> None:
    """Others can map it as long as it lives. Then it is given back."""
    ending = weakref.finalize(region, _give_back, mapping, region.descriptor, os.getpid())
    ending.atexit = False  # threads that move bytes may outlive the interpreter
    track(region)
    with _adding:
        _all.add(region)


def _begin_anew() -> None:
    """Called in a forked child: another thread may have held the lock. No memory of the parent can be mapped.

    Where that lay something else may lie by now.
    """
    global _adding, _all
    _adding, _all = threading.Lock(), weakref.WeakSet()


os.register_at_fork(after_in_child=_begin_anew)


def regions_of(addresses: Addresses) -> tuple[Region, ...]:
    """The memory that has all of these bytes; empty unless all of it can be mapped. It lives as long as the answer."""
    with _adding:  # other threads add to it
        every = sorted(_all, key=lambda each: each.address)
    begins = [each.address for each in every]
    found: dict[int, Region] = {}
    for address, length in zip(addresses.pairs[0::2], addresses.pairs[1::2], strict=True):
        at = bisect_right(begins, address) - 1
        if at < 0 or address + length > begins[at] + every[at].size_bytes:
            return ()
        found[at] = every[at]
        if len(found) > MAX_REGIONS:
            return ()
    return tuple(found.values())


def large_of(addresses: Addresses) -> "ctypes._Pointer[shapes.Large] | None":
    """For the mover, which writes there: the memory that has all of these bytes, if it is one copy's."""
    found = regions_of(addresses)
    if len(found) != 1 or not isinstance(found[0], Sealed) or not found[0].is_a_copy:
        return None
    return ctypes.pointer(found[0].large) if found[0].large is not None else None


def moved_to(addresses: Addresses, regions: Sequence[tuple[int, int, int]]) -> Addresses:
    """Translates addresses to the mapping of the same bytes, by (address there, size, address here).

    Raises `ValueError` if not all are.
    """
    pairs = addresses.pairs[:]
    each = zip(pairs[0::2], pairs[1::2], strict=True)
    pairs[0::2] = array("Q", [_moved(at, at + size_bytes, regions) for at, size_bytes in each])
    return Addresses(pairs)


def _large(address: int, size_bytes: int) -> shapes.Large | None:
    pages = size_bytes // HUGE_BYTES if address % HUGE_BYTES == 0 else 0
    if not pages:
        return None
    asked = (ctypes.c_ubyte * pages)()
    found = shapes.Large(address=address, size=size_bytes, asked=ctypes.addressof(asked))
    found.held = asked
    return found


def why_not() -> str:
    """Why no memory of this process can be mapped by others; empty where it can."""
    try:
        probe()
    except Unmappable as error:
        return str(error)
    return ""


def has_large_pages() -> bool:
    """Memory of this process that others can map lies in large pages."""
    try:
        return Sealed(2 * HUGE_BYTES).have_large_pages(0, 2 * HUGE_BYTES)
    except Unmappable:
        return False


def probe() -> None:
    """Raises `Unmappable` where others can map no memory of this process."""
    Sealed(mmap.PAGESIZE)


def _moved(start: int, stop: int, regions: Sequence[tuple[int, int, int]]) -> int:
    for there, size_bytes, here in regions:
        if there <= start and stop <= there + size_bytes:
            return start - there + here
    raise ValueError("bytes outside of what can be mapped")


def _give_back(mapping: MappedPages | Foreign, descriptor: int, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child: it has no such mapping, or keeps it; its descriptor is another file by now
    mapping.close()
    os.close(descriptor)


def _close(descriptor: int, owner: int) -> None:
    if os.getpid() == owner:
        os.close(descriptor)


def _memfd() -> int:
    """A new file of no name. Raises `OSError`."""
    create = getattr(os, "memfd_create", None)
    if sys.platform != "linux" or create is None:
        raise OSError(errno.ENOSYS, "no memfd_create")
    try:
        return int(create("tensorhub", CLOEXEC | ALLOW_SEALING | NOEXEC_SEAL))
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel before 6.3
            raise
        return int(create("tensorhub", CLOEXEC | ALLOW_SEALING))


@cache
def _libc() -> ctypes.CDLL:
    found = ctypes.CDLL(None, use_errno=True)
    found.mmap.restype = ctypes.c_void_p
    return found


def _mapped(address: int | None, size_bytes: int, protection: int, flags: int, descriptor: int) -> int:
    arguments = (ctypes.c_int(protection), ctypes.c_int(flags), ctypes.c_int(descriptor), ctypes.c_long(0))
    found = _libc().mmap(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), *arguments)
    if found in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(found)
