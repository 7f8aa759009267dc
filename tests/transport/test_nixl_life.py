"""How long things of the nixl transport live: its agent no longer than its worker, a dead peer not at all."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tensorhub.protocol.errors import SourceLost, TransportMissing
from tensorhub.transport.base import ByteStream
from tensorhub.transport.nixl import agent as nixl_agent
from tensorhub.transport.nixl import probe
from tensorhub.transport.nixl.agent import Agent, Region
from tensorhub.transport.nixl.transport import NixlSettings, NixlTransport
from tensorhub.transport.tcp import wire as tcp_wire
from tensorhub.transport.tcp.wire import Wire

from . import kit
from .conftest import line
from .kit import DEADLINE_S, Gate, Target, content, full, read_all, start_read

CHUNK = 4096
PEER = str(Path(__file__).with_name("nixl_peer.py"))
Make = Callable[..., NixlTransport]

pytestmark = pytest.mark.skipif(bool(probe.probe().why_not), reason=probe.probe().why_not or "it is here")


@pytest.fixture
def make(nothing_left_behind: None) -> Iterator[Make]:
    made: list[NixlTransport] = []

    def one(**settings: object) -> NixlTransport:
        made.append(NixlTransport(NixlSettings(**{"thread_bytes": 1024, **settings})))  # type: ignore[arg-type]
        return made[-1]

    yield one
    for transport in made:
        transport.close()


@pytest.fixture
def source() -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts sources of "k", 5 chunks, in processes of their own."""
    started: list[subprocess.Popen[str]] = []

    def one() -> subprocess.Popen[str]:
        command = [sys.executable, PEER, str(5 * CHUNK), str(CHUNK), ""]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield one
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


# -- the agent and its worker ----------------------------------------------------------------------------------------


def test_nobody_is_left_inside_when_the_interpreter_ends() -> None:
    """Threads of a read and of a source are in the middle when the main thread ends: no abort, no hang, every time."""
    peer = str(Path(__file__).with_name("peer.py"))
    for _ in range(2):
        command = [sys.executable, peer, "forgetful", "nixl-3", str(8 * CHUNK), str(CHUNK), "5"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
        assert (done.returncode, done.stdout, done.stderr) == (0, "leaving\n", "")


FORK = """
import os, sys
import kit
from tensorhub.transport.nixl import agent as nixl_agent
transport = kit.KINDS["nixl-1"].make(5.0)
agents = transport._agents
child = os.fork()
if not child:
    try:
        agents.current()
    except nixl_agent.Broken:
        sys.exit(7)  # by the long way: with everything that an interpreter does at its end
_, status = os.waitpid(child, 0)
assert agents.current().ended is None
print(os.waitstatus_to_exitcode(status), flush=True)
"""


def test_a_forked_child_neither_uses_nor_ends_its_parents_agent() -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK]  # 3.12 warns of every such fork
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, "7\n", "")


def test_an_agent_without_work_leaves_its_core_to_others(source: Callable[[], subprocess.Popen[str]]) -> None:
    """NIXL's own default is a thread that never sleeps. Its CPU time is compared with that of the clock beside it."""
    process = source()
    line(process)

    def ticks() -> int:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before = ticks()
    threading.Event().wait(1.0)  # what is measured: how much it does in a second
    assert ticks() - before < 0.3 * os.sysconf("SC_CLK_TCK")


def test_closing_ends_the_agent(make: Make) -> None:
    transport = make()
    agent = transport._agents.current()
    transport.close()
    assert agent.ended is not None
    assert agent._native is None
    with pytest.raises(nixl_agent.Broken):
        transport._agents.current()


# -- peers -----------------------------------------------------------------------------------------------------------


def test_only_so_many_idle_peers_are_kept(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "_IDLE_PEERS", 2)
    right, reader = content(5 * CHUNK), make()
    for _ in range(5):
        source = make()
        source.export(full("k", right, CHUNK))
        for _ in range(2):
            assert read_all(reader, source.endpoint, "k", Target(right, CHUNK)) is None
        source.close()
    assert reader._agents.current().peer_count == 2


