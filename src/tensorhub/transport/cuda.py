"""The cuda transport: weights from device to device between processes of one host, digested in the same pass.

There are three ways, and a pair takes the first that both ends can:

    MEMORY   The reader opens the source's memory, once for each registration, and copies from it by kernels of its own.
             Nothing of the source's interpreter is needed any more: a source that is stopped is read to its end.
             Tiles of another layout come this way only (`on_device`).
    RING     The source copies into a ring of memory on its device, which the reader opens. For memory that cannot be
             shared. A device with peer access to the source's opens it too.
    PINNED   The same with pinned memory of the host, for devices that cannot reach each other.

Messages over the unix socket, after the greetings and the manifest:

    source  SHARED   the seal, the id of the registration, and two ends of pipes: one that closes with the registration,
                     and one that the reader closes behind what it has opened, memory or ring
    reader  OPEN     `number` is the way that it asks for; OPENED: it has opened what was offered last, or long before
    source  OFFER    `number` is that way or, where the source cannot, a later one; what opens the memory. Of a ring:
                     the size and the number of its slots, and a handle (RING) or a descriptor (PINNED)
    source  READY    as `announcing` says. Through a ring, these chunks fill the next slot

A ring has two slots, used in turn: the source fills one while the reader copies from the other. Each request says how
many bytes the reader has read, and so which slots are free. The reader checks what it has copied when no further slot
is filled, or after `RING_WINDOW_BYTES`. A source that is stopped feeds no ring, and is lost after `silence_s`.

Why what was read is right: a chunk counts only if the source's seal was seen after the copy, as with `local`, and if
the digest that the device made of the copied bytes is the announced one. Why memory does not stay: the reader lets go
of what it has opened as soon as the pipe closes, which it does when the source registers anew, closes or dies. And
the source gives up what it has offered, memory or ring, once the other pipe closes, also where that reader dies. It
does so never before, whatever becomes of the connection.
"""

import contextlib
import logging
import mmap
import os
import secrets
import select
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from traceback import clear_frames

from ..protocol.errors import Closed, TransportMissing, UsageError
from .announcing import AnnouncingServer
from .base import ByteStream, Export, OnEnd, Sink, Taking
from .local.memory import Place, Received, send_with_descriptors
from .local.transport import (
    SEAL,
    LocalJob,
    LocalRead,
    LocalServedExport,
    LocalServer,
    LocalSettings,
    LocalTransport,
    ReceivingStream,
    credentials_of,
)
from .on_device import OnDevice, Opened, RingMemory, on_device, read_tiles, target_of
from .ranges import Addresses, Piecewise
from .sealed import Foreign, Unmappable, scratch
from .tcp import wire as tcp_wire
from .tcp.reader import Job, Stream, TcpRead
from .tcp.server import Conversation, ServedExport, TcpServer
from .tcp.settings import MIB, TcpSettings
from .tcp.wire import Garbled, Hello, Refusal, Vanished, Wire
from .threads import Thread, opening, scope, start, track

_log = logging.getLogger(__name__)

SCHEME = "cuda"
SHARED, OPEN, OFFER = 20, 21, 22
OPENED, MEMORY, RING, PINNED = range(4)
PATHS = {
    MEMORY: "device to device",
    RING: "device to device, through a ring on the device",
    PINNED: "device to device, through pinned memory",
}
SIZES = struct.Struct("=QQ")  # of a ring: bytes in a slot, slots
SLOTS = 2
MAX_RING_BYTES = 1 << 34
RING_WINDOW_BYTES = 512 * MIB  # copied through a ring, then checked together: their chains run beside each other
RINGS = 4  # of `ring_bytes`: what all rings of a source take together
ID_BYTES = 16
MAX_HANDLES_BYTES = 16 << 20
ASK_CHUNKS = 1 << 14  # at once: 64 GiB in chunks of 4 MiB


