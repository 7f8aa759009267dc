"""A worker's line: what its log says of a server that is away and comes back."""

import asyncio
import logging
import re
import time

import aiohttp
from aiohttp import web

from tensorhub.core.messages import Orders
from tensorhub.core.names import Number
from tensorhub.runtime.codec import encode
from tensorhub.runtime.connection import Connection

from .kit import PATIENCE_S, hello

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


async def until(condition) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_server_that_hung_up_before_it_said_a_word_is_missed_too(caplog):
    async def story():
        server = Server(answers=False)
        port = await server.start()
        line = asyncio.create_task(Connection(f"127.0.0.1:{port}", hello(), lambda _: None).run())
        await server.called.wait()
        await server.end()
        await until(lambda: AWAY in caplog.text)
        again = Server(answers=True)
        await again.start(port)
        await until(lambda: "is back after" in caplog.text)
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
