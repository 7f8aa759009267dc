"""What the server grants to connections that are no worker: little time, little memory, one line of log."""

import asyncio
import contextlib
import errno
import re
import socket
import struct
import subprocess
import sys
import threading
import weakref
from math import inf
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import numpy as np
import pytest
from aiohttp.http_exceptions import BadHttpMessage

import tensorhub
from tensorhub.protocol.manifest import Layout, TensorSpec
from tensorhub.protocol.messages import MAX_LAYOUT_BYTES, LayoutInfo, LayoutWanted, Orders, Refusal, Report
from tensorhub.protocol.settings import Settings
from tensorhub.runtime import admission, answers, serving
from tensorhub.runtime import server as server_module
from tensorhub.runtime.admission import EVERY_S, FAILED, SHORTAGE, Seldom
from tensorhub.runtime.connection import decode_to_worker, encode
from tensorhub.runtime.serving import ServerThread

from .kit import PATIENCE_S, UPGRADE, eventually, hello, own_token

ASK = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
MASK = bytes(4)  # it changes nothing
DEADLINE_S = 60.0


@pytest.fixture
def server():
    with tensorhub.serve(lease_s=120) as running:
        yield running


def beginning(length: int) -> bytes:
    """How a binary frame of this length begins."""
    return struct.pack("!BBQ", 0x82, 0xFF, length) + MASK


def frame(message: object) -> bytes:
    data = encode(message)
    return beginning(len(data)) + data


class Raw:
    """A connection on which a client says what it likes, byte for byte."""

    def __init__(self, address: str, first: bytes = b"") -> None:
        host, port = address.split(":")
        self.sock = socket.create_connection((host, int(port)), timeout=DEADLINE_S)
        self.sock.sendall(UPGRADE + first)
        self.words = self.sock.makefile("rb")
        self.status = self.words.readline()
        while self.words.readline().strip():
            pass

    def hear(self) -> object:
        """The next message; None at the end."""
        with contextlib.suppress(ConnectionError):
            kind, length = self.words.read(2) or (0, 0)
            if length >= 126:
                (length,) = struct.unpack("!H" if length == 126 else "!Q", self.words.read(2 if length == 126 else 8))
            return decode_to_worker(self.words.read(length)) if kind == 0x82 else None
        return None

    def __enter__(self) -> "Raw":
        return self

    def __exit__(self, *_: object) -> None:
        self.words.close()
        self.sock.close()


def test_who_begins_a_long_message_is_refused_before_it_is_whole(server):
    frame = beginning(8 << 20) + bytes(admission.MAX_OF_ONE_BYTES)
    part = struct.pack("!BBH", 0x02, 0xFE, 1000) + MASK + bytes(1000)  # of a message that has no end
    for said in (frame, part + b"".join(b"\x00" + part[1:] for _ in range(69))):
        with Raw(server.address) as stranger:
            stranger.sock.sendall(said)
            refusal = stranger.hear()
            assert isinstance(refusal, Refusal)
            assert "too much before any Hello" in refusal.message
            assert stranger.hear() is None
    with Raw(server.address, first=frame) as stranger:  # what comes with the request counts
        if b" 101 " in stranger.status:  # it came in two
            assert isinstance(stranger.hear(), Refusal)
        else:  # up to 3.14.3 aiohttp has closed the connection before it can answer
            assert not stranger.status or b" 413 " in stranger.status


def test_who_is_welcome_may_say_as_much_as_a_layout_takes_without_a_pause(server):
    """It does not wait to be heard: all of it is on its way at once."""
    names = (f"{index}" + "x" * 4000 for index in range(4000))
    tensors = tuple(TensorSpec(name, "uint8", (16,), (1,), 16 * index, 16) for index, name in enumerate(names))
    layout = LayoutInfo.of(Layout(tensors, 16 * len(tensors)))
    assert 15 << 20 < len(encode(layout)) < MAX_LAYOUT_BYTES
    with Raw(server.address) as worker:
        worker.sock.sendall(frame(hello()) + frame(layout) + frame(Report(1, layout=layout.digest())))
        while not (isinstance(said := worker.hear(), Orders) and said.acknowledged == 1):
            assert isinstance(said, Orders | LayoutWanted)


