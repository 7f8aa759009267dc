"""Bytes of another process, read by the kernel straight into ours: `process_vm_readv` through ctypes, without the GIL.

`vectors` says where the bytes of a stream lie, in this process and in the other. `Seal` is a source's word for as long
as an export lasts: 16 random bytes in its memory, zeroed when the export ends. A reader reads it *after* the bytes.
If it is still there, then these were the right process and the right memory when the bytes were read; if not, nothing
that was read counts. So no answer from the source is waited for, and a process that has got a dead source's PID is
never believed, even if it was asked (a pidfd keeps us from asking).

It must never: write to another process, or take bytes for read that the kernel did not count.
"""

import ctypes
import errno
import os
import secrets
import signal
from array import array
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NoReturn

from ..core.errors import TransportMissing
from . import shortages
from .base import Look
from .forks import track
from .local_host import remedy
from .sealed import Sealed
from .vectors import Addresses, Bridged

CALL_BYTES = 32 << 20  # of one call: 2-4 ms, so that a stopped read ends soon; larger ones gain nothing
CACHED_BYTES = 1 << 20  # copied, then hashed in the near cache; of 512 KiB, threads wait for the GIL more than it saves
SEAL_BYTES = 16
_NOTHING = bytes(SEAL_BYTES)


REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS)


def check_refused(pid: int, number: int) -> None:
    """Raises `TransportMissing` if the kernel does not permit it, `Unavailable` if it has no room for it now."""
    error = OSError(number, os.strerror(number))
    if shortages.is_shortage(error):
        raise shortages.unavailable(error, f"it read the memory of process {pid}")
    if number in REFUSED:
        raise TransportMissing(f"reading the memory of process {pid} is refused: {error.strerror}", hint=remedy())


class Seal:
    """A source's word that an export lasts."""

    def __init__(self, page: Sealed | None = None) -> None:
        """`page`: memory for it alone that readers can map."""
        self.value = secrets.token_bytes(SEAL_BYTES)
        self.page = page
        self._memory = ctypes.create_string_buffer(SEAL_BYTES)
        self.address = page.address if page is not None else ctypes.addressof(self._memory)
        ctypes.memmove(self.address, self.value, SEAL_BYTES)

    def break_(self) -> None:
        """From now on nothing that anybody reads of this export counts."""
        ctypes.memset(self.address, 0, SEAL_BYTES)


class Call:
    """The arguments of a call that copies one piece, made once: to make them takes longer than to copy 64 KiB.

    For one thread. Every argument is a C object already, so that ctypes converts nothing.
    """

    def __init__(self, pid: int) -> None:
        self._ours, self._theirs = (ctypes.c_uint64 * 2)(), (ctypes.c_uint64 * 2)()
        one, flags = ctypes.c_ulong(1), ctypes.c_ulong(0)
        self.arguments = (ctypes.c_int(pid), ctypes.byref(self._ours), one, ctypes.byref(self._theirs), one, flags)

    def of(self, theirs: int, ours: int, size_bytes: int) -> tuple[object, ...]:
        """The arguments that copy so many bytes from their address to ours."""
        self._theirs[0], self._ours[0] = theirs, ours
        self._theirs[1] = self._ours[1] = size_bytes
        return self.arguments


class Token:
    """A seal as its reader knows it, and room to read it into. For one thread."""

    def __init__(self, address: int, value: bytes) -> None:
        self.address = address
        self.value = value
        self.found = ctypes.create_string_buffer(SEAL_BYTES)
        self.found_address = ctypes.addressof(self.found)


class Lost(Exception):
    """The other process is gone, or what it had there is."""


