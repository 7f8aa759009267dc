"""Digests of memory on a device, and copies that are digested in the same pass: plans the launches of `xxh3.cu`.

A stream's bytes lie in spans of device memory. Windows of whole chunks go through two kernels: one sums the blocks of
1 KiB (and copies them), the other chains the sums of each chunk to its digest. Sums are launched in lane 0, one window
behind the other. A chain takes three times as long as the sums of its window, but needs little of the device: chains
run in lanes of their own, beside each other and beside sums. The host waits once, for the digests.

Scratch memory on the device: 64 B for each KiB of four windows, and the tables: 65 MiB for windows of 256 MiB. A chunk
counts as whole groups of 4 KiB.
Chunks shorter than `MIN_BYTES` are copied and get no digest here: xxh3 treats them otherwise.

On an H200 (../../../docs/benchmarks.md): sums of a window take 0.09 ms, with its copy 0.17 ms, its chains 0.22 ms.
"""

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np

from ..protocol.manifest import DIGEST_BYTES
from ..reshard.grid import Ints

MIN_BYTES = 241  # of a chunk: the long path of xxh3 begins there
WINDOW_BYTES = 256 << 20  # summed in 0.08 ms on an H200; its chains of 4,096 blocks take longer
MIN_WINDOW_BYTES = 16 << 20  # where the device is nearly full: 4 MiB of scratch memory
SLOTS = 4  # windows that have scratch memory, and a lane for their chains, at a time
LANES = 1 + SLOTS
BLOCK_BYTES = 1024  # of xxh3, between two scrambles
GROUP_BYTES = 4096  # of a chunk, summed at once
SUMS_BYTES = 256  # scratch memory of a group
CHUNK_WORDS = 3  # of a table of chunks: start, size, and the groups before it
JOB_WORDS = 11
SECRET_WORDS = 24
THREADS = 256  # of a block of threads: 8 warps
CHAIN_LANES = 8  # of a chunk

# The default secret of the xxHash specification, section "XXH3 algorithm overview".
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_START = (  # of the accumulator: the primes of the specification
    0xC2B2AE3D,
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x85EBCA77,
    0x27D4EB2F165667C5,
    0x9E3779B1,
)
_KEYS_AT = (128, 121, 11, 117)  # of the scramble, the last stripe, the low and the high half of the digest


@dataclass(frozen=True)
class Spans:
    """Where bytes [starts[0], stop) of a stream lie: from `starts[i]` on at `addresses[i]`, on one device."""

    starts: Sequence[int]
    addresses: Sequence[int]
    stop: int


@dataclass(frozen=True)
class Chunks:
    """Chunks of a stream that follow each other: [start, stop) in steps of `chunk_bytes`, the last perhaps shorter."""

    start: int
    stop: int
    chunk_bytes: int

    @property
    def starts(self) -> range:
        return range(self.start, self.stop, self.chunk_bytes)

    @property
    def count(self) -> int:
        return len(self.starts)

    @property
    def short(self) -> range:
        """The starts of those that get no digest on a device: the last one, or all."""
        if self.chunk_bytes < MIN_BYTES:
            return self.starts
        return self.starts[-1:] if self.stop - self.starts[-1] < MIN_BYTES else self.starts[:0]


class NoRoom(Exception):
    """The device has no memory left for scratch."""


class Launcher(Protocol):
    """One device, for one call at a time."""

    def room(self, size_bytes: int, *, lane: int = 0) -> int:
        """The address of so much device memory. It lasts as long as the launcher. Raises `NoRoom`."""
        ...

    def upload(self, words: "array[int]", *, lane: int = 0, at: int | None = None) -> int:
        """The address of a copy of these 64-bit words: `at`, or room of its own. What is launched in the lane waits."""
        ...

    def launch(self, kernel: str, threads: int, job: int, *, lane: int) -> None:
        """Run it after what was uploaded and launched in the same lane (below `LANES`). Returns at once.

        `threads`: how many it needs; 0: as many as the device runs side by side.
        """
        ...

    def mark(self, lane: int) -> object:
        """Marks the work launched in that lane so far, for `follow`."""
        ...

    def follow(self, lane: int, mark: object) -> None:
        """Work launched in this lane from now on runs after the mark."""
        ...

    def download(self, address: int, count: int, *, lane: int) -> "array[int]":
        """Wait for what was launched in that lane, and return so many words from there."""
        ...

    def wait(self, lane: int) -> None:
        """Until all that was launched in that lane has ended."""
        ...


