"""Bytes of another process, read by the kernel straight into ours: `process_vm_readv` through ctypes, without the GIL.

`Addresses` says where the bytes of a stream lie, in this process or in the other. `Seal` is a source's word for as long
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
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

from ..core.errors import TransportMissing
from .local_host import remedy

IOV_MAX = 1024  # of the kernel, for both sides of one call
CALL_BYTES = 32 << 20  # of one call: 2-4 ms, so that a stopped read ends soon; larger ones gain nothing
SEAL_BYTES = 16


class Addresses:
    """A stream's memory: (address, length) of each piece in stream order, neighbours joined."""

    def __init__(self, pairs: "array[int]", first: int = 0) -> None:
        """`pairs` is address, length, address, length, …; `first` the place in the stream of the first of its bytes."""
        self.pairs = pairs
        self._starts = array("Q", accumulate(pairs[1::2], initial=first))
        self.stop = self._starts.pop()

    @classmethod
    def of_ranges(cls, ranges: Iterable[tuple[int, int]]) -> "Addresses":
        return cls(_joined(ranges))

    @classmethod
    def of_views(cls, views: Sequence[memoryview], first: int) -> "Addresses":
        """Of writable memory of this process; the views must outlive the use."""
        return cls(_joined((_address_of(view), view.nbytes) for view in views if view.nbytes), first)

    @classmethod
    def decode(cls, data: memoryview) -> "Addresses":
        """What `pairs.tobytes()` was. Raises `ValueError`."""
        pairs = array("Q")
        pairs.frombytes(data)
        if len(pairs) % 2 or 0 in pairs[1::2]:
            raise ValueError("an address without a length")
        try:
            return cls(pairs)
        except OverflowError as error:
            raise ValueError("more bytes than there are addresses") from error

    def part(self, start: int, stop: int) -> "array[int]":
        """Bytes [start, stop) of the stream as iovecs (address, length, address, …), at most IOV_MAX of them."""
        first = bisect_right(self._starts, start) - 1
        if first + 1 == len(self._starts) or self._starts[first + 1] >= stop:  # one piece, as most parts are
            return array("Q", (self.pairs[2 * first] + start - self._starts[first], stop - start))
        last = min(bisect_left(self._starts, stop), first + IOV_MAX)
        part = self.pairs[2 * first : 2 * last]
        end = self._starts[last - 1] + part[-1]
        if end > stop:
            part[-1] -= end - stop
        before = start - self._starts[first]
        part[0] += before
        part[1] -= before
        return part


def _joined(ranges: Iterable[tuple[int, int]]) -> "array[int]":
    pairs = array("Q")
    end = -1
    for address, length in ranges:
        if not length:
            continue
        if address == end:
            pairs[-1] += length
        else:
            pairs.extend((address, length))
        end = address + length
    return pairs


def _address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class Seal:
    """A source's word that an export lasts."""

    def __init__(self) -> None:
        self.value = secrets.token_bytes(SEAL_BYTES)
        self._memory = ctypes.create_string_buffer(self.value, SEAL_BYTES)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._memory)

    def break_(self) -> None:
        """From now on nothing that anybody reads of this export counts."""
        ctypes.memset(self._memory, 0, SEAL_BYTES)


class Token:
    """A seal as its reader knows it, and room to read it into. For one thread."""

    def __init__(self, address: int, value: bytes) -> None:
        self.value = value
        self.found = ctypes.create_string_buffer(SEAL_BYTES)
        self.theirs = array("Q", (address, SEAL_BYTES))
        self.ours = array("Q", (ctypes.addressof(self.found), SEAL_BYTES))


class Lost(Exception):
    """The other process is gone, or what it had there is."""


class Process:
    """Another process (or this one), to be read from. Thread-safe; close it when no thread reads any more."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._read = _function()
        self._pidfd = -1
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError as error:
            raise Lost(f"process {pid} is gone") from error
        except OSError:  # an old kernel, or a filter: its start time must do
            self._started = _start_time(pid)

    def close(self) -> None:
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    def check(self) -> None:
        """Raises `Lost` once the process is not the one that we began with."""
        if self._pidfd >= 0:
            try:
                signal.pidfd_send_signal(self._pidfd, 0)
            except ProcessLookupError as error:
                raise Lost(f"process {self.pid} is gone") from error
            except OSError:
                return  # a filter forbids to ask: the seal tells afterwards
        elif _start_time(self.pid) != self._started:
            raise Lost(f"process {self.pid} is another one now")

    def read(self, start: int, stop: int, theirs: Addresses, ours: Addresses) -> None:
        """Bytes [start, stop) of the stream from their memory into ours. Raises `Lost`, `TransportMissing`."""
        self.check()
        while start < stop:
            end = min(stop, start + CALL_BYTES)
            start += self._copy(theirs.part(start, end), ours.part(start, end))

    def has(self, token: "Token") -> bool:
        """Whether it has these bytes there now. Raises `Lost`, `TransportMissing`."""
        ctypes.memset(token.found, 0, SEAL_BYTES)
        return self._copy(token.theirs, token.ours) == SEAL_BYTES and token.found.raw == token.value

    def _copy(self, theirs: "array[int]", ours: "array[int]") -> int:
        """One call of the kernel; the number of bytes that it has moved, which is at least one."""
        their_vector, ours_vector = theirs.buffer_info()[0], ours.buffer_info()[0]
        moved = int(self._read(self.pid, ours_vector, len(ours) // 2, their_vector, len(theirs) // 2, 0))
        if moved > 0:
            return moved
        number = ctypes.get_errno()
        if moved < 0 and number in (errno.EPERM, errno.EACCES, errno.ENOSYS):
            text = f"reading the memory of process {self.pid} is refused: {os.strerror(number)}"
            raise TransportMissing(text, hint=remedy())
        raise Lost(f"process {self.pid} cannot be read: {os.strerror(number) if moved < 0 else 'no byte came'}")


def _function() -> "ctypes._NamedFuncPointer":
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except AttributeError as error:
        raise TransportMissing("this C library has no process_vm_readv", hint="use tcp") from error
    vector = (ctypes.c_void_p, ctypes.c_ulong)
    function.argtypes = (ctypes.c_int, *vector, *vector, ctypes.c_ulong)
    function.restype = ctypes.c_ssize_t
    return function


def _start_time(pid: int) -> str:
    """When the process began, in ticks since boot; empty when there is none."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def probe_self() -> None:
    """Raises `TransportMissing` if not even this process can be read: no such call, or a filter."""
    process, seal = Process(os.getpid()), Seal()
    try:
        if not process.has(Token(seal.address, seal.value)):
            raise TransportMissing("process_vm_readv gives other bytes than there are", hint="use tcp")
    except Lost as error:
        raise TransportMissing(f"process_vm_readv does not work here: {error}", hint="use tcp") from error
    finally:
        process.close()
