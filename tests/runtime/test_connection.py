"""A worker's connection: what it says of a server that is away, and a name service that hangs."""

import asyncio
import contextlib
import logging
import re
import socket
import subprocess
import sys
import threading
import time

import aiohttp
import pytest
from aiohttp import web

import tensorhub
from tensorhub.protocol.errors import Unavailable
from tensorhub.protocol.messages import Orders
from tensorhub.protocol.names import Number
from tensorhub.runtime import connection
from tensorhub.runtime.config import worker_options
from tensorhub.runtime.connection import Connection, ThreadResolver, encode
from tensorhub.runtime.questions import wait_for_version

from .kit import PATIENCE_S, eventually, hello

AWAY = "m/r[0]: no reference server at "


class Server:
    """Answers each hello with orders, or hangs up without a word."""

    def __init__(self, *, answers: bool) -> None:
        self.called = asyncio.Event()
        self._answers = answers

    async def start(self, port: int = 0) -> int:
        app = web.Application()
        app.router.add_get("/v1/session", self._session)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        return self._runner.addresses[0][1]

    async def _session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self._answers:
            await socket.send_bytes(encode(Orders(Number(1), Number(1), 0, 1.0, 1.0, 1.0)))
        self.called.set()
        if self._answers:
            await socket.receive()  # the hello
            await socket.receive()  # the end
        return socket

    async def end(self) -> None:
        await self._runner.cleanup()


def test_a_server_that_hung_up_before_it_said_a_word_is_missed_too(caplog):
    async def story():
        server = Server(answers=False)
        port = await server.start()
        line = asyncio.create_task(Connection(f"127.0.0.1:{port}", hello(), lambda _: None).run())
        await server.called.wait()
        await server.end()
        await asyncio.to_thread(eventually, lambda: AWAY in caplog.text)
        again = Server(answers=True)
        await again.start(port)
        await asyncio.to_thread(eventually, lambda: "is back after" in caplog.text)
        line.cancel()
        await again.end()

    with caplog.at_level(logging.WARNING, logger="tensorhub"):
        asyncio.run(story())
    said = [record for record in caplog.messages if record.startswith("m/r[0]: ")]
    assert [AWAY in record for record in said] == [True, False], "once away, and once back"


def test_it_was_away_since_it_was_last_heard(caplog):
    """A host that is gone without a word is left only after a while, and is not reached only after another one."""
    line = Connection("127.0.0.1:1", hello(), lambda _: None)
    line._heard_at = time.monotonic() - 40.0
    with caplog.at_level(logging.WARNING, logger="tensorhub"):
        for _ in range(3):
            line._note_failure(aiohttp.ServerTimeoutError())
        line._note_back()
    away, back = caplog.messages
    assert away == AWAY + "127.0.0.1:1: it does not answer"
    found = re.search(r"is back after (\S+) s", back)
    assert found is not None
    assert 40.0 <= float(found[1]) < 40.0 + PATIENCE_S


@contextlib.contextmanager
def answering(reply: bytes | None):
    """Who accepts whoever comes, reads a little, and says that; None: nothing, for as long as the block lasts."""
    listener, accepted = socket.create_server(("127.0.0.1", 0)), []

    def serve():
        with contextlib.suppress(OSError):
            while True:
                accepted.append(listener.accept()[0])
                if reply is not None:
                    accepted[-1].recv(4096)
                    accepted[-1].sendall(reply)
                    accepted[-1].close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    thread.join(PATIENCE_S)
    for each in (listener, *accepted):
        each.close()


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (None, "it does not answer"),
        (b"", "it closed the connection"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "what answers there is no reference server"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok", "its answer broke off"),
        (b"HTTP/1.1 418 x\r\nContent-Length: 5\r\n\r\n\x1b[2J\n", "HTTP 418 \\x1b[2J"),
    ],
)
def test_what_is_wrong_is_said_in_plain_words(reply, says):
    with answering(reply) as address:
        with pytest.raises(tensorhub.ServerUnreachable) as raised:
            tensorhub.connect(address, timeout=1.0).status()
        assert str(raised.value) == f"no reference server at {address}: {says}"
        with pytest.raises(tensorhub.DeadlineExceeded) as late:
            asyncio.run(wait_for_version(worker_options(server=address), "m", 1, time.monotonic() + 1.0))
        assert str(late.value).endswith(f" s: no reference server at {address}: {says}")


