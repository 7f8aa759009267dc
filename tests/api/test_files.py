"""Checkpoints in files become versions, and versions become files: `push` and `pull`."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import tensorhub
from tensorhub import files
from tensorhub.protocol.errors import UsageError
from tensorhub.runtime.serving import ServerThread

WAIT_S = 60.0


def make_checkpoint(folder: Path, *, seed: int = 0, rows: int = 40) -> dict[str, np.ndarray]:
    """Two files and an index, as transformers writes them, in a dtype of two bytes and others."""
    numbers = np.random.default_rng(seed)
    first = {f"model.layers.{n}.weight": numbers.standard_normal((rows, 300)).astype(np.float32) for n in range(11)}
    second = {"lm_head.weight": numbers.standard_normal((100, 33)).astype(np.float16), "ids": np.arange(7)}
    second |= {"empty": np.zeros((0, 3), np.float32), "scale": np.array(2.5)}
    folder.mkdir()
    names = {}
    for at, tensors in enumerate((first, second)):
        name = f"model-{at + 1:05}-of-00002.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        names |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": 1}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return first | second


def bytes_in(folder: Path) -> dict[str, bytes]:
    """All files of a directory."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def server() -> Iterator[ServerThread]:
    with tensorhub.serve() as server:
        yield server


class Pushing:
    """A push of this process that stays."""

    def __init__(self, path: Path, server: ServerThread, **options: object) -> None:
        self.is_there = asyncio.Event()
        work = files.push("policy", path, server=server.address, until_held=None, on_change=self._there, **options)
        self._task = asyncio.ensure_future(work)

    def _there(self, found: files.Pushed) -> None:
        self.found = found
        self.is_there.set()

    async def __aenter__(self) -> "Pushing":
        there = asyncio.ensure_future(self.is_there.wait())
        await asyncio.wait((there, self._task), timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            self._task.result()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def test_files_that_were_pushed_come_back_byte_for_byte(tmp_path: Path, server: ServerThread) -> None:
    """Also a part of a file; and as one file, and in smaller ones, with the same tensors."""
    tensors = make_checkpoint(tmp_path / "there")

    async def go() -> files.Pulled:
        where = {"server": server.address, "timeout": WAIT_S}
        async with Pushing(tmp_path / "there", server) as pushing:
            assert pushing.found.keeps_files
            await files.pull("policy", tmp_path / "here", **where)
            await files.pull("policy", tmp_path / "one.safetensors", **where)
            found = await files.pull("policy", tmp_path / "many", max_shard_bytes=100_000, **where)
            with pytest.raises(UsageError, match="exists already"):
                await files.pull("policy", tmp_path / "here", **where)
            return found

    found = asyncio.run(go())
    assert bytes_in(tmp_path / "here") == bytes_in(tmp_path / "there")
    assert not list(tmp_path.glob("*.part"))
    assert len(found.paths) == 6
    assert all(path.stat().st_size < 110_000 for path in found.paths)
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())["weight_map"]
    for loaded in (
        load_file(tmp_path / "one.safetensors"),
        {name: load_file(tmp_path / "many" / file)[name] for name, file in index.items()},
    ):
        assert loaded.keys() == tensors.keys()
        assert all(np.array_equal(loaded[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("is_boxed", [True, False])
def test_what_a_pull_has_left_is_read_no_more(tmp_path: Path, server: ServerThread, is_boxed: bool) -> None:
    """Chunks are verified where they lie. One that is wrong, or was never there, is read."""
    tensors = {f"w{n}": np.random.default_rng(n).standard_normal((256, 1024)).astype(np.float32) for n in range(8)}
    save_file(tensors, tmp_path / "model.safetensors")

    async def go() -> tuple[int, int]:
        where = {"server": server.address, "timeout": WAIT_S}
        worker = await tensorhub.aio.open("policy", replica="trainer", server=server.address, chunk_bytes=1 << 18)
        async with worker:
            await worker.register(tensors, **({"boxes": {}} if is_boxed else {}))
            await worker.publish(3)
            whole = await files.pull("policy", tmp_path / "here.safetensors", **where)
            (tmp_path / "here.safetensors").rename(tmp_path / "here.safetensors.part")
            with (tmp_path / "here.safetensors.part").open("r+b") as file:
                file.seek(-1000, os.SEEK_END)
                file.write(b"wrong")
            again = await files.pull("policy", tmp_path / "here.safetensors", **where)
            return whole.received_bytes, again.received_bytes

    whole, again = asyncio.run(go())
    assert whole == 8 << 20
    assert 0 < again <= whole // 8
    assert all(np.array_equal(found, tensors[name]) for name, found in load_file(tmp_path / "here.safetensors").items())


def test_the_same_files_are_the_same_version_and_others_the_next(tmp_path: Path, server: ServerThread) -> None:
    for seed in (0, 1):
        make_checkpoint(tmp_path / str(seed), seed=seed)

    async def go() -> list[int]:
        found = []
        for seed in (0, 0, 1):
            async with Pushing(tmp_path / str(seed), server) as pushing:
                found.append(pushing.found.version)
        return found

    assert asyncio.run(go()) == [0, 0, 1]


def test_a_trainer_reads_a_push_in_its_own_order_and_a_pull_writes_tied_tensors_once(
    tmp_path: Path, server: ServerThread
) -> None:
    tensors = make_checkpoint(tmp_path / "there")

    async def go() -> None:
        mine = {name: np.zeros_like(tensors[name]) for name in sorted(tensors, reverse=True)}
        trainer = await tensorhub.aio.open("policy", replica="trainer", server=server.address)
        async with trainer:
            await trainer.register(mine)
            async with Pushing(tmp_path / "there", server, version=7):
                await trainer.replicate(7, timeout=WAIT_S)
            assert all(np.array_equal(mine[name], tensors[name]) for name in tensors)
        other = await tensorhub.aio.open("tied", replica="trainer", server=server.address)
        async with other:
            await other.register({"a": mine["ids"], "b": mine["ids"], "c": mine["scale"]}, boxes={})
            await other.publish(1)
            await files.pull("tied", tmp_path / "tied.safetensors", server=server.address, timeout=WAIT_S)

    asyncio.run(go())
    assert sorted(load_file(tmp_path / "tied.safetensors")) == ["a", "c"]
    assert files.metadata_in(files.read_file(tmp_path / "tied.safetensors").header) == {"format": "pt", "b": "a"}


def test_headers_are_as_the_library_writes_them_and_odd_ones_are_kept(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "there")
    checkpoint = files.read_checkpoint(tmp_path / "there")
    odd = checkpoint.files[0]
    text = odd.header[8:] + b" " * 64  # padded as no library pads it
    odd = odd._replace(header=len(text).to_bytes(8, "little") + text)
    for known in (checkpoint, checkpoint._replace(files=(odd, checkpoint.files[1]))):
        tensors = sorted(tensor for file in known.files for tensor in file.tensors)
        assert files.unpacked(files.packed(known), tensors) == known
        assert files.unpacked(files.packed(known), tensors[1:]) is None
    shuffled = np.random.default_rng(0).permutation(9_000).tolist()
    many = tuple(files.Tensor(f"layer.{n}", "float32", (1,)) for n in shuffled)
    alone = files.Checkpoint((files.File("x.safetensors", many, files.header_of(many, None)),), None)
    assert files.packed(alone) == {}, "what has no room is left out"


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", ".x", "a/b", "a\n"])
def test_names_from_other_workers_lead_nowhere_else(name: str) -> None:
    tensors = (files.Tensor("a", "float32", (1,)),)
    said = files.packed(files.Checkpoint((files.File(name, tensors, files.header_of(tensors, None)),), None))
    assert files.unpacked(said, tensors) is None


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 100])
def test_what_is_no_checkpoint_is_an_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UsageError, match=re.escape("model.safetensors")):
        files.read_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="no safetensors file"):
        files.read_checkpoint(tmp_path)


