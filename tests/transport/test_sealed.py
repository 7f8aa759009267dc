"""Memory that others may map: who can do what with it, when it is handed over for good, and its large pages."""

import ctypes
import fcntl
import gc
import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import tensorhub
from tensorhub.memory import host_copies, host_memory
from tensorhub.memory.digests import build_manifest
from tensorhub.memory.fill import FillSink
from tensorhub.memory.host_copies import can_offload, offload
from tensorhub.memory.host_memory import Room
from tensorhub.memory.registration import register
from tensorhub.memory.streams import host_view
from tensorhub.transport import sealed
from tensorhub.transport.base import Export, Progress
from tensorhub.transport.native import load
from tensorhub.transport.ranges import Addresses
from tensorhub.transport.sealed import HUGE_BYTES, Foreign, Sealed, Shared, Unmappable, moved_to, regions_of

from . import kit
from .conftest import Make
from .kit import DEADLINE_S, MIB, Local, Pieces, Target, content, read_all

pytestmark = pytest.mark.skipif(bool(sealed.why_not()), reason=sealed.why_not() or "there")
SIZE = (2 << 20) + 12_345


@pytest.fixture(autouse=True)
def collected(nothing_left_behind: None) -> Iterator[None]:
    """An error that a test expects knows the test, and so its memory."""
    yield
    gc.collect()


def maps() -> int:
    """How many mappings of such memory this process has."""
    return Path("/proc/self/maps").read_text().count("memfd:tensorhub")


def test_what_the_owner_writes_the_other_sees_until_it_lets_go() -> None:
    before, size = maps(), SIZE
    ours = Sealed(size)
    theirs = Foreign(ours.descriptor, size)
    ctypes.memset(ours.address, 7, size)
    view = (ctypes.c_char * 1).from_address(ours.address)
    view.owner = ours  # type: ignore[attr-defined]
    del ours
    assert maps() == before + 2
    del view
    gc.collect()
    assert ctypes.string_at(theirs.address, size) == b"\7" * size
    theirs.close()
    theirs.close()
    assert maps() == before
    assert not regions_of(Addresses.of_ranges([(4096, 1)]))


def test_other_processes_cannot_cut_it_short_or_write_to_it() -> None:
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


def unsealed(seals: int, size: int, flags: int = sealed.ALLOW_SEALING) -> int:
    descriptor = os.memfd_create("lie", flags | sealed.CLOEXEC)
    os.ftruncate(descriptor, size)
    if seals:
        fcntl.fcntl(descriptor, sealed.ADD_SEALS, seals)
    return descriptor


def test_what_may_be_cut_short_or_written_to_is_not_mapped(tmp_path: Path) -> None:
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
    writable = unsealed(sealed.SEAL_SHRINK | sealed.SEAL_SEAL, 4096)
    with pytest.raises(Unmappable, match="to write"):
        Shared(writable, 4096)
    os.close(writable)
    try:
        huge = os.memfd_create("huge", sealed.ALLOW_SEALING | sealed.CLOEXEC | os.MFD_HUGETLB)
        os.ftruncate(huge, 2 << 20)
    except OSError as error:
        pytest.skip(f"no hugetlbfs here, where a page that is not reserved is a SIGBUS: {error}")
    fcntl.fcntl(huge, sealed.ADD_SEALS, sealed.SEAL_SHRINK)
    with pytest.raises(Unmappable, match="missing"):
        Foreign(huge, 4096)
    os.close(huge)


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
import numpy as np
from tensorhub.memory.registration import register
from tensorhub.transport import sealed
from tensorhub.transport.sealed import Foreign, Sealed
ours, tensors, large = Sealed(5000), Sealed(5000, is_inherited=True), Sealed(64 << 20)
theirs = Foreign(ours.descriptor, 5000)
ctypes.memset(tensors.address, 3, 5000)
child = os.fork()
if not child:
    names = [os.readlink(f"/proc/self/fd/{each.descriptor}") for each in (ours, tensors)]
    found = open("/proc/self/maps").read().count("memfd:tensorhub")
    value = ctypes.string_at(tensors.address, 1)
    del ours, tensors  # unmaps nothing here
    still = open("/proc/self/maps").read().count("memfd:tensorhub")
    arrays = [np.empty(5 << 20, np.uint8) for _ in range(12)]  # perhaps where the parent's memory lies
    known = [sealed.large_of(register({"w": array}).stream.addresses()) for array in arrays]
    ok = names == [os.devnull] * 2 and (found, value, still) == (1, b"\\3", 1) and not any(known)
    os._exit(0 if ok else 1)
