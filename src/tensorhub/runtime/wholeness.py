"""Whether a worker's tensors are a version, whole, or torn; and when masters are cast into the buffer and back.

What is torn is no version, which the worker's machine cannot know: it must not be published, nor a step begun on it.
Casting happens in threads; none of them is left behind, however the call ends. It must never cast into a buffer that
somebody may read, nor write to masters that already are what the buffer is: their owner may have gone on with them.
"""

import asyncio
import threading
import time
from collections.abc import Callable

from ..core.errors import SPOILED, SPOILED_HINT, DeadlineExceeded, UsageError, VersionConflict
from ..core.messages import Failure, Holding, Poisoned, Vacated, Withdrawing
from ..core.names import Digest, Version, WorkerId
from ..core.worker.events import Called
from ..memory.in_place import some
from ..memory.registration import Registration
from .driver import Driver
from .hashing import HELD_HINT
from .loops import in_thread

CUT_OFF = "casting back was cut off, so they are half of one version and half of another"
NOT_BACK = "the version that is held was not cast back into them"
SLEPT = f"before they were suspended they were {SPOILED}"


class Wholeness:
    """Of one worker's tensors, or masters. Used in the worker's loop only."""

    def __init__(self, me: WorkerId) -> None:
        self._me = me
        self._root = Digest("")  # of what the masters were when they were last cast, or given back
        self._torn = ""  # why the tensors are no version, until they are filled or their owner stands by them

    def registered(self, driver: Driver, *, is_resumed: bool) -> None:
        """They are other ones. Their owner stands by them, but for what `resume` only finds again."""
        self.forget()
        if not is_resumed:
            self._torn = ""
        elif isinstance(driver.worker.buffer, Poisoned):
            self._torn = self._torn or SLEPT

    def forget(self) -> None:
        """Whatever the buffer holds from now on, the masters are not it."""
        self._root = Digest("")

    def check(self, registration: Registration | None, verb: str) -> None:
        """Raises `UsageError` if the masters could not take what would be filled in."""
        why = registration.casts.why_not_back if registration is not None and registration.casts is not None else ""
        if why:
            text = f"{verb} on {self._me} could not give back what it reads: {why}"
            raise UsageError(text, hint="register tensors of the dtype that is published, without dtype=")

    def why_torn(self, driver: Driver) -> str:
        """Why the tensors are no version; "" if they are one, or what their owner has made of them.

        A call may fail after its fill has ended well: then the buffer holds what the masters have never been.
        """
        registration, buffer = driver.data.registration, driver.worker.buffer
        casts = registration.casts if registration is not None else None
        held = buffer if isinstance(buffer, Holding | Withdrawing | Vacated) else None
        is_other = casts is not None and held is not None and held.root != self._root
        return self._torn or (NOT_BACK if is_other else "")

    def check_whole(self, called: Called, driver: Driver) -> None:
        """Raises `UsageError` if a publish, or the step before it, would take torn tensors. The siblings hear of it."""
        self._torn = self.why_torn(driver)  # also after an unpublish
        is_cast = called.verb == "publish" and driver.worker.held != called.spec
        if self._torn and (is_cast or called.claim is not None):
            text = f"the tensors of {self._me} are no version: {self._torn}"
            driver.missed(called, Failure(UsageError.code, text))
            raise UsageError(text, hint=SPOILED_HINT)

    async def cast(self, registration: Registration, deadline: float, what: str) -> None:
        """Into the buffer, which nobody reads."""
        casts = registration.casts
        if casts is not None:
            await self._run(casts.fill, deadline, f"{what}: casting its tensors")

    async def check_cast(self, registration: Registration, version: Version, deadline: float) -> None:
        """Raises `VersionConflict`, naming masters, if a cast would not be what the buffer is and is held as.

        Not of torn ones, which are no version whatever they are: what is held was never cast from them.
        """
        if registration.casts is None or self._torn:
            return
        found: list[str] = []
        look = registration.casts.changed
        await self._run(lambda is_over: found.extend(look(is_over)), deadline, f"publish of {self._me}: comparing")
        if found:
            text = f"{self._me} holds version {version}, but these tensors were changed since: {some(found)}"
            raise VersionConflict(text, hint=HELD_HINT)

    def published(self, root: Digest) -> None:
        """The masters have been cast, and that is what is about to be published."""
        self._root = root

    async def give_back(self, registration: Registration | None, held: Holding | None, deadline: float) -> None:
        """To the masters, if that content has come into the buffer since they were last the same."""
        casts = registration.casts if registration is not None else None
        if held is None:
            return
        if casts is None or held.root == self._root:
            self._torn = ""
            return
        self.forget()
        self._torn = CUT_OFF
        what = f"version {held.version} is held by {self._me}, but not all of it is in its tensors: casting back"
        await self._run(casts.give_back, deadline, what)
        self._root, self._torn = held.root, ""

    async def _run(self, work: Callable[[Callable[[], bool]], None], deadline: float, what: str) -> None:
        """In threads, until the deadline at the latest; afterwards nobody casts any more."""
        over, began = threading.Event(), time.monotonic()
        job = asyncio.ensure_future(in_thread(lambda: work(over.is_set), name="cast"))
        job.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # looked at, whoever was cancelled
        try:
            done, _ = await asyncio.wait([job], timeout=max(0.0, deadline - began))
        finally:
            over.set()
            await asyncio.wait([job])  # it ends after the piece that it is at
        if not done and isinstance(job.exception(), Exception):
            text = f"{what} did not end within {deadline - began:.3g} s"
            raise DeadlineExceeded(text, hint="retry with a longer timeout")
        job.result()
