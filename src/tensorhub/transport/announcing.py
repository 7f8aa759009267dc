"""Where readers fetch the bytes themselves: what `local`, `cuda` and `nixl` share, at the source and at the reader.

A reader gets, once, MEMORY: where the bytes lie, as its transport says it; and for chunks that are there

    source  READY   chunks [`number`, number + n) are there; n is the body

and its requests carry as their `number` how many bytes it has read so far on this connection: that is what is counted.
It must never: send a chunk.
"""

import select
import struct
import time
from collections.abc import Sequence
from contextlib import suppress

from ..protocol.errors import TensorHubError, TransportMissing
from .ranges import Batches
from .tcp import wire as tcp_wire
from .tcp.reader import Job, Stream
from .tcp.server import ServedExport, TcpServer
from .tcp.wire import Garbled, Refusal, Vanished, Welcome, Wire

READY, MEMORY_FRAME = 16, 17
COUNT = struct.Struct("=Q")
MAX_MEMORY_BYTES = 64 << 20  # 2 million pieces and more


class AnnouncingServer(TcpServer):
    """Says which chunks are there, and counts what its readers say that they have read."""

    is_announcing = True

    def send(self, wire: Wire, served: ServedExport, start: int, stop: int) -> int:
        """Announce all of [start, stop) that is there, up to the first gap."""
        progress = served.export.progress
        end = start + 1
        while end < stop and progress.has(end):
            end += 1
        self.announce(wire, start, end)
        return end

    def announce(self, wire: Wire, start: int, stop: int) -> None:
        """Say that chunks, or batches, [start, stop) are there."""
        wire.send_frame(READY, start, [COUNT.pack(stop - start)])

    def heard(self, wire: Wire, served: ServedExport, number: int) -> None:
        """The reader has read that many bytes on this connection, so it says."""
        with self._changed:
            news = number - served.inside.get(wire, 0)
            if 0 < news <= served.export.stream.size_bytes:
                served.inside[wire] = number
                served.sent_bytes += news
                self._counts["sent_bytes"] += news
                self._counts["sent_chunks"] += -(-news // served.export.chunk_bytes)


class AnnouncedJob(Job):
    """What the threads of one read share."""

    def refused(self, refusal: Refusal) -> TensorHubError:
        if refusal.code in ("user", "memory"):  # no fault of the source: another transport may do
            return TransportMissing(f"{self.endpoint} cannot serve {self.key!r} this way: {refusal.message}")
        return super().refused(refusal)


class AnnouncedStream(Stream):
    """A reader's connection on which chunks are announced, and not sent."""

    def __init__(self, job: Job, wire: Wire, index: int) -> None:
        super().__init__(job, wire, index)
        self._ready = range(0)  # announced, and not yet begun
        self._read_bytes = self._told_bytes = 0
        self.size_bytes = 0  # of the source's stream
        self._end: Exception | None = None  # the source has ended the export after what it announced last

    def greet(self, *, wants_manifest: bool) -> Welcome:
        welcome = super().greet(wants_manifest=wants_manifest)
        self.size_bytes = welcome.size_bytes
        return welcome

    def ask(self, chunks: Sequence[int]) -> None:
        self._told_bytes = self._read_bytes
        with suppress(Vanished):  # what the source said last can still be read
            self.wire.send_want(chunks, self._read_bytes)

    def await_chunk(self, chunk: int, size_bytes: int) -> None:
        if not self._ready:
            if self._end is not None:
                raise self._end
            self._note_ready(*self.next_frame(), chunk)
        if self._ready[0] != chunk:
            raise Garbled(f"chunk {self._ready[0]} is announced where chunk {chunk} was due")
        self._ready = self._ready[1:]

    def has_ready(self, chunk: int) -> bool:
        """Whether this chunk, the next due, is announced already. Takes one frame at most, and waits for none."""
        if not self._ready and self._end is None and is_readable(self.wire):
            kind, length, number = self.receive_header()
            if kind == tcp_wire.GONE:
                self._end = self.job.refused(self.wire.receive_gone(length))
            elif kind != tcp_wire.WAITING or length:
                self._note_ready(kind, length, number, chunk)
        return bool(self._ready)

    def await_some(self, asked: Sequence[int], at: int, most: int) -> range:
        """Wait until `asked[at]`, the next due, comes. Returns it, and what follows it and has come by now."""
        first, count, most = asked[at], 1, min(most, len(asked) - at)
        if isinstance(asked, range):
            count = most
        while count < most and asked[at + count] == first + count:
            count += 1
        chunks = range(first, first + count)
        self.await_chunk(first, 0)
        count = 1
        while count < len(chunks) and self.has_ready(chunks[count]):
            self.await_chunk(chunks[count], 0)
            more = min(len(self._ready), len(chunks) - count - 1)
            self._ready = self._ready[more:]
            count += 1 + more
        return chunks[:count]

    def _note_ready(self, kind: int, length: int, first: int, chunk: int) -> None:
        if kind != READY or length != COUNT.size:
            raise Garbled(f"frame {kind} with {length} B where chunk {chunk} was due")
        (count,) = COUNT.unpack(self.wire.receive_body(length, COUNT.size))
        if count < 1 or first + count > 1 << 62:
            raise Garbled(f"chunks {first} and {count} more are announced")
        self._ready = range(first, first + count)

    def note_read(self, size_bytes: int, *, is_last: bool) -> None:
        """So many bytes more have come. The source is told with the next request, or now if there may be none."""
        self._read_bytes += size_bytes
        if is_last and self._read_bytes > self._told_bytes:
            self.ask(())

    def why_ended(self) -> Exception:
        """What ended the export, as the source says it within `silence_s`, or else that it is gone."""
        deadline = time.monotonic() + self.job.settings.silence_s
        while self._end is None:
            kind, length, _ = self.receive_header()
            if kind == tcp_wire.GONE:
                return self.job.refused(self.wire.receive_gone(length))
            self.wire.receive_body(length, COUNT.size)
            if time.monotonic() > deadline:
                return self.job.lost("its export has ended, and it does not say why")
        return self._end


class AnnouncedTiles(AnnouncedStream):
    """One connection of a read of tiles of another layout. The source sends batches of short runs."""

    _is_sent = False  # the batch that comes

    @property
    def sent_below_bytes(self) -> int:
        """Batches are sent whose runs are shorter on an average. 0: all are fetched."""
        raise NotImplementedError

    @property
    def _batches(self) -> Batches:
        assert self.job.batches is not None, "bytes of tiles before it is known which"
        return self.job.batches

    def send_batches(self) -> None:
        batches = self.job.batches
        if batches is not None and self.index == 0 and (below := self.sent_below_bytes):
            rows, firsts = batches.rows, batches.first_row
            short = [rows.run_bytes(firsts[at], firsts[at + 1]) < below for at in range(len(batches))]
            self.job.batches = batches.sending(short)
        super().send_batches()

    def await_chunk(self, chunk: int, size_bytes: int) -> None:
        self._is_sent = self._batches.is_sent(chunk)
        if self._is_sent:
            Stream.await_chunk(self, chunk, size_bytes)
        else:
            super().await_chunk(chunk, size_bytes)

    def receive_bytes(self, start: int, stop: int, views: Sequence[memoryview]) -> None:
        if self._is_sent:
            self.wire.receive_into(views)
        else:
            super().receive_bytes(start, stop, views)

    def taken(self, size_bytes: int) -> None:
        if self._is_sent:
            self.note_read(size_bytes, is_last=not self.asked)
        else:
            super().taken(size_bytes)


def is_readable(wire: Wire) -> bool:
    """Something has come that was not received yet."""
    poll = select.poll()
    poll.register(wire.sock, select.POLLIN)
    return bool(poll.poll(0))