def digests(
    device: Launcher, source: Spans, chunks: Chunks, target: Spans | None = None, *, is_hashing: bool = True
) -> bytes:
    """The digests of the chunks as the host makes them, one behind the other. Copies the bytes to `target` on the way.

    What stands for a chunk shorter than `MIN_BYTES` is nothing. Source and target do not overlap. Returns when the
    bytes are in place. Without `is_hashing` it copies only, and returns nothing. Raises `NoRoom`.
    """
    sizes = np.full(chunks.count, chunks.chunk_bytes, np.int64)
    sizes[-1] = chunks.stop - chunks.starts[-1]
    firsts = first_groups(sizes)
    windows, sums = _scratch(device, firsts)
    found = device.room(DIGEST_BYTES * chunks.count)
    starts = chunks.start + chunks.chunk_bytes * np.arange(chunks.count)
    parts = [chunk_table(starts, sizes, firsts), CONSTANTS, _map(source, chunks), _map(target, chunks)]
    sizes_bytes = [8 * len(part) for part in parts]
    base = device.room(sum(sizes_bytes) + 8 * JOB_WORDS * len(windows))
    table, constants, from_at, to_at, jobs_at = accumulate(sizes_bytes, initial=base)
    maps = (from_at, len(parts[2]) // 2, to_at, len(parts[3]) // 2)
    words = sum(parts, array("Q"))
    for index, (first, last) in enumerate(windows):
        words.extend(
            job(maps, table, firsts, first, last, constants, sums[index % SLOTS], found + DIGEST_BYTES * first)
        )
    device.upload(words, at=base)
    summing = "sum_only" if target is None else "sum_and_copy"
    chained: list[object] = []
    for index, (first, last) in enumerate(windows):
        at, lane = jobs_at + 8 * JOB_WORDS * index, 1 + index % SLOTS
        if len(chained) >= SLOTS:
            device.follow(0, chained[-SLOTS])  # which has read the scratch memory
        device.launch(summing, 0, at, lane=0)
        if not is_hashing:
            continue
        device.follow(lane, device.mark(0))
        device.launch("chain", CHAIN_LANES * (last - first), at, lane=lane)
        chained.append(device.mark(lane))
    if not is_hashing:
        device.wait(0)
        return b""
    for mark in chained[-SLOTS:]:
        device.follow(0, mark)
    return as_digests(device.download(found, 2 * chunks.count, lane=0))


def as_digests(halves: "array[int]") -> bytes:
    """The kernels' words, the low half of each digest first, as digests one behind the other."""
    return np.frombuffer(halves, np.uint64).reshape(-1, 2)[:, ::-1].byteswap().tobytes()


# -- what the kernels are told -----------------------------------------------------------------------------------------


def first_groups(sizes: Ints) -> list[int]:
    """How many groups come before each of these chunks, and how many there are."""
    return [0, *np.cumsum(-(-sizes // GROUP_BYTES)).tolist()]


def chunk_table(starts: Ints, sizes: Ints, firsts: Sequence[int]) -> "array[int]":
    """`Chunk`s, and the one behind the last."""
    table = np.zeros((len(firsts), CHUNK_WORDS), np.int64)
    table[:-1, 0], table[:-1, 1], table[:, 2] = starts, sizes, firsts
    return array("Q", table.tobytes())


def job(
    maps: Sequence[int],
    chunks: int,
    firsts: Sequence[int],
    first: int,
    last: int,
    constants: int,
    sums: int,
    found: int,
) -> tuple[int, ...]:
    """A `Job` for chunks [first, last) of a table: `JOB_WORDS` of them. `constants`: where `CONSTANTS` are."""
    usual_groups, keys = firsts[first + 1] - firsts[first], constants + 8 * SECRET_WORDS
    return (*maps, chunks + 8 * CHUNK_WORDS * first, last - first, usual_groups, constants, keys, sums, found)


def _scratch(device: Launcher, firsts: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """The windows, as [first, last) of the chunks, and room for the sums of two of them. Raises `NoRoom`."""
    for size_bytes in (WINDOW_BYTES, MIN_WINDOW_BYTES):
        windows, last = [], 0
        while last < len(firsts) - 1:
            first, most = last, firsts[last] + size_bytes // GROUP_BYTES
            last = max(first + 1, bisect_right(firsts, most) - 1)
            windows.append((first, last))
        groups = max(firsts[last] - firsts[first] for first, last in windows)
        with suppress(NoRoom):
            return windows, [device.room(SUMS_BYTES * groups) for _ in windows[:SLOTS]]
    raise NoRoom


def _map(spans: Spans | None, chunks: Chunks) -> "array[int]":
    """A table of (start, address) for the kernels."""
    if spans is None:
        return array("Q")
    assert spans.starts[0] <= chunks.start < chunks.stop <= spans.stop, "chunks that are not there"
    table = array("Q", [0]) * (2 * len(spans.starts))
    table[::2], table[1::2] = array("Q", spans.starts), array("Q", spans.addresses)
    return table


def _words(data: bytes, at: int, count: int) -> list[int]:
    return [int.from_bytes(data[at + 8 * i : at + 8 * i + 8], "little") for i in range(count)]


CONSTANTS = array(
    "Q", [*_words(SECRET, 0, SECRET_WORDS), *_START, *(w for at in _KEYS_AT for w in _words(SECRET, at, 8))]
)
