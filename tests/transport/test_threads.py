"""Threads of transports: how they start and fail, shortages, the switch interval, forks, CUDA graph captures."""

import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

import pytest

from tensorhub.protocol.errors import SourceLost, Unavailable
from tensorhub.transport import threads
from tensorhub.transport.base import Export, Progress
from tensorhub.transport.threads import RELAXED, SHORT_S, ShortSwitchInterval, Thread, beside_captures, scope, start

from . import kit
from .conftest import Make
from .kit import DEADLINE_S, Target, content, full, read_all, start_read

CHUNK = 1 << 16


# -- starting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("comes_late", [False, True])
def test_a_thread_that_does_not_begin_is_an_error_and_does_nothing_later(
    comes_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "START_S", 0.05)
    begin, may_go = Thread._bootstrap, threading.Event()  # type: ignore[attr-defined]

    def bootstrap(self: Thread) -> None:
        if comes_late:  # else it dies, as one for which there is no memory
            may_go.wait(DEADLINE_S)
            begin(self)

    monkeypatch.setattr(Thread, "_bootstrap", bootstrap)
    ran: list[None] = []
    thread = Thread(lambda: ran.append(None), name="tensorhub-test")
    with pytest.raises(Unavailable, match="tensorhub-test needs a thread") as caught:
        start(thread)
    assert "memory" in str(caught.value.hint)
    if not comes_late:
        threading._limbo.pop(thread)  # type: ignore[attr-defined]  # where Python leaves it
        return
    may_go.set()
    assert thread._started.is_set() or threading.Event.wait(thread._started, DEADLINE_S)
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert not ran


# -- a context manager that raises another error keeps nothing of the first one ----------------------------------------


class Tensor:
    """What frames on the way know."""


@scope
def block() -> Iterator[str]:
    try:
        yield "given"
    except KeyError:
        pass
    except OSError as error:
        raise LookupError from error


@pytest.mark.usefixtures("no_collector")
def test_nothing_is_kept_of_an_error_that_became_another() -> None:
    """With `contextlib` it would be, from Python 3.12 on."""

    def fails() -> "weakref.ref[Tensor]":
        tensor = Tensor()
        try:
            with block():
                raise OSError(tensor)
        except LookupError:
            return weakref.ref(tensor)

    assert fails()() is None
    with block() as found:
        raise KeyError
    assert found == "given"
    for error in (StopIteration("this one"), RuntimeError("this one")):
        with pytest.raises(type(error)) as caught, block():
            raise error
        assert caught.value is error


