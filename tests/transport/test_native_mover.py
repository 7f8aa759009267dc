"""Reads that the native mover does: without the interpreter, and yet in the hand of those who may end them."""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tensorhub.protocol.errors import CorruptTransfer, SessionLost, SourceLost
from tensorhub.transport.base import Export, Progress, Terms, Until
from tensorhub.transport.native.reads import TELL_EVERY_S

from . import kit
from .conftest import Make, Spawn, line
from .kit import DEADLINE_S, MIB, Target, content, full, read_all, start_read
from .native import needs_mover

pytestmark = needs_mover

CHUNK = 64 * 1024
NEVER_S = 1000.0  # no other thread gets the interpreter before that


@pytest.fixture(params=["tcp-1", "tcp-3", "tcp-lending-2", "local-1", "local-3", "local-mapped-3"])
def kind(request: pytest.FixtureRequest) -> kit.Kind:
    found = kit.KINDS[request.param]
    if why_not := found.why_not():
        pytest.skip(why_not)
    return found


class Leased(Target):
    """A sink under a lease, which remembers when it was told."""

    def __init__(self, right: bytearray, chunk_bytes: int) -> None:
        super().__init__(right, chunk_bytes)
        self.until = Until(time.monotonic() + 1000)
        self.told_at: list[float] = []

    def terms(self) -> Terms | None:
        super().terms()
        return Terms(b"".join(self.digests), self.progress, (self.stop_flag,), self.until)

    def told(self, size_bytes: int) -> None:
        super().told(size_bytes)
        self.told_at.append(time.monotonic())

    def check(self) -> None:
        super().check()
        if time.monotonic() >= self.until.value:
            raise SessionLost("the lease has ended")


