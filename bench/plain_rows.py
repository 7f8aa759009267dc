"""What a plain program does to move rows between a process where they lie between others and one where they do not.

Where memory can be read, `process_vm_readv` gets the addresses of 1,024 rows in each call. Over sockets the source
packs 4 MiB at a time and the reader spreads 4 MiB at a time, both by numpy. Two threads or connections; nothing is
verified.
"""

import ctypes
import os
import socket

import numpy as np

from .plain import CALL_BYTES, RawReader, in_parts, libc

MAX_VECTORS = 1024  # of one call (IOV_MAX)
THREADS = 2


def addresses(rows: np.ndarray) -> np.ndarray:
    """[rows, 2]: address and length in bytes of each, as the kernel takes them."""
    found = np.empty((len(rows), 2), np.uint64)
    found[:, 0] = rows.ctypes.data + np.arange(len(rows), dtype=np.uint64) * np.uint64(rows.strides[0])
    found[:, 1] = rows.shape[1]
    return found


def read_rows(pid: int, theirs: np.ndarray, ours: np.ndarray) -> None:
    """Copy rows out of another process's memory; both by `addresses`."""

    def part(start: int, stop: int) -> None:
        for first in range(start, stop, MAX_VECTORS):
            last = min(first + MAX_VECTORS, stop)
            wanted = int(ours[first:last, 1].sum())
            into, out_of = merged(ours[first:last]), merged(theirs[first:last])
            got = libc.process_vm_readv(pid, *_pointed(into), *_pointed(out_of), ctypes.c_ulong(0))
            if got != wanted:
                number = ctypes.get_errno()
                raise OSError(number, f"process_vm_readv: {got} of {wanted} bytes: {os.strerror(number)}")

    in_parts(part, len(ours), THREADS)


def merged(vectors: np.ndarray) -> np.ndarray:
    """One vector where they lie next to each other."""
    size_bytes = vectors[:, 1].sum()
    if vectors[-1, 0] - vectors[0, 0] + vectors[-1, 1] != size_bytes:
        return vectors
    return np.array([[vectors[0, 0], size_bytes]], np.uint64)


def _pointed(vectors: np.ndarray) -> tuple[ctypes.c_void_p, ctypes.c_ulong]:
    return ctypes.c_void_p(vectors.ctypes.data), ctypes.c_ulong(len(vectors))


class Packed:
    """Rows as one run of bytes, of which a slice is packed when it is asked for. Slices begin and end with a row."""

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows

    def __getitem__(self, part: slice) -> memoryview:
        length = self._rows.shape[1]
        return memoryview(np.ascontiguousarray(self._rows[part.start // length : part.stop // length]).reshape(-1))


def receive_rows(reader: RawReader, rows: np.ndarray) -> None:
    """Read what a `RawSource` serves, and spread it over the rows."""
    length = rows.shape[1]

    def receive(sock: socket.socket, start: int, stop: int) -> None:
        packed = np.empty(CALL_BYTES, np.uint8)
        for at in range(start, stop, CALL_BYTES):
            size = min(CALL_BYTES, stop - at)
            if sock.recv_into(memoryview(packed)[:size], size, socket.MSG_WAITALL) != size:
                raise ConnectionError("the source closed the connection")
            rows[at // length : (at + size) // length] = packed[:size].reshape(-1, length)

    reader.share(rows.size, receive)
