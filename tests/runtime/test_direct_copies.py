"""Host copies of tensors on a device: registered ahead of need, copied directly, and given back in every ending.

The device is host memory that only `Device` reads and writes, and refuses host memory that is not registered.
"""

import asyncio
import contextlib
import ctypes
import gc
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import xxhash

import tensorhub
from tensorhub.memory import host_copies, registration
from tensorhub.memory.digests import OnDevice, build_manifest
from tensorhub.memory.host_copies import Direct, pinned_bytes
from tensorhub.memory.registration import Registration, register
from tensorhub.memory.streams import Freed, host_view
from tensorhub.protocol.layout import Box
from tensorhub.protocol.names import Version, worker_id
from tensorhub.reshard.read import grid_for, tiled_version
from tensorhub.runtime.content import Content, Known
from tensorhub.runtime.copies import HostCopies
from tensorhub.transport import sealed
from tensorhub.transport.base import Export, Transport
from tensorhub.worker.events import CopiedIn, CopiedOut, CopyDropped, Event

from .kit import eventually

DEADLINE_S = 20.0
STEP, CHUNK = 64 << 10, 24 << 10  # chunks lie across the ends of steps
SIZE = 10 * STEP + 12345
V = Version(1)

pytestmark = pytest.mark.skipif(bool(sealed.why_not()), reason=sealed.why_not() or "there")


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And nothing is left of a worker that a test has not closed: the limit is one of the whole process."""
    monkeypatch.setattr(host_copies, "PIN_STEP_BYTES", STEP)
    yield
    eventually(lambda: gc.collect() is not None and not pinned_bytes())


class Device:
    """A stream in device memory, and its driver."""

    def __init__(self, memory: np.ndarray) -> None:
        self._memory = memory
        self.size_bytes = memory.nbytes
        self.driver = Driver()
        self.through_ring = 0  # blocks
        self.copies: list[str] = []
        self.is_freed = False
        self.after_copy: Callable[[memoryview], object] = lambda view: None

    def views_to_read(self, start: int, stop: int) -> Any:
        self.through_ring += 1
        self._check(start)
        return contextlib.nullcontext([memoryview(bytearray(self._memory[start:stop]))])

    @contextlib.contextmanager
    def views_to_write(self, start: int, stop: int) -> Iterator[list[memoryview]]:
        self.through_ring += 1
        room = bytearray(stop - start)
        yield [memoryview(room)]
        self._check(start)
        self._memory[start:stop] = np.frombuffer(room, np.uint8)

    def registrar(self) -> "Driver":
        return self.driver

    def copy_to_host(self, start: int, stop: int, address: int) -> None:
        view = self._host(start, stop, address)
        view[:] = self._memory[start:stop].data
        self._copied("to host", view)

    def copy_to_device(self, start: int, stop: int, address: int) -> None:
        self._memory[start:stop] = np.frombuffer(self._host(start, stop, address), np.uint8)
        self._copied("to device", self._memory[start:stop].data)

    def hashes(self, start: int, stop: int) -> bool:
        return stop < self.size_bytes  # the last chunk is the host's

    def device_digests(self, chunk_bytes: int) -> list[tuple[range, bytes]]:
        every = range((self.size_bytes - 1) // chunk_bytes)
        return [(every, b"".join(self.device_digests_of(chunk_bytes, every).values()))]

    def device_digests_of(self, chunk_bytes: int, chunks: Sequence[int]) -> dict[int, bytes]:
        self._check(0)
        views = {chunk: self._memory[chunk * chunk_bytes : (chunk + 1) * chunk_bytes].data for chunk in chunks}
        return {chunk: xxhash.xxh3_128_digest(view) for chunk, view in views.items()}

    def _host(self, start: int, stop: int, address: int) -> memoryview:
        self._check(start)
        assert self.driver.has(address, stop - start), "not within one registration"
        return host_view(address, stop - start, None)

    def _copied(self, way: str, view: memoryview) -> None:
        self.copies.append(way)
        self.after_copy(view)

    def _check(self, start: int) -> None:
        if self.is_freed:
            raise Freed(start)


class Driver:
    """Remembers what is registered."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.count = 0
        self.most: int | None = None  # registrations that succeed
        self.before: Callable[[], object] = lambda: None

    def register(self, address: int, size_bytes: int) -> None:
        self.before()
        if self.count == self.most:
            raise RuntimeError("out of memory (2)")
        assert not any(at < address + size_bytes and address < at + size for at, size in self.registered.items())
        ctypes.string_at(address + size_bytes - 1, 1)  # it is there
        self.registered[address] = size_bytes
        self.count += 1

    def unregister(self, address: int) -> None:
        ctypes.string_at(address, 1)  # it still is
        del self.registered[address]

    def has(self, address: int, size_bytes: int) -> bool:
        return any(at <= address and address + size_bytes <= at + size for at, size in self.registered.items())


class Nobody:
    """A transport that no peer reads by."""

    def export(self, export: Export) -> None:
        pass


