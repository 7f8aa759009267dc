"""One read of tiles: out of one source of the same layout, or *across*, out of several that are cut in another way.

    looks      each source is asked what it is; nothing is wanted of it
    derives    the reader's own manifest follows from theirs, in a thread: what cannot be is said before a byte moves
    reads      what is missing is planned over the sources that live, each brings its legs one after another

A *part* is what comes from one source. It has a ticket, a way, a gate and a fate of its own: when it fails or is told
to stop, what it has not brought is planned anew over the others, or waits for one more (`add`). The read as a whole
touches the memory, and is told to stop, as any other read.

Used in the worker's loop; transports call back from their threads, and only wake it. It must never: choose a source,
plan over a part that has ended, or tell the machine anything from within a call of the machine's.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from ..core.errors import LayoutMismatch, SessionLost, SourceLost, TensorHubError, TransportMissing, Unavailable
from ..core.messages import Failure, Grant
from ..core.names import Ticket
from ..core.worker.events import ReadEnded, ReadOpened
from ..core.worker.events_across import AcrossOpened, PartEnded
from ..memory.tiles.across import Across
from ..memory.tiles.legs import Leg
from ..memory.tiles.tiled import TiledVersion
from .content import key_of
from .legs import Looking, Touch, TrustedLeg
from .loops import in_thread
from .routes import MEASURE_EVERY_S, Meter
from .tile_parts import OUR_OWN, Part, Plane, State, known
from .tile_telling import Telling

T = TypeVar("T")
_log = logging.getLogger(__name__)
NO_ROOM_S = 1.0


class TileReading(Telling):
    """One read, from its grants to its end."""

    def __init__(self, plane: Plane, ticket: Ticket, grants: Sequence[Grant], *, is_across: bool, starts: bool) -> None:
        """`starts`: bytes are wanted as soon as it is known what it is."""
        super().__init__(plane, ticket, is_across=is_across)
        self.starts = starts
        self._grant = grants[0]
        self.parts = {grant.ticket: Part(grant) for grant in grants}
        self._touch = Touch(plane.lease, lambda: plane.wake(self._touched))
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
        mine = self.plane.registration
        may_help = mine is not None and mine.shares is None  # else whatever they have
        return may_help and (self._lacks_one or any(part not in asked for part in self._live))

    def _derived(self, live: Sequence[Part], tiled: TiledVersion | None, error: TensorHubError | None) -> None:
        if error is None and tiled is not None and not self.is_across and tiled.root() != self._grant.root:
            text = f"{self._grant.source} has tensors that are cut in another way, under one and the same name"
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
                self.plane.not_ahead(self._grant.version, no_room)
                ending = partial(self._end_soon, complete=False, failure=self.plane.failure(no_room))
                self.timers["end"] = self.loop.call_later(NO_ROOM_S, ending)
                return
        if error is not None:
            self._end_soon(complete=False, failure=self.plane.failure(error))

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
        """A shard of the cut that is read now is neither read nor has brought its share: one more source is to come."""
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
        """Every part brings what it is to bring; what nobody brings is planned once it is known what each source is."""
        for part in live:
            if part.read is None and part.legs:
                self._read(part, TrustedLeg(part.legs[0], self._touch, is_cross_site=part.grant.is_cross_site))
        is_open, is_known = self._across.open > 0, all(part.offer is not None for part in live)
        if is_open and live and is_known and not self._thinks and not self._is_stuck:
            sources = [part.offer.source for part in live if part.offer is not None]
            planning = in_thread(lambda: self._across.legs(sources), name="tiles")
            self._think(planning, lambda legs, error: self._planned(live, legs, error))
        if is_open or self._thinks:
            return
        if self.content and self._across.missing == 0 and not any(part.read or part.legs for part in live):
            self._think(self.content.noted(), self._noted)
            return
        for part in () if self._may_reopen else live:
            if part.read is None and not part.legs and part.offer is not None and not self._is_done:
                self._part_over(part, brought=True)

    def _noted(self, _: object, error: TensorHubError | None) -> None:
        self._end_soon(complete=error is None, failure=self.plane.failure(error) if error is not None else None)

    def _planned(self, live: Sequence[Part], legs: Sequence[Leg] | None, error: TensorHubError | None) -> None:
        if isinstance(error, LayoutMismatch):  # of what is missing they do not have all
            self._is_stuck = all(part in live for part in self._live)  # until there is one more
            if not self._awaits_others(live):
                text = f"{', '.join(str(part.grant.source) for part in live)} have not all that is missing: {error}"
                self._end_soon(complete=False, failure=self.plane.failure(SourceLost(text)))
        elif error is not None:
            self._end_soon(complete=False, failure=self.plane.failure(error))
        for leg in legs or ():
            part = live[leg.number]
            if part.is_over or part.is_stopped or self._is_done:
                self._give_up(leg)
            else:
                part.legs.append(leg)
        self._advance()

    def _read(self, part: Part, sink: Looking | TrustedLeg) -> None:
        """Begin on the best way that works, or go on with the next one."""
        try:
            part.ways = part.ways or self.plane.routes.to(part.grant)
            way = part.way = part.ways.pop(0)
            part.sink, part.counted_bytes, grant, me = sink, 0, part.grant, self.plane.me
            key = key_of(me.model, grant.version, grant.source.shard, on_host=grant.from_host)
            transport = self.plane.transports[way.scheme]
            part.read = transport.read(
                way.endpoint, key, sink, lambda error: self.plane.wake(self._read_over, part, sink, error)
            )
            part.meter = Meter(part.read)
        except TensorHubError as error:
            part.read = None
            self.loop.call_soon(self._handled, part, sink, error.with_traceback(None))

    def _read_over(self, part: Part, sink: Looking | TrustedLeg, error: TensorHubError | None) -> None:
        """In the loop, after the last byte of one read of a part."""
        if part.sink is not sink or part.read is None:
            return
        self.plane.received.count(part)
        self.log_read(part)
        part.before_bytes += part.read.received_bytes
        part.read, part.counted_bytes = None, 0
        if isinstance(error, TransportMissing) and not sink.is_stopped and part.way is not None:
            self.plane.routes.failed(part.way, part.grant, error)
            part.ways = []
            self._read(part, sink)
            return
        if type(error) is Unavailable and part.ways and not sink.is_stopped:  # for now: the next way of this grant
            self._read(part, sink)
            return
        self._handled(part, sink, error)

    def _handled(self, part: Part, sink: Looking | TrustedLeg, error: TensorHubError | None) -> None:
        part.sink, part.ways = None, []
        if isinstance(sink, TrustedLeg):
            self._leg_over(part, sink.leg, error)
        elif self._is_done:
            self._advance()
        elif isinstance(error, SessionLost) and not part.is_stopped:
            self._lose()
        else:
            self._looked(part, sink, error)

    def _leg_over(self, part: Part, leg: Leg, error: TensorHubError | None) -> None:
        if part.legs and part.legs[0] is leg:
            part.legs.popleft()
        left = self._give_up(leg)
        if self._is_done:
            self._advance()
        elif part.is_stopped:
            self._stopped(part, brought=not left and not part.legs)
        elif isinstance(error, SessionLost):
            self._lose()
        elif isinstance(error, OUR_OWN):
            self._end_soon(complete=False, failure=self.plane.failure(error))
        elif error is not None or left:
            self._failed(part, error or SourceLost(f"{part.grant.source} ended the read before its last piece"))
        else:
            self._advance()

    def _give_up(self, leg: Leg) -> int:
        """What it has not brought is missing again. Returns how much that is."""
        try:
            return self._across.ended(leg)
        except TensorHubError:  # the content was given up, and is never filled any more
            return 1

    # --- how parts end ------------------------------------------------------------------------------------------------

    def _failed(self, part: Part, error: TensorHubError) -> None:
        _log.info("%s: reading version %d from %s: %s", self.plane.me, part.grant.version, part.grant.source, error)
        self._part_over(part, failure=self.plane.failure(error))

    def _stopped(self, part: Part, *, brought: bool = False) -> None:
        if not part.is_over:
            self._part_over(part, brought=brought)

    def _part_over(self, part: Part, *, brought: bool = False, failure: Failure | None = None) -> None:
        if self._is_done or part.is_over:
            return
        while part.legs:
            self._give_up(part.legs.popleft())
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
            while part.legs:
                self._give_up(part.legs.popleft())
        if self._ending[0] and not self._touch.is_touched:  # there was no byte to write: it is there all the same
            self._touched()
        self.let_go()
        self.tell_progress()
        self.plane.forget(self.ticket)
        complete, failure = self._ending
        if failure is not None:
            _log.info("%s: reading version %d: %s", self.plane.me, self._grant.version, failure.message)
        self.tell(ReadEnded(self.ticket, complete, failure))

    def let_go(self) -> None:
        """Nothing of it runs any more, and nobody holds it."""
        self.state = State.OVER
        self._touch.let_go()
        for timer in self.timers.values():
            timer.cancel()

    def _touched(self) -> None:
        """In the loop, once."""
        if self.content is not None and self.state is not State.OVER:
            self.plane.touched(self.ticket, self._grant, self.content)

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
                self._end_soon(complete=False, failure=self.plane.failure(known(wrong, self._grant.version)))
            if self.state is State.ENDING:
                self._advance()

        self._thinks = True
        task = self.loop.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
