"""The mover's digest against the library that everybody uses, for every length, alignment and cut."""

import ctypes
import random
import threading
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


# -- while they are copied ---------------------------------------------------------------------------------------------


def copied(room: Room, start: int, stop: int, cuts: list[int], shift: int) -> tuple[bytes, bytes]:
    """The digest, and what arrived, at an address that is `shift` beyond a multiple of 64."""
    lib, state, size = library(), shapes.DigestState(), stop - start
    memory = ctypes.create_string_buffer(b"\xee" * (size + 3 * MARGIN), size + 3 * MARGIN)
    first = -ctypes.addressof(memory) % MARGIN + MARGIN + shift
    lib.digest_begin(state, size)
    for begin, end in pairwise([start, *cuts, stop]):
        into = ctypes.addressof(memory) + first + begin - start
        lib.digest_copy(state, into, room.address + begin, end - begin)
    out = ctypes.create_string_buffer(16)
    assert lib.digest_end(state, out) == 1
    assert set(memory.raw[:first] + memory.raw[first + size :]) == {0xEE}, "nothing beside it was written"
    return out.raw, memory.raw[first : first + size]


def test_what_is_copied_is_what_is_hashed_at_every_length_and_alignment() -> None:
    room, chance = Room(8192 + MARGIN, seed=4), random.Random(5)
    for size in [*range(300), *range(960, 1100), *(chance.randrange(8193) for _ in range(300))]:
        start, shift = chance.randrange(MARGIN), chance.choice((0, 0, 16, 32, 48, 1, 8, 63))
        assert copied(room, start, start + size, [], shift) == (
            room.right(start, start + size),
            room.bytes[start : start + size],
        ), (size, start, shift)


@pytest.mark.parametrize("size", [4096, 4097, 20_000, (1 << 20) + 17])
def test_what_is_copied_may_be_cut_anywhere(size: int) -> None:
    room, chance = Room(size, seed=size), random.Random(size)
    for shift in (0, 16, 32, 5):
        for count in (1, 3, 40):
            cuts = sorted(chance.choice((1, 16, 64)) * chance.randrange(size // 64) for _ in range(count))
            assert copied(room, 0, size, cuts, shift) == (room.right(0, size), room.bytes), (shift, cuts)


@pytest.mark.parametrize("which", [0, 1])
def test_the_loops_that_copy_do_what_the_others_do(which: int) -> None:
    room, lib = Room(64 * 1024), library()
    memory = ctypes.create_string_buffer(64 * 1024 + MARGIN)
    aligned = ctypes.addressof(memory) + -ctypes.addressof(memory) % MARGIN
    for index in range(16):
        for count in (0, 1, 15, 16, 17, 500):
            plain, copying = ((ctypes.c_uint64 * 8)(*range(1, 9)) for _ in range(2))
            lib.digest_take_plain(plain, room.address + index, count, index)
            into = aligned + 16 * (index % 4)
            if not lib.digest_store(which, copying, into, room.address + index, count, index):
                pytest.skip("this processor has no such loop")
            assert list(plain) == list(copying), (index, count)
            assert ctypes.string_at(into, 64 * count) == room.bytes[index : index + 64 * count]


def test_what_changes_while_it_is_copied_never_differs_from_its_digest() -> None:
    """Another thread writes without a pause; whatever arrived, its digest is the one that was given for it."""
    size = 256 * 1024
    room, lib, is_over = Room(size, seed=6), library(), threading.Event()

    def write() -> None:
        value = 0
        while not is_over.is_set():
            value = (value + 1) % 256
            ctypes.memset(room.address, value, size)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        found, memory = ctypes.create_string_buffer(16), ctypes.create_string_buffer(size + MARGIN)
        into = ctypes.addressof(memory) + -ctypes.addressof(memory) % 16
        for round_ in range(300):
            shift = (0, 16, 1)[round_ % 3]
            state = shapes.DigestState()
            lib.digest_begin(state, size)
            lib.digest_copy(state, into + shift, room.address, size)
            assert lib.digest_end(state, found) == 1
            assert found.raw == xxhash.xxh3_128_digest(ctypes.string_at(into + shift, size))
    finally:
        is_over.set()
        writer.join()
