"""What the streams of one read share, and how many streams it has."""

import threading
from collections.abc import Sequence
from typing import Protocol

from ...protocol.errors import Refused, SourceLost, TensorHubError, Unavailable
from ...protocol.manifest import chunk_count
from ..base import Sink
from ..native.reads import Mover
from ..rows import Batches, Piecewise
from ..threads import FILES
from .settings import ChunkQueue, TcpSettings
from .wire import Refusal

# --- How many streams a read has: one more doubling as long as it brings more, and back where it does not.
#
#     count = StreamCount(settings, 1)
#     count.look(now, arrived_bytes)      now and then: how many streams the read should have from now on
#
# Rules:
# 1. A rate is that of a window of `probe_s`. The window in which streams came or went is not counted.
# 2. The number is doubled to try, and halved again unless the rate has become `GAIN` times what it was. After a trial
# in
#    vain the next one waits, each time for twice as long.
# 3. What comes slower than `probe_rate_bytes_per_s` is held up by its link: it has one stream (decision 0011).
#    No fewer, in any case, than the source has addresses: each has a link of its own.
# 4. A stream that gets `stream_rate_bytes_per_s` is held up by its core: of those there are no more than cores.
#
# Pure: it is told the time. The numbers are from decision 0030.


GAIN = 1.25  # two streams where one stream's cap is the limit give 2.0; where their link is, 1.0 and some noise
PAUSES = 8  # windows until the number is tried again that was tried in vain


