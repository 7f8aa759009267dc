"""Limits the connections of a source: strangers, and readers that have said what they want to read.

Any host may connect, so a stranger has little: a second, and room that strangers share. A new stranger takes the place
of the oldest one of the address that has most. A reader that has said so (the right token, and a key that is there)
has a place until it leaves. Where all places are taken, a new reader gets that of one which asks for nothing.

It must never: be used without its server's lock, or cut a reader that is being served what it asked for.
"""

import threading
from collections import Counter
from collections.abc import Callable

from .tcp_wire import Wire

MOST_STRANGERS = 64  # at a time, each with a thread; so many more for a moment, who are cut and about to leave


class Door:
    """All connections of one server."""

    def __init__(self, most_welcome: int) -> None:
        self._most_welcome = most_welcome
        self._strangers: dict[Wire, threading.Thread] = {}  # oldest first
        self._welcome: dict[Wire, threading.Thread] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._strangers) + len(self._welcome)

    def enter(self, wire: Wire, thread: threading.Thread) -> bool:
        """A stranger comes, and an older one goes if there are too many. False: there is no room at all."""
        if len(self._strangers) >= 2 * MOST_STRANGERS:
            return False
        waiting = [other for other in self._strangers if not other.is_cut]
        if len(waiting) >= MOST_STRANGERS:
            of_each = Counter(other.peer for other in waiting)
            max(waiting, key=lambda other: of_each[other.peer]).cut()  # of several the oldest
        self._strangers[wire] = thread
        return True

    def welcome(self, wire: Wire, *, is_further: bool, idle_s: Callable[[Wire], float], may_idle_s: float) -> bool:
        """It has said what it wants to read, and may be served. False: there is no room for it.

        Further streams of a read take half of the room at most, and nobody's place: the rest is for who is not served
        at all yet. `idle_s` tells how long a reader has asked for nothing; above `may_idle_s` it makes room.
        """
        most = -(-self._most_welcome // 2) if is_further else self._most_welcome
        served = [other for other in self._welcome if not other.is_cut]
        if len(served) >= most:
            idlest = max(served, key=idle_s)  # of several the oldest
            if is_further or idle_s(idlest) <= may_idle_s or len(self._welcome) >= 2 * self._most_welcome:
                return False
            idlest.cut()
        self._welcome[wire] = self._strangers.pop(wire)
        return True

    def leave(self, wire: Wire) -> None:
        """It is gone."""
        self._strangers.pop(wire, None)
        self._welcome.pop(wire, None)

    def cut_all(self) -> list[threading.Thread]:
        """Cut everybody. Returns their threads, which will end."""
        for wire in (*self._strangers, *self._welcome):
            wire.cut()
        return [*self._strangers.values(), *self._welcome.values()]
