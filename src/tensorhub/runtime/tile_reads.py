"""Reads of tiles, from one source of the same layout or from several of another."""

import asyncio
import logging
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ..memory.host_memory import size_text
from ..memory.registration import Registration
from ..protocol.errors import (
    HostMemoryFull,
    LayoutMismatch,
    SessionLost,
    SourceLost,
    TensorHubError,
    TransportMissing,
    Unavailable,
    UsageError,
)
from ..protocol.layout import GlobalTensor
from ..protocol.messages import Failure, Grant
from ..protocol.names import Ticket, Version, WorkerId
from ..reshard.copies import check_coverage
from ..reshard.read import Across, Offer, TiledVersion, TileSink, decoded, version_from
from ..transport.base import Read, Way
from ..transport.threads import as_ours
from ..worker.events import (
    AcrossOpened,
    AddPart,
    Event,
    NotShared,
    OpenAcross,
    PartEnded,
    PartMeasured,
    ReadAdvanced,
    ReadEnded,
    ReadMeasured,
    ReadOpened,
    StartAcross,
    StopPart,
)
from .config import Options
from .content import MEASURE_EVERY_S, Content, Looking, Meter, Touch, Trusted, TrustedTileSink, key_of
from .loops import in_thread
from .questions import siblings

if TYPE_CHECKING:
    from .dataplane import DataPlane


# A replica that forgot a layer would compute with old weights. So a read is refused before a byte is written, and names
# the tensor. The server is asked once for each set of boxes what siblings have registered.


ASK_S = 10.0


class Covering:
    """Of one worker."""

    def __init__(self, options: Options, me: WorkerId, shards: int) -> None:
        self._options, self._me, self._shards = options, me, shards
        self._passed: tuple[tuple[bytes, ...], tuple[GlobalTensor, ...]] | None = None

    async def check(self, registration: Registration, offers: Sequence[Offer]) -> None:
        """Raises `LayoutMismatch` that names a tensor, or a part of one, that this replica lacks.

        Raises `GroupIncomplete` and `GroupMismatch` as `cutting.siblings` does, and `ServerUnreachable`.
        """
        boxes: tuple[bytes, ...] = (registration.boxes,)
        if self._shards > 1:
            deadline = time.monotonic() + ASK_S
            found = await siblings(self._options, self._me, self._shards, registration, deadline, what="a read")
            mine = {view.shard: found.boxes[view.boxes] for view in found.shards if view.replica == self._me.replica}
            boxes = tuple(mine[shard] for shard in range(self._shards))
        await in_thread(lambda: self._check(boxes, _tensors(offers)), name="tiles")

    def _check(self, boxes: tuple[bytes, ...], wanted: tuple[GlobalTensor, ...]) -> None:
        if self._passed != (boxes, wanted):
            who = f"{self._me.model}/{self._me.replica}"
            tables = [decoded(each, f"{who}[{shard}]") for shard, each in enumerate(boxes)]
            check_coverage(tables, wanted, who=who)
            self._passed = boxes, wanted


def _tensors(offers: Iterable[Offer]) -> tuple[GlobalTensor, ...]:
    """What the sources have together, by name."""
    found = {tensor.name: tensor for offer in offers for tensor in offer.shard.table.tensors}
    return tuple(found[name] for name in sorted(found))


OUR_OWN = (UsageError, HostMemoryFull)  # errors for which no source is to blame, and that no other one would mend


class State(Enum):
    """How far a read is."""

    LOOKING = "its sources are asked what they are"
    OPENED = "it waits to be started"
    READING = "bytes may come"
    ENDING = "nothing of it counts any more; what still runs is waited for"
    OVER = "nothing of it runs"


