"""The sources of a read across: what is said of them, and what their ends mean."""

import pytest
from msgspec.structs import replace

from tensorhub.protocol.messages import Failure, LayoutInfo, Part, Report
from tensorhub.protocol.names import Digest, Ticket
from tensorhub.worker import events
from tensorhub.worker.read_slot import Parts

from .kit import LAYOUT, Conversation, grant, orders, worker

FIRST, SECOND = (replace(grant(5 + shard, source=worker("trainer", shard)), parts=2) for shard in (0, 1))
LOST = Failure("source-lost", "connection reset")


def begun() -> Parts:
    found = Parts(granted=(FIRST, SECOND))
    found.begin()
    return found


def test_a_part_of_which_nothing_has_come_says_so() -> None:
    parts = begun()
    parts.arrived_bytes[Ticket(5)] = 700
    assert parts.for_report() == (Part(Ticket(5), FIRST.source, arrived_bytes=700), Part(Ticket(6), SECOND.source))
    assert parts.for_report()[1].arrived_bytes == 0


def reading() -> Conversation:
    """A worker that reads out of two shards, the first under ticket 5."""
    it = Conversation.begun()
    it.tell(events.Called("replicate", "latest", deadline=60.0))
    it.tell(events.Received(orders(2, across=(FIRST, SECOND), answer=it.resolved(1))))
    assert it.wants(events.OpenAcross(Ticket(5), (FIRST, SECOND)))
    it.tell(events.AcrossOpened(Ticket(5), Digest("here")))
    return it


def failed_sources(it: Conversation) -> list[Ticket]:
    """As its latest report says."""
    last = [effect.message for effect in it.wanted if isinstance(effect, events.Send)][-1]
    assert isinstance(last, Report)
    return [each.ticket for each in last.failures]


def test_a_part_that_was_stopped_and_then_fails_is_no_fault_of_its_source() -> None:
    it = reading()
    third = replace(grant(7, source=worker("other", 1)), parts=2)
    it.tell(events.Received(orders(3, across=(FIRST, third), answer=it.resolved(1))))
    assert it.wants(events.StopPart(Ticket(5), Ticket(6)))
    it.tell(events.PartEnded(Ticket(5), Ticket(6), failure=LOST))
    assert failed_sources(it) == []
    it.tell(events.PartEnded(Ticket(5), Ticket(5), failure=LOST))
    assert failed_sources(it) == [Ticket(5)]


@pytest.mark.parametrize("part", [6, 9])
def test_the_end_of_a_part_that_is_over_or_unknown_changes_nothing(part: int) -> None:
    it = reading()
    it.tell(events.PartEnded(Ticket(5), Ticket(6), failure=LOST))
    before = failed_sources(it)
    it.tell(events.PartEnded(Ticket(5), Ticket(part), failure=LOST))
    assert failed_sources(it) == before == [Ticket(6)]


@pytest.mark.parametrize("is_open", [False, True])
def test_what_is_opened_for_a_host_copy_of_other_tensors_is_stopped(is_open: bool) -> None:
    """What it brings was worked out for the tensors that were registered then."""
    it = Conversation.begun(max_copies=1)
    ahead = tuple(replace(part, to_host=True) for part in (FIRST, SECOND))
    it.tell(events.Received(orders(2, fetch=FIRST.version, across=ahead)))
    assert it.wants(events.OpenAcross(Ticket(5), ahead))
    if is_open:
        it.tell(events.AcrossOpened(Ticket(5), Digest("here")))
        assert any(isinstance(effect, events.StartAcross) for effect in it.wanted)
    it.tell(events.Registered(LayoutInfo(LAYOUT), Digest("of other tensors"), 16, 1))
    assert it.wants(events.StopRead(Ticket(5)))
    it.tell(events.AcrossOpened(Ticket(5), Digest("here")))  # it was on its way
    copies = it.worker.state.copies.by_version
    assert all(copy.layout == Digest("l") for copy in copies.values())
    assert bool(copies) is is_open
    it.tell(events.ReadEnded(Ticket(5)))
    again = tuple(replace(part, ticket=Ticket(part.ticket + 4)) for part in ahead)
    it.tell(events.Received(orders(3, fetch=FIRST.version, across=again)))
    assert it.wants(events.OpenAcross(Ticket(9), again)) is not is_open  # that copy has to leave first
