"""Large pages under host copies and `tensorhub.empty`: there where the kernel gives them, and nothing else changes.

Whether they are there is what the kernel says in /proc/self/smaps, not what was asked for.
"""

import ctypes
import os
import threading
from pathlib import Path

import numpy as np
import pytest

import tensorhub
from tensorhub.memory import host_copies, host_memory
from tensorhub.memory.digests import build_manifest
from tensorhub.memory.fill import FillSink
from tensorhub.memory.host_copies import can_offload, offload
from tensorhub.memory.host_memory import Room
from tensorhub.memory.registration import Registration, register
from tensorhub.transport import sealed
from tensorhub.transport.base import Export, Progress
from tensorhub.transport.native import load
from tensorhub.transport.sealed import HUGE_BYTES, Foreign, Sealed

from .conftest import Make
from .kit import start_read

MIB = 1 << 20
MADV_COLLAPSE = 25


def in_smaps(address: int, field: str) -> int:
    """What the kernel says of the mapping of this process that begins there, in bytes."""
    is_here, found = False, 0
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        name = line.split()[0]
        if "-" in name and not name.endswith(":"):
            is_here = int(name.partition("-")[0], 16) == address
        elif is_here and name == f"{field}:":
            found += int(line.split()[1]) << 10
    return found


def large_bytes(address: int) -> int:
    """How much of it is in large pages."""
    return in_smaps(address, "ShmemPmdMapped")


def why_none() -> str:
    """Why there can be none here. Asks the kernel itself, not what is tested here: else that would excuse itself."""
    if load.library() is None:
        return f"no native mover: {load.why_not()}"
    if reason := sealed.why_not():
        return reason
    memory = Sealed(2 * HUGE_BYTES)
    ctypes.memset(memory.address, 1, 2 * HUGE_BYTES)
    arguments = ctypes.c_void_p(memory.address), ctypes.c_size_t(2 * HUGE_BYTES), ctypes.c_int(MADV_COLLAPSE)
    if ctypes.CDLL(None, use_errno=True).madvise(*arguments):
        return f"this kernel makes no large pages of shared memory: {os.strerror(ctypes.get_errno())} (Linux 6.1 does)"
    return ""


WHY_NONE = why_none()
needs_large = pytest.mark.skipif(bool(WHY_NONE), reason=WHY_NONE)


def registered(size_bytes: int) -> tuple[np.ndarray, Registration]:
    array = np.random.default_rng(7).integers(0, 256, size_bytes, dtype=np.uint8)
    return array, register({"w": array})


def bytes_of(registration: Registration) -> bytes:
    (piece,) = registration.pieces
    return ctypes.string_at(piece.address, piece.size_bytes)


