"""What a worker does in the background, and what has to wait for it: the withdrawal of exports, by their key.

A key may be exported again as soon as its withdrawal has ended, and not before: else the new export would be withdrawn.
Used in the worker's loop only.
"""

import asyncio
from collections.abc import Callable, Coroutine

from .loops import report_end


class Background:
    """Tasks that nobody awaits. Those of one key run one after another."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._tasks: set[asyncio.Task[None]] = set()
        self._last: dict[str, asyncio.Task[None]] = {}  # by key: the newest, while it runs

    def begin(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Do this now."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(report_end)
        return task

    def begin_for(self, key: str, work: Callable[[], Coroutine[object, object, None]]) -> None:
        """Do this once all that was begun for the key before has ended."""
        task = self._last[key] = self.begin(_one_after_another(self._last.get(key), work))
        task.add_done_callback(lambda ended: self._forget(key, ended))

    def once_free(self, key: str, then: Callable[[], None]) -> None:
        """Do this now, or as soon as nothing runs for that key."""
        last = self._last.get(key)
        if last is None:
            then()
        else:
            last.add_done_callback(lambda _: self.once_free(key, then))

    def _forget(self, key: str, ended: asyncio.Task[None]) -> None:
        if self._last.get(key) is ended:
            del self._last[key]


async def _one_after_another(
    first: asyncio.Task[None] | None, second: Callable[[], Coroutine[object, object, None]]
) -> None:
    if first is not None:
        await asyncio.wait([first])
    await second()
