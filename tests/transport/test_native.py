"""The native mover: how it is built and found, what it parses and hashes, and reads that it does."""

import ctypes
import os
import platform
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import xxhash

from tensorhub.protocol.errors import CorruptTransfer, SessionLost
from tensorhub.transport.base import Export, Progress, Terms, Until
from tensorhub.transport.native import build, load, shapes
from tensorhub.transport.native.reads import Mover

from . import kit
from .conftest import Make, Spawn, line
from .kit import DEADLINE_S, MIB, Target, content, full, read_all, start_read
from .native import library, needs_mover

needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="no C compiler here")
kinds = pytest.mark.parametrize("kind", ["tcp-3", "tcp-lending-2", "local-3", "local-mapped-3"], indirect=True)
some_kinds = pytest.mark.parametrize("kind", ["tcp-3", "local-3"], indirect=True)
CHUNK = 64 * 1024


# -- building and finding ----------------------------------------------------------------------------------------------


@pytest.fixture
def as_before() -> Iterator[None]:
    """After this test the library is what it was before."""
    yield
    load.reset()


@needs_compiler
def test_python_knows_the_structures_as_c_does(tmp_path: Path) -> None:
    names = {shapes.StopFlag: "stop_flag_t", shapes.Marks: "progress_t", shapes.ReadState: "read_t"}
    names |= {shapes.StreamState: "stream_t", shapes.ServeState: "serve_t", shapes.OffloadState: "offload_t"}
    names |= {shape: shape.__name__.removesuffix("State").lower() + "_t" for shape in shapes.ALL if shape not in names}
    lines = [
        f'printf("%zu ", offsetof({name}, {field[0]}));' for shape, name in names.items() for field in shape._fields_
    ]
    program = tmp_path / "offsets.c"
    program.write_text(f'#include <stdio.h>\n#include "mover.h"\nint main(void) {{ {" ".join(lines)} return 0; }}\n')
    command = build.compiler()
    assert command is not None
    made = tmp_path / "offsets"
    subprocess.run([*command, "-D_GNU_SOURCE", f"-I{build.HERE}", str(program), "-o", str(made)], check=True)
    found = list(map(int, subprocess.run([made], check=True, capture_output=True, text=True).stdout.split()))
    assert found == [getattr(shape, field[0]).offset for shape in names for field in shape._fields_]


