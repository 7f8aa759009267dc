"""The numbers of one life of the server: they rise over all its lives, and nobody else can raise them.

A life learns how far the one before it had come from what the workers tell. So that a worker with a wrong number cannot
take everybody's along, numbers are given out in blocks, and only what lies below a ceiling that a server has signed is
believed.
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
        """One that is above all others."""
        self.last += 1
        if self.last > self.ceiling:
            self._raise(self.last + BLOCK)
        return Number(self.last)

    def is_ours(self, number: int) -> bool:
        """This life or one before it may have given it out."""
        return number <= self.ceiling

    def learn(self, report: Report) -> bool:
        """From what a worker has heard of former lives. False: it tells of a number that no server has given out."""
        if report.ceiling > self.ceiling and are_equal(self._notary.ceiling(report.ceiling), report.ceiling_receipt):
            self.ceiling, self.receipt = report.ceiling, report.ceiling_receipt
        ticket = report.reading.ticket if report.reading is not None else 0
        told = (report.seen, report.session, report.closed, ticket)
        self.last = max(self.last, *(number for number in told if self.is_ours(number)), 0)
        return all(map(self.is_ours, told))
