"""Files and connections that a reference server's process may open: as many as it can have, and a word before the last.

Where none is left, the event loop closes whoever connects, or lets them wait, and says nothing that a user understands.
"""

import errno
import logging
import os
import resource
from math import inf

_log = logging.getLogger(__name__)

FEW = 4096  # most fleets are smaller, and `Descriptors` says when it comes to that
RESERVE = 64  # a server with no worker has about ten open
SAY_EVERY_S = 60.0
HINT = "raise `ulimit -n` (LimitNOFILE of systemd)"


def raise_limit() -> int:
    """Let this process open as many as it may. Returns how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or soft == hard:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # the system has another limit below
        return soft
    return hard


def check_limit(limit: int, connections: int) -> None:
    """Say so if so many connections are more than it may open: a warning only where that is few."""
    if limit != resource.RLIM_INFINITY and limit < connections + RESERVE:
        text = "this process may open %d files and connections, and a full server needs %d: %s,"
        level = logging.WARNING if limit < FEW else logging.INFO
        _log.log(level, f"{text} or lower TENSORHUB_MOST_WORKERS", limit, connections + RESERVE, HINT)


class Descriptors:
    """Looks whether any are left. A new one has the lowest number that is free, so that one tells of all."""

    def __init__(self) -> None:
        self._was_short = False
        self._said_at = -inf

    def look(self, now: float) -> bool:
        """Whether next to none are left. Says so once until there are again, and once a minute at most."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        was_short, self._was_short = self._was_short, _lowest_free() >= limit - min(RESERVE, limit // 8)
        if self._was_short and not was_short and now - self._said_at >= SAY_EVERY_S:
            self._said_at = now
            _log.warning(
                "next to all of the %d files and connections that this process may open are open: "
                "workers are turned away. Is that all workers? Then %s",
                *(limit, HINT),
            )
        return self._was_short


def _lowest_free() -> float:
    try:
        found = os.open(os.devnull, os.O_RDONLY)
    except OSError as error:
        return inf if error.errno in (errno.EMFILE, errno.ENFILE) else 0
    os.close(found)
    return found
