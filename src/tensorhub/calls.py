"""Calls that show their progress, and calls that go on while their caller does something else."""

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, Generic, TypeVar

from .protocol.errors import DeadlineExceeded, UsageError
from .runtime.config import parse_seconds
from .runtime.loops import UNWIND_S, LoopThread
from .runtime.statistics import Progress
from .tracebacks import brief_methods

T = TypeVar("T")
Callback = Callable[[Progress], object] | bool  # True: a bar of tqdm

_log = logging.getLogger(__name__)

AFTER_S = 1.0  # a call that has not ended so long after its deadline is stuck


# --- progress ---------------------------------------------------------------------------------------------------------


class Shown:
    """Shows the progress of one call, in the thread or the task that waits for it. An error of its callback ends it."""

    def __init__(
        self, look: Callable[[], Progress | None], look_back: Callable[[], Progress | None], callback: Callback
    ) -> None:
        """`look` tells how far the fill is, `look_back` what the call has filled, if anything. Raises `UsageError`."""
        self._look, self._look_back = look, look_back
        self._bar: Any = None
        if callback is True:
            self._show: Callable[[Progress], object] = self._draw
            self._tqdm = _tqdm()
        elif callable(callback):
            self._show = callback
        else:
            raise UsageError(f"progress={callback!r} is neither True nor a function")
        self._last: Progress | None = None  # that was shown

    def tick(self) -> None:
        """Called some times a second."""
        found = self._look()
        if found is not None and found != self._last:
            self._last = found
            self._show(found)

    def __enter__(self) -> "Shown":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            last = self._look_back() if error is None else None
            if last is not None:
                self._show(last)
        finally:
            if self._bar is not None:
                self._bar.close()

    def _draw(self, found: Progress) -> None:
        if self._bar is None:
            name = f"version {found.version}"
            self._bar = self._tqdm(desc=name, total=found.total_bytes, unit="B", unit_scale=True, unit_divisor=1024)
        self._bar.set_postfix_str(f"from {found.source}" if found.source else "", refresh=False)
        self._bar.update(max(0, found.done_bytes - self._bar.n))


def _tqdm() -> Any:
    try:
        from tqdm.auto import tqdm  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        raise UsageError("progress=True needs tqdm", hint="pip install 'tensorhub[progress]'") from error
    return tqdm


# --- handles ----------------------------------------------------------------------------------------------------------


@brief_methods
class Call(Generic[T]):
    """A call that goes on by itself, until its own timeout at the latest. Made by `begin_update` and the like.

    Any thread may use it. If it is dropped the call goes on, and an error of it is logged.
    """

    def __init__(
        self,
        thread: LoopThread,
        work: Coroutine[object, object, T],
        *,
        deadline: float,
        what: str,
        waits: Callable[[], AbstractContextManager[object]],
    ) -> None:
        """Begins it. Raises what is wrong from the beginning. `waits` makes a block in which a thread waits for it."""
        self._is_seen = True  # its end is known to its caller: nothing is left to log
        self._thread, self._deadline, self._what, self._waits = thread, deadline, what, waits
        begun = thread.wait(_begun(thread, work), deadline=deadline, what=what, undo=_cancelled)
        self._task = begun[0]
        self._is_seen = False

    def __repr__(self) -> str:
        return f"<{self._what}, {'ended' if self.done else 'under way'}>"

    @property
    def done(self) -> bool:
        """It has ended: `wait` returns, or raises, at once."""
        return self._task.done()

    def wait(self, timeout: float | None = None) -> T:
        """Returns what the call returns, and raises what it raises. May be called again.

        `timeout` in seconds is for this wait: after it `DeadlineExceeded` is raised, and the call goes on. Without it
        the call's own timeout ends the wait. Raises `concurrent.futures.CancelledError` after `cancel()`.
        """
        latest = self._deadline + AFTER_S
        deadline = latest if timeout is None else min(latest, time.monotonic() + parse_seconds(timeout, "timeout"))
        with self._waits():
            return self._thread.wait(self._outcome(deadline), deadline=deadline, what=self._what)

    def cancel(self) -> bool:
        """End the call, as an interrupt ends one: returns once nothing of it is left. False if it had ended before.

        After a fill that has begun to write, the tensors are no version until the next `update` or `replicate`.
        """
        what = f"cancel() of {self._what}"
        return self._thread.wait(_cancelled((self._task,)), deadline=time.monotonic() + UNWIND_S, what=what)

    def __del__(self) -> None:
        if not getattr(self, "_is_seen", True) and not sys.is_finalizing():
            with contextlib.suppress(RuntimeError, MemoryError):  # the loop has ended, and all of its workers
                log = partial(_log_failure, self._what)
                self._thread.loop.call_soon_threadsafe(self._task.add_done_callback, log)

    async def _outcome(self, deadline: float) -> T:
        began = time.monotonic()
        await asyncio.wait([self._task], timeout=max(0.0, deadline - began))
        if not self._task.done():
            text = f"{self._what} has not ended within {deadline - began:.3g} s, and goes on"
            raise DeadlineExceeded(text, hint="wait() again, or cancel()")
        self._is_seen = True
        if self._task.cancelled():
            raise CancelledError(f"{self._what} was cancelled")
        return self._task.result()


async def _begun(thread: LoopThread, work: Coroutine[object, object, T]) -> tuple[asyncio.Task[T]]:
    """The call, after its first step: mistakes are found there."""
    task = asyncio.get_running_loop().create_task(work)
    thread.keep(task)
    await asyncio.sleep(0)
    if task.done():
        task.result()
    return (task,)  # no awaitable: it would be awaited


async def _cancelled(begun: tuple[asyncio.Task[T]]) -> bool:
    (task,) = begun
    task.cancel()
    await asyncio.wait([task], timeout=UNWIND_S)
    return task.cancelled()


def _log_failure(what: str, task: "asyncio.Task[Any]") -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        _log.warning("%s has failed, and its caller did not wait for it: %s", what, error)
