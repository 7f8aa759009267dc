"""Replicas without a GPU: `hold` keeps versions in host memory, `archive` in an object store."""

import asyncio
import multiprocessing
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager
from multiprocessing.synchronize import Event
from pathlib import Path

import msgspec
import numpy as np
import pytest

import tensorhub
from tensorhub import aio, archive, files
from tensorhub.protocol.status import ModelView, VersionView
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
async def trainer(server: ServerThread, tensors: dict[str, np.ndarray], site: str = "") -> AsyncIterator[aio.Weights]:
    weights = await aio.open("policy", replica="trainer", server=server.address, site=site)
    async with weights:
        await weights.register(tensors, boxes={})
        yield weights


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - of the server, which sets no event here
            await asyncio.sleep(0.02)


def values(version: int) -> dict[str, np.ndarray]:
    return {"w": np.full((300, 1000), version, np.float32), "b": np.full(7, version, np.int64)}


async def step(weights: aio.Weights, tensors: dict[str, np.ndarray], version: int) -> None:
    """The trainer publishes that version."""
    async with weights.mutating(version=version, timeout=WAIT_S):
        for name, each in values(version).items():
            tensors[name][:] = each


def is_right(found: Mapping[str, object], version: int) -> bool:
    return all(np.array_equal(np.asarray(found[name]), each) for name, each in values(version).items())


async def read(server: ServerThread, version: int) -> None:
    """A new rollout gets that version, right."""
    found = await aio.load("policy@latest", server=server.address, timeout=WAIT_S)
    assert found.version == version
    assert is_right(found, version)


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
                    await step(weights, tensors, version)
                    await until(lambda version=version: bool(said) and said[-1][0] == version)
            assert said[-1][:2] == (3, 2)
            await read(server, 3)

    with tensorhub.serve() as server:
        asyncio.run(go(server))


def test_everything_dies_and_the_newest_archived_version_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Though the server's journal has its number, or a higher one. A corrupted one is refused, and named."""
    url, said = f"file://{tmp_path}/store", list[str]()

    def archiving(server: ServerThread, **options: int | bool) -> Coroutine[object, object, None]:
        return archive.archive("policy", url, server=server.address, on_change=said.append, **options)

    async def publish(server: ServerThread) -> None:
        tensors = values(0)
        async with running(archiving(server, every=2, keep=2)), trainer(server, tensors) as weights:
            for version in (1, 2, 3, 5):
                await step(weights, tensors, version)
                if version != 2:
                    await until(lambda version=version: f"version {version} is in {url}" in said)
            await until(lambda: store.versions() == [5, 3])

    async def restore(version: int, *, is_fresh: bool = True) -> None:
        with tensorhub.serve(fresh=is_fresh, state=journal) as server:
            async with running(archiving(server, every=2, keep=2, serves=True, alone_s=0.0)):
                await until(lambda: f"version {version} is served" in said)
                await read(server, version)
            said.clear()

    store, journal = archive.Store(url, "policy"), tmp_path / "journal"
    with tensorhub.serve(state=journal) as server:
        asyncio.run(publish(server))
    asyncio.run(restore(5, is_fresh=False))
    asyncio.run(restore(5))
    path = next((tmp_path / "store/policy/000000000005").glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    asyncio.run(restore(3, is_fresh=False))
    assert f"{path.name} is not what was archived: tensor" in caplog.text
    (tmp_path / "store/policy/000000000003/manifest").unlink()
    assert store.versions() == [5], "without a manifest it is no version"


def archive_half(url: str, address: str, is_begun: Event) -> None:
    """An archive that stands still within its first object."""

    def parts(pieces: list[memoryview]) -> Iterator[memoryview]:
        yield memoryview(bytes(archive.PART_BYTES))
        is_begun.set()
        threading.Event().wait()

    archive._parts = parts
    asyncio.run(archive.archive("policy", url, server=address))


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The URL of a bucket in moto's server."""
    moto = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ALLOW_HTTP": "true",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="weights")
        yield "s3://weights"
    server.stop()


def test_a_version_that_was_killed_in_the_middle_is_none_and_the_next_one_comes_back(bucket: str) -> None:
    """All workers and the server die, too. What the killed archive has left is removed."""
    url, said = f"{bucket}/killed", list[str]()
    store = archive.Store(url, "policy")

    async def go(server: ServerThread) -> None:
        tensors = values(4)
        async with trainer(server, tensors) as weights:
            await weights.publish(4)
            context = multiprocessing.get_context("spawn")
            is_begun = context.Event()
            child = context.Process(target=archive_half, args=(url, server.address, is_begun))
            child.start()
            assert await asyncio.to_thread(is_begun.wait, WAIT_S)
            child.kill()
            await asyncio.to_thread(child.join)
            assert store.versions() == []
            store._obstore.put(store._store, store.name(4, "model.safetensors"), b"half")
            assert store.versions() == []
            await step(weights, tensors, 5)
            async with running(archive.archive("policy", url, server=server.address, on_change=said.append)):
                await until(lambda: f"version 5 is in {url}" in said and 4 not in store._folders())

    async def restore(server: ServerThread) -> None:
        async with running(archive.archive("policy", url, server=server.address, serves=True)):
            await until(lambda: bool(tensorhub.connect(server.address).versions("policy")))
            await read(server, 5)

    with tensorhub.serve() as server:
        asyncio.run(go(server))
    with tensorhub.serve() as server:
        asyncio.run(restore(server))


def remove_file(store: Path) -> None:
    (store / "000000000001/model.safetensors").unlink()


def change_manifest(store: Path) -> None:
    """One byte of what the publisher said of its version."""
    path = store / "000000000001/manifest"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"first steps", b"first step!", 1))


