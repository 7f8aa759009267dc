"""Replicas without a GPU: `hold` keeps versions in host memory, `archive` in an object store."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

import tensorhub
from tensorhub import aio, archive
from tensorhub.runtime.serving import ServerThread

obstore = pytest.importorskip("obstore")
WAIT_S = 60.0


@asynccontextmanager
async def running(work: Coroutine[object, object, None]) -> AsyncIterator[None]:
    task = asyncio.ensure_future(work)
    try:
        yield
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def trainer(server: ServerThread, tensors: dict[str, np.ndarray]) -> AsyncIterator[aio.Weights]:
    weights = await aio.open("policy", replica="trainer", server=server.address)
    async with weights:
        await weights.register(tensors, boxes={})
        yield weights


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - of the server, which sets no event here
            await asyncio.sleep(0.02)


def values(version: int) -> dict[str, np.ndarray]:
    return {"w": np.full((300, 1000), version, np.float32), "b": np.full(7, version, np.int64)}


async def read(server: ServerThread, version: int) -> None:
    """A new rollout gets that version, right."""
    found = await aio.load("policy@latest", server=server.address, timeout=WAIT_S)
    assert found.version == version
    assert all(np.array_equal(np.asarray(found[name]), each) for name, each in values(version).items())


def test_hold_keeps_the_newest_after_the_trainer_has_gone() -> None:
    said: list[tuple[int, ...]] = []

    async def go(server: ServerThread) -> None:
        work = archive.hold(
            "policy", keep=2, server=server.address, on_change=lambda versions, _: said.append(versions)
        )
        async with running(work):
            tensors = values(0)
            async with trainer(server, tensors) as weights:
                for version in (1, 2, 3):
                    async with weights.mutating(version=version, timeout=WAIT_S):
                        for name, each in values(version).items():
                            tensors[name][:] = each
                    await until(lambda version=version: bool(said) and said[-1][0] == version)
            assert said[-1][:2] == (3, 2)
            await read(server, 3)

    with tensorhub.serve() as server:
        asyncio.run(go(server))


def test_everything_dies_and_the_newest_archived_version_comes_back(tmp_path: Path) -> None:
    """Also of two when an object of the newest is corrupted: that one is refused, and named."""
    url, said = f"file://{tmp_path}/store", list[str]()

    def archiving(server: ServerThread, **options: int | bool) -> Coroutine[object, object, None]:
        return archive.archive("policy", url, server=server.address, on_change=said.append, **options)

    async def publish(server: ServerThread) -> None:
        tensors = values(0)
        async with running(archiving(server, every=2, keep=2)), trainer(server, tensors) as weights:
            for version in (1, 2, 3, 5):
                async with weights.mutating(version=version, timeout=WAIT_S):
                    for name, each in values(version).items():
                        tensors[name][:] = each
                if version != 2:
                    await until(lambda version=version: f"version {version} is in {url}" in said)
            await until(lambda: store.versions() == [5, 3])

    async def restore(version: int) -> None:
        with tensorhub.serve() as server:
            async with running(archiving(server, every=2, keep=2, serves=True)):
                await until(lambda: bool(tensorhub.connect(server.address).versions("policy")))
                await read(server, version)

    store = archive.Store(url, "policy")
    with tensorhub.serve() as server:
        asyncio.run(publish(server))
    asyncio.run(restore(5))
    path = next((tmp_path / "store/policy/000000000005").glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    asyncio.run(restore(3))
    assert [text for text in said if f"{path.name} is not what was archived: tensor" in text]
    (tmp_path / "store/policy/000000000003/manifest").unlink()
    assert store.versions() == [5], "without a manifest it is no version"
