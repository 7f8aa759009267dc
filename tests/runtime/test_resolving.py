"""A name service that hangs: calls end by their deadline, and nothing keeps the process alive after them."""

import asyncio
import socket
import subprocess
import sys

import pytest

import tensorhub
from tensorhub.protocol.errors import Unavailable
from tensorhub.runtime import connection
from tensorhub.runtime.connection import ThreadResolver

from .kit import PATIENCE_S

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
try:
    tensorhub.connect("far.example:7450", timeout=0.5).status()
except tensorhub.ServerUnreachable as error:
    print(error)
"""
WAITS = """
try:
    tensorhub.connect("far.example:7450", timeout=0.5).next_version("m")
except tensorhub.ServerUnreachable as error:
    print(error)
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
print("it does not answer")
"""


@pytest.mark.processes
@pytest.mark.parametrize("work", [ASKS, WAITS, CONNECTS], ids=["a question", "a wait", "a worker's line"])
def test_a_name_service_that_hangs_keeps_no_process_alive(work):
    child = subprocess.run([sys.executable, "-c", HANGING + work], capture_output=True, text=True, timeout=PATIENCE_S)
    assert child.returncode == 0, child.stderr
    assert child.stdout.strip().endswith("it does not answer")


def test_names_are_found_as_before():
    with tensorhub.serve() as server:
        port = server.address.rpartition(":")[2]
        assert tensorhub.connect(f"localhost:{port}").models() == []


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
