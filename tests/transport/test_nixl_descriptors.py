"""UCX aborts a reader whose source cannot take it in: so who can open few files more is not asked by NIXL at all."""

import re
import subprocess
import sys
from types import ModuleType

import pytest

from tensorhub.protocol.errors import Unavailable
from tensorhub.transport.nixl import agent, transport

from . import kit
from .conftest import Make, Spawn, line
from .kit import Target, content, full, read_all

CHUNK = 4096
FILLED = """
import os, resource
from tensorhub.transport.nixl.agent import lacks_descriptors
assert not lacks_descriptors()
taken = max(map(int, os.listdir("/proc/self/fd")))
resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 20, taken + 20))
print(lacks_descriptors())
while True:
    try:
        os.dup(1)
    except OSError:
        break
print(lacks_descriptors())
"""


def test_it_is_said_how_many_are_open() -> None:
    said = subprocess.run([sys.executable, "-c", FILLED], capture_output=True, text=True, check=True, timeout=60)
    few, none = said.stdout.splitlines()
    assert re.fullmatch(r"next to all of the \d+ files that this process may open are open", few)
    assert none == "no file can be opened: Too many open files"


@pytest.mark.parametrize("kind", ["pretended-nixl-2"], indirect=True)
@pytest.mark.parametrize("limited", [agent, transport], ids=["the reader", "the source"])
def test_who_lacks_them_is_read_another_way(make: Make, monkeypatch: pytest.MonkeyPatch, limited: ModuleType) -> None:
    right, source, reader = content(5 * CHUNK), make(), make()
    source.export(full("k", right, CHUNK))
    with monkeypatch.context() as patched:
        patched.setattr(limited, "lacks_descriptors", lambda: "next to all are open")
        error = read_all(reader, source.endpoint, "k", Target(right, CHUNK))
    assert isinstance(error, Unavailable)
    assert "next to all are open" in str(error)
    assert read_all(reader, source.endpoint, "k", Target(right, CHUNK)) is None


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["nixl-3"], indirect=True)
def test_a_source_that_can_open_one_file_more_aborts_no_reader(make: Make, spawn: Spawn) -> None:
    right, reader = content(5 * CHUNK), make(2.0)
    for _ in range(3):
        source = spawn("source", 5 * CHUNK, CHUNK, 5, 2.0)
        endpoint = line(source)
        kit.leave_one_descriptor(source)
        error = read_all(reader, endpoint, "k", Target(right, CHUNK))
        assert isinstance(error, Unavailable)
        assert "files that this process may open are open" in str(error) or "no file can be opened" in str(error)
        source.kill()
