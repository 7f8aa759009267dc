"""A source that has other memory where memory of its own was: its readers' NIXL must neither lose nor mistake it."""

import gc
import re
import subprocess
import sys
from random import Random
from types import ModuleType
from typing import cast

import pytest

from tensorhub.protocol.errors import SourceLost, Unavailable
from tensorhub.transport.base import Transport
from tensorhub.transport.nixl import agent, transport
from tensorhub.transport.nixl import agent as nixl_agent
from tensorhub.transport.nixl.agent import Agent
from tensorhub.transport.nixl.transport import NixlJob, NixlRead, NixlTransport

from . import kit
from .conftest import Make, Spawn, line
from .kit import DEADLINE_S, Target, content, full, read_all, start_read

CHUNK = 256
PRETENDED = pytest.mark.parametrize("kind", ["pretended-nixl-2"], indirect=True)
MEMORY = 64 * CHUNK
PARTS = [(64, 100), (0, MEMORY), (0, MEMORY), (32, 7000), (0, 7032), (32, 100)]  # where it begins, how long it is


def offer(source: Transport, key: str, memory: bytearray, start: int, size: int) -> bytearray:
    """Export a part of it; returns what a reader must get."""
    part = cast(bytearray, memoryview(memory)[start : start + size])
    source.export(full(key, part, CHUNK))
    return bytearray(part)


def agents_of(transport: Transport) -> int:
    agents = cast(NixlTransport, transport)._agents
    return 1 + len(agents._further)


@pytest.mark.parametrize("kind", ["nixl-3", "pretended-nixl-2"], indirect=True)
def test_it_is_read_and_what_was_there_before_and_is_still_offered_too(make: Make) -> None:
    memory, source, reader = content(MEMORY), make(), make()
    for start, size in PARTS:
        right = offer(source, "k", memory, start, size)
        assert read_all(reader, source.endpoint, "k", Target(right, CHUNK)) is None, (start, size)
        assert source.withdraw("k", timeout_s=kit.DEADLINE_S)
        gc.collect()
    assert agents_of(source) <= 3, "what nobody needs any more has ended"
    source, reader = make(), make()
    rights = [offer(source, f"k{number}", memory, *part) for number, part in enumerate(PARTS)]
    for _ in range(2):
        for number, right in enumerate(rights):
            assert read_all(reader, source.endpoint, f"k{number}", Target(right, CHUNK)) is None
    assert agents_of(source) == len(PARTS), "each overlaps the others, and each is introduced once"


@PRETENDED
@pytest.mark.long
def test_a_reader_is_not_told_of_more_and_more_that_is_gone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "_GONE", 5)
    source, reader = make(), make()
    kept = []
    for number in range(20):
        kept.append(content(MEMORY))  # each in a place of its own
        right = offer(source, f"k{number}", kept[-1], 0, MEMORY)
        assert read_all(reader, source.endpoint, f"k{number}", Target(right, CHUNK)) is None
        assert source.withdraw(f"k{number}", timeout_s=kit.DEADLINE_S)
        gc.collect()
    agents = cast(NixlTransport, source)._agents
    assert all(agent._introductions <= 5 for agent in [agents.current(), *agents._further])
    assert agents_of(source) == 2


@pytest.mark.parametrize("kind", ["nixl-3"], indirect=True)
def test_nothing_is_left_of_former_agents_at_either_end(make: Make) -> None:
    memory, source, reader, chance = content(MEMORY), make(), make(), Random(1)
    files = []
    for _ in range(40):
        start = chance.randrange(MEMORY - 1)
        right = offer(source, "k", memory, start, chance.randrange(1, MEMORY - start))
        assert read_all(reader, source.endpoint, "k", Target(right, CHUNK)) is None
        assert source.withdraw("k", timeout_s=kit.DEADLINE_S)
        gc.collect()
        files.append(kit.open_files())
    kit.until(lambda: kit.open_files() <= max(files[:10]), "descriptors are as many as at the beginning")


def agent_of(transport: Transport) -> Agent:
    return cast(NixlTransport, transport)._agents.current()


@PRETENDED
def test_a_read_that_waits_for_its_turn_can_be_stopped(make: Make) -> None:
    right, source, reader = content(CHUNK), make(), make(8 * DEADLINE_S)
    source.export(full("k", right, CHUNK))
    target = Target(right, CHUNK)
    with agent_of(reader).connecting:
        read, ended = start_read(reader, source.endpoint, "k", target)
        job = cast(NixlRead, read).job
        kit.until(lambda: cast(NixlJob, job).meeting is not None, "only its turn is missing")
        read.stop()
        assert ended.wait() is None
    assert not target.order
    assert not agent_of(reader).connecting.locked()


@PRETENDED
def test_a_source_that_does_not_answer_has_its_turn_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, right = kit._pretended_nixl(), content(CHUNK)
    source, reader = make(), make(4.0)
    source.export(full("k", right, CHUNK))
    agent = agent_of(reader)
    for name in ("postXferReq", "getXferStatus"):
        monkeypatch.setattr(fake.nixlAgent, name, lambda *_: fake.NIXL_IN_PROG)
    _, ended = start_read(reader, source.endpoint, "k", Target(right, CHUNK))
    kit.until(agent.connecting.locked, "it has its turn")
    kit.until(lambda: not agent.connecting.locked(), "it has had it")
    assert not ended.event.is_set(), "it is tried again"
    error = ended.wait()
    assert isinstance(error, SourceLost)
    assert "was not over after" in str(error)


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


@PRETENDED
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