@dataclass(frozen=True)
class CudaSettings:
    """How one worker reads from devices of its host, and lets read."""

    token: str | None = field(default=None, repr=False)  # that a reader must show, besides being of the same user
    silence_s: float = 5.0  # as tcp's: the keepalive comes every 1.25 s
    window_bytes: int = 4096 * MIB  # copied in kernels of 0.2 ms, 3 ms in all on an H200, then checked and served on
    ring_bytes: int = 512 * MIB  # of one reader's ring; a quarter of it of pinned memory, and of what is read
    device_share: float = 1.0  # of the time: after a window that took t, a reader waits t * (1 - share) / share

    def __post_init__(self) -> None:
        if not 0 < self.device_share <= 1:
            raise UsageError(f"device_share={self.device_share!r} is not above 0 and up to 1")


class Ends:
    """Descriptors that are closed together. No forked child keeps them."""

    def __init__(self, make: Callable[[], tuple[int, ...]]) -> None:
        with opening():
            self._numbers = make()
            track(self)
        self.close = weakref.finalize(self, _close, *self._numbers)
        self.close.atexit = False  # a thread may be waiting for them still, and the process closes them

    def descriptors(self) -> tuple[int, ...]:
        return self._numbers if self.close.alive else ()


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _copy_of(descriptor: int) -> Ends:
    return Ends(lambda: (os.dup(descriptor),))


class Watch:
    """Waits, in a thread that lives as long as it waits, for pipes to close. What is then due is done there."""

    def __init__(self) -> None:
        self._due: dict[int, tuple[Ends, Callable[[], object]]] = {}
        self._lock = threading.Lock()
        self._wake: Ends | None = None  # a counter of the kernel: to add to it never waits
        self._is_closed = False

    def when_closed(self, pipe: Ends, due: Callable[[], object]) -> None:
        """`pipe` is the reading end of one. Raises `Unavailable` where no thread can be started, and `Closed`."""
        (number,) = pipe.descriptors()
        with self._lock:
            if self._is_closed:
                raise Closed("this cuda transport was closed")
            if self._wake is None:
                wake = Ends(lambda: (os.eventfd(0),))
                start(Thread(self._run, name="tensorhub-cuda-watch", args=wake.descriptors()))
                self._wake = wake
            self._due[number] = pipe, due
            os.eventfd_write(self._wake.descriptors()[0], 1)

    def _run(self, wake: int) -> None:
        while True:
            poll = select.poll()
            poll.register(wake, select.POLLIN)
            with self._lock:
                if not self._due or self._is_closed:
                    return self._end()
                for number in self._due:
                    poll.register(number, 0)  # a hang-up is always told
            for ready, _ in poll.poll():
                if ready == wake:
                    os.eventfd_read(wake)
                    continue
                with self._lock:
                    pipe, due = self._due.pop(ready)
                pipe.close()
                try:
                    due()
                except Exception:  # noqa: BLE001 - the thread's top: the other pipes are still watched
                    _log.exception("what was due when a peer let go has failed")

    def _end(self) -> None:
        """Close the wake-up. The caller holds the lock."""
        assert self._wake is not None
        self._wake.close()
        self._wake = None
        self._due.clear()

    def close(self) -> None:
        """Wait for nothing any more. Nothing is done for what is still open."""
        with self._lock:
            self._is_closed = True
            if self._wake is not None:
                os.eventfd_write(self._wake.descriptors()[0], 1)


class Pages:
    """Memory of the host that another process can map."""

    def __init__(self, size_bytes: int) -> None:
        """Raises `Unmappable`."""
        self._file = Ends(lambda: (scratch(size_bytes),))
        (self.descriptor,) = self._file.descriptors()
        self._mapping = Foreign(self.descriptor, size_bytes, is_writable=True)
        self.address = self._mapping.address

    def close(self) -> None:
        self._mapping.close()
        self._file.close()


