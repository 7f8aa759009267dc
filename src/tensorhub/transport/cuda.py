"""The cuda transport: weights from device to device between processes of one host, digested in the same pass.

A reader opens the source's device memory once for each registration and copies from it by kernels of its own. The
source says over a unix socket, as with `local`, what its memory is and which chunks are there. Once the memory is open,
nothing of the source's interpreter is needed.

What is said, after the greetings and the manifest:

    source  SHARED   the seal, the id of the registration, and the descriptor of a pipe that closes with it
    reader  OPEN     `number` 1: send the handles; 0: they are open already
    source  HANDLES  what the device needs to open the memory
    source  READY    as `announcing` says

Why what was read is right: a chunk counts only if the source's seal was seen after the copy, as with `local`, and if
the digest that the device made of the copied bytes is the announced one. Why memory does not stay: the reader lets go
of what it has opened as soon as the pipe closes, which it does when the source registers anew, closes or dies.
"""

import contextlib
import logging
import os
import secrets
import select
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..core.errors import TensorHubError, TransportMissing, UsageError
from . import tcp_wire
from .announcing import AnnouncedStream, AnnouncingServer
from .base import ByteStream, OnEnd, Sink, Taking
from .forks import opening
from .local import LocalSettings, LocalTransport
from .local_host import SCHEME as LOCAL
from .local_host import Place
from .local_mapping import Received, receive_header, send_with_descriptors
from .local_memory import Call, Lost, Process, Token
from .local_reader import LocalRead
from .local_server import SEAL, LocalServed, LocalServer, credentials_of
from .on_device import OnDevice, Opened, Shared, on_device
from .parcels import Piecewise
from .tcp_job import Job
from .tcp_reader import TcpRead
from .tcp_served import Served
from .tcp_server import TcpServer
from .tcp_settings import MIB, TcpSettings
from .tcp_wire import Garbled, Hello, Refusal, Vanished, Wire
from .threads import Thread, start

_log = logging.getLogger(__name__)

SCHEME = "cuda"
SHARED, OPEN, HANDLES = 20, 21, 22
ID_BYTES = 16
MAX_HANDLES_BYTES = 16 << 20
ASK_CHUNKS = 1 << 14  # at once: 64 GiB in chunks of 4 MiB


@dataclass(frozen=True)
class CudaSettings:
    """How one worker reads from devices of its host, and lets read."""

    token: str | None = field(default=None, repr=False)  # that a reader must show, besides being of the same user
    silence_s: float = 5.0  # as tcp's: the keepalive comes every 1.25 s
    window_bytes: int = 256 * MIB  # copied, then judged and served on: 0.3 ms on an H200


class Lifeline:
    """The id of a registration, and a pipe that is open as long as it lasts."""

    def __init__(self) -> None:
        self.id = secrets.token_bytes(ID_BYTES)
        with opening():
            self.end, self._open = os.pipe()
        self.close = weakref.finalize(self, _close, self.end, self._open)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


class CudaServer(LocalServer):
    """Lets readers of this user open the memory of exports."""

    kind = SCHEME

    def __init__(self, settings: TcpSettings, place: Place) -> None:
        self._lifelines: weakref.WeakKeyDictionary[ByteStream, Lifeline] = weakref.WeakKeyDictionary()
        super().__init__(settings, place)

    def advertised(self, listening: Sequence[socket.socket]) -> str:
        return super().advertised(listening).replace(LOCAL, SCHEME, 1)

    def why_not(self, served: Served) -> Refusal | None:
        if on_device(served.export.stream) is not None:
            return None
        return Refusal("memory", "its tensors are not all on a device")

    def introduce(self, wire: Wire, served: Served, hello: Hello) -> None:
        """The manifest, and the memory."""
        stream = served.export.stream
        assert isinstance(served, LocalServed)
        assert isinstance(stream, OnDevice)
        AnnouncingServer.introduce(self, wire, served, hello)
        with self._changed:
            lifeline = self._lifelines.setdefault(stream, Lifeline())
        body = SEAL.pack(served.seal.address, served.seal.value) + lifeline.id
        send_with_descriptors(wire, SHARED, 0, body, [lifeline.end])
        kind, length, wants_handles = wire.receive_header()
        if kind != OPEN or length or wants_handles not in (0, 1):
            raise Garbled(f"a frame of kind {kind} with {length} B where OPEN was due")
        if wants_handles:
            try:
                shared = stream.share()
            except TransportMissing as error:  # another transport may do
                raise Garbled(str(error), "memory") from error
            self._hand_over(wire, shared)

    def _hand_over(self, wire: Wire, shared: Shared) -> None:
        """Send the handles. A reader says with its first request that it has opened them."""
        try:
            if len(shared.body) > MAX_HANDLES_BYTES:
                raise UsageError("the memory lies in too many pieces")
            wire.send_frame(HANDLES, payload=[shared.body])
            kind, length, _ = wire.receive_header()
            if kind != OPEN or length:
                raise Garbled(f"a frame of kind {kind} with {length} B where OPEN was due")
        except BaseException:
            shared.give_up()
            raise

    def close(self) -> None:
        super().close()
        for lifeline in list(self._lifelines.values()):
            lifeline.close()