@pytest.fixture
def no_switching() -> Iterator[None]:
    """Who has the interpreter keeps it until it waits."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(NEVER_S)
    yield
    sys.setswitchinterval(before)


@pytest.mark.processes
@pytest.mark.usefixtures("no_switching")
def test_bytes_come_while_the_interpreter_is_never_let_go(make: Make, spawn: Spawn) -> None:
    """The main thread holds it from the first chunk to the last: it sleeps in a call that does not let go of it."""
    count = 64
    source = spawn("source", count * CHUNK, CHUNK, 8)
    endpoint, reader = line(source), make(60.0)
    right = content(count * CHUNK)
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
    assert target.told_bytes == 8 * CHUNK, "nobody had the interpreter meanwhile"
    assert target.progress.prefix == count
    assert ended.wait() is None
    assert target.buffer == right
    assert target.told_bytes == count * CHUNK


def waiting(make: Make, target: Target, right: bytearray) -> tuple[Progress, kit.Ended]:
    """A read that has its first chunk and waits for the second."""
    source, reader = make(60.0), make(60.0)
    progress = Progress(len(right) // CHUNK)
    source.export(Export("k", b"manifest", CHUNK, kit.Pieces(right), progress))
    _, ended = start_read(reader, source.endpoint, "k", target)
    progress.mark(0)
    assert target.progress.wait(0, DEADLINE_S)
    return progress, ended


def test_after_the_end_of_the_lease_nothing_counts(make: Make) -> None:
    right = content(4 * CHUNK)
    target = Leased(right, CHUNK)
    progress, ended = waiting(make, target, right)
    target.until.value = time.monotonic()
    progress.mark(1)
    error = ended.wait()
    assert isinstance(error, SessionLost)
    assert "lease" in str(error)
    assert target.order == [0]
    assert not any(target.buffer[2 * CHUNK :])


def test_a_set_stop_flag_lets_nothing_count(make: Make) -> None:
    right = content(4 * CHUNK)
    target = Leased(right, CHUNK)
    progress, ended = waiting(make, target, right)
    target.stop_flag.set()
    before = bytes(target.progress._have)
    progress.mark(1)
    error = ended.wait()
    assert isinstance(error, SessionLost)
    assert "stop flag" in str(error)
    assert bytes(target.progress._have) == before == b"\1\0\0\0"


def test_news_are_told_now_and_then_and_at_the_end(make: Make) -> None:
    right = content(300 * CHUNK)
    target = Leased(right, CHUNK)
    progress, ended = waiting(make, target, right)
    began = time.monotonic()
    for chunk in range(1, 300):
        progress.mark(chunk)
        assert target.progress.wait(chunk, DEADLINE_S)
    assert ended.wait() is None
    took = time.monotonic() - began
    assert target.told_bytes == 300 * CHUNK
    assert len(target.told_at) <= 3 + took / TELL_EVERY_S


def test_a_wrong_chunk_is_named_by_the_sink_and_does_not_count(make: Make) -> None:
    right = content(8 * CHUNK)
    wrong = bytearray(right)
    wrong[5 * CHUNK + 77] ^= 4
    source, reader = make(), make()
    source.export(full("k", wrong, CHUNK))
    target = Target(right, CHUNK)
    error = read_all(reader, source.endpoint, "k", target)
    assert isinstance(error, CorruptTransfer)
    assert "chunk 5" in str(error)
    assert 5 not in target.order
    assert target.told_bytes == len(target.order) * CHUNK


def test_without_digests_everything_counts(make: Make) -> None:
    class Unchecked(Target):
        is_checking = False

        def terms(self) -> Terms | None:
            super().terms()
            return Terms(None, self.progress, ())

    right = content(8 * CHUNK + 5)
    source, reader = make(), make()
    source.export(full("k", right, CHUNK))
    target = Unchecked(bytearray(len(right)), CHUNK)
    assert read_all(reader, source.endpoint, "k", target) is None
    assert target.buffer == right


def test_terms_that_do_not_fit_are_not_taken(make: Make) -> None:
    """Too few digests, or marks for another number of chunks: then Python brings the bytes, and the sink judges."""

    class Odd(Target):
        made: Callable[["Odd"], Terms]

        def terms(self) -> Terms | None:
            return type(self).made(self)

    right = content(8 * CHUNK)
    source, reader = make(), make()
    source.export(full("k", right, CHUNK))
    for made in (
        lambda odd: Terms(b"".join(odd.digests[1:]), odd.progress, ()),
        lambda odd: Terms(b"".join(odd.digests), Progress(7), ()),
        lambda odd: Terms(b"".join(odd.digests), odd.progress, (odd.stop_flag,) * 5),
    ):
        Odd.made = made
        target = Odd(right, CHUNK)
        assert read_all(reader, source.endpoint, "k", target) is None
        assert sorted(target.order) == list(range(8))


def test_what_lies_between_small_tensors_stays_as_it_was(make: Make) -> None:
    """Small pieces that lie near each other are read with what lies between them, which goes nowhere."""

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

    right = content(2 * MIB)
    theirs = bytearray(len(right))
    stream = Apart(theirs)
    for at in range(0, len(right) // 2, 100):
        theirs[2 * at : 2 * at + 100] = right[at : at + 100]
        theirs[2 * at + 100 : 2 * at + 200] = b"\x77" * min(100, len(theirs) - 2 * at - 100)
    small = right[: len(right) // 2]
    source, reader = make(), make()
    count = -(-len(small) // CHUNK)
    source.export(Export("k", b"manifest", CHUNK, stream, Progress(count, complete=True)))
    target = Target(small, CHUNK)
    target.buffer = bytearray(len(right))
    target.stream = Apart(target.buffer)
    assert read_all(reader, source.endpoint, "k", target) is None
    for at in range(0, len(small) - 100, 100):
        assert target.buffer[2 * at : 2 * at + 100] == small[at : at + 100]
        assert not any(target.buffer[2 * at + 100 : 2 * at + 200])


def test_a_sink_that_fails_to_be_told_ends_the_read(make: Make) -> None:
    class Deaf(Target):
        def told(self, size_bytes: int) -> None:
            raise RuntimeError("a bug of the sink's")

    right = content(64 * CHUNK)
    source, reader = make(), make()
    progress = Progress(64)
    source.export(Export("k", b"manifest", CHUNK, kit.Pieces(right), progress))
    progress.mark(0)
    error = read_all(reader, source.endpoint, "k", Deaf(right, CHUNK))
    assert error is not None
    assert "a bug of the sink's" in str(error)


def test_withdrawn_and_written_over_again_and_again(make: Make) -> None:
    """Whatever counts is right, though its owner writes over it as soon as it may."""
    right = content(32 * CHUNK)
    source, reader = make(), make()
    for trial in range(int(os.environ.get("WITHDRAW_ROUNDS", "60"))):
        memory = bytearray(right)
        source.export(full("k", memory, CHUNK))
        target = Target(right, CHUNK)
        _, ended = start_read(reader, source.endpoint, "k", target)
        assert target.progress.wait(trial % 4, DEADLINE_S)
        assert source.withdraw("k", timeout_s=DEADLINE_S)
        memory[:] = b"\xee" * len(memory)
        error = ended.wait()
        assert error is None or isinstance(error, SourceLost), error
        for chunk in target.order:
            assert target.buffer[chunk * CHUNK : (chunk + 1) * CHUNK] == right[chunk * CHUNK : (chunk + 1) * CHUNK]


def test_stopped_at_any_moment_nothing_is_written_later(make: Make) -> None:
    right = content(256 * CHUNK)
    source, reader = make(), make()
    source.export(full("k", right, CHUNK))
    for trial in range(10):
        target = Target(right, CHUNK)
        read, ended = start_read(reader, source.endpoint, "k", target)
        assert target.progress.wait(trial * 5, DEADLINE_S)
        read.stop()
        assert ended.wait() is None
        found = bytes(target.buffer)
        assert threading.active_count() < 100
        assert target.buffer == found
        assert target.stream.inside == 0
