"""The one read that a worker has open, and the sources of a read across layouts."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from msgspec.structs import replace

from ..protocol.errors import InvariantViolation, shortened
from ..protocol.messages import MAX_FAILURES, MAX_HINT, MAX_WORDS, Failure, Grant, Part, Reading, TicketFailure
from ..protocol.names import Digest, Number, Ticket, WorkerId
from .events import (
    AddPart,
    Effect,
    OpenAcross,
    OpenRead,
    ReadMeasured,
    StartAcross,
    StartRead,
    StopPart,
    StopRead,
    Trust,
)

# --- the parts of a read across ---------------------------------------------------------------------------------------


@dataclass
class Parts:
    """The sources of the open read, if that is one across layouts; and what the latest orders grant.

    Each part has a ticket of its own. A part that the orders do not name any more is stopped, a new one is added; the
    others go on.
    """

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
        """A read can begin: every key of a layout set has its grant."""
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


# --- the one open read ------------------------------------------------------------------------------------------------


@dataclass
class ReadSlot:
    """Grants, the open read, and the lease under which what it brings is trusted.

    A grant from the latest orders waits here until it is wanted. At most one read is open. No ticket up to `closed` is
    ever read again.
    """

    me: WorkerId
    grant: Grant | None = None
    parts: Parts = field(default_factory=Parts)
    reading: Reading | None = None
    begun: Grant | None = None  # under which `reading` was begun
    is_across: bool = False  # it is one out of several sources
    layout: Digest = Digest("")  # of the tensors for which one across was begun
    is_opening: bool = False  # it fetches the manifest only
    is_opened: bool = False  # the manifest is here, and it waits for the buffer
    is_stopping: bool = False
    is_barred: bool = False  # true once the shell has confirmed, during the stop, that it writes nothing
    closed: Ticket = Ticket(0)
    trust_until: float = -inf
    root: Digest = Digest("")  # of the content that is being read
    failures: list[TicketFailure] = field(default_factory=list)  # of the current call, newest last
    last_failure: str = ""  # of the current call, for its caller
    effects: list[Effect] = field(default_factory=list)
    stop_reason: str = ""

    # --- grant and lease ----------------------------------------------------------------------------------------------

    def take_grant(self, grant: Grant | None, across: tuple[Grant, ...] = ()) -> None:
        """The latest orders grant this, and nothing else any more.

        A server that has restarted knows of an open read only what was reported of it, and that is not where its source
        listens. A ticket never means anything else than at first, so what was granted then stays.
        """
        if grant is not None and grant.ticket <= self.closed:
            grant = None
        if grant is not None and self.begun is not None and grant.ticket == self.begun.ticket:
            grant = self.begun
        self.grant = grant
        self.parts.take(across if grant is None else (), self.closed)

    @property
    def offer(self) -> Grant | None:
        """What is granted, or one part of it."""
        return self.grant if self.grant is not None else next(iter(self.parts.granted), None)

    def decline(self) -> None:
        """What is granted is not wanted."""
        self.grant, self.parts.granted = None, ()

    def extend_trust(self, until: float) -> None:
        """The server has acknowledged a report: what is read before that time counts."""
        if until > self.trust_until:
            self.trust_until = until
            self.effects.append(Trust(until))

    def lapse(self, now: float) -> bool:
        """Whether a grant has just become worthless because the lease has ended."""
        if now < self.trust_until:
            return False
        had_grant = self.offer is not None
        self.decline()
        self.stop("own lease ended")
        return had_grant

    # --- questions ----------------------------------------------------------------------------------------------------

    def may_start(self, *, is_wanted: bool, now: float) -> bool:
        """All that one read needs is granted and wanted, nothing is open, and the lease lasts."""
        is_complete = self.grant is not None or self.parts.are_complete
        return is_complete and is_wanted and self.reading is None and now < self.trust_until

    @property
    def is_into_buffer(self) -> bool:
        """The open read is one into the buffer."""
        return self.reading is not None and not self.reading.to_host

    @property
    def may_write(self) -> bool:
        """The open read may write the buffer, or may have written it without our having heard of it yet."""
        return self.is_into_buffer and not self.is_opening and not self.is_opened and not self.is_barred

    # --- the open read ------------------------------------------------------------------------------------------------

    def start(self, *, is_only_opened: bool = False) -> None:
        """Begin to read what is granted, or to open it."""
        grant = self.grant
        assert grant is not None
        self.begun = grant
        self.reading = Reading(
            *(grant.ticket, grant.source, grant.version, grant.from_host, grant.to_host), shares=grant.shares
        )
        self.is_stopping, self.is_barred, self.root = False, False, grant.root
        self.is_opening, self.is_opened = is_only_opened, False
        self.effects += [Trust(self.trust_until), OpenRead(grant) if is_only_opened else StartRead(grant)]

    def start_across(self) -> None:
        """Begin to open what is granted: what it will be, in the registered layout, is known only then."""
        one, ticket = self.parts.granted[0], self.parts.begin()
        self.is_across, self.root = True, Digest("")
        self.reading = Reading(ticket, one.source, one.version, to_host=one.to_host)
        self.is_stopping, self.is_barred = False, False
        self.is_opening, self.is_opened = True, False
        self.effects += [Trust(self.trust_until), OpenAcross(ticket, tuple(self.parts.open.values()))]

    def note_opened(self, ticket: Ticket, root: Digest | None = None) -> Reading | None:
        """The manifest is here. Returns the read, unless another one is open by now.

        `root`: of what is read across, which is known only now.
        """
        if self.is_across != (root is not None):
            return None
        self.root = root if root is not None else self.root
        if self.reading is None or self.reading.ticket != ticket or not self.is_opening:
            return None
        self.is_opening, self.is_opened = False, True
        self.reading = replace(self.reading, is_opened=True)
        return self.reading

    def not_shared(self, ticket: Ticket) -> Reading | None:
        """What was to be shared is read instead. Returns the read, unless another one is open by now."""
        if self.reading is None or self.reading.ticket != ticket or not self.reading.shares:
            return None
        self.reading = replace(self.reading, shares=False)
        return self.reading

    def go_on(self) -> None:
        """Read what was opened."""
        assert self.reading is not None
        assert self.is_opened
        self.is_opened = False
        self.reading = replace(self.reading, is_opened=False)
        if self.begun is not None:
            self.effects.append(StartRead(self.begun))
        else:
            live = [grant for part, grant in self.parts.open.items() if part not in self.parts.stopping]
            self.effects.append(StartAcross(self.reading.ticket, tuple(live)))

    def bar(self, ticket: Ticket) -> bool:
        """The read that was told to stop writes no more. Returns whether that is the open one."""
        if self.reading is None or self.reading.ticket != ticket or not self.is_stopping:
            return False
        self.is_barred = True
        return True

    def stop_unless_granted(self, *, is_wanted: bool) -> None:
        """End a read whose grant is void or not wanted any more."""
        if self.is_across and self.reading is not None:
            if not is_wanted or not self.parts.are_of(self.reading):  # parts of another read are no parts of this one
                self.stop("no longer granted")
            elif not self.is_stopping:
                self.effects += self.parts.follow(self.reading.ticket)
            return
        ticket = self.grant.ticket if self.grant is not None and is_wanted else None
        if self.reading is not None and ticket != self.reading.ticket:
            self.stop("no longer granted")

    def give_up(self, why: str) -> None:
        """The call that wanted the buffer filled is over: end a read into it, and do not begin it again."""
        self.decline()
        self.stop(why)

    def stop(self, why: str) -> None:
        """Ask the open read, if any, to end."""
        if self.reading is not None and not self.is_stopping:
            self.is_stopping, self.stop_reason = True, why
            self.effects.append(StopRead(self.reading.ticket))

    def measured(self, event: ReadMeasured) -> None:
        """How the open read goes: for people, and for the server, which leaves a source that is too slow."""
        if self.reading is not None and self.reading.ticket == event.ticket:
            words = {name: shortened(getattr(event, name), MAX_WORDS) for name in ("transport", "path", "why")}
            rate, arrived = event.rate_bytes_per_s, event.arrived_bytes
            self.reading = replace(self.reading, rate_bytes_per_s=rate, arrived_bytes=arrived, **words)

    def ended(self, ticket: Ticket) -> tuple[Reading, bool]:
        """No byte of the read can land any more. Returns the read, and whether it ended by itself."""
        reading = self.reading
        if reading is None or reading.ticket != ticket:
            raise InvariantViolation(f"{self.me}: read {ticket} ended, but {reading} was open")
        by_itself = not self.is_stopping
        self.reading, self.begun, self.is_stopping, self.is_barred = None, None, False, False
        self.is_opening = self.is_opened = self.is_across = False
        self.closed = Ticket(max(self.closed, ticket, self.parts.all_ended()))
        if self.grant is not None and self.grant.ticket <= ticket:
            self.grant = None
        return reading, by_itself

    def forget_failures(self) -> None:
        """The call is over in which they were met."""
        self.failures, self.last_failure = [], ""

    def failed(self, reading: Reading, failure: Failure) -> None:
        """The read has failed by itself, and the next reports say so."""
        why = shortened(failure.message, MAX_WORDS)
        way = f" by {reading.transport}" if reading.transport else ""
        self.last_failure = f"the last read, from {reading.source}{way}, had failed: {why}"
        hint = shortened(failure.hint, MAX_HINT)
        self.failures = [*self.failures, TicketFailure(reading.ticket, reading.source, failure.code, why, hint)]
        self.failures = self.failures[-MAX_FAILURES:]

    def raise_watermark(self, seen: Number) -> Ticket:
        """Close every ticket that is neither read nor waiting; orders up to `seen` have been taken in."""
        tickets = [self.parts.first_open(), self.grant.ticket if self.grant is not None else None]
        if self.reading is not None and not self.is_across:
            tickets.append(self.reading.ticket)
        first_open = min((ticket for ticket in tickets if ticket is not None), default=Ticket(seen + 1))
        self.closed = Ticket(max(self.closed, first_open - 1))
        self.parts.forget_over(self.closed)
        return self.closed

    def take_effects(self) -> list[Effect]:
        """What it wants done since the last time."""
        effects, self.effects = self.effects, []
        return effects
