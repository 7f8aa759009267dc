"""Connections that ask nothing, or do not read what they asked for, are ended; all others are left alone."""

import asyncio
import contextlib
import socket
import threading
import weakref
from math import inf
from types import SimpleNamespace

import pytest

import tensorhub
from tensorhub.runtime import answers, serving
from tensorhub.runtime import server as server_module
from tensorhub.runtime.admission import PIECE_BYTES, Accepted

from .kit import PATIENCE_S, eventually, own_token

LONG = b"x" * (16 << 20)  # more than any kernel keeps for a reader
STRANGE = b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n"  # it shows no token
ASK = STRANGE.replace(b"\r\n\r\n", f"\r\nAuthorization: Bearer {own_token()}\r\n\r\n".encode())


class Wire:
    """A transport."""

    def __init__(self) -> None:
        self.waiting_bytes, self.is_aborted, self.is_ending = 0, False, False

    def get_write_buffer_size(self) -> int:
        return self.waiting_bytes

    def is_closing(self) -> bool:
        return self.is_ending

    def abort(self) -> None:
        self.is_aborted, self.is_ending, self.waiting_bytes = True, True, 0


class Protocol:
    """What hears a connection."""

    transport: Wire | None = None


class Story:
    """One connection, and a clock."""

    def __init__(self) -> None:
        self.now, self.wire = 100.0, Wire()
        self.protocol = Protocol()
        self.accepted = Accepted(lambda: self.now)
        self.accepted.server = SimpleNamespace(connections=[self.protocol])
        self.request = SimpleNamespace(protocol=self.protocol, transport=self.wire)

    def sweep(self, after_s: float = 0.0, *, short: bool = False) -> bool:
        """Whether the connection still lives then."""
        self.now += after_s
        self.accepted.sweep(self.now, hello_s=5.0, stuck_s=5.0, idle_s=0.5 if short else inf)
        return not self.wire.is_aborted


@pytest.fixture
def story():
    found = Story()
    found.protocol.transport = found.wire
    found.sweep()
    return found


def test_who_asks_nothing_has_a_few_seconds(story):
    assert story.sweep(4.9)
    assert not story.sweep(0.2)


def test_who_has_gone_is_forgotten(story):
    story.accepted.keep(story.request)
    gone = weakref.ref(story.protocol)
    story.protocol = story.request = None
    assert gone() is not None
    story.accepted.server.connections.clear()
    story.sweep()
    assert gone() is None


def test_who_waits_for_an_answer_is_left_alone(story):
    story.accepted.keep(story.request)
    assert all(story.sweep(10.0) for _ in range(10))


def test_where_descriptors_are_short_nobody_keeps_one_between_two_requests(story):
    async def ask() -> None:
        async def handled(_: object) -> None:
            story.now += 100.0
            assert story.sweep(short=True), "it waits for its answer"

        await story.accepted.note(story.request, handled)

    asyncio.run(ask())
    assert story.sweep(100.0)
    asyncio.run(ask())
    assert story.sweep(0.4, short=True)
    assert not story.sweep(0.2, short=True)


def test_who_takes_too_little_is_cut(story):
    story.accepted.keep(story.request)
    story.wire.waiting_bytes = 10 * PIECE_BYTES
    story.sweep()
    for _ in range(4):
        story.wire.waiting_bytes -= PIECE_BYTES
        assert story.sweep(4.0), "it takes enough"
    story.wire.waiting_bytes -= 1000
    assert story.sweep(4.0)
    assert not story.sweep(2.0)


def test_an_answer_that_nobody_takes_does_not_keep_a_connection_that_closes(story):
    story.accepted.keep(story.request)
    story.wire.waiting_bytes, story.wire.is_ending, story.protocol.transport = 1000, True, None
    assert story.sweep()
    assert not story.sweep(6.0)


