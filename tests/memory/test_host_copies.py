"""Host copies: how much room there is for them, their memory, and copying without the interpreter."""

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from bench.lab.interpreter import hold
from tensorhub.memory import host_copies
from tensorhub.memory.digests import build_manifest
from tensorhub.memory.fill import FillSink
from tensorhub.memory.host_copies import HostMemory, copy_stream, on_host, over_shared
from tensorhub.memory.host_memory import MIB, SPARE_BYTES, STEP_BYTES, Footing, Room, room
from tensorhub.memory.registration import Registration, register
from tensorhub.memory.streams import Freed, in_parallel
from tensorhub.protocol.errors import Closed, CorruptTransfer, HostMemoryFull, InvariantViolation
from tensorhub.transport import sealed
from tensorhub.transport.native import load
from tensorhub.transport.ranges import bare_addresses
from tensorhub.transport.sealed import Sealed, Shared, regions_of
from tensorhub.transport.threads import NotStarted, Thread

from .kit import image_of

# --- Room for host copies: the tightest of all limits above us, and parts that are taken only while there is some left.


HOST = "MemTotal: 64000000 kB\nMemAvailable: 8388608 kB\n"  # 8 GiB


def proc(folder: Path, cgroup: str, mountinfo: str, meminfo: str = HOST) -> Path:
    """A /proc that says so."""
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text(meminfo)
    (folder / "self/cgroup").write_text(cgroup)
    (folder / "self/mountinfo").write_text(mountinfo)
    return folder


