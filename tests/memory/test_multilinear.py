"""The digest that a device can compute: one answer everywhere, and what it must not let pass."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub.core.errors import CorruptTransfer, UsageError
from tensorhub.memory.digests import MULTILINEAR, _on_device, build_manifest, changed_chunks, digest
from tensorhub.memory.fill import FillSink
from tensorhub.memory.multilinear import BLOCK_BYTES, _splitmix, packed, sums_of, table
from tensorhub.memory.registration import Registration, register

Put = Callable[[object, int, bytes], None]
MOD = 1 << 64


def naive(data: bytes) -> bytes:
    """The definition, in Python's integers."""
    sums = []
    for k in (0, 1):
        inner, outer, last = (table(level, BLOCK_BYTES // 4)[k].tolist() for level in (0, 1, 2))
        total = last[0] * len(data)
        for number, start in enumerate(range(0, len(data), BLOCK_BYTES)):
            block = data[start : start + BLOCK_BYTES].ljust(BLOCK_BYTES, b"\0")
            words = [int.from_bytes(block[at : at + 4], "little", signed=True) for at in range(0, BLOCK_BYTES, 4)]
            total += outer[number] * (sum(m * word for m, word in zip(inner, words, strict=False)) % MOD)
        sums.append((total % MOD).to_bytes(8, "little"))
    return b"".join(sums)


def of(data: bytes) -> bytes:
    return digest([memoryview(data)], MULTILINEAR)


def on_torch(data: bytes) -> bytes:
    return packed(sums_of(torch.frombuffer(bytearray(data), dtype=torch.uint8)).numpy())


def noise(size_bytes: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


@pytest.mark.parametrize("size_bytes", [1, 3, 4, 5, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 9 * BLOCK_BYTES + 7])
def test_it_is_what_its_definition_says_on_numpy_and_on_torch(size_bytes: int) -> None:
    data = noise(size_bytes)
    assert of(data) == on_torch(data) == naive(data)


def test_its_numbers_never_change() -> None:
    """Two releases that disagree could not read each other's versions."""
    assert _splitmix(0, 1).tolist() == [0xE220A8397B1DCDAF], "the first number of splitmix64 from 0, as published"
    assert (
        of(bytes(range(256)) * 100).hex() == naive(bytes(range(256)) * 100).hex() == "a0dd71673b29f399a8bba571ee69a9b4"
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 20_000), max_size=6), st.integers(0, 99))
def test_it_does_not_depend_on_how_bytes_are_cut(sizes: list[int], seed: int) -> None:
    data = noise(sum(sizes), seed)
    views, at = [], 0
    for size in sizes:
        views.append(memoryview(data)[at : at + size])
        at += size
    assert digest(views, MULTILINEAR) == of(data)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 3 * BLOCK_BYTES), st.data())
def test_no_fault_passes(size_bytes: int, data: st.DataObject) -> None:
    right = noise(size_bytes, data.draw(st.integers(0, 9)))
    wrong = bytearray(right)
    kind = data.draw(st.sampled_from(["bit", "two top bits", "words exchanged", "zeros", "shift", "shorter"]))
    at, other = (data.draw(st.integers(0, (size_bytes - 1) // 4)) * 4 for _ in range(2))
    if kind == "bit":
        wrong[data.draw(st.integers(0, size_bytes - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "two top bits":  # signs of two numbers: where sums mod 2**64 are weakest
        for place in {at + 3, other + 3}:
            if place < size_bytes:
                wrong[place] ^= 0x80
    elif kind == "words exchanged":
        wrong[at : at + 4], wrong[other : other + 4] = right[other : other + 4], right[at : at + 4]
        del wrong[size_bytes:]
    elif kind == "zeros":
        wrong[at:] = bytes(size_bytes - at)
    elif kind == "shift":
        wrong[at:] = right[at + 1 :] + right[at : at + 1]
    else:
        wrong = wrong[:-1]
    if bytes(wrong) != right:
        assert of(bytes(wrong)) != of(right)


def test_zeros_of_different_lengths_differ() -> None:
    assert len({of(bytes(size)) for size in range(0, 200)}) == 200


def test_exchanged_blocks_are_noticed() -> None:
    one, two = noise(BLOCK_BYTES, 1), noise(BLOCK_BYTES, 2)
    assert of(one + two) != of(two + one)


def published() -> tuple[dict[str, torch.Tensor], Registration]:
    tensors = {"a": torch.arange(50_000, dtype=torch.bfloat16), "b": torch.ones(33), "c": torch.arange(7)}
    return tensors, register(tensors)


def test_a_version_with_these_digests_is_filled_and_a_bad_chunk_is_refused(put: Put) -> None:
    tensors, source = published()
    manifest = build_manifest(source, 1 << 14, algorithm=MULTILINEAR)
    assert manifest.algorithm == MULTILINEAR
    assert manifest.root() != build_manifest(source, 1 << 14).root()
    target = register({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
    sink = FillSink(target, manifest.root())
    for chunk in sink.begin(manifest.encode()):
        start, stop = manifest.chunk_range(chunk)
        with source.stream.reading(start, stop) as views:
            data = b"".join(views)
        with target.stream.writing(start, stop) as views:
            assert sink.observe(chunk) is None
            put(target.stream, start, bytes([data[0] ^ 1]) + data[1:])
            with pytest.raises(CorruptTransfer):
                sink.accept(chunk, views)
            put(target.stream, start, data)
            sink.accept(chunk, views)
        sink.stored(chunk)
    assert sink.progress.is_complete
    assert changed_chunks(target, manifest) == []
    put(target.stream, 20_000, b"x")
    assert changed_chunks(target, manifest) == [1]


def test_a_device_that_has_all_bytes_gives_the_hosts_digests() -> None:
    _, source = published()
    whole = torch.from_numpy(np.concatenate([np.frombuffer(v, np.uint8) for v in source.stream.views(0, 100_188)]))  # type: ignore[attr-defined]
    manifest = build_manifest(source, 10_001, algorithm=MULTILINEAR)

    class Device:
        def device_bytes(self, start: int, stop: int) -> torch.Tensor:
            return whole[start:stop]

    found = _on_device(Device(), source.size_bytes, 10_001, range(manifest.chunk_count))
    assert found is not None
    assert b"".join(found) == manifest.digests


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(UsageError, match="xxh3-128, multilinear-128"):
        build_manifest(published()[1], 100, algorithm="crc")  # type: ignore[arg-type]
