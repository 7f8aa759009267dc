"""Frames between two workers over one TCP connection, and the socket that carries them."""

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import select
import socket
import struct
import sys
import termios
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from ...protocol.errors import shortened
from ...protocol.messages import shown, shown_fields
from ...protocol.names import MAX_TEXT, Undecodable, decoded
from ..native import load, shapes
from ..ranges import advance, flat, one_call, size_of
from ..threads import scope, track, tracked
from .settings import MAX_WANT_RANGES, TcpSettings, limit_waits, tune

# --- What ends a connection between two workers. The reader turns each into an error of the caller's tree.


class WireError(Exception):
    """This connection is over. Never leaves the transport: the reader turns it into `SourceLost`."""


class Vanished(WireError):
    """The peer closed the connection, or the network broke it."""


class Silent(WireError):
    """Not a byte moved for the whole limit."""


class Unreadable(WireError):
    """Memory on this side is not there any more: it was freed while it was exported, or filled."""


class Garbled(WireError):
    """The peer does not speak this protocol; `code` is what to refuse it with."""

    def __init__(self, message: str, code: str = "malformed") -> None:
        super().__init__(message)
        self.code = code


def lost(error: OSError) -> WireError:
    """Why bytes could not be sent or received: the peer, the network, or our own memory."""
    if error.errno == errno.EFAULT:
        return Unreadable("the memory of its tensors can no longer be read or written: it was freed")
    return Vanished(f"connection lost: {error}")


# --- Graceful shutdown: the peer is to read our last words before a reset can take them from it.
#
# A socket that is closed while the peer still speaks is reset, and with a reset goes whatever the peer has not got yet:
# the last chunks, and the reason why there are no more. So its words are read for a while. Where our half for reading
# was shut, to wake its owner, Linux resets as soon as more words come after our own end: there that end waits until all
# that was sent has arrived. No wait is longer than `LINGER_S` in which nothing arrives, or than `MAX_S`.


LINGER_S = 0.5
MAX_S = 5.0  # some MiB were sent at most: a peer that takes longer wants our thread, not our words
_LINGER_BYTES = 256 * 1024
_WORDS_BYTES = 16384
_LOOK_AGAIN_S = 0.002  # the kernel does not tell that all has arrived


def say_goodbye(sock: socket.socket, *, is_deaf: bool, is_cut: Callable[[], bool]) -> None:
    """End our half of the connection, and read what the peer still says. `is_deaf`: our half for reading was shut."""
    with contextlib.suppress(OSError):
        limit_waits(sock, receive_s=LINGER_S, send_s=LINGER_S)
        if is_deaf and sock.family != socket.AF_UNIX:  # there all that was sent is the peer's already
            _await_arrival(sock, is_cut)
        sock.shutdown(socket.SHUT_WR)
        deadline, left = time.monotonic() + LINGER_S, _LINGER_BYTES
        while left > 0 and time.monotonic() < deadline and (heard := len(sock.recv(_WORDS_BYTES))):
            left -= heard


def _await_arrival(sock: socket.socket, is_cut: Callable[[], bool]) -> None:
    """Until the peer's side has all that was sent, or nothing of it arrives any more."""
    least, began = _unsent_bytes(sock), time.monotonic()
    moved = began
    while (unsent := _unsent_bytes(sock)) and not is_cut():
        now = time.monotonic()
        least, moved = (unsent, now) if unsent < least else (least, moved)
        if now >= min(moved + LINGER_S, began + MAX_S):
            return
        time.sleep(_LOOK_AGAIN_S)


def _unsent_bytes(sock: socket.socket) -> int:
    """What the peer's side has not acknowledged; 0 where the kernel does not tell."""
    found = array("i", [0])
    with contextlib.suppress(OSError):
        fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, found)
    return found[0]