class Part:
    """One source of a read."""

    def __init__(self, grant: Grant) -> None:
        self.grant = grant
        self.ways: list[Way] = []  # left to try
        self.way: Way | None = None
        self.read: Read | None = None
        self.sink: Trusted | None = None  # of the read that is under way
        self.meter: Meter | None = None
        self.counted_bytes = 0
        self.before_bytes = 0  # that came by earlier tile sinks
        self.offer: Offer | None = None
        self.tile_sinks = deque[TileSink]()
        self.told: Event | None = None
        self.is_stopped = False
        self.is_over = False
        self.has_brought = False  # all that was wanted of it

    @property
    def arrived_bytes(self) -> int:
        """In all."""
        return self.before_bytes + (self.read.arrived_bytes if self.read is not None else 0)


def known(error: Exception, version: Version) -> TensorHubError:
    """Whatever went wrong in a thread that works something out."""
    if isinstance(error, TensorHubError):
        return error.with_traceback(None)
    return as_ours(error, f"tiles of version {version} cannot be worked out")


_log = logging.getLogger(__name__)

TELL_EVERY_S = 0.05


class Telling:
    """The half of a read that only looks. Progress is told at most every 50 ms, and not before it was started."""

    def __init__(self, plane: "TilePlane", ticket: Ticket, *, is_across: bool) -> None:
        self.ticket = ticket
        self.content: Content | None = None
        self.plane, self.data = plane, plane.data
        self.is_across = is_across
        self.state = State.LOOKING
        self.parts: dict[Ticket, Part] = {}
        self.loop = asyncio.get_running_loop()
        self.timers: dict[str, asyncio.Handle] = {}
        self.is_begun = False  # what it fills is known to the machine
        self._told = -1
        self._is_waking = False

    def tell(self, event: Event) -> None:
        self.data.tell(event)

    def stored(self) -> None:
        """In a transport's thread: more is in place. Wakes the loop, unless it is about to look anyway."""
        if not self._is_waking:
            self._is_waking = True
            self.data.wake(self._look_at_progress)

    def _look_at_progress(self) -> None:
        self._is_waking = False  # before looking: what is stored from now on wakes us
        if self.state is State.OVER:
            return
        self.tell_progress()
        self._is_waking = True
        self.timers["progress"] = self.loop.call_later(TELL_EVERY_S, self._look_again)

    def _look_again(self) -> None:
        self._is_waking = False
        progress = self.content.progress if self.content is not None else None
        if self.state is not State.OVER and progress is not None and progress.prefix != self._told:
            self._look_at_progress()

    def tell_progress(self) -> None:
        for part in self.parts.values():
            if part.read is not None:
                self.data.received.count(part)
        progress = self.content.progress if self.content is not None else None
        if progress is not None and progress.prefix != self._told and self.is_begun:
            self._told = progress.prefix
            self.tell(ReadAdvanced(self.ticket, self._told, progress.chunk_count))

    def measure(self) -> None:
        """In the loop, now and then."""
        if self.state is State.OVER:
            return
        self.timers["measure"] = self.loop.call_later(MEASURE_EVERY_S, self.measure)
        for part in self.parts.values():
            way, meter = part.way, part.meter
            if way is None or meter is None or part.read is None or self.state is not State.READING:
                continue
            told: Event = PartMeasured(self.ticket, part.grant.ticket, part.arrived_bytes)
            if not self.is_across:
                found = meter.look()
                rate, arrived = found.rate_bytes_per_s, part.arrived_bytes
                told = ReadMeasured(self.ticket, way.scheme, found.path, way.why, rate, arrived)
            if told != part.told:
                part.told = told
                self.tell(told)

    def log_read(self, part: Part) -> None:
        """For people: how it went."""
        if part.way is None or part.meter is None or part.read is None or not part.read.received_bytes:
            return
        found = part.meter.average()
        _log.info(
            "%s has read %s of version %d from %s in pieces by %s (%s) at %.1f MiB/s%s",
            *(self.data.me, size_text(found.arrived_bytes), part.grant.version, part.grant.source),
            *(part.way.scheme, found.path, found.rate_bytes_per_s / 2**20),
            f"; not by {part.way.why}" if part.way.why else "",
        )


