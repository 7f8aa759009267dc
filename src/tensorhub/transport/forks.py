"""What a forked child inherits of ours and must not keep: as long as it had a socket, nobody would see its parent die.

A connection ends for its other end when the last process that has it lets go of it. A trainer that forks (a DataLoader,
multiprocessing) and is killed would look alive through its children: readers would wait out the silence limit, the
server the lease, and new readers would be taken in by a listener that nobody serves. So a child gives up, right after
the fork, every descriptor of ours: in its place is /dev/null, so that the number is nobody else's while some inherited
object still knows it. Nothing of this reaches the parent: what is shared with it is not shut down, only let go of.

A descriptor that the kernel has just given us is not known here yet. So it is made, and made known, inside `opening`,
and a fork waits until nobody is inside: not for long, for nothing in there waits for anybody; and never longer than
`MOST_WAIT_S`, so that no fork hangs. Two forks do not wait: one by a library that does not tell Python, and one by a
signal handler in the very thread that is inside.

Across `exec` nothing of ours stays open: Python, and every call that we make ourselves, opens with close-on-exec.
It must never: touch a descriptor that was not opened here, or wait inside `opening`.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar
from weakref import WeakSet


class Holder(Protocol):
    """Who has descriptors."""

    def descriptors(self) -> Iterable[int]:
        """Those that are open now; negative ones do not count."""
        ...


AnySocket = TypeVar("AnySocket", bound=socket.socket)

_sockets: "WeakSet[socket.socket]" = WeakSet()
_holders: "WeakSet[Holder]" = WeakSet()

MOST_WAIT_S = 1.0  # inside it takes microseconds; beside ten busy threads some 50 ms until such a thread has its turn

_opening = threading.RLock()  # a signal handler may fork in the thread that has it
_here = threading.local()  # whether the thread that forks has it for that


def opening() -> AbstractContextManager[object]:
    """Nobody forks while a thread is inside: there a descriptor is made, and made known."""
    return _opening


def made(make: Callable[[], AnySocket]) -> AnySocket:
    """A socket that is known here from its first moment. `make` may not wait."""
    with opening():
        return tracked(make())


def tracked(sock: AnySocket) -> AnySocket:
    """A socket that no forked child keeps."""
    _sockets.add(sock)
    return sock


def track(holder: Holder) -> None:
    """Nor what this one has, as long as it lives."""
    _holders.add(holder)


def _wait_until_known() -> None:
    """By who forks, before."""
    _here.has_it = False
    _here.has_it = _opening.acquire(timeout=MOST_WAIT_S)


def _go_on() -> None:
    """In the parent, after."""
    if _here.has_it:
        _here.has_it = False
        _opening.release()


def _let_go() -> None:
    """In a child, before any code of its own."""
    global _opening
    _opening = threading.RLock()  # whoever was inside is not here
    found = [sock.fileno() for sock in list(_sockets)]
    for holder in list(_holders):
        found += holder.descriptors()
    _sockets.clear()
    _holders.clear()
    found = [descriptor for descriptor in found if descriptor >= 0]
    if not found:
        return
    with contextlib.suppress(OSError):
        os.close(found[0])  # so that there is a number left for what takes their place
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in found:
            if descriptor != null:
                os.dup2(null, descriptor, inheritable=False)
        if null not in found:
            os.close(null)


os.register_at_fork(before=_wait_until_known, after_in_parent=_go_on, after_in_child=_let_go)
