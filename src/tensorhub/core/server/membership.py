"""Who is alive: one `Member` for each session, and when each lease ends.

A session is one life of a worker as the server knows it. It begins with the first report of that life, and ends when
no report came for a lease, or when the worker says that it leaves. A broken connection is not a death.
"""

import heapq
from dataclasses import dataclass, field
from math import inf

import msgspec

from ..messages import Answer, Filling, Grant, Hello, Holding, HostCopy, Report, Withdrawing
from ..names import Digest, Number, Shard, Version, WorkerId
from ..settings import Settings
from .content import NOTHING, Content
from .lines import Cut, Line
from .pace import Capacity

TRIES_A_TURN = 3  # reads that fail, without a chunk between them, and it is another one's turn


@dataclass
class Avoided:
    """A source that failed this reader: when it may be tried again."""

    until: float
    times: int = 1

    @property
    def is_for_good(self) -> bool:
        """It is not tried again by this call.

        It brought wrong bytes, and not for the first time: to this reader, or lately to another one. Or it has another
        layout, of which it cannot show all the tiles that this reader wants.
        """
        return self.until == inf


@dataclass
class Crossing:
    """A read across: out of which cut, and which of its lines have brought all that was wanted of them."""

    version: Version
    to_host: bool
    cut: Cut
    done: dict[Line, None] = field(default_factory=dict)


class Told(msgspec.Struct, frozen=True):
    """What a member is told that may be news to it."""

    position: int | None = None
    answer: Answer | None = None
    grant: Grant | None = None
    drained: Version | None = None
    offload: Version | None = None
    fetch: Version | None = None
    release: tuple[int, ...] = ()
    receipts: dict[int, str] = {}
    ceiling: Number = Number(0)
    conflict: Digest = Digest("")
    witness: bool = False
    across: tuple[Grant, ...] = ()


