"""Fixtures of the transport tests. After each test nothing of a transport may be left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tensorhub.transport.base import Transport
from tensorhub.transport.local.transport import LocalSettings, LocalTransport
from tensorhub.transport.tcp.settings import TcpSettings
from tensorhub.transport.tcp.transport import TcpTransport

from . import kit
from .kit import Local

Make = Callable[..., Transport]
Tcp = Callable[..., TcpTransport]
Spawn = Callable[..., subprocess.Popen[str]]


@pytest.fixture(params=kit.CONTRACT)
def kind(request: pytest.FixtureRequest) -> kit.Kind:
    found = kit.KINDS[request.param]
    if why_not := found.why_not():
        pytest.skip(why_not)
    if not found.is_settled and "test_nothing_grows" in request.node.name:
        pytest.skip("each of UCX's workers connects when a thread first uses it: test_nixl.py lets them, then counts")
    return found


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    kind = request.getfixturevalue("kind") if "kind" in request.fixturenames else None
    if isinstance(kind, kit.Kind) and kind.name.startswith("nixl"):
        kit.read_once(kind.name)
    threads, files = set(threading.enumerate()), kit.open_files()
    yield
    kit.until(lambda: set(threading.enumerate()) <= threads, "no thread is left")
    kit.forget()
    kit.until(lambda: kit.open_files() <= files, "no file descriptor is left")


def closed_at_the_end(make: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    made: list[Transport] = []

    def one(*given: object, **settings: object) -> Transport:
        made.append(make(*given, **settings))
        return made[-1]

    yield one
    for transport in made:
        transport.close()


@pytest.fixture
def make(kind: kit.Kind, nothing_left_behind: None) -> Iterator[Make]:
    """Makes transports of the kind under test, with this silence limit."""
    kit.use(kind)
    yield from closed_at_the_end(lambda silence_s=5.0: kind.make(silence_s))


def offered(
    make: Make, size_bytes: int, chunk_bytes: int, silence_s: float = 5.0
) -> tuple[bytearray, Transport, Transport]:
    """Content, a source that has all of it as "k", and a reader."""
    right, source = kit.content(size_bytes), make(silence_s)
    source.export(kit.full("k", right, chunk_bytes))
    return right, source, make(silence_s)


@pytest.fixture
def tcp(nothing_left_behind: None) -> Iterator[Tcp]:
    """Makes `tcp` transports with the settings given."""
    usual = {"stream_bytes": 1024, "stream_rate_bytes_per_s": 0}
    yield from closed_at_the_end(lambda **settings: TcpTransport(TcpSettings(**{**usual, **settings})))


@pytest.fixture
def local(nothing_left_behind: None) -> Iterator[Local]:
    """Makes `local` transports with the settings given."""
    yield from closed_at_the_end(lambda **settings: LocalTransport(LocalSettings(**settings)))


@pytest.fixture
def spawn(kind: kit.Kind, nothing_left_behind: None) -> Iterator[Spawn]:
    """Starts `peer.py` in a role; whatever is still there at the end is killed, also when it is stopped."""
    processes: list[subprocess.Popen[str]] = []

    def one(role: str, *settings: object) -> subprocess.Popen[str]:
        command = [sys.executable, str(Path(__file__).with_name("peer.py")), role, kind.name, *map(str, settings)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        return process

    yield one
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    """The next line that a peer prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()