# One read of tiles: from one source with the same layout, or *across* layouts, from several sources.
#
#     looks      each source is asked what it is
#     derives    the reader's manifest follows from theirs, in a thread; what is wrong is said before a byte moves
#     reads      what is missing is planned over the living sources, and each brings its tile sinks one after another
#
# A *part* is what comes from one source. If it fails or is stopped, what it has not brought is planned over the
# others, or waits for one more (`add`). Nothing here tells the machine anything while the machine calls it.


T = TypeVar("T")
NO_ROOM_S = 1.0


class TileReading(Telling):
    """One read, from its grants to its end."""

    def __init__(
        self, plane: "TilePlane", ticket: Ticket, grants: Sequence[Grant], *, is_across: bool, starts: bool
    ) -> None:
        """`starts`: bytes are wanted as soon as it is known what it is."""
        super().__init__(plane, ticket, is_across=is_across)
        self.starts = starts
        self._grant = grants[0]
        self.parts = {grant.ticket: Part(grant) for grant in grants}
        self._touch = Touch(plane.data.lease, lambda: plane.data.wake(self._touched))
        self._thinks = False  # a thread derives or plans
        self._is_stuck = False  # what is open is in none of the sources that there are
        self._ending: tuple[bool, Failure | None] = (False, None)
        self._tasks: set[asyncio.Task[None]] = set()

    # --- what the machine wants: it is told nothing before these have returned ----------------------------------------

    def begin(self) -> None:
        """Ask every source what it is."""
        for part in self.parts.values():
            self.loop.call_soon(self._look, part)
        self.timers["measure"] = self.loop.call_later(MEASURE_EVERY_S, self.measure)

    def start(self) -> None:
        """It was opened, and its bytes are wanted now."""
        self.starts = True
        self.loop.call_soon(self._advance)

    def add(self, grant: Grant) -> None:
        """One more source."""
        part = self.parts[grant.ticket] = Part(grant)
        self._is_stuck = False
        self.loop.call_soon(self._look, part)

    def stop_part(self, ticket: Ticket) -> None:
        """Nothing more from that one."""
        part = self.parts.get(ticket)
        if part is None or part.is_over:
            return
        part.is_stopped = True
        if part.sink is not None:
            part.sink.stop()
        if part.read is not None:
            part.read.stop()
        else:
            self.loop.call_soon(self._stopped, part)

    def stop(self) -> bool:
        """Nothing counts any more. Returns whether anything may have been written."""
        is_touched = self._touch.bar()
        self._end_soon(complete=False, failure=None)
        return is_touched

    # --- looking and deriving -----------------------------------------------------------------------------------------

    def _look(self, part: Part) -> None:
        if self._is_done or part.is_over:
            return
        if part.is_stopped:
            self._stopped(part)
        elif self.state is State.READING and self._across.open == 0 and not self._may_reopen:
            self._part_over(part, brought=True)
        else:
            self._read(part, Looking(part.grant, self._touch))

    def _looked(self, part: Part, sink: Looking, error: TensorHubError | None) -> None:
        if part.is_stopped:
            self._stopped(part)
        elif error is not None or sink.offer is None:
            self._failed(part, error or SourceLost(f"{part.grant.source} has not shown what it is"))
        else:
            part.offer = sink.offer
            self._advance()

    def _derive(self, live: Sequence[Part]) -> None:
        offers = [part.offer for part in live if part.offer is not None]
        self._think(self.plane.derive(offers, is_across=self.is_across), lambda *found: self._derived(live, *found))

    def _awaits_others(self, asked: Sequence[Part]) -> bool:
        """What none of those has may be what another source has, which is known, or is to be named."""
        mine = self.data.registration
        may_help = mine is not None and mine.shares is None  # else whatever they have
        return may_help and (self._lacks_one or any(part not in asked for part in self._live))

    def _derived(self, live: Sequence[Part], tiled: TiledVersion | None, error: TensorHubError | None) -> None:
        if error is None and tiled is not None and not self.is_across and tiled.root() != self._grant.root:
            text = f"{self._grant.source} has two layouts under one name"
            error = LayoutMismatch(text, hint="use one release of tensorhub on both sides")
        if self._is_done:
            return
        if isinstance(error, LayoutMismatch) and self._awaits_others(live):
            if any(part not in live for part in self._live):
                self._advance()
            return
        if error is None and tiled is not None:
            try:
                self.content = self.plane.adopt(self._grant, tiled)
                self.plane.export(self.content, tiled, self._exported)
            except TensorHubError as no_room:
                self.data.copies.not_ahead(self._grant.version, no_room)
                ending = partial(self._end_soon, complete=False, failure=self.data.failure(no_room))
                self.timers["end"] = self.loop.call_later(NO_ROOM_S, ending)
                return
        if error is not None:
            self._end_soon(complete=False, failure=self.data.failure(error))

    def _exported(self) -> None:
        """Peers may read it as it comes, and nothing else has its key."""
        if self.state is not State.LOOKING or self.content is None:
            return
        self.state = State.OPENED
        if not self.starts:
            self.tell(AcrossOpened(self.ticket, self.content.root) if self.is_across else ReadOpened(self.ticket))
        self._advance()

    # --- reading ------------------------------------------------------------------------------------------------------

    @property
    def _across(self) -> Across:
        assert self.content is not None, "bytes before it is known of what"
        assert isinstance(self.content.fill, Across), "tiles of what has none"
        return self.content.fill

    @property
    def _is_done(self) -> bool:
        return self.state in (State.ENDING, State.OVER)

    @property
    def _may_reopen(self) -> bool:
        """A part that was told to stop has not ended: what it does not bring is for those that are still there."""
        return any(part.is_stopped for part in self._live)

    @property
    def _lacks_one(self) -> bool:
        """A shard of the layout that is read has no source and has not brought its share: another source is to come."""
        shards = self.parts[max(self.parts)].grant.parts
        those = [part for part in self.parts.values() if part.grant.parts == shards]
        there = {part.grant.source.shard for part in those if part.has_brought or not (part.is_over or part.is_stopped)}
        return len(there) < shards

    @property
    def _live(self) -> list[Part]:
        return [part for part in self.parts.values() if not part.is_over]

    def _advance(self) -> None:
        """Take the steps that how things are allows."""
        live = self._live
        if self.state is State.ENDING:
            if not self._thinks and all(part.read is None for part in self.parts.values()):
                self._end()
            return
        if self.state is State.READING:
            self._go_on(live)
        if self._thinks or self.state is State.OVER or any(part.offer is None for part in live):
            return
        if self.state is State.LOOKING and live and self.content is None and "end" not in self.timers:
            self._derive(live)
        elif self.state is State.OPENED and self.starts:
            self.state, self.is_begun = State.READING, True
            self.tell_progress()
            self._advance()

    def _go_on(self, live: Sequence[Part]) -> None:
        """Every part brings what it is to bring; the rest is planned once it is known what each source is."""
        for part in live:
            if part.read is None and part.tile_sinks:
                self._read(
                    part, TrustedTileSink(part.tile_sinks[0], self._touch, is_cross_site=part.grant.is_cross_site)
                )
        is_open, is_known = self._across.open > 0, all(part.offer is not None for part in live)
        if is_open and live and is_known and not self._thinks and not self._is_stuck:
            sources = [part.offer.source for part in live if part.offer is not None]
            planning = in_thread(lambda: self._across.tile_sinks(sources), name="tiles")
            self._think(planning, lambda tile_sinks, error: self._planned(live, tile_sinks, error))
        if is_open or self._thinks:
            return
        if self.content and self._across.missing == 0 and not any(part.read or part.tile_sinks for part in live):
            self._think(self.content.noted(), self._noted)
            return
        for part in () if self._may_reopen else live:
            if part.read is None and not part.tile_sinks and part.offer is not None and not self._is_done:
                self._part_over(part, brought=True)

    def _noted(self, _: object, error: TensorHubError | None) -> None:
        self._end_soon(complete=error is None, failure=self.data.failure(error) if error is not None else None)

    def _planned(
        self, live: Sequence[Part], tile_sinks: Sequence[TileSink] | None, error: TensorHubError | None
    ) -> None:
        if isinstance(error, LayoutMismatch):  # of what is missing they do not have all
            self._is_stuck = all(part in live for part in self._live)  # until there is one more
            if not self._awaits_others(live):
                text = f"{', '.join(str(part.grant.source) for part in live)} have not all that is missing: {error}"
                self._end_soon(complete=False, failure=self.data.failure(SourceLost(text)))
        elif error is not None:
            self._end_soon(complete=False, failure=self.data.failure(error))
        for tile_sink in tile_sinks or ():
            part = live[tile_sink.number]
            if part.is_over or part.is_stopped or self._is_done:
                self._give_up(tile_sink)
            else:
                part.tile_sinks.append(tile_sink)
        self._advance()

    def _read(self, part: Part, sink: Looking | TrustedTileSink) -> None:
        """Begin on the best way that works, or go on with the next one."""
        try:
            part.ways = part.ways or self.data.routes.to(part.grant)
            way = part.way = part.ways.pop(0)
            part.sink, part.counted_bytes, grant, me = sink, 0, part.grant, self.data.me
            key = key_of(me.model, grant.version, grant.source.shard, on_host=grant.from_host)
            transport = self.data.transports[way.scheme]
            part.read = transport.read(
                way.endpoint, key, sink, lambda error: self.data.wake(self._read_over, part, sink, error)
            )
            part.meter = Meter(part.read)
        except TensorHubError as error:
            part.read = None
            self.loop.call_soon(self._handled, part, sink, error.with_traceback(None))

    def _read_over(self, part: Part, sink: Looking | TrustedTileSink, error: TensorHubError | None) -> None:
        """In the loop, after the last byte of one read of a part."""
        if part.sink is not sink or part.read is None:
            return
        self.data.received.count(part)
        self.log_read(part)
        part.before_bytes += part.read.received_bytes
        part.read, part.counted_bytes = None, 0
        if isinstance(error, TransportMissing) and not sink.is_stopped and part.way is not None:
            self.data.routes.failed(part.way, part.grant, error)
            part.ways = []
            self._read(part, sink)
            return
        if type(error) is Unavailable and part.ways and not sink.is_stopped:  # for now: the next way of this grant
            self._read(part, sink)
            return
        self._handled(part, sink, error)

    def _handled(self, part: Part, sink: Looking | TrustedTileSink, error: TensorHubError | None) -> None:
        part.sink, part.ways = None, []
        if isinstance(sink, TrustedTileSink):
            self._tile_sink_over(part, sink.tile_sink, error)
        elif self._is_done:
            self._advance()
        elif isinstance(error, SessionLost) and not part.is_stopped:
            self._lose()
        else:
            self._looked(part, sink, error)

    def _tile_sink_over(self, part: Part, tile_sink: TileSink, error: TensorHubError | None) -> None:
        if part.tile_sinks and part.tile_sinks[0] is tile_sink:
            part.tile_sinks.popleft()
        left = self._give_up(tile_sink)
        if self._is_done:
            self._advance()
        elif part.is_stopped:
            self._stopped(part, brought=not left and not part.tile_sinks)
        elif isinstance(error, SessionLost):
            self._lose()
        elif isinstance(error, OUR_OWN):
            self._end_soon(complete=False, failure=self.data.failure(error))
        elif error is not None or left:
            self._failed(part, error or SourceLost(f"{part.grant.source} ended the read before its last piece"))
        else:
            self._advance()

    def _give_up(self, tile_sink: TileSink) -> int:
        """What it has not brought is missing again. Returns how much that is."""
        try:
            return self._across.ended(tile_sink)
        except TensorHubError:  # the content was given up, and is never filled any more
            return 1

    # --- how parts end ------------------------------------------------------------------------------------------------

    def _failed(self, part: Part, error: TensorHubError) -> None:
        _log.info("%s: reading version %d from %s: %s", self.data.me, part.grant.version, part.grant.source, error)
        self._part_over(part, failure=self.data.failure(error))

    def _stopped(self, part: Part, *, brought: bool = False) -> None:
        if not part.is_over:
            self._part_over(part, brought=brought)

    def _part_over(self, part: Part, *, brought: bool = False, failure: Failure | None = None) -> None:
        if self._is_done or part.is_over:
            return
        while part.tile_sinks:
            self._give_up(part.tile_sinks.popleft())
        part.is_over, part.has_brought = True, brought
        if not self.is_across:
            if not brought:
                self._end_soon(complete=False, failure=failure)
            return
        self.tell_progress()
        self.tell(PartEnded(self.ticket, part.grant.ticket, brought, failure))
        if not self._is_done:
            self._advance()

    # --- how it ends --------------------------------------------------------------------------------------------------

    def _lose(self) -> None:
        """The lease is over, and no source is to blame."""
        self._touch.bar()
        self._end_soon(complete=False, failure=None)

    def _end_soon(self, *, complete: bool, failure: Failure | None) -> None:
        """As soon as nothing runs any more."""
        if self._is_done:
            return
        self.state, self._ending = State.ENDING, (complete, failure)
        if not complete:
            self._touch.bar()
        for part in self.parts.values():
            if part.read is not None:
                part.read.stop()
        self.loop.call_soon(self._advance)

    def _end(self) -> None:
        if self.state is State.OVER:
            return
        for part in self._live:
            while part.tile_sinks:
                self._give_up(part.tile_sinks.popleft())
        if self._ending[0] and not self._touch.is_touched:  # there was no byte to write: it is there all the same
            self._touched()
        self.let_go()
        self.tell_progress()
        self.plane.forget(self.ticket)
        complete, failure = self._ending
        if failure is not None:
            _log.info("%s: reading version %d: %s", self.data.me, self._grant.version, failure.message)
        self.tell(ReadEnded(self.ticket, complete, failure))

    def let_go(self) -> None:
        """Nothing of it runs or is held any more."""
        self.state = State.OVER
        self._touch.let_go()
        for timer in self.timers.values():
            timer.cancel()

    def _touched(self) -> None:
        """In the loop, once."""
        if self.content is not None and self.state is not State.OVER:
            self.data.touched(self.ticket, self._grant, self.content)

    # ------------------------------------------------------------------------------------------------------------------

    def _think(self, work: Awaitable[T], then: Callable[[T | None, TensorHubError | None], None]) -> None:
        """Work elsewhere, one at a time; what follows is done in the loop, unless the read has ended meanwhile."""

        async def run() -> None:
            found, error = None, None
            try:
                found = await work
            except Exception as wrong:  # noqa: BLE001 - no memory, or our bug: the read ends all the same, and says so
                error = known(wrong, self._grant.version)
            self._thinks = False
            try:
                if not self._is_done or found is not None:
                    then(found, error)
            except Exception as wrong:  # noqa: BLE001 - the same
                self._end_soon(complete=False, failure=self.data.failure(known(wrong, self._grant.version)))
            if self.state is State.ENDING:
                self._advance()

        self._thinks = True
        task = self.loop.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


