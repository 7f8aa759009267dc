"""The one read that a worker has open."""

from dataclasses import dataclass, field
from math import inf

from msgspec.structs import replace

from ..protocol.errors import InvariantViolation, shortened
from ..protocol.messages import (
    MAX_FAILURES,
    MAX_HINT,
    MAX_WORDS,
    Failure,
    Grant,
    ReadDone,
    Reading,
    Source,
    TicketFailure,
    named,
)
from ..protocol.names import Digest, Number, Ticket, WorkerId
from .events import Effect, OpenRead, ReadMeasured, StartRead, StopRead, Trust


@dataclass
class ReadSlot:
    """Grants, the open read, and the lease under which what it brings is trusted.

    A grant from the latest orders waits here until it is wanted. At most one read is open. No ticket up to `closed` is
    ever read again.
    """

    me: WorkerId
    grant: Grant | None = None
    reading: Reading | None = None
    begun: Grant | None = None  # under which `reading` was begun
    layout: Digest = Digest("")  # of the tensors for which it was begun
    is_opening: bool = False  # it fetches the manifest only
    is_opened: bool = False  # the manifest is here, and it waits for the buffer
    is_stopping: bool = False
    is_barred: bool = False  # true once the shell has confirmed, during the stop, that it writes nothing
    closed: Ticket = Ticket(0)
    began_at: float = 0.0  # when the open read began to bring something
    is_verified: bool = True  # what it brings
    done: ReadDone | None = None  # the last read that has brought its version to the end
    trust_until: float = -inf
    root: Digest = Digest("")  # of the content that is being read
    epoch: Number = Number(0)  # the same
    failures: list[TicketFailure] = field(default_factory=list)  # of the current call, newest last
    last_failure: str = ""  # of the current call, for its caller
    effects: list[Effect] = field(default_factory=list)
    stop_reason: str = ""

    # --- grant and lease ----------------------------------------------------------------------------------------------

    def take_grant(self, grant: Grant | None) -> None:
        """The latest orders grant this, and nothing else any more.

        A server that has restarted knows of an open read only what was reported of it, and that is not where its
        sources listen. A ticket never means anything else than at first, so what was granted then stays.
        """
        if grant is not None and grant.ticket <= self.closed:
            grant = None
        if grant is not None and self.begun is not None and grant.ticket == self.begun.ticket:
            grant = self.begun
        self.grant = grant

    def extend_trust(self, until: float) -> None:
        """The server has acknowledged a report: what is read before that time counts."""
        if until > self.trust_until:
            self.trust_until = until
            self.effects.append(Trust(until))

    def lapse(self, now: float) -> bool:
        """Whether a grant has just become worthless because the lease has ended."""
        if now < self.trust_until:
            return False
        had_grant, self.grant = self.grant is not None, None
        self.stop("own lease ended")
        return had_grant

    # --- questions ----------------------------------------------------------------------------------------------------

    def may_start(self, *, is_wanted: bool, now: float) -> bool:
        """A read is granted and wanted, nothing is open, and the lease lasts."""
        return self.grant is not None and is_wanted and self.reading is None and now < self.trust_until

    @property
    def is_into_buffer(self) -> bool:
        """The open read is one into the buffer."""
        return self.reading is not None and not self.reading.to_host

    @property
    def may_write(self) -> bool:
        """The open read may write the buffer, or may have written it without our having heard of it yet."""
        return self.is_into_buffer and not self.is_opening and not self.is_opened and not self.is_barred

    # --- the open read ------------------------------------------------------------------------------------------------

    def start(self, layout: Digest, *, is_only_opened: bool = False) -> None:
        """Begin to read what is granted, or to open it, for tensors with that layout."""
        grant = self.grant
        assert grant is not None
        self.begun, self.layout = grant, layout
        sources = tuple(Source(each.worker, each.from_host) for each in grant.sources)
        self.reading = Reading(
            *(grant.ticket, sources, grant.version, grant.to_host), shares=grant.shares, is_across=grant.is_across
        )
        self.is_stopping, self.is_barred, self.root, self.epoch = False, False, grant.root, grant.epoch
        self.is_opening, self.is_opened, self.is_verified = is_only_opened, False, True
        self.effects += [Trust(self.trust_until), OpenRead(grant) if is_only_opened else StartRead(grant)]

    def note_opened(self, ticket: Ticket, root: Digest) -> Reading | None:
        """The manifest is here. Returns the read, unless another one is open by now.

        `root`: of what is read across, which is known only now.
        """
        if self.reading is None or self.reading.ticket != ticket or not self.is_opening:
            return None
        self.is_opening, self.is_opened = False, True
        self.root = root or self.root
        self.reading = replace(self.reading, is_opened=True, root=root)
        return self.reading

    def not_shared(self, ticket: Ticket) -> Reading | None:
        """What was to be shared is read instead. Returns the read, unless another one is open by now."""
        if self.reading is None or self.reading.ticket != ticket or not self.reading.shares:
            return None
        self.reading = replace(self.reading, shares=False)
        return self.reading

    def go_on(self) -> None:
        """Start to read from the opened source."""
        assert self.reading is not None
        assert self.begun is not None
        assert self.is_opened
        self.is_opened = False
        self.reading = replace(self.reading, is_opened=False)
        self.effects.append(StartRead(self.begun))

    def bar(self, ticket: Ticket) -> bool:
        """The read that was told to stop writes no more. Returns whether that is the open one."""
        if self.reading is None or self.reading.ticket != ticket or not self.is_stopping:
            return False
        self.is_barred = True
        return True

    def stop_unless_granted(self, *, is_wanted: bool) -> None:
        """End a read whose grant is void or not wanted any more."""
        ticket = self.grant.ticket if self.grant is not None and is_wanted else None
        if self.reading is not None and ticket != self.reading.ticket:
            self.stop("no longer granted")

    def give_up(self, why: str) -> None:
        """The call that wanted the buffer filled is over: end a read into it, and do not begin it again."""
        self.grant = None
        self.stop(why)

    def stop(self, why: str) -> None:
        """Ask the open read, if any, to end."""
        if self.reading is not None and not self.is_stopping:
            self.is_stopping, self.stop_reason = True, why
            self.effects.append(StopRead(self.reading.ticket))

    def measured(self, event: ReadMeasured) -> None:
        """Measurements of the open read. The server uses them to leave a source that is too slow."""
        if self.reading is not None and self.reading.ticket == event.ticket:
            words = {name: shortened(getattr(event, name), MAX_WORDS) for name in ("transport", "path", "why")}
            rate, arrived = event.rate_bytes_per_s, event.arrived_bytes
            self.is_verified = event.is_verified
            self.reading = replace(self.reading, rate_bytes_per_s=rate, arrived_bytes=arrived, **words)

    def ended(self, ticket: Ticket) -> tuple[Reading, bool]:
        """No byte of the read can land any more. Returns the read, and whether it ended by itself."""
        reading = self.reading
        if reading is None or reading.ticket != ticket:
            raise InvariantViolation(f"{self.me}: read {ticket} ended, but {reading} was open")
        by_itself = not self.is_stopping
        self.reading, self.begun, self.is_stopping, self.is_barred = None, None, False, False
        self.is_opening = self.is_opened = False
        self.closed = max(self.closed, ticket)
        if self.grant is not None and self.grant.ticket <= ticket:
            self.grant = None
        return reading, by_itself

    def note_done(self, reading: Reading, now: float) -> None:
        """The read has brought its version to the end."""
        seconds, how = max(0.0, now - self.began_at), (reading.transport, reading.path, self.is_verified)
        self.done = ReadDone(reading.ticket, reading.arrived_bytes, seconds, *how)

    def forget_failures(self) -> None:
        """The call is over in which they were met."""
        self.failures, self.last_failure = [], ""

    def failed(self, reading: Reading, failure: Failure, source: WorkerId | None) -> None:
        """The read has failed by itself, by that source if it has several, and the next reports say so."""
        why = shortened(failure.message, MAX_WORDS)
        way = f" by {reading.transport}" if reading.transport else ""
        self.last_failure = f"the last read, from {source or named(reading.sources)}{way}, had failed: {why}"
        hint = shortened(failure.hint, MAX_HINT)
        source = source or reading.sources[0].worker
        self.failures = [*self.failures, TicketFailure(reading.ticket, source, failure.code, why, hint)]
        self.failures = self.failures[-MAX_FAILURES:]

    def raise_watermark(self, seen: Number) -> Ticket:
        """Close every ticket that is neither read nor waiting; orders up to `seen` have been taken in."""
        tickets = [each.ticket for each in (self.reading, self.grant) if each is not None]
        self.closed = Ticket(max(self.closed, min(tickets, default=seen + 1) - 1))
        return self.closed

    def take_effects(self) -> list[Effect]:
        """Returns the effects that were added since the last call."""
        effects, self.effects = self.effects, []
        return effects
