"""What only the nixl transport has: a probe that survives anything, a way that is proved, an agent that can end."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tensorhub.protocol.errors import SourceLost, TransportMissing
from tensorhub.transport.base import ByteStream
from tensorhub.transport.nixl import agent as nixl_agent
from tensorhub.transport.nixl import probe
from tensorhub.transport.nixl.agent import (
    Agent,
    Facts,
    Region,
    advantage,
    lane,
    why_tcp,
)
from tensorhub.transport.nixl.transport import NixlSettings, NixlTransport, parse_endpoint
from tensorhub.transport.tcp import wire as tcp_wire
from tensorhub.transport.tcp.wire import Wire

from . import kit
from .conftest import Spawn, closed_at_the_end, line
from .kit import DEADLINE_S, MIB, Gate, Target, content, full, read_all, start_read

CHUNK = 4096
needs_nixl = pytest.mark.skipif(bool(probe.probe().why_not), reason=probe.probe().why_not or "it is here")
Make = Callable[..., NixlTransport]


@pytest.fixture
def make(nothing_left_behind: None) -> Iterator[Make]:
    yield from closed_at_the_end(lambda **settings: NixlTransport(NixlSettings(**{"thread_bytes": 1024, **settings})))


# -- the probe -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import time; time.sleep(600)", "did not end within 1 s"),
        ("import os; os.abort()", "SIGABRT"),
        ("raise ImportError('libcuda.so.1: cannot open')", "libcuda.so.1"),
    ],
)
def test_a_probe_survives_whatever_loading_does(
    body: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nixl_pretended.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(probe, "MODULES", ("nixl_pretended",))
    (tmp_path / "sitecustomize.py").write_text(
        "import tensorhub.transport.nixl.agent as a; a.MODULES = ('nixl_pretended',)"
    )
    monkeypatch.setattr(probe, "_found", {})
    began = time.monotonic()
    found = probe.probe(1.0 if "sleep" in body else DEADLINE_S)
    assert time.monotonic() - began < DEADLINE_S
    assert not found.module
    assert said in found.why_not
    assert probe.probe() is found, "it is asked once"
    with pytest.raises(TransportMissing, match="not available"):
        probe.require()


def test_a_missing_nixl_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "MODULES", ("nixl_that_nobody_has",))
    monkeypatch.setattr(probe, "_found", {})
    with pytest.raises(TransportMissing) as caught:
        probe.require()
    assert caught.value.hint == "pip install 'tensorhub[nixl]'"
    assert "pip install 'tensorhub[nixl]'" in "".join(probe.probe().lines())


@needs_nixl
def test_a_forgotten_probe_ends_by_itself() -> None:
    child = subprocess.Popen([sys.executable, "-m", "tensorhub.transport.nixl.probe", "0.01", str(os.getpid())])
    assert child.wait(DEADLINE_S) == -signal.SIGALRM
    orphan = subprocess.run([sys.executable, "-m", "tensorhub.transport.nixl.probe", "30", "1"], capture_output=True)
    assert orphan.stdout == b"", "its parent is another one than it was told"


# -- rules -----------------------------------------------------------------------------------------------------------


def test_the_way_is_told_from_what_is_known() -> None:
    plain, other, fabric = Facts("a", (), ""), Facts("b", (), ""), Facts("c", ("mlx5_0",), "")
    assert lane(plain, plain, is_immediate=True, devices=[0]).name == "NIXL/UCX: shared memory (cma)"
    assert lane(plain, plain, is_immediate=False, devices=[0]).is_tcp, "another PID namespace, say"
    assert lane(plain, plain, is_immediate=False, devices=[1, 2]).name == "NIXL/UCX: CUDA IPC"
    assert lane(plain, other, is_immediate=False, devices=[1]).is_tcp
    assert lane(fabric, Facts("d", ("mlx5_1",), ""), is_immediate=False, devices=[0]).name == "NIXL/UCX: RDMA (mlx5_0)"
    assert lane(Facts("c", ("mlx5_0",), "tcp"), fabric, is_immediate=False, devices=[0]).is_tcp
    assert why_tcp(plain, other) == "there is no RDMA device here and there"
    assert why_tcp(Facts("a", (), "tcp"), plain) == "UCX_TLS=tcp permits nothing else"
    assert "another container" in why_tcp(plain, plain)


def test_what_gives_nixl_an_advantage(tmp_path: Path) -> None:
    rdma, gpus = tmp_path / "infiniband", tmp_path / "gpus"
    assert advantage(rdma, gpus) == (
        False,
        "no RDMA device and no GPU is here, so local and tcp are faster",
    )
    for device, state in (("mlx5_0", "1: DOWN\n"), ("mlx5_1", "2: INIT\n")):
        (rdma / device / "ports" / "1").mkdir(parents=True)
        (rdma / device / "ports" / "1" / "state").write_text(state)
    found, why = advantage(rdma, gpus)
    assert not found
    assert why.startswith("no port of mlx5_0, mlx5_1 is active and no GPU is here")
    (rdma / "mlx5_1" / "ports" / "1" / "state").write_text("4: ACTIVE\n")
    assert advantage(rdma, gpus) == (True, "RDMA (mlx5_1)")
    (gpus / "0000:01:00.0").mkdir(parents=True)
    assert advantage(rdma, gpus) == (True, "RDMA (mlx5_1) and a GPU (CUDA IPC, NVLink)")
    assert advantage(tmp_path / "none", gpus) == (True, "a GPU (CUDA IPC, NVLink)")


@pytest.mark.parametrize("endpoint", ["tcp://a:1", "nixl://", "nixl://a", "nixl", "", "nixl://a:99999"])
def test_endpoints_that_are_none(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_endpoint(endpoint)
    assert parse_endpoint("nixl://[::1]:5") == (("::1", 5),)


# -- with NIXL -------------------------------------------------------------------------------------------------------


@needs_nixl
def test_the_path_is_named(make: Make) -> None:
    right = content(MIB)
    source, reader = make(), make()
    source.export(full("k", right, 64 * 1024))
    read, ended = start_read(reader, source.endpoint, "k", Target(right, 64 * 1024))
    assert ended.wait() is None
    assert read.path == "NIXL/UCX: shared memory (cma), 2 threads"
    assert source.endpoint.startswith("nixl://127.0.0.1:")


@needs_nixl
def test_tcp_is_refused_and_nothing_was_begun(make: Make) -> None:
    right = content(5 * CHUNK)
    source, reader = make(tls="tcp"), make(tls="tcp")
    source.export(full("k", right, CHUNK))
    target = Target(right, CHUNK)
    error = read_all(reader, source.endpoint, "k", target)
    assert isinstance(error, TransportMissing)
    assert "TCP" in str(error)
    assert "tcp" in (error.hint or "")
    assert target.manifest is None
    assert not any(target.buffer)


@needs_nixl
@pytest.mark.processes
def test_a_read_that_does_not_end_is_fenced_and_the_transport_goes_on(make: Make) -> None:
    """The worst case: over TCP, a source that stops in the middle of a chunk. No byte may come once the read ended."""
    size, chunk = 192 * MIB, 64 * MIB
    script = str(Path(__file__).with_name("nixl_peer.py"))
    peer = subprocess.Popen(
        [sys.executable, script, str(size), str(chunk), "tcp"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        endpoint, right, reader = line(peer), content(size), make(tls="tcp", allow_tcp=True, silence_s=1.0, threads=1)
        target = Target(right, chunk)
        _, ended = start_read(reader, endpoint, "k", target)
        kit.until(lambda: any(target.buffer[:chunk:4096]), "the first bytes have come")
        os.kill(peer.pid, signal.SIGSTOP)
        error = ended.wait()
        assert isinstance(error, SourceLost)
        target.buffer[:] = bytes(size)  # allowed from now on
        os.kill(peer.pid, signal.SIGCONT)
        threading.Event().wait(1.0)  # what would come late would come now
        assert not any(target.buffer)
        small = content(5 * CHUNK)
        source, again = make(tls="tcp", allow_tcp=True), Target(small, CHUNK)
        source.export(full("k", small, CHUNK))
        assert read_all(reader, source.endpoint, "k", again) is None
        assert again.buffer == small
        assert reader.statistics()["nixl_agents_replaced"] == 1
    finally:
        peer.kill()
        peer.communicate()


@needs_nixl
def test_nothing_grows_once_all_workers_are_connected(make: Make) -> None:
    right = content(5 * CHUNK)
    source, reader = make(threads=3), make(threads=3)
    source.export(full("k", right, CHUNK))
    for _ in range(60):
        assert read_all(reader, source.endpoint, "k", Target(right, CHUNK)) is None
    kit.until(lambda: source.statistics()["connections_open"] == 0, "the connections are closed")
    threads, files = threading.active_count(), kit.open_files()
    for _ in range(100):
        assert read_all(reader, source.endpoint, "k", Target(right, CHUNK)) is None
    kit.until(lambda: threading.active_count() <= threads, "threads are as many as before")
    kit.until(lambda: kit.open_files() <= files, "file descriptors are as many as before")
    agent = reader._agents.current()
    assert agent.peer_count == 1
    gc.collect()
    assert len(agent._orphans) > 0, "the targets are gone"
    stream = kit.Pieces(right)
    assert agent.region(stream) is not None
    assert len(agent._orphans) == 0, "their memory was deregistered on the way"


in_a_process = pytest.mark.parametrize("kind", ["nixl-1"], indirect=True)  # as `spawn` makes a source


# -- the agent and its worker ----------------------------------------------------------------------------------------


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


@needs_nixl
def test_a_forked_child_neither_uses_nor_ends_its_parents_agent() -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK]  # 3.12 warns of every such fork
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, "7\n", "")


@in_a_process
def test_an_agent_without_work_leaves_its_core_to_others(spawn: Spawn) -> None:
    """NIXL's own default is a thread that never sleeps. Its CPU time is compared with that of the clock beside it."""
    process = spawn("source", 5 * CHUNK, CHUNK, 5)
    line(process)

    def ticks() -> int:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before = ticks()
    threading.Event().wait(1.0)  # what is measured: how much it does in a second
    assert ticks() - before < 0.3 * os.sysconf("SC_CLK_TCK")


# -- peers -----------------------------------------------------------------------------------------------------------


@pytest.mark.processes
@in_a_process
def test_a_killed_peer_is_forgotten_and_its_next_life_is_met(make: Make, spawn: Spawn) -> None:
    """Three lives, each killed in the middle of a read. Afterwards the reader has no peer, and no file more."""
    right, reader = content(5 * CHUNK), make(threads=1, silence_s=2.0)
    files = []
    for _ in range(3):
        process = spawn("source", 5 * CHUNK, CHUNK, 5)
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


# -- registration ----------------------------------------------------------------------------------------------------


@needs_nixl
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


@needs_nixl
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
