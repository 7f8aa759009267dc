"""Reads of tiles: from one source of the same layout, or from all workers of a replica with another one."""

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
    TransferError,
    TransportMissing,
    Unavailable,
    UsageError,
)
from ..protocol.layout import GlobalTensor
from ..protocol.messages import Grant, Source
from ..protocol.names import Digest, Ticket, Version, WorkerId
from ..reshard.copies import check_coverage
from ..reshard.grid import Ints
from ..reshard.read import Across, Offer, TiledVersion, TileSink, decoded, version_from
from ..transport.base import Read, Way
from ..transport.threads import as_ours
from ..worker.events import NotShared, ReadAdvanced, ReadEnded, ReadMeasured, ReadOpened
from .config import Options
from .content import MEASURE_EVERY_S, Content, Looking, Meter, Touch, Trusted, TrustedTileSink, key_of, memory_of
from .loops import in_thread
from .metrics import Record
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
    """The tensors of all sources together, by name."""
    found = {tensor.name: tensor for offer in offers for tensor in offer.shard.table.tensors}
    return tuple(found[name] for name in sorted(found))


_log = logging.getLogger(__name__)
LOCAL_ERRORS = (UsageError, HostMemoryFull)  # no source is to blame for them, and no other source would help
TELL_EVERY_S = 0.05
NO_ROOM_S = 1.0
T = TypeVar("T")


class State(Enum):
    """The state of a read across layouts."""

    LOOKING = "its sources are asked what they are"
    OPENED = "it waits to be started"
    READING = "bytes may come"
    ENDING = "nothing of it counts any more; what still runs is waited for"
    OVER = "nothing of it runs"


class SourceRead:
    """What one read takes from one of its sources."""

    def __init__(self, source: Source, version: Version, memory: str) -> None:
        self.source, self.version, self.memory = source, version, memory
        self.ways: list[Way] = []  # left to try
        self.way: Way | None = None
        self.read: Read | None = None
        self.sink: Trusted | None = None  # of the read that is under way
        self.meter: Meter | None = None
        self.counted_bytes = 0
        self.before_bytes = 0  # that came by earlier tile sinks
        self.offer: Offer | None = None
        self.tile_sinks = deque[TileSink]()

    @property
    def arrived_bytes(self) -> int:
        """Bytes received in all."""
        return self.before_bytes + (self.read.arrived_bytes if self.read is not None else 0)

    def log_end(self, me: WorkerId, record: Record) -> None:
        """Log and count the end of the read."""
        if self.way is None or self.meter is None or self.read is None or not self.read.received_bytes:
            return
        found = self.meter.ended(record, self.way.scheme)
        _log.debug(
            "%s has read %s of version %d from %s in pieces by %s (%s) at %.1f MiB/s%s",
            *(me, size_text(found.arrived_bytes), self.version, self.source.worker),
            *(self.way.scheme, found.path, found.rate_bytes_per_s / 2**20),
            f"; not by {self.way.why}" if self.way.why else "",
        )


def known(error: Exception, version: Version) -> TensorHubError:
    """Whatever went wrong in a thread that works something out."""
    if isinstance(error, TensorHubError):
        return error.with_traceback(None)
    return as_ours(error, f"tiles of version {version} cannot be worked out")


# One read of tiles, from its grant to its end.
#
#     looks      each source is asked what it is
#     derives    the reader's manifest follows from theirs, in a thread; what is wrong is said before a byte moves
#     reads      what is missing is planned over the sources, and each brings its tile sinks one after another
#
# Where one source fails the read ends. What is in place stays, and the next read brings the rest. Nothing here tells
# the machine anything while the machine calls it. Progress is told at most every 50 ms, and not before it was started.


