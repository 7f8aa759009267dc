"""Weights that the test process shares with a worker, and what they should be.

The content of a version is made here and judged here, by SHA-256, so a mistake of the library's own digests cannot hide
a mistake of its transfers. Every scenario has contents of its own: what an earlier one left in reused memory is wrong
in every word.
"""

import hashlib
import mmap
import os
from functools import cache

import numpy as np

MIB = 1 << 20
SHARDS = 2
SHARD_BYTES = 64 * MIB + 4120  # the last chunk is a short one
CHUNK_BYTES = 4 * MIB
GUARD_BYTES = 64 * 1024
GUARD = bytes([0xA5]) * GUARD_BYTES


def chunks_of(size_bytes):
    """How many chunks a shard of that size has."""
    return -(-size_bytes // CHUNK_BYTES)


def tensors_of(size_bytes):
    """Name, dtype, shape and first byte in the memory of each tensor; together they are all of the shard's bytes."""
    unit = size_bytes // 16 // 8 * 8
    sizes = [("embed", "float32", 4 * unit), ("attention", "float16", 5 * unit), ("mlp", "int8", 3 * unit + 8)]
    sizes += [("scale", "float64", 8)]
    sizes += [("head", "uint8", size_bytes - sum(size for _, _, size in sizes))]
    found, at = {}, GUARD_BYTES
    for name, dtype, size in sizes:
        items = size // np.dtype(dtype).itemsize
        shape = () if name == "scale" else (2, items // 2) if items % 2 == 0 else (items,)
        found[name] = (name, dtype, shape, at)
        at += size
    return [found[name] for name in ("head", "embed", "scale", "mlp", "attention")]  # not in the order of memory


class Memory:
    """The memory of one worker: guard bytes, the shard, guard bytes."""

    def __init__(self, size_bytes):
        self.size_bytes = size_bytes
        self.descriptor = os.memfd_create("weights")
        os.ftruncate(self.descriptor, size_bytes + 2 * GUARD_BYTES)
        self.map = mmap.mmap(self.descriptor, size_bytes + 2 * GUARD_BYTES)
        self.map[:GUARD_BYTES] = self.map[-GUARD_BYTES:] = GUARD
        self.words = np.frombuffer(self.map, dtype=np.uint64, count=size_bytes // 8, offset=GUARD_BYTES)

    def sha256(self):
        """Of the shard's bytes as they are now; the bytes around it must be as they were."""
        assert self.map[:GUARD_BYTES] == GUARD, "bytes before the shard were overwritten"
        assert self.map[-GUARD_BYTES:] == GUARD, "bytes behind the shard were overwritten"
        return hashlib.sha256(self.words).hexdigest()


class Contents:
    """What the versions of one scenario are."""

    def __init__(self, salt, size_bytes):
        self._salt = salt
        self._size_bytes = size_bytes
        self._sha256 = {}

    def write(self, memory, version, shard):
        """Make this memory that version. The test is the only one that may."""
        key = f"{self._salt}/{version}/{shard}".encode()
        number = np.uint64(int.from_bytes(hashlib.sha256(key).digest()[:8], "little") | 1)
        np.add(_noise(self._size_bytes), number, out=memory.words)
        if (version, shard) not in self._sha256:
            self._sha256[version, shard] = memory.sha256()

    def are(self, memory, version, shard):
        """Whether the memory is that version, to the last byte."""
        return memory.sha256() == self._sha256[version, shard]


@cache
def _noise(size_bytes):
    return np.random.default_rng(1).integers(0, 2**64, size=size_bytes // 8, dtype=np.uint64)