_, status = os.waitpid(child, 0)
theirs.close()
print(os.waitstatus_to_exitcode(status), open("/proc/self/maps").read().count("memfd:tensorhub"))
"""


@pytest.mark.processes
def test_a_forked_child_keeps_and_knows_nothing_but_tensors() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "3"], done.stderr


def test_addresses_are_found_and_moved_only_as_a_whole() -> None:
    every = [Sealed(4096) for _ in range(20)]  # the kernel likes to put the new beside the old
    ranges = [(each.address + 5, 4000) for each in sorted(every, key=lambda each: each.address)]
    for at in range(0, len(every), 5):
        assert len(regions_of(Addresses.of_ranges(ranges[at : at + 5]))) == 5
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


# -- handed over for good ----------------------------------------------------------------------------------------------


CHUNK = 64 * 1024
KEPT_BYTES = 40 * CHUNK + 777


class Keeper(Target):
    """A sink that keeps the source's memory, and wants no chunk."""

    shares = True
    memory: Shared | None = None
    address = 0

    def share(self, memory: object, address: int) -> None:
        assert isinstance(memory, Shared)
        self.memory, self.address = memory, address

    def begin(self, manifest: bytes) -> Sequence[int]:
        super().begin(manifest)
        return ()

    @property
    def kept(self) -> bytes:
        assert self.memory is not None
        return ctypes.string_at(self.address, KEPT_BYTES)


