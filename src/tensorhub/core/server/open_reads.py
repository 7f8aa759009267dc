"""The reads that may be going on: every grant from when it is given until its reader says that it is closed.

A read that was taken back is *void*. It no longer counts, but it stays open until its reader confirms that it has
stopped: its source must not change a buffer that somebody may still be reading.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf
from typing import TypeVar

from ..messages import Grant
from ..names import Ticket, Version, WorkerId
from .lines import Line
from .pace import Pace

K = TypeVar("K")


@dataclass
class OpenRead:
    """One grant and whether it still holds."""

    grant: Grant
    reader: WorkerId
    line: Line  # of its reader
    is_void: bool = False
    looked_at: float = inf  # when it was granted, or a better source was last looked for
    began_at: float = inf  # when it could bring something
    had: float = 0.0  # the share of the version that was in place by then
    pace: Pace = field(default_factory=Pace)
    instead_of: WorkerId | None = None  # a slow source that was left for its own source
    must_beat: float = 0.0  # where it gets so much, that one was at fault
    shares: bool = False  # it maps the host copy of its source: there is nothing to read behind it
    part: Line | None = None  # of its source, where that is cut in another way: one of several that its reader has

    def __post_init__(self) -> None:
        self.ticket: Ticket = self.grant.ticket
        self.source: WorkerId = self.grant.source
        self.version: Version = self.grant.version


class OpenReads:
    """All open reads, found by reader and by source. Each method takes as long as the reads it returns."""

    def __init__(self) -> None:
        self.current: dict[WorkerId, OpenRead] = {}  # by reader: the one read that it may go on with, which is not void
        self.parts: dict[WorkerId, dict[Line, OpenRead]] = {}  # of a read across, by reader; `current` is one of them
        self._of_reader: dict[WorkerId, dict[Ticket, OpenRead]] = {}
        # by reader and ticket: a worker that lies may repeat a ticket number
        self._from_source: dict[WorkerId, dict[tuple[WorkerId, Ticket], OpenRead]] = {}

    def add(self, read: OpenRead) -> None:
        self._of_reader.setdefault(read.reader, {})[read.ticket] = read
        self._from_source.setdefault(read.source, {})[read.reader, read.ticket] = read
        if read.is_void:
            return
        if read.part is None:
            self.current[read.reader] = read
        else:
            self.parts.setdefault(read.reader, {})[read.part] = read
            self.current.setdefault(read.reader, read)

    def take_back(self, read: OpenRead) -> None:
        """It is void from now on."""
        read.is_void = True
        self._goes_on_without(read)

    def _goes_on_without(self, read: OpenRead) -> None:
        """Its reader may not go on with it: with its other parts, if it has any."""
        parts = self.parts.get(read.reader, {})
        if read.part is not None and parts.get(read.part) is read:
            del parts[read.part]
            if not parts:
                del self.parts[read.reader]
        if self.current.get(read.reader) is read:
            del self.current[read.reader]
            if parts:
                self.current[read.reader] = next(iter(parts.values()))

    def going_on(self, reader: WorkerId) -> list[OpenRead]:
        """What it may go on with: one read, or the parts of one."""
        current = self.current.get(reader)
        if current is None or current.part is None:
            return [] if current is None else [current]
        return list(self.parts[reader].values())

    def of(self, reader: WorkerId) -> list[OpenRead]:
        return list(self._of_reader.get(reader, {}).values())

    def from_source(self, source: WorkerId) -> list[OpenRead]:
        return list(self._from_source.get(source, {}).values())

    def from_buffer(self, source: WorkerId, version: Version) -> list[OpenRead]:
        """Those that read that version from its buffer, which may not change meanwhile."""
        reads = self._from_source.get(source, {}).values()
        return [read for read in reads if not read.grant.from_host and read.version == version]

    def from_copy(self, source: WorkerId, version: Version) -> list[OpenRead]:
        """Those of its host copy of that version."""
        reads = self._from_source.get(source, {}).values()
        return [read for read in reads if read.grant.from_host and read.version == version]

    def load(self, source: WorkerId) -> int:
        """How many reads are open on it."""
        return len(self._from_source.get(source, {}))

    def close(self, reader: WorkerId, upto: Ticket | None, beside: Collection[Ticket] = ()) -> list[OpenRead]:
        """The reader's reads up to that ticket (None: all of them) are over, and those. Returns them."""
        if reader not in self._of_reader:
            return []
        over = [read for read in self.of(reader) if upto is None or read.ticket <= upto or read.ticket in beside]
        for read in over:
            self._goes_on_without(read)
            _forget(self._of_reader, reader, read.ticket)
            _forget(self._from_source, read.source, (reader, read.ticket))
        return over

    def readers_behind(self, worker: WorkerId, version: Version) -> dict[WorkerId, None]:
        """The worker itself, those who read the version from it, those who read it from them, and so on."""
        found: dict[WorkerId, None] = {worker: None}
        queue = [worker]
        while queue:
            for read in self._from_source.get(queue.pop(), {}).values():
                if read.version == version and read.reader not in found:
                    found[read.reader] = None
                    queue.append(read.reader)
        return found

    def chain(self, reader: WorkerId) -> list[WorkerId]:
        """The source of the reader, the source of that one for the same version, and so on; each of them once."""
        found: list[WorkerId] = []
        read = self.current.get(reader)
        version = read.version if read is not None else None
        while read is not None and read.version == version and read.source not in found:
            found.append(read.source)
            read = self.current.get(read.source)
        return found

    def all(self) -> list[OpenRead]:
        return [read for reads in self._of_reader.values() for read in reads.values()]


def _forget(table: dict[WorkerId, dict[K, OpenRead]], key: WorkerId, name: K) -> None:
    reads = table[key]
    del reads[name]
    if not reads:
        del table[key]
