"""The source's side of the tcp transport: admission, connections, the mover's conversations, reads of batches."""

import ctypes
import hmac
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from math import inf

from ...protocol.errors import Closed, UsageError
from ...protocol.manifest import chunk_count
from .. import threads
from ..base import MAX_MANIFEST_BYTES, Export, Scarce, StopFlag
from ..native import load, shapes
from ..ranges import (
    MAX_PIECES_BYTES,
    PIECES,
    ROW_WORDS,
    RUN,
    BadPieces,
    BadRow,
    Batches,
    Placed,
    Room,
    RowStream,
    bare_addresses,
    table_of,
)
from ..threads import ShortSwitchInterval, Thread, block_sigpipe, made, scope, start, tracked
from . import wire as tcp_wire
from .addresses import addresses_of, advertised_endpoint, listeners
from .settings import TcpSettings, tune
from .wire import (
    Garbled,
    Hello,
    Refusal,
    Silent,
    Unreadable,
    Vanished,
    Welcome,
    Wire,
    WireError,
    bounded_send,
    lost,
    open_pipe,
)

_log = logging.getLogger(__name__)

# --- Limits unauthenticated connections, and those of readers.
#
# Any host may connect. An unauthenticated connection has a second, and shares its room with the others. A new one takes
# the place of the oldest one of the address that has most. A reader with the right token and a known key is admitted,
# and has a place until it leaves. If all places are taken, a new reader gets that of a reader that asks for nothing.
# Used with the server's lock.


MAX_UNAUTHENTICATED = 64  # at a time, each with a thread; as many more that are cut and about to leave