@pytest.mark.processes
def test_a_killed_peer_is_forgotten_and_its_next_life_is_met(
    make: Make, source: Callable[[], subprocess.Popen[str]]
) -> None:
    """Three lives, each killed in the middle of a read. Afterwards the reader has no peer, and no file more."""
    right, reader = content(5 * CHUNK), make(threads=1, silence_s=2.0)
    files = []
    for _ in range(3):
        process = source()
        endpoint, gate = line(process), Gate()
        target = Target(right, CHUNK, gates={1: gate})
        _, ended = start_read(reader, endpoint, "k", target)
        assert gate.reached.wait(DEADLINE_S)
        assert reader._agents.current().peer_count == 1
        process.kill()
        process.communicate()  # its pipes are files too
        gate.release.set()
        assert isinstance(ended.wait(), SourceLost)
        assert reader._agents.current().peer_count == 0
        assert len(target.order) < 5
        files.append(kit.open_files())
    kit.until(lambda: kit.open_files() <= files[0], "descriptors are as many as after the first death")
    again = make()
    again.export(full("k", right, CHUNK))
    target = Target(right, CHUNK)
    assert read_all(reader, again.endpoint, "k", target) is None
    assert target.buffer == right


@pytest.mark.processes
def test_a_stopped_source_ends_by_our_deadline_alone_and_serves_again(
    make: Make, source: Callable[[], subprocess.Popen[str]]
) -> None:
    right, reader, process = content(5 * CHUNK), make(threads=1, silence_s=1.0), source()
    endpoint = line(process)
    os.kill(process.pid, signal.SIGSTOP)
    error = read_all(reader, endpoint, "k", Target(right, CHUNK))
    assert isinstance(error, SourceLost)
    assert "1 s" in str(error)
    os.kill(process.pid, signal.SIGCONT)
    target = Target(right, CHUNK)
    assert read_all(reader, endpoint, "k", target) is None
    assert target.buffer == right


# -- registration ----------------------------------------------------------------------------------------------------


def test_a_source_that_registers_slowly_says_that_it_lives(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """To pin a large model takes longer than the limit of silence. Here: until twice as many keepalives have gone."""
    right, source, reader = content(5 * CHUNK), make(silence_s=0.4), make(silence_s=0.4)
    export = full("k", right, CHUNK)
    source.export(export)
    said, is_pinned = [], threading.Event()
    send, register = Wire.send_frame, Agent.region

    def counting(wire: Wire, kind: int, *arguments: object, **named: object) -> None:
        send(wire, kind, *arguments, **named)  # type: ignore[arg-type]
        if kind == tcp_wire.WAITING:
            said.append(kind)
            if len(said) == 8:
                is_pinned.set()

    def slow(agent: Agent, stream: ByteStream) -> Region | None:
        if stream is export.stream:
            assert is_pinned.wait(DEADLINE_S)
        return register(agent, stream)

    monkeypatch.setattr(Wire, "send_frame", counting)
    monkeypatch.setattr(Agent, "region", slow)
    target = Target(right, CHUNK)
    assert read_all(reader, source.endpoint, "k", target) is None
    assert target.buffer == right
    assert len(said) >= 8


def test_memory_that_cannot_be_registered_is_nobodys_fault_and_another_transport_may_do(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, source, reader = content(5 * CHUNK), make(), make()
    source.export(full("k", right, CHUNK))

    def refused(agent: Agent, stream: ByteStream) -> Region | None:
        raise nixl_agent.Broken("nixlBackendError: no memory is left to pin")

    monkeypatch.setattr(Agent, "region", refused)
    error = read_all(reader, source.endpoint, "k", Target(right, CHUNK))
    assert isinstance(error, TransportMissing)
    assert "no memory is left to pin" in str(error)


def test_to_register_again_changes_nothing(make: Make) -> None:
    right = content(5 * CHUNK)
    transport, stream = make(), kit.Pieces(right)
    agent = transport._agents.current()
    regions = {id(agent.region(stream)) for _ in range(5)}
    assert len(regions) == 1
    assert len(agent._regions) == 1
    twin = kit.Pieces(right)  # the same memory, registered by another
    assert agent.region(twin) is not agent.region(stream)
    assert len(agent._regions) == 2