def test_all_strangers_together_have_a_limit_that_no_worker_meets(server, monkeypatch):
    most = server._server.shell._unknown_clients
    with Raw(server.address) as first, Raw(server.address) as second:
        first.sock.sendall(beginning(1 << 20) + bytes(40_000))
        eventually(lambda: most.held_bytes >= 40_000, "the first one is heard")
        monkeypatch.setattr(admission, "MAX_OF_ALL_BYTES", 30_000)
        second.sock.sendall(beginning(1 << 20) + bytes(20_000))
        assert second.hear() is None
        eventually(lambda: most.held_bytes < 50_000, "what the second one said is forgotten")
        with tensorhub.open("m", replica="r", server=server.address):
            assert tensorhub.connect(server.address).models() == ["m"]
        assert most.held_bytes >= 40_000, "the first one is still there"
    eventually(lambda: most.held_bytes == 0, "nothing is held of those who have gone")


def test_idle_strangers_do_not_use_up_the_descriptors(server, monkeypatch):
    """One that says nothing has 5 s else, and one that has asked once 75 s."""
    monkeypatch.setattr(admission, "_lowest_free", lambda: inf)  # none is left, whatever is closed
    monkeypatch.setattr(server_module, "HELLO_S", 2 * DEADLINE_S)
    with tensorhub.open("m", replica="r", server=server.address) as weights:
        for asks in (b"", ASK, UPGRADE):
            with connected(server, keeps_bytes=1 << 16) as stranger:
                stranger.sendall(asks)
                rest(stranger)
        assert weights.statistics()["connects"] == 1, "a worker stays"


def test_lines_on_which_no_hello_was_said_keep_no_worker_out(monkeypatch):
    monkeypatch.setattr(server_module, "SPARE_CONNECTIONS", 1)
    monkeypatch.setattr(server_module, "HELLO_S", 2 * DEADLINE_S)
    with (
        ServerThread(settings=Settings(max_workers=1)) as server,
        Raw(server.address) as first,
        Raw(server.address),
        tensorhub.open("m", replica="r", server=server.address),
    ):
        assert first.hear() is None, "the oldest one was cut"


GOODBYES = {
    "half a frame": beginning(1000) + bytes(500),
    "too much": beginning(8 << 20) + bytes(200_000),
    "no frame": b"\xff" * 500,
    "no message": beginning(5) + bytes(5),
    "a worker": frame(hello()) + beginning(8 << 20) + bytes(200_000),
}


@pytest.mark.usefixtures("no_collector")
def test_nothing_is_kept_of_who_has_gone(server):
    """Not in a circle either: a server looks for those seldom."""
    lines, kept = server._server.shell._sockets, {}
    for name, said in GOODBYES.items():
        with Raw(server.address) as stranger:
            eventually(lambda: len(lines) == 1, "it is connected")
            kept[name] = [weakref.ref(line.websocket) for line in list(lines.values())]
            with contextlib.suppress(ConnectionError):  # it was hung up on
                stranger.sock.sendall(said)
        eventually(lambda: not lines, "it has gone")
    eventually(lambda: all(each() is None for ones in kept.values() for each in ones), f"all are forgotten: {kept}")


# --- questions and answers --------------------------------------------------------------------------------------------


LONG = b"x" * (16 << 20)  # more than any kernel keeps for a reader
STRANGE = b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n"  # it shows no token
ASK_FOR = STRANGE.replace(b"\r\n\r\n", f"\r\nAuthorization: Bearer {own_token()}\r\n\r\n".encode())


# --- a hasty ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(server_module, "HELLO_S", 0.2)
    monkeypatch.setattr(server_module, "STUCK_S", 0.2)
    monkeypatch.setattr(server_module, "SWEEP_S", 0.05)
    monkeypatch.setattr(serving, "STOP_S", 10 * PATIENCE_S)  # nobody has to wait for that
    found = tensorhub.serve()
    yield found
    closing = threading.Thread(target=found.close, daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive(), "the hasty does not end"


def connected(hasty, *, keeps_bytes: int = 4096) -> socket.socket:
    host, port = hasty.address.split(":")
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, keeps_bytes)
    found.settimeout(PATIENCE_S)
    found.connect((host, int(port)))
    return found


