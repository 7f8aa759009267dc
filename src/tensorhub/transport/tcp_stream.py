"""One connection of a read, and what the connections of one read share.

All streams of a read are alike: each takes the next chunks that nobody has asked for yet (`Claims`), asks its source
for them ahead of their arrival, and receives them straight into the sink's memory. So the prefix grows steadily
whatever the streams' speeds: disorder is never more than what is asked for ahead (`Ahead`), which is bounded by time
and not by size. A fixed share for each stream would leave a gap as large as the slowest stream's share, and peers that
read behind us would starve. It must never: write outside a `writing` block, or touch memory once `opened` has ended.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

from ..core.errors import CorruptTransfer, SessionLost, UsageError
from . import tcp_wire
from .base import Look, Sharing, Trusting
from .located import Scattered
from .native import shapes
from .native_read import TCP_TILE_BYTES, Mover, mover_for
from .parcels import PIECES, Piecewise
from .scopes import scope
from .tcp_claims import Ahead
from .tcp_job import Job
from .tcp_wire import Garbled, Hello, Refusal, Silent, Unreadable, Vanished, Welcome, Wire, WireError
from .views import blocks_of
from .wire_errors import lost

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
        self._scattered = Scattered(job.sink.stream)  # of a sink that wants pieces it knows nothing
        self._on_fast: Callable[[], None] | None = None
        self._on_chunk: Callable[[], None] | None = None
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

        What it has asked for is nobody else's: so whatever may keep it from being served has to show before. Raises
        `TensorHubError`, `WireError`.
        """
        self.greet(wants_manifest=False)
        self.send_parcels()
        self.await_room()

    def await_room(self) -> None:
        """Until the source has taken in what is wanted, where that is not its chunks. Raises `SourceLost`."""
        if self.job.parcels is None:
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
        return bytes(self.wire.receive_body(length, tcp_wire.MAX_MANIFEST_BYTES))

    def send_parcels(self) -> None:
        """Say what is wanted, where that is not the source's chunks."""
        parcels = self.job.parcels
        if parcels is not None:
            with suppress(Vanished):  # it may have said farewell: what it said can still be read
                self.wire.send_frame(PIECES, payload=[parcels.encode()])

    # -- by the mover --------------------------------------------------------------------------------------------------

    def mover_for(self, wanted: Sequence[int], streams: int) -> Mover | None:
        """The mover, if it can bring this read's chunks over connections like this one."""
        job = self.job
        return mover_for(job.settings, job.sink, wanted, streams, TCP_TILE_BYTES, job.parcels)

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
        """What came, and why it cannot be."""
        if state.kind == tcp_wire.WAITING:
            return f"a keepalive with {state.length} B"
        if state.kind == tcp_wire.GONE:
            return f"a farewell of {state.length} B, where {tcp_wire.MAX_GONE_BYTES} B are the limit"
        came = f"frame {state.kind} with {state.length} B of chunk {state.number}"
        start, stop = self.job.span(state.chunk)
        return f"{came}, where {stop - start} B of chunk {state.chunk} were due"

    def _say_what_is_wrong(self, chunk: int, tile: int) -> None:
        """Let the sink say what is wrong with it."""
        sink = self.job.sink
        if isinstance(sink, Piecewise):
            raise sink.wrong_tile(tile)
        with sink.stream.writing(*self.job.span(chunk)) as views:
            sink.accept(chunk, views)
        raise CorruptTransfer(f"chunk {chunk} was wrong when it came, and was changed since")

    # -- by Python -----------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Ask and receive until nothing is left to ask for, or the read is over."""
        job, asked = self.job, self.asked
        self.chunk_bytes = job.sink.chunk_bytes
        ahead = Ahead(job.settings, self.chunk_bytes)
        last = time.monotonic()
        while not job.is_over:
            is_wanted = self.index < job.claims.streams  # else another one is not worth having
            if is_wanted and len(asked) <= ahead.chunks // 2:
                claimed = job.claims.take(ahead.chunks - len(asked))
                if claimed:
                    now = time.monotonic()
                    with suppress(Vanished):  # it may have said farewell: what it said can still be read
                        self.ask(claimed)
                    asked.extend((chunk, now) for chunk in claimed)
            if not asked:
                return
            chunk, asked_at = asked.popleft()
            self._receive_chunk(chunk)
            if self._on_chunk is not None:
                self._on_chunk()
            if self._on_fast is not None:
                before, last = last, time.monotonic()
                self._judge_speed(last - before)
            if len(asked) <= ahead.chunks // 2:
                ahead.adjust(time.monotonic() - asked_at)

    def after_each_chunk(self, look: Callable[[], None]) -> None:
        """Call `look` whenever a chunk has come."""
        self._on_chunk = look

    def when_fast(self, then: Callable[[], None]) -> None:
        """Call `then` once: as soon as a chunk comes so fast that its link may have more than one stream takes."""
        self._on_fast = then

    def _judge_speed(self, took_s: float) -> None:
        job, then = self.job, self._on_fast
        if then is not None and self.chunk_bytes >= took_s * job.settings.stream_rate_bytes_per_s:
            self._on_fast = None
            then()

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

    def transfer(self, start: int, stop: int, views: Sequence[memoryview], look: Look | None) -> None:
        """Bring bytes [start, stop) of the stream into `views`, and let `look` see them as they come."""
        for size_bytes, block in blocks_of(views, stop - start, self.job.settings.block_bytes):
            self.take_bytes(start, start + size_bytes, block)
            if look is not None:
                deque(map(look, block), 0)  # a loop without Python's: there may be a thousand small views
            start += size_bytes

    def take_bytes(self, start: int, stop: int, views: Sequence[memoryview]) -> None:
        """Put bytes [start, stop) of the stream into `views`."""
        addresses = self._scattered.for_views(len(views))
        if addresses is not None:
            self.wire.receive_located(addresses, start, stop)
        else:
            self.wire.receive_into(views)

    def taken(self, size_bytes: int) -> None:
        """All bytes of a chunk are there."""

    def _receive_chunk(self, chunk: int) -> None:
        job, sink = self.job, self.job.sink
        start, stop = job.span(chunk)
        self.await_chunk(chunk, stop - start)
        sink.touch()
        try:
            with sink.stream.writing(start, stop) as views:
                self.transfer(start, stop, views, sink.observe(chunk))
                self.taken(stop - start)
                job.count_received(stop - start)
                sink.accept(chunk, views)
            sink.stored(chunk)
        except CorruptTransfer:
            if not self._is_lent or chunk in self._doubted:  # who lends it again is asked no third time
                raise
            self._doubted.add(chunk)
            with suppress(Vanished):  # it may have said farewell: what it said can still be read
                self.wire.send_want([chunk], tcp_wire.COPIED)
            self.asked.append((chunk, time.monotonic()))
            return
        job.count_stored()

    def next_frame(self) -> tuple[int, int, int]:
        """The header of the next frame that says something. Raises `SourceLost` if the source says farewell."""
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
