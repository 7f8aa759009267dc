"""The local transport: one copy between two processes of a host, without a socket for the bytes."""

import contextlib
import logging
import mmap
import os
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from ...protocol.errors import TransportMissing, UsageError
from ..announcing import MAX_MEMORY_BYTES, MEMORY_FRAME, AnnouncedJob, AnnouncedStream, AnnouncedTiles, AnnouncingServer
from ..base import Export, OnEnd, Sink
from ..native import load, shapes
from ..native.reads import LOCAL_TILE_BYTES, Mover, make_mover
from ..ranges import Addresses, BadRow, Located, Piecewise, Placed, bare_addresses, table_of
from ..sealed import Region, Sealed, Shared, Unmappable, moved_to, regions_of
from ..tcp.addresses import wire_for
from ..tcp.reader import Job, Stream, TcpRead, counted, opened
from ..tcp.server import ServedExport, TcpServer
from ..tcp.settings import MIB, TcpSettings
from ..tcp.transport import TcpTransport
from ..tcp.wire import Garbled, Hello, Refusal, Vanished, Wire
from ..threads import is_shortage
from .memory import (
    FROZEN,
    MAPPED,
    MAX_MAPPED_BYTES,
    Lost,
    Mapped,
    Place,
    Process,
    Received,
    Seal,
    allow_readers,
    check_refused,
    format_endpoint,
    format_place,
    hand_over,
    here,
    new_name,
    offer,
    parse_endpoint,
    probe_self,
    receive_header,
    remedy,
    socket_address,
)

# --- The source: the tcp transport's server over an abstract unix socket. It sends where the bytes lie and which chunks
# are there:
#
#     source  MEMORY  the seal's address, the seal, and where each piece of the stream lies (`Addresses`)
#     source  READY   chunks [`number`, number + n) are there; n is the body


_log = logging.getLogger(__name__)

SEAL = struct.Struct("=Q16s")  # both ends are one machine: its own byte order
CREDENTIALS = struct.Struct("@iII")  # struct ucred: process, user, group
_BACKLOG = 1024


class LocalServedExport(ServedExport):
    """An export with a seal; with two, once a reader maps it. Guarded by the server's lock as the rest is."""

    def __init__(self, export: Export) -> None:
        super().__init__(export)
        self.seal = Seal()
        self.shared_seal: Seal | None = None

    def share_seal(self) -> Seal | None:
        """One in memory of its own, which can be mapped; None where there can be none, or no more."""
        if self.shared_seal is None and self.ended is None:
            with contextlib.suppress(Unmappable):
                self.shared_seal = Seal(Sealed(mmap.PAGESIZE))
        return self.shared_seal

    def end(self, reason: str) -> None:
        self.seal.break_()
        if self.shared_seal is not None:
            self.shared_seal.break_()
        super().end(reason)


