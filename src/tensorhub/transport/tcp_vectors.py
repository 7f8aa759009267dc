"""`sendmsg` and `recvmsg` with a ready table of addresses, through ctypes, without the GIL.

Python's own calls want a memoryview for each piece and look at every one of them, in each call again: 0.1 us, which for
a tensor of 4 KiB is as much as it takes to copy it. Here the kernel gets the table as it is (`vectors.Addresses`).

Linux only, whose layout of `struct msghdr` this is; elsewhere, and for a few large pieces, `Wire` uses Python's calls.
It must never: keep a table's address beyond the call.
"""

import ctypes
import errno
import os
import sys
from array import array
from collections.abc import Callable

IS_THERE = sys.platform == "linux"


class _Message(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_size", ctypes.c_uint32),
        ("vectors", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_size", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


_Function = Callable[[int, object, int], int]


def _function(name: str) -> _Function | None:
    if not IS_THERE:
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.argtypes = (ctypes.c_int, ctypes.POINTER(_Message), ctypes.c_int)
    function.restype = ctypes.c_ssize_t
    return function  # type: ignore[no-any-return]


_send, _receive = _function("sendmsg"), _function("recvmsg")
_NO_SIGNAL = 0x4000  # MSG_NOSIGNAL: a peer that left is an error here, not the end of the process


def send(descriptor: int, vectors: "array[int]") -> int:
    """Bytes sent, at least one. Raises `OSError` as `socket.sendmsg` does."""
    return _call(_send, descriptor, vectors, _NO_SIGNAL)


def receive(descriptor: int, vectors: "array[int]") -> int:
    """Bytes received; 0 when the peer has closed. Raises `OSError` as `socket.recvmsg_into` does."""
    return _call(_receive, descriptor, vectors, 0)


def _call(function: _Function | None, descriptor: int, vectors: "array[int]", flags: int) -> int:
    assert function is not None, "not on this system"
    address, words = vectors.buffer_info()
    message = _Message(vectors=address, count=words // 2)
    while True:
        moved = function(descriptor, message, flags)
        if moved >= 0:
            return moved
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
