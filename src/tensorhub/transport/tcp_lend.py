"""Memory that a source lends to its socket instead of copying it there: `vmsplice` into a pipe, `splice` to the socket.

The kernel takes references to the pages and hands them down to the network card, or over loopback to the reader, which
copies them once into its tensors. To copy them first costs a source two thirds of its CPU: over loopback, 1 GiB in two
streams on 2 cores, `send` took 0.13 to 0.16 s of the source and this takes 0.04 to 0.08; verified readers got 7.2 to
8.0 GiB/s this way, and 5.4 to 5.8 from `send`.

What is lent is not yet what was sent: a page that changes before its reader has it arrives changed. So

1. Only to a reader that says in its Hello that it checks every chunk's digest.
2. An export that ends says so *behind* what it has lent and stays until the reader has hung up, which is when it has
   taken all of it, or until it is cut off. So a withdrawn export has nothing out with a reader that kept its time.
3. A lent chunk (`tcp_wire.LENT`) that fails its digest is only in doubt: its reader asks for it once more, to be
   copied. Either that is what a corrupt source sends, or the source says that it has gone.
4. Only where a connection is fast, so that a socket full of it is soon with the reader and no withdrawal waits long. On
   a slow link the copy costs nothing that anybody would miss.

Linux only. What the kernel, a sandbox or the kind of memory refuses is copied, and not tried again on that connection.
A pipe takes two descriptors beside the connection's own, so there is none where half of the process's are taken.
It must never: lend memory that is used again for something else in the normal course, as a staging ring is.
"""

import ctypes
import errno
import fcntl
import os
import resource
import sys
import time
from array import array
from collections.abc import Callable

from .forks import track
from .tcp_settings import TcpSettings

IS_THERE = sys.platform == "linux" and hasattr(os, "splice")

PIPE_BYTES = 1 << 20  # what a user without rights may ask for; 256 pages
LEAST_PIPE_BYTES = 1 << 18  # with less, for a user who has many pipes, the calls cost more than the copies
WINDOW_BYTES = 16 << 20  # over which a connection's speed is judged; a socket's buffer hides up to 4 MiB of it

_NONBLOCK, _MORE = 2, 4  # SPLICE_F_*


class Unlendable(Exception):
    """These pages cannot be lent, or not on this system. Nothing of what the last call was given is on its way."""


class Pipe:
    """The way of pages from memory to a socket. For one thread, which closes it."""

    def __init__(self) -> None:
        """Raises `Unlendable`."""
        if not IS_THERE:
            raise Unlendable("vmsplice is a call of Linux")
        try:
            self._out, self._in = os.pipe()
        except OSError as error:
            raise Unlendable(str(error)) from error
        track(self)
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # the lowest free number is given out: so many are taken
        if 0 <= limit <= 2 * self._in:
            self.close()
            raise Unlendable("half of the descriptors are taken: the rest is for connections")
        try:
            size_bytes = fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        except OSError:  # this user has too many pages in pipes
            size_bytes = 0
        if size_bytes < LEAST_PIPE_BYTES:
            self.close()
            raise Unlendable(f"a pipe of {size_bytes} B")

    @property
    def ends(self) -> tuple[int, int]:
        """Where pages go in, and where they come out."""
        return self._in, self._out

    def close(self) -> None:
        closing, self._in, self._out = self.descriptors(), -1, -1
        for descriptor in closing:
            os.close(descriptor)

    def descriptors(self) -> tuple[int, ...]:
        """Both of its ends."""
        return self._in, self._out

    def send(self, descriptor: int, vectors: "array[int]") -> int:
        """Lend the first bytes of at most IOV_MAX pieces (address, length, …) to a blocking socket: how many bytes.

        Raises `Unlendable`, and `OSError` as `socket.send` does.
        """
        address, words = vectors.buffer_info()
        lent = _vmsplice(self._in, address, words // 2, _NONBLOCK)
        if lent <= 0:
            raise Unlendable(os.strerror(ctypes.get_errno()) if lent else "no page went into the pipe")
        more = _MORE if lent < sum(vectors[1::2]) else 0
        left = lent
        while left:
            moved = _splice(self._out, None, descriptor, None, left, more)
            if moved > 0:
                left -= moved
                continue
            number = ctypes.get_errno() if moved else errno.EPIPE
            if moved < 0 and number == errno.EINTR:
                continue
            if number == errno.EINVAL and left == lent:
                raise Unlendable("this socket takes no pages")
            raise OSError(number, os.strerror(number))
        return lent


class Lending:
    """Whether one connection lends, chunk by chunk. For its serving thread."""

    def __init__(self, settings: TcpSettings, clock: Callable[[], float] = time.monotonic) -> None:
        """It begins to once chunks go out fast enough: with a rate of 0 at once."""
        self._settings = settings
        self._clock = clock
        self._since = clock()
        self._bytes = 0
        self._is_fast = settings.lend_rate_bytes_per_s <= 0
        self._is_possible = True
        self._pipe: Pipe | None = None

    def pipe(self, size_bytes: int, pieces: int) -> Pipe | None:
        """The pipe if a chunk of this size in so many pieces is to be lent."""
        if not (self._is_fast and self._is_possible) or size_bytes < pieces * self._settings.lend_piece_bytes:
            return None
        if self._pipe is None:
            try:
                self._pipe = Pipe()
            except Unlendable:
                self._is_possible = False
        return self._pipe

    def sent(self, size_bytes: int) -> None:
        """A chunk went out, however."""
        self._bytes += size_bytes
        if self._bytes >= WINDOW_BYTES:
            now = self._clock()
            self._is_fast = self._bytes >= self._settings.lend_rate_bytes_per_s * (now - self._since)
            self._since, self._bytes = now, 0

    def stop(self) -> None:
        """Everything is copied from here on."""
        self._is_possible = False

    def close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        self.stop()


def _function(name: str, *arguments: object) -> Callable[..., int]:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.argtypes = arguments
    function.restype = ctypes.c_ssize_t
    return function  # type: ignore[no-any-return]


if IS_THERE:
    _vmsplice = _function("vmsplice", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
    _splice = _function(
        "splice", ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
    )