@pytest.mark.long
@pytest.mark.parametrize("way", ["cc", "zig", "zig-aarch64"])
def test_it_builds_without_a_warning_and_only_once(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORHUB_BUILD", way)
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "mover.so")
    if build.compiler() is None:
        pytest.skip(f"no compiler here by way of {way}")
    assert "was built" in build.make()
    assert build.stamp() == build.fingerprint()
    assert build.make() == "the native mover is there"
    assert [path.name for path in tmp_path.iterdir()] == ["mover.so"]
    if build.machine() == platform.machine():
        assert load.Library(str(build.LIBRARY)).digest_way
    else:
        assert build.LIBRARY.read_bytes()[18:20] == b"\xb7\x00"  # ELF: made for AArch64
    for path in build.sources():  # ziglang has a library for these that cannot be put into a shared one
        assert "__builtin_cpu" not in path.read_text(encoding="utf-8"), path.name


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize(
    ("variables", "found", "says"),
    [
        ({"TENSORHUB_BUILD": "no"}, "build", "TENSORHUB_BUILD=no"),
        ({"TENSORHUB_BUILD": "cc", "PATH": "/nowhere"}, "build", "no C compiler"),
        ({"TENSORHUB_BUILD": "cc", "CC": "false"}, "build", "cannot build"),
        ({}, "", "not built"),
        ({}, "tensorhub-mover:0123456789abcdef", "other sources"),
        ({}, f"tensorhub-mover:{build.fingerprint()}", "cannot be loaded"),
        ({load.VARIABLE: "Off"}, "", "TENSORHUB_NATIVE=Off leaves it out"),
    ],
)
def test_where_it_cannot_be_built_or_used_that_is_said_and_no_error(
    variables: dict[str, str], found: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "mover.so")
    monkeypatch.delenv(load.VARIABLE, raising=False)
    monkeypatch.delenv("CC", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if found == "build":
        said = build.make()
        assert says in said
        assert [path.name for path in tmp_path.iterdir()] == ["mover.reason"]
        assert build.why_not_made() in said
    elif found:
        build.LIBRARY.write_text(found)
    load.reset()
    assert load.library() is None
    assert says in load.why_not(), "the reason is known later, too"


# -- marks and stop flags, with the mover and without it ---------------------------------------------------------------


@pytest.fixture(params=["native", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(load, "library", lambda: None)


@pytest.mark.usefixtures("way")
def test_marks_from_many_threads_make_one_prefix_and_wake_waiters() -> None:
    progress, order = Progress(4000), list(range(4000))
    random.Random(5).shuffle(order)
    threads = [threading.Thread(target=lambda i=i: progress.mark_all(order[i::4])) for i in range(4)]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    assert all(progress.wait(chunk, DEADLINE_S) for chunk in range(4000))
    for thread in threads:
        thread.join()
    assert progress.is_complete
    assert progress.prefix == 4000
    for act in (lambda p: p.mark(1), lambda p: p.fail("no more"), lambda p: p.wake()):
        progress, given_up, found = Progress(2), threading.Event(), list[bool]()
        waiter = threading.Thread(
            target=lambda p=progress, g=given_up, f=found: f.append(p.wait(1, DEADLINE_S, g.is_set))  # type: ignore[misc]
        )
        waiter.start()
        given_up.set()
        act(progress)
        waiter.join(DEADLINE_S)
        assert found == [progress.has(1)]
    with pytest.raises(IndexError):
        progress.mark(2)
    assert Progress(0).is_complete


class Slow(list):  # type: ignore[type-arg]
    """Four threads append before any goes on."""

    all_are_in = threading.Barrier(4)

    def append(self, each: object) -> None:
        super().append(each)
        self.all_are_in.wait(DEADLINE_S)


def test_streams_that_begin_at_once_have_memory_of_their_own() -> None:
    """Or else one hashes what another one receives, and wrong bytes count."""
    mover, found = Mover.__new__(Mover), list[int]()
    mover.state, mover._scratch_bytes, mover._scratch = shapes.ReadState(), 64, Slow()
    threads = [threading.Thread(target=lambda at=at: found.append(mover.stream(0, at).scratch)) for at in range(4)]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert sorted(found) == sorted({ctypes.addressof(each) for each in mover._scratch})


# -- digests -----------------------------------------------------------------------------------------------------------


MARGIN = 64


class Room:
    """Random bytes with an address."""

    def __init__(self, size_bytes: int, seed: int = 1) -> None:
        self.bytes = random.Random(seed).randbytes(size_bytes)
        self._memory = ctypes.create_string_buffer(self.bytes, size_bytes)
        self.address = ctypes.addressof(self._memory)

    def check(self, start: int, stop: int, cuts: Sequence[int] = (), shift: int | None = None) -> None:
        """Hash [start, stop) piece by piece; or copy it too, to an address `shift` beyond a multiple of 64."""
        lib, state, size, out = library(), shapes.DigestState(), stop - start, ctypes.create_string_buffer(16)
        memory = ctypes.create_string_buffer(b"\xee" * (size + 3 * MARGIN), size + 3 * MARGIN)
        first = -ctypes.addressof(memory) % MARGIN + MARGIN + (shift or 0)
        lib.digest_begin(state, size)
        for begin, end in pairwise([start, *cuts, stop]):
            if shift is None:
                lib.digest_update(state, self.address + begin, end - begin)
            else:
                into = ctypes.addressof(memory) + first + begin - start
                lib.digest_copy(state, into, self.address + begin, end - begin)
        assert lib.digest_end(state, out) == 1
        right, what = self.bytes[start:stop], (start, stop, cuts, shift)
        assert out.raw == xxhash.xxh3_128_digest(right), what
        if shift is not None:
            assert memory.raw[first : first + size] == right, what
            assert set(memory.raw[:first] + memory.raw[first + size :]) == {0xEE}, "nothing beside it was written"


@needs_mover
def test_digests_of_every_length_alignment_and_cut() -> None:
    room, chance = Room(20_000 + MARGIN), random.Random(3)
    for size in range(4097):
        room.check(size % MARGIN, size % MARGIN + size)
    for start in range(MARGIN):
        for size in (3, 16, 128, 240, 241, 1024, 1025, 4096):
            room.check(start, start + size)
    for size in (*range(0, 4097, 7), 20_000):
        room.check(0, size, sorted(chance.randrange(size + 1) for _ in range(chance.randrange(9))))
    room.check(0, 1089, range(1, 1089))
    for size in [*range(300), *range(960, 1100), *(chance.randrange(8193) for _ in range(200))]:
        start = chance.randrange(MARGIN)
        room.check(start, start + size, shift=chance.choice((0, 16, 32, 48, 1, 8, 63)))
    for shift, count in ((0, 1), (16, 3), (32, 40), (5, 40)):
        cuts = sorted(chance.choice((1, 16, 64)) * chance.randrange(4096 // 64) for _ in range(count))
        room.check(0, 20_000, cuts, shift)
    for come in (0, 241, 499, 501, 5000):  # where another size comes than was said there is no digest
        state = shapes.DigestState()
        library().digest_begin(state, 500)
        library().digest_update(state, room.address, come)
        assert library().digest_end(state, ctypes.create_string_buffer(16)) == 0


@needs_mover
def test_all_loops_do_the_same() -> None:
    """This machine takes a fast one: the one that every processor has, and those that copy, are tried, too."""
    room, lib = Room(64 * 1024), library()
    memory = ctypes.create_string_buffer(64 * 1024 + MARGIN)
    aligned = ctypes.addressof(memory) + -ctypes.addressof(memory) % MARGIN
    for index in range(16):
        for count in (0, 1, 2, 15, 16, 17, 500):
            plain, best, one, other = ((ctypes.c_uint64 * 8)(*range(1, 9)) for _ in range(4))
            lib.digest_take_plain(plain, room.address + index, count, index)
            lib.digest_take_best(best, room.address + index, count, index)
            assert list(plain) == list(best), (index, count)
            into = aligned + 16 * (index % 4)
            for which, copying in enumerate((one, other)):
                if lib.digest_store(which, copying, into, room.address + index, count, index):
                    assert list(plain) == list(copying), (index, count)
                    assert ctypes.string_at(into, 64 * count) == room.bytes[index : index + 64 * count]


# -- reads without the interpreter, and yet in the hand of those who may end them --------------------------------------


NEVER_S = 1000.0  # no other thread gets the interpreter before that


class Leased(Target):
    """A sink under a lease."""

    def __init__(self, right: bytearray, chunk_bytes: int) -> None:
        super().__init__(right, chunk_bytes)
        self.until = Until(time.monotonic() + 1000)

    def terms(self) -> Terms | None:
        super().terms()
        return Terms(b"".join(self.digests), self.progress, (self.stop_flag,), self.until)

    def check(self) -> None:
        super().check()
        if time.monotonic() >= self.until.value:
            raise SessionLost("the lease has ended")


@pytest.fixture
def no_switching() -> Iterator[None]:
    """A thread that has the interpreter keeps it until it waits."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(NEVER_S)
    yield
    sys.setswitchinterval(before)


@needs_mover
@some_kinds
@pytest.mark.processes
@pytest.mark.usefixtures("no_switching")
def test_bytes_come_while_the_interpreter_is_never_let_go(make: Make, spawn: Spawn) -> None:
    """The main thread holds it from the first chunk to the last: it sleeps in a call that does not let go of it."""
    count = 64
    source = spawn("source", count * CHUNK, CHUNK, 8)
    endpoint, reader, right = line(source), make(60.0), content(count * CHUNK)
    target = Target(right, CHUNK)
    _, ended = start_read(reader, endpoint, "k", target)
    kit.until(lambda: target.progress.prefix == 8 and target.told_bytes == 8 * CHUNK, "the read is under way")
    kit.until(lambda: sys.getswitchinterval() == NEVER_S, "no stream of it is connecting, for which they are short")
    assert source.stdin is not None
    libc, polls = ctypes.PyDLL(None), 0  # its calls do not let go of the interpreter
    libc.write(source.stdin.fileno(), b"the rest\n", 9)
    while target.progress.prefix < count and polls < 1000:
        libc.usleep(10_000)
        polls += 1
    assert target.told_bytes == 8 * CHUNK, "no thread had the interpreter meanwhile"
    assert target.progress.prefix == count
    assert ended.wait() is None
    assert target.buffer == right
    assert target.told_bytes == count * CHUNK


@needs_mover
@kinds
def test_after_the_end_of_the_lease_or_with_a_stop_flag_nothing_counts(make: Make) -> None:
    right, source, reader = content(4 * CHUNK), make(60.0), make(60.0)
    for how in ("lease", "stop flag"):
        progress, target = Progress(4), Leased(right, CHUNK)
        source.export(Export("k", b"manifest", CHUNK, kit.Pieces(right), progress))
        _, ended = start_read(reader, source.endpoint, "k", target)
        progress.mark(0)
        assert target.progress.wait(0, DEADLINE_S)
        if how == "lease":
            target.until.value = time.monotonic()
        else:
            target.stop_flag.set()
        before = bytes(target.progress._have)
        progress.mark(1)
        error = ended.wait()
        assert isinstance(error, SessionLost)
        assert how in str(error)
        assert bytes(target.progress._have) == before == b"\1\0\0\0"
        assert not any(target.buffer[2 * CHUNK :])


@needs_mover
@kinds
def test_what_counts_was_judged_and_without_digests_all_counts(make: Make) -> None:
    class Unchecked(Target):
        is_checking = False

        def terms(self) -> Terms | None:
            super().terms()
            return Terms(None, self.progress, ())

    right = content(8 * CHUNK)
    wrong = bytearray(right)
    wrong[5 * CHUNK + 77] ^= 4
    source, reader = make(), make()
    source.export(full("k", wrong, CHUNK))
    target, unchecked = Target(right, CHUNK), Unchecked(right, CHUNK)
    error = read_all(reader, source.endpoint, "k", target)
    assert isinstance(error, CorruptTransfer)
    assert "chunk 5" in str(error)
    assert 5 not in target.order
    assert target.told_bytes == len(target.order) * CHUNK
    assert read_all(reader, source.endpoint, "k", unchecked) is None
    assert unchecked.buffer == wrong


class Apart(kit.Pieces):
    """Every other 100 bytes."""

    size_bytes = property(lambda self: len(self.view) // 2)  # type: ignore[assignment]

    def _cut(self, start: int, stop: int) -> list[memoryview]:
        found = []
        while start < stop:
            end = min(stop, start - start % 100 + 100)
            at = start // 100 * 200 + start % 100
            found.append(self.view[at : at + end - start])
            start = end
        return found


@kinds
def test_what_lies_between_small_tensors_stays_as_it_was(make: Make) -> None:
    """Small pieces that lie near each other are read with what lies between them, which goes nowhere."""
    small, theirs = content(MIB), bytearray(b"\x77" * 2 * MIB)
    for at in range(0, MIB, 100):
        theirs[2 * at : 2 * at + len(small[at : at + 100])] = small[at : at + 100]
    source, reader = make(), make()
    source.export(Export("k", b"manifest", CHUNK, Apart(theirs), Progress(-(-MIB // CHUNK), complete=True)))
    target = Target(small, CHUNK)
    target.buffer = bytearray(2 * MIB)
    target.stream = Apart(target.buffer)
    assert read_all(reader, source.endpoint, "k", target) is None
    for at in range(0, MIB - 100, 100):
        assert target.buffer[2 * at : 2 * at + 100] == small[at : at + 100]
        assert not any(target.buffer[2 * at + 100 : 2 * at + 200])


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "reader_way"),
    [("tcp-lending-2", "python"), ("local-3", "python")],
    indirect=["kind"],
)
def test_each_way_understands_the_other(kind: kit.Kind, make: Make, reader_way: str) -> None:
    """Half of it is there at first, so both sides also wait."""
    right = content(40 * CHUNK + 777)
    source, progress = make(), Progress(41)
    progress.mark_all(range(20))
    source.export(Export("k", b"manifest", CHUNK, kit.Pieces(right), progress))
    peer = str(Path(__file__).with_name("peer.py"))
    command = [sys.executable, peer, "reader", kind.name, str(len(right)), str(CHUNK), source.endpoint]
    environ = {**os.environ, load.VARIABLE: "yes" if reader_way == "native" else "no"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as reader:
        first = line(reader)
        assert first.startswith("stored")
        assert first.endswith("B") == (reader_way == "native" and load.library() is not None), "what moves the bytes"
        progress.mark_all(range(20, 41))
        assert reader.stdout is not None
        assert reader.stdout.read().splitlines()[-1] == "end None right"
