"""How a worker's call goes on and ends: what ends with it, what goes on, and what is called again."""

import pytest
from msgspec.structs import replace

from tensorhub.protocol.messages import (
    Answer,
    Empty,
    Failure,
    Filling,
    Holding,
    LayoutInfo,
    Poisoned,
    Refusal,
    Report,
    Vacated,
    Withdrawing,
)
from tensorhub.protocol.names import Digest, Number, Ticket, Version
from tensorhub.worker import events
from tensorhub.worker.events import AcrossOpened, OpenAcross, StartAcross
from tensorhub.worker.state import Call

from .kit import LAYOUT, Conversation, grant, orders

ONE = Version(1)
ROOT = Digest("r")


@pytest.mark.parametrize(
    ("verb", "spec", "code", "expected"),
    [
        ("update", "latest", "version-unavailable", True),
        ("replicate", "latest-1", "version-unavailable", True),
        ("replicate", 3, "version-unavailable", False),  # there will be no other 3
        ("update", "latest", "group-incomplete", False),
        ("unpublish", "", "version-unavailable", False),  # whoever says so: nothing was to be filled
        ("update", "latest", None, False),
    ],
)
def test_a_fill_is_called_again_when_what_it_was_resolved_to_is_lost(
    verb: str, spec: str | int, code: str | None, expected: bool
) -> None:
    call = Call(verb, spec, ROOT, 0.0, 60.0)
    call.answer = Answer(1, error=Failure(code, "it says why") if code else None)
    assert call.is_called_again is expected


@pytest.mark.parametrize(("retry_s", "errors"), [(0.0, ["refused"]), (1.0, [])])
def test_a_call_ends_with_a_refusal_for_good_and_waits_for_a_server_that_may_take_it_later(
    retry_s: float, errors: list[str]
) -> None:
    it = Conversation.begun()
    it.tell(events.Called("update", "latest", 60.0))
    it.tell(events.Received(Refusal("refused", "no", retry_s=retry_s)))
    assert it.errors == errors


def test_a_call_that_was_never_numbered_ends_as_number_0() -> None:
    it = Conversation()
    it.tell(events.Registered(LayoutInfo(LAYOUT), Digest("l"), 16, 0), events.Called("update", "latest", 60.0))
    it.tell(events.Received(Refusal("refused", "no")))
    assert [effect.number for effect in it.wanted if isinstance(effect, events.Finished)] == [0]


@pytest.mark.parametrize(("published", "buffer"), [(True, Empty()), (False, Poisoned())])
def test_what_is_not_its_version_is_given_up(published: bool, buffer: object) -> None:
    """Whoever published has its tensors as they are; whoever replicated has bytes that are nothing."""
    it = Conversation.begun()
    it.worker.state.memory.buffer = Vacated(ONE, ROOT, published)
    it.tell(events.Received(orders(2, conflict=Digest("another"))))
    assert it.worker.buffer == Vacated(ONE, ROOT, published)
    it.tell(events.Received(orders(3, conflict=ROOT)))
    assert it.worker.buffer == buffer


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
    parts = tuple(replace(grant(ticket, version=2), to_host=True, parts=2) for ticket in (4, 5))
    it.tell(events.Received(orders(6, fetch=Version(2), across=parts)))
    assert it.wants(OpenAcross(Ticket(4), parts))
    it.tell(events.Called("unpublish", "", 60.0))
    drained = orders(7, fetch=Version(2), across=parts, drained=ONE)
    it.tell(events.Received(replace(drained, acknowledged=it.worker.reported)), events.ServingStopped(ONE))
    assert it.worker.buffer == Vacated(ONE, ROOT, True)
    it.tell(AcrossOpened(Ticket(4), ROOT))
    assert it.wants(StartAcross(Ticket(4), parts))
    it.tell(events.ReadAdvanced(Ticket(4), 2, 2), events.ReadEnded(Ticket(4), complete=True))
    assert it.worker.buffer == Vacated(ONE, ROOT, True)
    copy = it.worker.state.copies.whole(Version(2))
    assert copy is not None
    assert copy.root == ROOT


def test_the_highest_ceiling_is_carried() -> None:
    it = Conversation.begun()
    for number, ceiling, carried in ((2, 100, 100), (3, 90, 100), (4, 110, 110)):
        it.tell(events.Received(orders(number, ceiling=ceiling, ceiling_receipt=f"of {ceiling}")))
        it.tell(events.Called("update", "latest", 60.0), events.Cancelled())
        told = [effect.message for effect in it.wanted if isinstance(effect, events.Send)][-1]
        assert isinstance(told, Report)
        assert (told.ceiling, told.ceiling_receipt) == (carried, f"of {carried}")


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


def test_a_read_into_the_buffer_ends_with_its_call() -> None:
    it = Conversation.begun()
    it.tell(events.Called("replicate", 1, 60.0))
    it.tell(events.Received(orders(3, grant=grant(2), answer=it.resolved(1))))
    assert it.wants(events.StartRead(grant(2)))
    it.tell(events.Cancelled())
    assert it.wants(events.StopRead(grant(2).ticket))


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


def test_what_it_could_not_call_counts_after_all_that_it_knows_to_be_over() -> None:
    it = Conversation.begun()
    missed = Failure("usage", "its tensors are torn")
    for position, ended in ((0, 1), (7, 8), (3, 9)):
        it.worker.state.position = position
        it.tell(events.Called("unpublish", "", 0.0, missed=missed))
        assert (it.worker.call, it.worker.state.ended) == (None, ended)
