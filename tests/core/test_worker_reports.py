"""When a worker reports, and what it says of its reads."""

import pytest
from msgspec.structs import replace

from tensorhub.protocol.messages import (
    CallReport,
    Failure,
    Filling,
    Holding,
    HostCopy,
    LayoutInfo,
    Reading,
    Report,
    Source,
    Vacated,
    Withdrawing,
)
from tensorhub.protocol.names import Digest, Number, Ticket, Version
from tensorhub.worker import events
from tensorhub.worker.state import MAX_UNACKNOWLEDGED, TOGETHER_S, ReportBook

from .kit import LAYOUT, Conversation, across, orders, report, worker

# --- when a worker says how things are ---


def test_news_goes_out_at_once_and_the_rest_once_a_second() -> None:
    book = ReportBook()
    assert book.is_due(report(0), now=0.0)
    book.sent(report(0), now=0.0)
    assert not book.is_due(report(0), now=0.5)
    assert book.is_due(report(0, buffer=Holding(Version(1), Digest("r"))), now=0.5)
    assert book.is_due(report(0), now=1.0)
    assert book.next_at == 1.0


def test_silence_does_not_fill_the_memory() -> None:
    book = ReportBook()
    for at in range(10 * MAX_UNACKNOWLEDGED):
        book.sent(report(0), now=float(at))
    assert book.statistics()["unacknowledged"] == MAX_UNACKNOWLEDGED


def opened(*, is_opened: bool = False) -> Reading:
    return Reading(Ticket(7), (Source(worker("trainer")),), Version(2), is_opened=is_opened)


def test_what_leads_to_further_news_waits_for_that_and_not_for_long() -> None:
    book, held = ReportBook(), Holding(Version(1), Digest("r"))
    update = CallReport(1, "update", "latest")
    book.sent(report(0, buffer=held, call=update), now=0.0)
    resolved = report(0, buffer=held, call=replace(update, resolved=Version(2)), reading=opened())
    assert not book.is_due(resolved, now=0.2)
    assert not book.is_due(resolved, now=0.25)
    assert book.next_at == 0.2 + TOGETHER_S
    assert book.is_due(resolved, now=book.next_at)
    place = {"version": Version(1), "root": Digest("r"), "epoch": Number(5)}
    withdrawing = report(0, buffer=Withdrawing(**place), call=resolved.call, reading=opened())
    assert book.is_due(withdrawing, now=0.25)
    book.sent(withdrawing, now=0.25)
    assert book.next_at == 1.25
    vacated = report(0, buffer=Vacated(**place), call=resolved.call, reading=opened())
    assert not book.is_due(vacated, now=0.3)
    filling = report(0, buffer=Filling(Version(2)), call=resolved.call, reading=opened())
    assert not book.is_due(filling, now=0.31)
    assert book.next_at == 0.3 + TOGETHER_S
    copying = report(0, buffer=filling.buffer, call=resolved.call, copies=(HostCopy(1, Version(1), Digest("r")),))
    assert not book.is_due(copying, now=0.32)
    assert book.is_due(report(0, buffer=Holding(Version(2), Digest("s")), call=resolved.call), now=0.33)


def test_what_others_wait_for_is_said_at_once() -> None:
    book, update = ReportBook(), CallReport(1, "update", "latest")
    withdrawing = report(0, buffer=Withdrawing(Version(1), Digest("r")), call=update)
    book.sent(withdrawing, now=0.0)
    impatient = report(0, buffer=Withdrawing(Version(1), Digest("r"), impatient=True), call=update)
    assert book.is_due(impatient, now=0.01)
    unpublish = CallReport(1, "unpublish", "")
    book.sent(report(0, buffer=Withdrawing(Version(1), Digest("r")), call=unpublish), now=0.0)
    assert book.is_due(report(0, buffer=Vacated(Version(1), Digest("r")), call=unpublish), now=0.01)
    copied = report(0, copies=(HostCopy(1, Version(1), Digest("r"), whole=True),))
    book.sent(report(0, copies=(HostCopy(1, Version(1), Digest("r")),)), now=0.0)
    assert book.is_due(copied, now=0.01)


# --- a read across: what its end says, and for which tensors it is ---

ONE = Version(1)
LOST = Failure("source-lost", "connection reset")


def reading_across() -> Conversation:
    """A worker that reads out of two shards under ticket 5."""
    it = Conversation.begun()
    it.tell(events.Called("replicate", "latest", deadline=60.0))
    it.tell(events.Received(orders(2, grant=across(5), answer=it.resolved(1))))
    assert it.wants(events.OpenRead(across(5)))
    it.tell(events.ReadOpened(Ticket(5), Digest("here")))
    return it


def last_report(it: Conversation) -> Report:
    last = [effect.message for effect in it.wanted if isinstance(effect, events.Send)][-1]
    assert isinstance(last, Report)
    return last


def test_a_read_that_was_stopped_and_then_fails_is_no_fault_of_its_source() -> None:
    it = reading_across()
    it.tell(events.Received(orders(3, grant=across(6, replica="other"), answer=it.resolved(1))))
    assert it.wants(events.StopRead(Ticket(5)))
    it.tell(events.ReadEnded(Ticket(5), failure=LOST, source=worker("trainer", 1)))
    assert last_report(it).failures == ()


@pytest.mark.parametrize("is_open", [False, True])
def test_what_is_opened_for_a_host_copy_of_other_tensors_is_stopped(is_open: bool) -> None:
    """What it brings was worked out for the tensors that were registered then."""
    it = Conversation.begun(max_copies=1)
    ahead, again = across(5, to_host=True), across(9, to_host=True)
    it.tell(events.Received(orders(2, fetch=ONE, grant=ahead)))
    assert it.wants(events.OpenRead(ahead))
    if is_open:
        it.tell(events.ReadOpened(Ticket(5), Digest("here")))
        assert it.wants(events.StartRead(ahead))
    it.tell(events.Registered(LayoutInfo(LAYOUT), Digest("of other tensors"), 16, 1))
    assert it.wants(events.StopRead(Ticket(5)))
    it.tell(events.ReadOpened(Ticket(5), Digest("here")))  # it was on its way
    copies = it.worker.state.copies.by_version
    assert all(copy.layout == Digest("l") for copy in copies.values())
    assert bool(copies) is is_open
    it.tell(events.ReadEnded(Ticket(5)))
    it.tell(events.Received(orders(3, fetch=ONE, grant=again)))
    assert it.wants(events.OpenRead(again)) is not is_open  # that copy has to leave first
