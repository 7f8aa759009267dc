"""Work in a few threads: all of it is done, in order, whatever becomes of a thread or of an item."""

import threading

import pytest

from tensorhub.memory.parallel import in_parallel
from tensorhub.transport.threads import NotStarted, Thread

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