class LocalServer(AnnouncingServer):
    """Tells readers of this user where the exports are."""

    kind = "local"

    def __init__(self, settings: TcpSettings, place: Place) -> None:
        self._place = place
        self._name = new_name()
        super().__init__(settings)

    def listen(self) -> list[socket.socket]:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(socket_address(self._name))
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
        return [listener]

    def advertised(self, listening: Sequence[socket.socket]) -> str:
        return format_endpoint(self._place, self._name, self.kind)

    def make_served_export(self, export: Export) -> ServedExport:
        return LocalServedExport(export)

    def why_refused(self, wire: Wire, hello: Hello) -> Refusal | None:
        _, user, _ = credentials_of(wire.sock)
        if user != os.geteuid():
            return Refusal("user", f"this worker runs as user {os.geteuid()}, its reader as user {user}")
        return super().why_refused(wire, hello)

    def why_not(self, served: ServedExport) -> Refusal | None:
        if isinstance(served.export.stream, Located):
            return None
        return Refusal("memory", "its tensors are in a device's memory, which only that device's driver can read")

    def introduce(self, wire: Wire, served: ServedExport, hello: Hello) -> None:
        assert isinstance(served, LocalServedExport)
        super().introduce(wire, served, hello)
        stream = served.export.stream
        if not isinstance(stream, Located):
            raise UsageError(f"{served.export.key!r} has no addresses")
        addresses = stream.addresses()
        body = addresses.encode()
        if len(body) > MAX_MEMORY_BYTES - SEAL.size:
            raise UsageError(f"{served.export.key!r} lies in too many pieces")
        if hello.can_map and bare_addresses(stream) is not None:
            self._share(wire, served, regions_of(addresses), is_kept=hello.shares)
        wire.send_frame(MEMORY_FRAME, payload=[SEAL.pack(served.seal.address, served.seal.value), body])

    def _share(self, wire: Wire, served: LocalServedExport, regions: tuple[Region, ...], *, is_kept: bool) -> None:
        """Hand over the memory itself, if it is such memory; for good where it is whole and not withdrawn.

        Whoever has withdrawn it may write to it again, and comes by this lock before.
        """
        if regions:
            with self._changed:
                seal = served.share_seal()
                if is_kept and served.ended is None and served.export.progress.is_complete:
                    for region in regions:
                        region.freeze()
            if seal is not None:
                offer(wire, seal, regions)


def credentials_of(sock: socket.socket) -> tuple[int, int, int]:
    """Process (0: not of our PID namespace), user and group of the other end, as the kernel knows them."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    process, user, group = CREDENTIALS.unpack(found)
    return process, user, group


def check_listener(wire: Wire, endpoint: str) -> None:
    """That our own user listens there, before a word is said: the first one has the token. Raises `TransportMissing`.

    Once a source is gone, any process of this host may listen under its name.
    """
    _, user, _ = credentials_of(wire.sock)
    if user != os.geteuid():
        raise TransportMissing(f"{endpoint} is listened to by user {user}, this worker runs as user {os.geteuid()}")


# --- The reader: the tcp transport's, whose threads copy out of the source's memory by themselves.
#
# The seal is read after each chunk, before the sink checks it. Memory that the source hands over is mapped, and copied
# from there; nothing is asked of the source's process then.


class Remote:
    """The source's memory, for all threads of a read."""

    def __init__(
        self, process: Process, addresses: Addresses, seal_address: int, seal: bytes, *, is_mapped: bool
    ) -> None:
        """`is_mapped`: the addresses are of this process."""
        self._process = process
        self.addresses = addresses
        self._seal_address, self._seal = seal_address, seal
        self.is_mapped = is_mapped
        self.close = process.close

    @property
    def is_native(self) -> bool:
        """True if the native library can read it."""
        return self._process.pidfd >= 0

    @property
    def is_sealed(self) -> bool:
        """The export has not ended, and this is still the process that made it."""
        return self._process.has(self._seal_address, self._seal)

    def read(self, start: int, stop: int, ours: Addresses, theirs: Addresses) -> None:
        """Copy what is there now; `is_sealed` tells if it counts. Raises `TransportMissing` if it never can work."""
        try:
            self._process.read(start, stop, theirs, ours)
        except Lost as error:
            if self.is_sealed:  # it is there and means it, and yet these pages are not for the kernel to read
                raise unreadable(self._process.pid, str(error)) from error
            raise

    def describe(self, state: shapes.StreamState) -> None:
        """For the mover, which must not outlive this."""
        state.is_local, state.pid, state.pidfd = 1, self._process.pid, self._process.pidfd
        state.is_mapped = self.is_mapped
        state.theirs = table_of(self.addresses)
        state.seal_address = self._seal_address
        state.seal[:] = self._seal


def unreadable(pid: int, why: str) -> TransportMissing:
    """The memory is there, but not for others."""
    text = f"the memory that process {pid} exports cannot be read from outside: {why}"
    return TransportMissing(text, hint="memory of a device's driver? tcp reads it from inside")


