"""Several data planes in one loop, with real transports, and no server: the test grants what is read from whom."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import TypeVar

import numpy as np

from memory.cutting import Model, Shard, draw_layout, draw_model
from tensorhub.memory.registration import register
from tensorhub.protocol.messages import Grant, Source
from tensorhub.protocol.names import Digest, Ticket, Version, worker_id
from tensorhub.reshard.grid import Cutting, Grid
from tensorhub.reshard.read import tiled_version
from tensorhub.reshard.wire import decode_table
from tensorhub.runtime.dataplane import DataPlane
from tensorhub.transport.tcp.transport import TcpTransport
from tensorhub.worker.events import ReadEnded, ReadOpened

T = TypeVar("T")

V = Version(3)
CHUNK = 64  # so that small tensors have several
BAND_BYTES = 48


class Valve:
    """The memory of a source: lets so many blocks be read, and holds the next ones until it is opened."""

    def __init__(self, stream, allowed: int) -> None:
        self.size_bytes = stream.size_bytes
        self.held = threading.Event()
        self._stream = stream
        self._left = threading.Semaphore(allowed)
        self._is_open = threading.Event()

    @contextlib.contextmanager
    def views_to_read(self, start, stop):
        while not self._is_open.is_set() and not self._left.acquire(timeout=0.01):
            self.held.set()
        with self._stream.views_to_read(start, stop) as views:
            yield views

    def views_to_write(self, start, stop):
        return self._stream.views_to_write(start, stop)

    def open(self) -> None:
        self._is_open.set()


class Node:
    """One worker's data plane, what it told, and its tensors."""

    def __init__(
        self, replica: str, shard: Shard, number: int = 0, make: Callable = TcpTransport, chunk_bytes: int = CHUNK
    ) -> None:
        self.me = worker_id("m", replica, number)
        self.shard = shard
        self.chunk_bytes = chunk_bytes
        self.told: list[object] = []
        self.transport = make()
        self.registration = register(shard.arrays, boxes=shard.boxes)
        transports = {self.transport.endpoint.partition("://")[0]: self.transport}
        self.data = DataPlane(self.me, transports, verify="full", tell=self.told.append, chunk_bytes=chunk_bytes)
        self.data.register(self.registration)
        self.data.trust(float("inf"))

    @property
    def endpoints(self) -> tuple[str, ...]:
        return (self.transport.endpoint,)

    def publish(self, grid: Grid, *, valve: int | None = None) -> "Valve | None":
        """What it has now. With a valve so many blocks are read, and then no more until it is opened."""
        tiled = tiled_version(self.registration, grid, self.chunk_bytes)
        found = None
        if valve is not None:  # of no certain address: Python reads it, block by block
            found = Valve(self.registration.stream, valve)
            self.data.registration = replace(self.registration, stream=found)
        self.data.prepare(tiled)
        self.data.start_serving(V, tiled.root())
        self.root = tiled.root()
        return found

    def grant(self, ticket: int, source: "Node", *, root: str = "", **options: object) -> Grant:
        return Grant(Ticket(ticket), V, (self.source(source, root),), "as the test wants", **options)

    @staticmethod
    def source(node: "Node", root: str = "") -> Source:
        return Source(node.me, False, node.endpoints, Digest(root or node.root))

    def open(self, nodes: Sequence["Node"], ticket: int = 1, *, root: str = "", **options: object) -> None:
        sources = tuple(self.source(node, root) for node in nodes)
        self.granted = Grant(Ticket(ticket), V, sources, "as the test wants", is_across=True, **options)
        self.data.open_read(self.granted)

    def start(self) -> None:
        """What was opened last."""
        self.data.start_read(self.granted)

    def of(self, kind: type) -> list:
        return [event for event in self.told if isinstance(event, kind)]

    async def until(self, kind: type, count: int = 1) -> list:
        async with asyncio.timeout(20):
            while len(self.of(kind)) < count:
                assert kind is ReadEnded or not self.of(ReadEnded), self.told
                await asyncio.sleep(0.002)
        return self.of(kind)

    async def seen(self, look: Callable[[], T | None]) -> T:
        """What it gives, once it gives anything."""
        async with asyncio.timeout(20):
            while not (found := look()):  # noqa: ASYNC110 - some of it happens in threads
                await asyncio.sleep(0.002)
        return found

    async def ended(self) -> ReadEnded:
        (found,) = await self.until(ReadEnded)
        return found

    async def fill(self, nodes: Sequence["Node"], ticket: int = 1, **options: object) -> None:
        """All of it, across."""
        self.told.clear()
        self.open(nodes, ticket, **options)
        (opened,) = await self.until(ReadOpened)
        self.root = opened.root
        self.start()
        ended = await self.ended()
        assert ended.complete, ended

    async def follow(self, ticket: int, source: "Node", **options: object) -> ReadEnded:
        """Out of a source of the same layout."""
        grant = self.grant(ticket, source, **options)
        self.root = grant.root
        self.data.start_read(grant)
        return await self.ended()

    def close(self) -> None:
        self.data.close()