class StreamCount:
    """For one read. Not thread-safe: its first thread asks."""

    def __init__(self, settings: TcpSettings, streams: int, *, cores: int, least: int = 1) -> None:
        self.streams = streams
        self._least = least
        self._settings = settings
        self._cores = cores
        self._since: float | None = None  # when the window began
        self._arrived_bytes = 0  # by then
        self._is_settling = False
        self._before: float | None = None  # the rate before the trial that is under way
        self._tried_again_at = 0.0
        self._pause_s = PAUSES * settings.probe_s

    def look(self, now: float, arrived_bytes: int) -> int:
        """So many streams from now on; `arrived_bytes` have come since the read began."""
        if self._since is None:
            self._since, self._arrived_bytes = now, arrived_bytes
        took_s = now - self._since
        if took_s < self._settings.probe_s:
            return self.streams
        rate = (arrived_bytes - self._arrived_bytes) / took_s
        self._since, self._arrived_bytes = now, arrived_bytes
        if self._is_settling:
            self._is_settling = False
        else:
            self._judge(now, rate)
        return self.streams

    def set(self, streams: int) -> None:
        """Somebody else has decided; what follows is measured anew."""
        self._change(streams)
        self._before = None

    def _judge(self, now: float, rate: float) -> None:
        before, self._before = self._before, None
        if self.streams > self._least and rate < self._settings.probe_rate_bytes_per_s:
            self._change(self._least)
        elif before is not None and rate < GAIN * before:
            self._change(max(self._least, self.streams // 2))
            self._tried_again_at, self._pause_s = now + self._pause_s, 2 * self._pause_s
        elif now >= self._tried_again_at and self._may_widen(rate):
            self._before = rate
            self._change(2 * self.streams)

    def _may_widen(self, rate: float) -> bool:
        settings, wider = self._settings, 2 * self.streams
        is_held_up_by_cores = 0 < settings.stream_rate_bytes_per_s * self.streams <= rate
        most = min(settings.most_streams, self._cores) if is_held_up_by_cores else settings.most_streams
        return wider <= most and rate > 0 and rate >= settings.probe_rate_bytes_per_s

    def _change(self, streams: int) -> None:
        self.streams, self._is_settling = streams, True


# --- What the connections of one read share: who is asked for what, what has come, and when it is over.
#
# It must never: count a byte twice that the mover has counted.


_HINTS = {
    "token": "give both workers the same token",
    "version": "install the same version of TensorHub on both workers",
    "stranger": "the endpoint belongs to another program",
    "busy": "read from another source, or raise max_connections",
}


class Waiting(Protocol):
    """What a stream waits in, such as a connection."""

    def cut(self) -> object:
        """From any thread: whoever waits looks whether the read is over."""
        ...

    @property
    def all_heard_bytes(self) -> int: ...


class Job:
    """What the streams of one read share. Thread-safe."""

    def __init__(self, settings: TcpSettings, endpoint: str, key: str, sink: Sink) -> None:
        self.settings = settings
        self.endpoint = endpoint
        self.key = key
        self.sink = sink
        self.generation = 0  # 0 until the first stream has been welcomed
        self.addresses = 1  # of the source
        self.reached: dict[int, None] = {}  # those of several that answered
        self.answered_at = 0  # the one that carries the first stream
        self.queue = ChunkQueue((), 1)
        self.batches: Batches | None = None  # what is wanted, where that is not the source's chunks
        self.mover: Mover | None = None  # if it brings the bytes, it also counts them
        self.is_over = False
        self._missing: int | None = None
        self._received_bytes = 0
        self._received_chunks = 0
        self._is_lent_to = False
        self._wires: dict[Waiting, None] = {}
        self._heard_bytes = 0  # on wires that were left
        self._lock = threading.Lock()

    def span(self, chunk: int) -> tuple[int, int]:
        """Where a chunk, or batch, begins in the sink's stream, and where it ends."""
        if self.batches is not None:
            return self.batches.span(chunk)
        start, chunk_bytes = chunk * self.sink.chunk_bytes, self.sink.chunk_bytes
        return start, min(start + chunk_bytes, self.sink.stream.size_bytes)

    def note_address(self, at: int) -> None:
        """One of several answered."""
        if not self.reached:
            self.answered_at = at
        self.reached[at] = None

    def note_wanted(self, wanted: Sequence[int], *, size_bytes: int, chunk_bytes: int) -> int:
        """The sink has begun. Returns how many of them its chunks, or batches, are worth in full chunks.

        `size_bytes` and `chunk_bytes` are the source's. Raises `SourceLost` if that is another content.
        """
        sink = self.sink
        if isinstance(sink, Piecewise):
            self.batches = sink.batches if wanted else None
            mine, count = (sink.batches.source_bytes, chunk_bytes), len(sink.batches)
            full = -(-sink.batches.size_bytes // max(1, sink.chunk_bytes))
        else:
            mine, count = (
                (sink.stream.size_bytes, sink.chunk_bytes),
                chunk_count(sink.stream.size_bytes, sink.chunk_bytes),
            )
            full = len(wanted)
        if (size_bytes, chunk_bytes) != mine:
            raise SourceLost(
                f"{self.endpoint} offers {self.key!r} as {size_bytes} B in chunks of {chunk_bytes} B,"
                f" but {mine[0]} B in chunks of {mine[1]} B are expected"
            )
        if not all(0 <= chunk < count for chunk in wanted):
            raise TensorHubError(f"the sink wants chunks of {self.key!r} that are not within 0..{count - 1}")
        return min(full, len(wanted))

    def begin(self, wanted: Sequence[int], streams: int, mover: Mover | None) -> None:
        """It is known what is wanted, and who brings it."""
        self.queue = ChunkQueue(wanted, streams)
        with self._lock:
            self._missing, self.mover = len(wanted), mover
            is_over = self.is_over
        if is_over and mover is not None:
            mover.stop()

    def have(self, streams: int) -> None:
        """So many streams are to bring chunks from now on."""
        self.queue.streams = streams
        if self.mover is not None:
            self.mover.have(streams)

    @property
    def missing(self) -> int | None:
        """Wanted chunks that are not stored yet, once known."""
        return self._missing if self.mover is None else self.mover.missing

    @property
    def received_bytes(self) -> int:
        return self._received_bytes if self.mover is None else int(self.mover.state.received_bytes)

    @property
    def received_chunks(self) -> int:
        return self._received_chunks if self.mover is None else int(self.mover.state.received_chunks)

    @property
    def is_lent_to(self) -> bool:
        """The source has lent us memory."""
        return self._is_lent_to if self.mover is None else bool(self.mover.state.is_lent_to)

    def note_lent(self) -> None:
        self._is_lent_to = True

    @property
    def arrived_bytes(self) -> int:
        """What has come so far, of chunks under way too. What needs no wire is seen when its chunk ends."""
        with self._lock:
            return max(self.received_bytes, self._heard_bytes + sum(wire.all_heard_bytes for wire in self._wires))

    def enter(self, wire: Waiting) -> None:
        with self._lock:
            self._wires[wire] = None
            is_over = self.is_over
        if is_over:
            wire.cut()

    def leave(self, wire: Waiting) -> None:
        with self._lock:
            if wire in self._wires:
                del self._wires[wire]
                self._heard_bytes += wire.all_heard_bytes

    def finish(self) -> None:
        """No more bytes are wanted: every stream returns at once, whatever it waits for."""
        with self._lock:
            self.is_over = True
            wires, mover = list(self._wires), self.mover
        if mover is not None:
            mover.stop()
        for wire in wires:
            wire.cut()

    def count_received(self, size_bytes: int, chunks: int = 1) -> None:
        with self._lock:
            self._received_bytes += size_bytes
            self._received_chunks += chunks

    def count_stored(self, chunks: int = 1) -> None:
        with self._lock:
            assert self._missing is not None, "a chunk was stored before any was wanted"
            assert self._missing >= chunks, "a chunk was stored that was not missing"
            self._missing -= chunks
            is_whole = self._missing == 0
        if is_whole:
            self.finish()  # a stream that is still connecting is not waited for

    def close(self) -> None:
        """The last stream has ended."""

    def lost(self, why: str) -> SourceLost:
        missing = "" if self.missing is None else f", {self.missing} chunks missing"
        return SourceLost(
            f"{self.endpoint} lost while reading {self.key!r} ({self.received_bytes} B done{missing}): {why}"
        )

    def refused(self, refusal: Refusal) -> TensorHubError:
        if refusal.code == "short":
            return Unavailable(f"{self.endpoint} cannot serve {self.key!r} now: {refusal.message}", hint=FILES)
        error = SourceLost(
            f"{self.endpoint} does not serve {self.key!r} ({self.received_bytes} B done): {refusal.message}",
            hint=_HINTS.get(refusal.code),
        )
        if refusal.code in ("token", "version", "stranger"):
            error.__cause__ = Refused(refusal.message)  # retrying the same source cannot help
        return error
