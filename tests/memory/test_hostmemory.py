"""Host copies: in memory that readers of this host can map, where there is such, and as before where there is not."""

import errno
import os

import numpy as np
import pytest

from tensorhub.memory.host_copies import HostMemory, copy_stream, on_host, over_shared
from tensorhub.memory.registration import Registration, register
from tensorhub.memory.room import SPARE_BYTES, Room
from tensorhub.protocol.errors import InvariantViolation
from tensorhub.transport import sealed
from tensorhub.transport.ranges import bare_addresses
from tensorhub.transport.sealed import Sealed, Shared, regions_of


def registered(size_bytes: int = 3 << 20) -> Registration:
    return register({"w": np.random.default_rng(1).integers(0, 256, size=size_bytes, dtype=np.uint8)})


def regions(copy: Registration) -> tuple[Sealed, ...]:
    addresses = bare_addresses(copy.stream)
    assert addresses is not None
    return regions_of(addresses)


def content(registration: Registration) -> bytes:
    with registration.stream.reading(0, registration.size_bytes) as views:
        return b"".join(views)


@pytest.mark.skipif(bool(sealed.why_not()), reason=sealed.why_not() or "there")
def test_a_copy_can_be_mapped_and_is_given_back_with_its_memory() -> None:
    tensors = registered()
    pool = HostMemory(tensors, 2 * tensors.size_bytes)
    copy = pool.take()
    assert not regions(tensors)
    (found,) = regions(copy)
    assert found.size_bytes == tensors.size_bytes
    address = found.address
    copy_stream(tensors.stream, copy.stream, 1 << 20, lambda *_: None)
    assert content(copy) == content(tensors)
    del found
    pool.give(copy)
    del copy
    again = pool.take()
    assert regions(again)[0].address == address, "the same memory for the next"
    pool.retire()
    pool.give(again)
    del again
    assert address not in {each.address for each in sealed._all}, "and then it is nobody's"


@pytest.mark.skipif(bool(sealed.why_not()), reason=sealed.why_not() or "there")
def test_memory_that_others_have_too_is_not_used_for_the_next_copy() -> None:
    tensors = registered()
    pool = HostMemory(tensors, 2 * tensors.size_bytes)
    copy = pool.take()
    copy_stream(tensors.stream, copy.stream, 1 << 20, lambda *_: None)
    (found,) = regions(copy)
    assert found.freeze()
    theirs = Shared(found.descriptor, found.size_bytes)
    over = over_shared(tensors, theirs, theirs.address)
    assert over.layout_digest == tensors.layout_digest
    with pytest.raises(InvariantViolation), over.stream.writing(0, 1):
        pass
    pool.give(copy)
    del copy, found
    again = pool.take()
    copy_stream(registered(tensors.size_bytes).stream, again.stream, 1 << 20, lambda *_: None)
    with again.stream.writing(0, 8) as (view,):
        view[:] = bytes(8)
    assert content(over) == content(tensors)
    assert theirs.counts_here, "who made it has let it go"


def test_without_such_memory_copies_are_made_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(sealed, "_memfd", refused)
    tensors = registered()
    copy = on_host(tensors)
    assert not regions(copy)
    copy_stream(tensors.stream, copy.stream, 1 << 20, lambda *_: None)
    assert content(copy) == content(tensors)


@pytest.mark.parametrize(
    ("limit_bytes", "why"),
    [
        (0, "host_bytes is 0 B"),
        (99, "host_bytes is 99 B"),
        (None, "memory.max left 16 MiB at register()"),
        (1 << 20, ""),
    ],
)
def test_it_says_which_limit_has_no_room_for_any_copy(limit_bytes: int | None, why: str) -> None:
    assert HostMemory(registered(1 << 20), limit_bytes, look=lambda: Room(16 << 20, "memory.max")).why_none == why


@pytest.mark.parametrize(("left", "had", "taken", "most"), [(0, 0, 0, 0), (0, 1, 1, 1), (1, 1, 1, 2), (2, 0, 3, 2)])
def test_room_is_beside_the_copies_that_are_there(left: int, had: int, taken: int, most: int) -> None:
    tensors = registered()
    size_bytes = tensors.size_bytes
    look = lambda: Room(SPARE_BYTES + left * size_bytes - (not left), "a limit")  # noqa: E731
    assert HostMemory(tensors, None, look=look, had=had, taken_bytes=taken * size_bytes).most == most
