"""A worker's line seen from the server: the newest orders wait, nobody else does, and who takes nothing is cut."""

import asyncio
from math import inf

from tensorhub.protocol.messages import Orders, Refusal
from tensorhub.protocol.names import Number
from tensorhub.protocol.settings import Settings
from tensorhub.runtime import server as server_module
from tensorhub.runtime.codec import decode_to_worker
from tensorhub.runtime.server import Line, ServerShell


class Socket:
    """A WebSocket whose other end reads only when told to."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.sent: list[object] = []
        self.reads = asyncio.Event()
        self.is_cut = False
        self.is_closed = False

    async def send_bytes(self, data: bytes) -> None:
        self.sent.append(decode_to_worker(data))
        await self.reads.wait()

    async def close(self, *, code: int) -> None:
        self.is_closed = True

    @property
    def transport(self) -> "Socket":  # of the request, too
        return self

    def abort(self) -> None:
        self.is_cut = True
        self.ended.set()


def orders(number: int) -> Orders:
    return Orders(Number(number), Number(1), 0, 1.0, 1.0, 1.0)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_only_the_newest_orders_wait():
    async def story():
        socket = Socket()
        line = Line("line-1", socket, socket)
        writer = asyncio.create_task(line.write())
        for number in range(1, 10_000):
            line.post(orders(number))
            if number == 1:
                await settle()
        assert line.sending_since < inf
        socket.reads.set()
        await settle()
        assert [each.number for each in socket.sent] == [1, 9_999]
        assert line.sending_since == inf
        writer.cancel()

    asyncio.run(story())


def test_after_a_refusal_nothing_more_is_said():
    async def story():
        socket = Socket()
        socket.reads.set()
        line = Line("line-1", socket, socket)
        line.post(orders(1))
        line.post(Refusal("refused", "no"))
        line.post(orders(2))
        await line.write()
        assert socket.sent == [Refusal("refused", "no")]
        assert socket.is_closed

    asyncio.run(story())


def test_who_takes_nothing_is_cut(monkeypatch):
    monkeypatch.setattr(server_module, "STUCK_S", 0.05)
    monkeypatch.setattr(server_module, "SWEEP_S", 0.01)

    async def story():
        shell = ServerShell(settings=Settings(), key="k", fresh=True)
        stuck, well = Socket(), Socket()
        well.reads.set()
        for name, socket in (("stuck", stuck), ("well", well)):
            line = shell._lines[name] = Line(name, socket, socket)
            line.has_said_hello = True
            line.post(orders(1))
        async with asyncio.timeout(5), asyncio.TaskGroup() as group:
            tasks = [group.create_task(line.write()) for line in shell._lines.values()]
            tasks.append(group.create_task(shell._sweep()))
            await stuck.ended.wait()
            for task in tasks:
                task.cancel()
        assert not well.is_cut

    asyncio.run(story())