def rest(found: socket.socket) -> bytes:
    """All that comes until the connection ends."""
    said = bytearray()
    with contextlib.suppress(ConnectionError):
        while more := found.recv(1 << 16):
            said += more
    return bytes(said)


def test_who_completes_no_request_is_hung_up_on(hasty):
    with connected(hasty) as silent, connected(hasty) as slow, connected(hasty) as asker:
        asker.sendall(ASK_FOR % b"/healthz")
        assert b" 200 " in asker.recv(4096)
        slow.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n")
        assert rest(silent) == rest(slow) == b""
        asker.sendall(2 * (ASK_FOR % b"/healthz") + ASK_FOR % b"/v1/wait?model=m&spec=1&timeout=0.5")
        heard = b""
        while b'{"version":null}' not in heard:
            more = asker.recv(4096)
            assert more, "who asks was hung up on"
            heard += more
        assert heard.count(b" 200 ") == 3


@pytest.fixture
def long_status(monkeypatch):
    async def encode(_):
        return LONG

    monkeypatch.setattr(answers, "encode_status", encode)


@pytest.mark.usefixtures("long_status")
def test_who_does_not_read_a_long_answer_is_cut(hasty):
    aiohttp_server = hasty._server.shell.accepted.server
    with connected(hasty) as idle, connected(hasty) as reader:
        idle.sendall(ASK_FOR % b"/v1/status")
        eventually(lambda: len(aiohttp_server.connections) == 2, "both are there")
        eventually(lambda: not aiohttp_server.connections, "who does not read is cut, and who asks nothing")
        assert len(rest(idle)) < len(LONG)
        assert rest(reader) == b""


@pytest.mark.usefixtures("long_status")
def test_who_reads_a_long_answer_gets_all_of_it(hasty, monkeypatch):
    monkeypatch.setattr(server_module, "STUCK_S", PATIENCE_S)
    with connected(hasty, keeps_bytes=1 << 20) as reader:
        reader.sendall((ASK_FOR % b"/v1/status").replace(b"Host: localhost", b"Host: localhost\r\nConnection: close"))
        assert rest(reader).partition(b"\r\n\r\n")[2] == LONG


@pytest.mark.usefixtures("long_status")
def test_who_does_not_read_does_not_keep_the_server_from_ending(hasty, monkeypatch):
    monkeypatch.setattr(server_module, "STUCK_S", 10 * PATIENCE_S)
    with connected(hasty) as idle:
        idle.sendall(ASK_FOR % b"/v1/status")
        assert idle.recv(100).startswith(b"HTTP/1.1 200 ")
        closing = threading.Thread(target=hasty.close, daemon=True)
        closing.start()
        closing.join(PATIENCE_S)
        assert not closing.is_alive()


def test_who_shows_no_token_keeps_no_connection():
    with tensorhub.serve() as hasty:
        for path, code in (
            (b"/healthz", b" 200 "),
            (b"/v1/status", b" 401 "),
            (b"/v1/wait", b" 401 "),
            (b"/no", b" 404 "),
        ):
            with connected(hasty) as stranger:
                stranger.sendall(STRANGE % path)
                said = rest(stranger)  # to the end: it is hung up on
                assert code in said.splitlines()[0]
                assert b"connection: close" in said.lower()
        with connected(hasty) as friend:
            for _ in range(2):
                friend.sendall(ASK_FOR % b"/v1/status")
                assert b" 200 " in friend.recv(1 << 16).splitlines()[0]


def test_where_nobody_needs_a_token_connections_are_kept():
    with tensorhub.serve(insecure=True) as hasty, connected(hasty) as asker:
        for _ in range(2):
            asker.sendall(STRANGE % b"/healthz")
            assert b" 200 " in asker.recv(4096)


# --- browsers ---------------------------------------------------------------------------------------------------------


PAGES = {
    "a page": {"Origin": "https://example.org"},
    "a page in a frame": {"Origin": "null"},
    "a page of this host": {"Origin": "http://127.0.0.1"},
    "a picture": {"Sec-Fetch-Site": "cross-site"},
    "a picture in a notebook": {"Sec-Fetch-Site": "same-site"},
    "a name that was rebound": {"Host": "rebound.example.org:7450"},
    "an address in a name": {"Host": "127.0.0.1.example.org"},
    "a user before a host": {"Host": "127.0.0.1@example.org"},
    "a host in a path": {"Host": "example.org/127.0.0.1"},
    "no host": {"Host": ""},
}


