"""The worker loop and its threads: whatever they carry, a failure included, they let go of."""

import asyncio
import concurrent.futures
import contextlib
import dis
import errno
import signal
import sys
import threading
import time
import weakref

import pytest

from runtime.kit import eventually
from tensorhub.protocol.errors import DeadlineExceeded, UsageError
from tensorhub.runtime import loops
from tensorhub.runtime.loops import in_thread, loop_thread
from tensorhub.transport import threads


class Burden:
    """What a piece of work knows."""

    def fail(self):
        raise OSError("the work failed")


@pytest.mark.usefixtures("no_collector")
def test_work_that_failed_in_a_thread_is_let_go():
    async def story():
        burden = Burden()
        with pytest.raises(OSError, match="the work failed"):
            await in_thread(burden.fail, name="test")
        return weakref.ref(burden)

    left = asyncio.run(story())
    eventually(lambda: left() is None, "nobody holds what the work knew")


class Interrupt(BaseException):
    """As a Ctrl-C: no `except Exception` sees it."""


class Interrupted:
    """Raises an interrupt in the calling thread, at the n-th instruction of the files that stand between it and us.

    Not before a return: Python looks for signals at the start of a function and after a call, never on the way out.
    """

    FILES = (loops.__file__, loops.__file__, asyncio.base_events.__file__, concurrent.futures._base.__file__)

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame, event, _):
        if frame.f_code.co_filename not in self.FILES:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and not dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN"):
            self.left -= 1
            if self.left == 0:
                raise Interrupt
        return self

    def __enter__(self):
        sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for one such frame here, and not later
        sys.settrace(self)

    def __exit__(self, *_):
        sys.settrace(None)


def interrupted_everywhere(call):
    """Call it again and again, each time with an interrupt one instruction later, until there is none to come."""
    for at in range(1, 10_000):
        interrupted = Interrupted(at)
        try:
            with interrupted:
                call(at)
        except Interrupt:
            yield at
        assert interrupted.left <= 0 or at > 20, "no instruction of ours was seen"
        if interrupted.left > 0:
            return


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")  # interrupted before it was handed over
def test_an_interrupt_at_any_instruction_leaves_a_loop_that_answers(monkeypatch):
    monkeypatch.setattr(loops, "GRACE_S", 0.02)  # of each call that is not interrupted before it waits
    thread = loop_thread()

    async def endless():
        await asyncio.Future()

    async def seven():
        return 7

    def call(_):
        with contextlib.suppress(DeadlineExceeded):
            thread.wait(endless(), deadline=0.0, what="it")

    for at in interrupted_everywhere(call):
        assert thread.wait(seven(), deadline=time.monotonic() + 5, what=f"after the interrupt {at}") == 7


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_what_was_opened_when_its_caller_was_interrupted_is_closed_again():
    thread, made, owned, closed = loop_thread(), [], [], []

    async def make(at):
        made.append(at)
        return at

    async def close(it):
        closed.append(it)

    def call(at):
        found = thread.wait(make(at), deadline=time.monotonic() + 5, what="opening", undo=close)
        owned.append(found)

    for _ in interrupted_everywhere(call):
        pass
    assert made, "some were interrupted after it was opened; how many depends on who runs first"
    assert sorted(owned + closed) == made


def test_a_loop_that_stands_still_is_said_with_what_this_process_was_refused(monkeypatch):
    monkeypatch.setattr(loops, "GRACE_S", 0.0)
    monkeypatch.setattr(threads, "_last", None)
    threads.note(OSError(errno.EMFILE, "Too many open files"), did="it connected to a source")
    with pytest.raises(
        DeadlineExceeded, match=r"met a limit .* ago, when it connected to a source: Too many"
    ) as caught:
        loop_thread().wait(asyncio.Event().wait(), deadline=0.0, what="it")
    assert "was this process stopped" in str(caught.value.hint)


def test_what_is_interrupted_has_unwound_when_its_caller_goes_on():
    thread, ended = loop_thread(), []

    async def endless():
        signal.pthread_kill(caller, signal.SIGUSR1)
        try:
            await asyncio.Future()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    def interrupt(*_):
        raise Interrupt

    caller = threading.get_ident()
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(Interrupt):
            thread.wait(endless(), deadline=time.monotonic() + 30, what="it")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ended == [True]


def test_a_cancelled_coroutine_of_another_loop_takes_back_what_it_had_opened():
    thread, closed = loop_thread(), []
    made = threading.Event()

    async def make():
        made.set()
        return 7

    async def close(it):
        closed.append(it)

    async def story():
        task = asyncio.create_task(thread.run_here(make(), undo=close))
        await asyncio.sleep(0)  # it has asked for it; now this loop does not look until it is there
        assert made.wait(5)
        thread.wait(_nothing(), deadline=time.monotonic() + 5, what="a turn of the loop")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(story())
    assert closed == [7]


async def _nothing():
    pass


@pytest.mark.parametrize("is_awaited", [False, True])
def test_threads_take_short_turns_while_a_call_is_brief(monkeypatch, is_awaited):
    monkeypatch.setattr(loops, "BRIEF_S", 0.05)
    thread, seen, usual_s = loop_thread(), [], 0.004
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(usual_s)

    def is_short():
        return sys.getswitchinterval() == pytest.approx(threads.SHORT_S)

    async def long():
        seen.append(is_short())
        while is_short():  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    async def story():
        await thread.run_here(long())

    try:
        if is_awaited:
            asyncio.run(story())
        else:
            thread.wait(long(), deadline=time.monotonic() + 30, what="it")
        assert seen == [True]
        assert sys.getswitchinterval() == pytest.approx(usual_s)
        with pytest.raises(UsageError):
            thread.wait(_failing(), deadline=time.monotonic() + 30, what="it")
        assert sys.getswitchinterval() == pytest.approx(usual_s)
    finally:
        sys.setswitchinterval(before_s)


async def _failing():
    raise UsageError("no")