def whole(memory: Sealed | Shared, *, done: bool = True) -> Export:
    if isinstance(memory, Sealed):
        ctypes.memmove(memory.address, bytes(content(KEPT_BYTES)), KEPT_BYTES)
    stream = Pieces(host_view(memory.address, KEPT_BYTES, memory))  # type: ignore[arg-type]
    stream.addresses = lambda: Addresses.of_ranges([(memory.address, KEPT_BYTES)])  # type: ignore[method-assign]
    return Export("k", b"manifest", CHUNK, stream, Progress(-(-KEPT_BYTES // CHUNK), complete=done))


def kept_from(local: Local, export: Export) -> Keeper:
    source, sink = local(), Keeper(content(KEPT_BYTES), CHUNK)
    source.export(export)
    assert read_all(local(), source.endpoint, "k", sink) is None
    return sink


def rights(address: int) -> str:
    """What may be done at that address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, what = line.split()[:2]
        first, last = (int(each, 16) for each in where.split("-"))
        if first <= address < last:
            return what
    return ""


def test_what_is_whole_is_handed_over_for_good_and_can_be_handed_on(local: Local) -> None:
    memory = Sealed(KEPT_BYTES, may_freeze=True)
    export = whole(memory)
    assert rights(memory.address).startswith("rw")
    first = kept_from(local, export)
    assert first.memory is not None
    assert not any(first.buffer), "no chunk was read"
    for one, address in ((memory, memory.address), (first.memory, first.address)):
        assert rights(address).startswith("r-")
        with pytest.raises(OSError, match="not permitted"):
            os.pwrite(one.descriptor, b"x", 0)
        with pytest.raises(OSError, match="not permitted"):
            sealed.MappedPages(one.descriptor, KEPT_BYTES, mmap.PROT_READ | mmap.PROT_WRITE)
    del memory, export, one
    second = kept_from(local, whole(first.memory))
    assert first.kept == second.kept == bytes(content(KEPT_BYTES))
    assert second.memory is not None
    assert os.fstat(second.memory.descriptor).st_ino == os.fstat(first.memory.descriptor).st_ino


@pytest.mark.parametrize("case", ["tensors", "unfinished", "ordinary memory", "not asked", "withdrawn"])
def test_what_may_still_be_written_is_not_handed_over(local: Local, case: str) -> None:
    memory = Sealed(KEPT_BYTES, may_freeze=case != "tensors")
    export, sink = whole(memory, done=case != "unfinished"), Keeper(content(KEPT_BYTES), CHUNK)
    if case == "ordinary memory":
        export = kit.full("k", content(KEPT_BYTES), CHUNK)
    sink.shares = case != "not asked"
    source = local()
    source.export(export)
    if case == "withdrawn":
        assert source.withdraw("k", timeout_s=DEADLINE_S)
    error = read_all(local(silence_s=0.5), source.endpoint, "k", sink)
    assert (error is not None) == (case == "withdrawn")
    assert sink.memory is None
    assert not memory.is_frozen
    assert rights(memory.address).startswith("rw")
    ctypes.memset(memory.address, 1, KEPT_BYTES)


def test_one_holder_counts_the_memory_and_another_once_that_one_is_gone_or_killed() -> None:
    memory = Sealed(SIZE, may_freeze=True)
    assert memory.freeze()
    one, two = (Shared(memory.descriptor, SIZE) for _ in range(2))
    assert [one.counts_here, two.counts_here] == [False, False]
    del memory
    assert [one.counts_here, two.counts_here, one.counts_here] == [True, False, True]
    del one
    assert two.counts_here
    program = (
        "import sys; from tensorhub.transport.sealed import Sealed; memory = Sealed(4096, may_freeze=True);"
        "assert memory.freeze(); print(memory.descriptor, flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    theirs = os.open(f"/proc/{child.pid}/fd/{int(child.stdout.readline())}", os.O_RDWR)
    try:
        mine = Shared(theirs, 4096)
        assert not mine.counts_here
        os.kill(child.pid, signal.SIGKILL)
        child.wait(DEADLINE_S)
        assert mine.counts_here
    finally:
        os.close(theirs)
        child.stdin.close()
        child.stdout.close()


# -- large pages: the kernel is asked whether they are there -----------------------------------------------------------


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
    """Why there can be none here."""
    if load.library() is None or sealed.why_not():
        return load.why_not() or sealed.why_not()
    memory, collapse = Sealed(2 * HUGE_BYTES), ctypes.c_int(25)
    ctypes.memset(memory.address, 1, 2 * HUGE_BYTES)
    if ctypes.CDLL(None).madvise(ctypes.c_void_p(memory.address), ctypes.c_size_t(2 * HUGE_BYTES), collapse):
        return "this kernel makes no large pages of shared memory (Linux 6.1 does)"
    return ""


WHY_NONE = why_none()
needs_large = pytest.mark.skipif(bool(WHY_NONE), reason=WHY_NONE)


@needs_large
@pytest.mark.parametrize("kind", ["tcp-3"], indirect=True)
def test_host_copies_lie_in_large_pages(make: Make) -> None:
    array = np.random.default_rng(7).integers(0, 256, 21 * MIB + 5, dtype=np.uint8)
    registration = register({"w": array})
    copied, fetched = host_copies.on_host(registration), host_copies.on_host(registration)
    manifest = build_manifest(registration, MIB)
    assert can_offload(registration.stream, copied.stream, manifest)
    assert offload(
        registration.stream, copied.stream, manifest, verify=True, check=lambda *_: None, is_over=lambda: False
    )
    source, reader = make(), make()
    progress = Progress(manifest.chunk_count, complete=True)
    source.export(Export("k", manifest.encode(), MIB, registration.stream, progress))
    sink = FillSink(fetched, str(manifest.root()), verify="full")
    assert read_all(reader, source.endpoint, "k", sink) is None  # type: ignore[arg-type]
    for copy in (copied, fetched):
        (piece,) = copy.pieces
        assert ctypes.string_at(piece.address, piece.size_bytes) == array.tobytes()
        assert large_bytes(piece.address) == 20 * MIB  # the last pages are no whole large one


@needs_large
def test_what_is_there_or_written_meanwhile_stays() -> None:
    memory = Sealed(8 * MIB)
    before = np.random.default_rng(8).integers(0, 256, 8 * MIB, dtype=np.uint8).tobytes()
    ctypes.memmove(memory.address, before, len(before))
    assert memory.have_large_pages(0, 8 * MIB)
    assert memory.have_large_pages(0, 8 * MIB)  # asked for already
    assert ctypes.string_at(memory.address, len(before)) == before
    assert large_bytes(memory.address) == 8 * MIB
    wanted = np.arange(4 * MIB, dtype=np.uint32)
    for _ in range(5):
        memory, begun = Sealed(16 * MIB), threading.Barrier(2)
        view = np.ctypeslib.as_array((ctypes.c_uint32 * len(wanted)).from_address(memory.address))

        def write(view: np.ndarray = view, begun: threading.Barrier = begun) -> None:
            begun.wait()
            for first in range(0, len(wanted), 4096):
                view[first : first + 4096] = wanted[first : first + 4096]

        thread = threading.Thread(target=write)
        thread.start()
        begun.wait()
        memory.have_large_pages(0, 16 * MIB)
        thread.join()
        assert np.array_equal(view, wanted)


@needs_large
@pytest.mark.parametrize("is_short", [False, True])
def test_empty_takes_large_pages_only_where_there_is_room(is_short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    left = Room((100 if is_short else 1000) * MIB, "memory.max")
    monkeypatch.setattr(host_memory, "room", lambda: left)
    monkeypatch.setattr(host_memory, "_arenas", host_memory.Arenas())
    tensor = tensorhub.empty(70 * MIB, "uint8")
    memory = regions_of(register({"w": tensor}).stream.addresses())[0]
    assert in_smaps(memory.address, "Rss") == (0 if is_short else 70 * MIB)
    tensor[:] = 3
    assert large_bytes(memory.address) == (0 if is_short else 70 * MIB)
