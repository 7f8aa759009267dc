"""Which calls a worker makes, how it makes them, and what it refuses at once."""

import pytest
from msgspec.structs import replace

from tensorhub.protocol.messages import (
    Answer,
    Empty,
    Failure,
    Filling,
    Hello,
    Holding,
    HostCopy,
    LayoutInfo,
    Poisoned,
    Refusal,
    Step,
    Vacated,
    Withdrawing,
)
from tensorhub.protocol.names import Digest, Number, Ticket, Version
from tensorhub.worker import events
from tensorhub.worker.events import Called
from tensorhub.worker.machine import Worker

from .kit import LAYOUT, Conversation, across, grant, hello, orders, worker

# --- how a worker's call goes on and ends: what ends with it, what goes on, and what is called again ---

ONE = Version(1)
ROOT = Digest("r")


@pytest.mark.parametrize(("retry_s", "errors"), [(0.0, ["refused"]), (1.0, [])])
def test_a_call_ends_with_a_refusal_for_good_and_waits_for_a_server_that_may_take_it_later(
    retry_s: float, errors: list[str]
) -> None:
    it = Conversation.begun()
    it.tell(events.Called("update", "latest", 60.0))
    it.tell(events.Received(Refusal("refused", "no", retry_s=retry_s)))
    assert it.errors == errors


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Vacated(ONE, ROOT, True, Number(8)), Empty()),
        (Vacated(ONE, ROOT, False, Number(8)), Poisoned()),
        (Withdrawing(ONE, ROOT, True, Number(8)), Poisoned(ONE)),  # it may have readers
    ],
    ids=repr,
)
def test_what_is_not_its_version_is_given_up(before: Vacated | Withdrawing, after: object) -> None:
    """Whoever published has its tensors as they are; whoever replicated has bytes that are nothing."""
    it = Conversation.begun()
    it.worker.state.memory.buffer = before
    it.worker.state.memory.serving = ONE if isinstance(before, Withdrawing) else None
    it.tell(events.Received(orders(2, superseded=Number(7))))
    assert it.worker.buffer == before
    it.tell(events.Received(orders(3, superseded=Number(8))))
    assert it.worker.buffer == after


def test_what_was_disowned_with_nobody_reading_leaves_no_trace_in_the_next_fill() -> None:
    it = Conversation.begun()
    it.worker.state.memory.buffer = Vacated(ONE, ROOT, True, Number(8))
    it.tell(events.Received(orders(2, superseded=Number(8))), events.Called("replicate", 3, 60.0))
    it.tell(events.Received(orders(4, grant=grant(4, version=3), answer=it.resolved(3))))
    it.tell(events.ReadAdvanced(Ticket(4), 1, 4), events.Cancelled(), events.ReadEnded(Ticket(4)))
    drained = orders(5, drained=Version(3))
    it.tell(events.Received(replace(drained, acknowledged=it.worker.reported)), events.ServingStopped(Version(3)))
    assert it.worker.buffer == Poisoned()  # spoiled by the fill: it may not be published
    it.tell(events.Registered(LayoutInfo(LAYOUT), Digest("l"), 16))
    assert it.worker.buffer == Empty()


def test_a_server_that_says_finished_too_early_leaves_no_fill_behind() -> None:
    it = Conversation.begun()
    it.tell(events.Called("replicate", 1, 60.0))
    it.tell(events.Received(orders(3, grant=grant(2), answer=it.resolved(1))), events.ReadAdvanced(Ticket(2), 1, 4))
    it.tell(events.Received(orders(4, grant=grant(2), answer=replace(it.resolved(1), finished=True))))
    assert isinstance(it.worker.buffer, Poisoned)
    assert it.wants(events.StopRead(Ticket(2)))


def published() -> Conversation:
    """It has published version 1, and its caller has heard so."""
    it = Conversation.begun(max_copies=1)
    it.tell(events.Called("publish", 1, 60.0, root=ROOT))
    it.tell(events.Received(orders(2, answer=it.resolved(1))))
    it.tell(events.Received(orders(3, answer=replace(it.resolved(1), finished=True))))
    assert it.worker.buffer == Holding(ONE, ROOT, published=True)
    assert it.worker.call is None
    return it


