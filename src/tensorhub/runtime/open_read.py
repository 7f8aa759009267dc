"""The read that is under way at a worker: by which way it goes, and what the machine was told of it."""

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Protocol

from ..core.messages import MAX_CROSS_SITE_VERSIONS, MAX_SOURCES, Grant
from ..core.names import Version, WorkerId
from ..core.sums import add_up
from ..core.worker.events import ReadMeasured
from ..memory.room import size_text
from ..transport.base import Read
from ..transport.choose import Way
from .content import Content
from .routes import Meter
from .trust import TrustedSink

_log = logging.getLogger(__name__)


class Counted(Protocol):
    """A read whose bytes are counted."""

    grant: Grant
    read: Read | None
    way: Way | None
    counted_bytes: int


class OpenRead:
    """One read, from its grant to its end. `read` is None before it begins on its first way."""

    def __init__(self, grant: Grant, content: Content, sink: TrustedSink) -> None:
        self.grant = grant
        self.content = content
        self.sink = sink
        self.ways: list[Way] = []  # left to try
        self.way: Way | None = None  # under way
        self.read: Read | None = None
        self.meter: Meter | None = None
        self.counted_bytes = 0
        self.measured: ReadMeasured | None = None
        self.told = -1
        self.is_opened = False  # it has the manifest, and waits
        self.is_waking = False
        self.measuring: asyncio.Handle | None = None  # the next look at its rate
        self.looking: asyncio.Handle | None = None  # the next look at its progress

    def log_end(self, me: WorkerId) -> None:
        """For people: how it went."""
        if self.way is not None and self.meter is not None and self.counted_bytes:
            found, grant = self.meter.average(), self.grant
            _log.info(
                "%s has read %s of version %d from %s by %s (%s) at %.1f MiB/s%s",
                *(me, size_text(self.counted_bytes), grant.version, grant.source),
                *(self.way.scheme, found.path, found.rate_bytes_per_s / 2**20),
                f"; not by {self.way.why}" if self.way.why else "",
            )

    def end(self) -> None:
        """It is over: no timer keeps it, or else those of the last half second would be there, with all they hold."""
        for handle in (self.measuring, self.looking):
            if handle is not None:
                handle.cancel()


@dataclass
class Received:
    """Bytes that came by reads."""

    by_replica: dict[str, int] = field(default_factory=dict)  # of the sources: the latest few, and all others
    cross_site: dict[int, int] = field(default_factory=dict)  # by version: from other sites, the latest few
    by_transport: dict[str, int] = field(default_factory=dict)

    def count(self, reading: Counted) -> None:
        """What is new of that read."""
        if reading.read is None:
            return
        replica, received = reading.grant.source.replica, reading.read.received_bytes
        news, reading.counted_bytes = received - reading.counted_bytes, received
        if not news:  # a source that was tried, and was not there, is none
            return
        add_up(self.by_replica, replica, news, most=MAX_SOURCES)
        if reading.grant.is_cross_site:
            self._count_cross_site(reading.grant.version, news)
        if reading.way is not None:
            self.by_transport[reading.way.scheme] = self.by_transport.get(reading.way.scheme, 0) + news

    def _count_cross_site(self, version: Version, size_bytes: int) -> None:
        self.cross_site[version] = self.cross_site.pop(version, 0) + size_bytes
        while len(self.cross_site) > MAX_CROSS_SITE_VERSIONS:
            del self.cross_site[next(iter(self.cross_site))]