@dataclass
class Member:
    """One session."""

    hello: Hello
    sender: str
    session: Number
    lease_end: float
    silent_at: float = inf  # when it will not have been heard for more than two reports
    report: Report = field(default_factory=lambda: Report(number=0))  # as it came: nobody changes it
    content: Content = field(default_factory=lambda: NOTHING)  # what it has of that, as far as the server believes it
    is_connected: bool = True
    former_session: Number = Number(0)  # before this one: of a server before this one, perhaps
    former_seen: Number = Number(0)  # the highest number that it had heard by then
    is_stranger: bool = False  # and it was not on the roll of those who lived when that one died
    asked: Number = Number(0)  # it was asked to say that it knows who lives, up to that session
    asked_since: float = inf  # and since when somebody has waited for that
    awaited_by: dict[WorkerId, None] = field(
        default_factory=dict
    )  # workers to decide for again when it has heard of its session
    avoided: dict[WorkerId, Avoided] = field(default_factory=dict)
    failures: int = 0  # of reads, in the present call, since one of them brought a chunk
    chunks: int = 0  # that it had in place at the last of them
    call_number: int = 0  # the call that `avoided`, `failures` and `chunks` are about
    in_vain: int = 0  # reads that failed since a chunk came, whatever the call
    left: dict[WorkerId, float] = field(
        default_factory=dict
    )  # sources that were too slow, and until when to leave them alone
    slow_until: float = -inf  # as a source: a reader has left it because it was too slow
    paced: Version | None = None  # the version that these three are about
    best: dict[tuple[bool, bool], float] = field(default_factory=dict)  # the highest rate that it got, by distance
    moves: int = 0  # away from sources that were too slow
    may_move_at: float = -inf  # again
    gives_way_to: WorkerId | None = None  # who left it for its own source
    alone_until: float = -inf  # it could not map what another worker of its host has: it fetches its own copies
    capacity: Capacity = field(default_factory=Capacity)  # as a source
    is_doubted: bool = False  # somebody failed to read from it, and it has not been heard since
    crossing: Crossing | None = None  # of the read across that it was granted last
    told: Told | None = None  # what it was told last, as far as that may be news
    settled_at: int = -1  # how often something had happened when it was last decided for
    report_s: float = 0.0  # how often it was last told to report
    is_drained: bool = False  # was told that nobody reads from its buffer any more, so nobody may begin to
    releasing: dict[int, None] = field(default_factory=dict)  # host copies, by number, that are to go: no more sources
    closing_since: float = inf
    conflict: Digest = Digest("")  # the root of what it holds that is not what its version is
    rested_at: float = inf  # when the version that it has published has lain there for so long that readers may be slow
    wakes_at: float = inf  # when to look at it again although nothing was heard
    queued_at: float = inf  # its one valid place in the queue of times

    def __post_init__(self) -> None:
        self.worker: WorkerId = self.hello.worker
        self.shard: Shard = self.hello.shard
        self.line = Line(self.hello.shards, self.shard)  # of the tensors that it has registered

    @property
    def has_lived_before(self) -> bool:
        return self.former_session > 0

    def note_heard(self, at: float, settings: Settings) -> None:
        """It was heard at that time: its lease begins anew."""
        self.lease_end = at + settings.lease_s
        self.note_pace(self.report_s, settings)

    def note_pace(self, report_s: float, settings: Settings) -> None:
        """It is told to report so often."""
        self.report_s = report_s
        self.silent_at = self.lease_end - settings.lease_s + 2 * max(settings.report_s, report_s)

    @property
    def turns_lost(self) -> int:
        """How often it was to read for others too, and nothing came: those with fewer come first."""
        return self.in_vain // TRIES_A_TURN

    @property
    def is_full(self) -> bool:
        """It has all of some version in its buffer."""
        return self.content.held is not None

    @property
    def is_let_go(self) -> bool:
        """It was told, by this server or one before it, that nobody reads from its buffer any more."""
        return self.is_drained or self.report.stops

    def fits(self, layout: Digest | None) -> bool:
        """Its registered tensors are laid out like that, as far as is known."""
        return bool(self.report.layout) and layout in (None, self.report.layout)

    def holds(self, version: Version) -> bool:
        """All of the version is in its buffer."""
        return self.content.held == version

    def holds_on(self, version: Version) -> bool:
        """All of the version is in its buffer, and it does not want to take it back."""
        return self.content.staying is not None and self.content.held == version

    def stays(self, version: Version) -> bool:
        """The same, and it does not want to leave either."""
        return self.holds_on(version) and not self.report.closing

    def stands_by(self, version: Version) -> bool:
        """All of the version is in its buffer, and it was not told that it may give that up."""
        buffer = self.content.buffer
        is_kept = isinstance(buffer, Holding) or (isinstance(buffer, Withdrawing) and not self.is_let_go)
        return is_kept and self.holds(version)

    def keeps(self, version: Version) -> bool:
        """It has all of the version, gives it up only when it is told that it may, and does not want to leave."""
        return not self.report.closing and self.has_until_told(version)

    def has_until_told(self, version: Version) -> bool:
        """It has all of the version, and gives it up only when it is told that it may.

        What it was once told that it may give up does not count, though it holds that again if its call should fail.
        """
        return self.stands_by(version) or self.has_whole_copy(version)

    def copy(self, version: Version) -> HostCopy | None:
        """Its host copy of the version, whole or not, unless that is about to go."""
        for copy in self.content.copies:
            if copy.version == version and not copy.leaving and copy.number not in self.releasing:
                return copy
        return None

    def keeps_copy(self, version: Version) -> bool:
        """It has a host copy of the version that it was not told to drop, though it may be asking to."""
        return any(copy.version == version and copy.number not in self.releasing for copy in self.content.copies)

    def loses_copy(self, version: Version) -> bool:
        """It has a host copy of the version that is about to go."""
        return self.copy(version) is None and any(copy.version == version for copy in self.content.copies)

    def has_whole_copy(self, version: Version) -> bool:
        copy = self.copy(version)
        return copy is not None and copy.whole

    def fills_itself(self, version: Version) -> bool:
        """It has a whole host copy of the version, from which it fills its buffer."""
        copy = self.copy(version)
        return copy is not None and copy.whole and not copy.unfit

    def gives_up(self, copy: HostCopy) -> bool:
        """That host copy of its own is to go, whatever anybody else would do with it."""
        return copy.leaving and (not copy.whole or self.report.closing)

    def filled(self, version: Version, *, to_host: bool) -> tuple[int, int, bool]:
        """Of its buffer or host copy: (chunks in place, chunks in all, whether it is filled with that version)."""
        place = self.copy(version) if to_host else self.content.buffer
        if isinstance(place, (HostCopy, Filling)) and place.version == version:
            return place.done, place.chunks, True
        return 0, 0, False

    @property
    def chunks_in_place(self) -> int:
        """Chunks in place of all that it is filling now."""
        copies = sum(copy.done for copy in self.content.copies if not copy.leaving)
        return copies + (self.content.buffer.done if isinstance(self.content.buffer, Filling) else 0)

    def done(self, *, from_host: bool, version: Version) -> int:
        """Chunks in place of a version that its buffer or host copy is being filled with."""
        if from_host:
            copy = self.copy(version)
            return copy.done if copy is not None else 0
        buffer = self.content.buffer
        return buffer.done if isinstance(buffer, Filling) and buffer.version == version else 0


class Members(dict[WorkerId, Member]):
    """The sessions, by worker, and a queue of the times at which one of them needs to be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self._times: list[tuple[float, WorkerId]] = []

    def all(self) -> list[Member]:
        return list(self.values())

    def add(self, member: Member) -> None:
        self[member.worker] = member
        self._queue(member)

    def wake(self, member: Member, at: float) -> None:
        """Look at this member again at that time."""
        if at < member.wakes_at:
            member.wakes_at = at
            self._queue(member)

    def _queue(self, member: Member) -> None:
        at = min(member.lease_end, member.wakes_at)
        if at < member.queued_at:
            member.queued_at = at
            heapq.heappush(self._times, (at, member.worker))

    def next_time(self) -> float:
        return self._times[0][0] if self._times else inf

    def due(self, now: float) -> tuple[list[Member], list[Member]]:
        """(whose lease has ended, who is to be looked at). Cheap while leases are renewed: one step a lease."""
        ended: list[Member] = []
        woken: list[Member] = []
        while self._times and self._times[0][0] <= now:
            at, worker = heapq.heappop(self._times)
            member = self.get(worker)
            if member is None or member.queued_at != at:
                continue  # of a former session, or it was queued for an earlier time since
            member.queued_at = inf
            if member.lease_end <= now:
                ended.append(member)
                continue
            if member.wakes_at <= now:
                member.wakes_at = inf
                woken.append(member)
            self._queue(member)
        return ended, woken
