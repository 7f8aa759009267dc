"""Host copies of a worker: what their threads do when the worker closes, or when the unexpected happens."""

import asyncio
import contextlib
import gc
import threading
import weakref
from dataclasses import replace

import numpy as np
import pytest

from tensorhub.memory.digests import build_manifest
from tensorhub.memory.registration import Registration, register
from tensorhub.protocol.manifest import Manifest
from tensorhub.protocol.names import Version, worker_id
from tensorhub.runtime.content import Content
from tensorhub.runtime.copies import HostCopies
from tensorhub.worker.events import CopiedIn, CopiedOut, CopyDropped, Event

from .fleet import Fleet, V

CHUNK = 1024
DEADLINE_S = 10.0


class Tampered:
    """A stream of which one thing is done otherwise before its bytes are read."""

    def __init__(self, registration: Registration, before) -> None:
        self._stream, self._before = registration.stream, before
        self.size_bytes = registration.size_bytes

    def views_to_read(self, start: int, stop: int):
        self._before()
        return self._stream.views_to_read(start, stop)


def held(before) -> tuple[Registration, Content]:
    registration = register({"w": np.arange(1000, dtype=np.float64)})
    manifest: Manifest = build_manifest(registration, CHUNK)
    tampered = replace(registration, stream=Tampered(registration, before))
    content = Content(Version(1), manifest.root(), "m/1/0", tampered)
    content.manifest = manifest
    return registration, content


def copies(registration: Registration, told: list[Event], is_told: asyncio.Event) -> HostCopies:
    def tell(event: Event) -> None:
        told.append(event)
        is_told.set()

    made = HostCopies(worker_id("m", "r", 0), {}, verify="full", limit_bytes=None, tell=tell, withdraw=lambda key: None)
    made.register(registration)
    return made


async def test_close_waits_for_the_chunk_in_hand_and_no_other_is_begun() -> None:
    reached, go_on, begun = threading.Event(), threading.Event(), []

    def before() -> None:
        begun.append(None)
        reached.set()
        assert go_on.wait(DEADLINE_S)

    registration, content = held(before)
    told, is_told = [], asyncio.Event()
    found = copies(registration, told, is_told)
    found.copy_to_host(content)
    assert await asyncio.to_thread(reached.wait, DEADLINE_S)
    closing = asyncio.create_task(asyncio.to_thread(found.close))
    done, _ = await asyncio.wait([closing], timeout=0.2)
    assert not done  # a thread is still in the tensors
    go_on.set()
    async with asyncio.timeout(DEADLINE_S):
        await closing
        in_hand = len(begun)
        await is_told.wait()
    assert in_hand == len(begun) < 8000 // CHUNK
    assert isinstance(told[0], CopiedOut)
    assert told[0].failure is not None


@pytest.mark.parametrize("error", [RuntimeError("the device is gone"), MemoryError()])
async def test_an_error_that_nobody_thought_of_ends_the_copy_and_is_told(error: Exception) -> None:
    def before() -> None:
        raise error

    registration, content = held(before)
    told, is_told = [], asyncio.Event()
    copies(registration, told, is_told).copy_to_host(content)
    async with asyncio.timeout(DEADLINE_S):
        await is_told.wait()
    assert isinstance(told[0], CopiedOut)
    assert told[0].failure is not None
    assert repr(error) in told[0].failure.message


async def test_a_copy_outlives_the_tensors_of_which_it_is_one() -> None:
    tensor = np.arange(1000, dtype=np.float64)
    expected, former = tensor.tobytes(), weakref.ref(tensor)
    registration = register({"w": tensor})
    manifest = build_manifest(registration, CHUNK)
    content = Content(Version(1), manifest.root(), "m/1/0", registration)
    content.manifest = manifest
    told, is_told = [], asyncio.Event()
    found = copies(registration, told, is_told)
    found.copy_to_host(content)
    async with asyncio.timeout(DEADLINE_S):
        await is_told.wait()
    assert told == [CopiedOut(Version(1))]
    assert found.register(register({"b": np.zeros(10)})) > 0
    del tensor, registration, content
    await asyncio.sleep(0)  # the task that copied lets go of what it copied
    gc.collect()
    assert former() is None
    assert found.used_bytes == 8000
    copy = found.content(Version(1), manifest.root()).registration
    with copy.stream.views_to_read(0, 8000) as views:
        assert b"".join(views) == expected
    is_told.clear()
    found.drop(Version(1))
    async with asyncio.timeout(DEADLINE_S):
        await is_told.wait()
    assert told[1:] == [CopyDropped(Version(1))]
    assert found.used_bytes == 0  # nothing is kept for the next: it would be of tensors that are gone


@pytest.mark.parametrize("seed", range(2))
async def test_what_is_in_no_box_stays_as_it_is_when_a_host_copy_is_copied_in(seed: int) -> None:
    with contextlib.closing(Fleet(seed, publishers=1 + seed % 3, readers=1 + seed % 2)) as fleet:
        fleet.publish()
        for reader in fleet.readers:
            outside = reader.shard.outside()
            await reader.fill(fleet.publishers, to_host=True)
            reader.data.copy_in(V)
            copied = await reader.seen(lambda reader=reader: reader.of(CopiedIn))
            assert copied == [CopiedIn(V, None)]
            assert reader.shard.wrong(fleet.model) == []
            assert all((a == b).all() for a, b in zip(outside, reader.shard.outside(), strict=True))
