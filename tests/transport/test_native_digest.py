"""The mover's digest against the library that everybody uses, for every length, alignment and cut."""

import ctypes
import random
from itertools import pairwise

import pytest
import xxhash

from tensorhub.transport.native import shapes

from .native import library, needs_mover

pytestmark = needs_mover

MARGIN = 64


class Room:
    """Random bytes with an address."""

    def __init__(self, size_bytes: int, seed: int = 1) -> None:
        self.bytes = random.Random(seed).randbytes(size_bytes)
        self._memory = ctypes.create_string_buffer(self.bytes, size_bytes)
        self.address = ctypes.addressof(self._memory)

    def digest(self, start: int, stop: int, cuts: list[int] | None = None) -> bytes:
        """Of bytes [start, stop), given piece by piece."""
        lib, state = library(), shapes.DigestState()
        lib.digest_begin(state, stop - start)
        edges = [start, *(cuts or []), stop]
        for first, last in pairwise(edges):
            lib.digest_update(state, self.address + first, last - first)
        out = ctypes.create_string_buffer(16)
        assert lib.digest_end(state, out) == 1
        return out.raw

    def right(self, start: int, stop: int) -> bytes:
        return xxhash.xxh3_128_digest(self.bytes[start:stop])


def test_every_length_at_every_alignment() -> None:
    room = Room(4096 + MARGIN)
    for size in range(4097):
        for start in (0, 1, size % MARGIN):
            assert room.digest(start, start + size) == room.right(start, start + size), (size, start)
    for start in range(MARGIN):
        for size in (3, 8, 16, 128, 240, 241, 1024, 1025, 2048, 4096):
            assert room.digest(start, start + size) == room.right(start, start + size), (size, start)


def test_however_it_is_cut() -> None:
    room, chance = Room(4096, seed=2), random.Random(3)
    for size in range(0, 4097, 7):
        cuts = sorted(chance.randrange(size + 1) for _ in range(chance.randrange(9)))
        assert room.digest(0, size, cuts) == room.right(0, size), (size, cuts)
    for size in (241, 1024, 1025, 1089, 3000):
        assert room.digest(0, size, list(range(1, size))) == room.right(0, size), "byte by byte"


@pytest.mark.parametrize("size", [1 << 20, (4 << 20) - 1, 4 << 20, (16 << 20) + 12345])
def test_large_ones(size: int) -> None:
    room, chance = Room(size, seed=size), random.Random(size)
    assert room.digest(0, size) == room.right(0, size)
    cuts = sorted(chance.randrange(size + 1) for _ in range(200))
    assert room.digest(0, size, cuts) == room.right(0, size)


@pytest.mark.parametrize("come", [0, 1, 239, 241, 499, 501, 5000])
def test_a_content_of_another_size_has_no_digest(come: int) -> None:
    room, lib, state = Room(5000), library(), shapes.DigestState()
    lib.digest_begin(state, 500)
    lib.digest_update(state, room.address, come)
    assert lib.digest_end(state, ctypes.create_string_buffer(16)) == 0
    lib.digest_update(state, room.address, 500)
    lib.digest_update(state, room.address, 500)
    assert lib.digest_end(state, ctypes.create_string_buffer(16)) == 0


def test_the_loop_that_every_processor_has_does_the_same() -> None:
    """This machine may have a faster one, and takes it: so the other is tried by itself."""
    room, lib = Room(64 * 1024), library()
    for index in range(16):
        for count in (0, 1, 2, 15, 16, 17, 500):
            plain, best = ((ctypes.c_uint64 * 8)(*range(1, 9)) for _ in range(2))
            lib.digest_take_plain(plain, room.address + index, count, index)
            lib.digest_take_best(best, room.address + index, count, index)
            assert list(plain) == list(best), (index, count)
    assert lib.digest_way
