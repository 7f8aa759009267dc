"""Room for host copies: the tightest of all limits above us, and parts that are taken only while there is some left."""

from pathlib import Path

import numpy as np
import pytest

from tensorhub.memory.digests import build_manifest
from tensorhub.memory.fill import FillSink
from tensorhub.memory.host_copies import HostMemory
from tensorhub.memory.registration import register
from tensorhub.memory.room import MIB, SPARE_BYTES, STEP_BYTES, Footing, Room, copies_that_fit, room, size_text
from tensorhub.protocol.errors import HostMemoryFull

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


def test_without_a_cgroup_it_is_what_the_host_has(tmp_path: Path) -> None:
    found = room(proc(tmp_path, "", ""))
    assert found == Room(8 << 30, "this host's memory")


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


def test_beyond_high_a_group_stands_still_so_it_is_a_limit_too(tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    version_2(mount / "box", str(1 << 30), 100 * MIB, high=str(300 * MIB))
    found = room(proc(tmp_path / "proc", "0::/box\n", mounted_2(mount)))
    assert found is not None
    assert found.left_bytes == 200 * MIB
    assert "memory.high" in found.limit


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


def test_what_was_touched_once_is_not_asked_for_again() -> None:
    asked = []

    def look() -> Room:
        asked.append(None)
        return Room(1 << 40, "a test's limit")

    footing = Footing(3 * STEP_BYTES, look)
    for _ in range(100):
        footing.step(STEP_BYTES)
    assert len(asked) == 4


def test_sizes_below_ten_mebibytes_are_not_rounded_to_nothing() -> None:
    assert [size_text(size) for size in (0, 4000, MIB, 3 * MIB // 2)] == ["0 B", "4000 B", "1.0 MiB", "1.5 MiB"]
    assert [size_text(size) for size in (20 * MIB, 3 << 29)] == ["20 MiB", "1.5 GiB"]


def test_copies_are_as_many_as_fit_unless_a_user_has_said() -> None:
    tensors = register({"w": untouched(MIB)})
    tight = Room(SPARE_BYTES + MIB, "a test's limit")
    assert HostMemory(tensors, None, look=lambda: tight).most == 1
    assert HostMemory(tensors, None, look=lambda: Room(0, "nothing")).most == 0
    assert HostMemory(tensors, None, look=lambda: None).most == 2
    assert HostMemory(tensors, 5 * MIB, look=lambda: tight).most == 5
    assert copies_that_fit(0, tight) == 2


def test_a_copy_that_ran_short_is_not_kept_for_the_next() -> None:
    left = [1 << 40]
    size_bytes = 3 * STEP_BYTES
    pool = HostMemory(register({"w": untouched(size_bytes)}), None, look=lambda: Room(left[0], "a test's limit"))
    copy = pool.take()
    with copy.stream.writing(0, MIB):
        pass
    left[0] = 0
    with pytest.raises(HostMemoryFull), copy.stream.writing(MIB, size_bytes):
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
    with pytest.raises(HostMemoryFull), copy.stream.writing(0, size_bytes):
        pass
    pool.give(copy)
    assert pool.used_bytes == 0


def untouched(size_bytes: int):
    """Memory of which no page is there yet."""
    return np.empty(size_bytes, dtype=np.uint8)
