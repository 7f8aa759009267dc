"""Takes connections on each address that a worker listens on, in a thread for each.

It must never: be left half open, where one of its threads could not be started.
"""

import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from . import shortages
from .forks import made, tracked
from .threads import Thread, start

_AGAIN_S = 0.1  # pause after accept fails for want of file descriptors


class Accepting:
    """Gives every new connection to `take`, which closes it or keeps it."""

    def __init__(self, listening: Sequence[socket.socket], take: Callable[[socket.socket], None], kind: str) -> None:
        self._listening = [tracked(listener) for listener in listening]
        self._closing = threading.Event()
        # only they know `take`, and forget it at their end: it knows who knows this
        self._threads = [
            Thread(self._accept, args=(listener, take), name=f"tensorhub-{kind}-accept") for listener in listening
        ]

    def start(self) -> None:
        """Raises `Unavailable` if the process may start no more threads; nothing is listened on then."""
        for thread in self._threads:
            start(thread, otherwise=self._give_up)

    def close(self) -> None:
        """Take nobody any more."""
        self._closing.set()
        for listener in self._listening:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes who polls it

    def join(self, deadline: float) -> None:
        """Until its threads have ended, but no longer."""
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _give_up(self) -> None:
        self.close()
        for listener in self._listening:
            listener.close()

    def _accept(self, listener: socket.socket, take: Callable[[socket.socket], None]) -> None:
        listener.setblocking(False)  # it is waited for outside of what a fork waits for
        coming = select.poll()
        coming.register(listener, select.POLLIN)
        with listener:
            while not self._closing.is_set():
                try:
                    coming.poll()
                    sock = made(lambda: listener.accept()[0])
                    sock.setblocking(True)  # as some systems do not
                except BlockingIOError:
                    continue  # who came has left, or nobody comes any more
                except OSError as error:
                    shortages.note(error, did="it accepted a reader")
                    self._closing.wait(_AGAIN_S)
                    continue
                try:
                    take(sock)
                except MemoryError:
                    sock.close()
