"""What a caller may not do, said before anything is changed; and what an update to "prefetched" comes to at once."""

import pytest
from msgspec.structs import replace

from tensorhub.protocol.messages import (
    Answer,
    Empty,
    Failure,
    Hello,
    Holding,
    HostCopy,
    LayoutInfo,
    Poisoned,
    Refusal,
    Vacated,
    Withdrawing,
)
from tensorhub.protocol.names import Digest, Version
from tensorhub.worker import events
from tensorhub.worker.events import Called
from tensorhub.worker.machine import Worker

from .kit import LAYOUT, hello, worker

ROOT = Digest("r")
ONE = Version(1)


def somebody(buffer: object = None) -> Worker:
    """A worker with registered tensors."""
    found = Worker(worker("rollout"))
    found.handle(events.Registered(LayoutInfo.of(LAYOUT), LAYOUT.digest(), 16, 1), now=0.0)
    if buffer is not None:
        found.state.memory.buffer = buffer  # type: ignore[assignment]
    return found


def publishes(version: int | str, root: Digest = ROOT) -> Called:
    return Called("publish", version, 60.0, root)


def code(failure: Failure | None) -> str | None:
    return failure.code if failure is not None else None


# --- any call ---------------------------------------------------------------------------------------------------------


def test_a_worker_that_was_closed_takes_no_call() -> None:
    it = somebody()
    it.handle(events.Closing(60.0), now=0.0)
    assert code(it.why_not_begin(publishes(1))) == "closed"


def test_one_call_at_a_time() -> None:
    it = somebody()
    it.handle(Called("update", "latest", 60.0), now=0.0)
    assert code(it.why_not_begin(Called("update", "latest", 60.0))) == "usage"


@pytest.mark.parametrize(("retry_s", "expected"), [(0.0, "refused"), (1.0, None)])
def test_who_was_refused_for_good_calls_in_vain(retry_s: float, expected: str | None) -> None:
    it = somebody()
    it.handle(events.Received(Refusal("refused", "no", retry_s=retry_s)), now=0.0)
    assert code(it.why_not_begin(publishes(1))) == expected


def test_tensors_come_first() -> None:
    assert code(Worker(worker("rollout")).why_not_begin(publishes(1))) == "usage"


@pytest.mark.parametrize(
    "called",
    [
        Called("destroy", "", 60.0),
        Called("update", "newest", 60.0),
        Called("replicate", "prefetched", 60.0),
        Called("replicate", -1, 60.0),
        publishes("latest"),
        publishes("1"),
        publishes(-1),
    ],
    ids=str,
)
def test_what_names_nothing_is_a_mistake(called: Called) -> None:
    assert code(somebody().why_not_begin(called)) == "usage"


# --- publish ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("buffer", "expected"),
    [
        (Empty(), None),
        (Holding(ONE, ROOT, published=True), None),  # again, with the same content
        (Holding(ONE, Digest("other"), published=True), "version-conflict"),
        (Holding(Version(2), ROOT), "not-drained"),
        (Holding(Version(0), Digest("other")), "not-drained"),
        (Withdrawing(ONE, ROOT), "not-drained"),
        (Vacated(ONE, ROOT), "not-drained"),
        (Poisoned(), "usage"),
        (Poisoned(ONE), "usage"),
    ],
    ids=repr,
)
def test_what_the_buffer_is_decides_whether_1_may_be_published(buffer: object, expected: str | None) -> None:
    assert code(somebody(buffer).why_not_begin(publishes(1))) == expected


# --- update("prefetched") ---------------------------------------------------------------------------------------------


PREFETCHED = Called("update", "prefetched", 60.0)


def holder(*copies: HostCopy, wishes: bool = True) -> Worker:
    it = somebody(Holding(Version(2), ROOT))
    mine = it.state.copies
    mine.by_version = {copy.version: replace(copy, layout=mine.layout) for copy in copies}
    mine.prefetch = "latest" if wishes else None
    return it


def rollout(**more: object) -> Hello:
    return hello(worker("rollout"), **more)  # type: ignore[arg-type]


def test_where_nothing_newer_is_here_what_is_held_is_kept_at_once() -> None:
    assert holder().update_at_once(rollout(), PREFETCHED) == 2


def test_other_calls_are_the_servers_business() -> None:
    for called in (Called("update", "latest", 60.0), Called("replicate", "latest", 60.0)):
        assert holder().update_at_once(rollout(), called) is None


@pytest.mark.parametrize(
    ("copy", "expected"),
    [
        (HostCopy(1, Version(3), ROOT, whole=True), None),  # newer, and whole: the server resolves it
        (HostCopy(1, Version(3), ROOT, done=1, chunks=2), 2),
        (HostCopy(1, Version(2), ROOT, whole=True), 2),
        (HostCopy(1, Version(1), ROOT, whole=True), 2),
    ],
)
def test_only_a_whole_and_newer_copy_needs_the_server(copy: HostCopy, expected: int | None) -> None:
    assert holder(copy).update_at_once(rollout(), PREFETCHED) == expected


def test_who_holds_nothing_asks_the_server() -> None:
    it = holder()
    it.state.memory.buffer = Empty()
    assert it.update_at_once(rollout(), PREFETCHED) is None


def test_several_shards_ask_the_server() -> None:
    assert holder().update_at_once(rollout(shards=2), PREFETCHED) is None


def test_who_fetches_nothing_ahead_would_wait_for_ever() -> None:
    it = holder(wishes=False)
    failure = it.update_at_once(rollout(), PREFETCHED)
    assert isinstance(failure, Failure)
    assert failure.code == "usage"
    always = Hello(**{**{name: getattr(rollout(), name) for name in Hello.__struct_fields__}, "prefetch": "always"})
    assert it.update_at_once(always, PREFETCHED) == 2


def test_a_mistake_is_a_mistake_at_once_too() -> None:
    it = holder()
    it.handle(events.Closing(60.0), now=0.0)
    failure = it.update_at_once(rollout(), PREFETCHED)
    assert isinstance(failure, Failure)
    assert failure.code == "closed"


# --- how long a call is patient ---------------------------------------------------------------------------------------


def test_readers_have_half_of_the_time() -> None:
    it = somebody(Holding(ONE, ROOT, published=True))
    it.handle(Called("unpublish", "", 30.0), now=10.0)
    assert it.call is not None
    assert it.call.impatient_at == 20.0


def test_what_a_call_is_resolved_to_is_news_once() -> None:
    it = somebody()
    it.handle(Called("update", "latest", 60.0), now=0.0)
    call = it.call
    assert call is not None
    call.number = 4
    assert not call.take(None)
    assert not call.take(Answer(3, ONE))  # of another call
    assert not call.take(Answer(4))
    assert call.take(Answer(4, ONE))
    assert not call.take(Answer(4, Version(2)))
    assert call.resolved == ONE
