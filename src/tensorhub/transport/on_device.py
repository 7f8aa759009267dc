"""Streams in device memory: what a device can do for two processes of one host, and reads of tiles between them.

The memory layer implements the protocols for CUDA. Tests implement them on shared host memory.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ..protocol.errors import TransportMissing
from ..protocol.manifest import DIGEST_BYTES
from .announcing import AnnouncedStream
from .base import ByteStream, Sink
from .ranges import Batches, Piecewise, Scatter, TrustingBatches

WINDOWS = 2  # of a landing that are under way at a time: the device gathers one while the host checks the other


@dataclass(frozen=True)
class Shared:
    """A stream's memory, shared: as long as this is known, other processes can open it, and may have it open."""

    body: bytes  # what they need for that
    memory: object = None  # is given up when nothing knows it any more


class Opened(Protocol):
    """Another process's stream, or a part of it, open here. It is closed when nothing knows it any more."""

    @property
    def size_bytes(self) -> int: ...


class RingMemory(Protocol):
    """Memory that a source and one reader have open, and that the devices of both can reach."""

    @property
    def handle(self) -> bytes:
        """What the reader's device opens it by."""
        ...

    def part(self, at: int, start: int, stop: int) -> Opened:
        """The memory from its byte `at` on, seen as bytes [start, stop) of a stream."""
        ...

    def close(self) -> None:
        """Release the memory: no copy runs there any more. Idempotent."""
        ...


class Landing(Protocol):
    """Device memory of bounded size, where batches of another layout land before they go to their places.

    At most `WINDOWS` windows of batches are under way. One thread uses it. All methods raise `TransferError`.
    """

    def reach(self, first: int) -> int:
        """The batch behind the last one of the largest window that begins with this one."""
        ...

    def gather(self, batches: range) -> None:
        """Begin to bring these batches from the source. Returns at once."""
        ...

    def digests(self) -> bytes:
        """Wait for the earliest window under way: the digest of each of its tiles, 16 bytes each, if they are made."""
        ...

    def scatter(self) -> None:
        """Put the earliest window under way in place. Returns when it is."""
        ...

    def close(self) -> None:
        """Wait for what is under way, put none of it in place, and give the memory back."""
        ...


@runtime_checkable
class OnDevice(Protocol):
    """A stream whose bytes may lie on a device."""

    @property
    def device(self) -> str:
        """Its name in this process, where all of it is on one."""
        ...

    @property
    def is_on_device(self) -> bool:
        """True if all bytes lie on one device that can copy and digest them."""
        ...

    def share(self) -> Shared:
        """Share the memory with all readers. Raises `TransportMissing` where this memory cannot be shared."""
        ...

    def open(self, body: bytes) -> Opened:
        """Open memory that another process has shared. Raises `TransportMissing`, or `ValueError`: malformed."""
        ...

    def make_ring(self, size_bytes: int) -> RingMemory:
        """New memory of this device that another process can open. Raises `TransportMissing`."""
        ...

    def open_ring(self, handle: bytes, size_bytes: int) -> RingMemory:
        """Open a ring that another process has made. Raises `TransportMissing`, or `ValueError`: malformed."""
        ...

    def pin_ring(self, address: int, size_bytes: int) -> RingMemory:
        """Pin host memory as a ring. It must stay mapped until the ring is closed. Raises `TransportMissing`."""
        ...

    def copy_to(self, target: Opened, start: int, stop: int, chunk_bytes: int) -> None:
        """Copy bytes [start, stop) there, which begin with a chunk. Returns when they are there.

        Raises `TransferError`.
        """
        ...

    def copy_from(self, source: Opened, start: int, stop: int, chunk_bytes: int, *, digests: bool) -> bytes:
        """Copy bytes [start, stop), which begin with a chunk. Returns when they are here, with the chunks' digests.

        Those are 16 bytes each, one behind the other; nothing without `digests`. Raises `TransferError`.
        """
        ...

    def digests_of(self, start: int, stop: int, chunk_bytes: int) -> bytes:
        """Of chunks that are here. Bytes [start, stop) begin with a chunk. Raises `TransferError`."""
        ...

    def land(self, source: Opened, batches: Batches, scatter: Scatter, *, digests: bool) -> Landing:
        """For batches that belong here. Raises `TransportMissing` where they cannot come this way, `TransferError`."""
        ...


def on_device(stream: ByteStream) -> OnDevice | None:
    """The stream, if all of it lies on a device."""
    return stream if isinstance(stream, OnDevice) and stream.is_on_device else None


# --- Tiles of another layout: batches land in memory of bounded size, and go on once they are right.
#
# The device gathers a window of batches from the source's memory, and hashes each tile. The window counts only if the
# source's seal was seen after that. Then the digests are compared, and the device puts the tiles in place. No byte of a
# wrong tile comes into a registered tensor.