class LocalJob(AnnouncedJob):
    """What the threads of one read share."""

    def __init__(self, settings: TcpSettings, endpoint: str, key: str, sink: Sink, *, maps: bool) -> None:
        super().__init__(settings, endpoint, key, sink)
        self.maps = maps
        self.remote: Remote | None = None
        self.mapped: Mapped | None = None
        self.placed: Placed | None = None  # of a read of tiles: where they lie at the source

    def close(self) -> None:
        if self.remote is not None:
            self.remote.close()
        if self.mapped is not None:
            self.mapped.close()


class LocalRead(TcpRead):
    """One read from one source on this host."""

    kind = "local"
    has_links = False  # its streams are threads that copy: as many as are asked for, at once

    def __init__(self, job: LocalJob, ending: Callable[[TcpRead], OnEnd], place: Place, streams: type[Stream]) -> None:
        self._place, self._kind = place, streams
        super().__init__(job, ending)

    def opened(self, index: int) -> AbstractContextManager[Stream]:
        return opened(self.job, index, self._dial, self._kind)

    @property
    def path(self) -> str:
        job = self.job
        way = "mapped" if isinstance(job, LocalJob) and job.mapped is not None else "process_vm_readv"
        return f"{way}, {counted(self.streams, 'thread')}{self.mover_text}"

    def _dial(self, job: Job, index: int) -> Wire:
        try:
            place, name = parse_endpoint(job.endpoint)
        except ValueError as error:
            raise Garbled(str(error)) from error
        difference = self._place.difference(place)
        if difference is not None:
            raise TransportMissing(f"{job.endpoint} cannot be read from here: {difference}")
        wire = wire_for(job, socket.AF_UNIX)
        try:
            wire.connect(socket_address(name))
            check_listener(wire, job.endpoint)
            wire.limit_waits(receive_s=job.settings.silence_s, send_s=job.settings.silence_s)
        except (Vanished, TransportMissing):
            job.leave(wire)
            wire.close()
            raise
        return wire


class ReceivingStream(AnnouncedStream):
    """One connection to a source of this host: descriptors may come with a frame, and its seal can be read."""

    _received: Received | None = None

    def __init__(self, job: Job, wire: Wire, index: int) -> None:
        super().__init__(job, wire, index)
        assert isinstance(job, LocalJob)
        self._its = job

    @property
    def _remote(self) -> Remote:
        assert self._its.remote is not None, "bytes before addresses"
        return self._its.remote

    def next_with(self, received: Received) -> tuple[int, int, int]:
        """The next frame that says something. `received` then has its descriptors."""
        self._received = received
        try:
            return self.next_frame()
        finally:
            self._received = None

    def receive_header(self) -> tuple[int, int, int]:
        if self._received is None:
            return super().receive_header()
        return receive_header(self.wire, self._received)

    def prove(self, pid: int, addresses: Addresses, seal_address: int, seal: bytes, *, is_mapped: bool = False) -> None:
        """Look that the source's memory can be read, and that the export lasts."""
        if pid == 0:
            raise TransportMissing("the source's process is not of our PID namespace", hint=remedy())
        try:
            remote = self._its.remote = Remote(Process(pid), addresses, seal_address, seal, is_mapped=is_mapped)
            if not remote.is_sealed:
                raise self.why_ended()
        except Lost as error:
            raise Vanished(str(error)) from error

    def check_seal(self) -> None:
        """Raises what ended the export, if it has ended."""
        try:
            if self._remote.is_sealed:
                return
        except Lost as error:
            raise self.why_ended() from error
        raise self.why_ended()