def version_2(folder: Path, limit: str, used: int, *, high: str = "max", stat: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(limit)
    (folder / "memory.high").write_text(high)
    (folder / "memory.current").write_text(str(used))
    (folder / "memory.stat").write_text(stat or "anon 5\ninactive_file 0\nactive_file 0\n")


def mounted_2(mount: Path, root: str = "/") -> str:
    return f"30 23 0:26 {root} {mount} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


def test_nothing_can_be_learnt(tmp_path: Path) -> None:
    assert room(tmp_path / "nothing") is None
    assert room(proc(tmp_path / "odd", "what?\n", "what?\n", "MemAvailable: soon\n")) is None


@pytest.mark.parametrize("tight", ["slice", "slice/box", "slice/box/inner"])
def test_the_tightest_of_nested_groups_counts(tmp_path: Path, tight: str) -> None:
    mount = tmp_path / "cgroup"
    for name in ("slice", "slice/box", "slice/box/inner"):
        version_2(mount / name, str(512 * MIB) if name == tight else "max", 200 * MIB)
    found = room(proc(tmp_path / "proc", "0::/slice/box/inner\n", mounted_2(mount)))
    assert found is not None
    assert found.left_bytes == 312 * MIB
    assert found.limit == f"memory.max = 512 MiB of cgroup {mount / tight}"


def test_what_the_kernel_gives_back_is_no_use(tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    stat = f"inactive_file {300 * MIB}\nactive_file {100 * MIB}\n"
    version_2(mount / "box", str(1 << 30), 1000 * MIB, stat=stat)
    found = room(proc(tmp_path / "proc", "0::/box\n", mounted_2(mount)))
    assert found is not None
    assert found.left_bytes == (24 + 300 + 50) * MIB


@pytest.mark.parametrize(
    ("path", "root"),
    [("/docker/abc", "/docker/abc"), ("/", "/"), ("/../..", "/"), ("/docker/abc", "/"), ("/docker/abc", "/elsewhere")],
)
def test_in_a_container_the_mount_may_be_our_own_group(tmp_path: Path, path: str, root: str) -> None:
    mount = tmp_path / "cgroup"
    version_2(mount, str(1 << 30), 1000 * MIB)
    found = room(proc(tmp_path / "proc", f"0::{path}\n", mounted_2(mount, root)))
    assert found is not None
    assert found.left_bytes == 24 * MIB


def test_version_1_beside_version_2_without_a_memory_controller(tmp_path: Path) -> None:
    unified, memory = tmp_path / "unified", tmp_path / "memory"
    unified.mkdir()
    (memory / "box").mkdir(parents=True)
    (memory / "box/memory.limit_in_bytes").write_text(str(1 << 30))
    (memory / "box/memory.usage_in_bytes").write_text(str(900 * MIB))
    (memory / "box/memory.stat").write_text(f"inactive_file 7\ntotal_inactive_file {60 * MIB}\ntotal_active_file 0\n")
    (memory / "memory.limit_in_bytes").write_text("9223372036854771712")
    (memory / "memory.usage_in_bytes").write_text(str(5 << 30))
    (memory / "memory.stat").write_text("total_inactive_file 0\n")
    mounts = mounted_2(unified) + f"35 31 0:32 / {memory} rw - cgroup cgroup rw,memory\n"
    found = room(proc(tmp_path / "proc", "4:cpu,memory:/box\n0::/\n", mounts))
    assert found is not None
    assert found.left_bytes == (124 + 60) * MIB
    assert "memory.limit_in_bytes = 1.0 GiB" in found.limit


def test_a_part_is_taken_only_while_there_is_room() -> None:
    left = [10 * STEP_BYTES]
    footing = Footing(5 * STEP_BYTES, lambda: Room(left[0], "a test's limit"))
    for _ in range(STEP_BYTES // MIB + 1):
        footing.step(MIB)  # the second part has begun
    left[0] = SPARE_BYTES + STEP_BYTES // 2  # others have taken the rest
    for _ in range(STEP_BYTES // MIB - 1):
        footing.step(MIB)
    for _ in range(2):
        with pytest.raises(HostMemoryFull, match=r"room|a test's limit leaves"):
            footing.step(MIB)
    assert footing.is_short


def test_a_copy_that_ran_short_is_not_kept_for_the_next() -> None:
    left = [1 << 40]
    size_bytes = 3 * STEP_BYTES
    pool = HostMemory(register({"w": untouched(size_bytes)}), None, look=lambda: Room(left[0], "a test's limit"))
    copy = pool.take()
    with copy.stream.views_to_write(0, MIB):
        pass
    left[0] = 0
    with pytest.raises(HostMemoryFull), copy.stream.views_to_write(MIB, size_bytes):
        pass
    pool.give(copy)
    assert pool.used_bytes == 0
    with pytest.raises(HostMemoryFull, match="leaves 0 B"):
        pool.take()
    left[0] = 1 << 40
    pool.give(pool.take())
    assert pool.used_bytes == size_bytes


def test_what_a_transport_writes_by_itself_is_counted_too() -> None:
    """Else a copy that is filled by the mover would be looked at once, and its process killed."""
    left = [1 << 40]
    size_bytes = 3 * STEP_BYTES
    tensors = register({"w": untouched(size_bytes)})
    manifest = build_manifest(tensors, STEP_BYTES, verify="none", salt="one")
    pool = HostMemory(tensors, None, look=lambda: Room(left[0], "a test's limit"))
    fill = FillSink(pool.take(), manifest.root(), verify="none")
    fill.begin(manifest.encode())
    fill.told(MIB)
    left[0] = 0
    with pytest.raises(HostMemoryFull, match="a test's limit leaves"):
        fill.told(STEP_BYTES)


@pytest.mark.parametrize(("copies", "fits"), [(1, False), (2, True)])
def test_ahead_of_need_as_much_again_is_left(copies: int, *, fits: bool) -> None:
    size_bytes = 2 * STEP_BYTES
    left = [copies * size_bytes + SPARE_BYTES]
    pool = HostMemory(register({"w": untouched(size_bytes)}), size_bytes, look=lambda: Room(left[0], "a test's limit"))
    if not fits:
        with pytest.raises(HostMemoryFull, match=r"128 MiB more.*leaves 224 MiB \(224 MiB of that for all else"):
            pool.take(is_ahead=True)
        assert pool.used_bytes == 0
        pool.give(pool.take())  # once it is needed what is there is enough
        assert pool.take(is_ahead=True)  # and what was touched before costs nothing more
        return
    copy = pool.take(is_ahead=True)
    left[0] -= STEP_BYTES  # others take memory meanwhile
    with pytest.raises(HostMemoryFull), copy.stream.views_to_write(0, size_bytes):
        pass
    pool.give(copy)
    assert pool.used_bytes == 0


def untouched(size_bytes: int):
    """Memory of which no page is there yet."""
    return np.empty(size_bytes, dtype=np.uint8)


# --- Host copies: in memory that readers of this host can map, where there is such, and as before where there is not.


def registered(size_bytes: int = 3 << 20) -> Registration:
    return register({"w": np.random.default_rng(1).integers(0, 256, size=size_bytes, dtype=np.uint8)})


def regions(copy: Registration) -> tuple[Sealed, ...]:
    addresses = bare_addresses(copy.stream)
    assert addresses is not None
    return regions_of(addresses)


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
    assert image_of(copy) == image_of(tensors)
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
    with pytest.raises(InvariantViolation), over.stream.views_to_write(0, 1):
        pass
    pool.give(copy)
    del copy, found
    again = pool.take()
    copy_stream(registered(tensors.size_bytes).stream, again.stream, 1 << 20, lambda *_: None)
    with again.stream.views_to_write(0, 8) as (view,):
        view[:] = bytes(8)
    assert image_of(over) == image_of(tensors)
    assert theirs.counts_here, "who made it has let it go"


def test_without_such_memory_copies_are_made_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(sealed, "_memfd", refused)
    tensors = registered()
    copy = on_host(tensors)
    assert not regions(copy)
    copy_stream(tensors.stream, copy.stream, 1 << 20, lambda *_: None)
    assert image_of(copy) == image_of(tensors)


@pytest.mark.parametrize(
    ("limit_bytes", "left", "most", "why"),
    [
        (0, None, 0, "host_bytes is 0 B"),
        (99, None, 0, "host_bytes is 99 B"),
        (None, Room(16 << 20, "memory.max"), 0, "memory.max left 16 MiB at register()"),
        (None, Room(SPARE_BYTES + MIB, "memory.max"), 1, ""),
        (None, None, 2, ""),
        (5 * MIB, Room(0, "memory.max"), 5, ""),
    ],
)
def test_copies_are_as_many_as_fit_unless_a_user_has_said(
    limit_bytes: int | None, left: Room | None, most: int, why: str
) -> None:
    pool = HostMemory(registered(MIB), limit_bytes, look=lambda: left)
    assert (pool.most, pool.why_none) == (most, why)


@pytest.mark.parametrize(("left", "had", "taken", "most"), [(0, 0, 0, 0), (0, 1, 1, 1), (1, 1, 1, 2), (2, 0, 3, 2)])
def test_room_is_beside_the_copies_that_are_there(left: int, had: int, taken: int, most: int) -> None:
    tensors = registered()
    size_bytes = tensors.size_bytes
    look = lambda: Room(SPARE_BYTES + left * size_bytes - (not left), "a limit")  # noqa: E731
    assert HostMemory(tensors, None, look=look, had=had, taken_bytes=taken * size_bytes).most == most


# --- Copying to a host copy without the interpreter: the same bytes and the same errors as by Python.


needs_mover = pytest.mark.skipif(load.library() is None, reason=f"no native mover: {load.why_not()}")

CHUNK_BYTES = 64 * 1024


def tensors(*sizes: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    return {f"t{at}": random.integers(0, 256, size, dtype=np.uint8) for at, size in enumerate(sizes)}


def offload(
    source: Registration, target: Registration, *, manifest=None, verify: bool = True, is_over=lambda: False
) -> bool:
    """As `runtime.copies` does it."""
    found = manifest if manifest is not None else build_manifest(source, CHUNK_BYTES)
    assert host_copies.can_offload(source.stream, target.stream, found)
    sink = FillSink(target, found.root())
    sink.begin(found.encode())
    return host_copies.offload(source.stream, target.stream, found, verify=verify, check=sink.accept, is_over=is_over)


@needs_mover
@pytest.mark.parametrize(
    "sizes", [(1,), (CHUNK_BYTES,), (3 * CHUNK_BYTES + 17, 5), tuple([4096] * 700), tuple(range(1, 3000))]
)
def test_what_arrives_is_what_was_there(sizes: tuple[int, ...]) -> None:
    source = register(tensors(*sizes))
    target = on_host(source)
    assert offload(source, target)
    assert image_of(target) == image_of(source)


@needs_mover
@pytest.mark.parametrize("verify", [True, False])
def test_a_byte_that_was_changed_is_named(*, verify: bool) -> None:
    held = tensors(5 * CHUNK_BYTES)
    source = register(held)
    manifest = build_manifest(source, CHUNK_BYTES)
    held["t0"][3 * CHUNK_BYTES + 1] ^= 1
    if verify:
        with pytest.raises(CorruptTransfer, match="chunk 3 "):
            offload(source, on_host(source), manifest=manifest)
    else:
        assert offload(source, on_host(source), manifest=manifest, verify=False)


@needs_mover
def test_memory_that_was_freed_is_an_error() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    held = {name: torch.ones(10 << 20) for name in ("kept", "freed")}  # so large that no allocator keeps it
    source = register(held)
    manifest = build_manifest(source, CHUNK_BYTES)
    held["freed"].untyped_storage().resize_(0)
    with pytest.raises((Freed, CorruptTransfer)):
        offload(source, on_host(source), manifest=manifest)


@needs_mover
def test_room_is_looked_at_as_it_goes() -> None:
    source = register({"w": np.zeros(3 * STEP_BYTES, dtype=np.uint8)})
    left = [1 << 40]
    looks = []

    def look() -> Room:
        looks.append(None)
        if len(looks) > 2:  # the beginning, and the first part
            left[0] = SPARE_BYTES
        return Room(left[0], "a test's limit")

    target = HostMemory(source, None, look=look).take()
    with pytest.raises(HostMemoryFull):
        offload(source, target, manifest=build_manifest(source, STEP_BYTES // 4))


@needs_mover
def test_a_copy_that_is_given_up_ends() -> None:
    source = register(tensors(5 * CHUNK_BYTES))
    with pytest.raises(Closed):
        offload(source, on_host(source), is_over=lambda: True)


@pytest.mark.long
@needs_mover
def test_it_goes_on_while_another_thread_holds_the_interpreter() -> None:
    """Two thousand chunks within what a chunk each would take, did it wait for the interpreter."""
    source = register(tensors(32 << 20))
    manifest = build_manifest(source, 16 * 1024)
    target = on_host(source)
    turns, is_over = [0], threading.Event()

    def compute() -> None:
        while not is_over.is_set():
            hold(0.005)
            turns[0] += 1

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        before = turns[0]
        assert offload(source, target, manifest=manifest)
        took = turns[0] - before
    finally:
        is_over.set()
        thread.join()
    assert image_of(target) == image_of(source)
    assert took < manifest.chunk_count / 4


# --- Work in a few threads: all of it is done, in order, whatever becomes of a thread or of an item.


DEADLINE_S = 30.0


def test_several_threads_work_at_once_and_the_answers_are_in_order() -> None:
    both = threading.Barrier(3)

    def slow(number: int) -> int:
        both.wait(DEADLINE_S)
        return -number

    assert in_parallel(slow, range(9), threads=3, name="test") == [-number for number in range(9)]
    assert in_parallel(slow, [], threads=3, name="test") == []


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), NotStarted("it died"), MemoryError()])
def test_where_no_thread_begins_this_one_does_all(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: Thread) -> None:
        raise error

    monkeypatch.setattr(Thread, "start", refuse)
    me = threading.get_ident()
    assert in_parallel(lambda _: threading.get_ident(), range(5), threads=4, name="test") == [me] * 5


def test_the_first_failure_ends_it_and_is_raised() -> None:
    done, lock = [], threading.Lock()

    def work(number: int) -> None:
        with lock:
            done.append(number)
        if number == 3:
            raise ValueError("number 3")

    with pytest.raises(ValueError, match="number 3"):
        in_parallel(work, range(10_000), threads=2, name="test")
    assert len(done) < 10_000
