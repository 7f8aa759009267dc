"""When a worker's masters are cast into the buffer in which they are published, and when that is cast back.

Casting happens in threads; none of them is left behind, however the call ends. It must never: cast into a buffer that
somebody may read, or write to masters that already are what the buffer is (their owner may have gone on with them).
"""

import asyncio
import threading
import time
from collections.abc import Callable

from ..core.errors import SPOILED_HINT, DeadlineExceeded, UsageError
from ..core.messages import Failure, Holding
from ..core.names import Digest, WorkerId
from ..core.worker.events import Called
from ..memory.registration import Registration
from .driver import Driver
from .loops import in_thread


class Mastering:
    """What one worker's masters are. Used in the worker's loop only."""

    def __init__(self, me: WorkerId) -> None:
        self._me = me
        self._root = Digest("")  # of what the masters were when they were last cast, or given back
        self.is_torn = False  # casting back was cut off: they are no version

    def registered(self) -> None:
        """They are other ones, and their owner stands by them."""
        self.forget()
        self.is_torn = False

    def forget(self) -> None:
        """Whatever the buffer holds from now on, the masters are not it."""
        self._root = Digest("")

    def check(self, registration: Registration | None, verb: str) -> None:
        """Raises `UsageError` if the masters could not take what would be filled in."""
        why = registration.casts.why_not_back if registration is not None and registration.casts is not None else ""
        if why:
            text = f"{verb} on {self._me} could not give back what it reads: {why}"
            raise UsageError(text, hint="register tensors of the dtype that is published, without dtype=")

    def check_whole(self, called: Called, driver: Driver) -> None:
        """Raises `UsageError` if a publish, or the step before it, would take torn masters. The siblings hear of it."""
        is_cast = called.verb == "publish" and driver.worker.held != called.spec
        if self.is_torn and (is_cast or called.claim is not None):
            text = f"the tensors of {self._me} are half of one version and half of another: casting back was cut off"
            driver.missed(called, Failure(UsageError.code, text))
            raise UsageError(text, hint=SPOILED_HINT)

    async def cast(self, registration: Registration, deadline: float, what: str) -> None:
        """Into the buffer, which nobody reads."""
        casts = registration.casts
        if casts is not None:
            await self._run(casts.fill, deadline, f"{what}: casting its tensors")

    def published(self, root: Digest) -> None:
        """The masters have been cast, and that is what is published."""
        self._root = root

    async def give_back(self, registration: Registration | None, held: Holding | None, deadline: float) -> None:
        """To the masters, if that content has come into the buffer since they were last the same."""
        casts = registration.casts if registration is not None else None
        if casts is None or held is None or held.root == self._root:
            return
        self.forget()
        self.is_torn = True
        what = f"version {held.version} is held by {self._me}, but not all of it is in its tensors: casting back"
        await self._run(casts.give_back, deadline, what)
        self._root, self.is_torn = held.root, False

    async def _run(self, work: Callable[[Callable[[], bool]], None], deadline: float, what: str) -> None:
        """In threads, until the deadline at the latest; afterwards nobody casts any more."""
        over, began = threading.Event(), time.monotonic()
        job = asyncio.ensure_future(in_thread(lambda: work(over.is_set), name="cast"))
        try:
            done, _ = await asyncio.wait([job], timeout=max(0.0, deadline - began))
        finally:
            over.set()
            await asyncio.wait([job])  # it ends after the piece that it is at
        if not done and isinstance(job.exception(), Exception):
            text = f"{what} did not end within {time.monotonic() - began:.3g} s"
            raise DeadlineExceeded(text, hint="retry with a longer timeout")
        job.result()
