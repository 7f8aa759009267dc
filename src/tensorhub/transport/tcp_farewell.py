"""The end of a conversation: the peer is to read our last words before a reset can take them from it.

A socket that is closed while the peer still speaks is reset, and with a reset goes whatever the peer has not got yet:
the last chunks, and the reason why there are no more. So its words are read for a while. Where our half for reading was
shut, to wake its owner, Linux resets as soon as more words come after our own end. There that end waits until all that
was sent has arrived.

It must never: wait longer than `LINGER_S` in which nothing arrives, or than `MOST_S` for a peer that takes a little now
and then.
"""

import array
import contextlib
import fcntl
import socket
import termios
import time
from collections.abc import Callable

from .tcp_settings import limit_waits

LINGER_S = 0.5
MOST_S = 5.0  # some MiB were sent at most: who takes longer wants our thread, not our words
_LINGER_BYTES = 256 * 1024
_WORDS_BYTES = 16384
_LOOK_AGAIN_S = 0.002  # the kernel tells nobody that all has arrived


def say_goodbye(sock: socket.socket, *, is_deaf: bool, is_cut: Callable[[], bool]) -> None:
    """End our half of the connection, and read what the peer still says. `is_deaf`: our half for reading was shut."""
    with contextlib.suppress(OSError):
        limit_waits(sock, receive_s=LINGER_S, send_s=LINGER_S)
        if is_deaf and sock.family != socket.AF_UNIX:  # there all that was sent is the peer's already
            _await_arrival(sock, is_cut)
        sock.shutdown(socket.SHUT_WR)
        deadline, left = time.monotonic() + LINGER_S, _LINGER_BYTES
        while left > 0 and time.monotonic() < deadline and (heard := len(sock.recv(_WORDS_BYTES))):
            left -= heard


def _await_arrival(sock: socket.socket, is_cut: Callable[[], bool]) -> None:
    """Until the peer's side has all that was sent, or nothing of it arrives any more."""
    least, began = _unsent_bytes(sock), time.monotonic()
    moved = began
    while (unsent := _unsent_bytes(sock)) and not is_cut():
        now = time.monotonic()
        least, moved = (unsent, now) if unsent < least else (least, moved)
        if now >= min(moved + LINGER_S, began + MOST_S):
            return
        time.sleep(_LOOK_AGAIN_S)


def _unsent_bytes(sock: socket.socket) -> int:
    """What the peer's side has not acknowledged; 0 where the kernel does not tell."""
    found = array.array("i", [0])
    with contextlib.suppress(OSError):
        fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, found)
    return found[0]