class Ring:
    """One end of a ring: slots of memory that both ends have open, used in turn."""

    told_by: Ends | None = None  # at its reader: closed behind it, which tells its source

    def __init__(self, memory: RingMemory, slot_bytes: int, slots: int, pages: Pages | Foreign | None = None) -> None:
        self.memory = memory
        self.slot_bytes = slot_bytes
        self.slots = slots
        self.pages = pages
        self.is_open = True
        self._uses = 0

    @property
    def size_bytes(self) -> int:
        return self.slots * self.slot_bytes

    def next(self, start: int, stop: int) -> Opened:
        """The next slot, for bytes [start, stop) of the stream."""
        at = self._uses % self.slots * self.slot_bytes
        self._uses += 1
        return self.memory.part(at, start, stop)

    def close(self) -> None:
        self.memory.close()
        if self.pages is not None:
            self.pages.close()
        if self.told_by is not None:
            self.told_by.close()
        self.is_open = False


class Offered:
    """What a source has offered last to one reader, kept until that has closed its end of a pipe, or has died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._give_up: Callable[[], object] | None = None
        self._is_over = False

    def keep(self, give_up: Callable[[], object] | None) -> None:
        """Replaces the `give_up` of before, and calls that one. `give_up` is called when this is over."""
        with self._lock:
            due = (self._give_up, give_up if self._is_over else None)
            self._give_up = None if self._is_over else give_up
        for each in due:
            if each is not None:
                each()

    def end(self) -> None:
        """The reader has nothing open any more."""
        with self._lock:
            self._is_over = True
        self.keep(None)


class Feed:
    """A ring at its source: which slots are filled, and what the reader has asked for besides.

    It is closed once both have let it go, the thread that fills it and the reader.
    """

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self._lock = threading.Lock()
        self._users = 2
        self.asked = deque[tuple[int, int]]()
        self._filled = deque[int]()  # for each slot: bytes that the reader has read once it has read this one
        self._sent_bytes = self._read_bytes = 0

    def let_go(self) -> None:
        """Release the ring. Each of its two users calls this once; the second call closes it."""
        with self._lock:
            self._users -= 1
            is_last = self._users == 0
        if is_last:
            self.ring.close()

    @property
    def is_full(self) -> bool:
        return len(self._filled) == self.ring.slots

    def note_filled(self, size_bytes: int) -> None:
        """One more slot has so many bytes."""
        self._sent_bytes += size_bytes
        self._filled.append(self._sent_bytes)

    def note_read(self, read_bytes: int) -> None:
        """Note how many bytes the reader has read in all. Raises `Garbled`."""
        if not self._read_bytes <= read_bytes <= self._sent_bytes:
            raise Garbled(f"{read_bytes} B were read, after {self._read_bytes} B, of {self._sent_bytes} B")
        self._read_bytes = read_bytes
        while self._filled and self._filled[0] <= read_bytes:
            self._filled.popleft()


class CudaServedExport(LocalServedExport):
    """An export, and whether it is on a device. To ask may compile kernels: not while the server's lock is held."""

    def __init__(self, export: Export) -> None:
        super().__init__(export)
        self.is_on_device = on_device(export.stream) is not None


