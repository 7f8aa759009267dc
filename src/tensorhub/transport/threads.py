"""Threads of ours, and what it means when one cannot be started: that is true for now, and an error of the call.

It must never: end a worker because its process is at a limit.
"""

import sys
import threading
from collections.abc import Callable

from ..core.errors import Unavailable

HINT = "raise the limit on threads (`ulimit -u`, or pids.max of the container's cgroup), or start fewer; then retry"


def no_thread(name: str) -> Unavailable:
    """The error of a call that needed one more."""
    return Unavailable(f"this process may start no more threads, and {name} needs one", hint=HINT)


def start(thread: threading.Thread, *, otherwise: Callable[[], object] = lambda: None) -> None:
    """Start it. If the process may start none, do what is to be done then, and raise `Unavailable`."""
    try:
        thread.start()
    except RuntimeError as error:
        otherwise()
        raise no_thread(thread.name) from error


def is_ending(error: RuntimeError) -> bool:
    """The interpreter ends, and no thread begins any more: not a limit, and no later try will help."""
    return sys.is_finalizing() or "shutdown" in str(error)