# -- shortages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tcp-3", "local-3"], indirect=True)
def test_a_reader_without_a_descriptor_knows_that_it_met_a_limit(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    class Limited(socket.socket):
        def __init__(self, *arguments: object, **named: object) -> None:
            if "-read-" in threading.current_thread().name:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            super().__init__(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(threads, "_last", None)
    right, source, reader = content(64), make(), make()
    source.export(full("k", right, 64))
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", Limited)
        error = read_all(reader, source.endpoint, "k", Target(right, 64))
    assert isinstance(error, Unavailable), "another try may find one"
    assert "when it connected to a source: [Errno 24] Too many open files" in str(error)
    assert threads.recent()[0].endswith("when it connected to a source: Too many open files")
    assert read_all(reader, source.endpoint, "k", Target(right, 64)) is None


def test_a_library_that_cannot_be_mapped_for_want_of_memory_is_a_shortage() -> None:
    """Its ImportError has no number (torch's: "failed to map segment from shared object")."""
    code = """
import resource
from tensorhub.transport.threads import is_shortage
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
_, most = resource.getrlimit(resource.RLIMIT_AS)
before = is_shortage(ImportError("x"))
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), most))
short = is_shortage(ImportError("x"))
resource.setrlimit(resource.RLIMIT_AS, (most, most))
print(before, short, is_shortage(ImportError("x")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["False", "True", "False"]


# -- the switch interval -----------------------------------------------------------------------------------------------


USUAL_S = 0.02  # no default of any program


@pytest.fixture
def usual() -> Iterator[None]:
    ShortSwitchInterval._wanting.clear()  # of threads that a test before this one has left
    before = sys.getswitchinterval()
    sys.setswitchinterval(USUAL_S)
    yield
    sys.setswitchinterval(before)


def is_short() -> bool:
    return sys.getswitchinterval() == pytest.approx(SHORT_S)


def is_usual() -> bool:
    return sys.getswitchinterval() == pytest.approx(USUAL_S)


@pytest.mark.usefixtures("usual")
def test_the_interval_is_short_until_the_last_block_has_ended_and_what_the_program_sets_stays() -> None:
    with ShortSwitchInterval() as interval:
        interval.restore()
        interval.restore()
        assert is_usual()
        interval.shorten()
        interval.shorten()
        other = threading.Thread(target=lambda: ShortSwitchInterval().__enter__().restore())
        other.start()
        other.join()
        assert is_short()
    assert is_usual()
    for set_s in (0.5, 0.00005):
        with ShortSwitchInterval():
            sys.setswitchinterval(set_s)
        assert sys.getswitchinterval() == pytest.approx(set_s)
        with ShortSwitchInterval():
            assert sys.getswitchinterval() == pytest.approx(min(set_s, SHORT_S))
        assert sys.getswitchinterval() == pytest.approx(set_s)


class Looking(Target):
    """Notes how long threads wait for the interpreter when it is asked what it wants."""

    began_short = False

    def begin(self, manifest: bytes) -> Sequence[int]:
        self.began_short = is_short()
        return super().begin(manifest)


@pytest.mark.usefixtures("usual")
@pytest.mark.parametrize("kind", ["tcp-3", "tcp-python"], indirect=True)
def test_a_read_begins_with_the_short_interval_and_goes_on_with_the_usual_one(make: Make) -> None:
    right, source, reader = content(8 * CHUNK), make(), make()
    progress, target = Progress(8), Looking(right, CHUNK)
    source.export(Export("k", b"manifest", CHUNK, kit.Pieces(right), progress))
    _, ended = start_read(reader, source.endpoint, "k", target)
    progress.mark(0)
    assert target.progress.wait(0, DEADLINE_S)
    assert target.began_short
    kit.until(is_usual, "the interval is the usual one while the read waits for its second chunk")
    for chunk in range(1, 8):
        progress.mark(chunk)
    assert ended.wait() is None
    kit.until(is_usual, "the interval is the usual one when the read has ended")
    assert isinstance(read_all(reader, source.endpoint, "unknown", Looking(right, CHUNK)), SourceLost)
    kit.until(is_usual, "the interval is the usual one after a refusal")


# -- forks: a child keeps no socket of ours, and no fork hangs ---------------------------------------------------------


WAIT_S = 0.3  # for a fork that comes meanwhile, and is held up


class Slow(WeakSet[socket.socket]):
    """Knows the sockets of ours; the first one of a thread of that name it learns of late, if no fork comes before."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.link = name, ""
        self.is_made, self.is_forked = threading.Event(), threading.Event()

    def add(self, sock: socket.socket) -> None:
        if self.name in threading.current_thread().name and not self.is_made.is_set():
            self.link = os.readlink(f"/proc/self/fd/{sock.fileno()}")
            self.is_made.set()
            self.is_forked.wait(WAIT_S)
        super().add(sock)


def links() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own
            yield os.readlink(f"/proc/self/fd/{name}")


def child_says(judge: Callable[[], bool], forked: Callable[[], object] = lambda: None) -> bool:
    """What it finds in a child. `forked` is called in the parent at once."""
    child = os.fork()
    if not child:
        code = 2
        try:
            code = int(not judge())
        finally:
            os._exit(code)
    forked()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 1), "its judge failed"
    return code == 0


@pytest.mark.parametrize(("kind", "end"), [("tcp-1", "-accept"), ("local-1", "-read-")], indirect=["kind"])
def test_a_child_has_no_socket_that_was_just_made(make: Make, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, source, reader = content(64), make(), make()
    source.export(full("k", right, 64))
    monkeypatch.setattr(threads, "MAX_WAIT_S", DEADLINE_S)
    slow = Slow(end)
    for sock in list(threads._sockets):
        slow.add(sock)
    monkeypatch.setattr(threads, "_sockets", slow)
    target = Target(right, 64)
    _, ended = start_read(reader, source.endpoint, "k", target)
    assert slow.is_made.wait(DEADLINE_S)
    assert slow.link.startswith("socket:")
    has_none = child_says(lambda: slow.link not in list(links()), slow.is_forked.set)
    assert ended.wait() is None
    assert target.buffer == right
    assert has_none


def can_open() -> bool:
    """Another thread, too: no thread has kept the lock."""
    done: list[bool] = []

    def open_one() -> None:
        threads.made(socket.socket).close()
        done.append(True)

    thread = threading.Thread(target=open_one, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    return bool(done)


def test_no_fork_waits_for_ever(nothing_left_behind: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with threads.opening():  # as a signal handler might
        assert child_says(can_open)
        assert child_says(can_open)
    monkeypatch.setattr(threads, "MAX_WAIT_S", 0.05)
    is_inside, may_leave = threading.Event(), threading.Event()

    def stay() -> None:
        with threads.opening():
            is_inside.set()
            may_leave.wait(DEADLINE_S)

    thread = threading.Thread(target=stay)
    thread.start()
    assert is_inside.wait(DEADLINE_S)
    try:
        assert child_says(can_open)
    finally:
        may_leave.set()
        thread.join()
    assert child_says(can_open)


# -- CUDA graph captures -----------------------------------------------------------------------------------------------


STRICTEST, NOT_INITIALIZED = 0, 3


class Driver(threading.local):
    """Every thread begins in the strictest mode. It may refuse, as it does before any thread has used a device."""

    mode = STRICTEST
    calls = 0

    def __init__(self, code: int = 0) -> None:
        self.code = code

    def exchange(self, mode: Any) -> int:
        self.calls += 1
        if self.code == 0:
            self.mode, mode._obj.value = mode._obj.value, self.mode
        return self.code


def test_a_thread_is_as_strict_afterwards_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, refusing = Driver(), Driver(NOT_INITIALIZED)
    monkeypatch.setattr(threads, "mode_exchange", lambda: driver.exchange)
    driver.mode = 1
    modes = []

    def fail() -> None:
        with beside_captures():
            pass
        modes.append(driver.mode)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), beside_captures():
        fail()
    assert [*modes, driver.mode] == [RELAXED, 1]
    monkeypatch.setattr(threads, "mode_exchange", lambda: refusing.exchange)
    with beside_captures():
        pass
    assert refusing.calls == 1, "a driver that refuses is asked for nothing more"


@pytest.mark.parametrize("kind", ["pretended-nixl-2"], indirect=True)
def test_nixl_is_asked_beside_captures_only(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It registers memory, and lets the device copy, in threads of ours at both ends."""
    driver, agent = Driver(), kit._pretended_nixl().nixlAgent
    modes: dict[str, set[int]] = {}
    monkeypatch.setattr(threads, "mode_exchange", lambda: driver.exchange)

    def noting(name: str, call: Any) -> Any:
        def noted(*given: object) -> object:
            modes.setdefault(name, set()).add(driver.mode)
            return call(*given)

        return noted

    for name in ("createBackend", "registerMem", "loadRemoteMD", "makeXferReq", "postXferReq", "releaseXferReq"):
        monkeypatch.setattr(agent, name, noting(name, getattr(agent, name)))
    right = content(100_000)
    source, reader = make(), make()
    source.export(full("k", right, 4096))
    assert read_all(reader, source.endpoint, "k", Target(right, 4096)) is None
    assert len(modes) == 6
    assert {name: found for name, found in modes.items() if found != {RELAXED}} == {}
