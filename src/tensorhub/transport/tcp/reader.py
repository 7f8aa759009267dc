"""The reader's side of the tcp transport: one read over several streams."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Protocol, TypeVar

from ...protocol.errors import (
    CorruptTransfer,
    Refused,
    SessionLost,
    SourceLost,
    TensorHubError,
    Unavailable,
    UsageError,
)
from ...protocol.manifest import chunk_count
from .. import threads as shortages
from ..base import MAX_MANIFEST_BYTES, OnEnd, Read, Scarce, Sharing, Sink, Trusting
from ..native import shapes
from ..native.reads import TCP_TILE_BYTES, Mover, make_mover
from ..ranges import PIECES, Batches, Piecewise
from ..threads import FILES, ShortSwitchInterval, Thread, block_sigpipe, scope, start
from . import wire as tcp_wire
from .addresses import dial
from .settings import MAX_WANT_RANGES, TcpSettings
from .wire import Garbled, Hello, Refusal, Silent, Unreadable, Vanished, Welcome, Wire, WireError, lost

_log = logging.getLogger(__name__)

# --- Which chunks a stream asks for next, and how far ahead.


class ChunkQueue:
    """The wanted chunks that no stream has asked for yet, in order. Gives each once."""

    def __init__(self, wanted: Sequence[int], streams: int) -> None:
        self._wanted = wanted
        self.streams = streams  # those with a higher index ask for no more
        self._next = 0
        self._lock = threading.Lock()

    def take(self, most: int) -> Sequence[int]:
        """Up to `most` chunks; towards the end fewer, so that all streams finish together."""
        with self._lock:
            fair = -(-(len(self._wanted) - self._next) // self.streams)
            first, self._next = self._next, self._next + max(0, min(most, fair))
            return self._wanted[first : self._next]


class Window:
    """How many chunks one stream asks for ahead: two at least, doubled while they arrive sooner than `ahead_s`."""

    def __init__(self, settings: TcpSettings, chunk_bytes: int) -> None:
        self._aim_s = settings.ahead_s
        self._most = max(2, min(settings.ahead_bytes // chunk_bytes, MAX_WANT_RANGES))
        self.chunks = max(2, min(self._most, settings.stream_bytes // chunk_bytes))

    def adjust(self, took_s: float) -> None:
        """A chunk came `took_s` after it was asked for."""
        if took_s < self._aim_s:
            self.chunks = min(self.chunks * 2, self._most)
        elif took_s > 2 * self._aim_s:
            self.chunks = max(self.chunks // 2, 2)


# --- How many streams a read has: one more doubling as long as it brings more, and back where it does not.
#
#     count = StreamCount(settings, 1)
#     count.look(now, arrived_bytes)      now and then: how many streams the read should have from now on
#
# Rules (decision 0011). Pure: it is told the time.
# 1. A rate is that of `probe_s`. The time in which streams came or went is not counted.
# 2. The number is doubled to try, and halved again unless the rate has become `GAIN` times what it was. After a trial
#    in vain the next one waits, each time for twice as long.
# 3. What comes slower than `probe_rate_bytes_per_s` is held up by its link: it has one stream.
#    No fewer, in any case, than the source has addresses: each has a link of its own.
# 4. A stream that gets `stream_rate_bytes_per_s` is held up by its core: of those there are no more than cores.


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
            self._adapt(now, rate)
        return self.streams

    def set(self, streams: int) -> None:
        """The read has decided; what follows is measured anew."""
        self._change(streams)
        self._before = None

    def _adapt(self, now: float, rate: float) -> None:
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
        most = min(settings.max_streams, self._cores) if is_held_up_by_cores else settings.max_streams
        return wider <= most and rate > 0 and rate >= settings.probe_rate_bytes_per_s

    def _change(self, streams: int) -> None:
        self.streams, self._is_settling = streams, True


# --- What the connections of one read share: which chunks are asked for, what has come, and when it is over.


_HINTS = {
    "token": "give both workers the same token",
    "version": "install the same version of TensorHub on both workers",
    "foreign": "the endpoint belongs to another program",
    "busy": "read from another source, or raise max_connections",
}


class Waiting(Protocol):
    """What a stream waits in, such as a connection."""

    def cut(self) -> object:
        """Called from any thread: waiting threads check whether the read is over."""
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
            mine, full = (sink.stream.size_bytes, sink.chunk_bytes), len(wanted)
            count = chunk_count(*mine)
        if (size_bytes, chunk_bytes) != mine:
            raise SourceLost(
                f"{self.endpoint} offers {self.key!r} as {size_bytes} B in chunks of {chunk_bytes} B,"
                f" but {mine[0]} B in chunks of {mine[1]} B are expected"
            )
        if wanted and not 0 <= min(wanted) <= max(wanted) < count:
            raise TensorHubError(f"the sink wants chunks of {self.key!r} that are not within 0..{count - 1}")
        return min(full, len(wanted))

    def begin(self, wanted: Sequence[int], streams: int, mover: Mover | None) -> None:
        """It is known what is wanted, and whether the mover brings it."""
        self.queue = ChunkQueue(wanted, streams)
        with self._lock:
            self._missing, self.mover = len(wanted), mover
            is_over = self.is_over
        if is_over and mover is not None:
            mover.stop()

    def have(self, streams: int) -> None:
        """Set how many streams fetch chunks from now on."""
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
        """Called when the last stream has ended."""

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
        if refusal.code in ("token", "version", "foreign"):
            error.__cause__ = Refused(refusal.message)  # retrying the same source cannot help
        return error


# --- One connection of a read.
#
# All streams of a read are alike: each takes the next chunks of the queue, asks its source for them ahead of their
# arrival, and receives them straight into the sink's memory. The prefix grows steadily whatever the streams' speeds:
# disorder is never more than what is asked for ahead (`Window`), which is bounded by time and not by size.


AnyStream = TypeVar("AnyStream", bound="Stream")


@scope
def opened(job: Job, index: int, dial: Callable[[Job, int], Wire], kind: type[AnyStream]) -> Iterator[AnyStream]:
    """A connection to the source, closed at the end. What goes wrong with it is raised as `SourceLost`."""
    wire: Wire | None = None
    try:
        wire = dial(job, index)
        yield kind(job, wire, index)
    except Silent as error:
        raise job.lost(f"{error} for {job.settings.silence_s:g} s") from error
    except Unreadable as error:
        raise UsageError(f"{job.key!r} cannot be received here: {error}", hint="register() again") from error
    except WireError as error:
        raise job.lost(str(error)) from error
    finally:
        if wire is not None:
            job.leave(wire)
            wire.close()


class Stream:
    """One connection, in one thread."""

    can_map = False  # take the source's memory by its descriptor

    def __init__(self, job: Job, wire: Wire, index: int) -> None:
        self.job = job
        self.wire = wire
        self.index = index
        self.asked = deque[tuple[int, float]]()  # chunks asked for and not there yet, and when
        self.chunk_bytes = 0  # until the read has begun
        self.on_chunk: Callable[[float], None] | None = None  # told of each chunk: seconds since the one before
        self._is_lent = False  # the chunk that comes: its source may have changed it on the way
        self._doubted = set[int]()  # came so, and wrong: asked for once more

    def greet(self, *, wants_manifest: bool) -> Welcome:
        """Ask to be served; raises `SourceLost` with the source's reason if it does not want to."""
        job = self.job
        with suppress(Vanished):  # it may have refused before it heard us: what it said can still be read
            silence_ms = round(job.settings.silence_s * 1000)
            token, is_checking = job.settings.token or "", job.sink.is_checking
            can_map, shares = wants_manifest and self.can_map, isinstance(job.sink, Sharing) and job.sink.shares
            wishes = (wants_manifest, is_checking, can_map, isinstance(job.sink, Piecewise), shares)
            hello = Hello(token, job.key, job.generation, silence_ms, *wishes)
            self.wire.send_greeting(hello)
        answer = self.wire.receive_greeting(job.settings.silence_s)
        if isinstance(answer, Refusal):
            raise job.refused(answer)
        if not isinstance(answer, Welcome):
            raise Garbled("a source answers with Welcome or Refusal")
        return answer

    def join_in(self) -> None:
        """The same for a further stream, and all that comes before it may ask for its share.

        No other stream brings what it has asked for: whatever may keep it from being served has to show before. Raises
        `TensorHubError`, `WireError`.
        """
        self.greet(wants_manifest=False)
        self.send_batches()
        self.await_room()

    def await_room(self) -> None:
        """Until the source has taken in what is wanted, where that is not its chunks. Raises `SourceLost`."""
        if self.job.batches is None:
            return
        kind, length, _ = self.receive_header()
        if kind == tcp_wire.GONE:
            raise self.job.refused(self.wire.receive_gone(length))
        if kind != tcp_wire.WAITING or length:
            raise Garbled(f"a frame of kind {kind} with {length} B, where it was due that it has room")

    def receive_manifest(self) -> bytes:
        kind, length, _ = self.next_frame()
        if kind != tcp_wire.MANIFEST:
            raise Garbled(f"a frame of kind {kind} where the manifest was due")
        return bytes(self.wire.receive_body(length, MAX_MANIFEST_BYTES))

    def send_batches(self) -> None:
        """Say what is wanted, where that is not the source's chunks."""
        batches = self.job.batches
        if batches is not None:
            with suppress(Vanished):  # what the source said last can still be read
                self.wire.send_frame(PIECES, payload=[batches.encode()])

    # -- by the mover --------------------------------------------------------------------------------------------------

    def make_mover(self, wanted: Sequence[int], streams: int) -> Mover | None:
        """The mover, if it can bring this read's chunks over connections like this one."""
        job = self.job
        return make_mover(job.settings, job.sink, wanted, streams, TCP_TILE_BYTES, job.batches)

    def state_for(self, mover: Mover) -> shapes.StreamState:
        """This connection as the mover sees it."""
        state = self.wire.moved = mover.stream(self.wire.sock.fileno(), self.index)
        return state

    def left(self, state: shapes.StreamState) -> None:
        """The mover has done with this connection."""
        self.wire.heard_bytes += int(state.heard_bytes)
        self.wire.moved = None

    def conclude(self, state: shapes.StreamState) -> None:
        """How the mover's work ended, raised as the same would be here."""
        number = int(state.error)
        match state.status:
            case shapes.DONE | shapes.OVER:
                return
            case shapes.VANISHED:
                if number:
                    raise lost(OSError(number, os.strerror(number)))
                raise Vanished("the peer closed the connection")
            case shapes.SILENT:
                raise Silent("the peer sends no byte")
            case shapes.SAID_GONE:
                raise self.job.refused(self.wire.decode_gone(bytes(state.words[: state.length])))
            case shapes.CORRUPT:
                self._say_what_is_wrong(state.chunk, state.tile)
            case shapes.UNTRUSTED:
                sink = self.job.sink
                if isinstance(sink, Trusting):
                    sink.check()
                raise SessionLost("nothing may be written by this read any more")
            case _:
                raise Garbled(self._garbled(state))

    def _garbled(self, state: shapes.StreamState) -> str:
        """The error for a message that the protocol forbids."""
        if state.kind == tcp_wire.WAITING:
            return f"a keepalive with {state.length} B"
        if state.kind == tcp_wire.GONE:
            return f"a last word of {state.length} B, where {tcp_wire.MAX_GONE_BYTES} B are the limit"
        came = f"frame {state.kind} with {state.length} B of chunk {state.number}"
        start, stop = self.job.span(state.chunk)
        return f"{came}, where {stop - start} B of chunk {state.chunk} were due"

    def _say_what_is_wrong(self, chunk: int, tile: int) -> None:
        """Let the sink say what is wrong with it."""
        sink = self.job.sink
        if isinstance(sink, Piecewise):
            raise sink.wrong_tile(tile)
        with sink.stream.views_to_write(*self.job.span(chunk)) as views:
            sink.accept(chunk, views)
        raise CorruptTransfer(f"chunk {chunk} was wrong when it came, and was changed since")

    # -- by Python -----------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Ask and receive until nothing is left to ask for, or the read is over."""
        job, asked = self.job, self.asked
        self.chunk_bytes = job.sink.chunk_bytes
        window = Window(job.settings, self.chunk_bytes)
        last = time.monotonic()
        while not job.is_over:
            is_wanted = self.index < job.queue.streams  # else another one is not worth having
            if is_wanted and len(asked) <= window.chunks // 2:
                claimed = job.queue.take(window.chunks - len(asked))
                if claimed:
                    now = time.monotonic()
                    with suppress(Vanished):  # what the source said last can still be read
                        self.ask(claimed)
                    asked.extend((chunk, now) for chunk in claimed)
            if not asked:
                return
            chunk, asked_at = asked.popleft()
            self._receive_chunk(chunk)
            before, last = last, time.monotonic()
            if self.on_chunk is not None:
                self.on_chunk(last - before)
            if len(asked) <= window.chunks // 2:
                window.adjust(last - asked_at)

    def ask(self, chunks: Sequence[int]) -> None:
        """Request chunks."""
        self.wire.send_want(chunks)

    def await_chunk(self, chunk: int, size_bytes: int) -> None:
        """Wait until this chunk, which is the next due, comes."""
        kind, length, number = self.next_frame()
        self._is_lent = kind == tcp_wire.LENT and self.job.sink.is_checking
        if self._is_lent:
            self.job.note_lent()
        if (length, number) != (size_bytes, chunk) or (kind != tcp_wire.CHUNK and not self._is_lent):
            raise Garbled(
                f"frame {kind} with {length} B of chunk {number}, where {size_bytes} B of chunk {chunk} were due"
            )

    def receive_bytes(self, start: int, stop: int, views: Sequence[memoryview]) -> None:
        """Put bytes [start, stop) of the stream into `views`."""
        self.wire.receive_into(views)

    def taken(self, size_bytes: int) -> None:
        """All bytes of a chunk are there."""

    def _receive_chunk(self, chunk: int) -> None:
        job, sink = self.job, self.job.sink
        start, stop = job.span(chunk)
        self.await_chunk(chunk, stop - start)
        sink.touch()
        try:
            with sink.stream.views_to_write(start, stop) as views:
                self.receive_bytes(start, stop, views)
                self.taken(stop - start)
                job.count_received(stop - start)
                sink.accept(chunk, views)
            sink.stored(chunk)
        except CorruptTransfer:
            if not self._is_lent or chunk in self._doubted:  # a source that lends it again is asked no third time
                raise
            self._doubted.add(chunk)
            with suppress(Vanished):  # what the source said last can still be read
                self.wire.send_want([chunk], tcp_wire.COPIED)
            self.asked.append((chunk, time.monotonic()))
            return
        job.count_stored()

    def next_frame(self) -> tuple[int, int, int]:
        """The header of the next frame that says something. Raises `SourceLost` if the source ends the export."""
        while True:
            kind, length, number = self.receive_header()
            if kind == tcp_wire.GONE:
                raise self.job.refused(self.wire.receive_gone(length))
            if kind != tcp_wire.WAITING:
                return kind, length, number
            if length:
                raise Garbled(f"a keepalive with {length} B")

    def receive_header(self) -> tuple[int, int, int]:
        return self.wire.receive_header()