# A read of tiles fills the worker's `incoming` content, or a host copy, once its manifest is derived.


class TilePlane:
    """Between a data plane and the one read of tiles that may be under way."""

    def __init__(self, data: "DataPlane", chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.reading: TileReading | None = None
        self.covering: Covering | None = None  # None: what it has boxes for is read
        self._taken: Version | None = None  # a host copy that the machine does not count before the read is started
        self.data = data

    # --- what the machine wants ---------------------------------------------------------------------------------------

    def carry_out(self, effect: OpenAcross | StartAcross | AddPart | StopPart) -> None:
        """A read across."""
        reading = self.reading if self.reading is not None and self.reading.ticket == effect.ticket else None
        match effect:
            case OpenAcross(ticket=ticket, grants=grants):
                self._begin(TileReading(self, ticket, grants, is_across=True, starts=False))
            case StartAcross(ticket=ticket, grants=grants):
                self._taken = None
                if reading is not None:
                    reading.start()
                else:
                    self._begin(TileReading(self, ticket, grants, is_across=True, starts=True))
            case AddPart(grant=grant) if reading is not None:
                reading.add(grant)
            case StopPart(part=part) if reading is not None:
                reading.stop_part(part)

    def read(self, grant: Grant, *, is_only_opened: bool) -> None:
        """Out of one source that has the same layout."""
        if grant.shares:  # the machine takes it for an ordinary one from now on
            self.data.call_soon(self.data.tell, NotShared(grant.ticket))
        reading = self.reading
        if reading is not None and reading.ticket == grant.ticket:
            if not is_only_opened:
                reading.start()
            return
        self._begin(TileReading(self, grant.ticket, (grant,), is_across=False, starts=not is_only_opened))

    def stop(self, ticket: Ticket) -> bool:
        """Returns whether it may have written anything; if not, it never will."""
        reading = self.reading
        return reading.stop() if reading is not None and reading.ticket == ticket else False

    def _begin(self, reading: TileReading) -> None:
        self.reading = reading
        reading.begin()

    # --- what a read asks ---------------------------------------------------------------------------------------------

    async def derive(self, offers: Sequence[Offer], *, is_across: bool) -> TiledVersion:
        """What the registered tensors will be once they are filled from these. Raises as `version_from`, `Covering`."""
        registration, chunk_bytes = self.data.registration, self.chunk_bytes
        assert registration is not None, "reading without registered memory"
        found = await in_thread(lambda: version_from(registration, offers, chunk_bytes), name="tiles")
        if is_across and self.covering is not None and not registration.is_partial:
            await self.covering.check(registration, offers)
        return found

    def adopt(self, grant: Grant, tiled: TiledVersion) -> Content:
        """What is already there of that content, or a new fill.

        Raises `HostMemoryFull`, `UsageError`, `VersionConflict`.
        """
        data, root = self.data, tiled.root()
        assert data.registration is not None, "reading without registered memory"
        if grant.to_host:
            is_taken, reading = data.copies.has(grant.version), self.reading
            content = data.copies.content(grant.version, root)
            if isinstance(content.fill, Across):
                return content
            if not is_taken and reading is not None and reading.is_across and not reading.starts:
                self._taken = grant.version
        else:
            for known in (data.content, data.incoming):
                if known is not None and known.is_of(grant.version, root) and isinstance(known.fill, Across):
                    return known
            data.forget_incoming()
            content = Content(grant.version, root, self.data.key(grant.version), data.registration)
        held = weakref.ref(content)
        content.fill = Across(
            content.registration,
            tiled.tiles,
            tiled.shard.manifest,
            on_stored=lambda _: self._stored(held()),
            chunk_bytes=tiled.chunk_bytes,
        )
        if not grant.to_host:
            data.incoming = content
        return content

    def export(self, content: Content, tiled: TiledVersion, then: Callable[[], None]) -> None:
        """Let peers read behind us, once nothing else has that key; `then` follows."""
        if content.manifest is not None:
            self.data.call_soon(then)
            return
        self.data.once_free(content.key, partial(self._exported, content, tiled, then))

    def _exported(self, content: Content, tiled: TiledVersion, then: Callable[[], None]) -> None:
        assert isinstance(content.fill, Across), "tiles of what has none"
        self.data.unserved = content.export(self.data.transports, tiled, content.fill.progress)
        self.data.call_soon(then)

    def forget(self, ticket: Ticket) -> None:
        """The read has ended."""
        if self.reading is not None and self.reading.ticket == ticket:
            self.reading = None
            taken, self._taken, copies = self._taken, None, self.data.copies
            if taken is not None:
                gone = copies.let_go_of(taken)
                self.data.begin_for(copies.key(taken), lambda: gone)

    def let_go(self) -> None:
        """All is closed: what was not told to stop has ended too."""
        reading, self.reading = self.reading, None
        if reading is not None:
            reading.let_go()

    def _stored(self, content: Content | None) -> None:
        """In a transport's thread."""
        reading = self.reading
        if reading is not None and reading.content is content:
            reading.stored()
