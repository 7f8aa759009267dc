"""The nixl transport: one-sided reads over UCX, straight from tensors to tensors."""

import ctypes
import mmap
import os
import socket
import threading
import time
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, NamedTuple

import msgspec

from ...protocol.errors import HostMemoryFull, SourceLost, TensorHubError, TransportMissing, Unavailable, UsageError
from ...protocol.names import Undecodable, decoded
from .. import threads
from ..announcing import MAX_MEMORY_BYTES, MEMORY_FRAME, AnnouncedJob, AnnouncedStream, AnnouncedTiles, AnnouncingServer
from ..base import ByteStream, Export, OnEnd, Sink, Taking
from ..ranges import Located, Piecewise, advance, flat, one_call
from ..tcp import wire as tcp_wire
from ..tcp.addresses import SCHEME as TCP
from ..tcp.addresses import Address, dial
from ..tcp.addresses import parse_endpoint as parse_tcp_endpoint
from ..tcp.reader import Job, Stream, TcpRead, counted, opened
from ..tcp.server import ServedExport, TcpServer
from ..tcp.settings import MIB, TcpSettings
from ..tcp.transport import TcpTransport
from ..tcp.wire import Garbled, Hello, Refusal, Silent, Unreadable, Wire, WireError
from ..threads import FILES, MEMORY, Thread, start
from . import agent as nixl_path
from .agent import (
    HOST,
    SEAL_BYTES,
    Agent,
    Agents,
    Broken,
    Facts,
    Lane,
    Page,
    Place,
    Placed,
    Region,
    Seal,
    Stuck,
    cut,
    lacks_descriptors,
    load,
)
from .probe import DEADLINE_S, Probe, require

# --- The source: the tcp transport's server. It says where the bytes lie (MEMORY) and which chunks are there (READY).


SCHEME = "nixl"
_Natural = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Positive = Annotated[int, msgspec.Meta(gt=0, le=(1 << 63) - 1)]


class Memory(msgspec.Struct, frozen=True, array_like=True):
    """What a reader needs to know of an export's memory."""

    facts: Facts
    agent: str  # its name
    metadata: list[bytes]  # NIXL's own: read by NIXL only
    places: list[tuple[_Natural, _Natural, _Positive]]  # device, address, length; all of the stream, in order
    seal_address: _Natural
    seal: Annotated[bytes, msgspec.Meta(min_length=SEAL_BYTES, max_length=SEAL_BYTES)]

    @property
    def size_bytes(self) -> int:
        return sum(size for _, _, size in self.places)

    def as_places(self) -> list[Place]:
        return [Place(*place) for place in self.places]


class NixlServedExport(ServedExport):
    """An export with a seal."""

    def __init__(self, export: Export, page: Page) -> None:
        super().__init__(export)
        self.seal = Seal(page)

    def end(self, reason: str) -> None:
        self.seal.break_()
        super().end(reason)


class NixlServer(AnnouncingServer):
    """Tells readers where the exports are."""

    kind = "nixl"

    def __init__(self, settings: TcpSettings, agents: Agents, facts: Facts) -> None:
        self._agents = agents
        self._facts = facts
        super().__init__(settings)

    def advertised(self, listening: Sequence[socket.socket]) -> str:
        return SCHEME + super().advertised(listening).removeprefix(TCP)

    def make_served_export(self, export: Export) -> ServedExport:
        return NixlServedExport(export, self._agents.seals)

    def why_not(self, served: ServedExport) -> Refusal | None:
        if not isinstance(served.export.stream, Located | Placed):
            return Refusal("memory", "its tensors have no addresses that NIXL could be told")
        lacking = lacks_descriptors()
        return Refusal("short", lacking) if lacking else None

    def introduce(self, wire: Wire, served: ServedExport, hello: Hello) -> None:
        assert isinstance(served, NixlServedExport)
        super().introduce(wire, served, hello)
        agent = self._agents.introducing(served.export.stream)
        region = self._registered(wire, agent, served.export.stream)
        places = [(place.device, place.address, place.size_bytes) for place in region.places]
        memory = Memory(
            self._facts, agent.name, agent.introduction(region), places, served.seal.address, served.seal.value
        )
        body = msgspec.msgpack.encode(memory)
        if len(body) > MAX_MEMORY_BYTES:
            raise UsageError(f"{served.export.key!r} lies in too many pieces: {len(places)}")
        wire.send_frame(MEMORY_FRAME, payload=[body])

    def _registered(self, wire: Wire, agent: Agent, stream: ByteStream) -> Region:
        """The stream's memory as NIXL knows it. To pin a large model takes seconds: keepalives go out meanwhile."""
        found = list[Region | Exception | None]()
        is_over = threading.Event()

        def register() -> None:
            found.append(_region_or_error(agent, stream))
            is_over.set()

        thread = Thread(register, name="tensorhub-nixl-register")
        start(thread)
        while not is_over.wait(self._settings.silence_s / 4):
            wire.send_frame(tcp_wire.WAITING)
        thread.join()
        region = found.pop()
        if isinstance(region, Exception):
            try:
                raise region
            finally:
                del region  # its traceback knows this frame
        assert region is not None, "a stream without addresses was let in"
        return region


