"""The event loop that all workers of a process share, and how other threads hand work to it."""

import _thread
import asyncio
import contextlib
import logging
import os
import selectors
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from ..protocol.errors import Closed, DeadlineExceeded, TensorHubError, UsageError
from ..transport import threads
from ..transport.threads import (
    ShortSwitchInterval,
    Thread,
    block_sigpipe,
    is_ending,
    no_thread,
    start,
    track,
    tracked,
)

# A caller may be interrupted at any instruction (Ctrl-C). So it shares no lock with the loop: only the loop changes a
# call, and the caller waits for a bare lock or a future of its own loop.


T = TypeVar("T")
Undo = Callable[[T], Coroutine[object, object, object]]
_log = logging.getLogger(__name__)


class CrossThreadCall(Generic[T]):
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
        """`on_end` and `on_settled` are called in the loop, once. `undo` takes back a result without a caller."""
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
        """Called from any thread."""
        self._loop.call_soon_threadsafe(self._begin)

    def abandon(self) -> None:
        """Called from any thread: the caller waits no longer. `on_settled` comes when nothing is left of the work."""
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
        """It has ended, and its caller has gone."""
        if task.cancelled() or task.exception() is not None or self._undo is None:
            self._on_settled()
        else:
            self._undoing = self._loop.create_task(self._undone(self._undo, task.result()))

    async def _undone(self, undo: Undo[T], result: T) -> None:
        try:
            await undo(result)
        except Exception as error:  # noqa: BLE001 - the top of a task that is not awaited: it is logged
            _log.warning("the result of a call that was given up could not be taken back: %r", error)
        finally:
            self._on_settled()


def release(future: "asyncio.Future[None]", loop: asyncio.AbstractEventLoop) -> None:
    """Called in the worker loop: ends the wait of a coroutine of that loop."""
    with contextlib.suppress(RuntimeError):  # that loop has ended, and all who waited in it
        loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(None))


# A key may be exported again only after its withdrawal: else the new export would be withdrawn.


class Background:
    """Tasks that are not awaited. Those of one key run one after another."""

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


# A forked child has no threads. It gets a loop for what it opens itself, and does not touch what it inherited.


AGAIN_S = 0.1  # until the next try to start a thread that must be
GRACE_S = 0.8  # a call that has not ended this long after its deadline is given up by its caller: the loop is stuck
OUR_THREAD = "this is the thread of TensorHub in which it would be done"
BRIEF_S = 0.25  # a call begins, or is over: its threads take turns soon, beside a busy one too (decision 0022)
TICK_S = 0.25  # between two looks at the progress of a call
UNWIND_S = 1.0  # for what an interrupt cancels: it takes milliseconds where the loop gets to run


class ForkSafeSelector(selectors.DefaultSelector):
    """A selector whose sockets no forked child keeps, nor itself, which the parent goes on to use."""

    def __init__(self) -> None:
        super().__init__()
        track(self)

    def descriptors(self) -> list[int]:
        """The descriptors of the loop, and its own."""
        if self.get_map() is None:  # closed
            return []
        return [key.fd for key in list(self.get_map().values())] + [self.fileno()]


class _Loop(asyncio.SelectorEventLoop):
    """One that is closed if it cannot be made: asyncio's would fail once more when it is collected."""

    def _make_self_pipe(self) -> None:
        try:
            super()._make_self_pipe()  # type: ignore[misc]
        except BaseException:
            asyncio.BaseEventLoop.close(self)
            raise


def inheritable_loop() -> asyncio.SelectorEventLoop:
    """An event loop that a forked child may inherit: it keeps none of its sockets open. Raises `Unavailable`."""
    with threads.named("it made an event loop"):
        selector = ForkSafeSelector()
        try:
            loop = _Loop(selector)
        except BaseException:
            selector.close()
            raise
    waker = getattr(loop, "_csock", None)  # of its two for itself the one that it does not wait for
    if isinstance(waker, socket.socket):
        tracked(waker)
    return loop


class LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = inheritable_loop()  # its clock is time.monotonic, whatever policy the process has
        self.thread = Thread(self._run, name="tensorhub-worker")
        self._left: set[asyncio.Task[Any]] = set()  # that are not waited for
        start(self.thread, otherwise=self.loop.close)

    def _run(self) -> None:
        block_sigpipe()
        asyncio.set_event_loop(self.loop)
        while not self.loop.is_closed():
            try:
                return self.loop.run_forever()
            except MemoryError:  # between two of its callbacks: it goes on when there is some again
                time.sleep(AGAIN_S)

    def wait(
        self,
        work: Coroutine[object, object, T],
        *,
        deadline: float,
        what: str,
        undo: Undo[T] | None = None,
        tick: Callable[[], None] | None = None,
    ) -> T:
        """Run it in the loop and block until it ends; an interrupt of the caller cancels it.

        `work` keeps its own deadline. If the loop itself is stuck, `DeadlineExceeded` ends the wait soon after. `undo`
        takes back what the work has brought, where it had just ended. An interrupt waits a moment for all that, so
        that the caller finds nothing half done. `tick` is called in the caller's thread, every `TICK_S` until the end.
        """
        try:  # no block: an interrupt at its end would lose what the work has brought
            return wait_in(self.loop, work, deadline=deadline, what=what, undo=undo, tick=tick)
        except threads.KINDS as error:
            if not threads.is_shortage(error):
                raise
            raise threads.unavailable(error, f"it did {what}") from error

    def leaves(self, make_work: Callable[[], Coroutine[object, object, object]]) -> bool:
        """For what a finaliser may do, which runs wherever the collector does: whether it is not to be waited for.

        A thread of ours may be needed for that very work: there it is begun, and goes on by itself. At the end of the
        interpreter our threads stand still, and all that there was to do has been done.
        """
        if sys.is_finalizing():
            return True
        if not isinstance(threading.current_thread(), Thread):
            return False
        hand_over(self.loop, self._begin, make_work)
        return True

    def begin(self, make_work: Callable[[], Coroutine[object, object, object]]) -> None:
        """Called by a finaliser, in any thread: begins the work in the loop, and does not wait."""
        with contextlib.suppress(RuntimeError, MemoryError):  # the loop has ended, and all of its workers
            self.loop.call_soon_threadsafe(self._begin, make_work)

    def _begin(self, make_work: Callable[[], Coroutine[object, object, object]]) -> None:
        self.keep(self.loop.create_task(_to_its_end(make_work())))

    def keep(self, task: "asyncio.Task[Any]") -> None:
        """Called in the loop: the task is referenced until it ends."""
        self._left.add(task)
        task.add_done_callback(self._left.discard)

    async def run_here(
        self, work: Coroutine[object, object, T], *, undo: Undo[T] | None = None, tick: Callable[[], None] | None = None
    ) -> T:
        """Run it in the loop and await it from any loop; a cancelled caller cancels it, as an interrupt of `wait`.

        `tick` is called in the caller's loop, every `TICK_S` until the work ends.
        """
        loop = asyncio.get_running_loop()
        if loop is self.loop:
            with threads.named("it worked for a caller"):
                return await work
        ended, settled = loop.create_future(), loop.create_future()
        call = CrossThreadCall(
            *(self.loop, work),
            undo=undo,
            on_end=partial(release, ended, loop),
            on_settled=partial(release, settled, loop),
        )
        interval = ShortSwitchInterval()
        restoring = loop.call_later(BRIEF_S, interval.restore)
        try:
            interval.shorten()
            call.begin()
            while tick is not None and not (await asyncio.wait([ended], timeout=TICK_S))[0]:
                tick()
            await ended
            interval.restore()
            with threads.named("it worked for a caller"):
                return call.outcome()
        except BaseException:
            if call.abandon_unless_over():
                await asyncio.wait([settled], timeout=UNWIND_S)
            interval.restore()
            del call, work
            raise
        finally:
            restoring.cancel()


def wait_in(
    loop: asyncio.AbstractEventLoop,
    work: Coroutine[object, object, T],
    *,
    deadline: float,
    what: str,
    undo: Undo[T] | None = None,
    tick: Callable[[], None] | None = None,
) -> T:
    """As `LoopThread.wait`, in any loop that runs in another thread. Raises `UsageError` where it could only hang."""
    if _runs_here(loop) or sys.is_finalizing():
        work.close()
        text = f"{what} cannot be waited for here: " + ("the interpreter ends" if sys.is_finalizing() else OUR_THREAD)
        raise UsageError(text, hint="a finaliser (__del__) runs where the collector does: let it close(), no more")
    ended, settled = held_lock(), held_lock()
    call = CrossThreadCall(loop, work, undo=undo, on_end=ended.release, on_settled=settled.release)
    interval, latest = ShortSwitchInterval(), max(deadline, time.monotonic()) + GRACE_S
    try:
        interval.shorten()
        call.begin()
        has_ended = ended.acquire(timeout=min(BRIEF_S, max(0.0, latest - time.monotonic())))
        interval.restore()
        while tick is not None and not has_ended and time.monotonic() < deadline:
            tick()
            has_ended = ended.acquire(timeout=TICK_S)
        if has_ended or ended.acquire(timeout=max(0.0, latest - time.monotonic())):
            return call.outcome()  # nothing may come after it
        call.abandon()
        check_unpatched()
        text = f"{what} did not end by its deadline: this process's worker thread does not get to run"
        text += f"; {limit}" if (limit := threads.recent()[0]) else ""
        raise DeadlineExceeded(text, hint="does a native call hold the GIL, or was this process stopped?")
    except BaseException:
        if call.abandon_unless_over():
            settled.acquire(timeout=UNWIND_S)
        interval.restore()
        del call, work  # a failure's traceback knows this frame, and they the failure
        raise


