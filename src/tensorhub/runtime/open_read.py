"""The read that is under way at a worker: by which way it goes, and what the machine was told of it."""

import asyncio

from ..core.messages import Grant
from ..core.worker.events import ReadMeasured
from ..transport.base import Read
from ..transport.choose import Way
from .content import Content
from .routes import Meter
from .trust import TrustedSink


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

    def end(self) -> None:
        """It is over: no timer keeps it, or else those of the last half second would be there, with all they hold."""
        for handle in (self.measuring, self.looking):
            if handle is not None:
                handle.cancel()