def _region_or_error(agent: Agent, stream: ByteStream) -> Region | Exception | None:
    try:
        return agent.region(stream)
    except Exception as error:  # noqa: BLE001 the top of a thread: the waiting thread raises it
        return error


# --- What the threads of one read share: the source's agent, the descriptors of each chunk, and slots for seals.


POST_BYTES = 16 * MIB  # of one post: with cma it copies inside the call, 1-2 ms
_POST_DESCRIPTORS = 1024


class Plan:
    """The descriptors of a read, prepared once: for each kind of memory at the two ends a list on either side."""

    def __init__(self, agent: Agent, peer: str, ours: list[Place], theirs: list[Place], chunk_bytes: int) -> None:
        """Raises `Broken` if NIXL does not take them."""
        self._agent = agent
        self._parts: dict[int, dict[tuple[bool, bool], range]] = {}
        self._lists: dict[tuple[bool, bool], tuple[int, int]] = {}
        self.is_on_host = all(place.device == HOST for place in ours)
        sides: dict[tuple[bool, bool], tuple[list[Place], list[Place]]] = {}
        for chunk, our, their in cut(ours, theirs, chunk_bytes):
            kind = (our.device == HOST, their.device == HOST)
            our_side, their_side = sides.setdefault(kind, ([], []))
            of_chunk = self._parts.setdefault(chunk, {})
            first = of_chunk[kind].start if kind in of_chunk else len(our_side)
            our_side.append(our)
            their_side.append(their)
            of_chunk[kind] = range(first, len(our_side))
        for kind, (our_side, their_side) in sides.items():
            self._lists[kind] = agent.prepare(None, our_side), agent.prepare(peer, their_side)

    def read(self, chunk: int, size_bytes: int, limit_s: float) -> None:
        """Fetch a chunk. Raises `Broken`, `Stuck`."""
        for kind, indices in self._parts.get(chunk, {}).items():
            posts = max(1, -(-size_bytes // POST_BYTES), -(-len(indices) // _POST_DESCRIPTORS))
            step = max(1, -(-len(indices) // posts))
            for first in range(0, len(indices), step):
                self._agent.read(*self._lists[kind], indices[first : first + step], limit_s)

    def close(self) -> None:
        for prepared in self._lists.values():
            for one in prepared:
                self._agent.drop(one)


class Slot(NamedTuple):
    """Where a seal is read to."""

    address: int
    list: int  # prepared: NIXL's descriptor list of it


class Meeting:
    """The source as its reader knows it. Shared by the threads of a read; `close` when the last has left."""

    def __init__(self, agent: Agent, memory: Memory, scratch: Page) -> None:
        """Raises `Broken`."""
        self.agent = agent
        self._scratch = scratch
        self._slots: list[Slot] = []
        self.memory = memory
        self.is_lost = False
        self.peer = memory.agent
        agent.meet(self.peer, memory.metadata)
        self._plan: Plan | None = None
        self._lock = threading.Lock()
        try:
            self.seal = agent.prepare(self.peer, [Place(HOST, memory.seal_address, SEAL_BYTES)])
        except Broken:
            agent.part(self.peer, is_lost=True)
            raise

    def look(self, limit_s: float, given_up: Callable[[], bool]) -> tuple[bool, bool]:
        """Whether the source's seal stands, and whether it was read at once. Raises `Broken`, `Stuck`.

        After these its slot is never used again: the read may still arrive there.
        """
        try:
            slot = self._slots.pop()
        except IndexError:
            slot = self._new_slot()
        ctypes.memset(slot.address, 0, SEAL_BYTES)
        is_immediate = self.agent.read(slot.list, self.seal, range(1), limit_s, given_up)
        is_sealed = ctypes.string_at(slot.address, SEAL_BYTES) == self.memory.seal
        self._slots.append(slot)
        return is_sealed, is_immediate

    def _new_slot(self) -> Slot:
        address = self._scratch.take()
        try:
            return Slot(address, self.agent.prepare(None, [Place(HOST, address, SEAL_BYTES)]))
        except BaseException:
            self._scratch.give(address)  # no peer was told of it
            raise

    def plan(self, sink: Sink) -> Plan:
        """Made when the sink's chunks are known. Raises `Broken`, `TransportMissing`."""
        with self._lock:
            if self._plan is None:
                region = self.agent.region(sink.stream)
                if region is None:
                    raise TransportMissing("the tensors here have no addresses that NIXL could be told", hint="use tcp")
                places = self.memory.as_places()
                self._plan = Plan(self.agent, self.peer, region.places, places, sink.chunk_bytes)
            return self._plan

    def close(self) -> None:
        if self._plan is not None:
            self._plan.close()
        for slot in self._slots:
            self.agent.drop(slot.list)
            self._scratch.give(slot.address)
        self.agent.drop(self.seal)
        self.agent.part(self.peer, is_lost=self.is_lost)


# --- The reader: the tcp transport's, whose threads let NIXL fetch each chunk straight into the tensors.
#
# Each thread first reads the seal into memory of its own. That connects it, and shows by which way. Tensors are written
# to only after that. Where the way is TCP, or none, the read ends with `TransportMissing`. After each chunk the seal is
# read again, before the sink checks the chunk. A transfer that is not over within `silence_s` ends the agent.


USE_TCP = "use tcp"
_TRIES = 4  # to connect, within the limit of silence
_PROOFS = 3  # after the first read, which connects; most of them must agree
_LAST_WORDS_S = 0.5  # for a source to say why its memory cannot be read any more

_memories = msgspec.msgpack.Decoder(Memory)


def parse_endpoint(endpoint: str) -> tuple[Address, ...]:
    """`nixl://host:port` as ((host, port),). Raises `ValueError` for anything else."""
    return parse_tcp_endpoint(endpoint, SCHEME)


class NixlJob(AnnouncedJob):
    """What the threads of one read share."""

    def __init__(
        self, settings: TcpSettings, endpoint: str, key: str, sink: Sink, agents: Agents, facts: Facts, allow_tcp: bool
    ) -> None:
        super().__init__(settings, endpoint, key, sink)
        self.agents = agents
        self.facts = facts
        self.allow_tcp = allow_tcp
        self.lane: Lane | None = None
        self.meeting: Meeting | None = None

    def register(self) -> None:
        """Make the sink's memory known to NIXL, once. Before it connects, for that takes seconds."""
        if isinstance(self.sink, Piecewise):
            return  # batches land in memory of the read's own
        agent: Agent | None = None
        try:
            agent = self.agents.current()
            region = agent.region(self.sink.stream)
        except Broken as error:
            if agent is None or agent.ended is not None:  # another read ended it just now: the next try gets a new one
                raise self.lost(f"here: {error}") from error
            raise TransportMissing(f"NIXL cannot register the tensors here: {error}", hint=USE_TCP) from error
        if region is None:
            raise TransportMissing("the tensors here have no addresses that NIXL could be told", hint=USE_TCP)

    def close(self) -> None:
        if self.meeting is not None:
            self.meeting.close()


class NixlRead(TcpRead):
    """One read from one source."""

    kind = "nixl"
    has_links = False  # its streams are threads that copy

    def __init__(self, job: NixlJob, ending: Callable[[TcpRead], OnEnd], streams: "type[NixlStream]") -> None:
        self._streams = streams
        super().__init__(job, ending)

    def opened(self, index: int) -> AbstractContextManager[Stream]:
        assert isinstance(self.job, NixlJob)
        self.job.register()
        return opened(self.job, index, partial(dial, parse=parse_endpoint), self._streams)

    def _end(self) -> None:
        assert isinstance(self.job, NixlJob)
        if self.job.meeting is not None and isinstance(self.error, SourceLost):
            self.job.meeting.is_lost = True  # noticed by its socket, or by NIXL
        super()._end()

    @property
    def path(self) -> str:
        assert isinstance(self.job, NixlJob)
        lane = self.job.lane
        return f"{lane.name if lane else 'NIXL/UCX'}, {counted(self.streams, 'thread')}"


class NixlStream(AnnouncedStream):
    """One connection, and the thread that fetches what is announced on it."""

    def __init__(self, job: Job, wire: Wire, index: int) -> None:
        super().__init__(job, wire, index)
        assert isinstance(job, NixlJob)
        self._its = job

    @property
    def _meeting(self) -> Meeting:
        meeting = self._its.meeting
        assert meeting is not None, "bytes before addresses"
        return meeting

    def receive_manifest(self) -> bytes:
        """And where the bytes are. Proves first that they can be read."""
        manifest = super().receive_manifest()
        kind, length, _ = self.next_frame()
        if kind != MEMORY_FRAME:
            raise Garbled(f"a frame of kind {kind} where the addresses were due")
        try:
            memory = decoded(_memories, self.wire.receive_body(length, MAX_MEMORY_BYTES))
        except Undecodable as error:
            raise Garbled(f"malformed addresses: {error}") from error
        if memory.size_bytes != self.size_bytes:
            raise Garbled(f"addresses of {memory.size_bytes} B for content of {self.size_bytes} B")
        if lacking := nixl_path.lacks_descriptors():
            raise Unavailable(f"NIXL cannot connect from here: {lacking}", hint=FILES)
        try:
            self._its.meeting = Meeting(self._its.agents.current(), memory, self._its.agents.scratch)
        except Broken as error:
            raise self._left(f"NIXL cannot reach it: {error}", TransportMissing) from error
        self._prove()
        return manifest

    def make_mover(self, wanted: Sequence[int], streams: int) -> None:
        """NIXL brings the bytes, in threads of its own."""

    def join_in(self) -> None:
        """And connect this thread, too: one that cannot be has not asked for anything."""
        super().join_in()
        self._prove()

    def _prove(self) -> None:
        """Connect this thread, see by what way, and that the export lasts."""
        job, memory = self._its, self._meeting.memory
        self._connect()
        looks = [self._look(job.settings.silence_s) for _ in range(_PROOFS)]
        if not all(is_sealed for is_sealed, _ in looks):
            raise self._left("it has taken its promise back")
        is_immediate = 2 * sum(immediate for _, immediate in looks) > _PROOFS  # 16 B over TCP may be quick once
        devices = {device for device, _, _ in memory.places} or {HOST}
        lane = nixl_path.lane(job.facts, memory.facts, is_immediate=is_immediate, devices=sorted(devices))
        if lane.is_tcp and not job.allow_tcp:
            why = nixl_path.why_tcp(job.facts, memory.facts)
            raise TransportMissing(f"{job.endpoint} could be read over TCP only: {why}", hint=nixl_path.USE_TCP)
        job.lane = lane

    def _connect(self) -> None:
        """The first read of a thread connects it. Now and then UCX loses such a read: then the next one is answered.

        One thread at a time, for UCX lost none that way, but for a part of `silence_s` only.
        """
        job, agent = self._its, self._meeting.agent
        until, turn_s = time.monotonic() + job.settings.silence_s, job.settings.silence_s / _TRIES
        has_turn = agent.await_turn(turn_s, lambda: job.is_over)
        if job.is_over and not has_turn:
            raise job.lost("the read is over")
        for left in range(_TRIES, 0, -1):
            try:
                self._look((until - time.monotonic()) / left, is_last=left == 1)
                return
            except Stuck:
                continue
            finally:
                if has_turn:
                    agent.connecting.release()
                has_turn = False

    def _look(self, limit_s: float, *, is_last: bool = True) -> tuple[bool, bool]:
        """As `Meeting.look`. Raises what ended the read.

        That it is not over in time ends the read too, but if it is not the last try: then it is raised as `Stuck`.
        """
        job = self._its
        try:
            return self._meeting.look(limit_s, lambda: job.is_over)
        except Broken as error:
            raise self._broken(error) from error
        except Stuck as error:
            if not is_last and not job.is_over:
                raise
            raise job.lost(str(error)) from error

    def _receive_chunk(self, chunk: int) -> None:
        job, sink, plan = self.job, self.job.sink, self._plan()
        if plan.is_on_host:
            super()._receive_chunk(chunk)
            return
        start, stop = job.span(chunk)
        self.await_chunk(chunk, stop - start)
        sink.touch()
        self._fetch(plan, chunk, stop - start)  # to where it belongs
        if isinstance(sink, Taking):
            job.count_received(stop - start)
            sink.take(range(chunk, chunk + 1), None)
        else:  # what the sink looks at is a copy
            with sink.stream.views_to_read(start, stop) as views:
                job.count_received(stop - start)
                sink.accept(chunk, views)
            sink.stored(chunk)
        job.count_stored()

    def receive_bytes(self, start: int, stop: int, views: Sequence[memoryview]) -> None:
        self._fetch(self._plan(), start // self.job.sink.chunk_bytes, stop - start)

    def _plan(self) -> Plan:
        try:
            return self._meeting.plan(self.job.sink)
        except Broken as error:
            raise self._left(f"NIXL cannot read its memory: {error}", TransportMissing) from error

    def _fetch(self, plan: Plan, chunk: int, size_bytes: int) -> None:
        """The bytes of a chunk, which were those of the export when they were read."""
        meeting = self._meeting
        try:
            plan.read(chunk, size_bytes, self.job.settings.silence_s)
        except Broken as error:
            raise self._broken(error) from error
        except Stuck as error:
            meeting.agent.end(f"{self.job.endpoint} did not end a read: only so no byte of it can come late")
            raise self.job.lost(str(error)) from error
        if not self._look(self.job.settings.silence_s)[0]:
            raise self._left("it has taken its promise back")
        self.note_read(size_bytes, is_last=not self.asked)

    def _broken(self, error: Broken) -> Exception:
        """NIXL could not read. Where the source lives and says nothing, its memory cannot be read from here."""
        job, meeting = self._its, self._meeting
        meeting.is_lost = True
        if meeting.agent.ended is not None:  # by another read
            return self._left(str(error))
        why = nixl_path.why_tcp(job.facts, meeting.memory.facts)
        return self._left(f"UCX has no way to it but TCP ({why}): {error}", TransportMissing)

    def _left(self, why: str, otherwise: type[TensorHubError] | None = None) -> Exception:
        """What ended the export, as the source says it; or that it is gone; or else `why`, as `otherwise` if given."""
        try:
            self.wire.limit_waits(receive_s=_LAST_WORDS_S, send_s=_LAST_WORDS_S)
            return self.why_ended()
        except Silent:
            return self.job.lost(why) if otherwise is None else otherwise(f"{self.job.endpoint}: {why}", hint=USE_TCP)
        except WireError as error:
            return self.job.lost(f"{error}; {why}")


# --- Tiles of another layout: a batch lands in host memory of the read's own, and the kernel puts it into place.
#
# A run of a row is a descriptor at the source, which costs microseconds. Batches of short runs are sent instead.


SENT_BELOW_BYTES = 16384  # runs that are shorter on an average are sent


class Landing:
    """Host memory of one thread, in which a batch lands; a file too, so that the kernel can put it into place."""

    def __init__(self, size_bytes: int) -> None:
        """Raises `HostMemoryFull`."""
        self.size_bytes = max(1, size_bytes)
        try:
            self._file = os.memfd_create("tensorhub-landing")
            weakref.finalize(self, os.close, self._file).atexit = False
            os.ftruncate(self._file, self.size_bytes)
            self._memory = mmap.mmap(self._file, self.size_bytes)
        except (OSError, MemoryError) as error:
            threads.note(error, did="it made room for what NIXL brings")
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
                moved = os.preadv(self._file, one_call(pending, first), at)
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


class NixlTiles(AnnouncedTiles, NixlStream):
    """One connection of such a read."""

    _landing: Landing | None = None
    _lying: Lying | None = None

    @property
    def sent_below_bytes(self) -> int:
        return SENT_BELOW_BYTES

    def join_in(self) -> None:
        """And have memory for what is to land here."""
        super().join_in()
        if not all(map(self._batches.is_sent, range(len(self._batches)))):
            self._ready_to_land()

    def _receive_chunk(self, chunk: int) -> None:
        if self._batches.is_sent(chunk):
            Stream._receive_chunk(self, chunk)
            return
        job, sink = self.job, self.job.sink
        start, stop = job.span(chunk)
        self.await_chunk(chunk, stop - start)
        landing = self._fetched(start, stop)
        sink.touch()
        with sink.stream.views_to_write(start, stop) as views:
            landing.put(views)
            job.count_received(stop - start)
            sink.accept(chunk, views)
        sink.stored(chunk)
        job.count_stored()

    def _fetched(self, start: int, stop: int) -> Landing:
        """Has bytes [start, stop) of the batches' stream, which were those of the export when they were read."""
        landing, lying = self._ready_to_land()
        theirs = [
            place for at, length in self._batches.rows.ranges(start, stop) for place in lying.part(at, at + length)
        ]
        try:
            ours = landing.place._replace(size_bytes=stop - start)
            plan = Plan(self._meeting.agent, self._meeting.peer, [ours], theirs, ours.size_bytes)  # of one chunk
        except Broken as error:
            raise self._left(f"NIXL cannot read its memory: {error}", TransportMissing) from error
        try:
            self._fetch(plan, 0, stop - start)
        finally:
            plan.close()
        return landing

    def _ready_to_land(self) -> tuple[Landing, Lying]:
        """Memory for the largest batch, and the source's.

        Raises `HostMemoryFull`, and `TransportMissing` if NIXL cannot have ours.
        """
        if self._landing is None or self._lying is None:
            landing = Landing(self._batches.largest_bytes)
            try:
                self._meeting.agent.know(landing, [landing.place])
            except Broken as error:
                raise TransportMissing(f"NIXL cannot register host memory here: {error}", hint=USE_TCP) from error
            self._landing, self._lying = landing, Lying(self._meeting.memory.as_places())
        return self._landing, self._lying


# --- The transport. It needs the extra `tensorhub[nixl]`, and tries NIXL in a child process first (`probe`).
#
# UCX knows no token: a worker that can reach the host's RDMA network is trusted, as NIXL trusts it.


@dataclass(frozen=True)
class NixlSettings:
    """How one worker reads and lets read by NIXL."""

    host: str = "127.0.0.1"  # of the control conversation; open to other hosts only when asked for
    port: int = 0  # any free port
    advertise: str | None = None  # "host" or "host:port" as peers see it
    token: str | None = field(
        default=None, repr=False
    )  # shared secret that a reader must show before it is told where the bytes are
    silence_s: float = 5.0  # as tcp's: the keepalive comes every 1.25 s
    threads: int = 2  # each fetches and hashes; UCX has a worker for each, so that they do not wait for one another
    thread_bytes: int = 8 * MIB  # what makes a further thread worth its connection
    max_connections: int = 64  # 32 readers with 2 threads each
    tls: str = ""  # UCX_TLS for this transport; empty: what the environment says, or UCX's own choice
    probe_s: float = DEADLINE_S  # how long the child process may take that tries NIXL first
    allow_tcp: bool = False  # for tests and comparison; a source that stops in mid-read may abort when it goes on

    def as_tcp(self) -> TcpSettings:
        """The settings that it shares with the tcp transport."""
        return TcpSettings(
            host=self.host,
            port=self.port,
            advertise=self.advertise,
            token=self.token,
            silence_s=self.silence_s,
            connect_s=self.silence_s,
            streams=self.threads,
            stream_bytes=self.thread_bytes,
            stream_rate_bytes_per_s=0,
            max_connections=self.max_connections,
            congestion=None,
        )


class NixlTransport(TcpTransport):
    """Moves registered bytes by one-sided reads. Raises `TransportMissing` where NIXL does not work."""

    kind = "nixl"
    is_revocable = True

    def __init__(self, settings: NixlSettings | None = None, *, bindings: Any = None) -> None:
        """`bindings` stand for NIXL's own in tests; otherwise those are probed, then loaded."""
        self._mine = settings or NixlSettings()
        self.probed: Probe = require(self._mine.probe_s) if bindings is None else Probe(bindings.__name__)
        self._facts = nixl_path.facts(self._mine.tls)
        bindings = bindings or load(self.probed.module)
        mine = self._mine
        self._agents = Agents(bindings, workers=mine.threads, tls=mine.tls, emulates=mine.allow_tcp)
        try:
            super().__init__(self._mine.as_tcp())
        except BaseException:
            self._agents.close()
            raise

    def make_server(self) -> TcpServer:
        return NixlServer(self.settings, self._agents, self._facts)

    def make_read(self, endpoint: str, key: str, sink: Sink, ending: Callable[[TcpRead], OnEnd]) -> TcpRead:
        streams = NixlTiles if isinstance(sink, Piecewise) else NixlStream
        job = NixlJob(self.settings, endpoint, key, sink, self._agents, self._facts, self._mine.allow_tcp)
        return NixlRead(job, ending, streams)

    def statistics(self) -> dict[str, int]:
        return {**super().statistics(), "nixl_agents_replaced": self._agents.replaced}

    def close(self) -> None:
        super().close()
        self._agents.close()