ASK_BATCHES = 1 << 14  # at once
TELL_EVERY_S = 0.05  # a sink looks at all that is missing when it is told


def target_of(sink: Sink) -> OnDevice | None:
    """The registered tensors that pieces belong to. None: the sink wants none. Raises `TransportMissing`."""
    if not isinstance(sink, TrustingBatches):
        return None
    terms = sink.terms()
    target = on_device(terms.scatter.stream) if terms is not None and terms.scatter is not None else None
    if target is None:
        raise TransportMissing("the tensors here are not all on a device", hint="use tcp")
    return target


def read_tiles(
    stream: AnnouncedStream, source: Opened, check_seal: Callable[[], None], rest: Callable[[float], None] | None
) -> None:
    """Bring all that is wanted. `check_seal` raises what ended the export, if it has ended.

    With `rest` one window is under way at a time, and it is called after each, with the seconds that this one took.
    """
    wanted = stream.job.queue.take(1 << 62)
    if not wanted:
        return
    reading = _Reading(stream, source, check_seal, rest)
    try:
        for first in range(0, len(wanted), ASK_BATCHES):
            reading.bring(wanted[first : first + ASK_BATCHES])
    finally:
        reading.landing.close()


class _Reading:
    """One read by one thread."""

    def __init__(
        self,
        stream: AnnouncedStream,
        source: Opened,
        check_seal: Callable[[], None],
        rest: Callable[[float], None] | None,
    ) -> None:
        job, sink, target = stream.job, stream.job.sink, target_of(stream.job.sink)
        assert target is not None
        assert isinstance(sink, TrustingBatches)
        terms = sink.terms()
        assert terms is not None
        assert terms.scatter is not None
        assert job.batches is not None
        self.landing = target.land(source, job.batches, terms.scatter, digests=terms.digests is not None)
        self._stream = stream
        self._rest, self._most = rest, WINDOWS if rest is None else 1
        self._began = 0.0
        self._sink = sink  # to ask what a protocol is takes 30 us
        self._digests = terms.digests
        self._first_tile = terms.scatter.first_tile
        self._check_seal = check_seal
        self._under_way: deque[range] = deque()
        self._news_bytes, self._told_at = 0, time.monotonic()

    def bring(self, asked: Sequence[int]) -> None:
        """Ask for these batches, and bring them in windows of what is there."""
        stream, at = self._stream, 0
        stream.ask(asked)
        while (at < len(asked) or self._under_way) and not stream.job.is_over:
            is_room = at < len(asked) and len(self._under_way) < self._most
            is_ready = is_room and stream.has_ready(asked[at])
            if not is_ready and not self._under_way:
                self._tell()  # before it waits for the source
            if is_ready or not self._under_way:
                at += self._begin(asked, at)
            else:
                self._finish(is_last=at == len(asked) and len(self._under_way) == 1)

    def _begin(self, asked: Sequence[int], at: int) -> int:
        """The next window: batches that follow each other, are there and have room. Returns how many."""
        most = self.landing.reach(asked[at]) - asked[at]
        window = self._stream.await_some(asked, at, most)
        self._began = time.monotonic()
        self.landing.gather(window)
        self._under_way.append(window)
        return len(window)

    def _finish(self, *, is_last: bool) -> None:
        """Judge the earliest window, and put it in place."""
        stream, job, window = self._stream, self._stream.job, self._under_way.popleft()
        digests = self.landing.digests()
        self._check_seal()
        size_bytes = job.span(window[-1])[1] - job.span(window[0])[0]
        stream.note_read(size_bytes, is_last=is_last)
        job.count_received(size_bytes, len(window))
        self._check(window, digests)
        job.sink.touch()
        self.landing.scatter()
        self._sink.count(window)
        self._news_bytes += size_bytes
        if is_last or time.monotonic() - self._told_at >= TELL_EVERY_S:
            self._tell()
        job.count_stored(len(window))
        if self._rest is not None:
            self._rest(time.monotonic() - self._began)

    def _check(self, window: range, digests: bytes) -> None:
        """Raises for the first tile that is not as announced."""
        if self._digests is None:
            return
        first = self._first_tile[window.start]
        announced = self._digests[DIGEST_BYTES * first : DIGEST_BYTES * self._first_tile[window.stop]]
        if digests == announced:
            return
        sink = self._stream.job.sink
        assert isinstance(sink, Piecewise)
        pairs = zip(memoryview(digests).cast("B"), announced, strict=True)
        raise sink.wrong_tile(first + next(at for at, (one, other) in enumerate(pairs) if one != other) // DIGEST_BYTES)

    def _tell(self) -> None:
        news, self._news_bytes, self._told_at = self._news_bytes, 0, time.monotonic()
        if news:
            self._sink.told(news)
