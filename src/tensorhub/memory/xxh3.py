"""Digests of memory on a device, and copies that are digested in the same pass: plans the launches of `xxh3.cu`.

A stream's bytes lie in spans of device memory. Windows of whole chunks go through two kernels: one sums the blocks of
1 KiB (and copies them), the other chains the sums of each chunk to its digest. Two windows are under way at a time, so
that the short chain of one runs beside the sums of the next. The host waits once, for the digests.

Scratch memory on the device: 64 B for each KiB of two windows, and the tables: 65 MiB for windows of 512 MiB.
Chunks shorter than `LEAST_BYTES` are copied and get no digest here: xxh3 treats them otherwise.
"""

from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

LEAST_BYTES = 241  # of a chunk: the long path of xxh3 begins there
WINDOW_BYTES = 512 << 20  # 0.17 ms of an H200's memory, as long as its chain of 4,096 blocks takes
LEAST_WINDOW_BYTES = 32 << 20  # where the device is nearly full: 4 MiB of scratch memory
BLOCK_BYTES = 1024  # of xxh3, between two scrambles
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
    def count(self) -> int:
        return -(-(self.stop - self.start) // self.chunk_bytes)

    def windows(self, size_bytes: int = WINDOW_BYTES) -> Iterator["Chunks"]:
        """The same, in parts of at most so many bytes, and of at least one chunk."""
        step = max(1, size_bytes // self.chunk_bytes) * self.chunk_bytes
        for start in range(self.start, self.stop, step):
            yield Chunks(start, min(start + step, self.stop), self.chunk_bytes)


class NoRoom(Exception):
    """The device has no memory left for scratch."""


class Launcher(Protocol):
    """One device, for one call at a time."""

    def room(self, size_bytes: int) -> int:
        """The address of so much device memory. It lasts as long as the launcher. Raises `NoRoom`."""
        ...

    def upload(self, words: "array[int]") -> int:
        """The address of a copy of these 64-bit words, as `room`."""
        ...

    def launch(self, kernel: str, threads: int, job: int, *, lane: int) -> None:
        """Run it after all uploads, and after what was launched in the same lane (0 or 1). Returns at once.

        `threads`: how many it needs; 0: as many as the device runs side by side.
        """
        ...

    def download(self, address: int, count: int) -> "array[int]":
        """Wait for all that was launched, and return so many words from there."""
        ...


def digests(device: Launcher, source: Spans, chunks: Chunks, target: Spans | None = None) -> list[bytes]:
    """The digest of each chunk as the host makes them (16 bytes, big-endian), copied to `target` on the way.

    It is empty for a chunk shorter than `LEAST_BYTES`. Source and target do not overlap. Returns when the bytes are in
    place. Raises `NoRoom`.
    """
    assert chunks.stop > chunks.start, "no chunks"
    blocks = -(-chunks.chunk_bytes // BLOCK_BYTES)
    windows, sums = _scratch(device, chunks, 64 * blocks)
    found = device.room(16 * chunks.count)
    tables = array("Q", _words(SECRET, 0, 24))
    keys_at = len(tables)
    tables.extend(_START)
    for at in _KEYS_AT:
        tables.extend(_words(SECRET, at, 8))
    places = device.upload(tables)
    maps = [_map(device, spans, chunks) for spans in (source, target)]
    jobs = array("Q")
    done = 0
    for index, window in enumerate(windows):
        size_bytes = window.stop - window.start
        jobs.extend((*maps[0], *maps[1], window.start, size_bytes, chunks.chunk_bytes, blocks, window.count))
        jobs.extend((places, places + 8 * keys_at, sums[index % 2], found + 16 * done))
        done += window.count
    first = device.upload(jobs)
    job_bytes = 8 * len(jobs) // len(windows)
    summing = "sum_only" if target is None else "sum_and_copy"
    for index, window in enumerate(windows):
        job, lane = first + index * job_bytes, index % 2
        device.launch(summing, 0, job, lane=lane)
        device.launch("chain", CHAIN_LANES * window.count, job, lane=lane)
    words = device.download(found, 2 * chunks.count)
    words.byteswap()
    halves = words.tobytes()
    made = [halves[at + 8 : at + 16] + halves[at : at + 8] for at in range(0, len(halves), 16)]
    if chunks.chunk_bytes < LEAST_BYTES:
        return [b""] * len(made)
    is_last_short = 0 < (chunks.stop - chunks.start) % chunks.chunk_bytes < LEAST_BYTES
    return [*made[:-1], b""] if is_last_short else made


def _scratch(device: Launcher, chunks: Chunks, chunk_sums_bytes: int) -> tuple[list[Chunks], list[int]]:
    """The windows, and room for the sums of two of them. Raises `NoRoom`."""
    for size_bytes in (WINDOW_BYTES, LEAST_WINDOW_BYTES):
        windows = list(chunks.windows(size_bytes))
        with suppress(NoRoom):
            room = chunk_sums_bytes * windows[0].count
            return windows, [device.room(room) for _ in range(min(2, len(windows)))]
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
