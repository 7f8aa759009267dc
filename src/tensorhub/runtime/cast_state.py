"""One call at a time, casts of published tensors, background unpublish, and suspended tensors."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..memory.describe import some
from ..memory.host_copies import without_memory
from ..memory.registration import Registration, register
from ..protocol.errors import SPOILED, SPOILED_HINT, DeadlineExceeded, NotDrained, UsageError, VersionConflict
from ..protocol.messages import Failure, Holding, Poisoned, Vacated, Withdrawing
from ..protocol.names import Digest, Version, WorkerId
from ..worker.events import Called
from .driver import Driver
from .loops import in_thread

if TYPE_CHECKING:
    from ..memory.registration import type_of_weights


HELD_HINT = "unpublish(), then publish a higher number; mutating(version=...) does both"


# One call at a time. In the block of a `mutating` no call may fill, publish or withdraw the tensors.


BLOCK_HINT = "the block only changes the tensors; its end publishes them, and an exception in it does not"


CHANGING = ("mutating", "replicate", "suspend", "unpublish", "update")  # they end what a block of `using` has


@dataclass
class User:
    """A thread, or a task, in a block of `using`."""

    name: str
    since: float
    depth: int = 0  # blocks inside each other


def present_user() -> object:
    """The task that runs, or else the thread."""
    try:
        return asyncio.current_task() or threading.current_thread()
    except RuntimeError:
        return threading.current_thread()


class CallLock:
    """Of one worker. Calls take it in the worker's loop, blocks of `mutating` in their caller's thread."""

    def __init__(self, me: WorkerId) -> None:
        self._me = me
        self._users: dict[object, User] = {}  # each is changed by its user, and entered in the worker's loop
        self._waiting: list[asyncio.Future[None]] = []
        self.calling = ""  # the call that has not ended
        self._block = ""  # of a `mutating`, that is being run

    @property
    def is_free(self) -> bool:
        """No call is under way, and no block of a `mutating` runs."""
        return not self.calling and not self._block

    def check(self, verb: str) -> None:
        """Raises `UsageError` if the call may not begin now. Changes nothing."""
        if self.calling:
            text = f"{verb} on {self._me} while its {self.calling} has not ended"
            raise UsageError(text, hint="one call at a time on one Weights: wait for the first")
        if self._block:
            raise UsageError(f"{verb} on {self._me} inside the block of its {self._block}", hint=BLOCK_HINT)

    @contextlib.contextmanager
    def of(self, verb: str) -> Iterator[None]:
        """One call, from its first check to its end. The machine hears of it later, if it is hashed for it."""
        self.check(verb)
        self.calling = verb
        try:
            yield
        finally:
            self.calling = ""
            self.wake()

    def check_outside(self, verb: str) -> None:
        """Called by the caller itself. Raises `UsageError` where the call would wait for its own block of `using`."""
        if verb in CHANGING and present_user() in self._users:
            text = f"{verb} on {self._me} inside a block of its using() would wait for itself"
            raise UsageError(text, hint="leave the block first, or begin_update() in it and wait() after it")

    def use(self, user: object, name: str) -> None:
        """The block of `using` begins."""
        self._users.setdefault(user, User(name, time.monotonic())).depth += 1

    def is_using(self, user: object) -> bool:
        """It is in a block of `using` already."""
        return user in self._users

    def leave(self, user: object) -> None:
        """The block of `using` ends. Any thread may call it; a `wake` follows."""
        self._users[user].depth -= 1
        if not self._users[user].depth:
            del self._users[user]

    def used_by(self) -> str:
        """What a call that changes the tensors waits for; "" if it need not wait."""
        now = time.monotonic()
        users = [f"{user.name} for {now - user.since:.3g} s" for user in list(self._users.values())]
        return f"a block of using(), held by {', '.join(users)}" if users else ""

    async def until(self, is_true: Callable[[], bool], deadline: float) -> bool:
        """Wait until it is true, or the deadline. Returns whether it is. It is asked again at each `wake`."""
        while not is_true():
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            try:
                async with asyncio.timeout_at(deadline):
                    await future
            except TimeoutError:
                return is_true()
            finally:
                self._waiting.remove(future)
        return True

    def wake(self) -> None:
        """Something has changed."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    @contextlib.contextmanager
    def block_of(self, version: int) -> Iterator[None]:
        """The block of a `mutating` that has claimed its number."""
        self._block = f"mutating(version={version!r})"
        try:
            yield
        finally:
            self._block = ""


# Tensors that are published from a buffer may change while the buffer is read. So `unpublish` returns at once, and the
# next call waits for its end and raises its error.


