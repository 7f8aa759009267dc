"""The parts of the native mover: how it is built, found and left out; what it parses; the words that both know."""

import ctypes
import importlib.util
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub.transport.base import Progress, StopFlag
from tensorhub.transport.native import build, load, shapes
from tensorhub.transport.native.reads import Mover

from . import kit
from .kit import DEADLINE_S
from .native import library, needs_mover

C_NAMES = {
    shapes.StopFlag: "stop_flag_t",
    shapes.Marks: "progress_t",
    shapes.Table: "table_t",
    shapes.ReadState: "read_t",
    shapes.StreamState: "stream_t",
    shapes.ServeState: "serve_t",
    shapes.DigestState: "digest_t",
    shapes.Loop: "loop_t",
    shapes.Keep: "keep_t",
    shapes.Batches: "batches_t",
    shapes.OffloadState: "offload_t",
    shapes.Large: "large_t",
}


@pytest.fixture
def as_before() -> Iterator[None]:
    """Whoever looks for the library after this test finds what was there before."""
    yield
    load.forget()


# -- one mover, several threads ----------------------------------------------------------------------------------------


class Slow(list):  # type: ignore[type-arg]
    """Whoever appends is overtaken by the others before it goes on."""

    def __init__(self, threads: int) -> None:
        super().__init__()
        self.all_are_in = threading.Barrier(threads)

    def append(self, each: object) -> None:
        super().append(each)
        self.all_are_in.wait(DEADLINE_S)


def test_streams_that_begin_at_once_have_memory_of_their_own() -> None:
    """Or else one hashes what another one receives, and wrong bytes count."""
    mover = Mover.__new__(Mover)
    mover.state, mover._scratch_bytes, mover._scratch = shapes.ReadState(), 64, Slow(4)
    found: list[int] = []
    threads = [threading.Thread(target=lambda at=at: found.append(mover.stream(0, at).scratch)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(set(found)) == 4
    assert sorted(found) == sorted(ctypes.addressof(each) for each in mover._scratch)


# -- building and finding ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(build.compiler() is None, reason="no C compiler here")
def test_python_knows_the_structures_as_c_does(tmp_path: Path) -> None:
    lines = [
        f'printf("%zu ", offsetof({name}, {field[0]}));' for shape, name in C_NAMES.items() for field in shape._fields_
    ]
    program = tmp_path / "offsets.c"
    program.write_text(f'#include <stdio.h>\n#include "mover.h"\nint main(void) {{ {" ".join(lines)} return 0; }}\n')
    command = build.compiler()
    assert command is not None
    made = tmp_path / "offsets"
    subprocess.run([*command, "-D_GNU_SOURCE", f"-I{build.HERE}", str(program), "-o", str(made)], check=True)
    found = list(map(int, subprocess.run([made], check=True, capture_output=True, text=True).stdout.split()))
    assert found == [getattr(shape, field[0]).offset for shape in C_NAMES for field in shape._fields_]
    assert set(C_NAMES) == set(shapes.ALL)


@pytest.mark.skipif(build.compiler() is None, reason="no C compiler here")
def test_it_builds_without_a_warning_and_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "mover.so")
    assert "was built" in build.make()
    assert build.stamp() == build.fingerprint()
    assert build.make() == "the native mover is there"
    assert [path.name for path in tmp_path.iterdir()] == ["mover.so"]


@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="ziglang is not installed")
def test_the_compiler_that_pip_brings_makes_one_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORHUB_BUILD", "zig")
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "mover.so")
    assert "was built with" in build.make()
    assert load.Library(str(build.LIBRARY)).digest_way


def test_it_wants_nothing_of_a_compilers_own_library() -> None:
    """Of which ziglang has one that cannot be put into a shared library."""
    for path in build.sources():
        assert "__builtin_cpu" not in path.read_text(encoding="utf-8"), path.name


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"TENSORHUB_BUILD": "no"}, "TENSORHUB_BUILD=no"),
        ({"TENSORHUB_BUILD": "cc", "PATH": "/nowhere"}, "no C compiler"),
        ({"TENSORHUB_BUILD": "cc", "CC": "false"}, "cannot build"),
    ],
)
def test_where_it_cannot_be_built_that_is_said_and_no_error(
    variables: dict[str, str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "mover.so")
    monkeypatch.delenv("CC", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    said = build.make()
    assert says in said
    assert [path.name for path in tmp_path.iterdir()] == ["mover.reason"]
    assert build.why_not_made() in said
    load.forget()
    assert load.library() is None
    assert says in load.why_not(), "whoever asks later hears why"
    monkeypatch.undo()
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "mover.so")
    if build.compiler() is not None:
        assert "was built" in build.make()
        assert not build.why_not_made()


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "not built"),
        (b"tensorhub-mover:0123456789abcdef", "other sources"),
        ("current", "cannot be loaded"),
    ],
)
def test_a_library_that_cannot_be_used_is_left_alone(
    content: bytes | str | None, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(load.VARIABLE, raising=False)
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "mover.so")
    if content is not None:
        made_of = content if isinstance(content, bytes) else f"tensorhub-mover:{build.fingerprint()}".encode()
        build.LIBRARY.write_bytes(made_of)
    load.forget()
    assert load.library() is None
    assert says in load.why_not()
    progress = Progress(3)
    assert progress.marks is None
    assert progress.mark(0) == 1


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("word", ["no", "0", "Off", "false"])
def test_a_variable_turns_it_off(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(load.VARIABLE, word)
    load.forget()
    assert load.library() is None
    assert load.why_not() == f"TENSORHUB_NATIVE={word} leaves it out"


def test_the_builder_is_a_command_that_needs_nothing_of_the_package() -> None:
    done = subprocess.run(
        [sys.executable, "-I", str(build.HERE / "build.py")],
        env={"TENSORHUB_BUILD": "no", "PATH": "/nowhere"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "native mover" in done.stdout


# -- what it parses ----------------------------------------------------------------------------------------------------


def decoded(body: bytes, chunk_count: int) -> list[tuple[int, int]] | None:
    """The ranges of a request as the mover reads them."""
    ranges = (ctypes.c_uint64 * (2 * shapes.MAX_RANGES))()
    count = library().decode_want(body, len(body), chunk_count, ctypes.addressof(ranges))
    return None if count < 0 else [(ranges[2 * i], ranges[2 * i + 1]) for i in range(count)]


@needs_mover
@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), max_size=40), st.integers(0, 2**63))
def test_a_request_is_read_as_python_reads_it(ranges: list[tuple[int, int]], chunk_count: int) -> None:
    is_good = all(start < stop <= chunk_count for start, stop in ranges)
    assert decoded(msgspec.msgpack.encode(ranges), chunk_count) == (ranges if is_good else None)


