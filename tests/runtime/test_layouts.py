"""Layouts on request: of all who name one, one is asked, and nobody's last word is lost."""

import asyncio
import contextlib

import numpy as np
import pytest

import tensorhub
from tensorhub.protocol.manifest import Layout, TensorSpec
from tensorhub.protocol.messages import Holding, LayoutInfo, LayoutWanted, Orders, Report
from tensorhub.protocol.names import Digest, Version
from tensorhub.runtime.connection import decode_to_worker, encode
from tensorhub.runtime.server import UnknownLayouts, WorkerSocket

from .kit import PATIENCE_S, ServerProcess, eventually, hello, line_to
from .test_intake import Socket


def layout(name: str) -> LayoutInfo:
    return LayoutInfo.of(Layout((TensorSpec(name, "uint8", (16,), (1,), 0, 16),), 16))


A, B = layout("a"), layout("b")


@pytest.fixture
def server():
    """Whose patience is long, so that the machine may be busy."""
    with tensorhub.serve(lease_s=4 * PATIENCE_S) as running:
        yield running


async def heard(socket, kind: type) -> object:
    """The next message of this kind on a raw line."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            message = decode_to_worker((await socket.receive()).data)
            if isinstance(message, kind):
                return message


async def says(socket, *messages: object) -> None:
    for message in messages:
        await socket.send_bytes(encode(message))


class Desk:
    """`UnknownLayouts` with lines that keep what they were asked."""

    def __init__(self, patience_s: float = 600.0) -> None:
        self.known: set[str] = set()
        self.asked: list[tuple[str, str]] = []
        self.through: list[tuple[str, int]] = []
        self.desk = UnknownLayouts(
            self.known.__contains__,
            lambda line, report: self.through.append((line.sender, report.number)),
            patience_s=patience_s,
        )

    def line(self, name: str) -> WorkerSocket:
        line = WorkerSocket(name, Socket(), Socket())
        line.ask = lambda wanted: self.asked.append((name, wanted))
        return line


def test_of_many_who_name_a_layout_one_is_asked_and_all_go_on_when_it_came():
    async def story() -> None:
        it = Desk()
        lines = [it.line(f"{number}") for number in range(100)]
        assert all(it.desk.holds(line, Report(1, layout=A.digest())) for line in lines)
        assert it.asked == [("0", A.digest())]
        it.desk.came(A.digest())
        it.desk.came(A.digest())
        assert it.through == [(line.sender, 1) for line in lines], "in their order, and once"

    asyncio.run(story())


def test_a_report_waits_for_the_layout_that_its_line_named_last():
    async def story() -> None:
        it = Desk()
        one, two = it.line("one"), it.line("two")
        assert not it.desk.holds(one, Report(1)), "it names none"
        for line, number in ((one, 1), (two, 1), (one, 2)):
            assert it.desk.holds(line, Report(number, layout=A.digest()))
        it.desk.came(A.digest())
        assert it.through == [("one", 2), ("two", 1)], "the newest of a line, in its first place"
        it.desk.holds(one, Report(3, layout=A.digest()))
        it.desk.holds(one, Report(4, layout=B.digest()))
        it.desk.holds(two, Report(2, layout=A.digest()))
        assert not it.desk.holds(two, Report(3))
        it.desk.came(A.digest())
        it.desk.came(B.digest())
        assert it.through[2:] == [("one", 4)]

    asyncio.run(story())


def test_those_who_never_say_what_they_named_cost_nobody_the_lease():
    """The first to name it are asked and are silent; who has the layout reports, and is not asked for long."""

    async def story() -> None:
        async with contextlib.AsyncExitStack() as lines:
            server = lines.enter_context(tensorhub.serve(lease_s=2, report_s=0.2))
            for number in range(8):
                silent = line_to(server.address, hello(replica=f"liar-{number}"), Report(1, layout=A.digest()))
                await heard(await lines.enter_async_context(silent), Orders)
            own = await lines.enter_async_context(
                line_to(server.address, hello(replica="honest"), Report(1, layout=A.digest()))
            )
            assert (await heard(own, Orders)).acknowledged == 1

    asyncio.run(story())


def test_a_last_report_that_makes_no_sense_ends_its_line_and_not_the_server(server, monkeypatch):
    machine = server._server.shell.machine
    handle = machine.handle

    def choke(message, **how):
        if isinstance(message, Report):
            raise KeyError("a shard that never was")
        return handle(message, **how)

    async def story() -> None:
        async with line_to(server.address, hello(), Report(1, layout=A.digest())) as line:
            await heard(line, LayoutWanted)
            monkeypatch.setattr(machine, "handle", choke)
        eventually(lambda: not server._server.shell._sockets, "the line has ended")
        monkeypatch.undo()
        async with line_to(server.address, hello(replica="s"), Report(1)) as other:
            assert (await heard(other, Orders)).acknowledged == 1

    asyncio.run(story())


def test_a_stopped_worker_keeps_nobody_waiting_for_its_layout(server):
    """It has named its layout, is asked, and says nothing; who has the same one is asked next."""

    async def story() -> None:
        async with line_to(server.address, hello(), Report(1, layout=A.digest())) as stopped:
            assert await heard(stopped, LayoutWanted) == LayoutWanted(A.digest())
            async with line_to(server.address, hello(replica="s"), Report(1, layout=A.digest())) as other:
                assert await heard(other, LayoutWanted) == LayoutWanted(A.digest())
                await says(other, A)
                assert (await heard(other, Orders)).acknowledged == 1
                assert (await heard(stopped, Orders)).acknowledged == 1

    asyncio.run(story())


def test_the_last_thing_that_a_line_says_counts_though_its_layout_never_came(server):
    async def story() -> None:
        report = Report(1, layout=A.digest(), newest=Version(7), buffer=Holding(Version(7), Digest("root")))
        async with line_to(server.address, hello(), report) as line:
            await heard(line, LayoutWanted)
        eventually(lambda: server.status().counters.get("reports") == 1, "the report is taken")

    asyncio.run(story())


def test_another_layout_than_the_one_that_was_asked_for_helps_nobody(server):
    async def story() -> None:
        async with line_to(server.address, hello(), Report(1, layout=A.digest())) as line:
            await heard(line, LayoutWanted)
            await says(line, B, Report(2, layout=A.digest()))
            async with line_to(server.address, hello(replica="s"), Report(1, layout=B.digest())) as other:
                assert (await heard(other, Orders)).acknowledged == 1, "what it did say is known"
            await says(line, A)
            assert (await heard(line, Orders)).acknowledged == 2

    asyncio.run(story())


@pytest.mark.long
def test_after_a_restart_the_server_asks_few_for_what_all_have():
    with ServerProcess() as server, contextlib.ExitStack() as open_ones:
        view = tensorhub.connect(server.address)
        workers = [
            open_ones.enter_context(tensorhub.open("m", replica=f"r{number}", server=server.address))
            for number in range(6)
        ]
        for worker in workers:
            worker.register({f"w{number}": np.zeros(4) for number in range(200)})
        workers[0].publish(1)
        assert [worker.update("latest", timeout=PATIENCE_S) for worker in workers[1:]] == [1] * 5
        assert view.status().counters["layouts"] == 1, "they registered one after the other"
        server.kill()
        server.restart()
        eventually(lambda: are_back(view, len(workers)), "all are back")
        assert 1 <= view.status().counters["layouts"] < len(workers)
        workers[0].unpublish()
        workers[0].publish(2)
        assert [worker.update("latest", timeout=PATIENCE_S) for worker in workers[1:]] == [2] * 5


def are_back(view: tensorhub.View, workers: int) -> bool:
    with contextlib.suppress(tensorhub.TensorHubError):
        return len(view.replicas("m")) == workers and any(each.version == 1 for each in view.versions("m"))
    return False
