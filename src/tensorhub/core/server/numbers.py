"""The numbers of one life of the server: they rise over all its lives, and nobody else can raise them.

A life learns from the workers how far the one before it had come. A worker must not raise the numbers at will. So
numbers are given out in blocks, and each life signs the ceiling of its last block. Without a ceiling of another life
a number is believed up to one block above the first number of this life. No ceiling is believed above `MAX_CEILING`.
"""

from ..messages import Report
from ..names import Number
from .receipts import Notary, are_equal

BLOCK = 2**32  # one signature for as many; a life begins at the microseconds of the clock, and gives out far fewer
MAX_CEILING = 2**56  # microseconds up to the year 4253, so no life comes near it; 2**62 - 2**56 numbers are left above


class Numbers:
    """Gives out the numbers of sessions, tickets and orders."""

    def __init__(self, first: int, notary: Notary) -> None:
        self.last = first
        self._notary = notary
        self._upto = first + BLOCK  # up to this number another life may have given them out
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
        return number <= max(self.last, self._upto)

    def learn(self, report: Report) -> bool:
        """Learn what a worker has heard from former lives. False: it names a number that no server has given out."""
        is_of_another_life = self.ceiling < report.ceiling <= MAX_CEILING
        if is_of_another_life and are_equal(self._notary.ceiling(report.ceiling), report.ceiling_receipt):
            self.ceiling, self.receipt = report.ceiling, report.ceiling_receipt
            self._upto = report.ceiling
        ticket = report.reading.ticket if report.reading is not None else 0
        highest = max(report.seen, report.session, report.closed, ticket)
        if highest <= self.last:
            return True
        told = (report.seen, report.session, report.closed, ticket)
        self.last = max(self.last, *[number for number in told if self.is_ours(number)], 0)
        return self.is_ours(highest)