# --- As programs.


def start(server: ServerThread, *arguments: str) -> subprocess.Popen[str]:
    """A command, started. Its readers cannot read from it while it is stopped."""
    command = [sys.executable, "-m", "tensorhub", *arguments, "--server", server.address]
    environment = {**os.environ, "TENSORHUB_TRANSPORTS": "tcp"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def ended(program: subprocess.Popen[str]) -> str:
    """What it said until its good end."""
    said, _ = program.communicate(timeout=WAIT_S)
    assert program.returncode == 0, said
    return said


def until(condition: Callable[[], bool], *programs: subprocess.Popen[str]) -> None:
    """Waits for it, as long as these run."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        for program in programs:
            assert program.poll() is None, program.communicate()
        time.sleep(0.02)


def is_pushed(server: ServerThread) -> bool:
    return any(each.is_latest for each in tensorhub.connect(server.address).versions("policy"))


@pytest.mark.processes
def test_push_ends_once_a_pull_has_all(tmp_path: Path, server: ServerThread) -> None:
    make_checkpoint(tmp_path / "there")
    pushing = start(server, "push", "policy", str(tmp_path / "there"))
    until(lambda: is_pushed(server), pushing)
    pulling = start(server, "pull", "policy", str(tmp_path / "here"))
    assert "every chunk is verified" in ended(pulling)
    assert "policy version 0" in ended(pushing)
    assert bytes_in(tmp_path / "here") == bytes_in(tmp_path / "there")


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize("is_begun", [False, True])
def test_a_push_that_is_killed_under_a_pull_goes_on_under_its_number(tmp_path: Path, is_begun: bool) -> None:
    """Also where the pull has asked the server for the layout, and has no metadata of the push yet."""
    make_checkpoint(tmp_path / "there", rows=4_000)  # 50 MiB: it is stopped before all was read
    with tensorhub.serve(lease_s=5.0) as server:
        pushing = start(server, "push", "policy", str(tmp_path / "there"))
        until(lambda: is_pushed(server), pushing)
        if not is_begun:
            pushing.send_signal(signal.SIGSTOP)
        pulling = start(server, "pull", "policy", str(tmp_path / "here"))
        until(lambda: len(list(tmp_path.glob("here.part/*.safetensors"))) == 2 * is_begun, pushing, pulling)
        pushing.send_signal(signal.SIGSTOP)
        until(lambda: not is_pushed(server), pulling)
        pushing.kill()
        pushing.communicate()
        again = start(server, "push", "policy", str(tmp_path / "there"))
        assert "policy version 0" in ended(pulling)
        assert "policy version 0" in ended(again)
    assert bytes_in(tmp_path / "here") == bytes_in(tmp_path / "there")


@pytest.mark.parametrize("name", ["here", "here.safetensors"])
def test_a_pull_of_what_is_not_there_leaves_nothing(tmp_path: Path, server: ServerThread, name: str) -> None:
    with pytest.raises(tensorhub.VersionUnavailable, match="policy"):
        asyncio.run(files.pull("policy", tmp_path / name, 3, server=server.address, timeout=WAIT_S))
    assert list(tmp_path.iterdir()) == []