def test_nothing_is_withdrawn_before_what_the_call_claims_is_granted() -> None:
    it = published()
    it.tell(events.Called("unpublish", "", 60.0, claim=Version(2)))
    assert not it.worker.is_withdrawing
    assert it.worker.buffer == Holding(ONE, ROOT, published=True)
    it.tell(events.Received(orders(4, answer=it.resolved(2))))
    assert it.worker.is_withdrawing
    assert it.worker.buffer == Withdrawing(ONE, ROOT, published=True)


def test_what_is_read_across_into_host_memory_becomes_a_copy_though_the_buffer_is_vacated() -> None:
    it = published()
    ahead = across(4, version=2, to_host=True)
    it.tell(events.Received(orders(6, fetch=Version(2), grant=ahead)))
    assert it.wants(events.OpenRead(ahead))
    it.tell(events.Called("unpublish", "", 60.0))
    drained = orders(7, fetch=Version(2), grant=ahead, drained=ONE)
    it.tell(events.Received(replace(drained, acknowledged=it.worker.reported)), events.ServingStopped(ONE))
    assert it.worker.buffer == Vacated(ONE, ROOT, True)
    it.tell(events.ReadOpened(Ticket(4), ROOT))
    assert it.wants(events.StartRead(ahead))
    it.tell(events.ReadAdvanced(Ticket(4), 2, 2), events.ReadEnded(Ticket(4), complete=True))
    assert it.worker.buffer == Vacated(ONE, ROOT, True)
    copy = it.worker.state.copies.whole(Version(2))
    assert copy is not None
    assert copy.root == ROOT


def fetching_ahead_and_filling() -> Conversation:
    """It reads version 2 into host memory while a call waits for a source to fill the buffer with 1."""
    it = Conversation.begun(max_copies=2)
    it.tell(events.Called("replicate", 1, 60.0))
    ahead = replace(grant(2, version=2), to_host=True)
    it.tell(events.Received(orders(3, fetch=Version(2), grant=ahead, answer=it.resolved(1))))
    assert it.wants(events.StartRead(ahead))
    assert it.worker.buffer == Filling(ONE)
    return it


def test_what_is_fetched_ahead_goes_on_when_a_call_fails() -> None:
    it = fetching_ahead_and_filling()
    it.tell(events.Cancelled())
    assert isinstance(it.worker.buffer, Poisoned)
    assert not it.wants(events.StopRead(grant(2).ticket))


def test_what_is_granted_before_the_buffer_is_free_is_read_as_soon_as_it_is() -> None:
    it = Conversation.begun()
    it.tell(events.Called("replicate", 1, 60.0))
    it.tell(events.Received(orders(3, grant=grant(2), answer=it.resolved(1))), events.Cancelled())
    it.tell(events.ReadEnded(grant(2).ticket), events.Called("replicate", 1, 60.0))
    assert it.worker.buffer == Poisoned(ONE)  # others may be reading behind what had come into it
    told = it.worker.reported
    both = orders(5, grant=grant(4), answer=it.resolved(1), drained=ONE)
    it.tell(events.Received(replace(both, acknowledged=told)))
    assert it.wants(events.StopServing(ONE))
    assert not it.wants(events.StartRead(grant(4)))
    it.tell(events.ServingStopped(ONE))
    assert it.wants(events.StartRead(grant(4)))
    assert it.worker.state.seen == Number(5)


def test_a_call_at_a_position_that_was_over_goes_on_at_another() -> None:
    it = Conversation.begun()
    it.tell(events.Called("update", "latest", 60.0))
    over = Failure("group-incomplete", "its siblings are past that")
    it.tell(events.Received(orders(2, answer=Answer(1, error=over, instead=4))))
    assert it.errors == []
    assert it.worker.call is not None
    assert it.worker.call.number == 4
    it.tell(events.Received(orders(3, answer=Answer(1, error=over, instead=5))))  # about a call of the past
    assert it.worker.call.number == 4
    it.tell(events.Cancelled(), events.Called("update", "latest", 60.0))
    assert it.worker.call.number == 5


def test_a_worker_counts_its_own_calls_and_only_the_first_from_where_it_is_told() -> None:
    it = Conversation.begun()
    it.worker.state.position = 7
    it.tell(events.Called("update", "latest", 60.0), events.Cancelled())
    it.worker.state.position = 20
    it.tell(events.Called("update", "latest", 60.0))
    assert it.worker.call is not None
    assert it.worker.call.number == 9


