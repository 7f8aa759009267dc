"""Digests of chunks, the manifest they make, and finding what changed since."""

import errno
import mmap
import os
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xxhash

from tensorhub.memory import streams
from tensorhub.memory.digests import build_manifest, changed_chunks, digest, tensors_of
from tensorhub.memory.registration import register
from tensorhub.protocol.errors import HostMemoryFull, LayoutMismatch, UsageError
from tensorhub.protocol.manifest import decode_manifest


def base() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(12, dtype=torch.int32).reshape(3, 4), "b": torch.ones(4), "c": torch.zeros(4)}


def root(tensors: dict[str, torch.Tensor], chunk_bytes: int = 16) -> str:
    return build_manifest(register(tensors), chunk_bytes).root()


def test_the_algorithm_is_xxh3_128_over_the_stream() -> None:
    tensors = base()
    data = b"".join(bytes(tensor.numpy()) for tensor in tensors.values())
    manifest = build_manifest(register(tensors), 30)
    assert manifest.size_bytes == len(data) == 80
    for chunk in range(3):
        start, stop = manifest.chunk_range(chunk)
        assert manifest.digest_of(chunk) == xxhash.xxh3_128_digest(data[start:stop])
    assert decode_manifest(manifest.encode()) == manifest
    assert digest([]) == xxhash.xxh3_128_digest(b"")


CHANGES = {
    "name": lambda t: {"a2" if name == "a" else name: tensor for name, tensor in t.items()},
    "dtype": lambda t: {**t, "a": t["a"].view(torch.float32)},
    "shape": lambda t: {**t, "a": t["a"].reshape(4, 3)},
    "stride": lambda t: {**t, "a": t["a"].reshape(4, 3).t()},
    "order": lambda t: {name: t[name] for name in ("b", "a", "c")},
    "sharing": lambda t: {**t, "c": t["b"]},
    "value": lambda t: {**t, "b": t["b"] + 1},
    "nothing left out": lambda t: {name: t[name] for name in ("a", "b")},
    "an empty tensor more": lambda t: {**t, "d": torch.empty(0)},
}


@pytest.mark.parametrize("what", CHANGES)
def test_the_root_changes_with(what: str) -> None:
    assert root(CHANGES[what](base())) != root(base())


def test_the_root_stays_for_equal_content_wherever_and_however_it_was_hashed() -> None:
    tensors = {f"t{i}": torch.randn(n) for i, n in enumerate([1, 70_000, 3, 0, 40_000])}
    registration = register(tensors)
    copies = register({name: tensor.clone() for name, tensor in tensors.items()})
    roots = {build_manifest(registration, 4096, threads=threads).root() for threads in (1, 2, 5)}
    assert roots == {build_manifest(copies, 4096, salt="ignored where content is verified").root()}


def test_without_digests_a_salt_tells_contents_apart() -> None:
    registration = register(base())
    first, second = (build_manifest(registration, 16, verify="none", salt=salt) for salt in ("run-1/7", "run-1/8"))
    assert first.algorithm == "none"
    assert first.digests == b""
    assert first.root() != second.root()
    with pytest.raises(UsageError, match="needs a salt"):
        build_manifest(registration, 16, verify="none")


def test_a_change_is_found_with_the_tensors_it_may_be_in() -> None:
    tensors = {name: torch.zeros(100, dtype=torch.uint8) for name in "abcdef"}
    tensors["empty"] = torch.empty(0)
    registration = register(tensors)
    manifest = build_manifest(registration, 64)
    assert changed_chunks(registration, manifest) == []
    assert tensors_of(registration.layout, manifest, []) == []
    tensors["b"][30] = 1  # byte 130: chunk 2, bytes 128 to 192
    tensors["f"][99] = 1  # byte 599: chunk 9, bytes 576 to 600
    assert changed_chunks(registration, manifest) == [2, 9]
    assert tensors_of(registration.layout, manifest, [2, 9]) == ["b", "f"]
    assert tensors_of(registration.layout, manifest, [1]) == ["a", "b"]
    assert tensors_of(registration.layout, manifest, range(10)) == list("abcdef")


def test_what_cannot_be_compared_says_so() -> None:
    registration = register(base())
    manifest = build_manifest(registration, 16)
    with pytest.raises(LayoutMismatch) as caught:
        changed_chunks(register({"a": torch.zeros(20)}), manifest)
    assert manifest.layout in str(caught.value)
    with pytest.raises(UsageError, match="cannot be checked"):
        changed_chunks(registration, build_manifest(registration, 16, verify="none", salt="x"))


def test_hashing_a_chunk_lets_other_threads_run() -> None:
    """With a switch interval longer than the test, another thread runs only where the GIL is given up."""
    chunk = [memoryview(bytearray(16 << 20))]
    asked, answered = threading.Event(), threading.Event()

    def answer() -> None:
        asked.wait(30)
        answered.set()

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=answer)
    thread.start()
    sys.setswitchinterval(60)
    try:
        asked.set()
        deadline = time.monotonic() + 20
        while not answered.is_set() and time.monotonic() < deadline:
            digest(chunk)
        assert answered.is_set()
    finally:
        sys.setswitchinterval(interval)
        asked.set()
        thread.join(30)


@pytest.mark.parametrize("most_bytes", [1 << 20, 1 << 16, (1 << 16) - 1])
def test_with_less_memory_it_is_hashed_in_smaller_parts_or_that_is_the_error(
    most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[int] = []

    def limited(descriptor: int, size_bytes: int) -> mmap.mmap:
        if size_bytes > most_bytes:
            refused.append(size_bytes)
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return mmap.mmap(descriptor, size_bytes)

    registration = register({"w": np.arange(1 << 20, dtype=np.int64)})
    right = build_manifest(registration, 1 << 22, threads=1)
    monkeypatch.setattr(streams, "mmap", SimpleNamespace(mmap=limited))
    if most_bytes < 1 << 16:
        with pytest.raises(HostMemoryFull, match="to read tensors") as caught:
            build_manifest(registration, 1 << 22, threads=1)
        assert "memory" in str(caught.value.hint)
    else:
        assert build_manifest(registration, 1 << 22, threads=1) == right
    assert refused