# --- One read, in as many threads as it has streams.
#
# The first stream fetches the manifest, asks the sink what it wants, and starts the others. The first error ends the
# read: every stream is cut, and the last thread to leave calls `on_end`, when none is inside the sink's memory any
# more. What keeps a further stream from joining in is no such error: it has asked for nothing yet, and the others do
# its work.


SCARCE_TIMES = 2  # as many streams to a device: while the chunk of one is copied and checked there, another receives
MIN_CHUNKS = 8  # for each stream that is there, left to ask for: else another one is not worth its connection


class TcpRead(Read):
    """One read from one source."""

    def __init__(self, job: Job, ending: Callable[["TcpRead"], OnEnd]) -> None:
        self.job = job
        self.error: TensorHubError | None = None
        self._threads: list[Thread] = []
        self._on_end: OnEnd | None = ending(self)
        self._lock = threading.Lock()
        self._running = 0
        self._is_stopped = False
        self._wide = 1  # as many streams as it opens once the first one is fast
        self._stream_count: StreamCount | None = None
        self.streams = 1

    # -- what another transport that speaks over a socket does in its own way -----------------------------------------

    kind = "tcp"
    has_links = True  # what its streams get depends on a network: their number is tried out

    def opened(self, index: int) -> AbstractContextManager[Stream]:
        """One more connection to the source."""
        return opened(self.job, index, dial, Stream)

    @property
    def path(self) -> str:
        reached = f" to {len(self.job.reached)} of {self.job.addresses} addresses" if self.job.addresses > 1 else ""
        lent = ", zero copy" if self.job.is_lent_to else ""
        return counted(self.streams, "stream") + reached + lent + self.mover_text

    @property
    def mover_text(self) -> str:
        """What moves the bytes, for a path."""
        return ", native" if self.job.mover is not None else ""

    # ------------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        with ShortSwitchInterval():
            self._start(self._lead, 0)

    def forget(self) -> None:
        """It was never started: `on_end` is not called."""
        self._on_end = None

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True
        self.job.finish()

    def join(self, timeout_s: float) -> None:
        """Wait for its threads, except the one that asks."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    @property
    def received_bytes(self) -> int:
        return self.job.received_bytes

    @property
    def arrived_bytes(self) -> int:
        return self.job.arrived_bytes

    def _start(self, body: Callable[[int, ShortSwitchInterval], None], index: int) -> None:
        thread = Thread(self._run, args=(body, index), name=f"tensorhub-{self.kind}-read-{index}")
        with self._lock:
            self._running += 1
            self._threads.append(thread)
        try:
            start(thread)
        except Unavailable:
            with self._lock:
                self._running -= 1
                self._threads.remove(thread)
            if index == 0:
                raise  # nothing runs yet: the caller is told. A read under way goes on with fewer streams.

    def _run(self, body: Callable[[int, ShortSwitchInterval], None], index: int) -> None:
        """The whole life of one stream's thread; the last one out ends the read."""
        block_sigpipe()
        with ShortSwitchInterval() as interval:
            self._guarded(lambda: body(index, interval))
            interval.shorten()
            if index == 0 and self.job.mover is not None:
                self._attend(self.job.mover, lambda: self._running == 1, told=interval.restore)
                interval.shorten()
                self._tell(self.job.mover)
            with self._lock:
                self._running -= 1
                is_last = self._running == 0
            if index and self.job.mover is not None:
                self.job.mover.poke()  # the first thread waits for the others
            if is_last:
                self._end()

    def _end(self) -> None:
        """Call `on_end`, and let go of it and of the error: both know this read, and would wait for the collector."""
        self.job.close()
        if self.error is None and not self._is_stopped and self.job.missing:
            self.error = self.job.lost("its streams ended, and each left to the others what is missing")
        on_end, error = self._on_end, self.error
        self._on_end = self.error = None
        assert on_end is not None, "a read ended twice"
        on_end(error)

    def _fail(self, error: TensorHubError) -> None:
        """The first error is the read's. What follows from a stop, or comes when nothing is missing, is none."""
        with self._lock:
            if self.error is None and not self._is_stopped and self.job.missing != 0:
                self.error = error
        self.job.finish()

    def _lead(self, index: int, interval: ShortSwitchInterval) -> None:
        """The first stream: learn what there is, decide what is wanted, start the others."""
        job, sink = self.job, self.job.sink
        with self.opened(index) as stream:
            welcome = stream.greet(wants_manifest=True)
            wanted = sink.begin(stream.receive_manifest())
            full = job.note_wanted(wanted, size_bytes=welcome.size_bytes, chunk_bytes=welcome.chunk_bytes)
            settings = job.settings
            most = max(settings.streams, job.addresses) if self.has_links else settings.streams
            if self.has_links and isinstance(sink.stream, Scarce):
                most *= SCARCE_TIMES
            streams = max(1, min(most, full * sink.chunk_bytes // settings.stream_bytes, len(wanted)))
            stream.send_batches()
            if streams > 1:
                stream.await_room()  # before the others: what there is of it is this one's
            job.generation = welcome.generation
            job.begin(wanted, streams, stream.make_mover(wanted, streams))
            if self.has_links and settings.max_streams > 1:
                self._stream_count = StreamCount(
                    settings, 1, cores=os.cpu_count() or 1, least=min(streams, job.addresses)
                )
            if job.mover is not None:
                self._move(job.mover, stream, streams, interval)
                return
            interval.restore()
            stream.on_chunk = self._note_chunk
            if self._is_patient:
                self._wide = streams
            else:
                self._widen(streams)
            stream.pump()

    def _move(self, mover: Mover, stream: Stream, streams: int, interval: ShortSwitchInterval) -> None:
        """Let the mover bring the chunks over this connection, and attend to what it asks."""
        state, self._wide = stream.state_for(mover), streams
        state.is_judging_speed = streams > 1 and self._is_patient
        mover.start(state)
        try:
            if not self._is_patient:
                self._widen(streams)
            self._attend(mover, lambda: state.status >= 0, told=interval.restore)
        finally:
            interval.shorten()
            if state.status < 0:
                self.job.finish()
            mover.join(state)
            stream.left(state)
            self._stream_count = None
        stream.conclude(state)

    def _attend(self, mover: Mover, is_over: Callable[[], bool], told: Callable[[], None] = lambda: None) -> None:
        """Do what the mover's streams ask for, and tell the sink of news, until that is so. `told`: after any news."""
        while not is_over():
            events = mover.events()
            if events & shapes.ASKS_LEAVE:
                mover.answer(may_write=self._guarded(self.job.sink.touch))
            if events & shapes.IS_FAST:
                self._widen(self._wide)
            if events & shapes.HAS_NEWS:
                self._tell(mover)
                told()
            self._look()
            if events & shapes.IS_WHOLE:
                self.job.finish()  # a stream that is still connecting is not waited for

    def _guarded(self, work: Callable[[], object]) -> bool:
        """Whether that went well; otherwise its error ends this read."""
        try:
            work()
        except TensorHubError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 the top of a thread, or the sink's bug: it ends this read and is reported
            self._fail(shortages.as_ours(error, f"reading {self.job.key!r} from {self.job.endpoint} failed"))
        else:
            return True
        return False

    def _tell(self, mover: Mover) -> None:
        sink, news = self.job.sink, mover.news_bytes()
        if news and isinstance(sink, Trusting):
            told = sink.told
            self._guarded(lambda: told(news))

    @property
    def _is_patient(self) -> bool:
        """Whether the first stream shows first that its link has more to give. Each address has a link of its own."""
        return self.job.settings.stream_rate_bytes_per_s > 0 and self.job.addresses == 1

    def _widen(self, streams: int) -> None:
        """One stream is not enough: start the others."""
        if streams > self.streams:
            self._have(streams)
            if self._stream_count is not None:
                self._stream_count.set(streams)

    def _note_chunk(self, took_s: float) -> None:
        """Python's streams bring them: a chunk that comes fast shows that its link has more to give."""
        self._look()
        if (
            self.streams < self._wide
            and self.job.sink.chunk_bytes >= took_s * self.job.settings.stream_rate_bytes_per_s
        ):
            self._widen(self._wide)
            self._wide = 1

    def _look(self) -> None:
        """Have more streams, or fewer, if that is what the rate says."""
        count, missing = self._stream_count, self.job.missing
        if count is None or missing is None or missing < MIN_CHUNKS * self.streams:
            return
        streams = count.look(time.monotonic(), self.job.arrived_bytes)
        if streams != self.streams:
            self._have(streams)

    def _have(self, streams: int) -> None:
        """Set the number of streams. Surplus streams end after the chunks that they have asked for."""
        before, self.streams = self.streams, streams
        self.job.have(streams)
        for further in range(before, streams):
            self._start(self._follow, further)

    def _follow(self, index: int, interval: ShortSwitchInterval) -> None:
        """A further stream, if there can be one: else the others do its work.

        The source may have no connection to spare, or no thread; this process no descriptor; or there is no answer.
        """
        mover, has_joined = self.job.mover, False
        try:
            with self.opened(index) as stream:
                stream.join_in()
                state = stream.state_for(mover) if mover is not None else None
                has_joined = True
                interval.restore()
                if mover is None or state is None:
                    stream.pump()
                    return
                mover.run(state)
                interval.shorten()
                stream.left(state)
                stream.conclude(state)
        except (TensorHubError, OSError, MemoryError) as error:
            if has_joined:
                raise
            if isinstance(error, OSError | MemoryError):
                shortages.note(error, did="it opened a further connection to a source")
            _log.debug("%s is read without stream %d: %s", self.job.key, index, error)


def counted(number: int, noun: str) -> str:
    """1 stream, 2 streams."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
