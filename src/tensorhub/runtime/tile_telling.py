"""What a read of tiles tells of itself: to the machine, how far it is and how much comes; to people, how it went."""

import asyncio
import logging

from ..core.names import Ticket
from ..core.worker.events import Event, ReadAdvanced, ReadMeasured
from ..core.worker.events_across import PartMeasured
from ..memory.room import size_text
from .content import Content
from .routes import MEASURE_EVERY_S
from .tile_parts import Part, Plane, State

_log = logging.getLogger(__name__)

TELL_EVERY_S = 0.05


class Telling:
    """The half of a read that only looks. Progress is told at most every 50 ms, and not before it was started."""

    def __init__(self, plane: Plane, ticket: Ticket, *, is_across: bool) -> None:
        self.ticket = ticket
        self.content: Content | None = None
        self.plane = plane
        self.is_across = is_across
        self.state = State.LOOKING
        self.parts: dict[Ticket, Part] = {}
        self.loop = asyncio.get_running_loop()
        self.timers: dict[str, asyncio.Handle] = {}
        self.is_begun = False  # what it fills is known to the machine
        self._told = -1
        self._is_waking = False

    def tell(self, event: Event) -> None:
        self.plane.tell(event)

    def stored(self) -> None:
        """In a transport's thread: more is in place. Wakes the loop, unless it is about to look anyway."""
        if not self._is_waking:
            self._is_waking = True
            self.plane.wake(self._look_at_progress)

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
                self.plane.received.count(part)
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
            *(self.plane.me, size_text(found.arrived_bytes), part.grant.version, part.grant.source),
            *(part.way.scheme, found.path, found.rate_bytes_per_s / 2**20),
            f"; not by {part.way.why}" if part.way.why else "",
        )