class LocalStream(ReceivingStream):
    """One connection, and the thread that copies what is announced on it."""

    def __init__(self, job: Job, wire: Wire, index: int) -> None:
        super().__init__(job, wire, index)
        self.can_map = self._its.maps

    def receive_manifest(self) -> bytes:
        """And where the bytes are. Proves first that they can be read."""
        manifest, kept = super().receive_manifest(), None
        with contextlib.closing(Received()) as received:
            kind, length, number = self.next_with(received) if self.can_map else self.next_frame()
            if kind == MAPPED and self.can_map:
                words = bytes(self.wire.receive_body(length, MAX_MAPPED_BYTES))
                kept = self._map(words, received.descriptors(), is_kept=number == FROZEN)
                kind, length, _ = self.next_frame()
        if kind != MEMORY_FRAME:
            raise Garbled(f"a frame of kind {kind} where the addresses were due")
        body = memoryview(self.wire.receive_body(length, MAX_MEMORY_BYTES + SEAL.size))
        if length < SEAL.size:
            raise Garbled(f"addresses of {length} B")
        try:
            addresses = Addresses.decode(body[SEAL.size :])
        except ValueError as error:
            raise Garbled(f"malformed addresses: {error}") from error
        if addresses.stop != self.size_bytes:
            raise Garbled(f"addresses of {addresses.stop} B for content of {self.size_bytes} B")
        self._prove(addresses, *SEAL.unpack_from(body))
        if kept is not None:
            hand_over(self.job.sink, addresses, *kept)
        return manifest

    def _map(self, body: bytes, descriptors: Sequence[int], *, is_kept: bool) -> tuple[int, Shared] | None:
        try:
            mapped = self._its.mapped = Mapped(body, descriptors)
        except Unmappable as error:
            _log.info("%s is not mapped: %s", self.job.key, error)
            return None
        return mapped.keep(descriptors) if is_kept else None

    def _prove(self, addresses: Addresses, seal_address: int, seal: bytes) -> None:
        mapped = self._its.mapped
        if mapped is None:
            self.prove(credentials_of(self.wire.sock)[0], addresses, seal_address, seal)
            return
        try:
            addresses = moved_to(addresses, mapped.regions)
        except ValueError as error:
            raise Garbled(f"{error}: what lies at these addresses was not handed over") from error
        self.prove(os.getpid(), addresses, mapped.seal_address, mapped.seal, is_mapped=True)

    def make_mover(self, wanted: Sequence[int], streams: int) -> Mover | None:
        if not self._remote.is_native:
            return None
        job = self.job
        return make_mover(job.settings, job.sink, wanted, streams, LOCAL_TILE_BYTES, job.batches)

    def state_for(self, mover: Mover) -> shapes.StreamState:
        """The state of the native read: the source process, and its addresses."""
        state = super().state_for(mover)
        self._remote.describe(state)
        return state

    def conclude(self, state: shapes.StreamState) -> None:
        if state.status == shapes.UNREADABLE:
            check_refused(state.pid, state.error)
            raise unreadable(state.pid, os.strerror(state.error))
        if state.status == shapes.LOST:
            check_refused(state.pid, state.error)
            raise self.why_ended()
        super().conclude(state)

    def receive_bytes(self, start: int, stop: int, views: Sequence[memoryview]) -> None:
        try:
            self._remote.read(start, stop, Addresses.of_views(views, start), self.places(start, stop))
        except Lost as error:
            raise self.why_ended() from error

    def places(self, start: int, stop: int) -> Addresses:
        """Where bytes [start, stop), and perhaps others, lie at the source."""
        return self._remote.addresses

    def taken(self, size_bytes: int) -> None:
        """What was copied counts if the seal is still there."""
        self.check_seal()
        self.note_read(size_bytes, is_last=not self.asked)


# --- Tiles of another layout: rows of the source's memory. Batches of short runs are sent instead: a run costs 0.7 us.


SENT_BELOW_BYTES = 4096  # runs that are shorter on an average are sent