class Worker:
    """Published tensors on a device, and the host copies of their worker. Used in its loop."""

    def __init__(self, *, pinned_bytes: int | None = None, boxes: list[Box] | None = None) -> None:
        """`boxes`: it is published in tiles."""
        self.memory = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
        self.bytes = self.memory.tobytes()
        on_host = register({"w": self.memory}, boxes={"w": boxes} if boxes else None)
        manifest: Known = build_manifest(on_host, CHUNK)
        if boxes:
            manifest = tiled_version(on_host, grid_for([on_host.boxes], []), CHUNK)
        self.device = Device(self.memory)
        self.driver = self.device.driver
        assert isinstance(self.device, Direct)
        assert isinstance(self.device, OnDevice)
        self.registration: Registration = replace(on_host, stream=self.device, pieces=(), devices=())
        self.told: asyncio.Queue[Event] = asyncio.Queue()
        me = worker_id("m", "r", 0)
        tell, withdraw = self.told.put_nowait, lambda key: None
        self.copies = HostCopies(
            me, {"none": cast(Transport, Nobody())}, verify="full", limit_bytes=None, tell=tell, withdraw=withdraw
        )
        self.copies.pinned_bytes = pinned_bytes
        self.copies.register(self.registration)
        self.content = Content(V, manifest.root(), "m/1/0", self.registration)
        self.content.manifest = manifest

    @property
    def pool(self) -> Any:
        return self.copies._pool

    async def prepared(self) -> None:
        self.copies.prepare(self.registration)
        await asyncio.to_thread(self.pool._preparing.join, DEADLINE_S)

    async def copied_out(self) -> CopiedOut:
        self.copies.copy_to_host(self.content)
        return await self.event(CopiedOut)

    async def copied_in(self) -> CopiedIn:
        self.memory[:] = 0
        self.copies.copy_in(V, self.registration, lambda known: None)
        return await self.event(CopiedIn)

    async def dropped(self) -> None:
        self.copies.drop(V)
        await self.event(CopyDropped)

    async def closed(self) -> None:
        await asyncio.to_thread(self.copies.close)
        self.copies.let_go()

    async def event(self, kind: type[Any]) -> Any:
        async with asyncio.timeout(DEADLINE_S):
            found = await self.told.get()
        assert isinstance(found, kind)
        await asyncio.sleep(0)  # the task that told it ends
        return found

    async def all_given_back(self) -> None:
        """Once the threads that copied have ended."""
        await asyncio.to_thread(eventually, lambda: not self.driver.registered and not pinned_bytes())


async def test_memory_is_there_before_a_copy_is_wanted_and_serves_the_next_one_too() -> None:
    worker = Worker()
    await worker.prepared()
    assert sum(worker.driver.registered.values()) == pinned_bytes() == worker.copies.used_bytes == SIZE
    for _ in range(2):
        assert await worker.copied_out() == CopiedOut(V)
        assert await worker.copied_in() == CopiedIn(V, None)
        assert worker.memory.tobytes() == worker.bytes
        await worker.dropped()
    assert set(worker.device.copies) == {"to host", "to device"}
    assert worker.device.through_ring == 0
    assert worker.driver.count == 11, "each step once"
    worker.copies.register(register({"other": np.zeros(10)}))
    await worker.all_given_back()


@pytest.mark.parametrize("hole", [0, 64])
async def test_tiles_are_copied_directly_where_they_fill_the_memory(hole: int) -> None:
    worker = Worker(boxes=[Box("w", (SIZE - hole,), (0,), (SIZE - hole,), 0, (1,))])
    assert await worker.copied_out() == CopiedOut(V)
    assert await worker.copied_in() == CopiedIn(V, None)
    assert worker.memory[: SIZE - hole].tobytes() == worker.bytes[: SIZE - hole]
    assert not worker.memory[SIZE - hole :].any()
    assert set(worker.device.copies) == (set() if hole else {"to host", "to device"})


@pytest.mark.parametrize("ending", ["close", "drop", "a failed copy"])
async def test_every_ending_unregisters_what_the_copy_itself_had_registered(ending: str) -> None:
    worker = Worker()
    if ending == "a failed copy":
        worker.device.after_copy = lambda view: view.__setitem__(0, view[0] ^ 1)
    assert (await worker.copied_out()).failure is None or ending == "a failed copy"
    assert worker.driver.registered
    worker.copies.register(register({"other": np.zeros(10)}))
    assert worker.driver.registered, "there is a copy yet"
    if ending == "close":
        await worker.closed()
    else:
        await worker.dropped()
    await worker.all_given_back()


