"""A standby server follows the journal of another one: when it takes over, and what it copies."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from tensorhub.protocol.errors import Refused, UsageError
from tensorhub.protocol.settings import Settings
from tensorhub.runtime.journal import JournalFile
from tensorhub.runtime.standby import BEGINS, LIFE, PART, PATH, First, answer

LEASE_S = 0.4
Handler = Callable[[web.Request], web.Response]


class Primary:
    """Answers as a first server would, at a port of its own."""

    def __init__(self, handler: Handler) -> None:
        self.handler, self.asked = handler, 0

    async def __aenter__(self) -> "Primary":
        async def handle(request: web.Request) -> web.Response:
            self.asked += 1
            return self.handler(request)

        app = web.Application()
        app.router.add_get(PATH, handle)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.runner.cleanup()

    async def is_asked(self, times: int) -> None:
        until = time.monotonic() + 20
        while self.asked < times:
            assert time.monotonic() < until, f"asked {self.asked} times only"
            await asyncio.sleep(0.01)

    def first(self) -> First:
        return First(f"127.0.0.1:{self.runner.addresses[0][1]}", "", Settings(lease_s=LEASE_S, report_s=0.02))


def well(_: web.Request) -> web.Response:
    return web.Response(body=b"", headers={LIFE: "5", PART: "a", BEGINS: "0"})


def says(status: int) -> Handler:
    return lambda _: web.Response(status=status)


@pytest.mark.parametrize(
    ("status", "error", "hint"), [(404, UsageError, "--state"), (421, UsageError, "--name"), (401, Refused, "token")]
)
async def test_a_server_that_answers_is_not_taken_over(
    tmp_path: Path, status: int, error: type[Exception], hint: str
) -> None:
    async with Primary(says(status)) as primary:
        with pytest.raises(error) as caught:
            await asyncio.wait_for(primary.first().follow(JournalFile(tmp_path / "copy")), 20)
    assert hint in caught.value.__notes__[0]


async def test_a_server_that_says_something_else_lives(tmp_path: Path) -> None:
    async with Primary(well) as primary:
        task = asyncio.create_task(primary.first().follow(JournalFile(tmp_path / "copy")))
        await primary.is_asked(1)
        primary.handler = says(503)
        await primary.is_asked(int(3 * LEASE_S / 0.02))
        assert not task.done()
        task.cancel()


async def test_a_pause_of_its_own_does_not_count(tmp_path: Path) -> None:
    async with Primary(well) as primary:
        task = asyncio.create_task(primary.first().follow(JournalFile(tmp_path / "copy")))
        await primary.is_asked(2)
        until = time.monotonic() + 5 * LEASE_S
        while time.monotonic() < until:  # the process stands still
            time.sleep(0.01)  # noqa: ASYNC251
        await primary.is_asked(primary.asked + 3)
        assert not task.done()
        task.cancel()


async def test_it_takes_over_only_what_it_knows(tmp_path: Path) -> None:
    first = First("127.0.0.1:1", "", Settings(lease_s=LEASE_S, report_s=0.02))
    with pytest.raises(TimeoutError):  # it may be too early, or the address is wrong
        await asyncio.wait_for(first.follow(JournalFile(tmp_path / "nothing")), 4 * LEASE_S)
    (tmp_path / "copy").write_bytes(b"")
    await asyncio.wait_for(first.follow(JournalFile(tmp_path / "copy")), 60)


def test_parts_of_two_servers_have_other_names(tmp_path: Path) -> None:
    parts = []
    for name in ("a", "b"):
        journal = JournalFile(tmp_path / name)
        journal.write([], is_whole=True)
        parts.append(journal.since("", 0)[0])
        journal.close()
    assert parts[0] != parts[1]


@pytest.mark.parametrize("query", ["life=" + "9" * 40, "life=-1", "offset=-1", "life=x"])
def test_numbers_that_no_server_has_are_refused(query: str) -> None:
    def stops(_: int) -> None:
        raise AssertionError("it stops for that")

    with pytest.raises(web.HTTPBadRequest):
        answer(make_mocked_request("GET", f"{PATH}?{query}"), None, 5, stops)
