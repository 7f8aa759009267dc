"""What a forked child inherits of ours and must not keep: as long as it had a socket, nobody would see its parent die.

A connection ends for its other end when the last process that has it lets go of it. A trainer that forks (a DataLoader,
multiprocessing) and is killed would look alive through its children: readers would wait out the silence limit, the
server the lease, and new readers would be taken in by a listener that nobody serves. So a child gives up, right after
the fork, every descriptor of ours: in its place is /dev/null, so that the number is nobody else's while some inherited
object still knows it. Nothing of this reaches the parent: what is shared with it is not shut down, only let go of.

Across `exec` nothing of ours stays open: Python, and every call that we make ourselves, opens with close-on-exec.
It must never: touch a descriptor that was not opened here.
"""

import contextlib
import os
import socket
from collections.abc import Iterable
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


def tracked(sock: AnySocket) -> AnySocket:
    """A socket that no forked child keeps."""
    _sockets.add(sock)
    return sock


def track(holder: Holder) -> None:
    """Nor what this one has, as long as it lives."""
    _holders.add(holder)


def _let_go() -> None:
    """In a child, before any code of its own."""
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


os.register_at_fork(after_in_child=_let_go)
