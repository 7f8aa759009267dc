"""A fork at the very moment in which a socket is made, or taken in: its child does not keep it; and no fork hangs."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from weakref import WeakSet

import pytest

from tensorhub.transport import threads

from . import kit
from .conftest import Make
from .kit import DEADLINE_S, Target, content, full, start_read

WAIT_S = 0.3  # for a fork that comes meanwhile, and is held up


class Slow(WeakSet[socket.socket]):
    """Knows the sockets of ours. The first one of a thread of that name it learns of late, if nobody forks before."""

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


@pytest.mark.parametrize("end", ["-accept", "-read-"])
@pytest.mark.parametrize("kind", ["tcp-1", "local-1"], indirect=True)
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


@pytest.mark.parametrize("kind", ["local-mapped-1"], indirect=True)
def test_a_child_has_no_memory_that_was_just_handed_over(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptors: what was mapped by them is not in a child either."""
    right, source, reader = content(1 << 16), make(), make()
    source.export(full("k", right, 1 << 16))
    monkeypatch.setattr(threads, "MAX_WAIT_S", DEADLINE_S)
    before, came, receive = set(os.listdir("/proc/self/fd")), threading.Event(), socket.socket.recvmsg
    is_forked = threading.Event()

    def slow(sock: socket.socket, *arguments: object) -> object:
        found = receive(sock, *arguments)  # type: ignore[arg-type]
        if found[1] and not came.is_set():
            came.set()
            is_forked.wait(WAIT_S)
        return found

    class Limited(socket.socket):
        recvmsg = slow  # type: ignore[assignment]

    monkeypatch.setattr(socket, "socket", Limited)
    target = Target(right, 1 << 16)
    _, ended = start_read(reader, source.endpoint, "k", target)
    assert came.wait(DEADLINE_S)
    memory = {link for link in links() if "memfd" in link}
    assert memory
    theirs = {name for name in os.listdir("/proc/self/fd") if name not in before}

    def has_none() -> bool:
        found = []
        for name in theirs:
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"/proc/self/fd/{name}"))
        return not [link for link in found if link in memory]

    has_none_left = child_says(has_none, is_forked.set)
    assert ended.wait() is None
    assert target.buffer == right
    assert has_none_left


def test_a_thread_may_fork_where_nobody_else_may(nothing_left_behind: None) -> None:
    """As a signal handler might."""
    with threads.opening():
        assert child_says(can_open)
        assert child_says(can_open)
    assert child_says(can_open)


def test_a_fork_waits_for_nobody_for_ever(nothing_left_behind: None, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with threads.opening():
        pass


def can_open() -> bool:
    """Another thread, too: nobody has kept the lock."""
    done: list[bool] = []

    def open_one() -> None:
        threads.made(socket.socket).close()
        done.append(True)

    thread = threading.Thread(target=open_one, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    return bool(done)


def test_a_source_takes_whoever_comes_while_others_fork(nothing_left_behind: None) -> None:
    right = content(64)
    source, reader = kit.KINDS["tcp-1"].make(5.0), kit.KINDS["tcp-1"].make(5.0)
    is_over = threading.Event()

    def fork_on() -> None:
        while not is_over.is_set():
            child_says(lambda: True)

    forker = threading.Thread(target=fork_on)
    forker.start()
    try:
        source.export(full("k", right, 64))
        for _ in range(50):
            assert kit.read_all(reader, source.endpoint, "k", Target(right, 64)) is None
    finally:
        is_over.set()
        forker.join()
        reader.close()
        source.close()