def status_of(address: str, path: str, **headers: str) -> tuple[int, str]:
    """The status of an answer, and what it says."""
    shown = {"Authorization": f"Bearer {own_token()}"} | headers

    async def talk() -> tuple[int, str]:
        async with aiohttp.ClientSession() as http, http.get(f"http://{address}{path}", headers=shown) as answer:
            assert not any("access-control" in name.lower() for name in answer.headers)
            return answer.status, await answer.text()

    return asyncio.run(talk())


def test_a_page_is_refused_though_it_has_the_token(server) -> None:
    async def join(headers: dict[str, str]) -> int:
        async with aiohttp.ClientSession() as http:
            with pytest.raises(aiohttp.WSServerHandshakeError) as found:
                await http.ws_connect(f"http://{server.address}/v1/session", headers=headers)
            return found.value.status

    for name, headers in PAGES.items():
        wanted = 421 if "Host" in headers else 403
        for path in ("/v1/session", "/v1/status", "/v1/wait?model=m&spec=1", "/healthz", "/nowhere"):
            assert status_of(server.address, path, **headers)[0] == wanted, name
        assert asyncio.run(join(headers)) == wanted, name


def test_a_page_cannot_join_a_server_that_asks_for_no_token() -> None:
    """It published 1000, and a rollout's `update("latest")` brought that."""
    with tensorhub.serve(insecure=True) as server:

        async def publish(**headers: str) -> None:
            url = f"http://{server.address}/v1/session"
            async with aiohttp.ClientSession() as http, http.ws_connect(url, headers=headers) as socket:
                for message in (hello(model="policy", replica="page", token=""), Report(1)):
                    await socket.send_bytes(encode(message))
                await socket.receive(timeout=5)

        with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
            asyncio.run(publish(Origin="https://example.org"))
        assert server.status().models == ()
        asyncio.run(publish())
        assert [model.name for model in server.status().models] == ["policy"], "what is no page may"


def test_a_server_answers_to_its_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: "Head.Cluster.example")
    with tensorhub.serve("0.0.0.0", names=["trainer.svc", "alias."]) as server:
        port = server.address.rpartition(":")[2]
        here = f"127.0.0.1:{port}"
        for name in ("127.0.0.1", "[::1]", "10.1.2.3", "LOCALHOST", socket.gethostname(), "trainer.svc.", "Alias"):
            assert status_of(here, "/healthz", Host=f"{name}:{port}")[0] == 200, name
            assert status_of(here, "/healthz", Host=name)[0] == 200, name
        eventually(lambda: status_of(here, "/healthz", Host="head.cluster.example")[0] == 200, "its full name is known")
        status, text = status_of(here, "/healthz", Host="cluster.example")
        assert status == 421
        assert "--name" in text
        assert "TENSORHUB_NAMES" in text