def warn_unreferenced(found: object, name: str) -> None:
    """Warn that it was not closed. Called once its closing has begun: a filter may turn the warning into an error."""
    text = f"{name} was not closed, and no reference to it is left: it is closed now; call close(), or use `with`"
    warnings.warn(text, ResourceWarning, stacklevel=3, source=found)


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


async def _to_its_end(work: Coroutine[object, object, object]) -> None:
    try:
        await work
    except TensorHubError as error:
        _log.warning("what a finaliser began has failed: %s", error)


def held_lock() -> _thread.LockType:
    """A bare lock: acquiring it is one step, which an interrupt either prevents or finds done."""
    lock = _thread.allocate_lock()
    lock.acquire()
    return lock


_lock = threading.RLock()  # a signal's handler, or a finaliser, may come while its own thread has it
_current: LoopThread | None = None
_inherited: list[object] = []  # keeps a parent's loop alive in the child, so that no finaliser touches its sockets


PATCHERS = (  # who puts greenlets in the place of threads, the question that they answer, and about what
    ("gevent", "gevent.monkey", "is_module_patched", ("threading", "socket", "select")),
    ("eventlet", "eventlet.patcher", "is_monkey_patched", ("thread", "socket", "select")),
)


def check_unpatched() -> None:
    """Raises `UsageError` where threads, sockets or `select` are no longer Python's own: nothing here would run."""
    for library, module, question, parts in PATCHERS:
        is_patched = getattr(sys.modules.get(module), question, None)
        patched = [part for part in parts if is_patched is not None and is_patched(part)]
        if patched:
            text = f"{library} has patched {', '.join(patched)} in this process, and TensorHub needs Python's own"
            remedy = f"let {library} leave thread, socket and select alone, as patch_all(thread=False, socket=False, "
            raise UsageError(text, hint=f"{remedy}select=False) does, or use TensorHub in a process of its own")


def loop_thread() -> LoopThread:
    """This process's worker thread; started if need be. Raises `UsageError` where threads are none."""
    global _current
    check_unpatched()
    with _lock:
        if _current is None or _current.pid != os.getpid():
            _current = LoopThread()
        return _current


def is_worker_loop(loop: asyncio.AbstractEventLoop) -> bool:
    """It is the event loop of this process's worker thread."""
    return _current is not None and _current.loop is loop


def forget_after_fork() -> None:
    """Called in a forked child: the loops belong to the parent."""
    global _current, _lock
    _lock = threading.RLock()
    if _current is not None:
        _inherited.append(_current)
        _current = None


os.register_at_fork(after_in_child=forget_after_fork)


def check_process(pid: int, what: str) -> None:
    """Raises `Closed` in a process that was forked from the one that opened `what`."""
    if os.getpid() != pid:
        hint = "open a new one in the child; with a DataLoader or multiprocessing use the spawn start method"
        raise Closed(f"{what} belongs to process {pid}, from which process {os.getpid()} was forked", hint=hint)


Otherwise = Literal["raise", "wait", "here"]


async def in_thread(work: Callable[[], T], *, name: str, otherwise: Otherwise = "raise") -> T:
    """Run blocking work in a daemon thread of its own, so that it delays neither the loop nor the interpreter's exit.

    A caller that is cancelled goes on at once; the thread ends when its work does. Where the process may start no more
    threads, that is `Unavailable`; or, for what must be done, it is waited for until it may, or done here.
    """
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    arguments = (future, work)
    while True:
        try:
            Thread(_work, args=arguments, name=f"tensorhub-{name}").start()
            break
        except (RuntimeError, MemoryError) as error:
            if otherwise == "here" or is_ending(error):
                return work()
            if otherwise == "raise":
                raise no_thread(f"tensorhub-{name}", error) from error
        await asyncio.sleep(AGAIN_S)
    try:
        return await future
    finally:
        del future, arguments  # a failure's traceback knows this frame, and the future the failure


def hand_over(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: object) -> None:
    """From a thread of ours: have it called in the loop, once there is memory to say so. It may be called twice.

    Raises `RuntimeError` if the loop has closed.
    """
    while True:
        try:
            loop.call_soon_threadsafe(function, *arguments)
            return
        except MemoryError:
            time.sleep(AGAIN_S)


def report_end(task: "asyncio.Task[None]") -> None:
    """Logs the error of a task that is not awaited: it is a defect."""
    if not task.cancelled() and task.exception() is not None:
        _log.error("a task of this worker failed: %r", task.exception(), exc_info=task.exception())


def _work(future: "asyncio.Future[T]", work: Callable[[], T]) -> None:
    """Called in a thread: does the work, and lets the loop settle the future."""
    value, error = None, None
    try:
        value = work()
    except BaseException as caught:  # noqa: BLE001 - the top of a thread: it is raised where it is awaited
        error = caught
    with contextlib.suppress(RuntimeError):  # the loop has closed, and with it the future
        hand_over(future.get_loop(), _settle, future, value, error)
    del future, error  # its traceback knows this frame, and the future knows it


def _settle(future: "asyncio.Future[T]", value: T | None, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)  # type: ignore[arg-type]
