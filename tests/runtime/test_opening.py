"""Which transports a worker has: those that were named, or those that make sense here; and NIXL cannot hold it up."""

import asyncio
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

import tensorhub
from tensorhub.protocol.errors import TransportMissing, UsageError
from tensorhub.runtime import opening, transports
from tensorhub.runtime.config import worker_options
from tensorhub.runtime.driver import Driver
from tensorhub.runtime.transports import TRANSPORTS, Kind, wanted_transports
from tensorhub.transport.nixl import agent, probe
from tensorhub.transport.tcp.settings import PORTS
from tensorhub.worker.events import Received

from .kit import eventually


def test_by_default_what_wants_hardware_is_taken_only_where_it_is(monkeypatch):
    monkeypatch.setattr(agent, "advantage", lambda: (False, "nothing is here"))
    assert wanted_transports(worker_options({})) == ("local", "tcp")
    monkeypatch.setattr(agent, "advantage", lambda: (True, "RDMA"))
    assert wanted_transports(worker_options({})) == ("local", "nixl", "tcp")
    monkeypatch.setattr(agent, "has_gpu", lambda: True)
    monkeypatch.setattr(transports, "has_kernels", lambda: False)
    assert wanted_transports(worker_options({})) == ("local", "nixl", "tcp")
    monkeypatch.setattr(transports, "has_kernels", lambda: True)
    assert wanted_transports(worker_options({})) == ("cuda", "local", "nixl", "tcp")


def test_what_is_named_is_taken_whatever_is_here(monkeypatch):
    monkeypatch.setattr(agent, "advantage", lambda: (False, "nothing is here"))
    assert wanted_transports(worker_options({"TENSORHUB_TRANSPORTS": "nixl,tcp"})) == ("nixl", "tcp")
    assert wanted_transports(worker_options({}, transports=["tcp"])) == ("tcp",)


def test_where_it_has_no_advantage_nixl_is_not_even_tried(monkeypatch):
    """The default costs no child process, and loads nothing."""
    monkeypatch.setattr(agent, "advantage", lambda: (False, "nothing is here"))
    monkeypatch.setattr(probe, "_found", {})
    monkeypatch.setattr(probe, "_ask_a_child", lambda deadline_s: pytest.fail("a child process was started"))
    made = opening._listen("127.0.0.1", worker_options({}), 1.0)
    for transport in made.values():
        transport.close()
    assert "tcp" in made
    assert "nixl" not in made


