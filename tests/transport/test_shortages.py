"""What this machine refused this process is remembered for a while, and nothing else is."""

import errno
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tensorhub.protocol.errors import Unavailable
from tensorhub.transport import threads

from .conftest import Make
from .kit import Target, content, full, read_all


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(threads, "_last", None)
    return


def test_what_is_scarce_is_remembered() -> None:
    assert threads.recent() == ("", "")
    threads.note(OSError(errno.ECONNREFUSED, "refused"), did="it connected")
    assert threads.recent() == ("", "")
    threads.note(OSError(errno.EMFILE, os.strerror(errno.EMFILE)), did="it connected")
    assert threads.recent()[0].endswith("when it connected: Too many open files")
    threads.note(MemoryError(), did="it started a thread")
    assert threads.recent()[0].endswith("when it started a thread: out of memory")


def test_what_was_long_ago_explains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    threads.note(MemoryError(), did="it started a thread")
    monkeypatch.setattr(threads, "RECENT_S", -1.0)
    assert threads.recent() == ("", "")


@pytest.mark.parametrize("kind", ["tcp-1", "local-1", "local-mapped-1", "pretended-nixl-2"], indirect=True)
def test_a_reader_without_a_descriptor_knows_that_it_met_a_limit(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    class Limited(socket.socket):
        def __init__(self, *arguments: object, **named: object) -> None:
            if "-read-" in threading.current_thread().name:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            super().__init__(*arguments, **named)  # type: ignore[arg-type]

    right, source, reader = content(64), make(), make()
    source.export(full("k", right, 64))
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", Limited)
        error = read_all(reader, source.endpoint, "k", Target(right, 64))
    assert isinstance(error, Unavailable), "another try may find one"
    assert "when it connected to a source: [Errno 24] Too many open files" in str(error)
    assert threads.recent()[0].endswith("when it connected to a source: Too many open files")
    assert read_all(reader, source.endpoint, "k", Target(right, 64)) is None


@pytest.mark.parametrize("kind", ["local-1"], indirect=True)
def test_so_it_does_where_there_is_none_for_the_sources_process(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def limited(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    right, source, reader = content(64), make(), make()
    source.export(full("k", right, 64))
    monkeypatch.setattr(os, "pidfd_open", limited)
    assert read_all(reader, source.endpoint, "k", Target(right, 64)) is None
    assert threads.recent()[0].endswith("when it looked at a source's process: Too many open files")


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
