"""All that a worker is at one moment. The machine owns it; the steps of the other files change it.

What has rules of its own is a part with a class of its own: the registered memory, the open read, the host copies. Only
such a part changes its fields. The rest is here.
"""

from collections import deque
from dataclasses import dataclass, field
from math import inf

from ..messages import Buffer, Failure, Filling, Reading, Refusal
from ..names import Number, Version, WorkerId
from .buffer import RegisteredMemory
from .call import Call
from .departure import Departure
from .events import Effect, Registered
from .host_copies import HostCopies
from .proofs import Proofs
from .read_slot import ReadSlot
from .report_book import ReportBook


@dataclass
class WorkerState:
    """One worker, as the last event left it."""

    me: WorkerId
    received_bytes: dict[str, int]  # by source replica; the shell counts
    cross_site_bytes: dict[int, int]  # by version, of those received from other sites; the shell counts

    # its parts
    memory: RegisteredMemory = field(init=False)
    slot: ReadSlot = field(init=False)
    copies: HostCopies = field(default_factory=HostCopies)
    book: ReportBook = field(default_factory=ReportBook)
    proofs: Proofs = field(default_factory=Proofs)

    # what its caller wants
    layout: Registered | None = None
    call: Call | None = None
    departure: Departure | None = None
    claim: Version | None = None  # what the last unpublish has claimed, until it is published
    claimed_in: Number = Number(0)  # the number of the orders that granted it
    ended: int = 0  # position of the last call that ended here
    finished: int = 0  # and of the last one that ended well
    missed: Failure | None = None  # why the last one was never made

    # what it knows from the server
    connected: bool = False
    has_heard: bool = False  # orders came on this connection
    alone_since: float = -inf  # when the last connection broke on which some came
    refusal: Refusal | None = None
    session: Number = Number(0)
    seen: Number = Number(0)  # the highest number of orders
    position: int | None = None  # of the replica's last call that ended anywhere
    patience_s: float = inf  # a shard may have been dead for that long without our having been told

    # of this event
    now: float = -inf
    is_urgent: bool = False  # the next report must not wait
    effects: list[Effect] = field(default_factory=list)
    story: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=200))

    def __post_init__(self) -> None:
        self.memory, self.slot = RegisteredMemory(self.me), ReadSlot(self.me)

    def want(self, effect: Effect | None) -> None:
        """The shell is to carry this out."""
        if effect is not None:
            self.effects.append(effect)

    def note(self, what: str) -> None:
        """Something has happened, for people who ask later."""
        self.story.append((self.now, what))

    # --- questions ----------------------------------------------------------------------------------------------------

    @property
    def buffer(self) -> Buffer:
        """What the registered memory is."""
        return self.memory.buffer

    @property
    def reading(self) -> Reading | None:
        """The open read, which may be about to stop."""
        return self.slot.reading

    @property
    def next_report(self) -> int:
        """The number of the first report that says what is decided now."""
        return self.book.number + 1

    @property
    def is_untouched(self) -> bool:
        """Nobody reads or writes the registered memory."""
        return not self.slot.is_into_buffer and self.memory.serving is None and self.copies.copying is None

    def has_within_reach(self, version: Version) -> bool:
        """A source of the version has answered, or it is whole in a host copy: the old one may be given up for it."""
        return (self.call is not None and self.call.opened == version) or self.copies.whole(version) is not None

    @property
    def versions_here(self) -> list[Version | None]:
        """The versions of which something is here."""
        return [self.memory.held, *self.copies.by_version]

    @property
    def versions_at_hand(self) -> list[Version | None]:
        """These, and what is being read: all of it may be here before the server is heard again."""
        coming = [self.reading.version] if self.reading is not None else []
        return [*self.versions_here, *coming, *([self.buffer.version] if isinstance(self.buffer, Filling) else [])]