def updating(spec: int | str = "latest") -> Conversation:
    """It holds version 1, and was told with the first answer to an update where 2 is read, and that 1 is drained."""
    it = Conversation.begun()
    it.tell(events.Called("publish", 1, 60.0, ROOT))
    it.tell(events.Received(orders(2, answer=it.resolved(1))))
    it.tell(events.Received(orders(3, answer=replace(it.resolved(1), finished=True))))
    it.tell(events.Called("update", spec, 60.0))
    assert it.worker.buffer == Withdrawing(ONE, ROOT, published=True)
    assert not it.worker.is_withdrawing  # that is of an unpublish
    told = orders(4, grant=grant(4, version=2), answer=it.resolved(2), drained=ONE)
    it.tell(events.Received(replace(told, acknowledged=it.worker.reported)))
    assert it.wants(events.OpenRead(grant(4, version=2)))
    assert not it.wants(events.StopServing(ONE))
    return it


def test_what_is_drained_with_the_call_is_served_until_the_new_version_is_opened() -> None:
    it = updating()
    it.tell(events.ReadOpened(Ticket(4)))
    assert it.wants(events.StopServing(ONE))
    it.tell(events.ServingStopped(ONE))
    assert it.wants(events.StartRead(grant(4, version=2)))


def test_what_is_drained_with_the_call_is_held_on_if_no_source_answers() -> None:
    it = updating()
    it.now = 31.0  # half of the time is over
    it.tell(events.Tick())
    assert it.worker.buffer == Holding(ONE, ROOT, published=True)
    it.tell(events.ReadOpened(Ticket(4)))
    assert not it.wants(events.StopServing(ONE))  # it was drained for the withdrawal before


@pytest.mark.parametrize(("spec", "keeps"), [("latest", True), (2, False)])
def test_an_update_that_a_sibling_has_ended_alone_gives_its_source_up(spec: int | str, keeps: bool) -> None:
    it = updating(spec)
    call = it.worker.call
    assert call is not None
    past = Answer(call.number or 0, past=Step(alone=call.number or 0))
    it.tell(events.Received(replace(orders(5, answer=past), acknowledged=it.worker.reported)))
    assert it.wants(events.StopRead(Ticket(4)))
    assert it.worker.buffer == Holding(ONE, ROOT, published=True)
    assert it.errors == ([] if keeps else ["group-incomplete"])


def test_a_server_that_may_have_restarted_has_drained_nothing() -> None:
    it = updating()
    it.tell(events.Disconnected(), events.Connected(), events.ReadOpened(Ticket(4)))
    assert it.worker.buffer == Withdrawing(ONE, ROOT, published=True)
    assert not it.wants(events.StopServing(ONE))


# --- what a caller may not do, said before anything is changed; and what an update to "prefetched" comes to at once ---


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


def test_a_call_that_cannot_be_made_now_is_refused_at_once() -> None:
    assert code(Worker(worker("rollout")).why_not_begin(publishes(1))) == "usage", "tensors come first"
    for told, expected in (
        (events.Closing(60.0), "closed"),
        (Called("update", "latest", 60.0), "usage"),  # one call at a time
        (events.Received(Refusal("refused", "no")), "refused"),
        (events.Received(Refusal("refused", "no", retry_s=1.0)), None),
    ):
        it = somebody()
        it.handle(told, now=0.0)
        assert code(it.why_not_begin(publishes(1))) == expected


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


def test_who_fetches_nothing_ahead_would_wait_for_ever() -> None:
    it = holder(wishes=False)
    failure = it.update_at_once(rollout(), PREFETCHED)
    assert isinstance(failure, Failure)
    assert failure.code == "usage"
    always = Hello(**{**{name: getattr(rollout(), name) for name in Hello.__struct_fields__}, "prefetch": "always"})
    assert it.update_at_once(always, PREFETCHED) == 2


def test_an_update_that_keeps_what_is_held_says_why_once() -> None:
    it = published()
    kept = Failure("version-unavailable", "rollout keeps version 1", "try again")
    for number in (2, 3):
        it.tell(Called("update", "latest", 60.0), events.Received(orders(2 * number)))
        answer = Answer(number, ONE, finished=True, waiting=kept)
        it.tell(events.Received(orders(2 * number + 1, answer=answer)))
        assert it.wants(events.Finished(number, version=ONE))
    said = [each for each in it.wanted if isinstance(each, events.Warn)]
    assert said == [events.Warn("rollout keeps version 1 (try again)")]
    assert it.worker.buffer == Holding(ONE, ROOT, published=True)
