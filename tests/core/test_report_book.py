"""When a worker says how things are."""

from msgspec.structs import replace

from tensorhub.protocol.messages import CallReport, Empty, Filling, Holding, Reading, Vacated, Withdrawing
from tensorhub.protocol.names import Digest, Number, Ticket, Version, worker_id
from tensorhub.worker.state import MAX_UNACKNOWLEDGED, TOGETHER_S, ReportBook, news_of

from .kit import report


def test_news_goes_out_at_once_and_the_rest_once_a_second() -> None:
    book = ReportBook()
    assert book.is_due(report(0), now=0.0)
    book.sent(report(0), now=0.0)
    assert not book.is_due(report(0), now=0.5)
    assert book.is_due(report(0, buffer=Holding(Version(1), Digest("r"))), now=0.5)
    assert book.is_due(report(0), now=1.0)
    assert book.next_at == 1.0


def test_counters_that_move_by_themselves_are_no_news() -> None:
    plain = report(3, buffer=Filling(Version(1), 2, 9), seen=Number(4), closed=Ticket(2), received_bytes={"a": 1})
    later = report(4, buffer=Filling(Version(1), 3, 9), seen=Number(5), closed=Ticket(3), received_bytes={"a": 2})
    assert news_of(plain) == news_of(later)
    assert news_of(plain) != news_of(report(3, buffer=Empty()))


def test_a_new_connection_hears_everything_again() -> None:
    book = ReportBook()
    book.sent(report(0), now=0.0)
    book.repeat()
    assert book.is_due(report(0), now=0.0)


def test_reports_are_numbered_and_their_sending_is_remembered_until_acknowledged() -> None:
    book = ReportBook()
    numbers = [book.sent(report(0), now=float(at)).number for at in range(3)]
    assert numbers == [1, 2, 3]
    assert book.acknowledge(2) == 1.0
    assert book.acknowledge(2) is None
    assert book.acknowledge(1) is None
    assert book.acknowledge(3) == 2.0
    assert book.statistics()["unacknowledged"] == 0


def test_silence_does_not_fill_the_memory() -> None:
    book = ReportBook()
    for at in range(10 * MAX_UNACKNOWLEDGED):
        book.sent(report(0), now=float(at))
    assert book.statistics()["unacknowledged"] == MAX_UNACKNOWLEDGED


def opened(*, is_opened: bool = False) -> Reading:
    return Reading(Ticket(7), worker_id("policy", "trainer", 0), Version(2), is_opened=is_opened)


def test_what_leads_to_further_news_waits_for_that_and_not_for_long() -> None:
    book, held = ReportBook(), Holding(Version(1), Digest("r"))
    update = CallReport(1, "update", "latest")
    book.sent(report(0, buffer=held, call=update), now=0.0)
    resolved = report(0, buffer=held, call=replace(update, resolved=Version(2)), reading=opened())
    assert not book.is_due(resolved, now=0.2)
    assert not book.is_due(resolved, now=0.25)
    assert book.next_at == 0.2 + TOGETHER_S
    assert book.is_due(resolved, now=book.next_at)
    withdrawing = report(0, buffer=Withdrawing(Version(1), Digest("r")), call=resolved.call, reading=opened())
    assert book.is_due(withdrawing, now=0.25)
    book.sent(withdrawing, now=0.25)
    assert book.next_at == 1.25
    vacated = report(0, buffer=Vacated(Version(1), Digest("r")), call=resolved.call, reading=opened())
    assert not book.is_due(vacated, now=0.3)
    assert book.is_due(report(0, buffer=Filling(Version(2)), call=resolved.call, reading=opened()), now=0.31)


def test_a_buffer_that_is_vacated_for_its_caller_is_told_at_once() -> None:
    book = ReportBook()
    book.sent(report(0, buffer=Withdrawing(Version(1), Digest("r"), True)), now=0.0)
    assert book.is_due(report(0, buffer=Vacated(Version(1), Digest("r"), True)), now=0.1)


def test_a_read_into_host_memory_and_one_into_an_empty_buffer_are_told_at_once() -> None:
    book = ReportBook()
    book.sent(report(0, buffer=Filling(Version(2))), now=0.0)
    assert book.is_due(report(0, buffer=Filling(Version(2)), reading=opened()), now=0.1)
    book.sent(report(0, buffer=Holding(Version(1), Digest("r"))), now=0.2)
    to_host = replace(opened(), to_host=True)
    assert book.is_due(report(0, buffer=Holding(Version(1), Digest("r")), reading=to_host), now=0.3)