class Process:
    """Another process (or this one), to be read from. Thread-safe; close it when no thread reads any more."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._read = _function()
        self._pidfd = -1
        track(self)
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError as error:
            raise Lost(f"process {pid} is gone") from error
        except OSError as error:  # an old kernel, or a filter: its start time must do
            shortages.note(error, did="it looked at a source's process")
            try:
                self._started = _start_time(pid)
            except OSError as unknown:  # nothing would tell it from another one later
                if shortages.is_shortage(unknown):
                    raise shortages.unavailable(unknown, "it looked at a source's process") from unknown
                raise TransportMissing(f"when process {pid} began cannot be found out: {unknown.strerror}") from unknown

    @property
    def pidfd(self) -> int:
        """-1 where there is none."""
        return self._pidfd

    def close(self) -> None:
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    def descriptors(self) -> tuple[int, ...]:
        """That of the process, if the kernel has such."""
        return (self._pidfd,)

    def check(self) -> None:
        """Raises `Lost` once the process is not the one that we began with."""
        if self._pidfd >= 0:
            try:
                signal.pidfd_send_signal(self._pidfd, 0)
            except ProcessLookupError as error:
                raise Lost(f"process {self.pid} is gone") from error
            except OSError:
                pass  # a filter forbids to ask: the seal tells afterwards
            return
        with suppress(OSError):  # if it cannot be found out now, the seal tells too
            if _start_time(self.pid) != self._started:
                raise Lost(f"process {self.pid} is another one now")

    def read(self, start: int, stop: int, theirs: Addresses, ours: Addresses, call: Call) -> None:
        """Bytes [start, stop) of the stream from their memory into ours. Raises `Lost`, `TransportMissing`.

        `call` is this process's and this thread's own.
        """
        self.check()
        while start < stop:
            end = min(stop, start + CALL_BYTES)
            from_, into = theirs.whole(start, end), ours.whole(start, end)
            if from_ and into:
                moved = self._read(*call.of(from_, into, end - start))
            else:
                moved = self._copy(theirs.part(start, end), ours.part(start, end))
            if moved <= 0:
                self._failed(moved)
            start += moved

    def read_bridged(self, start: int, stop: int, bridged: Bridged) -> int:
        """As much of [start, stop) as can be read that way; returns where to go on. Raises as `read`."""
        self.check()
        while start < stop:
            theirs, ours, size_bytes = bridged.part(start, min(stop, start + CALL_BYTES))
            if self._copy(theirs, ours) != sum(ours[1::2]):
                return start  # a page is not there: `read` finds out whether a tensor's or, in vain, a gap's
            start += size_bytes
        return start

    def read_piece(self, theirs: int, ours: int, view: memoryview, look: Look | None, call: Call) -> None:
        """What is at their address into `view`, which is at ours, and shown piecemeal. Raises like `read`.

        Nothing is in this loop that need not be: what it touches comes back from a cold cache each time.
        """
        self.check()
        read, of = self._read, call.of
        for first in range(0, len(view), CALL_BYTES if look is None else CACHED_BYTES):
            part = view[first : first + (CALL_BYTES if look is None else CACHED_BYTES)]
            at, end = first, first + len(part)
            while at < end:
                moved = read(*of(theirs + at, ours + at, end - at))
                if moved <= 0:
                    self._failed(moved)
                at += moved
            if look is not None:
                look(part)

    def has(self, token: Token, call: Call) -> bool:
        """Whether it has these bytes there now. Raises `Lost`, `TransportMissing`."""
        token.found.raw = _NOTHING
        moved = self._read(*call.of(token.address, token.found_address, SEAL_BYTES))
        if moved <= 0:
            self._failed(moved)
        return moved == SEAL_BYTES and token.found.raw == token.value

    def _copy(self, theirs: "array[int]", ours: "array[int]") -> int:
        """One call of the kernel for many pieces; the number of bytes that it has moved, or -1."""
        vectors = []
        for pairs in (ours, theirs):
            vectors += [ctypes.c_void_p(pairs.buffer_info()[0]), ctypes.c_ulong(len(pairs) // 2)]
        return int(self._read(ctypes.c_int(self.pid), *vectors, ctypes.c_ulong(0)))

    def _failed(self, moved: int) -> NoReturn:
        number = ctypes.get_errno()
        if moved < 0:
            check_refused(self.pid, number)
        raise Lost(f"process {self.pid} cannot be read: {os.strerror(number) if moved < 0 else 'no byte came'}")


@cache
def _function() -> "ctypes._NamedFuncPointer":
    """Once for all reads: ctypes makes a class of its own for every library that it opens, and lets it lie about."""
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except AttributeError as error:
        raise TransportMissing("this C library has no process_vm_readv", hint="use tcp") from error
    function.restype = ctypes.c_ssize_t  # and no argtypes: whoever calls it brings C objects
    return function


def _start_time(pid: int) -> str:
    """When the process began, in ticks since boot. Raises `Lost` where there is none, `OSError` where none can tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError) as error:
        raise Lost(f"process {pid} is gone") from error


def probe_self() -> None:
    """Raises `TransportMissing` if not even this process can be read: no such call, or a filter."""
    process, seal = Process(os.getpid()), Seal()
    try:
        if not process.has(Token(seal.address, seal.value), Call(process.pid)):
            raise TransportMissing("process_vm_readv gives other bytes than there are", hint="use tcp")
    except Lost as error:
        raise TransportMissing(f"process_vm_readv does not work here: {error}", hint="use tcp") from error
    finally:
        process.close()
