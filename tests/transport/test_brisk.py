"""Transfers begin with short waits for the interpreter, and leave the program's own interval as it was."""

import os
import sys
import threading
from collections.abc import Iterator, Sequence

import pytest

from tensorhub.protocol.errors import SourceLost
from tensorhub.transport.base import Export, Progress
from tensorhub.transport.threads import SHORT_S, ShortSwitchInterval

from . import kit
from .conftest import Make
from .kit import DEADLINE_S, Target, content, start_read

CHUNK = 1 << 16
USUAL_S = 0.02  # nobody's default


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(USUAL_S)
    yield
    sys.setswitchinterval(before)


def is_brisk() -> bool:
    return sys.getswitchinterval() == pytest.approx(SHORT_S)


def is_usual() -> bool:
    return sys.getswitchinterval() == pytest.approx(USUAL_S)


def test_from_beginning_to_end_but_for_a_pause() -> None:
    with ShortSwitchInterval() as interval:
        assert is_brisk()
        interval.restore()
        interval.restore()
        assert is_usual()
        interval.shorten()
        interval.shorten()
        assert is_brisk()
    assert is_usual()
    interval.restore()
    assert is_usual()


def test_until_the_last_of_many_threads_has_left() -> None:
    with ShortSwitchInterval():
        barrier = threading.Barrier(8)

        def begin_and_end() -> None:
            with ShortSwitchInterval():
                barrier.wait(10)

        threads = [threading.Thread(target=begin_and_end) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert is_brisk()
    assert is_usual()


def test_an_interval_that_is_shorter_stays() -> None:
    sys.setswitchinterval(0.00005)
    with ShortSwitchInterval():
        assert sys.getswitchinterval() == pytest.approx(0.00005)
    assert sys.getswitchinterval() == pytest.approx(0.00005)


def test_what_the_program_sets_meanwhile_stays() -> None:
    with ShortSwitchInterval():
        sys.setswitchinterval(0.5)
    assert sys.getswitchinterval() == pytest.approx(0.5)


def test_what_the_program_kept_meanwhile_and_put_back_does_not_stay() -> None:
    with ShortSwitchInterval():
        kept = sys.getswitchinterval()
        sys.setswitchinterval(0.5)
    sys.setswitchinterval(kept)
    with ShortSwitchInterval():
        assert is_brisk()
    assert is_usual()


def test_a_child_that_was_forked_in_a_block_leaves_it() -> None:
    child = None
    with ShortSwitchInterval():
        child = os.fork()
    if child == 0:
        with ShortSwitchInterval():
            is_right = is_brisk()
        os._exit(0 if is_right and is_usual() else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert is_usual()


def test_a_forked_child_has_the_usual_one() -> None:
    with ShortSwitchInterval():
        child = os.fork()
        if child == 0:
            is_right = is_usual()
            with ShortSwitchInterval():
                is_right = is_right and is_brisk()
            os._exit(0 if is_right and is_usual() else 1)
        _, status = os.waitpid(child, 0)
        assert is_brisk()
    assert os.waitstatus_to_exitcode(status) == 0
    assert is_usual()


class Looking(Target):
    """Notes whether it is asked briskly what it wants."""

    began_brisk = False

    def begin(self, manifest: bytes) -> Sequence[int]:
        self.began_brisk = is_brisk()
        return super().begin(manifest)


@pytest.mark.usefixtures("mover")
@pytest.mark.parametrize("kind", ["tcp-1", "tcp-3", "local-1", "local-3"], indirect=True)
def test_a_read_begins_briskly_and_goes_on_as_usual(make: Make) -> None:
    right, source, reader = content(8 * CHUNK), make(), make()
    progress, target = Progress(8), Looking(right, CHUNK)
    source.export(Export("k", b"manifest", CHUNK, kit.Pieces(right), progress))
    _, ended = start_read(reader, source.endpoint, "k", target)
    progress.mark(0)
    assert target.progress.wait(0, DEADLINE_S)
    assert target.began_brisk
    kit.until(is_usual, "the interval is the usual one while the read waits for its second chunk")
    for chunk in range(1, 8):
        progress.mark(chunk)
    assert ended.wait() is None
    assert target.buffer == right
    kit.until(is_usual, "the interval is the usual one when the read has ended")


@pytest.mark.parametrize("kind", ["tcp-1", "local-1"], indirect=True)
def test_a_read_that_is_refused_leaves_the_usual_interval(make: Make) -> None:
    source, reader = make(), make()
    _, ended = start_read(reader, source.endpoint, "nobody's", Looking(content(CHUNK), CHUNK))
    assert isinstance(ended.wait(), SourceLost)
    kit.until(is_usual, "the interval is the usual one after the refusal")
