"""One life of one process, as somebody would know it who stands beside it and sees its memory and its words."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from tensorhub.protocol.messages import Failure, Grant, Hello, Holding, Report, Vacated, Withdrawing
from tensorhub.protocol.names import Digest, Ticket, Version, WorkerId
from tensorhub.worker.events import Finished

Memory = list[int]
BAR = "|"  # between a model and a cut
MAX_OF_A_LEASE = 0.75  # who was heard of within that is in session, however clocks drift
MAX_SPANS = 8  # in which nothing came by a read: the latest are remembered


class Part(Protocol):
    """What comes from one source."""

    grant: Grant
    is_stopped: bool
    is_ended: bool


class Read(Protocol):
    """A read as the simulated data plane sees it."""

    grant: Grant
    began: float
    is_stopped: bool
    is_ended: bool
    shares: bool
    root: Digest  # of what it brings, in the reader's own cut
    ticket: Ticket
    tickets: dict[Ticket, WorkerId]  # and from whom

    @property
    def into(self) -> Memory: ...

    @property
    def done(self) -> int: ...

    def read_now(self) -> Sequence[Part]: ...

    @property
    def is_cross_site(self) -> bool: ...


@dataclass(eq=False)
class Held:
    """A version that is whole in the registered memory, from when it was so until its bytes may be changed."""

    version: Version
    root: Digest
    since: float
    published: bool = False
    is_served: bool = True
    stopped_at: float = inf  # peers were told off
    landed: dict[int, float] = field(default_factory=dict)  # when each chunk was in place, if it came by a read
    is_of_stopped: bool = False  # that was told to stop before the last chunk: whoever does not trust it may say so


@dataclass(eq=False)
class Copied:
    """A version that is whole in host memory."""

    version: Version
    root: Digest
    since: float
    memory: Memory  # which others may share
    is_counted: bool = True  # here, and not where it is shared from
    landed: dict[int, float] = field(default_factory=dict)  # as in `Held`


@dataclass(eq=False)
class Call:
    """One call of one shard's caller."""

    verb: str
    spec: int | str
    root: Digest
    began: float
    deadline: float  # by the clock of everybody; the process's own runs a little otherwise
    had: Version | None  # what it held
    had_root: Digest
    number: int = 0  # its position, once that was said
    resolved: Version | None = None
    resolved_at: float = inf  # when a server first said so, wherever that got
    resolved_as: int = 0  # at which position: where that fails for want of the version, the library tries once more
    refused_at: float = inf  # when a server first answered it with an error, wherever that got
    heard: float = inf  # when a server first took in that it is made
    ended: float = inf
    end_heard: float = inf  # when a server first took in that it had ended
    outcome: Finished | None = None
    is_cancelled: bool = False
    is_touched: bool = False  # a byte of the registered memory was written
    waits: bool = False  # for its number to be published
    claim: Version | None = None  # of an unpublish: what it asks to publish next
    is_missed: bool = False  # it failed before it was made
    claimed: Version | None = None  # what it might publish next when it was made
    is_disowned: bool = False  # of what it held, its worker had said before that it is not the version

    @property
    def error(self) -> Failure | None:
        return self.outcome.error if self.outcome is not None else None