class TileReading:
    """One read across layouts."""

    def __init__(self, plane: "TilePlane", grant: Grant, *, starts: bool) -> None:
        """`starts`: bytes are wanted as soon as it is known what it is."""
        self.plane, self.data = plane, plane.data
        self.grant, self.ticket, self.starts = grant, grant.ticket, starts
        self.content: Content | None = None
        self.state = State.LOOKING
        registration = self.data.registration
        assert registration is not None, "reading without registered memory"
        memory = "host" if grant.to_host else memory_of(registration)
        self.sources = [SourceRead(source, grant.version, memory) for source in grant.sources]
        self.loop = asyncio.get_running_loop()
        self.timers: dict[str, asyncio.Handle] = {}
        self._touch = Touch(plane.data.lease, lambda: plane.data.wake(self._touched))
        self._is_begun = False  # what it fills is known to the machine
        self._told_prefix = -1
        self._told_rate: ReadMeasured | None = None
        self._is_waking = False
        self._thinks = False  # a thread derives or plans
        self._ending = ReadEnded(grant.ticket)
        self._tasks: set[asyncio.Task[None]] = set()

    # --- what the machine wants: it is told nothing before these have returned ----------------------------------------

    def begin(self) -> None:
        """Ask every source what it is."""
        for one in self.sources:
            self.loop.call_soon(self._look, one)
        self.timers["measure"] = self.loop.call_later(MEASURE_EVERY_S, self._measure)

    def start(self) -> None:
        """It was opened, and its bytes are wanted now."""
        self.starts = True
        self.loop.call_soon(self._advance)

    def stop(self) -> bool:
        """Stop the read: no later chunk counts. Returns whether anything may have been written."""
        is_touched = self._touch.bar()
        self._end_soon()
        return is_touched

    # --- looking and deriving -----------------------------------------------------------------------------------------

    def _look(self, one: SourceRead) -> None:
        if not self._is_done:
            self._read(one, Looking(one.source, self._touch))

    def _derived(self, tiled: TiledVersion | None, error: TensorHubError | None) -> None:
        if self._is_done:
            return
        if tiled is not None and not self.grant.is_across and tiled.root() != self.grant.root:
            text = f"{self.grant.source.worker} has two layouts under one name"
            error = LayoutMismatch(text, hint="use one release of tensorhub on both sides")
        if error is not None or tiled is None:
            partly = [one for one in self.sources if type(error) is TransferError and one.offer]
            partly = [one for one in partly if one.offer is not None and not one.offer.is_whole]
            self._end_soon(error, partly[0] if partly else None)
            return
        try:
            self.content = self.plane.adopt(self.grant, tiled)
            self.plane.export(self.content, tiled, self._exported)
        except TensorHubError as no_room:
            self.data.copies.not_ahead(self.grant.version, no_room)
            self.timers["end"] = self.loop.call_later(NO_ROOM_S, self._end_soon, no_room.with_traceback(None))

    def _exported(self) -> None:
        """Peers may read it as it comes, and nothing else has its key."""
        if self.state is not State.LOOKING or self.content is None:
            return
        self.state = State.OPENED
        if not self.starts:
            self.data.tell(ReadOpened(self.ticket, self.content.root if self.grant.is_across else self.grant.root))
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

    def _advance(self) -> None:
        """Take the step that how things are allows."""
        if self._thinks:
            return
        offers = [one.offer for one in self.sources if one.offer is not None]
        match self.state:
            case State.LOOKING if (
                len(offers) == len(self.sources) and self.content is None and "end" not in self.timers
            ):
                self._think(self.plane.derive(offers, is_across=self.grant.is_across), self._derived)
            case State.OPENED if self.starts:
                self.state, self._is_begun = State.READING, True
                self._tell_progress()
                sources = [offer.source for offer in offers]
                self._think(in_thread(lambda: self._across.tile_sinks(sources), name="tiles"), self._planned)
            case State.READING:
                self._go_on()
            case State.ENDING if all(one.read is None for one in self.sources):
                self._end()

    def _planned(self, tile_sinks: Sequence[TileSink] | None, error: TensorHubError | None) -> None:
        for tile_sink in tile_sinks or ():
            self.sources[tile_sink.number].tile_sinks.append(tile_sink)
        if error is not None:
            self._end_soon(error)
        self._advance()

    def _go_on(self) -> None:
        """Start the reads from all sources."""
        assert self.content is not None
        for one in self.sources:
            if one.sink is None and one.tile_sinks:
                is_cross_site = one.source.is_cross_site
                self._read(one, TrustedTileSink(one.tile_sinks[0], self._touch, is_cross_site=is_cross_site))
        if not any(one.sink or one.tile_sinks for one in self.sources):
            self._think(self.content.noted(), self._noted)

    def _noted(self, _: object, error: TensorHubError | None) -> None:
        self._end_soon(error, is_complete=error is None)

    def _read(self, one: SourceRead, sink: Looking | TrustedTileSink) -> None:
        """Begin on the best way that works, or go on with the next one."""
        one.sink, one.counted_bytes, source = sink, 0, one.source
        try:
            one.ways = one.ways or self.data.routes.to(source, one.version)
            way = one.way = one.ways.pop(0)
            key = key_of(self.data.me.model, one.version, source.worker.shard, on_host=source.from_host)
            transport = self.data.transports[way.scheme]
            one.read = transport.read(
                way.endpoint, key, sink, lambda error: self.data.wake(self._read_over, one, sink, error)
            )
            one.meter = Meter(one.read)
        except TensorHubError as error:
            one.read = None
            self.loop.call_soon(self._handled, one, sink, error.with_traceback(None))

    def _read_over(self, one: SourceRead, sink: Looking | TrustedTileSink, error: TensorHubError | None) -> None:
        """Called in the loop, after the last byte."""
        if one.sink is not sink or one.read is None:
            return
        self.data.received.count(one)
        one.log_end(self.data.me, self.data.record)
        one.before_bytes += one.read.received_bytes
        one.read, one.counted_bytes = None, 0
        if isinstance(error, TransportMissing) and not sink.is_stopped and one.way is not None:
            self.data.give_up(one.way, one.source, one.version, error)
            one.ways = []
            self._read(one, sink)
        elif type(error) is Unavailable and one.ways and not sink.is_stopped:  # for now: the next way to this source
            self._read(one, sink)
        else:
            self._handled(one, sink, error)

    def _handled(self, one: SourceRead, sink: Looking | TrustedTileSink, error: TensorHubError | None) -> None:
        one.sink, one.ways = None, []
        if isinstance(sink, Looking):
            one.offer = sink.offer
            is_lacking, text = one.offer is None, f"{one.source.worker} has not shown what it is"
        else:
            if one.tile_sinks and one.tile_sinks[0] is sink.tile_sink:
                one.tile_sinks.popleft()
            is_lacking = self._lacks(sink.tile_sink)
            text = f"{one.source.worker} ended the read before its last piece"
        if self._is_done:
            self._advance()
        elif isinstance(error, SessionLost):  # the lease is over, and no source is to blame
            self._end_soon()
        elif error is not None or is_lacking:
            self._end_soon(error or SourceLost(text), None if isinstance(error, LOCAL_ERRORS) else one)
        else:
            self._advance()

    def _lacks(self, tile_sink: TileSink) -> bool:
        """It has ended before it has brought all."""
        try:
            return self._across.ended(tile_sink) > 0
        except TensorHubError:  # the content was given up, and is never filled any more
            return True

    # --- how it ends --------------------------------------------------------------------------------------------------

    def _end_soon(
        self, error: TensorHubError | None = None, one: SourceRead | None = None, *, is_complete: bool = False
    ) -> None:
        """As soon as nothing runs any more. `one`: the source that is to blame for the error."""
        if self._is_done:
            return
        failure, source = self.data.failure(error) if error is not None else None, one.source.worker if one else None
        self.state, self._ending = State.ENDING, ReadEnded(self.ticket, is_complete, failure, source)
        if not is_complete:
            self._touch.bar()
        for each in self.sources:
            if each.read is not None:
                each.read.stop()
        self.loop.call_soon(self._advance)

    def _end(self) -> None:
        if self._ending.complete and not self._touch.is_touched:  # there was no byte to write: it is there all the same
            self._touched()
        if self._ending.complete:
            self._tell_measured(is_over=True)
        self.let_go()
        self._tell_progress()
        self.plane.forget(self.ticket)
        failure, source = self._ending.failure, self._ending.source
        if failure is not None:
            whence = f" from {source}" if source is not None else ""
            _log.info("%s: reading version %d%s: %s", self.data.me, self.grant.version, whence, failure.message)
        self.data.tell(self._ending)

    def let_go(self) -> None:
        """Release everything: no thread of the read runs any more."""
        self.state = State.OVER
        self._touch.let_go()
        for timer in self.timers.values():
            timer.cancel()

    def _touched(self) -> None:
        """Called in the loop, once: the read may be writing."""
        if self.content is not None and self.state is not State.OVER:
            self.data.touched(self.ticket, self.grant, self.content)

    # --- how it goes --------------------------------------------------------------------------------------------------

    def stored(self) -> None:
        """Called in a transport's thread: more bytes are in place. Wakes the loop, unless it is about to look."""
        if not self._is_waking:
            self._is_waking = True
            self.data.wake(self._look_at_progress)

    def _look_at_progress(self) -> None:
        self._is_waking = False  # before looking: what is stored from now on wakes us
        if self.state is State.OVER:
            return
        self._tell_progress()
        self._is_waking = True
        self.timers["progress"] = self.loop.call_later(TELL_EVERY_S, self._look_again)

    def _look_again(self) -> None:
        self._is_waking = False
        progress = self.content.progress if self.content is not None else None
        if self.state is not State.OVER and progress is not None and progress.prefix != self._told_prefix:
            self._look_at_progress()

    def _tell_progress(self) -> None:
        for one in self.sources:
            if one.read is not None:
                self.data.received.count(one)
        progress = self.content.progress if self.content is not None else None
        if progress is not None and progress.prefix != self._told_prefix and self._is_begun:
            self._told_prefix = progress.prefix
            self.data.tell(ReadAdvanced(self.ticket, self._told_prefix, progress.chunk_count))

    def _measure(self) -> None:
        """Called in the loop at intervals."""
        if self.state is State.OVER:
            return
        self.timers["measure"] = self.loop.call_later(MEASURE_EVERY_S, self._measure)
        if self.state is State.READING:
            self._tell_measured()

    def _tell_measured(self, *, is_over: bool = False) -> None:
        known = [one for one in self.sources if one.read is not None or is_over]
        found = [(one.way, one.meter.look()) for one in known if one.meter is not None]
        if not found:
            return
        way, first = found[0]
        scheme, why = (way.scheme, way.why) if way is not None else ("", "")
        rate, arrived = sum(each.rate_bytes_per_s for _, each in found), sum(one.arrived_bytes for one in self.sources)
        is_verified = self.data.verify == "full"
        told = ReadMeasured(self.ticket, scheme, first.path, why, rate, arrived, is_verified)
        if told != self._told_rate:
            self._told_rate = told
            self.data.tell(told)

    # ------------------------------------------------------------------------------------------------------------------

    def _think(self, work: Awaitable[T], then: Callable[[T | None, TensorHubError | None], None]) -> None:
        """Work elsewhere, one at a time; what follows is done in the loop, unless the read has ended meanwhile."""

        async def run() -> None:
            found, error = None, None
            try:
                found = await work
            except Exception as wrong:  # noqa: BLE001 - no memory, or our bug: the read ends all the same, and says so
                error = known(wrong, self.grant.version)
            self._thinks = False
            try:
                if not self._is_done or found is not None:
                    then(found, error)
            except Exception as wrong:  # noqa: BLE001 - the same
                self._end_soon(known(wrong, self.grant.version))
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
        # What was derived last, and from what: other sources of the same layout show the same.
        self._derived: tuple[tuple[weakref.ref[Registration], list[Digest]], TiledVersion] | None = None
        self._there: tuple[Digest, Ints] | None = None  # tiles of that version which were here before
        self.data = data

    # --- what the machine wants ---------------------------------------------------------------------------------------

    def read(self, grant: Grant, *, is_only_opened: bool) -> None:
        """Open the sources, or read what they have; they may have been opened before."""
        if grant.shares:  # the machine takes it for an ordinary one from now on
            self.data.call_soon(self.data.tell, NotShared(grant.ticket))
        self._taken = self._taken if is_only_opened else None
        reading = self.reading
        if reading is not None and reading.ticket == grant.ticket:
            if not is_only_opened:
                reading.start()
            return
        self.reading = TileReading(self, grant, starts=not is_only_opened)
        self.reading.begin()

    def stop(self, ticket: Ticket) -> bool:
        """Returns whether it may have written anything; if not, it never will."""
        reading = self.reading
        return reading.stop() if reading is not None and reading.ticket == ticket else False

    # --- what a read asks ---------------------------------------------------------------------------------------------

    async def derive(self, offers: Sequence[Offer], *, is_across: bool) -> TiledVersion:
        """What the registered tensors will be once they are filled from these.

        Raises `LayoutMismatch`, `VersionConflict` or `TransferError`.
        """
        registration, chunk_bytes = self.data.registration, self.chunk_bytes
        assert registration is not None, "reading without registered memory"
        key = weakref.ref(registration), [offer.root for offer in offers]
        if self._derived is not None and self._derived[0] == key:
            return self._derived[1]
        found = await in_thread(lambda: version_from(registration, offers, chunk_bytes), name="tiles")
        if registration.may_have:
            self._there = found.root(), await in_thread(lambda: found.there_already(registration), name="tiles")
        if is_across and self.covering is not None and not registration.is_partial:
            await self.covering.check(registration, offers)
        self._derived = key, found
        return found

    def adopt(self, grant: Grant, tiled: TiledVersion) -> Content:
        """Returns the content that already has part of it, or a new fill.

        Raises `HostMemoryFull`, `UsageError`, `VersionConflict`.
        """
        data, root = self.data, tiled.root()
        assert data.registration is not None, "reading without registered memory"
        if grant.to_host:
            is_taken, reading = data.copies.has(grant.version), self.reading
            content = data.copies.content(grant.version, root)
            if isinstance(content.fill, Across):
                return content
            if not is_taken and reading is not None and grant.is_across and not reading.starts:
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
            if self._there is not None and self._there[0] == root:
                content.fill.filled(self._there[1])
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
        """Called when the read has ended."""
        if self.reading is not None and self.reading.ticket == ticket:
            self.reading = None
            taken, self._taken, copies = self._taken, None, self.data.copies
            if taken is not None:
                gone = copies.let_go_of(taken)
                self.data.begin_for(copies.key(taken), lambda: gone)

    def let_go(self) -> None:
        """Called when all is closed: reads without a stop have ended too."""
        reading, self.reading = self.reading, None
        if reading is not None:
            reading.let_go()

    def _stored(self, content: Content | None) -> None:
        """Called in a transport's thread."""
        reading = self.reading
        if reading is not None and reading.content is content:
            reading.stored()
