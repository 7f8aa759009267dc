"""When a worker reports: at once when there is news, and once a second in any case.

What only leads to further news waits a moment for that, and goes in the same report: it spares a server of thousands of
workers two of nine reports of an update. The book remembers when each report was sent: a lease counts from the sending
of the report that was acknowledged.
"""

from math import inf

from msgspec.structs import replace

from ..messages import Filling, Report, Vacated, Withdrawing
from ..names import Number, Ticket

TOGETHER_S = 0.1  # a source answers within a few round trips, and serving stops within a millisecond
MAX_UNACKNOWLEDGED = 64  # a minute of silence at one a second: the lease is long over


def news_of(report: Report) -> Report:
    """The report without counters and what the server itself has said: a change of anything else is told at once."""
    buffer = Filling(report.buffer.version) if isinstance(report.buffer, Filling) else report.buffer
    reading = report.reading
    if reading is not None:
        reading = replace(reading, rate_bytes_per_s=0, arrived_bytes=0, is_opened=False)
    across = report.across
    if across is not None:
        parts = tuple(replace(each, arrived_bytes=0) for each in across.parts)
        across = replace(across, parts=parts, is_opened=False)
    copies = tuple(replace(each, done=0, chunks=0) for each in report.copies)
    counters = {"number": 0, "seen": Number(0), "closed": Ticket(0), "received_bytes": {}, "cross_site_bytes": {}}
    carried = replace(report, newest=None, newest_receipt="", receipts={}, ceiling=Number(0), ceiling_receipt="")
    carried = replace(carried, claimed_in=Number(0), stops=False, roster=None)
    return replace(carried, buffer=buffer, reading=reading, across=across, copies=copies, **counters)


def pressing(news: Report) -> Report:
    """What of the news must not wait for more: not which read is about to be begun, nor what leads to it."""
    buffer, reading, call = news.buffer, news.reading, news.call
    if call is not None and call.verb != "choose":  # of which all shards wait for the last one to have heard
        call = replace(call, resolved=None)  # the server itself has said so
    if reading is not None and not reading.to_host and not isinstance(buffer, Filling):
        reading = None  # it is opened, and writes nothing yet
        if isinstance(buffer, Vacated):
            buffer = Withdrawing(buffer.version, buffer.root, buffer.published)  # it is written over next
    return replace(news, buffer=buffer, reading=reading, call=call)


class ReportBook:
    """Numbers a worker's reports and says when the next one is due."""

    def __init__(self) -> None:
        self.number = 0
        self.every_s = 1.0
        self.acknowledged = 0  # the latest report that the server has taken in
        self._since = 1  # the first report of this connection
        self._sent_at: dict[int, float] = {}
        self._last_news: Report | None = None
        self._last_at = -inf
        self._waits_since = inf  # there is news that may wait a moment for more

    def statistics(self) -> dict[str, int]:
        """Counters, for people."""
        return {"reports": self.number, "unacknowledged": len(self._sent_at)}

    @property
    def next_at(self) -> float:
        """When the next report is due if there is no further news."""
        return min(self._last_at + self.every_s, self._waits_since + TOGETHER_S)

    def unanswered_s(self, now: float) -> float:
        """How long the oldest report has waited that the server has not acknowledged."""
        return max(0.0, now - min(self._sent_at.values(), default=now))

    def repeat(self) -> None:
        """A new connection: the server at its end may have heard nothing, so all is told again."""
        self._last_news, self._last_at = None, -inf
        self._since = self.number + 1

    def is_current(self, acknowledged: int) -> bool:
        """Orders with that acknowledgement answer something that was said over this connection.

        All is said anew on each: what answers an older one may be the word of a server that is dead, and what the next
        one has heard must stay true.
        """
        return acknowledged >= self._since

    def is_due(self, report: Report, *, now: float) -> bool:
        """It is to go out now. News that may wait has its time from the first of these calls that shows it."""
        former = self._last_news
        if former is None or now >= self.next_at:
            return True
        news = news_of(report)
        if pressing(news) != pressing(former):
            return True
        self._waits_since = min(self._waits_since, now) if news != former else inf
        return False

    def sent(self, report: Report, *, now: float) -> Report:
        """Number the report and note that it goes out now."""
        self.number += 1
        self._last_news, self._last_at, self._waits_since = news_of(report), now, inf
        self._sent_at[self.number] = now
        if len(self._sent_at) > MAX_UNACKNOWLEDGED:
            del self._sent_at[min(self._sent_at)]
        return replace(report, number=self.number)

    def acknowledge(self, number: int) -> float | None:
        """When that report was sent, None if that is not known (any more); older ones are forgotten."""
        self.acknowledged = max(self.acknowledged, number)
        sent_at = self._sent_at.get(number)
        self._sent_at = {n: at for n, at in self._sent_at.items() if n > number}
        return sent_at