def test_no_request_looks_up_a_name(server, monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk() -> list[int]:
        async with aiohttp.ClientSession() as http:
            url, found = f"http://{server.address}/healthz", []
            for name in ("rebound.example.org", socket.gethostname()):
                async with http.get(url, headers={"Host": name}) as answer:
                    found.append(answer.status)
            return found

    for name in ("getaddrinfo", "gethostbyaddr", "gethostbyname", "getfqdn"):
        monkeypatch.setattr(socket, name, lambda *_, **__: pytest.fail("a name was looked up"))
    assert asyncio.run(talk()) == [421, 200]


def test_a_worker_and_a_question_hear_what_to_do_about_a_name(server, monkeypatch: pytest.MonkeyPatch) -> None:
    look_up, port = socket.getaddrinfo, server.address.rpartition(":")[2]
    found = lambda host, *rest, **more: look_up("127.0.0.1" if host == "head.alias" else host, *rest, **more)  # noqa: E731
    monkeypatch.setattr(socket, "getaddrinfo", found)
    with pytest.raises(tensorhub.ServerUnreachable, match="it is not called so") as asked:
        tensorhub.connect(f"head.alias:{port}").models()
    with pytest.raises(tensorhub.ServerUnreachable, match="it is not called so") as opened:
        tensorhub.open("m", replica="r", server=f"head.alias:{port}", timeout=0.5)
    for error in (asked.value, opened.value):
        assert "TENSORHUB_NAMES" in str(error.hint)
        assert "--name" in str(error.hint)
    monkeypatch.setenv("TENSORHUB_NAMES", "other,head.alias")
    with tensorhub.serve() as named:
        address = f"head.alias:{named.address.rpartition(':')[2]}"
        with tensorhub.open("m", replica="r", server=address) as weights:
            weights.register({"w": np.zeros(4)})
            assert tensorhub.connect(address).models() == ["m"]


# --- descriptors ------------------------------------------------------------------------------------------------------


FEW = 128


@contextlib.contextmanager
def limited(tmp_path: Path, soft: int, hard: int):
    """A server whose process may open so many: its address, its process and its log so far."""
    path = tmp_path / "log"
    command = [sys.executable, "-m", "tensorhub", "serve", "--port", "0", "--fresh"]
    script = f'ulimit -Sn {soft} && ulimit -Hn {hard} && exec "$@"'
    with (
        path.open("w") as log,
        subprocess.Popen(["bash", "-c", script, "bash", *command], stdout=subprocess.PIPE, stderr=log, text=True) as it,
    ):
        try:
            yield it.stdout.readline().split()[3].rstrip(";"), it, path.read_text
        finally:
            it.terminate()
            assert it.wait(PATIENCE_S) == 0


@pytest.mark.long
@pytest.mark.processes
def test_a_server_takes_all_that_it_may_have_and_says_when_that_is_too_little(tmp_path):
    with limited(tmp_path, FEW, 2 * FEW) as (_, process, log):
        found = re.search(r"Max open files +(\d+) +(\d+)", Path(f"/proc/{process.pid}/limits").read_text())
        assert found is not None
        assert found.groups() == (str(2 * FEW), str(2 * FEW))
        eventually(lambda: f"this process may open {2 * FEW} files and connections" in log(), "it says so")


@pytest.mark.processes
def test_strangers_that_take_every_connection_are_named_and_do_not_last(tmp_path):
    with limited(tmp_path, FEW, FEW) as (address, _, log), contextlib.ExitStack() as stack:
        host, port = address.split(":")
        for _ in range(FEW + 20):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE_S))
        eventually(lambda: "workers are turned away" in log(), "it is said")
        with tensorhub.open("m", replica="r", server=address, timeout=PATIENCE_S):
            assert log().count("workers are turned away") == 1


# --- log --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def said(monkeypatch, caplog):
    """`said(error, at)`: what the log says of it then; None: nothing."""
    logs = {"a": Seldom(), "b": Seldom()}

    def say(error, at, server="a"):
        monkeypatch.setattr(admission, "time", SimpleNamespace(monotonic=lambda: at))
        caplog.clear()
        logs[server].exception("request from %s", "x", exc_info=error)
        found = [(record.getMessage(), bool(record.exc_info)) for record in caplog.records]
        assert len(found) <= 1
        return found[0] if found else None

    return say


def test_a_defect_of_ours_keeps_its_traceback_beside_what_strangers_send(said):
    assert said(BadHttpMessage("no host"), 1.0) is not None
    assert said(KeyError("ours"), 1.0) == ("request from x", True)
    assert said(KeyError("ours"), 2.0) is None
    assert said(KeyError("ours"), 1.0 + EVERY_S[FAILED]) == (
        "request from x; 1 more like it since the last one said",
        True,
    )


def test_a_flood_of_connections_without_descriptors_is_one_line_in_a_while(caplog):
    seldom, loop = Seldom(), asyncio.new_event_loop()
    seldom.listen_to(loop)
    refused = OSError(errno.EMFILE, "Too many open files")
    with contextlib.closing(loop):
        for _ in range(1000):
            loop.call_exception_handler({"message": "socket.accept() out of system resource", "exception": refused})
    (line,) = caplog.records
    assert line.getMessage() == "socket.accept() out of system resource: [Errno 24] Too many open files"
    assert line.exc_info is None
    assert seldom._left_out[SHORTAGE] == 999