class CudaServer(LocalServer):
    """Lets readers of this user open the memory of exports, or feeds them through rings."""

    kind = SCHEME

    def __init__(self, settings: TcpSettings, place: Place, ring_bytes: int) -> None:
        self._lifelines: weakref.WeakKeyDictionary[ByteStream, tuple[bytes, Ends]] = weakref.WeakKeyDictionary()
        self._watch = Watch()
        self._ring_bytes = ring_bytes
        self._rings: list[Ring] = []
        self._feeds: dict[Wire, Feed] = {}
        self._feeding = threading.Lock()  # one ring is made at a time, so that their sum has a limit
        super().__init__(settings, place)

    def make_served_export(self, export: Export) -> ServedExport:
        return CudaServedExport(export)

    def why_not(self, served: ServedExport) -> Refusal | None:
        assert isinstance(served, CudaServedExport)
        return None if served.is_on_device else Refusal("memory", "its tensors are not all on a device")

    def introduce(self, wire: Wire, served: ServedExport, hello: Hello) -> None:
        """The manifest, and the memory."""
        assert isinstance(served, LocalServedExport)
        AnnouncingServer.introduce(self, wire, served, hello)
        registration, lifeline = self._lifeline_of(served.export.stream)
        reader = Ends(os.pipe)  # its writing end is the reader's alone, once this process has closed its own
        try:
            body = SEAL.pack(served.seal.address, served.seal.value) + registration
            if not send_with_descriptors(wire, SHARED, 0, body, [*lifeline.descriptors(), reader.descriptors()[1]]):
                raise Garbled("too many descriptors are on their way", "short")
            self._agree(wire, served, reader.descriptors()[0], may_feed=not hello.has_pieces)
        finally:
            lifeline.close()
            reader.close()

    def _lifeline_of(self, stream: ByteStream) -> tuple[bytes, Ends]:
        """The id of its registration, and a pipe that closes with that. Raises `Vanished` once this is closed."""
        with self._changed:
            if self._is_closed:
                raise Vanished("this transport was closed")
            if stream not in self._lifelines:
                self._lifelines[stream] = secrets.token_bytes(ID_BYTES), Ends(os.pipe)
            registration, lifeline = self._lifelines[stream]
            return registration, _copy_of(lifeline.descriptors()[0])

    def _agree(self, wire: Wire, served: ServedExport, pipe: int, *, may_feed: bool) -> None:
        """Offer ways until the reader takes one. It closes the other end of `pipe` once it has nothing open any more.

        That end is watched before anything is offered, so that nothing else has to give it up.
        """
        patience_s = self._settings.patience_s  # a reader may have thousands of tensors to open
        wire.limit_waits(receive_s=patience_s, send_s=patience_s)
        way = _asked_way(wire, after=OPENED)
        if way == OPENED:
            return
        offered = Offered()
        self._watch.when_closed(_copy_of(pipe), offered.end)
        while way != OPENED:
            offered.keep(None)
            self._drop_feed(wire)
            way = _asked_way(wire, after=self._offer(wire, served, way, offered, may_feed=may_feed))

    def _offer(self, wire: Wire, served: ServedExport, way: int, offered: Offered, *, may_feed: bool) -> int:
        """Offer this way, or the next that can be, and return it. Raises `Garbled` where there is none."""
        reasons = []
        for each in range(way, PINNED + 1 if may_feed else RING):
            try:
                if each == MEMORY:
                    self._offer_memory(wire, served, offered)
                else:
                    self._offer_ring(wire, served, each, offered)
                return each
            except TransportMissing as error:
                reasons.append(str(error))
        raise Garbled("; ".join(reasons) or "parts of chunks go through no ring", "memory")

    def _offer_memory(self, wire: Wire, served: ServedExport, offered: Offered) -> None:
        assert isinstance(served.export.stream, OnDevice)
        shared = served.export.stream.share()
        if len(shared.body) > MAX_HANDLES_BYTES:
            raise UsageError("the memory lies in too many pieces")
        offered.keep(lambda: shared)  # known there, it lasts
        wire.send_frame(OFFER, MEMORY, [shared.body])

    def _offer_ring(self, wire: Wire, served: ServedExport, way: int, offered: Offered) -> None:
        while not self._feeding.acquire(timeout=self._settings.silence_s / 4):
            wire.send_frame(tcp_wire.WAITING)
        try:
            self._rings = [ring for ring in self._rings if ring.is_open]
            taken = sum(ring.size_bytes for ring in self._rings)
            ring = self._make_ring(served.export, way, RINGS * self._ring_bytes - taken)
            self._rings.append(ring)
        finally:
            self._feeding.release()
        feed = self._feeds[wire] = Feed(ring)
        offered.keep(feed.let_go)
        body = SIZES.pack(ring.slot_bytes, ring.slots) + ring.memory.handle
        if not isinstance(ring.pages, Pages):
            wire.send_frame(OFFER, way, [body])
        elif not send_with_descriptors(wire, OFFER, way, body, [ring.pages.descriptor]):
            raise Garbled("too many descriptors are on their way", "short")

    def _make_ring(self, export: Export, way: int, room_bytes: int) -> Ring:
        """Make a ring of the best size for this content; smaller if the device is nearly full."""
        size_bytes, chunk_bytes, stream = export.stream.size_bytes, export.chunk_bytes, export.stream
        assert isinstance(stream, OnDevice)
        worth = min(self._ring_bytes if way == RING else self._ring_bytes // 4, room_bytes // 2, size_bytes // 4)
        chunks = max(1, worth // SLOTS // chunk_bytes)
        while True:
            slot_bytes = -(-max(1, min(chunks * chunk_bytes, size_bytes)) // mmap.PAGESIZE) * mmap.PAGESIZE
            try:
                if SLOTS * slot_bytes > max(room_bytes, 0):
                    raise TransportMissing(f"readers' rings have all of their {RINGS * self._ring_bytes} B")
                if way == RING:
                    return Ring(stream.make_ring(SLOTS * slot_bytes), slot_bytes, SLOTS)
                return _pinned(stream, Pages(SLOTS * slot_bytes), slot_bytes, SLOTS)
            except Unmappable as error:
                raise TransportMissing(f"no memory of the host can be shared: {error}", hint="use tcp") from error
            except TransportMissing:
                if chunks == 1:
                    raise
                chunks = max(1, chunks // 4)

    def _drop_feed(self, wire: Wire) -> None:
        feed = self._feeds.pop(wire, None)
        if feed is not None:
            feed.let_go()

    # -- through a ring ------------------------------------------------------------------------------------------------

    def conversation(self, wire: Wire, served: ServedExport, keepalive_s: float) -> Conversation | None:
        return None if wire in self._feeds else super().conversation(wire, served, keepalive_s)

    def asked(self, wire: Wire, served: ServedExport) -> Iterator[tuple[int, int]]:
        feed = self._feeds.get(wire)
        if feed is None:
            yield from super().asked(wire, served)
            return
        while True:
            while feed.asked:
                yield feed.asked.popleft()
            self._hear(wire, served, feed)

    def _hear(self, wire: Wire, served: ServedExport, feed: Feed) -> None:
        """The reader's next words: what it has read, and perhaps what it wants besides."""
        read_bytes, ranges = wire.receive_want(served.chunk_count)
        feed.note_read(read_bytes)
        self.heard(wire, served, read_bytes)
        feed.asked.extend(ranges)
        if len(feed.asked) > ASK_CHUNKS:
            raise Garbled(f"{len(feed.asked)} ranges are asked for at once")

    def send(self, wire: Wire, served: ServedExport, start: int, stop: int) -> int:
        """Fill the next slot with chunks from `start` on, as far as they are there, and say so."""
        feed = self._feeds.get(wire)
        if feed is None:
            return super().send(wire, served, start, stop)
        while feed.is_full:
            self._hear(wire, served, feed)
        if served.ended is not None:
            return start
        export = served.export
        most = max(1, feed.ring.slot_bytes // export.chunk_bytes)
        end = start + 1
        while end < min(stop, start + most) and export.progress.has(end):
            end += 1
        first, last = start * export.chunk_bytes, min(end * export.chunk_bytes, export.stream.size_bytes)
        assert isinstance(export.stream, OnDevice)
        export.stream.copy_to(feed.ring.next(first, last), first, last, export.chunk_bytes)
        feed.note_filled(last - first)
        self.announce(wire, start, end)
        return end

    def _leave(self, wire: Wire) -> None:
        try:
            self._drop_feed(wire)
        finally:
            super()._leave(wire)

    def close(self) -> None:
        super().close()  # `_watch` goes on until the last reader has let go, or is dead
        with self._changed:
            for _, lifeline in list(self._lifelines.values()):
                lifeline.close()


def _asked_way(wire: Wire, *, after: int) -> int:
    """What a reader says to an offer: OPENED, or a later way."""
    kind, length, way = wire.receive_header()
    if kind != OPEN or length or not (way == OPENED or after < way <= PINNED):
        raise Garbled(f"a frame of kind {kind} with {length} B and number {way} where OPEN was due")
    return way


def _pinned(stream: OnDevice, pages: Pages | Foreign, slot_bytes: int, slots: int) -> Ring:
    """A ring of host memory, of which `pages` are one end's. Raises `TransportMissing`."""
    try:
        return Ring(stream.pin_ring(pages.address, slots * slot_bytes), slot_bytes, slots, pages)
    except BaseException:
        pages.close()
        raise


class Peers:
    """What this worker has opened of others, or by which way it reads from them, until a registration's pipe closes."""

    def __init__(self, settings: CudaSettings) -> None:
        self.settings = settings
        self._known: dict[bytes, Opened | int] = {}
        self._watch = Watch()

    def known(self, registration: bytes) -> Opened | int | None:
        """The memory, if it is open, or else the way that was taken."""
        return self._known.get(registration)

    def keep(self, registration: bytes, known: Opened | int, lifeline: Ends) -> None:
        """Until its source lets it go. Raises `Unavailable`, and `Closed`."""
        self._known[registration] = known
        try:
            self._watch.when_closed(lifeline, lambda: self._known.pop(registration, None))
        except BaseException:
            self._known.pop(registration, None)
            raise

    def close(self) -> None:
        """Let go of everything."""
        self._watch.close()
        self._known.clear()


class CudaTransport(LocalTransport):
    """Moves bytes between devices. Raises `TransportMissing` where this process cannot read others of its host."""

    kind = SCHEME

    def __init__(self, settings: CudaSettings | None = None) -> None:
        mine = settings or CudaSettings()
        self._peers = Peers(mine)
        super().__init__(LocalSettings(token=mine.token, silence_s=mine.silence_s, threads=1, maps=False))

    def server_here(self) -> TcpServer:
        return CudaServer(self.settings, self._place, self._peers.settings.ring_bytes)

    def make_read(self, endpoint: str, key: str, sink: Sink, ending: Callable[[TcpRead], OnEnd]) -> TcpRead:
        job = CudaJob(self.settings, endpoint, key, sink, self._peers)
        return CudaRead(job, ending, self._place, CudaStream)

    def close(self) -> None:
        super().close()
        self._peers.close()


class CudaJob(LocalJob):
    """The additional state of a read from a device."""

    def __init__(self, settings: TcpSettings, endpoint: str, key: str, sink: Sink, peers: Peers) -> None:
        super().__init__(settings, endpoint, key, sink, maps=False)
        self.peers = peers
        self.way = MEMORY
        self.over = threading.Event()

    def finish(self) -> None:
        super().finish()
        self.over.set()


class CudaRead(LocalRead):
    """One read from one source on this host."""

    kind = SCHEME

    @scope
    def opened(self, index: int) -> Iterator[Stream]:
        """A ring is closed before its connection: the source closes it once that has ended.

        An error may be kept, and with it the frames that have memory open.
        """
        with super().opened(index) as stream:
            try:
                yield stream
            except BaseException as error:
                clear_frames(error.__traceback__)
                raise
            finally:
                if isinstance(stream, CudaStream):
                    stream.let_go()

    @property
    def path(self) -> str:
        return PATHS[self.job.way] if isinstance(self.job, CudaJob) else SCHEME


class CudaStream(ReceivingStream):
    """One connection, and the thread that copies what is announced on it."""

    _its: CudaJob

    def __init__(self, job: Job, wire: Wire, index: int) -> None:
        super().__init__(job, wire, index)
        self._source: Opened | None = None
        self._ring: Ring | None = None

    def receive_manifest(self) -> bytes:
        """And the source's memory, open, or a ring."""
        sink = self.job.sink
        stream = target_of(sink) if isinstance(sink, Piecewise) else on_device(sink.stream)
        if not isinstance(sink, Piecewise) and (stream is None or not isinstance(sink, Taking)):
            raise TransportMissing("the tensors here are not all on a device", hint="use tcp")
        manifest = super().receive_manifest()
        with contextlib.closing(Received()) as received:
            kind, length, _ = self.next_with(received)
            if kind != SHARED or length != SEAL.size + ID_BYTES or len(received.descriptors()) != 2:
                raise Garbled(f"a frame of kind {kind} with {length} B where SHARED was due")
            body = bytes(self.wire.receive_body(length, length))
            self.prove(credentials_of(self.wire.sock)[0], Addresses.of_ranges([]), *SEAL.unpack_from(body))
            if stream is None:  # it only looks
                self.wire.send_frame(OPEN, OPENED)
            else:
                self._open(stream, body[SEAL.size :], received.descriptors())
        return manifest

    def _open(self, stream: OnDevice, registration: bytes, pipes: Sequence[int]) -> None:
        """Have the memory open by the first way that both ends can. Raises `TransportMissing`."""
        key = registration + stream.device.encode()  # another device of this process may need another way
        known = self._its.peers.known(key)
        if known is not None and not isinstance(known, int):
            self._source = known
            return self.wire.send_frame(OPEN, OPENED)
        lifeline, told_by = map(_copy_of, pipes)
        way = MEMORY if known is None else known
        while self._source is None and self._ring is None:
            self.wire.send_frame(OPEN, way)
            with contextlib.closing(Received()) as received:
                body = self._receive_offer(way, received)
                try:
                    self._take_offer(stream, body, received.descriptors(), told_by)
                except ValueError as error:
                    raise Garbled(f"malformed handles: {error}") from error
                except TransportMissing:
                    way = self._its.way + 1
                    if way > PINNED:
                        raise
        self.wire.send_frame(OPEN, OPENED)
        if known is None and (self._source is not None or way != MEMORY):
            self._its.peers.keep(key, way if self._source is None else self._source, lifeline)

    def _receive_offer(self, asked: int, received: Received) -> bytes:
        kind, length, way = self.next_with(received)
        if kind != OFFER or not asked <= way <= PINNED:
            raise Garbled(f"a frame of kind {kind} and number {way} where OFFER was due")
        self._its.way = way
        return bytes(self.wire.receive_body(length, MAX_HANDLES_BYTES))

    def _take_offer(self, stream: OnDevice, body: bytes, descriptors: Sequence[int], told_by: Ends) -> None:
        """Have open what the source offers. Raises `TransportMissing` where it cannot be, `ValueError`."""
        if self._its.way != MEMORY:
            self._ring = _opened_ring(stream, self._its.way, body, descriptors)
            self._ring.told_by = told_by
            return
        opened = stream.open(body)
        vars(opened)["told_by"] = told_by  # closed when it is: attributes go after its finalizers
        if opened.size_bytes != self.size_bytes:
            raise ValueError(f"memory of {opened.size_bytes} B for content of {self.size_bytes} B")
        self._source = opened

    def let_go(self) -> None:
        """Release the memory: no copy runs any more."""
        ring, self._ring, self._source = self._ring, None, None
        if ring is not None:
            ring.close()

    def make_mover(self, wanted: Sequence[int], streams: int) -> None:
        """The device moves the bytes."""

    def pump(self) -> None:
        """Ask for everything, and copy what is there in windows."""
        if self._source is not None and isinstance(self.job.sink, Piecewise):
            rest = self._rest if self._its.peers.settings.device_share < 1 else None
            read_tiles(self, self._source, self.check_seal, rest)
            return
        wanted = self.job.queue.take(1 << 62)
        for first in range(0, len(wanted), ASK_CHUNKS):
            asked = wanted[first : first + ASK_CHUNKS]
            self.ask(asked)
            done = 0
            while done < len(asked) and not self.job.is_over:
                done += self._take(asked, done) if self._ring is None else self._take_slots(asked, done, self._ring)

    def _take(self, asked: Sequence[int], at: int) -> int:
        """Copy the chunks that follow each other from `asked[at]` on and are there. Returns how many."""
        job, sink, source = self.job, self.job.sink, self._source
        most = max(1, self._its.peers.settings.window_bytes // sink.chunk_bytes)
        chunks = self.await_some(asked, at, most)
        count, start, stop = len(chunks), job.span(chunks[0])[0], job.span(chunks[-1])[1]
        sink.touch()
        assert isinstance(sink.stream, OnDevice)
        assert isinstance(sink, Taking)
        assert source is not None
        began = time.monotonic()
        digests = sink.stream.copy_from(source, start, stop, sink.chunk_bytes, digests=sink.is_checking)
        took_s = time.monotonic() - began
        self.check_seal()
        self.note_read(stop - start, is_last=at + count == len(asked))
        job.count_received(stop - start, count)
        sink.take(chunks, digests)
        job.count_stored(count)
        self._rest(took_s)
        return count

    def _take_slots(self, asked: Sequence[int], at: int, ring: Ring) -> int:
        """Copy slots until the next one is not filled, and check them together: the source fills others meanwhile.

        Their chunks follow each other from `asked[at]` on. Returns how many.
        """
        job, sink, chunk_bytes = self.job, self.job.sink, self.job.sink.chunk_bytes
        assert isinstance(sink.stream, OnDevice)
        assert isinstance(sink, Taking)
        window_bytes = min(RING_WINDOW_BYTES, self._its.peers.settings.window_bytes)
        first, count, took_s, is_next = job.span(asked[at])[0], 0, 0.0, True
        while is_next:
            chunks = self._await_slot(asked, at + count, ring)
            start, stop = job.span(chunks[0])[0], job.span(chunks[-1])[1]
            sink.touch()
            began = time.monotonic()
            sink.stream.copy_from(ring.next(start, stop), start, stop, chunk_bytes, digests=False)
            took_s += time.monotonic() - began
            self.check_seal()
            self.note_read(stop - start, is_last=True)
            job.count_received(stop - start, len(chunks))
            count += len(chunks)
            is_due = at + count < len(asked) and asked[at + count] == chunks[-1] + 1 and not job.is_over
            is_next = is_due and stop - first < window_bytes and self.has_ready(asked[at + count])
        began = time.monotonic()
        digests = sink.stream.digests_of(first, stop, chunk_bytes) if sink.is_checking else b""
        took_s += time.monotonic() - began
        sink.take(range(asked[at], asked[at] + count), digests)
        job.count_stored(count)
        self._rest(took_s)
        return count

    def _await_slot(self, asked: Sequence[int], at: int, ring: Ring) -> range:
        """Until the next slot is filled. Returns with which chunks."""
        first = asked[at]
        self.await_chunk(first, 0)
        chunks = range(first, first + 1 + len(self._ready))
        if list(asked[at : at + len(chunks)]) != list(chunks):
            raise Garbled(f"chunks {first} to {chunks[-1]} fill a slot, and not all of them are due")
        size_bytes = self.job.span(chunks[-1])[1] - self.job.span(first)[0]
        if size_bytes > ring.slot_bytes:
            raise Garbled(f"{size_bytes} B are announced in a slot of {ring.slot_bytes} B")
        self._ready = range(0)
        return chunks

    def _rest(self, took_s: float) -> None:
        """Leave the device to others for their share of the time."""
        share = self._its.peers.settings.device_share
        if share < 1:
            self._its.over.wait(min(took_s * (1 - share) / share, self.job.settings.silence_s))


def _opened_ring(stream: OnDevice, way: int, body: bytes, descriptors: Sequence[int]) -> Ring:
    """The reader's end of a ring. Raises `TransportMissing`, `ValueError`."""
    if len(body) < SIZES.size:
        raise ValueError(f"a ring in {len(body)} B")
    slot_bytes, slots = SIZES.unpack_from(body)
    if not (slot_bytes and slots and slot_bytes * slots <= MAX_RING_BYTES):
        raise ValueError(f"a ring of {slots} slots of {slot_bytes} B")
    if way == RING:
        return Ring(stream.open_ring(body[SIZES.size :], slots * slot_bytes), slot_bytes, slots)
    if len(descriptors) != 1:
        raise TransportMissing("this process has no descriptor to spare for a ring", hint="raise its limit on files")
    try:
        pages = Foreign(descriptors[0], slots * slot_bytes, is_writable=True)
    except Unmappable as error:
        raise TransportMissing(f"the ring cannot be mapped: {error}", hint="use tcp") from error
    return _pinned(stream, pages, slot_bytes, slots)