def move_version(store: Path) -> None:
    (store / "000000000001").rename(store / "000000000020")


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (remove_file, "000000000001/model.safetensors is missing"),
        (change_manifest, "000000000001/manifest is not what was archived: its SHA-256 differs"),
        (move_version, "000000000020/manifest is the manifest of version 1"),
    ],
)
def test_a_damaged_version_is_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], expected: str
) -> None:
    url = f"file://{tmp_path}/store"
    store = archive.Store(url, "policy")

    async def go(server: ServerThread) -> None:
        async with trainer(server, values(1)) as weights:
            await weights.publish(1, metadata={"note": "first steps"})
            async with running(archive.archive("policy", url, server=server.address)):
                await until(lambda: store.versions() == [1])
        damage(tmp_path / "store/policy")
        options: dict[str, object] = {"server": server.address, "serves": True, "alone_s": 0.0}
        async with running(archive.archive("policy", url, **options)):  # type: ignore[arg-type]
            await until(lambda: bool(caplog.records))

    with tensorhub.serve() as server:
        asyncio.run(go(server))
    assert f"{url}/policy/{expected}" in caplog.text


def test_a_site_reads_from_the_store_what_another_site_has_published(tmp_path: Path) -> None:
    """No weights come from the other site. Two versions follow each other."""
    url = f"file://{tmp_path}/store"

    def site_bytes(server: ServerThread) -> int:
        return sum(sum(each.cross_site_bytes.values()) for each in tensorhub.connect(server.address).versions("policy"))

    def holders(server: ServerThread, version: int) -> list[str]:
        there = tensorhub.connect(server.address).versions("policy")
        return [name for each in there if each.version == version for name in each.holders]

    async def go(server: ServerThread) -> None:
        tensors, where = values(0), {"server": server.address}
        near = archive.archive("policy", url, every=0, serves=True, replica="archive-eu", site="eu", **where)
        async with (
            trainer(server, tensors, "us") as weights,
            running(archive.archive("policy", url, every=1, site="us", **where)),
            running(near),
        ):
            for version in (1, 2):
                await step(weights, tensors, version)
                await until(lambda version=version: "archive-eu" in holders(server, version))
                found = await aio.load(f"policy@{version}", site="eu", timeout=WAIT_S, **where)
                assert is_right(found, version)
            assert site_bytes(server) == 0

    with tensorhub.serve() as server:
        asyncio.run(go(server))


def test_a_region_with_its_own_server_gets_each_archived_version(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"

    async def go(server: ServerThread, region: ServerThread) -> None:
        tensors = values(0)
        there = archive.archive("policy", url, every=0, serves=True, server=region.address)
        rollout = await aio.open("policy", replica="rollout", server=region.address)
        async with (
            rollout,
            trainer(server, tensors) as weights,
            running(archive.archive("policy", url, every=1, server=server.address)),
            running(there),
        ):
            mine = values(0)
            await rollout.register(mine, boxes={})
            for version in (1, 2):
                await step(weights, tensors, version)
                assert await rollout.replicate(version, wait=True, timeout=WAIT_S) == version
                assert is_right(mine, version)

    with tensorhub.serve() as server, tensorhub.serve() as region:
        asyncio.run(go(server, region))


def test_a_holder_that_comes_back_begins_the_wait_anew(tmp_path: Path) -> None:
    """Else the next short absence of all workers would forget their numbers at once."""
    said = list[str]()
    options = files.options_for_files(server="127.0.0.1:1")
    store = archive.Store(f"file://{tmp_path}", "policy")
    serving = archive._Serving("policy", store, "archive", options, said.append, 300.0)
    gone = ModelView("policy", 1, None, 0, (), (), newest=5)
    held = msgspec.structs.replace(gone, versions=(VersionView(5, True, True, ("trainer",), ()),))
    for found in (gone, gone, held, gone):
        asyncio.run(serving.step(found, [3]))
    assert len(said) == 2, "the wait was said, and said again"
    assert "is served in 300 s" in said[1]
