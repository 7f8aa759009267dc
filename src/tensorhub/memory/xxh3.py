"""Digests of memory on a device, and copies that are digested in the same pass: plans the launches of `xxh3.cu`.

A stream's bytes lie in spans of device memory. Windows of whole chunks go through two kernels: one sums the blocks of
1 KiB (and copies them), the other chains the sums of each chunk to its digest. Two windows are under way at a time, so
that the short chain of one runs beside the sums of the next. The host waits once, for the digests.

Scratch memory on the device: 64 B for each KiB of two windows, and the tables: 65 MiB for windows of 512 MiB. A chunk
counts as whole groups of 4 KiB.
Chunks shorter than `LEAST_BYTES` are copied and get no digest here: xxh3 treats them otherwise.
"""

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

LEAST_BYTES = 241  # of a chunk: the long path of xxh3 begins there
WINDOW_BYTES = 512 << 20  # 0.17 ms of an H200's memory, as long as its chain of 4,096 blocks takes
LEAST_WINDOW_BYTES = 32 << 20  # where the device is nearly full: 4 MiB of scratch memory
BLOCK_BYTES = 1024  # of xxh3, between two scrambles
GROUP_BYTES = 4096  # of a chunk, summed at once
SUMS_BYTES = 256  # scratch memory of a group
CHUNK_WORDS = 3  # of a table of chunks: start, size, and the groups before it
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


class NoRoom(Exception):
    """The device has no memory left for scratch."""


class Launcher(Protocol):
    """One device, for one call at a time."""

    def room(self, size_bytes: int, *, lane: int = 0) -> int:
        """The address of so much device memory. It lasts as long as the launcher. Raises `NoRoom`."""
        ...

    def upload(self, words: "array[int]", *, lane: int = 0) -> int:
        """The address of a copy of these 64-bit words, as `room`. Lane 1 waits for those of lane 0."""
        ...

    def launch(self, kernel: str, threads: int, job: int, *, lane: int) -> None:
        """Run it after all uploads, and after what was launched in the same lane (0 or 1). Returns at once.

        `threads`: how many it needs; 0: as many as the device runs side by side.
        """
        ...

    def download(self, address: int, count: int, *, lane: int | None = None) -> "array[int]":
        """Wait for all that was launched, or for one lane, and return so many words from there."""
        ...

    def wait(self, lane: int) -> None:
        """Until all that was launched in that lane has ended."""
        ...


def digests(device: Launcher, source: Spans, chunks: Chunks, target: Spans | None = None) -> list[bytes]:
    """The digest of each chunk as the host makes them (16 bytes, big-endian), copied to `target` on the way.

    It is empty for a chunk shorter than `LEAST_BYTES`. Source and target do not overlap. Returns when the bytes are in
    place. Raises `NoRoom`.
    """
    starts, sizes = chunks.starts, [chunks.chunk_bytes] * chunks.count
    sizes[-1] = chunks.stop - starts[-1]
    firsts = first_groups(sizes)
    windows, sums = _scratch(device, firsts)
    found = device.room(16 * len(starts))
    table, constants = device.upload(chunk_table(starts, sizes, firsts)), upload_constants(device)
    maps = [*_map(device, source, chunks), *_map(device, target, chunks)]
    jobs = array("Q")
    for index, (first, last) in enumerate(windows):
        jobs.extend(job(maps, table, firsts, first, last, constants, sums[index % 2], found + 16 * first))
    jobs_at = device.upload(jobs)
    job_bytes = 8 * len(jobs) // len(windows)
    summing = "sum_only" if target is None else "sum_and_copy"
    for index, (first, last) in enumerate(windows):
        at, lane = jobs_at + index * job_bytes, index % 2
        device.launch(summing, 0, at, lane=lane)
        device.launch("chain", CHAIN_LANES * (last - first), at, lane=lane)
    words = device.download(found, 2 * len(starts))
    words.byteswap()
    halves = words.tobytes()
    made = [halves[at + 8 : at + 16] + halves[at : at + 8] for at in range(0, len(halves), 16)]
    return [it if size >= LEAST_BYTES else b"" for it, size in zip(made, sizes, strict=True)]


# -- what the kernels are told -----------------------------------------------------------------------------------------


def first_groups(sizes: Sequence[int]) -> "array[int]":
    """How many groups come before each of these chunks, and how many there are."""
    return array("Q", accumulate([-(-size // GROUP_BYTES) for size in sizes], initial=0))


def chunk_table(starts: Sequence[int], sizes: Sequence[int], firsts: "array[int]") -> "array[int]":
    """`Chunk`s, and the one behind the last."""
    table = array("Q", bytes(8 * CHUNK_WORDS * len(firsts)))
    table[2::CHUNK_WORDS] = firsts
    table[0:-CHUNK_WORDS:CHUNK_WORDS], table[1:-CHUNK_WORDS:CHUNK_WORDS] = array("Q", starts), array("Q", sizes)
    return table


def upload_constants(device: Launcher) -> tuple[int, int]:
    """Where the secret's words and the keys are."""
    tables = array("Q", _words(SECRET, 0, 24))
    keys_at = 8 * len(tables)
    tables.extend(_START)
    for at in _KEYS_AT:
        tables.extend(_words(SECRET, at, 8))
    places = device.upload(tables)
    return places, places + keys_at


def job(
    maps: Sequence[int],
    chunks: int,
    firsts: Sequence[int],
    first: int,
    last: int,
    constants: tuple[int, int],
    sums: int,
    found: int,
) -> tuple[int, ...]:
    """A `Job` for chunks [first, last) of a table."""
    usual_groups = firsts[first + 1] - firsts[first]
    return (*maps, chunks + 8 * CHUNK_WORDS * first, last - first, usual_groups, *constants, sums, found)


def _scratch(device: Launcher, firsts: "array[int]") -> tuple[list[tuple[int, int]], list[int]]:
    """The windows, as [first, last) of the chunks, and room for the sums of two of them. Raises `NoRoom`."""
    for size_bytes in (WINDOW_BYTES, LEAST_WINDOW_BYTES):
        windows, last = [], 0
        while last < len(firsts) - 1:
            first, most = last, firsts[last] + size_bytes // GROUP_BYTES
            last = max(first + 1, bisect_right(firsts, most) - 1)
            windows.append((first, last))
        groups = max(firsts[last] - firsts[first] for first, last in windows)
        with suppress(NoRoom):
            return windows, [device.room(SUMS_BYTES * groups) for _ in windows[:2]]
    raise NoRoom


def _map(device: Launcher, spans: Spans | None, chunks: Chunks) -> tuple[int, int]:
    """A table of (start, address) for the kernels, and how long it is."""
    if spans is None:
        return 0, 0
    assert spans.starts[0] <= chunks.start < chunks.stop <= spans.stop, "chunks that are not there"
    table = array("Q", [0]) * (2 * len(spans.starts))
    table[::2], table[1::2] = array("Q", spans.starts), array("Q", spans.addresses)
    return device.upload(table), len(spans.starts)


def _words(data: bytes, at: int, count: int) -> list[int]:
    return [int.from_bytes(data[at + 8 * i : at + 8 * i + 8], "little") for i in range(count)]