REFUSALS = {b"503 Service Unavailable": "it is stopping", b"507 Insufficient Storage": "it is full of connections"}


@pytest.mark.parametrize(("status", "says"), REFUSALS.items(), ids=REFUSALS.values())
def test_a_server_that_takes_nobody_in_is_not_said_to_be_missing(status, says):
    with answering(b"HTTP/1.1 %s\r\nContent-Length: 3\r\n\r\nany" % status) as address:
        with pytest.raises(tensorhub.ServerUnreachable) as raised:
            tensorhub.connect(address, timeout=1.0).status()
        assert str(raised.value) == f"the reference server at {address} let no client in: {says}"
        assert "start one" not in raised.value.hint
        with pytest.raises(tensorhub.DeadlineExceeded) as late:
            asyncio.run(wait_for_version(worker_options(server=address), "m", 1, time.monotonic() + 1.0))
        assert str(late.value).endswith(f" s: the reference server at {address} let no client in: {says}")


def test_too_much_said_by_strangers_is_no_missing_server():
    reply = b"HTTP/1.1 413 Request Entity Too Large\r\nContent-Length: 0\r\n\r\n"
    with answering(reply) as address, pytest.raises(tensorhub.ServerUnreachable) as raised:
        tensorhub.open("m", replica="r", server=address, timeout=0.5)
    said = r"let no client in within 0\.[45] s: clients that have not said hello"
    assert re.search(said, str(raised.value))
    assert "start one" not in raised.value.hint


# --- names ------------------------------------------------------------------------------------------------------------


HANGING = """
import asyncio, socket, threading
import tensorhub
asked, never = threading.Event(), threading.Event()
def hang(*_, **__):
    asked.set()
    never.wait()
socket.getaddrinfo = hang
"""
ASKS = """
for ask in (lambda view: view.status(), lambda view: view.next_version("m")):
    try:
        ask(tensorhub.connect("far.example:7450", timeout=0.5))
    except tensorhub.ServerUnreachable as error:
        print(error)
asked.clear()
"""
CONNECTS = """
from tensorhub.protocol.messages import PROTOCOL, Hello
from tensorhub.runtime.connection import Connection
async def story():
    hello = Hello(PROTOCOL, "m", "r", 0, 1, "life")
    line = asyncio.create_task(Connection("far.example:7450", hello, lambda _: None).run())
    while not asked.is_set():
        await asyncio.sleep(0.01)
    line.cancel()
asyncio.run(story())
"""


@pytest.mark.processes
def test_a_name_service_that_hangs_keeps_no_process_alive():
    program = HANGING + ASKS + CONNECTS
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert child.returncode == 0, child.stderr
    said = child.stdout.splitlines()
    assert len(said) == 2
    assert all(each.endswith("it does not answer") for each in said)


def test_an_address_of_one_link_keeps_its_link(monkeypatch):
    link = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fe80::1", 80, 0, 1))
    plain = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 80))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [link, plain])
    found = asyncio.run(ThreadResolver().resolve("far.example", 80))
    assert [(each["host"].partition("%")[0], each["port"]) for each in found] == [("fe80::1", 80), ("10.0.0.1", 80)]
    assert found[0]["host"] == socket.getnameinfo(("fe80::1", 80, 0, 1), socket.NI_NUMERICHOST)[0]


def test_where_no_thread_can_be_started_the_server_is_away_for_now(monkeypatch):
    async def refuse(*_, **__):
        raise Unavailable("this process may start no more threads")

    monkeypatch.setattr(connection, "in_thread", refuse)
    with pytest.raises(OSError, match="no more threads"):
        asyncio.run(ThreadResolver().resolve("far.example", 80))
