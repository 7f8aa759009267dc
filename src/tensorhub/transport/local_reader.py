"""The target's side of the local transport: one read, whose threads copy out of the source's memory by themselves.

It is the tcp transport's read with other ends: it dials an abstract unix socket, learns from MEMORY where bytes are,
proves with the seal that it can read them and that they are the right process's, and for each chunk that is READY lets
the kernel copy it into the sink's memory. The seal is read again after each chunk and before the sink judges it, so
what the source may have changed meanwhile is neither stored nor taken for corrupt.

Memory that the source hands over (`local_mapping`) is mapped, and copied from there: by the mover in one go with the
digest, by Python as before, with this very process as the one whose memory is read. The seal's page is mapped too, so
nothing is asked of the source's process, and what was read of one that has died meanwhile counts.

If the kernel refuses, nothing was begun and the read ends with `TransportMissing`, which says why: the same two workers
can still use tcp. It must never: let a chunk be judged whose seal was not seen after the copy.
"""

import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from ..core.errors import TensorHubError, TransportMissing
from .announcing import MAX_MEMORY_BYTES, MEMORY, AnnouncedStream
from .base import Look, OnEnd, Sink
from .local_host import Place, parse_endpoint, remedy, socket_address
from .local_mapping import FROZEN, MAPPED, MAX_MAPPED_BYTES, Mapped, Received, hand_over, receive_header
from .local_memory import Call, Lost, Process, Token, check_refused
from .local_server import SEAL, check_listener, credentials_of
from .located import Located
from .native import shapes
from .native_read import LOCAL_TILE_BYTES, Mover, mover_for
from .rows import Placed, table_of
from .scopes import scope
from .sealed import Shared, Unmappable, moved_to
from .tcp_dial import wire_for
from .tcp_job import Job
from .tcp_reader import TcpRead, counted
from .tcp_settings import TcpSettings
from .tcp_stream import Stream, opened
from .tcp_wire import Garbled, Refusal, Vanished, Wire
from .vectors import Addresses, Bridged

_log = logging.getLogger(__name__)

SMALL_BYTES = 1 << 16  # smaller pieces on the average go to the kernel together
_CANNOT = ("user", "memory")  # refusals that are no fault of the source: another transport may do


class Remote:
    """The source's memory, for one thread of a read."""

    def __init__(
        self,
        process: Process,
        addresses: Addresses,
        bridged: Bridged | None,
        seal_address: int,
        seal: bytes,
        *,
        is_mapped: bool,
    ) -> None:
        """`bridged` is given if that is the faster way to read it; `is_mapped` if the addresses are of ours."""
        self._process = process
        self.addresses = addresses
        self._bridged = bridged
        self._token = Token(seal_address, seal)
        self._call = Call(process.pid)
        self.is_mapped = is_mapped

    def again(self) -> "Remote":
        """The same for another thread."""
        token = self._token
        return Remote(
            self._process, self.addresses, self._bridged, token.address, token.value, is_mapped=self.is_mapped
        )

    def read_view(self, start: int, view: memoryview, ours: Addresses, look: Look | None) -> None:
        """What is now at `start` of the stream into the view that is there in ours; both may lie in several pieces."""
        stop = start + len(view)
        theirs_at, ours_at = self.addresses.whole(start, stop), ours.whole(start, stop)
        if not theirs_at or not ours_at:
            self.read(start, stop, ours)
            if look is not None:
                look(view)
            return
        with self._explained():
            self._process.read_piece(theirs_at, ours_at, view, look, self._call)

    @property
    def is_native(self) -> bool:
        """The mover can read it."""
        return self._process.pidfd >= 0

    @property
    def is_sealed(self) -> bool:
        """The export has not ended, and this is still the process that made it."""
        return self._process.has(self._token, self._call)

    def read(self, start: int, stop: int, ours: Addresses, theirs: Addresses | None = None) -> None:
        """Copy what is there now, or at `theirs`; `is_sealed` tells if it counts.

        Raises `TransportMissing` if it never can work.
        """
        with self._explained():
            if self._bridged is not None and theirs is None:
                start = self._process.read_bridged(start, stop, self._bridged)
            self._process.read(start, stop, theirs or self.addresses, ours, self._call)

    @scope
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Lost as error:
            if self.is_sealed:  # it is there and means it, and yet these pages are not for the kernel to read
                raise unreadable(self._process.pid, str(error)) from error
            raise

    def describe(self, state: shapes.StreamState) -> None:
        """For the mover, which must not outlive this."""
        state.is_local, state.pid, state.pidfd = 1, self._process.pid, self._process.pidfd
        state.is_mapped = self.is_mapped
        state.theirs = table_of(self.addresses)
        state.seal_address = self._token.address
        state.seal[:] = self._token.value