class BackgroundUnpublish:
    """The unpublish that is under way behind the caller's back, if there is one; or other work like it."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._task: asyncio.Task[Version | None] | asyncio.Task[None] | None = None

    async def begin(self, work: Coroutine[object, object, Version | None], deadline: float) -> None:
        """Returns when the server has granted it and no new reader may come. Raises what ends it before that."""
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

    def run(self, work: Coroutine[object, object, None]) -> None:
        """The next call waits for its end; nothing else is under way."""
        self._task = asyncio.get_running_loop().create_task(work)
        self._task.add_done_callback(_look_at)

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

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
        """Called when the worker has closed."""
        if self._task is not None:
            self._task.cancel()


def _look_at(task: "asyncio.Task[Version | None] | asyncio.Task[None]") -> None:
    """Its error is raised by the next call, if there is one."""
    if not task.cancelled():
        task.exception()


# Torn tensors are no version, which the worker's machine cannot know. Masters that equal the buffer are not written:
# their owner may have gone on with them.


CUT_OFF = "casting back was cut off, so they are half of one version and half of another"
NOT_BACK = "the version that is held was not cast back into them"
SLEPT = f"before they were suspended they were {SPOILED}"


class CastState:
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
        """Into the buffer, which has no readers."""
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
        """Casts back to the masters, if the buffer has new content since they were last equal."""
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
        """Runs in threads, until the deadline at the latest. Afterwards no thread casts."""
        over, began = threading.Event(), time.monotonic()
        job = asyncio.ensure_future(in_thread(lambda: work(over.is_set), name="cast"))
        job.add_done_callback(
            lambda ended: ended.cancelled() or ended.exception()
        )  # looked at, also when a caller was cancelled
        try:
            done, _ = await asyncio.wait([job], timeout=max(0.0, deadline - began))
        finally:
            over.set()
            await asyncio.wait([job])  # it ends after the piece that it is at
        if not done and isinstance(job.exception(), Exception):
            text = f"{what} did not end within {deadline - began:.3g} s"
            raise DeadlineExceeded(text, hint="retry with a longer timeout")
        job.result()


# Between `suspend` and `resume` a worker keeps the layout of its tensors, and nothing that holds their memory.


class Suspension:
    """Of one worker. Used in the worker's loop only, except for `again` and `is_suspended`."""

    def __init__(self, driver: Driver, unpublishing: BackgroundUnpublish, call_lock: CallLock) -> None:
        self._driver, self._unpublishing, self._call_lock = driver, unpublishing, call_lock
        self._given: tuple[Callable[[], object], object, object, object] | None = (
            None  # what was registered; None while nothing is suspended
        )

    @property
    def is_suspended(self) -> bool:
        """True while casts are suspended. Any thread may ask."""
        return self._given is not None

    def check(self, verb: str) -> None:
        """Raises `UsageError` if the call would need the tensors."""
        if self._given is not None and verb != "unpublish":
            text = f"{verb} on {self._driver.me} while its tensors are suspended"
            raise UsageError(text, hint="resume() first; who only wants to leave calls close()")

    def check_registered(self) -> None:
        """Raises `UsageError` if there is nothing to suspend."""
        if self._driver.data.registration is None:
            raise UsageError(f"suspend() on {self._driver.me} before register()", hint="register the tensors first")

    async def begin(self, deadline: float) -> None:
        """Nothing is held any more: forget where the tensors are, once no thread touches them. A call of its own.

        Raises `UsageError` if another call has begun since the unpublish: a publish serves the tensors.
        """
        with self._call_lock.of("suspend"):
            await self._begin(deadline)

    async def _begin(self, deadline: float) -> None:
        await self._unpublishing.over(deadline, "suspend()")
        worker, data, me = self._driver.worker, self._driver.data, self._driver.me
        if not await self._driver.until(lambda: worker.may_register, deadline):
            text = f"suspend() of {me}: its tensors are still touched by what came before"
            raise NotDrained(text, hint="retry with a longer timeout")
        registration = data.registration
        if registration is not None and self._given is None:
            self._given = registration.given
            data.replace(without_memory(registration))
            registration.close()

    def over(self) -> None:
        """Called when tensors were registered."""
        self._given = None

    def again(self, tensors: "type_of_weights | None") -> Registration:
        """What was suspended, or these tensors, as they are now. In any thread but the loop's: it may take memory.

        Raises `UsageError` if nothing is suspended, or what there is now is laid out otherwise.
        """
        given, before, me = self._given, self._driver.data.registration, self._driver.me
        if given is None or before is None:
            raise UsageError(f"resume() of {me}, which is not suspended", hint="suspend() comes first")
        source, dtype, boxes, leave_out = given
        again = source() if tensors is None else tensors
        found = register(again, dtype, boxes, partial=before.is_partial, leave_out=leave_out)  # type: ignore[arg-type]
        if found.layout_digest != before.layout_digest:
            known = {spec.name: (spec.dtype, spec.shape, spec.strides) for spec in before.layout.tensors}
            now = {spec.name: (spec.dtype, spec.shape, spec.strides) for spec in found.layout.tensors}
            differ = sorted(name for name in known.keys() | now.keys() if known.get(name) != now.get(name))
            what = f"{', '.join(differ[:5])} differ" if differ else "their order differs, or which share memory"
            hint = "register() takes tensors of another layout"
            raise UsageError(f"resume() of {me} with other tensors than were suspended: {what}", hint=hint)
        return found