@needs_large
@pytest.mark.parametrize("chunk_bytes", [MIB // 2, 4 * MIB])
def test_what_is_copied_out_lies_in_large_pages(chunk_bytes: int) -> None:
    array, registration = registered(21 * MIB + 5)
    copy = host_copies.on_host(registration)
    manifest = build_manifest(registration, chunk_bytes)
    assert can_offload(registration.stream, copy.stream, manifest)
    assert offload(
        registration.stream, copy.stream, manifest, verify=True, judge=lambda *_: None, is_over=lambda: False
    )
    assert bytes_of(copy) == array.tobytes()
    assert large_bytes(copy.pieces[0].address) == 20 * MIB  # the last pages are no whole large one


@needs_large
@pytest.mark.parametrize("kind", ["tcp-1", "tcp-3", "local-1", "local-3"], indirect=True)
def test_what_is_fetched_into_a_host_copy_lies_in_large_pages(make: Make) -> None:
    array, registration = registered(21 * MIB + 5)
    manifest = build_manifest(registration, MIB)
    source, reader, copy = make(), make(), host_copies.on_host(registration)
    progress = Progress(manifest.chunk_count, complete=True)
    source.export(Export("k", manifest.encode(), MIB, registration.stream, progress))
    sink = FillSink(copy, str(manifest.root()), verify="full")
    _, ended = start_read(reader, source.endpoint, "k", sink)
    assert ended.wait() is None
    assert sink.progress.is_complete
    assert bytes_of(copy) == array.tobytes()
    assert large_bytes(copy.pieces[0].address) == 20 * MIB


@needs_large
def test_what_is_there_stays() -> None:
    memory = Sealed(8 * MIB)
    before = np.random.default_rng(8).integers(0, 256, 8 * MIB, dtype=np.uint8).tobytes()
    ctypes.memmove(memory.address, before, len(before))
    assert memory.have_large_pages(0, 8 * MIB)
    assert memory.have_large_pages(0, 8 * MIB)  # asked for already
    assert ctypes.string_at(memory.address, len(before)) == before
    assert large_bytes(memory.address) == 8 * MIB


@needs_large
def test_who_writes_meanwhile_loses_nothing() -> None:
    for _ in range(20):
        memory = Sealed(16 * MIB)
        begun = threading.Barrier(2)
        wanted = np.arange(4 * MIB, dtype=np.uint32)
        view = np.ctypeslib.as_array((ctypes.c_uint32 * len(wanted)).from_address(memory.address))

        def write(view: np.ndarray = view, wanted: np.ndarray = wanted, begun: threading.Barrier = begun) -> None:
            begun.wait()
            for first in range(0, len(wanted), 4096):
                view[first : first + 4096] = wanted[first : first + 4096]

        thread = threading.Thread(target=write)
        thread.start()
        begun.wait()
        memory.have_large_pages(0, 16 * MIB)
        thread.join()
        assert np.array_equal(view, wanted)


def test_who_was_left_behind_by_a_fork_is_not_waited_for() -> None:
    if load.library() is None:
        pytest.skip(f"no native mover: {load.why_not()}")
    being_asked, memory = 1, Sealed(4 * MIB)
    assert memory.large is not None
    ctypes.memset(memory.large.asked, being_asked, 2)
    memory.have_large_pages(0, 4 * MIB)
    assert ctypes.string_at(memory.address, 4 * MIB) == bytes(4 * MIB)


@needs_large
@pytest.mark.parametrize("is_short", [False, True])
def test_empty_takes_large_pages_only_where_there_is_room(is_short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    left = Room((100 if is_short else 1000) * MIB, "memory.max")
    monkeypatch.setattr(host_memory, "room", lambda: left)
    monkeypatch.setattr(host_memory, "_arenas", host_memory.Arenas())
    tensor = tensorhub.empty(70 * MIB, "uint8")
    memory = sealed.regions_of(register({"w": tensor}).stream.addresses())[0]
    before = in_smaps(memory.address, "Rss")
    assert before == 0 if is_short else before == 70 * MIB
    tensor[:] = 3
    assert large_bytes(memory.address) == (0 if is_short else 70 * MIB)


@pytest.mark.skipif(bool(sealed.why_not()), reason=sealed.why_not() or "there")
def test_a_forked_child_knows_nothing_of_what_its_parent_made() -> None:
    """Where that lay the child may have anything else: reading beside it would end it."""
    memory = Sealed(64 * MIB)
    child = os.fork()
    if child == 0:
        try:
            arrays = [np.empty(5 * MIB, np.uint8) for _ in range(12)]
            known = [sealed.large_of(register({"w": array}).stream.addresses()) for array in arrays]
            os._exit(0 if not any(known) else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert memory.address


@needs_large
def test_who_was_refused_does_not_ask_again() -> None:
    memory = Sealed(8 * MIB)
    assert memory.large is not None
    memory.large.is_refused = 1
    assert not memory.have_large_pages(0, 8 * MIB)
    ctypes.memset(memory.address, 1, 8 * MIB)
    assert large_bytes(memory.address) == 0


@needs_large
def test_a_part_has_only_the_pages_that_are_its_own() -> None:
    memory = Sealed(8 * MIB)
    memory.have_large_pages(MIB, 5 * MIB)
    assert large_bytes(memory.address) in (0, 2 * MIB)  # put together, and mapped here only when it is touched
    ctypes.memset(memory.address, 1, 8 * MIB)
    assert large_bytes(memory.address) == 2 * MIB


@needs_large
def test_a_reader_maps_large_pages_too() -> None:
    memory = Sealed(8 * MIB)
    memory.have_large_pages(0, 8 * MIB)
    foreign = Foreign(memory.descriptor, 8 * MIB)
    assert ctypes.string_at(foreign.address, 8 * MIB) == bytes(8 * MIB)
    assert large_bytes(foreign.address) == 8 * MIB
    foreign.close()


@needs_large
def test_a_frozen_copy_keeps_them() -> None:
    memory = Sealed(4 * MIB, may_freeze=True)
    memory.have_large_pages(0, 4 * MIB)
    assert memory.freeze()
    assert ctypes.string_at(memory.address, 4 * MIB) == bytes(4 * MIB)
    assert large_bytes(memory.address) == 4 * MIB


@needs_large
def test_a_tensor_of_empty_has_them() -> None:
    tensor = tensorhub.empty(6 * MIB, "uint8")
    tensor[:] = 3
    memory = sealed.regions_of(register({"w": tensor}).stream.addresses())[0]
    assert large_bytes(memory.address) >= 4 * MIB


@pytest.mark.parametrize("size_bytes", [1, HUGE_BYTES - 1, HUGE_BYTES, HUGE_BYTES + 1])
def test_small_memory_and_odd_ranges_are_left_alone(size_bytes: int) -> None:
    if reason := sealed.why_not():
        pytest.skip(reason)
    memory = Sealed(size_bytes)
    for start, stop in ((0, size_bytes), (0, 10 * HUGE_BYTES), (-HUGE_BYTES, size_bytes), (size_bytes, size_bytes)):
        memory.have_large_pages(start, stop)
        assert not memory.have_large_pages(start, size_bytes + 1)
    assert ctypes.string_at(memory.address, size_bytes) == bytes(size_bytes)


def test_without_the_mover_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := sealed.why_not():
        pytest.skip(reason)
    monkeypatch.setattr(load, "library", lambda: None)
    memory = Sealed(4 * MIB)
    assert not memory.have_large_pages(0, 4 * MIB)
    ctypes.memset(memory.address, 1, 4 * MIB)
    assert large_bytes(memory.address) == 0
    assert not sealed.has_large_pages()