def unreadable(pid: int, why: str) -> TransportMissing:
    """The memory is there, but not for others."""
    text = f"the memory that process {pid} exports cannot be read from outside: {why}"
    return TransportMissing(text, hint="memory of a device's driver? tcp reads it from inside")


class LocalJob(Job):
    """What the threads of one read share."""

    def __init__(self, settings: TcpSettings, endpoint: str, key: str, sink: Sink, *, maps: bool) -> None:
        super().__init__(settings, endpoint, key, sink)
        self.maps = maps
        self.ours: Addresses | None = None  # None: the sink's memory has no lasting addresses
        self.remote: Remote | None = None
        self.process: Process | None = None
        self.mapped: Mapped | None = None
        self.placed: Placed | None = None  # of a read of pieces: where they lie at the source

    def refused(self, refusal: Refusal) -> TensorHubError:
        if refusal.code in _CANNOT:
            return TransportMissing(f"{self.endpoint} cannot serve {self.key!r} this way: {refusal.message}")
        return super().refused(refusal)

    def close(self) -> None:
        if self.process is not None:
            self.process.close()
        if self.mapped is not None:
            self.mapped.close()


class LocalRead(TcpRead):
    """One read from one source on this host."""

    kind = "local"
    has_links = False  # its streams are threads that copy: as many as are asked for, at once

    def __init__(
        self,
        settings: TcpSettings,
        endpoint: str,
        key: str,
        sink: Sink,
        ending: Callable[[TcpRead], OnEnd],
        place: Place,
        *,
        maps: bool,
        streams: type[Stream],
    ) -> None:
        self._place = place
        self._maps = maps
        self._kind = streams
        super().__init__(settings, endpoint, key, sink, ending)

    def make_job(self, settings: TcpSettings, endpoint: str, key: str, sink: Sink) -> Job:
        return LocalJob(settings, endpoint, key, sink, maps=self._maps)

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


