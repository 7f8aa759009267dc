"""Memory that others may map: what its owner can do with it, what nobody can, and what a reader refuses to map."""

import ctypes
import fcntl
import gc
import mmap
import os
import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tensorhub.transport import sealed
from tensorhub.transport.ranges import Addresses
from tensorhub.transport.sealed import Foreign, Sealed, Unmappable, moved_to, regions_of

needs_memfd = pytest.mark.skipif(bool(sealed.why_not()), reason=sealed.why_not() or "there")
pytestmark = needs_memfd
SIZE = (2 << 20) + 12_345


@pytest.fixture(autouse=True)
def collected(nothing_left_behind: None) -> Iterator[None]:
    """An error that a test expects knows the test, and so its memory."""
    yield
    gc.collect()


def maps() -> int:
    """How many mappings of such memory this process has."""
    with open("/proc/self/maps") as file:
        return sum("memfd:tensorhub" in line for line in file)


@pytest.mark.parametrize("size", [1, 4096, SIZE, 5 << 20])
def test_what_the_owner_writes_the_other_sees(size: int) -> None:
    ours = Sealed(size)
    theirs = Foreign(ours.descriptor, size)
    ctypes.memset(ours.address, 7, size)
    assert ctypes.string_at(theirs.address, size) == b"\7" * size
    theirs.close()
    theirs.close()


def test_nobody_cuts_it_short_maps_it_to_write_or_writes_to_it() -> None:
    ours = Sealed(SIZE)
    for act in (
        lambda: os.ftruncate(ours.descriptor, 4096),
        lambda: os.ftruncate(ours.descriptor, 2 * SIZE),
        lambda: os.pwrite(ours.descriptor, b"x", 0),
        lambda: mmap.mmap(ours.descriptor, SIZE),
        lambda: fcntl.fcntl(ours.descriptor, sealed.ADD_SEALS, 0),
    ):
        with pytest.raises(PermissionError):
            act()


def test_it_is_given_back_with_its_last_view() -> None:
    before = maps()
    ours = Sealed(SIZE)
    view = (ctypes.c_char * 5).from_address(ours.address)
    view.owner = ours  # type: ignore[attr-defined]
    del ours
    assert maps() == before + 1
    del view
    gc.collect()
    assert maps() == before
    assert not regions_of(Addresses.of_ranges([(4096, 1)]))


def test_the_other_keeps_it_until_it_lets_go() -> None:
    before = maps()
    ours = Sealed(SIZE)
    ctypes.memset(ours.address, 9, SIZE)
    theirs = Foreign(ours.descriptor, SIZE)
    del ours
    assert ctypes.string_at(theirs.address, SIZE) == b"\11" * SIZE
    theirs.close()
    assert maps() == before


def unsealed(seals: int, size: int, flags: int = sealed.ALLOW_SEALING) -> int:
    descriptor = os.memfd_create("lie", flags | sealed.CLOEXEC)
    os.ftruncate(descriptor, size)
    if seals:
        fcntl.fcntl(descriptor, sealed.ADD_SEALS, seals)
    return descriptor


def test_what_may_be_cut_short_is_not_mapped(tmp_path) -> None:  # type: ignore[no-untyped-def]
    ordinary = tmp_path / "file"
    ordinary.write_bytes(bytes(SIZE))
    pipe = os.pipe()
    lies = {
        unsealed(0, SIZE): "not sealed",
        unsealed(sealed.SEAL_GROW | sealed.SEAL_FUTURE_WRITE, SIZE): "not sealed",
        unsealed(0, SIZE, 0): "not sealed",
        unsealed(sealed.SEAL_SHRINK, SIZE - 1): "has",
        unsealed(sealed.SEAL_SHRINK, 0): "has",
        os.open(ordinary, os.O_RDWR): "nvalid",
        pipe[0]: "nvalid",
        pipe[1]: "nvalid",
    }
    for descriptor, why in lies.items():
        with pytest.raises(Unmappable, match=why):
            Foreign(descriptor, SIZE)
        os.close(descriptor)


def test_pages_that_may_be_missing_are_not_mapped() -> None:
    """Of hugetlbfs, where a page that is not reserved is a SIGBUS."""
    try:
        descriptor = os.memfd_create("huge", sealed.ALLOW_SEALING | sealed.CLOEXEC | os.MFD_HUGETLB)
        os.ftruncate(descriptor, 2 << 20)
    except OSError as error:
        pytest.skip(f"no hugetlbfs here: {error}")
    fcntl.fcntl(descriptor, sealed.ADD_SEALS, sealed.SEAL_SHRINK)
    with pytest.raises(Unmappable, match="missing"):
        Foreign(descriptor, 4096)
    os.close(descriptor)


def test_no_descriptor_left_is_no_such_memory() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))  # those that are open stay so
    try:
        with pytest.raises(Unmappable, match="memfd_create"):
            Sealed(4096)
        assert "memfd_create" in sealed.why_not()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert not sealed.why_not()


FORK = """
import ctypes, os
from tensorhub.transport.sealed import Foreign, Sealed
ours, tensors = Sealed(5000), Sealed(5000, is_inherited=True)
theirs = Foreign(ours.descriptor, 5000)
ctypes.memset(tensors.address, 3, 5000)
child = os.fork()
if not child:
    names = [os.readlink(f"/proc/self/fd/{each.descriptor}") for each in (ours, tensors)]
    found = open("/proc/self/maps").read().count("memfd:tensorhub")
    value = ctypes.string_at(tensors.address, 1)
    del ours, tensors  # unmaps nothing here
    still = open("/proc/self/maps").read().count("memfd:tensorhub")
    ok = names == [os.devnull] * 2 and (found, value, still) == (1, b"\\3", 1)
    os._exit(0 if ok else 1)
_, status = os.waitpid(child, 0)
theirs.close()
print(os.waitstatus_to_exitcode(status), open("/proc/self/maps").read().count("memfd:tensorhub"))
"""


@pytest.mark.processes
def test_a_forked_child_keeps_nothing_alive_but_tensors() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "2"], done.stderr


def test_memory_that_was_made_one_after_the_other_can_be_mapped_all_the_same() -> None:
    """The kernel likes to put the new beside the old, and what lies near together is read as one."""
    every = [Sealed(4096) for _ in range(20)]
    ranges = [(each.address + 5, 4000) for each in sorted(every, key=lambda each: each.address)]
    for at in range(0, len(every), 5):
        assert len(regions_of(Addresses.of_ranges(ranges[at : at + 5]))) == 5


def test_addresses_are_moved_only_as_a_whole() -> None:
    one, other = Sealed(8192), Sealed(8192)
    both = Addresses.of_ranges([(one.address + 5, 100), (other.address, 8192), (one.address + 300, 1)])
    assert set(regions_of(both)) == {one, other}
    moved = moved_to(both, [(one.address, 8192, 1 << 20), (other.address, 8192, 2 << 20)])
    assert moved.pairs.tolist() == [(1 << 20) + 5, 100, 2 << 20, 8192, (1 << 20) + 300, 1]
    assert moved.stop == both.stop
    outside = Addresses.of_ranges([(one.address + 5, 8188)])
    assert regions_of(outside) == ()
    for regions in ([(one.address, 8192, 0)], [(one.address, 8192, 0), (other.address, 10, 0)], []):
        with pytest.raises(ValueError, match="outside"):
            moved_to(outside, regions)
