"""Work that the worker loop does for a caller who waits elsewhere: in a thread that blocks, or in a loop of its own.

A caller may be interrupted at any instruction (Ctrl-C). So the two share nothing that such a caller could leave locked:
only the loop changes an errand, whoever wants something of it puts that in the loop's queue, and what the caller waits
for is a bare lock, or a future of its own loop, that the worker loop releases.

It must never: keep the loop waiting for a caller, or lose a result that somebody has to take back.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Generic, TypeVar

T = TypeVar("T")
Undo = Callable[[T], Coroutine[object, object, object]]
_log = logging.getLogger(__name__)


class Errand(Generic[T]):
    """One piece of work, for one caller."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Coroutine[object, object, T],
        *,
        undo: Undo[T] | None,
        on_end: Callable[[], object],
        on_settled: Callable[[], object],
    ) -> None:
        """`on_end` and `on_settled` are called in the loop, once at most. `undo` takes back what nobody waits for."""
        self._loop = loop
        self._work = work
        self._undo = undo
        self._on_end = on_end
        self._on_settled = on_settled
        self._task: asyncio.Task[T] | None = None
        self._undoing: asyncio.Task[None] | None = None
        self._is_over = False
        self._is_told = False  # by the caller, that it waits no more
        self._is_abandoned = False  # the loop knows

    def begin(self) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(self._begin)

    def abandon(self) -> None:
        """From any thread: the caller does not wait any more. `on_settled` comes when nothing is left of the work."""
        self._loop.call_soon_threadsafe(self._abandon)
        self._is_told = True

    def abandon_unless_over(self) -> bool:
        """By a caller that is about to raise: abandon it, unless that is what the work has raised, or has been done."""
        task = self._task
        if self._is_told or (task is not None and task.done() and (task.cancelled() or task.exception() is not None)):
            return False
        self.abandon()
        return True

    def outcome(self) -> T:
        """What the work has returned, or raises what it has raised, once it has ended."""
        try:
            assert self._task is not None, "it was never begun"
            return self._task.result()
        finally:
            del self  # a failure's traceback knows this frame

    # --- in the loop --------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if not self._is_abandoned:
            self._task = self._loop.create_task(self._work)
            self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[T]) -> None:
        self._is_over = True
        if self._is_abandoned:
            self._take_back(task)
        self._on_end()

    def _abandon(self) -> None:
        if self._is_abandoned:
            return
        self._is_abandoned = True
        if self._task is None:
            self._work.close()
            self._on_settled()
        elif self._is_over:
            self._take_back(self._task)
        else:
            self._task.cancel()  # where it has just returned, `_ended` takes that back

    def _take_back(self, task: asyncio.Task[T]) -> None:
        """It has ended, and nobody takes what it has brought."""
        if task.cancelled() or task.exception() is not None or self._undo is None:
            self._on_settled()
        else:
            self._undoing = self._loop.create_task(self._undone(self._undo, task.result()))

    async def _undone(self, undo: Undo[T], result: T) -> None:
        try:
            await undo(result)
        except Exception as error:  # noqa: BLE001 - the top of a task that nobody awaits: it is said
            _log.warning("what nobody waited for could not be taken back: %r", error)
        finally:
            self._on_settled()


def release(future: "asyncio.Future[None]", loop: asyncio.AbstractEventLoop) -> None:
    """In the worker loop: a coroutine of that loop need not wait any longer, if it still does."""
    with contextlib.suppress(RuntimeError):  # that loop has ended, and all who waited in it
        loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(None))