class LocalTiles(AnnouncedTiles, LocalStream):
    """One connection of such a read."""

    @property
    def sent_below_bytes(self) -> int:
        return 0 if self._remote.is_mapped else SENT_BELOW_BYTES

    def make_mover(self, wanted: Sequence[int], streams: int) -> Mover | None:
        if not wanted or load.library() is None:
            return None
        try:
            self._its.placed = Placed(self._batches.rows, self._remote.addresses)
        except BadRow:
            return None  # of several pieces of memory: Python goes through them
        return super().make_mover(wanted, streams)

    def state_for(self, mover: Mover) -> shapes.StreamState:
        state, placed = super().state_for(mover), self._its.placed
        assert placed is not None, "a mover without addresses"
        state.theirs = placed.table
        return state

    def places(self, start: int, stop: int) -> Addresses:
        found: list[tuple[int, int]] = []
        for place, length in self._batches.rows.ranges(start, stop):
            at, end = place, place + length
            while at < end:
                pairs = self._remote.addresses.part(at, end)
                found += zip(pairs[0::2], pairs[1::2], strict=True)
                at += sum(pairs[1::2])
        return Addresses.of_ranges(found, start)


# --- The transport. It needs Linux, one user, one PID and one network namespace, and a kernel that permits the reads.
#
# A reader finds out by reading the seal, and ends with `TransportMissing` where it may not.


@dataclass(frozen=True)
class LocalSettings:
    """How one worker reads and lets read on its host."""

    token: str | None = field(
        default=None, repr=False
    )  # shared secret that a reader must show, besides being of the same user
    silence_s: float = 5.0  # as tcp's: the keepalive comes every 1.25 s
    threads: int = 2  # one copies 16-18 GiB/s, or 12.7 with the digest; two 20-24, which is all that the memory gives
    thread_bytes: int = 8 * MIB  # what makes a further thread worth its connection: 0.5 ms of copying
    ahead_bytes: int = 256 * MIB  # each request wakes the source, which takes a core from a reader for 0.1 ms
    max_connections: int = 64  # 32 readers with 2 threads each
    maps: bool = True  # memory that the source hands over, rather than let the kernel copy out of its process
    allow_readers: bool = True  # under Yama's scope 1 only: without it no worker may read (as Open MPI and UCX do)

    def as_tcp(self) -> TcpSettings:
        """The settings that it shares with the tcp transport."""
        return TcpSettings(
            token=self.token,
            silence_s=self.silence_s,
            connect_s=self.silence_s,
            streams=self.threads,
            stream_rate_bytes_per_s=0,
            stream_bytes=self.thread_bytes,
            ahead_bytes=self.ahead_bytes,
            max_connections=self.max_connections,
            congestion=None,
        )


class LocalTransport(TcpTransport):
    """Moves registered bytes between two workers of one host. Raises `TransportMissing` where that cannot be."""

    kind = "local"

    def __init__(self, settings: LocalSettings | None = None) -> None:
        settings = settings or LocalSettings()
        self._place = here()
        self._maps = settings.maps
        probe_self()
        if settings.allow_readers:
            allow_readers()
        super().__init__(settings.as_tcp())

    @property
    def mapping_place(self) -> str:
        """Those who have the same one can map each other's memory, as far as is known; empty: it maps none."""
        return format_place(self._place) if self._maps else ""

    def server_here(self) -> TcpServer:
        """Raises `OSError` where there is no unix socket."""
        return LocalServer(self.settings, self._place)

    def make_server(self) -> TcpServer:
        try:
            return self.server_here()
        except OSError as error:
            if is_shortage(error):
                raise
            raise TransportMissing(f"no unix socket can be had here: {error}", hint="use tcp") from error

    def make_read(self, endpoint: str, key: str, sink: Sink, ending: Callable[[TcpRead], OnEnd]) -> TcpRead:
        streams = LocalTiles if isinstance(sink, Piecewise) else LocalStream
        job = LocalJob(self.settings, endpoint, key, sink, maps=self._maps)
        return LocalRead(job, ending, self._place, streams)

    def why_not(self, endpoint: str) -> str | None:
        try:
            place, _ = parse_endpoint(endpoint)
        except ValueError as error:
            return str(error)
        return self._place.difference(place)
