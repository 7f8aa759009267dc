"""Threads of ours, and what it means when one cannot be started: that is true for now, and an error of the call.

A thread that dies for want of memory before its first step never says that it has started, and `threading` waits for
that word without a limit. So `Thread` waits for its own first step, and not for ever. Whichever comes first decides,
the step or the end of the wait: a thread that was given up does nothing.

It must never: end a worker because its process is at a limit.
"""

import _thread
import sys
import threading
from collections.abc import Callable

from ..core.errors import Unavailable
from . import shortages
from .shortages import MEMORY, THREADS, NotStarted

START_S = 2.5  # a thread begins within 0.1 s beside ten busy ones; a shared machine stands still for seconds


class _Unawaited(threading.Event):
    """What `threading.Thread.start` waits for at last, without a limit: `Thread` waits by itself."""

    def wait(self, timeout: float | None = None) -> bool:
        return True


class Thread(threading.Thread):
    """A daemon thread. `start` returns once it runs; raises `NotStarted`, and `RuntimeError` at a limit on threads."""

    def __init__(self, target: Callable[..., object], *, name: str, args: tuple[object, ...] = ()) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)
        self._started = _Unawaited()
        self._first = _thread.allocate_lock()  # who has it decides whether this thread does anything
        self._begun = _thread.allocate_lock()
        self._begun.acquire()

    def start(self) -> None:
        super().start()
        if not self._begun.acquire(timeout=START_S) and self._first.acquire(blocking=False):
            raise NotStarted(f"{self.name} has not begun to run within {START_S:g} s")

    def run(self) -> None:
        if self._first.acquire(blocking=False):
            self._begun.release()
            super().run()


def no_thread(name: str, error: BaseException) -> Unavailable:
    """The error of a call that needed one more."""
    shortages.note(error, did=f"it started {name}")
    if isinstance(error, NotStarted | MemoryError):
        return Unavailable(f"{name} needs a thread, and that cannot be started: {error or 'no memory'}", hint=MEMORY)
    return Unavailable(f"this process may start no more threads, and {name} needs one", hint=THREADS)


def start(thread: Thread, *, otherwise: Callable[[], object] = lambda: None) -> None:
    """Start it. If the process may start none, do what is to be done then, and raise `Unavailable`."""
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        otherwise()
        raise no_thread(thread.name, error) from error


def is_ending(error: BaseException) -> bool:
    """The interpreter ends, and no thread begins any more: not a limit, and no later try will help."""
    return sys.is_finalizing() or "shutdown" in str(error)