@pytest.mark.parametrize("ending", ["close", "register", "take"])
async def test_preparation_stops_at_the_next_step(ending: str) -> None:
    worker, reached, go_on = Worker(), threading.Event(), threading.Event()

    def before() -> None:
        if worker.driver.count == 2:
            reached.set()
            assert go_on.wait(DEADLINE_S)

    worker.driver.before = before
    worker.copies.prepare(worker.registration)
    thread = worker.pool._preparing
    assert await asyncio.to_thread(reached.wait, DEADLINE_S)
    if ending == "take":
        copying = asyncio.create_task(worker.copied_out())
        await asyncio.sleep(0)
        go_on.set()
        assert await copying == CopiedOut(V)
        assert worker.driver.count == 11, "what was not prepared the copy has registered, nothing twice"
        await worker.closed()
    elif ending == "close":
        closing = asyncio.create_task(worker.closed())
        done, _ = await asyncio.wait([closing], timeout=0.1)
        assert not done, "a step is under way"
        go_on.set()
        await closing
        assert worker.driver.count == 3
    else:
        worker.copies.register(register({"other": np.zeros(10)}))
        go_on.set()
        await asyncio.to_thread(thread.join, DEADLINE_S)
        assert worker.driver.count == 3
    await worker.all_given_back()


@pytest.mark.parametrize(
    ("limit_bytes", "most", "why"),
    [
        (SIZE - 1, None, "beyond the limit of 667704 B on pinned memory (TENSORHUB_PINNED_BYTES)"),
        (None, 4, "could not be registered: out of memory (2)"),
    ],
)
async def test_what_cannot_be_pinned_is_pageable_and_says_why_once(
    limit_bytes: int | None, most: int | None, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    worker = Worker(pinned_bytes=limit_bytes)
    worker.driver.most = most
    await worker.prepared()
    for _ in range(2):
        assert await worker.copied_out() == CopiedOut(V)
        assert await worker.copied_in() == CopiedIn(V, None)
        assert worker.memory.tobytes() == worker.bytes
        await worker.dropped()
    assert worker.device.through_ring == 4 * -(-SIZE // CHUNK)
    assert why in worker.pool.cost
    assert why in worker.copies.why_pageable
    assert len([record for record in caplog.records if why in record.message]) == 1
    await worker.closed()
    assert worker.driver.count == (most or 0)
    await worker.all_given_back()


@pytest.mark.parametrize("at", [0, SIZE // 2, SIZE - CHUNK - 1])
async def test_a_byte_that_changes_on_the_way_is_found_in_both_directions(at: int) -> None:
    worker = Worker()
    host: list[int] = []

    def flip(view: memoryview) -> None:
        seen = sum(host)
        host.append(len(view))
        if seen <= at < sum(host):
            view[at - seen] ^= 1

    worker.device.after_copy = flip
    failure = (await worker.copied_out()).failure
    assert failure is not None
    assert failure.code == "corrupt-transfer"
    await worker.dropped()
    worker.device.after_copy = lambda view: None
    assert await worker.copied_out() == CopiedOut(V)
    host.clear()
    worker.device.after_copy = flip
    failure = (await worker.copied_in()).failure
    assert failure is not None
    assert failure.code == "corrupt-transfer"


async def test_memory_that_is_freed_meanwhile_is_the_same_error_as_through_the_ring() -> None:
    found: dict[int | None, list[Any]] = {None: [], 0: []}
    for limit_bytes, failures in found.items():
        worker = Worker(pinned_bytes=limit_bytes)
        assert await worker.copied_out() == CopiedOut(V)
        worker.device.is_freed = True
        failures.append((await worker.copied_in()).failure)
        worker.device.is_freed = False
        await worker.dropped()
        worker.device.is_freed = True
        failures.append((await worker.copied_out()).failure)
        assert (worker.device.through_ring > 0) == (limit_bytes == 0)
    assert found[None] == found[0]


async def test_memory_that_other_workers_have_mapped_for_good_is_not_registered() -> None:
    worker = Worker(pinned_bytes=0)
    assert await worker.copied_out() == CopiedOut(V)
    worker.copies.pinned_bytes = worker.pool._pinned_limit = None
    (piece,) = worker.copies._contents[V][1].registration.pieces
    assert piece.owners[0].freeze()
    assert await worker.copied_in() == CopiedIn(V, None)
    assert worker.memory.tobytes() == worker.bytes
    assert "mapped this memory for good" in worker.copies.why_pageable
    assert not worker.driver.count


def test_the_last_holder_unpublishes_into_prepared_memory_and_takes_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.random.default_rng(3).integers(0, 256, SIZE, dtype=np.uint8)
    before, device = array.tobytes(), Device(array)
    monkeypatch.setattr(registration, "_stream", lambda pieces: device)
    with tensorhub.serve() as server:
        weights = tensorhub.open("m", replica="t", server=server.address, chunk_bytes=CHUNK)
        weights.register({"w": array})
        weights.publish(1)
        eventually(lambda: weights.statistics()["pinned_bytes"] == SIZE, "a host copy is prepared")
        blocks = device.through_ring
        weights.unpublish()
        array[:] = 0
        assert weights.replicate(1) == 1
        assert array.tobytes() == before
        assert (set(device.copies), device.through_ring) == ({"to host", "to device"}, blocks)
        weights.close()
    eventually(lambda: not device.driver.registered and not pinned_bytes())
