"""Memory that a source hands over for good: when it does, that nobody can write to it any more, and who counts it."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tensorhub.memory.streams import host_view
from tensorhub.transport import sealed
from tensorhub.transport.base import Export, Progress
from tensorhub.transport.sealed import Sealed, Shared, Unmappable

from . import kit
from .kit import DEADLINE_S, Local, Pieces, Target, content, read_all

pytestmark = pytest.mark.skipif(bool(sealed.why_not()), reason=sealed.why_not() or "there")
CHUNK = 64 * 1024
SIZE = 40 * CHUNK + 777


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
        return ctypes.string_at(self.address, SIZE)


class Stands(Pieces):
    """Memory with lasting addresses, as a host copy is."""

    def addresses(self) -> object:
        return self.table

    def __init__(self, memory: Sealed | Shared, *, parts: int = 1) -> None:
        from tensorhub.transport.ranges import Addresses

        super().__init__(host_view(memory.address, SIZE, memory))  # type: ignore[arg-type]
        cut = SIZE // parts
        ends = [*(cut * part for part in range(1, parts)), SIZE]
        starts = [0, *ends[:-1]]
        pairs = [(memory.address + start, end - start) for start, end in zip(starts, ends, strict=True)]
        self.table = Addresses.of_ranges(pairs)


def whole(memory: Sealed | Shared, *, done: bool = True) -> Export:
    right = bytes(content(SIZE))
    if isinstance(memory, Sealed):
        ctypes.memmove(memory.address, right, SIZE)
    progress = Progress(-(-SIZE // CHUNK), complete=done)
    return Export("k", b"manifest", CHUNK, Stands(memory), progress)


def kept_from(local: Local, export: Export) -> Keeper:
    source, sink = local(), Keeper(content(SIZE), CHUNK)
    source.export(export)
    assert read_all(local(), source.endpoint, "k", sink) is None
    return sink


def rights(address: int) -> str:
    """What may be done at that address."""
    with open("/proc/self/maps") as file:
        for line in file:
            where, what = line.split()[:2]
            first, last = (int(each, 16) for each in where.split("-"))
            if first <= address < last:
                return what
    return ""


def test_what_is_whole_is_handed_over_for_good_and_written_to_by_nobody(local: Local) -> None:
    memory = Sealed(SIZE, may_freeze=True)
    export = whole(memory)
    assert rights(memory.address).startswith("rw")
    sink = kept_from(local, export)
    assert sink.kept == bytes(content(SIZE))
    assert rights(memory.address).startswith("r-")
    assert rights(sink.address).startswith("r-")
    assert not any(sink.buffer), "no chunk was read"
    for one in (memory, sink.memory):
        with pytest.raises(OSError, match="not permitted"):
            os.pwrite(one.descriptor, b"x", 0)  # type: ignore[union-attr]
        with pytest.raises(OSError, match="not permitted"):
            sealed.Mapping(one.descriptor, SIZE, sealed.mmap.PROT_READ | sealed.mmap.PROT_WRITE)  # type: ignore[union-attr]


def test_what_was_kept_can_be_handed_on_when_its_maker_is_gone(local: Local) -> None:
    first = kept_from(local, whole(Sealed(SIZE, may_freeze=True)))
    assert first.memory is not None
    second = kept_from(local, whole(first.memory))
    assert second.kept == bytes(content(SIZE))
    assert os.fstat(second.memory.descriptor).st_ino == os.fstat(first.memory.descriptor).st_ino  # type: ignore[union-attr]


@pytest.mark.parametrize("case", ["tensors", "unfinished", "ordinary memory", "nobody asked"])
def test_what_may_still_be_written_is_not_handed_over(local: Local, case: str) -> None:
    memory = Sealed(SIZE, may_freeze=case != "tensors")
    export, sink = whole(memory, done=case != "unfinished"), Keeper(content(SIZE), CHUNK)
    if case == "ordinary memory":
        export = kit.full("k", content(SIZE), CHUNK)
    sink.shares = case != "nobody asked"
    source = local()
    source.export(export)
    assert read_all(local(), source.endpoint, "k", sink) is None
    assert sink.memory is None
    assert rights(memory.address).startswith("rw")
    ctypes.memset(memory.address, 1, SIZE)


def test_a_withdrawn_export_is_not_frozen_afterwards(local: Local) -> None:
    memory = Sealed(SIZE, may_freeze=True)
    source = local()
    source.export(whole(memory))
    assert source.withdraw("k", timeout_s=DEADLINE_S)
    sink = Keeper(content(SIZE), CHUNK)
    assert read_all(local(silence_s=0.5), source.endpoint, "k", sink) is not None
    assert not memory.is_frozen
    ctypes.memset(memory.address, 1, SIZE)


def test_one_of_those_who_have_it_counts_it() -> None:
    memory = Sealed(SIZE, may_freeze=True)
    assert memory.freeze()
    one, two = (Shared(memory.descriptor, SIZE) for _ in range(2))
    assert [one.counts_here, two.counts_here] == [False, False]
    del memory
    assert [one.counts_here, two.counts_here, one.counts_here] == [True, False, True]
    del one
    assert two.counts_here


def test_memory_counts_elsewhere_once_its_process_is_killed() -> None:
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


def test_memory_that_somebody_could_map_to_write_is_not_kept() -> None:
    descriptor = os.memfd_create("lie", sealed.ALLOW_SEALING | sealed.CLOEXEC)
    os.ftruncate(descriptor, 4096)
    sealed.fcntl.fcntl(descriptor, sealed.ADD_SEALS, sealed.SEAL_SHRINK | sealed.SEAL_SEAL)
    with pytest.raises(Unmappable, match="to write"):
        Shared(descriptor, 4096)
    os.close(descriptor)
