"""Sends what lies in room that others wait for, and keeps that room no longer than a moment, whatever the peer does.

What the peer has not taken by then is copied, so that the room can go back: the delay is its own, not its neighbours'.
It must never: wait for a peer while it keeps such room.
"""

import select
import socket
import time
from collections.abc import Sequence

from . import views
from .wire_errors import lost


def send(sock: socket.socket, buffers: Sequence[bytes | memoryview], within_s: float) -> bytes:
    """Send them. Returns a copy of what was not taken in time: to be sent next, once their room was given back."""
    deadline = time.monotonic() + within_s
    pending = list(filter(len, map(views.flat, buffers)))
    first, writable = 0, select.poll()
    writable.register(sock, select.POLLOUT)
    try:
        while first < len(pending) and (left_s := deadline - time.monotonic()) > 0:
            try:
                sent = sock.sendmsg(views.batch(pending, first), (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                writable.poll(left_s * 1000)
            else:
                first = views.advance(pending, first, sent)
    except OSError as error:
        raise lost(error) from error
    return b"".join(pending[first:])