class Peers:
    """What this worker has opened of others, by the id of the registration, until its pipe closes."""

    def __init__(self, window_bytes: int) -> None:
        self.window_bytes = window_bytes
        self._opened: dict[bytes, Opened] = {}
        self._lock = threading.Lock()
        self._wake: tuple[int, int] | None = None
        self._pipes: dict[int, bytes] = {}

    def known(self, registration: bytes) -> Opened | None:
        with self._lock:
            return self._opened.get(registration)

    def keep(self, registration: bytes, opened: Opened, pipe: int) -> None:
        """Until its source lets it go. `pipe` stays the caller's."""
        with opening():
            mine = os.dup(pipe)
        with self._lock:
            self._opened[registration] = opened
            self._pipes[mine] = registration
            if self._wake is None:
                self._wake = os.pipe()
                start(Thread(self._watch, name="tensorhub-cuda-watch"))
            os.write(self._wake[1], b"+")

    def _watch(self) -> None:
        """The thread that waits for pipes to close."""
        while True:
            with self._lock:
                if self._wake is None:
                    return
                wake, pipes = self._wake[0], list(self._pipes)
            poll = select.poll()
            poll.register(wake, select.POLLIN)
            for pipe in pipes:
                poll.register(pipe, 0)  # a hang-up is always told
            for ready, _ in poll.poll():
                if ready == wake:
                    if os.read(wake, 4096).endswith(b"-"):
                        self._end()
                        return
                    continue
                with self._lock:
                    self._opened.pop(self._pipes.pop(ready), None)
                os.close(ready)

    def _end(self) -> None:
        with self._lock:
            assert self._wake is not None
            _close(*self._wake, *self._pipes)
            self._pipes.clear()
            self._opened.clear()
            self._wake = None

    def close(self) -> None:
        """Let go of everything."""
        with self._lock:
            if self._wake is not None:
                os.write(self._wake[1], b"-")


class CudaTransport(LocalTransport):
    """Moves bytes between devices. Raises `TransportMissing` where this process cannot read others of its host."""

    kind = SCHEME

    def __init__(self, settings: CudaSettings | None = None) -> None:
        mine = settings or CudaSettings()
        self._peers = Peers(mine.window_bytes)
        super().__init__(LocalSettings(token=mine.token, silence_s=mine.silence_s, threads=1, maps=False))

    def make_server(self) -> TcpServer:
        try:
            return CudaServer(self.settings, self._place)
        except OSError as error:
            raise TransportMissing(f"no unix socket can be had here: {error}", hint="use tcp") from error

    def make_read(self, endpoint: str, key: str, sink: Sink, ending: Callable[[TcpRead], OnEnd]) -> TcpRead:
        return CudaRead(self.settings, endpoint, key, sink, ending, self._place, self._peers)

    def close(self) -> None:
        super().close()
        self._peers.close()


class CudaJob(Job):
    """What a read knows besides."""

    def __init__(self, settings: TcpSettings, endpoint: str, key: str, sink: Sink, peers: Peers) -> None:
        super().__init__(settings, endpoint, key, sink)
        self.peers = peers
        self.process: Process | None = None

    def refused(self, refusal: Refusal) -> TensorHubError:
        if refusal.code in ("user", "memory"):
            return TransportMissing(f"{self.endpoint} cannot serve {self.key!r} this way: {refusal.message}")
        return super().refused(refusal)

    def close(self) -> None:
        if self.process is not None:
            self.process.close()


class CudaRead(LocalRead):
    """One read from one source on this host."""

    kind = SCHEME

    def __init__(
        self,
        settings: TcpSettings,
        endpoint: str,
        key: str,
        sink: Sink,
        ending: Callable[[TcpRead], OnEnd],
        place: Place,
        peers: Peers,
    ) -> None:
        self._peers = peers
        super().__init__(settings, endpoint, key, sink, ending, place, maps=False, streams=CudaStream)

    def make_job(self, settings: TcpSettings, endpoint: str, key: str, sink: Sink) -> Job:
        return CudaJob(settings, endpoint, key, sink, self._peers)

    @property
    def path(self) -> str:
        return "device to device"


