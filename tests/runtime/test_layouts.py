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

from .kit import PATIENCE_S, ServerProcess, eventually, hello, line_to


def layout(name: str) -> LayoutInfo:
    return LayoutInfo.of(Layout((TensorSpec(name, "uint8", (16,), (1,), 0, 16),), 16))


A = layout("a")


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


async def test_those_who_never_say_what_they_named_cost_nobody_the_lease():
    """The first to name it are asked and are silent; who has the layout reports, and is not asked for long."""

    async with contextlib.AsyncExitStack() as lines:
        server = lines.enter_context(tensorhub.serve(lease_s=2, report_s=0.2))
        for number in range(8):
            silent = line_to(server.address, hello(replica=f"liar-{number}"), Report(1, layout=A.digest()))
            await heard(await lines.enter_async_context(silent), Orders)
        own = await lines.enter_async_context(
            line_to(server.address, hello(replica="honest"), Report(1, layout=A.digest()))
        )
        assert (await heard(own, Orders)).acknowledged == 1


async def test_a_last_report_that_makes_no_sense_ends_its_line_and_not_the_server(server, monkeypatch):
    machine = server._server.shell.machine
    handle = machine.handle

    def choke(message, **how):
        if isinstance(message, Report):
            raise KeyError("a shard that never was")
        return handle(message, **how)

    async with line_to(server.address, hello(), Report(1, layout=A.digest())) as line:
        await heard(line, LayoutWanted)
        monkeypatch.setattr(machine, "handle", choke)
    eventually(lambda: not server._server.shell._sockets, "the line has ended")
    monkeypatch.undo()
    async with line_to(server.address, hello(replica="s"), Report(1)) as other:
        assert (await heard(other, Orders)).acknowledged == 1


async def test_a_stopped_worker_keeps_nobody_waiting_for_its_layout(server):
    """It has named its layout, is asked, and says nothing; who has the same one is asked next."""

    async with line_to(server.address, hello(), Report(1, layout=A.digest())) as stopped:
        assert await heard(stopped, LayoutWanted) == LayoutWanted(A.digest())
        async with line_to(server.address, hello(replica="s"), Report(1, layout=A.digest())) as other:
            assert await heard(other, LayoutWanted) == LayoutWanted(A.digest())
            await says(other, A)
            assert (await heard(other, Orders)).acknowledged == 1
            assert (await heard(stopped, Orders)).acknowledged == 1


async def test_the_last_thing_that_a_line_says_counts_though_its_layout_never_came(server):
    report = Report(1, layout=A.digest(), newest=Version(7), buffer=Holding(Version(7), Digest("root")))
    async with line_to(server.address, hello(), report) as line:
        await heard(line, LayoutWanted)
    eventually(lambda: server.status().counters.get("reports") == 1, "the report is taken")


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