class Fleet:
    """A model, its publishers, and the first shard of readers with another layout."""

    def __init__(self, seed: int, *, publishers: int = 2, readers: int = 1, make: Callable = TcpTransport) -> None:
        self.chance = Random(seed)
        self.model: Model = draw_model(self.chance)
        self.nodes: list[Node] = []
        self._make = make
        self._chunk_bytes = CHUNK
        cut = draw_layout(self.chance, self.model, publishers)
        for shard in cut:
            shard.fill(self.model)
        self.reader_cut = draw_layout(self.chance, self.model, readers)
        for shard in self.reader_cut:
            shard.spoil(self.chance)
        self.publishers = [self.node("t", shard, number) for number, shard in enumerate(cut)]
        self.readers = [self.node("r", shard, number) for number, shard in enumerate(self.reader_cut)]
        self.grid = self.grid_of(self.publishers, self.readers)

    @classmethod
    def of_rows(cls, *, sources: int = 2, readers: int = 1, rows: int = 4096, columns: int = 2048) -> "Fleet":
        """One matrix whose rows are cut in `sources` parts, held by two replicas, and readers of its last columns."""
        fleet = cls.__new__(cls)
        fleet.nodes, fleet._make, fleet.chance, fleet._chunk_bytes = [], TcpTransport, Random(5), 1 << 16
        data = np.frombuffer(fleet.chance.randbytes(rows * columns), np.uint8).reshape(rows, columns)
        fleet.model = {"layers/0.w": data}
        shape, step, half = (rows, columns), rows // sources, columns // 2
        fleet.publishers, fleet.others = ([], [])
        for name, group in (("t", fleet.publishers), ("other", fleet.others)):
            for number in range(sources):
                shard, memory = Shard(), np.zeros((step, columns), np.uint8)
                part = ((number * step, 0), (step, columns))
                shard.add_array("w", memory, [("layers/0.w", shape, part, memory)])
                shard.finish().fill(fleet.model)
                group.append(fleet.node(name, shard, number))
        fleet.readers = []
        for number in range(readers):
            shard, memory = Shard(), np.zeros((rows, half), np.uint8)
            shard.add_array("w", memory, [("layers/0.w", shape, ((0, half), (rows, half)), memory)])
            fleet.readers.append(fleet.node(f"r{number}", shard.finish()))
        fleet.grid = cls.grid_of(fleet.publishers, fleet.readers, 1 << 18)
        return fleet

    def node(self, replica: str, shard: Shard, number: int = 0) -> Node:
        self.nodes.append(Node(replica, shard, number, self._make, self._chunk_bytes))
        return self.nodes[-1]

    @staticmethod
    def grid_of(publishers, readers, band_bytes: int = BAND_BYTES) -> Grid:
        cutting = Cutting(band_bytes, fewest_tiles=1 << 20)
        for node in publishers:
            cutting.add_publisher(decode_table(node.registration.boxes))
        for node in readers:
            cutting.add_other(decode_table(node.registration.boxes))
        return cutting.grid()

    def publish(self) -> None:
        for node in self.publishers:
            node.publish(self.grid)

    def close(self) -> None:
        for node in self.nodes:
            node.close()