class CudaStream(AnnouncedStream):
    """One connection, and the thread that copies what is announced on it."""

    def __init__(self, job: Job, wire: Wire, index: int) -> None:
        super().__init__(job, wire, index)
        assert isinstance(job, CudaJob)
        self._its = job
        self._source: Opened | None = None

    def receive_manifest(self) -> bytes:
        """And the source's memory, open."""
        sink = self.job.sink
        stream = None if isinstance(sink, Piecewise) else on_device(sink.stream)
        if stream is None or not isinstance(sink, Taking):
            raise TransportMissing("the tensors here are not all on a device, or of another layout", hint="use tcp")
        manifest = super().receive_manifest()
        with contextlib.closing(Received()) as received:
            kind, length, _ = receive_header(self.wire, received)
            if kind == tcp_wire.GONE:
                raise self.job.refused(self.wire.receive_gone(length))
            if kind != SHARED or length != SEAL.size + ID_BYTES or len(received.descriptors()) != 1:
                raise Garbled(f"a frame of kind {kind} with {length} B where SHARED was due")
            body = bytes(self.wire.receive_body(length, length))
            self._prove(*SEAL.unpack_from(body))
            self._source = self._open(stream, body[SEAL.size :], received.descriptors()[0])
        if self._source.size_bytes != self.size_bytes:
            raise Garbled(f"memory of {self._source.size_bytes} B for content of {self.size_bytes} B")
        return manifest

    def _open(self, stream: OnDevice, registration: bytes, pipe: int) -> Opened:
        known = self._its.peers.known(registration)
        if known is not None:
            self.wire.send_frame(OPEN, 0)
            return known
        self.wire.send_frame(OPEN, 1)
        kind, length, _ = self.next_frame()
        if kind != HANDLES:
            raise Garbled(f"a frame of kind {kind} where HANDLES was due")
        try:
            opened = stream.open(bytes(self.wire.receive_body(length, MAX_HANDLES_BYTES)))
        except ValueError as error:
            raise Garbled(f"malformed handles: {error}") from error
        self.wire.send_frame(OPEN, 1)
        self._its.peers.keep(registration, opened, pipe)
        return opened

    def _prove(self, seal_address: int, seal: bytes) -> None:
        pid, _, _ = credentials_of(self.wire.sock)
        try:
            self._its.process = Process(pid)
        except Lost as error:
            raise Vanished(str(error)) from error
        self._seal = Token(seal_address, seal), Call(pid)
        self._check_seal()

    def _check_seal(self) -> None:
        """Raises what ended the export, if it has ended."""
        assert self._its.process is not None
        try:
            is_sealed = self._its.process.has(*self._seal)
        except Lost as error:
            raise self.farewell() from error
        if not is_sealed:
            raise self.farewell()

    def mover_for(self, wanted: Sequence[int], streams: int) -> None:
        """The device moves the bytes."""

    def pump(self) -> None:
        """Ask for everything, and copy what is there in windows."""
        wanted = self.job.claims.take(1 << 62)
        for first in range(0, len(wanted), ASK_CHUNKS):
            asked = wanted[first : first + ASK_CHUNKS]
            with contextlib.suppress(Vanished):  # it may have said farewell: what it said can still be read
                self.ask(asked)
            done = 0
            while done < len(asked) and not self.job.is_over:
                done += self._take(asked, done)

    def _take(self, asked: Sequence[int], at: int) -> int:
        """Copy the chunks that follow each other from `asked[at]` on and are there. Returns how many."""
        job, sink = self.job, self.job.sink
        most = max(1, self._its.peers.window_bytes // sink.chunk_bytes)
        first, count = asked[at], 0
        while at + count < len(asked) and count < most and asked[at + count] == first + count:
            if count and not self.has_ready(first + count):
                break
            self.await_chunk(first + count, 0)
            count += 1
        start, stop = job.span(first)[0], job.span(first + count - 1)[1]
        sink.touch()
        assert isinstance(sink.stream, OnDevice)
        assert isinstance(sink, Taking)
        assert self._source is not None
        digests = sink.stream.copy_from(self._source, start, stop, sink.chunk_bytes, digests=sink.is_checking)
        self._check_seal()
        self.note_read(stop - start, is_last=at + count == len(asked))
        job.count_received(stop - start, count)
        sink.take(range(first, first + count), digests)
        job.count_stored(count)
        return count