@needs_mover
@pytest.mark.parametrize(("tag", "size"), [(0xD0, 1), (0xD1, 2), (0xD2, 4), (0xD3, 8)])
def test_numbers_with_a_sign_are_read_as_python_reads_them(tag: int, size: int) -> None:
    for start, stop in [(0, 1), (5, 100), (2 ** (8 * size - 1) - 2, 2 ** (8 * size - 1) - 1), (-1, 3), (-7, -1)]:
        numbers = [bytes([tag]) + number.to_bytes(size, "big", signed=True) for number in (start, stop)]
        body = b"\x91\x92" + b"".join(numbers)
        assert msgspec.msgpack.decode(body, type=list[tuple[int, int]]) == [(start, stop)]
        assert decoded(body, 2**63) == ([(start, stop)] if start >= 0 else None)


@needs_mover
def test_as_many_ranges_as_there_may_be_and_no_more() -> None:
    ranges = [(2 * i, 2 * i + 1) for i in range(shapes.MAX_RANGES + 1)]
    assert decoded(msgspec.msgpack.encode(ranges[:-1]), 1 << 20) == ranges[:-1]
    assert decoded(msgspec.msgpack.encode(ranges), 1 << 20) is None


@needs_mover
def test_requests_that_are_none_are_refused_and_nothing_else_happens() -> None:
    """Random bytes, and good requests with some bytes changed, cut off or added; the seed is always the same."""
    chance = random.Random(11)
    for _ in range(20_000):
        body = bytearray(
            msgspec.msgpack.encode([(a, a + 1) for a in chance.sample(range(70_000), chance.randrange(9))])
        )
        match chance.randrange(4):
            case 0:
                body = bytearray(chance.randbytes(chance.randrange(64)))
            case 1:
                for _ in range(1 + chance.randrange(3)):
                    body[chance.randrange(len(body))] = chance.randrange(256)
            case 2:
                del body[chance.randrange(len(body)) :]
            case 3:
                body += chance.randbytes(1 + chance.randrange(5))
        found = decoded(bytes(body), 65_536)
        try:
            right = msgspec.msgpack.decode(bytes(body), type=list[tuple[int, int]])
        except (msgspec.MsgspecError, ValueError):
            right = None
        if found is not None:
            assert found == right, bytes(body)
            assert all(0 <= start < stop <= 65_536 for start, stop in found)


# -- words that both sides know ----------------------------------------------------------------------------------------


@needs_mover
def test_marks_from_many_threads_make_one_prefix() -> None:
    progress = Progress(20_000)
    order = list(range(20_000))
    random.Random(5).shuffle(order)

    def mark(some: list[int]) -> None:
        for chunk in some:
            progress.mark(chunk)

    threads = [threading.Thread(target=mark, args=(order[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert progress.is_complete
    assert progress.prefix == 20_000


def test_a_waiter_is_woken_by_each_that_may_end_its_wait() -> None:
    for act in (lambda p: p.mark(1), lambda p: p.fail("no more"), lambda p: p.wake()):
        progress, given_up, found = Progress(2), threading.Event(), list[bool]()
        waiter = threading.Thread(
            target=lambda p=progress, g=given_up, f=found: f.append(p.wait(1, kit.DEADLINE_S, g.is_set))
        )
        waiter.start()
        given_up.set()
        act(progress)
        waiter.join(kit.DEADLINE_S)
        assert found == [progress.has(1)]


def test_chunks_that_are_not_there_cannot_be_marked() -> None:
    progress = Progress(2)
    with pytest.raises(IndexError):
        progress.mark(2)
    assert not progress.has(0)
    assert not progress.has(1)
    assert Progress(0).is_complete


def test_a_stop_flag_is_set_once_and_for_good() -> None:
    flag = StopFlag()
    assert not flag.is_set
    flag.set()
    flag.set()
    assert flag.is_set


@needs_mover
def test_setting_a_stop_flag_waits_for_whoever_is_counting() -> None:
    flag, is_over = StopFlag(), threading.Event()
    flag.state.inside = 1
    shutting = threading.Thread(target=lambda: (flag.set(), is_over.set()))
    shutting.start()
    kit.until(lambda: flag.is_set, "the flag is set")
    assert not is_over.is_set()
    flag.state.inside = 0
    assert is_over.wait(kit.DEADLINE_S)
    shutting.join()