class LocalStream(AnnouncedStream):
    """One connection, and the thread that copies what is announced on it."""

    def __init__(self, job: Job, wire: Wire, index: int) -> None:
        super().__init__(job, wire, index)
        assert isinstance(job, LocalJob)
        self._its = job
        self._remote: Remote | None = None
        self.can_map = job.maps
        self._received: Received | None = None  # descriptors that came with the last frame, while such may come

    def receive_manifest(self) -> bytes:
        """And where the bytes are; proves that they can be read before anybody counts on it."""
        manifest, kept = super().receive_manifest(), None
        if self.can_map:
            self._received = Received()
        try:
            kind, length, number = self.next_frame()
            if kind == MAPPED and self._received is not None:
                words = bytes(self.wire.receive_body(length, MAX_MAPPED_BYTES))
                kept = self._map(words, self._received.descriptors(), is_kept=number == FROZEN)
                kind, length, _ = self.next_frame()
        finally:
            if self._received is not None:
                self._received.close()
            self._received = None
        if kind != MEMORY:
            raise Garbled(f"a frame of kind {kind} where the addresses were due")
        body = memoryview(self.wire.receive_body(length, MAX_MEMORY_BYTES + SEAL.size))
        if length < SEAL.size:
            raise Garbled(f"addresses of {length} B")
        stream = self.job.sink.stream
        self._its.ours = stream.addresses() if isinstance(stream, Located) else None
        try:
            addresses = Addresses.decode(body[SEAL.size :], self._its.ours)
        except ValueError as error:
            raise Garbled(f"malformed addresses: {error}") from error
        if addresses.stop != self.size_bytes:
            raise Garbled(f"addresses of {addresses.stop} B for content of {self.size_bytes} B")
        self._its.remote = self._prove(addresses, *SEAL.unpack_from(body))
        if kept is not None:
            hand_over(self.job.sink, addresses, *kept)
        return manifest

    def receive_header(self) -> tuple[int, int, int]:
        """With the descriptors that may come now."""
        if self._received is None:
            return super().receive_header()
        return receive_header(self.wire, self._received)

    def _map(self, body: bytes, descriptors: Sequence[int], *, is_kept: bool) -> tuple[int, Shared] | None:
        try:
            mapped = self._its.mapped = Mapped(body, descriptors)
        except Unmappable as error:
            _log.info("%s is not mapped: %s", self.job.key, error)
            return None
        return mapped.keep(descriptors) if is_kept else None

    def _prove(self, addresses: Addresses, seal_address: int, seal: bytes) -> Remote:
        mapped = self._its.mapped
        if mapped is not None:
            try:
                addresses = moved_to(addresses, mapped.regions)
            except ValueError as error:
                raise Garbled(f"{error}: what lies at these addresses was not handed over") from error
            pid, seal_address, seal = os.getpid(), mapped.seal_address, mapped.seal
        else:
            pid, _, _ = credentials_of(self.wire.sock)
        if pid == 0:
            raise TransportMissing("the source's process is not of our PID namespace", hint=remedy())
        try:
            self._its.process = Process(pid)
            bridged = Bridged(addresses, self._its.ours) if self._its.ours is not None else None
            can_help = bridged is not None and bridged.can_help
            remote = Remote(
                self._its.process,
                addresses,
                bridged if can_help else None,
                seal_address,
                seal,
                is_mapped=mapped is not None,
            )
            if not remote.is_sealed:
                raise self.farewell()
        except Lost as error:
            raise Vanished(str(error)) from error
        return remote

    def mover_for(self, wanted: Sequence[int], streams: int) -> Mover | None:
        if self._its.remote is None or not self._its.remote.is_native:
            return None
        job = self.job
        return mover_for(job.settings, job.sink, wanted, streams, LOCAL_TILE_BYTES, job.parcels)

    def state_for(self, mover: Mover) -> shapes.StreamState:
        """With whose memory is read, and where."""
        state, remote = super().state_for(mover), self._its.remote
        assert remote is not None, "bytes before addresses"
        remote.describe(state)
        return state

    def conclude(self, state: shapes.StreamState) -> None:
        if state.status == shapes.UNREADABLE:
            check_refused(state.pid, state.error)
            raise unreadable(state.pid, os.strerror(state.error))
        if state.status == shapes.LOST:
            check_refused(state.pid, state.error)
            raise self.farewell()
        super().conclude(state)

    def transfer(self, start: int, stop: int, views: Sequence[memoryview], look: Look | None) -> None:
        """Large pieces one by one and through the core's cache; small ones all in one call."""
        remote, ours = self._have_remote(), self._its.ours
        try:
            if ours is None or len(views) > 1 + (stop - start) // SMALL_BYTES:
                super().transfer(start, stop, views, look)
                return
            for view in views:
                remote.read_view(start, view, ours, look)
                start += len(view)
        except Lost as error:
            raise self.farewell() from error

    def _have_remote(self) -> Remote:
        """The source's memory, for this thread."""
        if self._remote is None:
            assert self._its.remote is not None, "bytes before addresses"
            self._remote = self._its.remote.again()
        return self._remote

    def take_bytes(self, start: int, stop: int, views: Sequence[memoryview]) -> None:
        assert self._remote is not None
        self._remote.read(start, stop, self._its.ours or Addresses.of_views(views, start))

    def taken(self, size_bytes: int) -> None:
        """What was copied counts if the seal is still there."""
        try:
            if self._remote is None or not self._remote.is_sealed:
                raise self.farewell()
        except Lost as error:
            raise self.farewell() from error
        self.note_read(size_bytes, is_last=not self.asked)