def test_peers_read_at_the_port_that_was_set():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    made = opening._listen("127.0.0.1", worker_options({"TENSORHUB_DATA_PORT": str(port)}, transports="tcp"), 1.0)
    try:
        assert port <= int(made["tcp"].endpoint.rpartition(":")[2]) < port + PORTS
    finally:
        made["tcp"].close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_worker_that_other_hosts_reach_has_a_token_or_says_that_it_is_insecure(host, tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORHUB_STATE_DIR", str(tmp_path))
    with tensorhub.serve(insecure=True) as server:
        where = {"model": "m", "server": server.address, "host": host}
        with pytest.raises(tensorhub.UsageError, match="other hosts could read from this worker") as found:
            tensorhub.open(replica="r", **where)
        for way in ("insecure=True", "TENSORHUB_INSECURE=1", "TENSORHUB_TOKEN", "token=", "tensorhub/token"):
            assert way in found.value.hint
        assert server.status().models == ()
        with tensorhub.open(replica="r", insecure=True, **where):
            pass
        with tensorhub.open("m", replica="here", server=server.address):  # only this host reaches it
            pass
        with tensorhub.open(replica="local", transports="local", **where):
            pass


class Everywhere:
    """A transport of another make than the package's own, which any host reaches."""

    addresses, is_closed = ("127.0.0.1", "0.0.0.0"), False

    def close(self) -> None:
        self.is_closed = True


def test_any_transport_that_other_hosts_reach_needs_a_token(monkeypatch):
    new = Everywhere()
    monkeypatch.setitem(TRANSPORTS, "new", Kind(lambda *_: new, "any two hosts", is_networked=True))
    with pytest.raises(UsageError, match=r"other hosts could read from this worker, at 127\.0\.0\.1, 0\.0\.0\.0"):
        opening._listen("127.0.0.1", worker_options({}, transports="local,new"), 1.0)
    assert new.is_closed
    made = opening._listen("127.0.0.1", worker_options({}, transports="local,new", token="secret"), 1.0)
    assert made["new"] is new
    made["local"].close()


def test_a_transport_says_where_it_listens_on_a_network():
    made = opening._listen("127.0.0.1", worker_options({}, transports="local,tcp"), 1.0)
    for scheme, transport in made.items():
        transport.close()
        assert bool(transport.addresses) == TRANSPORTS[scheme].is_networked


def test_a_worker_and_a_view_that_came_before_this_users_first_server_find_its_token(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TENSORHUB_STATE_DIR", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as found:
        host, port = found.getsockname()
    view = tensorhub.connect(f"{host}:{port}")
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(tensorhub.open, "m", replica="r", server=f"{host}:{port}")
        eventually(lambda: "no reference server" in caplog.text, "the worker has looked for its server")
        with tensorhub.serve(host, port), opening.result(60):
            assert view.models() == ["m"]


HANGING = """
import time
import tensorhub
from tensorhub.transport.nixl import agent as nixl_agent
from tensorhub.transport.nixl import probe as nixl_probe
nixl_probe.MODULES = nixl_agent.MODULES = ("nixl_that_hangs",)
with tensorhub.serve() as server:
    began = time.monotonic()
    weights = tensorhub.open("m", replica="r", server=server.address, transports="nixl,tcp", timeout=4.0)
    print(time.monotonic() - began < 4.0, list(weights._aio._client.driver.data.transports))
    weights.close()
"""


@pytest.mark.processes
def test_a_nixl_that_hangs_costs_open_its_share_and_no_more(tmp_path: Path):
    """`open` ends by its deadline with the other transports; what hung is killed with its child process."""
    (tmp_path / "nixl_that_hangs.py").write_text("import time; time.sleep(600)")
    (tmp_path / "sitecustomize.py").write_text(
        "import tensorhub.transport.nixl.agent as a; a.MODULES = ('nixl_that_hangs',)"
    )
    path = [str(tmp_path), str(Path(tensorhub.__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{HANGING}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "True ['tcp']"), done.stderr


def test_nixl_alone_where_it_is_not_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(probe, "MODULES", ("nixl_that_nobody_has",))
    monkeypatch.setattr(probe, "_found", {})
    with tensorhub.serve() as server, pytest.raises(TransportMissing) as caught:
        tensorhub.open("m", replica="r", server=server.address, transports="nixl")
    assert "nixl_that_nobody_has is installed" in str(caught.value)
    assert "add tcp" in (caught.value.hint or "")


def test_an_open_that_is_given_up_while_its_session_begins_leaves_none(monkeypatch):
    """It is cancelled when the server has made a session, and its answer is still on the way."""
    on_line, late = Driver._on_connection, []

    def slowly(driver, event):
        if not late and isinstance(event, Received):
            late.append(event)
            give_up()
            driver._loop.call_later(0.05, on_line, driver, event)
        else:
            on_line(driver, event)

    monkeypatch.setattr(Driver, "_on_connection", slowly)
    with tensorhub.serve() as server:

        async def cancelled():
            nonlocal give_up
            opening = asyncio.create_task(tensorhub.aio.open("m", replica="r", server=server.address))
            give_up = partial(asyncio.get_running_loop().call_soon_threadsafe, opening.cancel)
            with pytest.raises(asyncio.CancelledError):
                await opening

        give_up = None
        asyncio.run(cancelled())
        assert late
        with tensorhub.open("m", replica="r", server=server.address, timeout=2):  # and not after a lease of 10 s
            pass
