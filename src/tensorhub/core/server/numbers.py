"""The numbers of one life of the server: they rise over all its lives, and nobody else can raise them.

A life learns from the workers how far the one before it had come. A single worker with a wrong number must not raise
everybody's: numbers are given out in blocks, and a number is believed only up to a ceiling that a server has signed.
"""

from ..messages import Report
from ..names import Number
from .receipts import Notary, are_equal

BLOCK = 2**32  # one signature for as many; a life begins at the microseconds of the clock, and gives out far fewer


class Numbers:
    """Gives out the numbers of sessions, tickets and orders."""

    def __init__(self, first: int, notary: Notary) -> None:
        self.last = first
        self._notary = notary
        self._raise(first + BLOCK)

    def _raise(self, ceiling: int) -> None:
        self.ceiling = Number(ceiling)
        self.receipt = self._notary.ceiling(self.ceiling)

    def next(self) -> Number:
        """The next number, above all that were given out."""
        self.last += 1
        if self.last > self.ceiling:
            self._raise(self.last + BLOCK)
        return Number(self.last)

    def is_ours(self, number: int) -> bool:
        """This life or one before it may have given it out."""
        return number <= self.ceiling

    def learn(self, report: Report) -> bool:
        """Learn what a worker has heard from former lives. False: it names a number that no server has given out."""
        if report.ceiling > self.ceiling and are_equal(self._notary.ceiling(report.ceiling), report.ceiling_receipt):
            self.ceiling, self.receipt = report.ceiling, report.ceiling_receipt
        ticket = report.reading.ticket if report.reading is not None else 0
        highest = max(report.seen, report.session, report.closed, ticket)
        if highest <= self.last:
            return True
        told = (report.seen, report.session, report.closed, ticket)
        self.last = max(self.last, *[number for number in told if self.is_ours(number)], 0)
        return self.is_ours(highest)
