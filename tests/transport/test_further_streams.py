"""A read wants several streams. Whatever keeps a further one from joining in, the first one brings everything."""

import errno
import os
import signal
import socket
import threading
from collections.abc import Callable

import pytest

from tensorhub.protocol.errors import SourceLost
from tensorhub.transport.base import Export, Progress, Read
from tensorhub.transport.tcp.reader import TcpRead
from tensorhub.transport.threads import Thread

from . import kit
from .conftest import Make, Spawn, line
from .kit import Target, content, start_read

CHUNK, COUNT, READY = 64 * 1024, 8, 5
several = pytest.mark.parametrize(
    "kind", ["tcp-3", "tcp-lending-2", "local-3", "local-mapped-3", "pretended-nixl-2", "nixl-3"], indirect=True
)
three = pytest.mark.parametrize("kind", ["tcp-3", "local-3", "local-mapped-3"], indirect=True)


def is_in_reading(name: str, *, further: bool) -> bool:
    """A thread of that name reads; as a further stream, if that is asked for."""
    return "-read-" in name and not (further and name.endswith("-read-0"))


def half_of(make: Make, right: bytearray) -> tuple[str, Progress]:
    """A source that has the first chunks; the others are marked by the test."""
    source, progress = make(1.0), Progress(COUNT)
    for chunk in range(READY):
        progress.mark(chunk)
    source.export(Export("k", b"manifest", CHUNK, kit.Pieces(right), progress))
    return source.endpoint, progress


def is_left_to_the_first(read: Read) -> bool:
    """Further streams were started, and have ended. (Or all of it has, which is not wanted.)"""
    assert isinstance(read, TcpRead)
    return len(read._threads) > 1 and read._running <= 1


def have_the_rest(progress: Progress) -> None:
    for chunk in range(READY, COUNT):
        progress.mark(chunk)


def read_by_one(make: Make, endpoint: str, right: bytearray, have_rest: Callable[[], None]) -> Read:
    """All of it, of which the last chunks come to be there when no further stream is left."""
    target = Target(right, CHUNK)
    read, ended = start_read(make(1.0), endpoint, "k", target)
    kit.until(lambda: is_left_to_the_first(read), "no further stream is left")
    have_rest()
    assert ended.wait() is None
    assert target.buffer == right
    return read


@pytest.mark.processes
@three
def test_a_source_without_room_for_all_connections_brings_everything_over_the_first(make: Make, spawn: Spawn) -> None:
    """Its kernel takes in who comes, and it never can: nobody answers them."""
    source, right = spawn("source", COUNT * CHUNK, CHUNK, READY, 1.0), content(COUNT * CHUNK)
    endpoint = line(source)
    kit.leave_one_descriptor(source)

    def have_rest() -> None:
        assert source.stdin is not None
        source.stdin.write("\n")
        source.stdin.flush()

    read_by_one(make, endpoint, right, have_rest)


@several
def test_a_source_that_may_start_no_thread_for_them(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    start, served = Thread.start, []

    def limited(thread: Thread) -> None:
        if thread.name.endswith("-serve"):
            served.append(thread.name)
            if len(served) > 1:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(Thread, "start", limited)
    right = content(COUNT * CHUNK)
    endpoint, progress = half_of(make, right)
    read_by_one(make, endpoint, right, lambda: have_the_rest(progress))
    assert len(served) > 1


@several
def test_a_reader_without_a_descriptor_for_them(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    class Limited(socket.socket):
        def __init__(self, *arguments: object, **named: object) -> None:
            if is_in_reading(threading.current_thread().name, further=True):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            super().__init__(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "socket", Limited)
    right = content(COUNT * CHUNK)
    endpoint, progress = half_of(make, right)
    read_by_one(make, endpoint, right, lambda: have_the_rest(progress))


@pytest.mark.parametrize("kind", ["pretended-nixl-2"], indirect=True)
def test_a_thread_that_nixl_does_not_connect(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = kit._pretended_nixl()
    post, status = fake.nixlAgent.postXferReq, fake.nixlAgent.getXferStatus

    def without(call: Callable[..., int]) -> Callable[..., int]:
        def answer(*arguments: object) -> int:
            is_further = is_in_reading(threading.current_thread().name, further=True)
            return int(fake.NIXL_IN_PROG) if is_further else call(*arguments)

        return answer

    monkeypatch.setattr(fake.nixlAgent, "postXferReq", without(post))
    monkeypatch.setattr(fake.nixlAgent, "getXferStatus", without(status))
    right = content(COUNT * CHUNK)
    endpoint, progress = half_of(make, right)
    read = read_by_one(make, endpoint, right, lambda: have_the_rest(progress))
    assert read.path.startswith("NIXL/UCX: shared memory")


@pytest.mark.processes
@three
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_source_that_is_gone_while_they_join_in_is_lost(make: Make, spawn: Spawn, how: signal.Signals) -> None:
    """The first stream notices: whoever only wanted to join in is not waited for."""
    source, right = spawn("source", COUNT * CHUNK, CHUNK, READY, 1.0), content(COUNT * CHUNK)
    endpoint = line(source)
    kit.leave_one_descriptor(source)
    read, ended = start_read(make(1.0), endpoint, "k", Target(right, CHUNK))
    assert isinstance(read, TcpRead)
    kit.until(lambda: len(read.job._wires) > 1, "a further stream has begun to join in")
    os.kill(source.pid, how)
    error = ended.wait()
    assert isinstance(error, SourceLost)
    assert endpoint in str(error)
