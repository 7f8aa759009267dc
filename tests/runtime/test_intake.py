"""What waits at the server: one report and one message of orders for each line, handled as of when it came."""

import asyncio
from math import inf

from tensorhub.protocol.messages import Orders, Refusal, Report
from tensorhub.protocol.names import Number
from tensorhub.protocol.settings import Settings
from tensorhub.runtime import server as server_module
from tensorhub.runtime.connection import decode_to_worker
from tensorhub.runtime.server import Intake, ServerShell, WorkerSocket
from tensorhub.server import state

from .kit import hello


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


async def test_only_the_newest_orders_wait():
    socket = Socket()
    line = WorkerSocket("line-1", socket, socket)
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


async def test_after_a_refusal_nothing_more_is_said():
    socket = Socket()
    socket.reads.set()
    line = WorkerSocket("line-1", socket, socket)
    line.post(orders(1))
    line.post(Refusal("refused", "no"))
    line.post(orders(2))
    await line.write()
    assert socket.sent == [Refusal("refused", "no")]
    assert socket.is_closed


async def test_who_takes_nothing_is_cut(monkeypatch):
    monkeypatch.setattr(server_module, "STUCK_S", 0.05)
    monkeypatch.setattr(server_module, "SWEEP_S", 0.01)

    shell = ServerShell(settings=Settings(), fresh=True)
    stuck, well = Socket(), Socket()
    well.reads.set()
    for name, socket in (("stuck", stuck), ("well", well)):
        line = shell._sockets[name] = WorkerSocket(name, socket, socket)
        line.has_said_hello = True
        line.post(orders(1))
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        tasks = [group.create_task(line.write()) for line in shell._sockets.values()]
        tasks.append(group.create_task(shell._sweep()))
        await stuck.ended.wait()
        for task in tasks:
            task.cancel()
    assert not well.is_cut


# --- reports ----------------------------------------------------------------------------------------------------------


class Clock:
    """Moves only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Busy:
    """A server's shell with lines that say what they are told to, and a machine each of whose decisions takes time."""

    def __init__(self, monkeypatch, *, lines: int, lease_s: float = 10.0) -> None:
        self.clock = Clock()
        self.shell = ServerShell(settings=Settings(lease_s=lease_s), fresh=True)
        self.shell.intake = Intake(self.shell, self.clock)
        self.machine = self.shell.machine
        awake = self.machine.state.clock
        awake.now = awake.started = self.clock.now
        self.decision_s = 0.0
        monkeypatch.setattr(self.shell, "_set_timer", lambda: None)
        handle = self.machine.handle
        monkeypatch.setattr(self.machine, "handle", lambda *given, **more: self._slowly(handle, *given, **more))
        self.lines = []
        for number in range(lines):
            socket = Socket()
            socket.reads.set()
            line = self.shell._sockets[f"line-{number}"] = WorkerSocket(f"line-{number}", socket, socket)
            self.lines.append(line)
            line.has_said_hello = True
            self.shell.intake.put(line, hello(replica=f"r{number}"))

    def _slowly(self, handle, *given, **more):
        self.clock.now += self.decision_s
        return handle(*given, **more)

    def report(self, number: int, **more: object) -> None:
        for line in self.lines:
            self.shell.intake.put(line, Report(number, **more))

    def run(self, story) -> None:
        async def whole():
            tasks = [asyncio.create_task(line.write()) for line in self.lines]
            tasks.append(asyncio.create_task(self.shell.intake.run()))
            await story()
            for task in tasks:
                task.cancel()

        asyncio.run(whole())

    async def until_idle(self) -> None:
        while self.shell.intake.is_busy:  # noqa: ASYNC110 - the turns of the loop are what is looked at
            await asyncio.sleep(0)
        await settle()

    def answered(self, line: WorkerSocket) -> list[int]:
        return [message.acknowledged for message in line.websocket.sent if isinstance(message, Orders)]


def test_orders_leave_while_reports_still_wait(monkeypatch):
    busy = Busy(monkeypatch, lines=20)

    async def story():
        busy.report(1)
        busy.decision_s = 0.5
        answered = []
        while busy.shell.intake.is_busy:
            answered.append(sum(bool(busy.answered(line)) for line in busy.lines))
            await asyncio.sleep(0)
        assert answered[-1] >= 18, answered

    busy.run(story)


def test_a_backlog_of_several_leases_ends_no_session_and_nobody_is_silent(monkeypatch):
    """All report once a second, a decision takes half a second: the backlog is longer than two leases."""
    busy = Busy(monkeypatch, lines=60)

    async def story():
        busy.report(1)
        await busy.until_idle()
        assert busy.machine.state.counters["sessions"] == 60
        busy.decision_s = 0.5
        for number in range(2, 40):
            busy.report(number)
            before = busy.clock.now
            while busy.shell.intake.is_busy and busy.clock.now < before + 1.0:  # noqa: ASYNC110 - turns of the loop
                await asyncio.sleep(0)
            silent = [m for m in busy.machine.state.members.all() if state.is_silent(busy.machine.state, m)]
            assert not silent
        busy.decision_s = 0.0
        await busy.until_idle()

    busy.run(story)
    assert busy.clock.now > 100.0 + 2 * busy.machine.state.settings.lease_s
    assert busy.machine.state.counters["sessions"] == 60
    assert len(busy.machine.state.members) == 60
    assert all(busy.answered(line)[-1] == 39 for line in busy.lines)


def test_who_really_dies_behind_a_backlog_is_dead_after_it(monkeypatch):
    busy = Busy(monkeypatch, lines=30)

    async def story():
        busy.report(1)
        await busy.until_idle()
        living, busy.decision_s = busy.lines[1:], 0.5
        for number in range(2, 40):
            for line in living:
                busy.shell.intake.put(line, Report(number))
            busy.clock.now += 0.5
            await busy.until_idle()

    busy.run(story)
    assert len(busy.machine.state.members) == 29
