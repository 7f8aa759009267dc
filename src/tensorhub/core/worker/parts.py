"""The sources of a read across layouts: which are granted, which are being read, and what became of the others.

A read across is one read with several *parts*, each from one source under a ticket of its own. The orders name those
that may be read. One that they do not name any more is stopped, one that is new is added; the others go on meanwhile.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..messages import Grant, Part, Reading
from ..names import Ticket
from .events import Effect
from .events_across import AddPart, StopPart


@dataclass
class Parts:
    """Of the open read, if that is one across; and what the latest orders grant."""

    granted: tuple[Grant, ...] = ()
    open: dict[Ticket, Grant] = field(default_factory=dict)
    stopping: dict[Ticket, None] = field(default_factory=dict)
    arrived_bytes: dict[Ticket, int] = field(default_factory=dict)
    brought: dict[Ticket, None] = field(default_factory=dict)
    over: dict[Ticket, None] = field(default_factory=dict)  # tickets that are read no more, though lower ones may be

    def take(self, granted: tuple[Grant, ...], closed: Ticket) -> None:
        """The latest orders. A ticket never means anything else than at first, so what was granted then stays."""
        fresh = [grant for grant in granted if grant.ticket > closed and grant.ticket not in self.over]
        self.granted = tuple(self.open.get(grant.ticket, grant) for grant in fresh)

    @property
    def are_complete(self) -> bool:
        """A read can begin with what is granted: every line of a cut is in it."""
        return bool(self.granted) and len(self.granted) == self.granted[0].parts

    def begin(self) -> Ticket:
        """All that is granted is read from now on. Returns the ticket by which the whole is known."""
        self.open = {grant.ticket: grant for grant in self.granted}
        return min(self.open)

    def are_of(self, reading: Reading) -> bool:
        """What is granted are parts of that read."""
        wanted = reading.version, reading.to_host
        return bool(self.granted) and all((each.version, each.to_host) == wanted for each in self.granted)

    def follow(self, ticket: Ticket) -> Iterator[Effect]:
        """What is to be done so that what is read is what is granted."""
        wanted = {grant.ticket: grant for grant in self.granted}
        for part in self.open:
            if part not in wanted and part not in self.stopping:
                self.stopping[part] = None
                yield StopPart(ticket, part)
        for part, grant in wanted.items():
            if part not in self.open and part not in self.over:
                self.open[part] = grant
                yield AddPart(ticket, grant)

    def ended(self, part: Ticket, *, brought: bool) -> tuple[Grant, bool] | None:
        """No byte of it can land any more. Returns its grant, and whether it ended by itself; None: it was over."""
        grant = self.open.pop(part, None)
        if grant is None:
            return None
        by_itself = part not in self.stopping
        self.stopping.pop(part, None)
        self.arrived_bytes.pop(part, None)
        self.over[part] = None
        if brought:
            self.brought[part] = None
        self.granted = tuple(each for each in self.granted if each.ticket != part)
        return grant, by_itself

    def all_ended(self) -> Ticket:
        """The whole is over. Returns the highest ticket of it."""
        last = max((*self.open, *self.over), default=Ticket(0))
        self.open, self.stopping, self.arrived_bytes, self.brought, self.over = {}, {}, {}, {}, {}
        self.granted = tuple(grant for grant in self.granted if grant.ticket > last)
        return last

    def first_open(self) -> Ticket | None:
        """The lowest ticket that is being read, or waits for it."""
        tickets = (*self.open, *(grant.ticket for grant in self.granted))
        return min(tickets) if tickets else None

    def forget_over(self, closed: Ticket) -> None:
        """Tickets up to that one need not be named any more."""
        if self.over:
            self.over = {ticket: None for ticket in self.over if ticket > closed}

    def for_report(self) -> tuple[Part, ...]:
        """Those that are being read."""
        return tuple(
            Part(ticket, grant.source, grant.from_host, self.arrived_bytes.get(ticket, 0))
            for ticket, grant in self.open.items()
        )
