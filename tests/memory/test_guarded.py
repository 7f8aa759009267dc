"""Memory of our own that the kernel copies for us: whole where it is there, an error where it is not."""

import ctypes
import fcntl
import mmap
import os
import threading

import pytest

from tensorhub.memory import streams
from tensorhub.transport.ranges import Addresses

PAGE = mmap.PAGESIZE


@pytest.fixture(params=["kernel", "pipe"], autouse=True)
def way(request, monkeypatch):
    """Both ways: as usual, and where a filter forbids that."""
    monkeypatch.setattr(streams, "_is_refused", request.param == "pipe")


def scattered(memory: bytearray, sizes: list[int]) -> Addresses:
    """Of pieces of these sizes, with a byte between each and the next."""
    views, at = [], 0
    for size in sizes:
        views.append(memoryview(memory)[at : at + size])
        at += size + 1
    return Addresses.of_views(views, 0)


def content(memory: bytearray, sizes: list[int]) -> bytes:
    found, at = b"", 0
    for size in sizes:
        found += memory[at : at + size]
        at += size + 1
    return found


@pytest.mark.parametrize("sizes", [[300_000], [1, 7, 100_000, 3, 199_989], [100] * 3000])
def test_bytes_go_where_they_belong_however_both_sides_are_cut(sizes: list[int]) -> None:
    source = bytearray(index * 7 % 251 for index in range(310_000))
    other = [123_456, 1, 176_543]
    target = bytearray(310_000)
    streams.copy(scattered(source, sizes), scattered(target, other), 5, 299_990)
    assert content(target, other)[5:299_990] == content(source, sizes)[5:299_990]
    assert content(target, other)[:5] == bytes(5)
    assert not any(target[at] for at in (123_456, 123_458))  # between the pieces


@pytest.mark.parametrize("room", [1000, 70_001, 300_000])
def test_parts_are_the_bytes_in_order(room: int) -> None:
    source = bytearray(index * 7 % 251 for index in range(310_000))
    sizes = [100_000, 3, 199_997]
    found = b"".join(bytes(part) for part in streams.parts(scattered(source, sizes), 17, 299_000, bytearray(room)))
    assert found == content(source, sizes)[17:299_000]


def test_what_is_not_there_is_told_with_its_place(tmp_path) -> None:
    path = tmp_path / "pages"
    path.write_bytes(bytes(8 * PAGE))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 8 * PAGE) as pages:
        view, room = memoryview(pages), bytearray(8 * PAGE)
        lost, kept = Addresses.of_views([view], 0), Addresses.of_views([memoryview(room)], 0)
        streams.copy(lost, kept, 0, 8 * PAGE)
        file.truncate(5 * PAGE)
        for source, target in ((lost, kept), (kept, lost)):
            streams.copy(source, target, 0, 5 * PAGE)
            with pytest.raises(streams.Freed) as caught:
                streams.copy(source, target, PAGE, 8 * PAGE)
            assert caught.value.at == 5 * PAGE
        view.release()


def test_a_user_with_many_pipes_gets_small_ones(monkeypatch) -> None:
    """From `pipe-user-pages-soft` on: a copy waited for ever for somebody else to empty its own pipe."""
    pipe = os.pipe

    def small() -> tuple[int, int]:
        out, into = pipe()
        fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, PAGE)
        return out, into

    monkeypatch.setattr(os, "pipe", small)
    source, target = bytearray(os.urandom(20 * PAGE + 1)), bytearray(20 * PAGE + 1)
    addresses = [Addresses.of_views([memoryview(each)], 0) for each in (source, target)]
    copying = threading.Thread(target=streams.copy, args=(*addresses, 0, len(source)), daemon=True)
    copying.start()
    copying.join(20)
    assert not copying.is_alive()
    assert source == target


def test_bytes_that_may_not_be_written_are_found_and_the_others_stay_as_they_are() -> None:
    fixed = mmap.mmap(-1, 4096)
    free = bytearray(range(1, 256))
    here = ctypes.addressof(ctypes.c_char.from_buffer(free))
    there = ctypes.addressof(ctypes.c_char.from_buffer(fixed))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(there), 4096, mmap.PROT_READ) == 0
    addresses = [here + at for at in range(200)] * 20
    for place in (0, 1, 1023, 1024, 2500, 3999):
        addresses[place] = there
    assert streams.unwritable(addresses) == [0, 1, 1023, 1024, 2500, 3999]
    assert streams.unwritable([]) == []
    assert free == bytearray(range(1, 256))
