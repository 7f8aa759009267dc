"""When a worker says how things are."""

from tensorhub.core.messages import Empty, Filling, Holding
from tensorhub.core.names import Digest, Number, Ticket, Version
from tensorhub.core.worker.report_book import MAX_UNACKNOWLEDGED, ReportBook, news_of

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


def test_an_acknowledgement_of_what_was_never_sent_counts_for_nothing() -> None:
    book = ReportBook()
    book.sent(report(0), now=0.0)
    assert book.acknowledge(99) is None