class Admission:
    """All connections of one server."""

    def __init__(self, max_readers: int) -> None:
        self._max_readers = max_readers
        self._unauthenticated: dict[Wire, threading.Thread] = {}  # oldest first
        self._admitted: dict[Wire, threading.Thread] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._unauthenticated) + len(self._admitted)

    def enter(self, wire: Wire, thread: threading.Thread) -> bool:
        """Takes in an unauthenticated connection, and cuts an older one if there are too many. False: no room."""
        if len(self._unauthenticated) >= 2 * MAX_UNAUTHENTICATED:
            return False
        waiting = [other for other in self._unauthenticated if not other.is_cut]
        if len(waiting) >= MAX_UNAUTHENTICATED:
            of_each = Counter(other.peer for other in waiting)
            max(waiting, key=lambda other: of_each[other.peer]).cut()  # of several the oldest
        self._unauthenticated[wire] = thread
        return True

    def admit(self, wire: Wire, *, is_further: bool, idle_s: Callable[[Wire], float], may_idle_s: float) -> bool:
        """The connection is authenticated and may be served. False: there is no room for it.

        Further streams of a read take half of the room at most, and no other's place: the rest is for readers that are
        not served yet. `idle_s` tells how long a reader has asked for nothing; above `may_idle_s` it makes room.
        """
        most = -(-self._max_readers // 2) if is_further else self._max_readers
        served = [other for other in self._admitted if not other.is_cut]
        if len(served) >= most:
            idlest = max(served, key=idle_s)  # of several the oldest
            if is_further or idle_s(idlest) <= may_idle_s or len(self._admitted) >= 2 * self._max_readers:
                return False
            idlest.cut()
        self._admitted[wire] = self._unauthenticated.pop(wire)
        return True

    def leave(self, wire: Wire) -> None:
        """Called when the reader has gone."""
        self._unauthenticated.pop(wire, None)
        self._admitted.pop(wire, None)

    def cut_all(self) -> list[threading.Thread]:
        """Cut all. Returns their threads, which will end."""
        for wire in (*self._unauthenticated, *self._admitted):
            wire.cut()
        return [*self._unauthenticated.values(), *self._admitted.values()]


# --- What a source exports, as its readers see it.


class ServedExport:
    """One export as its readers see it. Its fields are guarded by the server's lock; `ended` may be read without."""

    def __init__(self, export: Export) -> None:
        self.export = export
        self.generation = secrets.randbits(62) + 1  # no other export has it, not even in another life of this worker
        self.chunk_count = chunk_count(export.stream.size_bytes, export.chunk_bytes)
        self.inside: dict[Wire, int] = {}  # and the bytes that this reader says it has read
        self.ended: str | None = None
        self.stop_flag = StopFlag()  # set once it has ended
        self.sent_bytes = 0

    def has_ended(self) -> bool:
        return self.ended is not None

    def end(self, reason: str) -> None:
        self.ended = reason
        self.stop_flag.set()


# --- A source's connection that the mover serves: what Python prepares for it, and how it ends.
#
# Python has greeted the reader. The mover then hears its requests and sends, lends or announces chunks, in the thread
# of that connection and without the interpreter. It comes back for a pipe, once the connection is fast enough to lend
# memory to, and at the end. It is given no memory that may be moved only inside a block of its stream.


@dataclass(frozen=True, eq=False, repr=False)
class Conversation:
    """One connection as the library sees it. Holds all memory that the library is given."""

    library: load.Library
    wire: Wire
    served: ServedExport
    held: object
    state: shapes.ServeState

    def run(self) -> str:
        """Serve until the export ends, or its chunks do: returns why. Raises what ends the connection before."""
        state, pipe = self.state, None
        try:
            while True:
                self.library.serve(state)
                if state.status != shapes.NEEDS_PIPE:
                    return self._end()
                with ShortSwitchInterval():
                    pipe = open_pipe()
                if pipe is None:
                    state.may_lend = 0
                else:
                    state.pipe_in, state.pipe_out = pipe.ends
        finally:
            if pipe is not None:
                pipe.close()

    @property
    def sent_bytes(self) -> int:
        return int(self.state.sent_bytes)

    @property
    def idle_s(self) -> float:
        """How long the reader has asked for nothing: infinite if it never has, 0 while it is served."""
        state = self.state
        return idle_s(state.idle_since or None, has_asked=bool(state.kind))

    def add_to(self, counts: dict[str, int]) -> None:
        """Adds what it has sent so far."""
        for name in ("sent_bytes", "sent_chunks", "lent_bytes"):
            counts[name] += int(getattr(self.state, name))

    def _end(self) -> str:
        state, served = self.state, self.served
        if state.status == shapes.ENDED:
            return served.ended or "it has ended"
        if state.status == shapes.FAILED:
            return served.export.progress.failed or "no further chunk will come"
        raise self._failure()

    def _failure(self) -> WireError:
        """What ended the connection, as Python's own way would say it."""
        state = self.state
        if state.status == shapes.SILENT:
            return Silent("the peer neither takes a byte nor asks for one")
        if state.status != shapes.GARBLED:
            number = int(state.error)
            return lost(OSError(number, os.strerror(number))) if number else Vanished("the peer closed the connection")
        if state.kind != tcp_wire.WANT:
            return Garbled(f"a frame of kind {state.kind} from a reader")
        if state.length > tcp_wire.MAX_WANT_BYTES:
            return Garbled(f"a frame of {state.length} B, where {tcp_wire.MAX_WANT_BYTES} B are the limit")
        try:
            ranges = self.wire.decode_want(bytes(state.words[: state.length]), int(state.chunk_count))
        except Garbled as error:
            return error.with_traceback(None)
        if len(ranges) > shapes.MAX_RANGES:
            return Garbled(f"a request for {len(ranges)} ranges, where {shapes.MAX_RANGES} are the limit")
        return Garbled("a request whose numbers are written in a way that is not read here")


def idle_s(since: float | None, *, has_asked: bool) -> float:
    """How long a reader has asked for nothing: infinite if it never has. `since` is None while it is served."""
    if not has_asked:
        return inf
    return time.monotonic() - since if since is not None else 0.0


def conversation_for(
    settings: TcpSettings,
    wire: Wire,
    served: ServedExport,
    keepalive_s: float,
    *,
    is_announcing: bool,
    batches: Batches | None = None,
) -> Conversation | None:
    """The mover for this connection; None where Python serves it: no library, or memory that its owner must show.

    `batches` are what the reader wants in place of the export's chunks.
    """
    library, export = load.library(), served.export
    marks = export.progress.marks
    if library is None or marks is None:
        return None
    is_touched = not is_announcing or (batches is not None and any(batches.flags))
    addresses = bare_addresses(export.stream) if is_touched else None
    if is_touched and (addresses is None or addresses.stop != export.stream.size_bytes):
        return None
    table = table_of(addresses) if addresses is not None else shapes.Table(size=export.stream.size_bytes)
    held: tuple[object, ...] = (addresses,)
    wanted = _state_of(batches) if batches is not None else None
    if batches is not None and addresses is not None:
        try:
            there = Placed(batches.rows, addresses)
        except BadRow:
            return None  # of several pieces of memory: Python asks the stream, run by run
        table, held = there.table, (addresses, there)
    elif batches is not None:
        table = shapes.Table(size=batches.size_bytes)
    state = shapes.ServeState(
        table=table,
        chunk_bytes=export.chunk_bytes,
        chunk_count=served.chunk_count if batches is None else len(batches),
        batches=ctypes.pointer(wanted) if wanted is not None else None,
        progress=ctypes.pointer(marks),
        ended=ctypes.pointer(served.stop_flag.state),
        descriptor=wire.sock.fileno(),
        is_announcing=is_announcing,
        keepalive_s=keepalive_s,
        lent=ctypes.addressof(wire.lent),
        may_lend=wire.may_lend,
        pipe_in=-1,
        pipe_out=-1,
        is_fast=settings.lend_rate_bytes_per_s <= 0,
        lend_bytes_per_s=settings.lend_rate_bytes_per_s,
        lend_piece_bytes=settings.lend_piece_bytes,
    )
    return Conversation(library, wire, served, (held, batches, wanted), state)


def _state_of(batches: Batches) -> shapes.Batches:
    return shapes.Batches(
        bounds=batches.bounds.buffer_info()[0],
        flags=ctypes.cast(ctypes.c_char_p(batches.flags), ctypes.c_void_p).value,
        count=len(batches),
        first_row=batches.first_row.buffer_info()[0],
        needs=batches.rows.needs.buffer_info()[0],
    )


# --- The server: a thread for each address accepts, one for each connection serves.
#
# A connection reads one export. Its thread sends the chunks asked for, in the order asked for, each as soon as the
# export's `Progress` has it. `ServedExport` counts the threads inside an export: `withdraw` waits until the last has
# left, and no thread enters an export that has ended. An export ends at a near chunk boundary if there is one: its
# readers then receive the reason (GONE). Otherwise the server cuts the connection.


_AGAIN_S = 0.1  # pause after accept fails because no file descriptor is free
_MIN_KEEPALIVE_S = 0.01  # whatever a reader says that it needs
_JOIN_S = 5.0  # threads leave within milliseconds once cut; a copy from a device may take longer
_COUNTED = (
    *("sent_bytes", "sent_chunks", "lent_bytes"),
    *("connections_accepted", "connections_refused", "connections_dropped"),
)


class TcpServer:
    """Serves exports to its readers."""

    kind = "tcp"
    is_announcing = False  # it sends chunks, and does not only say which are there

    def __init__(self, settings: TcpSettings) -> None:
        self._settings = settings
        self._lock = threading.RLock()  # a caller's thread takes it bare: interrupted in a condition, it would keep it
        self._changed = threading.Condition(self._lock)
        self._exports: dict[str, ServedExport] = {}
        self._leaving: dict[str, list[ServedExport]] = {}  # ended, perhaps with threads still inside
        self._admission = Admission(settings.max_connections)
        self._moving: dict[Wire, Conversation] = {}  # by the native mover, which counts by itself until they end
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._room = Room()
        self._is_closed = False
        self._is_closing = threading.Event()  # no connection is taken any more
        with ExitStack() as undo:
            self._listening = [undo.enter_context(tracked(listener)) for listener in self.listen()]
            self.endpoint = self.advertised(self._listening)
            self.addresses = addresses_of(self._listening)
            named = f"tensorhub-{self.kind}-accept"
            self._accepting = [Thread(self._accept, args=(listener,), name=named) for listener in self._listening]
            for thread in self._accepting:
                start(thread, otherwise=self._stop_accepting)
            undo.pop_all()

    # -- what another transport that speaks over a socket does in its own way -----------------------------------------

    def listen(self) -> list[socket.socket]:
        return listeners(self._settings)

    def advertised(self, listening: Sequence[socket.socket]) -> str:
        return advertised_endpoint(self._settings, [listener.getsockname()[1] for listener in listening])

    def make_served_export(self, export: Export) -> ServedExport:
        return ServedExport(export)

    def why_refused(self, wire: Wire, hello: Hello) -> Refusal | None:
        """A reason to refuse the reader that has just said hello."""
        if self._settings.token is None or hmac.compare_digest(hello.token.encode(), self._settings.token.encode()):
            return None
        return Refusal("token", "the token is not the one that this worker was given")

    def why_not(self, served: ServedExport) -> Refusal | None:
        """A reason why this export cannot be read by this transport."""
        return None

    def introduce(self, wire: Wire, served: ServedExport, hello: Hello) -> None:
        """What a reader has to know before it asks for chunks."""
        wire.send_frame(tcp_wire.MANIFEST, payload=[served.export.manifest])

    def conversation(self, wire: Wire, served: ServedExport, keepalive_s: float) -> Conversation | None:
        """The mover's, if it can serve this connection."""
        return conversation_for(self._settings, wire, served, keepalive_s, is_announcing=self.is_announcing)

    def send(self, wire: Wire, served: ServedExport, start: int, stop: int) -> int:
        """Send chunk `start`, which is there, and more of [start, stop) if that is easy; return the next one."""
        export = served.export
        first = start * export.chunk_bytes
        last = min(first + export.chunk_bytes, export.stream.size_bytes)
        with export.stream.views_to_read(first, last) as views:
            if isinstance(export.stream, Scarce):
                header = tcp_wire.HEADER.pack(tcp_wire.CHUNK, last - first, start)
                late = bounded_send(wire.sock, [header, *views], export.stream.hold_s)
            else:
                wire.send_frame(tcp_wire.CHUNK, start, views)
                late = b""
        wire.send([late])
        self.count_sent(served, last - first)
        return start + 1

    def heard(self, wire: Wire, served: ServedExport, number: int) -> None:
        """The number that came with a request."""

    def count_sent(self, served: ServedExport, size_bytes: int) -> None:
        """One chunk went out."""
        with self._changed:
            served.sent_bytes += size_bytes
            self._counts["sent_bytes"] += size_bytes
            self._counts["sent_chunks"] += 1

    # -- exports -------------------------------------------------------------------------------------------------------

    def export(self, export: Export) -> None:
        if not 0 < export.chunk_bytes <= tcp_wire.MAX_CHUNK_BYTES:
            raise UsageError(f"export {export.key!r}: chunk_bytes is {export.chunk_bytes}, not in 1..2**30")
        if len(export.manifest) > MAX_MANIFEST_BYTES:
            raise UsageError(f"export {export.key!r}: a manifest of {len(export.manifest)} B is over 64 MiB")
        served = self.make_served_export(export)
        if served.chunk_count != (theirs := export.progress.chunk_count):
            raise UsageError(f"export {export.key!r}: {served.chunk_count} chunks, but {theirs} in its progress")
        with self._changed:
            if self._is_closed:
                raise Closed(f"this {self.kind} transport was closed")
            self._end(export.key, "it was replaced")
            self._exports[export.key] = served
            self._changed.notify_all()  # a reader may have come before it

    def withdraw(self, key: str, *, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._end(key, "it was withdrawn")
            leaving = self._leaving.get(key, [])

            def all_left() -> bool:
                return not any(served.inside for served in leaving)

            if not self._changed.wait_for(all_left, min(timeout_s, self._settings.withdraw_grace_s)):
                for wire in [wire for served in leaving for wire in served.inside]:
                    wire.cut()
                if not self._changed.wait_for(all_left, max(0.0, deadline - time.monotonic())):
                    return False
            if self._leaving.get(key) is leaving:
                del self._leaving[key]
            return True

    def withdraw_unread(self, key: str) -> bool:
        with self._changed:
            served = self._exports.get(key)
            is_unread = key not in self._leaving and (served is None or not served.inside)
            if is_unread:
                self._end(key, "it was withdrawn")
            return is_unread

    def _end(self, key: str, reason: str) -> None:
        """With the lock held: no thread enters this export any more, and those inside are called out."""
        served = self._exports.pop(key, None)
        if served is None:
            return
        served.end(reason)
        if served.inside:
            self._leaving.setdefault(key, []).append(served)
        for wire in served.inside:
            wire.wake()
        served.export.progress.wake()

    def _spoil(self, served: ServedExport, reason: str) -> None:
        _log.warning("%s, of %s", reason, served.export.key)  # it was not withdrawn: readers are told
        with self._changed:
            served.end(reason)
            for wire in served.inside:
                wire.wake()

    def served_bytes(self, key: str) -> int:
        """Payload bytes sent of the present export of this key."""
        with self._lock:
            served = self._exports.get(key)
            if served is None:
                return 0
            return served.sent_bytes + sum(self._moving[w].sent_bytes for w in served.inside if w in self._moving)

    def statistics(self) -> dict[str, int]:
        with self._lock:
            counts = {**self._counts, "connections_open": len(self._admission), "exports": len(self._exports)}
            for conversation in self._moving.values():
                conversation.add_to(counts)
            return counts

    def close(self) -> None:
        with self._changed:
            if not self._is_closed:
                self._is_closed = True
                self._stop_accepting()
                for key in list(self._exports):
                    self._end(key, "its worker closed")
                self._changed.wait_for(lambda: not self._admission, self._settings.withdraw_grace_s)
            threads = self._admission.cut_all()
        deadline = time.monotonic() + _JOIN_S
        for thread in (*self._accepting, *threads):
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))

    # -- connections ---------------------------------------------------------------------------------------------------

    def _stop_accepting(self) -> None:
        self._is_closing.set()
        for listener in self._listening:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that polls it

    def _accept(self, listener: socket.socket) -> None:
        """Take connections, in a thread of this listener's."""
        listener.setblocking(False)  # it is waited for outside of what a fork waits for
        coming = select.poll()
        coming.register(listener, select.POLLIN)
        with listener:
            while not self._is_closing.is_set():
                try:
                    coming.poll()
                    with ShortSwitchInterval():
                        self._accept_one(listener)
                except BlockingIOError:
                    continue  # the peer has left, or this is closing
                except OSError as error:
                    threads.note(error, did="it accepted a reader")
                    self._is_closing.wait(_AGAIN_S)

    def _accept_one(self, listener: socket.socket) -> None:
        sock = made(lambda: listener.accept()[0])
        sock.setblocking(True)  # as some systems do not
        try:
            self._take(sock)
        except MemoryError:
            sock.close()

    def _take(self, sock: socket.socket) -> None:
        """Give a new connection a thread of its own, or hang up."""
        wire = Wire(sock, self._settings)
        with suppress(OSError):  # it has left
            wire.peer = str(sock.getpeername()[:1])  # of another transport's socket it is no address: all have the same
        thread = Thread(self._run, args=(wire,), name=f"tensorhub-{self.kind}-serve")
        tune(sock, self._settings)
        with self._changed:
            is_taken = not self._is_closed and self._admission.enter(wire, thread)
            self._changed.notify_all()  # an unauthenticated connection that waits for its key may have been cut
            self._counts["connections_accepted" if is_taken else "connections_refused"] += 1
        try:
            if is_taken:
                return thread.start()
        except (RuntimeError, MemoryError) as error:
            threads.note(error, did="it started a thread for a reader")
            _log.warning("%s transport: a reader is hung up on: %r", self.kind, error)
            self._leave(wire)
        wire.close()

    def _leave(self, wire: Wire) -> None:
        with self._changed:
            self._admission.leave(wire)
            self._changed.notify_all()

    def _run(self, wire: Wire) -> None:
        """The whole life of one connection."""
        block_sigpipe()
        try:
            with ShortSwitchInterval() as interval:
                self._converse(wire, interval)
        except Vanished:
            pass  # the reader left; that is its right
        except WireError:
            self._count("connections_dropped")
        except Exception:  # noqa: BLE001 the top of a thread: our bug is reported and ends this connection only
            _log.exception("%s transport: a serving thread failed", self.kind)
        finally:
            wire.close(politely=True)
            self._leave(wire)

    def _converse(self, wire: Wire, interval: ShortSwitchInterval) -> None:
        settings = self._settings
        wire.limit_waits(receive_s=settings.max_greeting_s, send_s=settings.patience_s)
        answer = self._check_hello(wire)
        if isinstance(answer, Refusal):
            self._count("connections_refused")
            wire.send_greeting(answer)
            return
        served, hello = answer
        wire.may_lend = hello.is_checking and not self.is_announcing
        try:
            ending = self._serve(wire, served, hello, interval)
            if ending is not None and wire.has_lent:
                wire.send_gone(*ending)
                return wire.await_return(settings.patience_s)
        finally:
            with self._changed:
                del served.inside[wire]
                self._leaving = {k: on for k, all_ in self._leaving.items() if (on := [s for s in all_ if s.inside])}
                self._changed.notify_all()
        if ending is not None:
            wire.send_gone(*ending)

    def _check_hello(self, wire: Wire) -> Refusal | tuple[ServedExport, Hello]:
        """Hear what it wants to read. It is inside the export when this returns, unless it is refused.

        A reader that waits for a key is not admitted yet: it takes no place from readers with a known key.
        """
        try:
            hello = wire.receive_greeting(self._settings.max_greeting_s)
        except Garbled as error:
            return Refusal(error.code, str(error))
        except Silent as error:
            return Refusal("foreign", str(error))
        if not isinstance(hello, Hello):
            return Refusal("malformed", "a reader begins with Hello")
        if (refusal := self.why_refused(wire, hello)) is not None:
            return refusal
        with self._changed:
            if not hello.generation:
                expect_s = min(self._settings.expect_s, hello.silence_ms / 2000)
                self._changed.wait_for(lambda: hello.key in self._exports or self._is_closed or wire.is_cut, expect_s)
            served = self._exports.get(hello.key)
            if hello.generation and (served is None or hello.generation != served.generation):
                return Refusal("gone", "it was withdrawn or replaced")
            if served is None:
                return Refusal("unknown-key", f"nothing is exported as {hello.key!r}")
            may_idle_s = self._settings.max_greeting_s
            is_further = bool(hello.generation)
            if not self._admission.admit(wire, is_further=is_further, idle_s=self._idle_s, may_idle_s=may_idle_s):
                return Refusal("busy", f"all {self._settings.max_connections} connections are taken")
            if (refusal := self.why_not(served) if served.ended is None else Refusal("gone", served.ended)) is not None:
                return refusal
            served.inside[wire] = 0
            return served, hello

    def _idle_s(self, wire: Wire) -> float:
        moving = self._moving.get(wire)
        return moving.idle_s if moving is not None else idle_s(wire.idle_since, has_asked=wire.has_asked)

    def _serve(
        self, wire: Wire, served: ServedExport, hello: Hello, interval: ShortSwitchInterval
    ) -> tuple[str, str] | None:
        """Send what is asked for until the reader leaves (None) or the export ends (code and reason)."""
        export, settings = served.export, self._settings
        wire.send_greeting(Welcome(served.generation, export.chunk_bytes, export.stream.size_bytes))
        try:
            if hello.wants_manifest:
                self.introduce(wire, served, hello)
            wire.limit_waits(receive_s=settings.patience_s, send_s=settings.patience_s)
            keepalive_s = max(_MIN_KEEPALIVE_S, min(settings.silence_s, hello.silence_ms / 1000) / 4)
            interval.restore()
            if hello.has_pieces:
                return self._serve_batches(wire, served, keepalive_s)
            conversation = self.conversation(wire, served, keepalive_s)
            if conversation is not None:
                return "gone", self.serve_natively(wire, served, conversation)
            for start, stop in self.asked(wire, served):
                reason = self._serve_range(wire, served, start, stop, keepalive_s)
                if reason is not None:
                    return "gone", reason
        except Garbled as error:
            return error.code, str(error)
        except Unreadable as error:
            self._spoil(served, str(error))
            raise
        except WireError:
            if served.ended is None:
                raise
        except Exception as error:  # noqa: BLE001 the memory's owner failed: the reader is told, the worker goes on
            return "failed", f"the source cannot read its memory: {error!r}"
        return ("gone", served.ended) if served.ended is not None else None

    def serve_natively(self, wire: Wire, served: ServedExport, conversation: Conversation) -> str:
        """Serve with the native library until the export ends or has no more chunks. Returns which."""
        with self._changed:
            self._moving[wire] = conversation
        try:
            return conversation.run()
        finally:
            with self._changed:
                wire.has_asked = True  # its last word is no idleness
                del self._moving[wire]
                conversation.add_to(self._counts)
                served.sent_bytes += conversation.sent_bytes

    def _serve_range(self, wire: Wire, served: ServedExport, start: int, stop: int, keepalive_s: float) -> str | None:
        """Send chunks [start, stop), each as soon as it is there. Returns why no further one will come, or None."""
        while start < stop:
            reason = _await_chunk(wire, served, start, keepalive_s)
            if reason is not None:
                return reason
            start = self.send(wire, served, start, stop)
        return None

    def asked(self, wire: Wire, served: ServedExport) -> Iterator[tuple[int, int]]:
        """The ranges asked for. The next request is read when the last one is served: readers ask ahead."""
        while True:
            number, ranges = wire.receive_want(served.chunk_count)
            self.heard(wire, served, number)
            yield from ranges

    # -- reads of another layout ---------------------------------------------------------------------------------------

    def announce(self, wire: Wire, start: int, stop: int) -> None:
        """Say that batches [start, stop) are there, where readers fetch the bytes themselves."""
        raise NotImplementedError

    def _serve_batches(self, wire: Wire, served: ServedExport, keepalive_s: float) -> tuple[str, str]:
        """Send what is asked for until the export ends: code and reason. Raises `WireError` when the reader leaves."""
        settings = self._settings
        with _received(self._room, wire, served) as batches:
            wire.send_frame(tcp_wire.WAITING)  # there is room: a further stream asks for nothing before it hears that
            conversation = conversation_for(
                settings, wire, served, keepalive_s, is_announcing=self.is_announcing, batches=batches
            )
            if conversation is not None:
                return "gone", self.serve_natively(wire, served, conversation)
            while True:
                number, ranges = wire.receive_want(len(batches))
                self.heard(wire, served, number)
                for batch in (batch for start, stop in ranges for batch in range(start, stop)):
                    reason = _await_there(wire, served, batches, batch, keepalive_s)
                    if reason is not None:
                        return "gone", reason
                    self._send_batch(wire, served, batches, batch)

    def _send_batch(self, wire: Wire, served: ServedExport, batches: Batches, batch: int) -> None:
        if self.is_announcing and not batches.is_sent(batch):
            self.announce(wire, batch, batch + 1)
            return
        start, stop = batches.span(batch)
        rows, stream = batches.rows, RowStream(served.export.stream, batches.rows)
        shortest = min(rows.words[ROW_WORDS * row + RUN] for row in range(*batches.first_row[batch : batch + 2]))
        step = min(MAX_BYTES, shortest * MAX_RUNS)
        wire.send_header(tcp_wire.CHUNK, batch, stop - start)
        for first in range(start, stop, step):
            with stream.views_to_read(first, min(stop, first + step)) as views:
                wire.send(views)
        if not self.is_announcing:  # else the reader says what it has read, this too
            self.count_sent(served, stop - start)

    def _count(self, name: str) -> None:
        with self._changed:
            self._counts[name] += 1


