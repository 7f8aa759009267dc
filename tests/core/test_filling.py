"""A worker whose buffer and host copies are filled, and one that closes while it is alone."""

import pytest
from msgspec.structs import replace

from tensorhub.protocol.messages import Answer, Holding, LayoutInfo, Poisoned
from tensorhub.protocol.names import Digest, Number, Ticket, Version
from tensorhub.worker import events

from .kit import LAYOUT, Conversation, across, grant, orders

ONE = Version(1)


def test_a_buffer_that_had_begun_to_be_read_is_filled_from_the_copy() -> None:
    it = Conversation()
    it.tell(events.Connected(), events.Registered(LayoutInfo(LAYOUT), Digest("l"), 16, max_copies=2))
    ahead, into_buffer = replace(grant(1), to_host=True), grant(2)
    again = replace(grant(3), to_host=True)
    it.tell(events.Received(orders(1, fetch=ONE, grant=ahead)))
    assert it.wants(events.StartRead(ahead))
    it.tell(events.Called("replicate", "latest", deadline=60.0))
    # the server has not heard of the copy yet, and lets the buffer be read
    number = it.worker.call.number if it.worker.call is not None else 0
    answer = Answer(number, ONE)
    it.tell(events.Received(orders(2, fetch=ONE, grant=into_buffer, answer=answer)), events.ReadEnded(Ticket(1)))
    assert it.wants(events.StartRead(into_buffer))
    # now it has
    it.tell(events.Received(orders(3, fetch=ONE, grant=again, answer=answer)), events.ReadEnded(Ticket(2)))
    assert it.wants(events.StartRead(again))
    it.tell(events.ReadEnded(Ticket(3), complete=True))
    # others may be reading behind what had come into the buffer: only the server knows
    assert not it.wants(events.StopServing(ONE))
    assert it.worker.buffer == Poisoned(ONE)
    told = it.worker.reported
    early = replace(orders(4, fetch=ONE, answer=answer, drained=ONE), acknowledged=told - 1)
    it.tell(events.Received(early))
    assert not it.wants(events.StopServing(ONE))
    it.tell(events.Received(replace(early, number=Number(5), acknowledged=told)))
    assert it.wants(events.StopServing(ONE))
    it.tell(events.ServingStopped(ONE), events.Received(orders(6, fetch=ONE, answer=answer)))
    assert it.wants(events.CopyIn(ONE))
    it.tell(events.CopiedIn(ONE))
    assert it.worker.buffer == Holding(ONE, Digest("r"))


def test_a_copy_that_only_the_call_wanted_is_read_no_more_once_that_is_over() -> None:
    it = Conversation.begun(max_copies=1)
    it.tell(events.Called("replicate", "latest", deadline=60.0))
    ahead = replace(grant(2), to_host=True)
    it.tell(events.Received(orders(2, grant=ahead, answer=it.resolved(1))))
    assert it.wants(events.StartRead(ahead))
    it.tell(events.Cancelled())
    assert it.wants(events.StopRead(Ticket(2)))


def test_a_copy_that_was_begun_is_finished_though_tensors_that_come_again_would_have_no_room_for_one() -> None:
    it = Conversation.begun(max_copies=2)
    ahead = replace(grant(2), to_host=True)
    it.tell(events.Received(orders(2, fetch=ONE, grant=ahead)))
    assert it.wants(events.StartRead(ahead))
    it.tell(events.Registered(LayoutInfo(LAYOUT), Digest("l"), 16, max_copies=0))
    assert it.worker.state.copies.room == 0
    it.tell(events.ReadEnded(Ticket(2), complete=True))
    assert it.worker.state.copies.whole(ONE) is not None


@pytest.mark.parametrize("is_across", [False, True])
def test_a_copy_that_was_not_begun_is_given_up_where_there_is_no_room_for_it_by_then(is_across: bool) -> None:
    it = Conversation.begun(max_copies=2)
    crossing = across(2, to_host=True)
    shared = replace(grant(2, from_host=True), to_host=True, shares=True)
    it.tell(events.Received(orders(2, fetch=ONE, grant=crossing if is_across else shared)))
    assert it.wants(events.OpenRead(crossing) if is_across else events.StartRead(shared))
    it.tell(events.Registered(LayoutInfo(LAYOUT), Digest("l"), 16, max_copies=0))
    assert it.wants(events.StopRead(Ticket(2)))
    it.tell(events.ReadOpened(Ticket(2), Digest("r")) if is_across else events.NotShared(Ticket(2)))
    it.tell(events.ReadAdvanced(Ticket(2), 0, 4), events.ReadEnded(Ticket(2)))
    assert not it.worker.state.copies.by_version


@pytest.mark.parametrize("shares_first", [False, True])
def test_what_was_to_be_shared_is_not_read_where_an_offload_has_the_last_room(shares_first: bool) -> None:
    it = Conversation.begun(max_copies=1)
    it.tell(events.Called("publish", ONE, deadline=60.0, root=Digest("r")))
    answer = it.resolved(1)
    it.tell(
        events.Received(orders(2, answer=answer)), events.Received(orders(3, answer=replace(answer, finished=True)))
    )
    shared = replace(grant(50, version=2, from_host=True), to_host=True, shares=True)
    if shares_first:
        it.tell(events.Received(orders(4, fetch=Version(2), grant=shared)))
    it.tell(events.Received(orders(5, fetch=Version(2), grant=shared, offload=ONE)))
    assert it.wants(events.StartRead(shared))
    assert any(isinstance(effect, events.CopyOut) for effect in it.wanted)
    it.tell(events.NotShared(Ticket(50)))
    assert it.wants(events.StopRead(Ticket(50)))
    it.tell(events.ReadEnded(Ticket(50)), events.CopiedOut(ONE))
    assert list(it.worker.state.copies.by_version) == [ONE]


def test_who_closes_waits_for_a_lease_however_often_its_line_breaks_before_anything_was_heard() -> None:
    it = Conversation.begun()
    it.tell(events.Called("publish", 1, deadline=60.0, root=Digest("r")))
    it.tell(events.Received(orders(2, answer=it.resolved(1))))
    assert isinstance(it.worker.buffer, Holding)
    it.tell(events.Disconnected(), events.Closing(300.0))
    for second in (1.0, 2.0, 3.0, 4.0):
        it.now = second
        it.tell(events.Connected(), events.Disconnected())
        assert not it.wants(events.Left(drained=False))
    it.now = 5.0  # a lease and a report
    assert it.worker.next_deadline() == it.now
    it.tell(events.Tick())
    assert it.wants(events.Left(drained=False))
    assert sum(isinstance(effect, events.Warn) for effect in it.wanted) == 1
