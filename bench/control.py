"""What the reference server costs: its decisions alone, and with sockets, for 50 and for 500 workers.

The workers are not real: each says over its own WebSocket that it holds a version, again and again, each report as soon
as the one before was answered. What is measured is the server.
"""

import asyncio
import time
from collections.abc import Iterator

import aiohttp
from msgspec.structs import replace

from tensorhub.protocol.manifest import Layout, TensorSpec
from tensorhub.protocol.messages import PROTOCOL, Hello, Holding, LayoutInfo, Orders, Report
from tensorhub.protocol.names import Digest, ModelName, ReplicaName, Shard, Version
from tensorhub.protocol.settings import Settings
from tensorhub.runtime.connection import decode_to_worker, encode
from tensorhub.server import Server as Machine

from .processes import Failed, Server, own_token
from .section import Options, Section

PATIENCE_S = 30.0
LAYOUT = Layout((TensorSpec("w", "float32", (1024,), (1,), 0, 4096),), 4096)


def _hello(index: int) -> Hello:
    return Hello(
        protocol=PROTOCOL,
        model=ModelName("m"),
        replica=ReplicaName(f"replica-{index:04d}"),
        shard=Shard(0),
        shards=1,
        life=f"life-{index}",
        endpoints=(f"tcp://10.0.0.1:{1000 + index}",),
        host=f"host-{index}",
    )


def _reports(session: int) -> Iterator[Report]:
    """What a worker says that holds a version and does nothing else."""
    buffer = Holding(Version(1), Digest("root"))
    first = Report(1, layout=LAYOUT.digest(), size_bytes=LAYOUT.size_bytes, buffer=buffer)
    number = 0
    while True:
        number += 1
        yield replace(first, number=number, session=session)  # type: ignore[arg-type]


def pure(workers: int, reports: int) -> float:
    """Seconds of CPU for one report, in the machine alone."""
    machine = Machine(Settings(lease_s=1000.0), 0.0, 1, fresh=True)
    streams = []
    for index in range(workers):
        sender = f"line-{index}"
        machine.handle(_hello(index), sender=sender, now=0.0)
        machine.handle(LayoutInfo.of(LAYOUT), sender=sender, now=0.0)
        session = _session(machine.handle(next(_reports(0)), sender=sender, now=0.0), sender)
        streams.append((sender, _reports(session)))
    rounds = max(1, reports // workers)
    messages = [[(sender, next(stream)) for sender, stream in streams] for _ in range(rounds + 1)]
    for sender, message in messages[0]:
        machine.handle(message, sender=sender, now=0.5)
    began = time.process_time()
    for number, batch in enumerate(messages[1:]):
        for sender, message in batch:
            machine.handle(message, sender=sender, now=1.0 + number)
    return (time.process_time() - began) / (rounds * workers)


def _session(outbox: list[tuple[str, object]], sender: str) -> int:
    for name, message in outbox:
        if name == sender and isinstance(message, Orders):
            return int(message.session)
    raise Failed("the server gave no session")


async def _converse(
    http: aiohttp.ClientSession, address: str, index: int, gate: asyncio.Event, end: list[float]
) -> int:
    """One worker. Returns how many of its reports were answered while it counted."""
    async with http.ws_connect(f"http://{address}/v1/session", max_msg_size=1 << 20) as line:
        await line.send_bytes(encode(replace(_hello(index), token=own_token())))  # the server has made one by now
        await line.send_bytes(encode(LayoutInfo.of(LAYOUT)))
        reports = _reports(0)
        session = await _answered(line, next(reports))
        reports = _reports(session)
        next(reports)
        await gate.wait()
        count = 0
        while time.monotonic() < end[0]:
            await _answered(line, next(reports))
            count += 1
        return count


async def _answered(line: aiohttp.ClientWebSocketResponse, report: Report) -> int:
    await line.send_bytes(encode(report))
    while True:
        frame = await line.receive(timeout=PATIENCE_S)
        if frame.type is not aiohttp.WSMsgType.BINARY:
            raise Failed(f"the server hung up: {frame}")
        orders = decode_to_worker(frame.data)
        if not isinstance(orders, Orders):
            raise Failed(f"the server refused: {orders}")
        if orders.acknowledged >= report.number:
            return int(orders.session)


async def _load(server: Server, workers: int, seconds: float) -> dict[str, float]:
    gate, end = asyncio.Event(), [0.0]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http, asyncio.TaskGroup() as group:
        tasks = [group.create_task(_converse(http, server.address, index, gate, end)) for index in range(workers)]
        await asyncio.sleep(0.3 + workers * 0.004)  # until about all are there; late ones only count later
        before, began = server.cpu_s(), time.monotonic()
        end[0] = began + seconds
        gate.set()
        done = await asyncio.gather(*tasks)
        cpu, took = server.cpu_s() - before, time.monotonic() - began
    return {"workers": workers, "reports_per_s": sum(done) / took, "cpu_s_per_report": cpu / max(1, sum(done))}


def run(options: Options) -> list[Section]:
    """The part."""
    section = Section(
        "server",
        "The reference server: one report",
        ("workers", "decision alone, CPU", "over WebSocket, CPU of the server", "reports a second", "at one a second"),
    )
    figures = []
    for workers in (5, 20) if options.is_tiny else (50, 500):
        options.tell(f"server: {workers} workers")
        alone = min(pure(workers, 200 if options.is_tiny else 20_000) for _ in range(1 if options.is_tiny else 3))
        with Server() as server:
            found = asyncio.run(
                asyncio.wait_for(_load(server, workers, 0.3 if options.is_tiny else 5.0), PATIENCE_S * 2)
            )
        figures.append({**found, "pure_cpu_s_per_report": alone})
        section.rows.append(
            [
                str(workers),
                f"{alone * 1e6:.1f} µs",
                f"{found['cpu_s_per_report'] * 1e6:.0f} µs",
                f"{found['reports_per_s']:,.0f}",
                f"{found['cpu_s_per_report'] * workers:.1%} of a core",
            ]
        )
    section.figures = {"server": figures}
    section.notes.append("the load comes from one process on the same machine and shares its cores with the server")
    return [section]
