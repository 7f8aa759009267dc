"""Who is connected to a source: strangers, who have not said yet who they are, and those who are welcome.

Whoever can connect may be a stranger, so strangers have little: a second, and room of their own that they take from one
another and never from those who are welcome. A reader says who it is at once, and is a stranger for a moment only.

It must never: be used without its server's lock.
"""

import threading

from .tcp_wire import Wire

MOST_STRANGERS = 64  # at a time, each with a thread; so many more for a moment, who are cut and about to leave


class Door:
    """All connections of one server."""

    def __init__(self, most_welcome: int) -> None:
        self._most_welcome = most_welcome
        self._strangers: dict[Wire, threading.Thread] = {}  # oldest first
        self._welcome: dict[Wire, threading.Thread] = {}

    def __len__(self) -> int:
        return len(self._strangers) + len(self._welcome)

    def enter(self, wire: Wire, thread: threading.Thread) -> bool:
        """A stranger comes, and the oldest one goes if there are too many. False: there is no room at all."""
        if len(self._strangers) >= 2 * MOST_STRANGERS:
            return False
        waiting = [other for other in self._strangers if not other.is_cut]
        if len(waiting) >= MOST_STRANGERS:
            waiting[0].cut()
        self._strangers[wire] = thread
        return True

    def welcome(self, wire: Wire, *, is_further: bool) -> bool:
        """It has said who it is, and may be served. False: there is no room for it.

        Further streams of a read take half of the room at most: the rest is for who is not served at all yet.
        """
        if len(self._welcome) >= (-(-self._most_welcome // 2) if is_further else self._most_welcome):
            return False
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
