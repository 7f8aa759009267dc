"""Threads of ours: who starts one does not wait for ever for one that never runs."""

import threading

import pytest

from tensorhub.protocol.errors import Unavailable
from tensorhub.transport import threads
from tensorhub.transport.threads import Thread, start

from .kit import DEADLINE_S


def test_a_thread_that_dies_before_its_first_step_is_an_error_of_whoever_starts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "START_S", 0.05)
    monkeypatch.setattr(Thread, "_bootstrap", lambda self: None)  # as one for which there is no memory
    ran: list[None] = []
    thread = Thread(lambda: ran.append(None), name="tensorhub-test")
    with pytest.raises(Unavailable, match="tensorhub-test needs a thread") as caught:
        start(thread)
    threading._limbo.pop(thread)  # type: ignore[attr-defined]  # where Python leaves it
    assert "memory" in str(caught.value.hint)
    assert not ran


def test_a_thread_that_was_given_up_does_nothing_when_it_comes_after_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "START_S", 0.05)
    late, may_go = Thread._bootstrap, threading.Event()  # type: ignore[attr-defined]

    def bootstrap(self: Thread) -> None:
        may_go.wait(DEADLINE_S)
        late(self)

    monkeypatch.setattr(Thread, "_bootstrap", bootstrap)
    ran: list[None] = []
    thread = Thread(lambda: ran.append(None), name="tensorhub-test")
    with pytest.raises(Unavailable):
        start(thread)
    may_go.set()
    assert thread._started.is_set() or threading.Event.wait(thread._started, DEADLINE_S)
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert not ran


def test_a_thread_that_runs_is_joined_like_any_other() -> None:
    ran: list[str] = []
    thread = Thread(ran.append, name="tensorhub-test", args=("it",))
    start(thread)
    thread.join(DEADLINE_S)
    assert ran == ["it"]
    assert thread.daemon
