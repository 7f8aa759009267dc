"""A read of pieces from device to device: batches land in memory of bounded size, and go on once they are right.

Like `local_pieces`, for a reader that has opened the source's device memory. The device gathers a window of batches
from rows of that memory, and hashes each tile. The window counts only if the source's seal was seen after that. Then
the digests are compared, and the device puts the tiles in place. So no byte of a wrong tile is in a registered tensor.

It must never: put a tile in place before it was judged.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from ..protocol.errors import TransportMissing
from ..protocol.manifest import DIGEST_BYTES
from .announcing import AnnouncedStream
from .base import Sink, Terms
from .on_device import WINDOWS, Landing, OnDevice, Opened, on_device
from .ranges import Counting, Piecewise, Scatter
from .tcp.wire import Vanished

ASK_BATCHES = 1 << 14  # at once
TELL_EVERY_S = 0.05  # a sink looks at all that is missing when it is told


def target_of(sink: Sink) -> OnDevice | None:
    """The registered tensors that pieces belong to. None: the sink wants none. Raises `TransportMissing`."""
    if not isinstance(sink, Counting):
        return None
    terms = sink.terms()
    target = on_device(terms.scatter.stream) if terms is not None and terms.scatter is not None else None
    if target is None:
        raise TransportMissing("the tensors here are not all on a device", hint="use tcp")
    return target


def read_pieces(
    stream: AnnouncedStream, source: Opened, check_seal: Callable[[], None], rest: Callable[[float], None] | None
) -> None:
    """Bring all that is wanted. `check_seal` raises what ended the export, if it has ended.

    With `rest` one window is under way at a time, and it is called after each, with the seconds that this one took.
    """
    job = stream.job
    wanted = job.queue.take(1 << 62)
    if not wanted:
        return
    target, sink = target_of(job.sink), job.sink
    assert target is not None
    assert isinstance(sink, Counting)
    terms = sink.terms()
    assert terms is not None
    assert terms.scatter is not None
    assert job.batches is not None
    landing = target.land(source, job.batches, terms.scatter, digests=terms.digests is not None)
    try:
        reading = _Reading(stream, sink, landing, terms, terms.scatter, check_seal, rest)
        for first in range(0, len(wanted), ASK_BATCHES):
            reading.bring(wanted[first : first + ASK_BATCHES])
    finally:
        landing.close()


class _Reading:
    """One read by one thread."""

    def __init__(
        self,
        stream: AnnouncedStream,
        sink: Counting,
        landing: Landing,
        terms: Terms,
        scatter: Scatter,
        check_seal: Callable[[], None],
        rest: Callable[[float], None] | None,
    ) -> None:
        self._stream = stream
        self._rest, self._most = rest, WINDOWS if rest is None else 1
        self._began = 0.0
        self._sink = sink  # to ask what a protocol is takes 30 us
        self._landing = landing
        self._digests = terms.digests
        self._first_tile = scatter.first_tile
        self._check_seal = check_seal
        self._under_way: deque[range] = deque()
        self._news_bytes, self._told_at = 0, time.monotonic()

    def bring(self, asked: Sequence[int]) -> None:
        """Ask for these batches, and bring them in windows of what is there."""
        stream, at = self._stream, 0
        with suppress(Vanished):  # what the source said last can still be read
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
        first, count = asked[at], 1
        most = min(self._landing.reach(first) - first, len(asked) - at)
        while count < most and asked[at + count] == first + count:
            count += 1
        window = range(first, first + self._stream.await_some(range(first, first + count)))
        self._began = time.monotonic()
        self._landing.gather(window)
        self._under_way.append(window)
        return len(window)

    def _finish(self, *, is_last: bool) -> None:
        """Judge the earliest window, and put it in place."""
        stream, job, window = self._stream, self._stream.job, self._under_way.popleft()
        digests = self._landing.digests()
        self._check_seal()
        size_bytes = job.span(window[-1])[1] - job.span(window[0])[0]
        stream.note_read(size_bytes, is_last=is_last)
        job.count_received(size_bytes, len(window))
        self._judge(window, digests)
        job.sink.touch()
        self._landing.scatter()
        self._sink.count(window)
        self._news_bytes += size_bytes
        if is_last or time.monotonic() - self._told_at >= TELL_EVERY_S:
            self._tell()
        job.count_stored(len(window))
        if self._rest is not None:
            self._rest(time.monotonic() - self._began)

    def _judge(self, window: range, digests: bytes) -> None:
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
