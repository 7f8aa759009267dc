"""A read of pieces by NIXL: rows of the source's memory, fetched parcel by parcel into memory of our own, or sent.

A run of a row is a descriptor at the source. Here all of a parcel is one: it lands in host memory of the read's own,
and is put into place from there. So the tensors need no addresses, and what comes late can never reach them. Where the
runs of a parcel are short on an average it is sent instead: a descriptor costs some microseconds, whatever its length.

It must never: write into tensors by itself. The kernel does, which says so where they were freed.
"""

import ctypes
import mmap
import os
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from ..core.errors import HostMemoryFull, TransportMissing
from . import shortages
from .nixl_agent import Broken
from .nixl_memory import Place
from .nixl_path import HOST
from .nixl_reader import USE_TCP, NixlStream
from .parcels import Parcels
from .rows import RowStream
from .shortages import MEMORY
from .tcp_stream import Stream
from .tcp_wire import Unreadable
from .views import advance, batch, flat

SENT_BELOW_BYTES = 16384  # runs that are shorter on an average are sent


class Landing:
    """Host memory of one thread, in which a parcel lands; a file too, so that the kernel can put it into place."""

    def __init__(self, size_bytes: int) -> None:
        """Raises `HostMemoryFull`."""
        self.size_bytes = max(1, size_bytes)
        try:
            self._file = os.memfd_create("tensorhub-landing")
            weakref.finalize(self, os.close, self._file).atexit = False
            os.ftruncate(self._file, self.size_bytes)
            self._memory = mmap.mmap(self._file, self.size_bytes)
        except (OSError, MemoryError) as error:
            shortages.note(error, did="it made room for what NIXL brings")
            text = f"this process may have no {self.size_bytes} B for what NIXL brings: {error or 'no memory'}"
            raise HostMemoryFull(text, hint=MEMORY) from error
        self._anchor = ctypes.c_char.from_buffer(self._memory)

    @property
    def place(self) -> Place:
        return Place(HOST, ctypes.addressof(self._anchor), self.size_bytes)

    def put(self, views: Sequence[memoryview]) -> None:
        """Its first bytes into the views. Raises `Unreadable` if their memory is not there any more."""
        pending, first, at = [flat(view) for view in views if view.nbytes], 0, 0
        while first < len(pending):
            try:
                moved = os.preadv(self._file, batch(pending, first), at)
            except OSError as error:
                raise Unreadable(str(error)) from error
            at, first = at + moved, advance(pending, first, moved)


class Lying:
    """Where any part of a source's stream lies."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places
        self._starts = array("Q", accumulate((place.size_bytes for place in places), initial=0))

    def part(self, start: int, stop: int) -> Iterator[Place]:
        """Bytes [start, stop), which lie within the stream."""
        index = bisect_right(self._starts, start) - 1
        while start < stop:
            place, inside = self._places[index], start - self._starts[index]
            size_bytes = min(place.size_bytes - inside, stop - start)
            yield Place(place.device, place.address + inside, size_bytes)
            start, index = start + size_bytes, index + 1


class NixlPieces(NixlStream):
    """One connection of such a read."""

    _landing: Landing | None = None
    _lying: Lying | None = None

    @property
    def _parcels(self) -> Parcels:
        assert self.job.parcels is not None, "bytes of pieces before it is known which"
        return self.job.parcels

    def send_parcels(self) -> None:
        parcels = self.job.parcels
        if parcels is not None and self.index == 0:
            rows, firsts = parcels.rows, parcels.first_row
            short = [rows.run_bytes(firsts[at], firsts[at + 1]) < SENT_BELOW_BYTES for at in range(len(parcels))]
            self.job.parcels = parcels.sending(short)
        Stream.send_parcels(self)

    def join_in(self) -> None:
        """And have memory for what is to land here."""
        super().join_in()
        if not all(map(self._parcels.is_sent, range(len(self._parcels)))):
            self._ready_to_land()

    def await_chunk(self, chunk: int, size_bytes: int) -> None:
        if self._parcels.is_sent(chunk):
            Stream.await_chunk(self, chunk, size_bytes)
        else:
            super().await_chunk(chunk, size_bytes)

    def taken(self, size_bytes: int) -> None:
        self.note_read(size_bytes, is_last=not self.asked)

    def _receive_chunk(self, chunk: int) -> None:
        if self._parcels.is_sent(chunk):
            Stream._receive_chunk(self, chunk)
            return
        job, sink = self.job, self.job.sink
        start, stop = job.span(chunk)
        self.await_chunk(chunk, stop - start)
        landing = self._fetched(start, stop)
        sink.touch()
        with sink.stream.writing(start, stop) as views:
            landing.put(views)
            self._judge(chunk, stop - start, views)
        sink.stored(chunk)
        job.count_stored()

    def _fetched(self, start: int, stop: int) -> Landing:
        """Has bytes [start, stop) of the parcels' stream, which were those of the export when they were read."""
        landing, lying = self._ready_to_land()
        theirs = [
            place
            for at, length in RowStream.ranges_of(self._parcels.rows, start, stop)
            for place in lying.part(at, at + length)
        ]
        try:
            plan = self._meeting.plan_of(landing.place._replace(size_bytes=stop - start), theirs)
        except Broken as error:
            raise self._left(f"NIXL cannot read its memory: {error}", TransportMissing) from error
        try:
            self._fetch(plan, 0, 0, stop - start)
        finally:
            plan.close()
        return landing

    def _ready_to_land(self) -> tuple[Landing, Lying]:
        """Memory for the largest parcel, and the source's.

        Raises `HostMemoryFull`, and `TransportMissing` if NIXL cannot have ours.
        """
        if self._landing is None or self._lying is None:
            landing = Landing(self._parcels.most_bytes)
            try:
                self._meeting.agent.know(landing, landing.place)
            except Broken as error:
                raise TransportMissing(f"NIXL cannot register host memory here: {error}", hint=USE_TCP) from error
            self._landing, self._lying = landing, Lying(self._meeting.memory.as_places())
        return self._landing, self._lying
