"""What a plain program does to move bytes between two processes: the limit that everything else is measured against.

`process_vm_readv` through ctypes, and blocking sockets with `sendall` and `recv_into` on memoryviews, which were
the fastest of what was tried. The sockets are connected beforehand and use cubic, which on loopback beats BBR.

It must never: check, retry or time out anything cleverly; a plain program does not.
"""

import contextlib
import ctypes
import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import Protocol

import xxhash

MIB = 1 << 20
CALL_BYTES = 4 * MIB
HASHED_BYTES = MIB // 2  # copied, then hashed in the core's own cache: of 0.25 to 4 MiB the fastest
PATIENCE_S = 60.0
_RANGE = struct.Struct("<QQ")


class Sliced(Protocol):
    """What a `RawSource` serves: memory, or whatever makes its bytes when they are asked for."""

    def __getitem__(self, part: slice, /) -> memoryview: ...


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


libc = ctypes.CDLL(None, use_errno=True)
libc.process_vm_readv.restype = ctypes.c_ssize_t


def read_memory(pid: int, remote: int, local: int, size_bytes: int, *, threads: int) -> None:
    """Copy out of another process's memory, in calls of 4 MiB."""

    def part(start: int, stop: int) -> None:
        at = start
        while at < stop:
            length = min(CALL_BYTES, stop - at)
            ours, theirs = _Vector(local + at, length), _Vector(remote + at, length)
            got = libc.process_vm_readv(
                pid, ctypes.byref(ours), ctypes.c_ulong(1), ctypes.byref(theirs), ctypes.c_ulong(1), ctypes.c_ulong(0)
            )
            if got <= 0:
                number = ctypes.get_errno()
                raise OSError(number, f"process_vm_readv: {os.strerror(number)}")
            at += got

    in_parts(part, size_bytes, threads)


def read_and_hash(pid: int, remote: int, local: int, view: memoryview, *, threads: int) -> None:
    """The same, and an xxh3-128 of every 4 MiB by the thread that has just copied it: what verification must cost.

    With every argument made beforehand, so that Python has no part in it worth the name.
    """

    def part(start: int, stop: int) -> None:
        ours, theirs = _Vector(), _Vector()
        one = ctypes.c_ulong(1)
        arguments = (ctypes.c_int(pid), ctypes.byref(ours), one, ctypes.byref(theirs), one, ctypes.c_ulong(0))
        for chunk in range(start, stop, CALL_BYTES):
            hasher = xxhash.xxh3_128()
            end = min(chunk + CALL_BYTES, stop)
            for at in range(chunk, end, HASHED_BYTES):
                length = min(HASHED_BYTES, end - at)
                ours.base, theirs.base = local + at, remote + at
                ours.length = theirs.length = length
                if libc.process_vm_readv(*arguments) != length:
                    number = ctypes.get_errno()
                    raise OSError(number, f"process_vm_readv: {os.strerror(number)}")
                hasher.update(view[at : at + length])
            hasher.digest()

    in_parts(part, len(view), threads)


def in_parts(part: Callable[[int, int], None], size_bytes: int, threads: int) -> None:
    """Call `part(start, stop)` for equal shares, each in a thread of its own; raise what one of them raised."""
    share = -(-size_bytes // threads)
    failed: list[BaseException] = []

    def guarded(index: int) -> None:
        try:
            part(index * share, min(size_bytes, (index + 1) * share))
        except Exception as error:  # noqa: BLE001 - the top of a thread; raised again below
            failed.append(error)

    others = [threading.Thread(target=guarded, args=(index,)) for index in range(1, threads)]
    for thread in others:
        thread.start()
    guarded(0)
    for thread in others:
        thread.join()
    if failed:
        raise failed[0]


class RawSource:
    """Serves one buffer over plain sockets: whoever sends a range gets its bytes, by slices of 4 MiB."""

    def __init__(self, view: Sliced, host: str = "127.0.0.1") -> None:
        self._view = view
        self._listener = socket.create_server((host, 0))
        _tune(self._listener)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                _tune(sock)
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError), sock:
            while len(request := sock.recv(_RANGE.size, socket.MSG_WAITALL)) == _RANGE.size:
                at, stop = _RANGE.unpack(request)
                while at < stop:
                    length = min(CALL_BYTES, stop - at)
                    sock.sendall(self._view[at : at + length])
                    at += length

    def close(self) -> None:
        self._listener.close()


class RawReader:
    """Connections to a `RawSource`, kept open over many reads."""

    def __init__(self, host: str, port: int, streams: int) -> None:
        self._socks = [socket.create_connection((host, port), timeout=PATIENCE_S) for _ in range(streams)]
        for sock in self._socks:
            sock.settimeout(None)  # a socket with a timeout polls before each call
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(PATIENCE_S), 0))
            _tune(sock)

    def read(self, view: memoryview) -> None:
        """All of it, an equal share over each connection."""

        def receive(sock: socket.socket, start: int, stop: int) -> None:
            at = start
            while at < stop:
                got = sock.recv_into(view[at : min(at + CALL_BYTES, stop)])
                if got == 0:
                    raise ConnectionError("the source closed the connection")
                at += got

        self.share(len(view), receive)

    def share(self, size_bytes: int, receive: Callable[[socket.socket, int, int], None]) -> None:
        """Ask for an equal share over each connection, and let `receive` take it, each in a thread of its own."""
        share = -(-size_bytes // len(self._socks))

        def part(start: int, stop: int) -> None:
            sock = self._socks[start // share]
            sock.sendall(_RANGE.pack(start, stop))
            receive(sock, start, stop)

        in_parts(part, size_bytes, len(self._socks))

    def close(self) -> None:
        for sock in self._socks:
            sock.close()


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
