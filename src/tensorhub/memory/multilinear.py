"""The digest `multilinear-128`: sums of products, which torch computes on a device and numpy on the host alike.

A version may be held by CUDA and CPU workers, so a digest made on a device must be one that everybody can make. xxh3
works on its input byte after byte in registers; whole-tensor operations cannot follow it. This one is made of them:

    words     the chunk as little-endian signed 32-bit words, filled up with zeros to whole blocks of 4096
    blocks    h[k, b] = sum over i of  m[k, i] * word[b, i]        k = 0, 1; all sums and products mod 2**64
    digest    d[k]    = sum over b of  m'[k, b] * h[k, b]  +  m''[k] * (length in bytes);  16 bytes, little-endian

The multipliers m, m' and m'' are odd and otherwise the output of splitmix64, which never changes.

What it detects: an odd multiplier times anything but 0 is not 0 mod 2**64, so a difference in one word only (a flipped
bit, a burst of up to 32 bits in a word) never passes, and neither does a wrong length with equal bytes. For any other
difference (words exchanged, blocks zeroed, bytes shifted) the differences of the words have at most 31 zero bits at
their ends; over the choice of the multipliers at most 2**-26 of them cancel in one sum of both levels, and 2**-52 in
both sums. Whoever chooses bytes for it finds a collision with ease: it is against faults, as xxh3 is.

Never: depend on how bytes are cut, on the device, or on the byte order of the machine.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

BLOCK_WORDS = 4096
BLOCK_BYTES = 4 * BLOCK_WORDS
GROUP = 8  # blocks at a time on the host: 128 KiB of words and 256 KiB widened, which stay in a core's L2
_SEEDS = ((1, 2), (3, 4), (5, 6))  # of m, m' and m'', for k = 0 and 1

Words = NDArray[np.int64]
_tables: dict[int, Words] = {}
_on_device: "dict[tuple[torch.device, int, int], torch.Tensor]" = {}


def _splitmix(seed: int, count: int) -> NDArray[np.uint64]:
    state = np.uint64(seed << 40) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def table(level: int, count: int) -> Words:
    """At least the first `count` multipliers of a level, as [2, n]; grown by doubling, at most 1 MiB for 1 GiB."""
    known = _tables.get(level)
    if known is None or known.shape[1] < count:
        size = 1 << max(10, (count - 1).bit_length())
        both = [_splitmix(seed, size) | np.uint64(1) for seed in _SEEDS[level]]
        known = _tables[level] = np.stack(both).view(np.int64)
    return known


class Multilinear:
    """A digest of bytes that come one after another, made on the host."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._rest = b""  # less than a block
        self._blocks = 0
        self._sums: Words = np.zeros(2, dtype=np.int64)

    def update(self, views: Iterable[memoryview]) -> None:
        """More bytes."""
        parts: list[bytes | memoryview] = [self._rest] if self._rest else []
        parts += views
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self.size_bytes += len(data) - len(self._rest)
        whole = len(data) - len(data) % BLOCK_BYTES
        if whole:
            self._take(np.frombuffer(data, dtype="<i4", count=whole // 4).reshape(-1, BLOCK_WORDS))
        self._rest = bytes(data[whole:])

    def digest(self) -> bytes:
        """Of all so far (16 bytes)."""
        sums = self._sums.copy()
        if self._rest:
            words = np.frombuffer(self._rest.ljust(BLOCK_BYTES, b"\0"), dtype="<i4")
            multipliers = table(1, self._blocks + 1)[:, self._blocks]
            sums += (table(0, BLOCK_WORDS)[:, :BLOCK_WORDS] @ words.astype(np.int64)) * multipliers
        return packed(sums + table(2, 1)[:, 0] * self.size_bytes)

    def _take(self, blocks: NDArray[np.int32]) -> None:
        first, second = table(0, BLOCK_WORDS)[:, :BLOCK_WORDS]
        outer = table(1, self._blocks + len(blocks))
        for at in range(0, len(blocks), GROUP):
            words = blocks[at : at + GROUP].astype(np.int64)
            theirs = outer[:, self._blocks + at : self._blocks + at + len(words)]
            for k, multipliers in enumerate((first, second)):
                self._sums[k : k + 1] += np.dot(np.einsum("ij,j->i", words, multipliers), theirs[k])
        self._blocks += len(blocks)


def packed(sums: Words) -> bytes:
    """Two sums as the 16 bytes of a digest."""
    return sums.astype("<i8").tobytes()


def sums_of(data: "torch.Tensor") -> "torch.Tensor":
    """The two sums of one chunk, given as uint8, where it is: nothing is copied to the host, nothing waited for.

    Takes up to eight times the chunk's size of the device's memory while it runs.
    """
    import torch

    size_bytes = data.numel()
    blocks = -(-size_bytes // BLOCK_BYTES)
    if size_bytes % BLOCK_BYTES or data.storage_offset() % 4:
        filled = torch.zeros(blocks * BLOCK_BYTES, dtype=torch.uint8, device=data.device)
        filled[:size_bytes] = data
        data = filled
    words = data.view(torch.int32).view(blocks, BLOCK_WORDS).to(torch.int64)
    first, second = _device_table(data.device, 0, BLOCK_WORDS), _device_table(data.device, 1, blocks)
    sums = [((words * first[k]).sum(1) * second[k]).sum() for k in (0, 1)]
    return torch.stack(sums) + _device_table(data.device, 2, 1)[:, 0] * size_bytes


def _device_table(device: "torch.device", level: int, count: int) -> "torch.Tensor":
    import torch

    size = table(level, count).shape[1]
    known = _on_device.get((device, level, size))
    if known is None:
        known = _on_device[device, level, size] = torch.from_numpy(table(level, count).copy()).to(device)
    return known[:, :count]