# --- Memory that a source lends to its socket instead of copying it there: `vmsplice` into a pipe, `splice` to the
# socket. The mover does both (`serve.c`); here is the pipe.
#
# The kernel takes references to the pages and hands them down to the network card, or over loopback to the reader,
# which copies them once into its tensors. To copy them first costs a source two thirds of its CPU: over loopback, 1
# GiB in two streams on 2 cores, `send` took 0.13 to 0.16 s of the source and this takes 0.04 to 0.08; verified
# readers got 7.2 to 8.0 GiB/s this way, and 5.4 to 5.8 from `send`.
#
# A page that changes before its reader has it arrives changed. Rules:
# 1. A source lends only to a reader that says in its Hello that it checks every chunk's digest.
# 2. An export that ends says so *behind* what it has lent. Its thread stays until the reader has hung up, which is when
#    it has taken all of it, or until it is cut off.
# 3. A lent chunk (`LENT`) that fails its digest is only in doubt: its reader asks for it once more, to be copied.
# 4. A source lends only where a connection is fast: all that is lent is then soon with the reader, and no withdrawal
#    waits long.
#
# What the kernel, a sandbox or the kind of memory refuses is copied, and not tried again on that connection.


IS_THERE = sys.platform == "linux" and hasattr(os, "splice")

PIPE_BYTES = 1 << 20  # what a user without rights may ask for; 256 pages
MIN_PIPE_BYTES = 1 << 18  # with less, for a user that has many pipes, the calls cost more than the copies


class Pipe:
    """The way of pages from memory to a socket. For one thread, which closes it."""

    def __init__(self) -> None:
        """Raises `OSError`."""
        self._out, self._in = os.pipe()
        track(self)

    @property
    def ends(self) -> tuple[int, int]:
        """Where pages go in, and where they come out."""
        return self._in, self._out

    def descriptors(self) -> tuple[int, int]:
        """The descriptors of both ends."""
        return self.ends

    def close(self) -> None:
        closing, self._in, self._out = self.ends, -1, -1
        for descriptor in closing:
            os.close(descriptor)


