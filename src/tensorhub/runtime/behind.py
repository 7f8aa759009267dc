"""An unpublish for which its caller does not wait: nobody reads what he is about to change.

Tensors that are published from a buffer may change while the buffer is still read. So `unpublish` returns as soon as
the version is being withdrawn, and whatever is called next waits for the end of that, and raises what went wrong there.

Used in the worker's loop only. It must never: let a second call begin while the first is under way.
"""

import asyncio
from collections.abc import Callable, Coroutine

from ..core.errors import DeadlineExceeded
from ..core.names import Version
from .driver import Driver


class Behind:
    """The unpublish that is under way behind the caller's back, if there is one."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._task: asyncio.Task[Version | None] | None = None

    async def begin(self, work: Coroutine[object, object, Version | None], deadline: float) -> None:
        """Returns when the server has granted it and nobody new may read. Raises what ends it before that."""
        loop, worker = asyncio.get_running_loop(), self._driver.worker
        task = loop.create_task(work)
        granted = loop.create_task(self._driver.until(lambda: worker.is_withdrawing, deadline))
        try:
            await asyncio.wait([task, granted], return_when=asyncio.FIRST_COMPLETED)
            if granted.done() and granted.exception() is not None:  # the worker has gone: no grant
                await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait([task])
            raise
        finally:
            granted.cancel()
        if task.done():
            task.result()
            return
        self._task = task
        task.add_done_callback(_look_at)

    async def over(
        self, deadline: float | None, what: str, missed: Callable[[BaseException], None] | None = None
    ) -> None:
        """Wait for its end, and raise what went wrong. Then there is none any more.

        `missed` is told what is raised: the siblings wait for who does not come to the call that this barred.
        """
        try:
            await self._over(deadline, what)
        except BaseException as error:
            if missed is not None:
                missed(error)
            raise

    async def _over(self, deadline: float | None, what: str) -> None:
        task = self._task
        if task is None:
            return
        left_s = None if deadline is None else max(0.0, deadline - asyncio.get_running_loop().time())
        await asyncio.wait([task], timeout=left_s)
        if not task.done():
            text = f"{what} of {self._driver.me} waits for those who still read the version before it"
            raise DeadlineExceeded(text, hint="they are cut off after half of the timeout of unpublish()")
        self._task = None
        task.result()

    def then(self, function: Callable[[], None]) -> None:
        """Call it once that is over; now, if there is none."""
        if self._task is None or self._task.done():
            function()
        else:
            self._task.add_done_callback(lambda _: function())

    def end(self) -> None:
        """The worker has gone."""
        if self._task is not None:
            self._task.cancel()


def _look_at(task: "asyncio.Task[Version | None]") -> None:
    """Its error is raised by the next call, if there is one."""
    if not task.cancelled():
        task.exception()