def test_a_line_is_no_asker_until_it_ends(story):
    story.accepted.keep(story.request)
    story.accepted.release(story.request)
    story.wire.waiting_bytes = 1000
    assert all(story.sweep(10.0) for _ in range(3)), "the server sweeps its lines itself"
    story.accepted.keep(story.request)
    assert story.sweep()
    assert not story.sweep(6.0)


# --- a server ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(server_module, "HELLO_S", 0.2)
    monkeypatch.setattr(server_module, "STUCK_S", 0.2)
    monkeypatch.setattr(server_module, "SWEEP_S", 0.05)
    monkeypatch.setattr(serving, "STOP_S", 10 * PATIENCE_S)  # nobody has to wait for that
    found = tensorhub.serve()
    yield found
    closing = threading.Thread(target=found.close, daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive(), "the server does not end"


def connected(server, *, keeps_bytes: int = 4096) -> socket.socket:
    host, port = server.address.split(":")
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


@pytest.mark.parametrize(
    "said", [b"", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"], ids=["nothing", "half a request"]
)
def test_who_completes_no_request_is_hung_up_on(server, said):
    with connected(server) as silent, connected(server) as asker:
        asker.sendall(ASK % b"/healthz")
        assert b" 200 " in asker.recv(4096)
        silent.sendall(said)
        assert rest(silent) == b""
        asker.sendall(2 * (ASK % b"/healthz") + ASK % b"/v1/wait?model=m&spec=1&timeout=0.5")
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
def test_who_does_not_read_a_long_answer_is_cut(server):
    aiohttp_server = server._server.shell.accepted.server
    with connected(server) as idle, connected(server) as reader:
        idle.sendall(ASK % b"/v1/status")
        eventually(lambda: len(aiohttp_server.connections) == 2, "both are there")
        eventually(lambda: not aiohttp_server.connections, "who does not read is cut, and who asks nothing")
        assert len(rest(idle)) < len(LONG)
        assert rest(reader) == b""


@pytest.mark.usefixtures("long_status")
def test_who_reads_a_long_answer_gets_all_of_it(server, monkeypatch):
    monkeypatch.setattr(server_module, "STUCK_S", PATIENCE_S)
    with connected(server, keeps_bytes=1 << 20) as reader:
        reader.sendall((ASK % b"/v1/status").replace(b"Host: localhost", b"Host: localhost\r\nConnection: close"))
        assert rest(reader).partition(b"\r\n\r\n")[2] == LONG


@pytest.mark.usefixtures("long_status")
def test_who_does_not_read_does_not_keep_the_server_from_ending(server, monkeypatch):
    monkeypatch.setattr(server_module, "STUCK_S", 10 * PATIENCE_S)
    with connected(server) as idle:
        idle.sendall(ASK % b"/v1/status")
        assert idle.recv(100).startswith(b"HTTP/1.1 200 ")
        closing = threading.Thread(target=server.close, daemon=True)
        closing.start()
        closing.join(PATIENCE_S)
        assert not closing.is_alive()


def test_who_shows_no_token_keeps_no_connection():
    with tensorhub.serve() as server:
        for path, code in (
            (b"/healthz", b" 200 "),
            (b"/v1/status", b" 401 "),
            (b"/v1/wait", b" 401 "),
            (b"/no", b" 404 "),
        ):
            with connected(server) as stranger:
                stranger.sendall(STRANGE % path)
                said = rest(stranger)  # to the end: it is hung up on
                assert code in said.splitlines()[0]
                assert b"connection: close" in said.lower()
        with connected(server) as friend:
            for _ in range(2):
                friend.sendall(ASK % b"/v1/status")
                assert b" 200 " in friend.recv(1 << 16).splitlines()[0]


def test_where_nobody_needs_a_token_connections_are_kept():
    with tensorhub.serve(insecure=True) as server, connected(server) as asker:
        for _ in range(2):
            asker.sendall(STRANGE % b"/healthz")
            assert b" 200 " in asker.recv(4096)