def open_pipe() -> Pipe | None:
    """None where this process can lend nothing, or should not."""
    try:
        pipe = Pipe() if IS_THERE else None
    except OSError:
        return None
    if pipe is None:
        return None
    try:
        size_bytes = fcntl.fcntl(pipe.ends[0], fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    except OSError:  # this user has too many pages in pipes
        size_bytes = 0
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # the lowest free number is given out: so many are taken
    if size_bytes < MIN_PIPE_BYTES or 0 <= limit <= 2 * pipe.ends[0]:  # the other half is for connections
        pipe.close()
        return None
    return pipe


# --- Sends what lies in room that others wait for, and keeps that room for a moment only, whatever the peer does.
#
# What the peer has not taken by then is copied, so that the room can go back.


def bounded_send(sock: socket.socket, buffers: Sequence[bytes | memoryview], within_s: float) -> bytes:
    """Send them. Returns a copy of what was not taken in time: to be sent next, once their room was given back."""
    deadline = time.monotonic() + within_s
    pending = list(filter(len, map(flat, buffers)))
    first, writable = 0, select.poll()
    writable.register(sock, select.POLLOUT)
    try:
        while first < len(pending) and (left_s := deadline - time.monotonic()) > 0:
            try:
                sent = sock.sendmsg(one_call(pending, first), (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                writable.poll(left_s * 1000)
            else:
                first = advance(pending, first, sent)
    except OSError as error:
        raise lost(error) from error
    return b"".join(pending[first:])


# --- What two workers say to each other over one TCP connection, and the socket that they say it through.
#
# The reader connects. First each side greets: 16 bytes (magic, version, length) and a MessagePack body. The greeting's
# shape is the same in every version for ever, so that any two versions can tell each other that they differ.
#
#     reader  Hello(token, key, generation, silence_ms, wants_manifest, is_checking)
#     source  Welcome(generation, chunk_bytes, size_bytes)  or  Refusal(code, message), and it hangs up
#
# Then frames: a header of 16 bytes (kind, length, number) and `length` bytes.
#
#     source  MANIFEST  once, if wanted: opaque bytes
#     reader  WANT      ranges of chunks [[start, stop), …], served in this order; `number` COPIED: and not lent
#     source  CHUNK     `number` is the chunk; its bytes, straight from and into registered memory
#     source  LENT      the same, but the memory was lent to the socket: only to a reader that checks digests
#     source  WAITING   the next chunk is not there yet; said every quarter of the silence limit
#     source  GONE      Refusal(code, message): nothing more will come, and why
#
# Rules: a length from the wire is compared with its limit before anything is allocated; header and payload never share
# a buffer; a wait ends by the kernel's own timeouts. One thread owns a `Wire`; any other may only `cut` or `wake` it.


MAGIC = b"\x93THubTCP"  # the first byte is not text: no HTTP, TLS or SSH client begins like this
VERSION = 3
GREETING = struct.Struct("!8sHHI")  # magic, version, 0, length of the body
HEADER = struct.Struct("!BxxxIQ")  # kind, length, number

WANT, MANIFEST, CHUNK, WAITING, GONE, LENT = range(1, 7)
COPIED = 1
LENT_TO, CALLED_OUT = 1, 2  # of a connection, whichever comes first

MAX_GREETING_BYTES = 16 * 1024  # a key, a token, or a refusal in words
MAX_WANT_BYTES = 64 * 1024
MAX_GONE_BYTES = 16 * 1024
MAX_CHUNK_BYTES = 1 << 30

_AT_ONCE = struct.pack("@ii", 1, 0)  # struct linger


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A reader's request. `generation` 0 takes whatever is exported; otherwise exactly that export.

    `silence_ms` is how long the reader bears silence: the source's keepalives come four times as often. `is_checking`
    means that no chunk counts whose digest is not the announced one, `can_map` that it takes memory by its descriptor,
    `shares` that it wants to keep that memory.
    """

    token: str
    key: str
    generation: int
    silence_ms: int
    wants_manifest: bool
    is_checking: bool = False
    can_map: bool = False
    has_pieces: bool = False  # PIECES follows (`batches`)
    shares: bool = False

    def __repr__(self) -> str:
        return shown(self)

    def __rich_repr__(self) -> list[tuple[str, object]]:
        return shown_fields(self)


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """A source's consent. `generation` names this very export, so that all streams of a read get the same."""

    generation: int
    chunk_bytes: int
    size_bytes: int


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag="refusal"):
    """Why not. Codes: foreign, version, token, busy, unknown-key, gone, malformed, failed."""

    code: str
    message: str

    def bounded(self) -> "Refusal":
        """The refusal with its text shortened to the limit of a message."""
        return Refusal(self.code, shortened(self.message, MAX_TEXT))


Greeting = Hello | Welcome | Refusal
_greetings: msgspec.msgpack.Decoder[Greeting] = msgspec.msgpack.Decoder(Greeting)
_refusals = msgspec.msgpack.Decoder(Refusal)
_ranges = msgspec.msgpack.Decoder(list[tuple[int, int]])
_encode = msgspec.msgpack.Encoder().encode


@scope
def _moving(silent: str) -> Iterator[None]:
    """Bytes move in this block. What ends that is raised as an error of the wire's."""
    try:
        yield
    except BlockingIOError as error:
        raise Silent(silent) from error
    except OSError as error:
        raise lost(error) from error


class Wire:
    """One connected socket."""

    def __init__(self, sock: socket.socket, settings: TcpSettings) -> None:
        self.sock = tracked(sock)
        self._settings = settings
        self._lock = threading.Lock()  # between cut and close, so that no other socket with this number is hit
        self._is_closed = False
        self.is_cut = False
        self._is_deaf = False  # it was woken: what the peer says may go unheard
        self.heard_bytes = 0  # ever; written by the thread that receives
        self.moved: shapes.StreamState | None = None  # the mover receives here, and counts by itself
        self.lent = ctypes.c_uint32(0)  # LENT_TO: the peer may not have taken it yet; CALLED_OUT: nothing may be lent
        self.may_lend = False
        self.peer = ""  # its address, of a reader
        self.has_asked = False  # for any chunk
        self.idle_since: float | None = None  # it asks for nothing; None: it is served, or has never asked

    @property
    def has_lent(self) -> bool:
        """Memory was lent to this socket."""
        return self.lent.value == LENT_TO

    @property
    def all_heard_bytes(self) -> int:
        moved = self.moved
        return self.heard_bytes + (int(moved.heard_bytes) if moved is not None else 0)

    # -- life ----------------------------------------------------------------------------------------------------------

    def connect(self, address: tuple[object, ...] | bytes, within_s: float | None = None) -> None:
        """Reach the peer within this time, or else `connect_s`."""
        try:
            tune(self.sock, self._settings)
            self.sock.settimeout(within_s or self._settings.connect_s)
            self.sock.connect(address)
            self.sock.settimeout(None)
        except OSError as error:
            raise Vanished(f"cannot connect: {error}") from error
        if self.is_cut:  # the cut came before there was a connection to shut down
            raise Vanished("cut while connecting")

    def limit_waits(self, *, receive_s: float, send_s: float) -> None:
        try:
            limit_waits(self.sock, receive_s=receive_s, send_s=send_s)
        except OSError as error:
            raise Vanished(str(error)) from error

    def cut(self) -> None:
        """Called from any thread: ends a wait in this socket at once. The owner still has to close it."""
        self._shutdown(socket.SHUT_RDWR)

    def wake(self) -> None:
        """Called from any thread: ends a wait for the peer's message. The owner can still send.

        Not where memory is lent: whether the peer has taken it, only the peer can say.
        """
        with self._lock:
            library = load.library()  # without it nothing is lent
            if library is not None and library.swap(ctypes.addressof(self.lent), 0, CALLED_OUT) == LENT_TO:
                return
        self._is_deaf = True
        self._shutdown(socket.SHUT_RD)

    def await_return(self, within_s: float) -> None:
        """Until the peer, having taken all that was lent, hangs up; or this is cut; but no longer than that."""
        deadline = time.monotonic() + within_s
        with contextlib.suppress(OSError):
            while self.has_lent and time.monotonic() < deadline and self.sock.recv(_WORDS_BYTES):
                pass

    def _shutdown(self, how: int) -> None:
        with self._lock:
            if how == socket.SHUT_RDWR:
                self.is_cut = True
            if not self._is_closed:
                with contextlib.suppress(OSError):
                    self.sock.shutdown(how)

    def close(self, *, politely: bool = False) -> None:
        """Called by the owner only. Lets the peer read the last message before the socket is reset."""
        if politely and not self.is_cut:
            say_goodbye(self.sock, is_deaf=self._is_deaf, is_cut=lambda: self.is_cut)
        with self._lock:
            self._is_closed = True
            with contextlib.suppress(OSError):
                if self.has_lent:  # what the peer has not taken yet is taken back
                    self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
                self.sock.shutdown(socket.SHUT_RDWR)  # a forked child may have the descriptor too: the peer must notice
            self.sock.close()

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def send(self, buffers: Iterable[bytes | memoryview]) -> None:
        """Send all of it. Goes on as long as bytes move."""
        pending = list(filter(len, map(flat, buffers)))
        first = 0
        with _moving("the peer takes no byte"):
            while first < len(pending):
                first = advance(pending, first, self.sock.sendmsg(one_call(pending, first)))

    def receive_into(self, buffers: Sequence[memoryview], deadline: float | None = None) -> None:
        """Fill all of it, straight into the given memory. Goes on as long as bytes come, or until the deadline."""
        pending = list(filter(len, map(flat, buffers)))
        first = 0
        with _moving("the peer sends no byte"):
            while first < len(pending):
                if deadline is not None and time.monotonic() > deadline:
                    raise Silent("the peer takes too long over its words")
                call = one_call(pending, first)
                got = self.sock.recv_into(call[0]) if len(call) == 1 else self.sock.recvmsg_into(call)[0]
                if got == 0:
                    raise Vanished("the peer closed the connection")
                self.heard_bytes += got
                first = advance(pending, first, got)

    def _receive(self, size_bytes: int, deadline: float | None = None) -> bytearray:
        buffer = bytearray(size_bytes)
        self.receive_into([memoryview(buffer)], deadline)
        return buffer

    # -- greetings -----------------------------------------------------------------------------------------------------

    def send_greeting(self, greeting: Greeting) -> None:
        body = _encode(greeting.bounded() if isinstance(greeting, Refusal) else greeting)
        self.send([GREETING.pack(MAGIC, VERSION, 0, len(body)), body])

    def receive_greeting(self, within_s: float) -> Greeting:
        deadline = time.monotonic() + within_s
        magic, version, _, length = GREETING.unpack(self._receive(GREETING.size, deadline))
        if magic != MAGIC:
            raise Garbled("the peer does not speak the protocol of the TensorHub tcp transport", "foreign")
        if version != VERSION:
            raise Garbled(f"this worker speaks version {VERSION} of the tcp transport, its peer {version}", "version")
        if length > MAX_GREETING_BYTES:
            raise Garbled(f"a greeting of {length} B, where {MAX_GREETING_BYTES} B are the limit")
        try:
            return decoded(_greetings, self._receive(length, deadline))
        except Undecodable as error:
            raise Garbled(f"malformed greeting: {error}") from error

    # -- frames --------------------------------------------------------------------------------------------------------

    def send_frame(self, kind: int, number: int = 0, payload: Sequence[bytes | memoryview] = ()) -> None:
        """A header and its payload in one go; the payload is not copied."""
        self.send([HEADER.pack(kind, sum(size_of(part) for part in payload), number), *payload])

    def send_header(self, kind: int, number: int, length: int) -> None:
        """Of a frame whose payload follows at once."""
        with _moving("the peer takes no byte"):
            self.sock.sendall(HEADER.pack(kind, length, number), socket.MSG_MORE)

    def receive_header(self) -> tuple[int, int, int]:
        """(kind, length, number); the length is not yet compared with anything."""
        kind, length, number = HEADER.unpack(self._receive(HEADER.size))
        return kind, length, number

    def receive_body(self, length: int, limit_bytes: int, within_s: float | None = None) -> bytearray:
        if length > limit_bytes:
            raise Garbled(f"a frame of {length} B, where {limit_bytes} B are the limit")
        return self._receive(length, None if within_s is None else time.monotonic() + within_s)

    def send_want(self, chunks: Sequence[int], number: int = 0) -> None:
        """Ask for chunks. No chunks: nothing is asked for, only `number` told."""
        ranges = as_ranges(chunks)
        for first in range(0, max(1, len(ranges)), MAX_WANT_RANGES):
            self.send_frame(WANT, number, [_encode(ranges[first : first + MAX_WANT_RANGES])])

    def receive_want(self, chunk_count: int) -> tuple[int, list[tuple[int, int]]]:
        """The request's number and its ranges."""
        self.idle_since = time.monotonic()
        kind, length, number = self.receive_header()
        if kind != WANT:
            raise Garbled(f"a frame of kind {kind} from a reader")
        ranges = self.decode_want(self.receive_body(length, MAX_WANT_BYTES), chunk_count)
        self.has_asked, self.idle_since = True, None
        return number, ranges

    @staticmethod
    def decode_want(body: bytes | bytearray, chunk_count: int) -> list[tuple[int, int]]:
        """The ranges of a request."""
        try:
            ranges = decoded(_ranges, body)
        except Undecodable as error:
            raise Garbled(f"malformed request: {error}") from error
        for start, stop in ranges:
            if not 0 <= start < stop <= chunk_count:
                raise Garbled(f"a request for chunks [{start}, {stop}) of {chunk_count}")
        return ranges

    def send_gone(self, code: str, message: str) -> None:
        self.send_frame(GONE, payload=[_encode(Refusal(code, message).bounded())])

    def receive_gone(self, length: int) -> Refusal:
        return self.decode_gone(self.receive_body(length, MAX_GONE_BYTES))

    @staticmethod
    def decode_gone(body: bytes | bytearray) -> Refusal:
        """The body of GONE."""
        try:
            return decoded(_refusals, body)
        except Undecodable as error:
            raise Garbled(f"malformed last word: {error}") from error


def as_ranges(chunks: Sequence[int]) -> list[tuple[int, int]]:
    """Converts chunk numbers to [start, stop) ranges, in the same order."""
    if isinstance(chunks, range) and chunks.step == 1:
        return [(chunks.start, chunks.stop)] if chunks else []
    ranges: list[tuple[int, int]] = []
    for chunk in chunks:
        if ranges and ranges[-1][1] == chunk:
            ranges[-1] = (ranges[-1][0], chunk + 1)
        else:
            ranges.append((chunk, chunk + 1))
    return ranges