@dataclass(eq=False)
class Life:
    """One life of one process."""

    me: WorkerId
    name: str
    hello: Hello
    memory: Memory
    host_memory: Callable[[Version], Memory]  # where a copy is
    clock: Callable[[], float]  # its own
    started: float
    cut: str = ""
    is_alive: bool = True
    died: float = inf
    closing: float = inf  # when close() was called
    trust_until: float = -inf  # by its own clock
    held: Held | None = None
    copies: dict[Version, Copied] = field(default_factory=dict)
    freeing: dict[Version, Copied] = field(default_factory=dict)  # no copies any more, but their memory is here yet
    copying: tuple[Version, Digest] | None = None  # out
    is_copying_in: bool = False  # from host memory, which nothing stops
    full_until: float = -inf  # when it last had as many copies as it may have, and let one go
    read: Read | None = None
    read_for: Call | None = None  # in which call it began: what has ended by then has no part in what it brings
    crossed: tuple[Version, float] | None = None  # the read that ended last crossed sites: of what, and since when
    stopped: dict[Ticket, None] = field(default_factory=dict)  # that it was told to end
    call: Call | None = None
    past: list[Call] = field(default_factory=list)
    said: Report | None = None  # its latest report, wherever that got
    said_at: float = -inf
    heard: Report | None = None  # the latest that a server took in
    heard_at: float = -inf
    heard_by: int = 0  # which life of the server
    is_turned_away: bool = False  # a server has said that it has no session, wherever that got, and not heard it since
    turned_away_at: float = -inf  # the last time
    heard_since: float = inf  # when that life of the server first heard it
    away_until: float = -inf  # for about a lease before that the server had not heard it
    idle_for: Version | None = None  # it is ready to read that, and reads nothing
    idle_since: float = inf  # so long
    is_connected: bool = True  # as far as the server could know
    bad_until: float = 0.0  # a message of its own was lost or is late
    layout: Digest = Digest("")
    pins: tuple[Version, ...] = ()
    prefetch: int | str | None = None  # what its caller wants ahead
    claim: Version | None = None  # what it may publish next, and nobody else
    claimed: float = inf  # since when
    former_claim: tuple[Version | None, float] = (None, -inf)  # the one before, and until when
    claimed_by: int = 0  # by which life of the server it was granted
    released: dict[Version, None] = field(default_factory=dict)  # copies that a server has asked it to let go
    released_at: dict[Version, float] = field(default_factory=dict)  # the same, and of those that have gone: when, last
    unfilled: dict[Version, None] = field(default_factory=dict)  # of those, what it had not heard to be whole
    was_unfilled: bool = False  # the copy that it has dropped last was such a one: nobody ever relied on it
    let_go_at: float = inf  # since when a server says that nobody reads what it withdraws
    pinned_at: float = inf
    registered: float = 0.0
    close_deadline: float = inf
    fed_at: float = -inf  # when its open read began, or last brought a chunk
    unfed_since: float = -inf  # when it began to fill that memory with that version, or last got a chunk of it
    filling: tuple[Version, bool] | None = None  # what it last began to read, and whether into host memory
    landed: dict[int, float] = field(default_factory=dict)  # when each chunk of that was in place
    starved: deque[tuple[float, float]] = field(  # from when to when reads brought nothing for long, of late
        default_factory=lambda: deque(maxlen=MAX_SPANS)
    )
    starved_at: float = -inf  # when its open read last brought something after it had brought nothing for long
    stood_still: dict[WorkerId, float] = field(default_factory=dict)  # by source that had more: when its read last did
    failures: list[tuple[float, WorkerId, str]] = field(default_factory=list)  # of reads: when, from whom, which code
    poisoned: bool = False  # a fill ended badly that may have written
    is_torn: bool = False  # one that had

    def begins(self, read: Read, now: float) -> None:
        """Its open read is that one. It goes on with what is there if it fills the same memory with the same."""
        self.read, self.read_for, self.fed_at, self.starved_at = read, self.call, now, -inf
        filling = read.grant.version, read.grant.to_host
        if self.filling != filling:
            self.unfed_since = now
        if self.filling != filling or not read.done:
            self.filling, self.landed = filling, {}

    def has_in_place(self, held: Held | None) -> None:
        """The registered memory is that version, or other memory: it is nothing that a fill has spoiled."""
        self.held, self.poisoned, self.is_torn = held, False, False

    def claims(self, version: Version | None, now: float, server: int) -> None:
        """From now on it may publish that next, and nobody else. None: it has no claim any more."""
        self.former_claim = self.claim, now
        self.claim, self.claimed, self.claimed_by = version, now, server

    def crosses_since(self, read: Read) -> float:
        """When it began to get that version from other sites, without one of its own between them."""
        is_same = self.crossed is not None and self.crossed[0] == read.grant.version
        return self.crossed[1] if self.crossed is not None and is_same else read.began

    def is_heard_by(self, server: int) -> bool:
        """That life of the server has heard it, and has not refused it since: it had a session then."""
        return self.heard_by == server and not self.is_turned_away

    @property
    def site(self) -> str:
        return self.hello.site

    @property
    def shard(self) -> tuple[str, int]:
        """Of which model, and in which cut if it has several; and which shard."""
        return f"{self.me.model}{BAR}{self.cut}" if self.cut else self.me.model, self.me.shard

    @property
    def hosted(self) -> int:
        """How many versions are in its host memory, whole or being copied there, and count there."""
        counted = sum(copy.is_counted for copy in self.copies.values())
        return counted + (1 if self.copying is not None else 0)

    def has(self, version: Version) -> bool:
        """All of the version is here, to read or to come back to."""
        return (self.held is not None and self.held.version == version) or version in self.copies

    @property
    def is_disowned(self) -> bool:
        """Of what is in its registered memory, its worker has said since then that it has no such version."""
        buffer = self.said.buffer if self.said is not None else None
        if self.held is None or self.said_at <= self.held.since:
            return False
        return not isinstance(buffer, Holding | Withdrawing | Vacated) or buffer.version != self.held.version

    def whole_since(self, version: Version) -> float:
        """Since when it has had all of the version, in one memory or the other; never: for ever from now."""
        held = self.held.since if self.held is not None and self.held.version == version else inf
        return min(held, self.copies[version].since if version in self.copies else inf)

    def has_had(self, version: Version, chunk: int, *, on_host: bool) -> float:
        """Since when it has that chunk; if it has not, since when nothing has come here."""
        had = self.copies.get(version) if on_host else self.held
        if had is not None and had.version == version:
            return had.landed.get(chunk, had.since)
        return self.landed.get(chunk, self.unfed_since) if self.filling == (version, on_host) else self.fed_at

    def root_of(self, version: Version) -> Digest:
        """The content that it has under that number."""
        if self.held is not None and self.held.version == version:
            return self.held.root
        return self.copies[version].root if version in self.copies else Digest("")

    def failed_since(self, since: float, source: WorkerId | None = None) -> bool:
        """A read of its own has failed since then, from that source or from anybody."""
        return any(at >= since and source in (None, who) for at, who, _ in self.failures)