MAX_BYTES, MAX_RUNS = 1 << 20, 4096  # of a batch that Python copies and sends at once
BODY_S = 30.0  # for all of what a reader wants to come: meanwhile it has room that others may need


@scope
def _received(room: Room, wire: Wire, served: ServedExport) -> Iterator[Batches]:
    """What the reader wants, as long as there is room for it."""
    kind, length, _ = wire.receive_header()
    if kind != PIECES:
        raise Garbled(f"a frame of kind {kind} where pieces were due")
    if length > MAX_PIECES_BYTES:
        raise Garbled(f"pieces of {length} B, where {MAX_PIECES_BYTES} B are the limit: ask for them in several reads")
    with room.taken(2 * length) as is_room:  # as it came, and with addresses
        if not is_room:
            raise Garbled("too much is wanted of this source at once", "busy")
        export = served.export
        try:
            wanted = wire.receive_body(length, MAX_PIECES_BYTES, within_s=BODY_S)
            batches = Batches.decode(wanted, export.stream.size_bytes, export.chunk_bytes)
        except BadPieces as error:
            raise Garbled(f"pieces that cannot be: {error}") from error
        yield batches


def _await_there(wire: Wire, served: ServedExport, batches: Batches, batch: int, keepalive_s: float) -> str | None:
    """Until all chunks are there that it takes bytes from. Returns why one never will be, or None.

    Rows are a peer's, and each may span all chunks: what is known to be there is passed over, and a withdrawal is not
    kept waiting.
    """
    progress, needs = served.export.progress, batches.rows.needs
    for row in range(batches.first_row[batch], batches.first_row[batch + 1]):
        if progress.is_complete:
            break
        for chunk in range(max(needs[2 * row], progress.prefix), needs[2 * row + 1] + 1):
            reason = _await_chunk(wire, served, chunk, keepalive_s)
            if reason is not None:
                return reason
    return served.ended


def _await_chunk(wire: Wire, served: ServedExport, chunk: int, keepalive_s: float) -> str | None:
    """Until it is there; the reader hears that it is waited for. Returns why it never will be there, or None."""
    progress = served.export.progress
    while not progress.wait(chunk, keepalive_s, served.has_ended):
        if served.ended is not None or progress.failed is not None:
            return served.ended or progress.failed
        wire.send_frame(tcp_wire.WAITING)
    return served.ended
