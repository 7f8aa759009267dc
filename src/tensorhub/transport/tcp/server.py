"""The source's side of the tcp transport: listening, admission, and a thread for each connection."""

import hmac
import logging
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress

from ...protocol.errors import Closed, UsageError
from .. import threads
from .. import threads as shortages
from ..base import MAX_MANIFEST_BYTES, Export, Scarce
from ..rows import Room
from ..threads import ShortSwitchInterval, Thread, block_sigpipe, made, start, tracked
from . import wire as brief
from . import wire as tcp_wire
from .addresses import addresses_of, advertised_endpoint, listeners
from .serving import Conversation, Served, conversation_for, idle_s, serve_pieces
from .settings import TcpSettings, tune
from .wire import Garbled, Hello, Lending, Refusal, Silent, Unreadable, Vanished, Welcome, Wire, WireError

# --- Limits the connections of a source: strangers, and readers that have said what they want to read.
#
# Any host may connect, so a stranger has little: a second, and room that strangers share. A new stranger takes the
# place of the oldest one of the address that has most. A reader that has said so (the right token, and a key that is
# there) has a place until it leaves. Where all places are taken, a new reader gets that of one which asks for
# nothing.
#
# It must never: be used without its server's lock, or cut a reader that is being served what it asked for.


MAX_STRANGERS = 64  # at a time, each with a thread; so many more for a moment, who are cut and about to leave


class Door:
    """All connections of one server."""

    def __init__(self, most_welcome: int) -> None:
        self._most_welcome = most_welcome
        self._strangers: dict[Wire, threading.Thread] = {}  # oldest first
        self._welcome: dict[Wire, threading.Thread] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._strangers) + len(self._welcome)

    def enter(self, wire: Wire, thread: threading.Thread) -> bool:
        """A stranger comes, and an older one goes if there are too many. False: there is no room at all."""
        if len(self._strangers) >= 2 * MAX_STRANGERS:
            return False
        waiting = [other for other in self._strangers if not other.is_cut]
        if len(waiting) >= MAX_STRANGERS:
            of_each = Counter(other.peer for other in waiting)
            max(waiting, key=lambda other: of_each[other.peer]).cut()  # of several the oldest
        self._strangers[wire] = thread
        return True

    def welcome(self, wire: Wire, *, is_further: bool, idle_s: Callable[[Wire], float], may_idle_s: float) -> bool:
        """It has said what it wants to read, and may be served. False: there is no room for it.

        Further streams of a read take half of the room at most, and nobody's place: the rest is for who is not served
        at all yet. `idle_s` tells how long a reader has asked for nothing; above `may_idle_s` it makes room.
        """
        most = -(-self._most_welcome // 2) if is_further else self._most_welcome
        served = [other for other in self._welcome if not other.is_cut]
        if len(served) >= most:
            idlest = max(served, key=idle_s)  # of several the oldest
            if is_further or idle_s(idlest) <= may_idle_s or len(self._welcome) >= 2 * self._most_welcome:
                return False
            idlest.cut()
        self._welcome[wire] = self._strangers.pop(wire)
        return True

    def leave(self, wire: Wire) -> None:
        """It is gone."""
        self._strangers.pop(wire, None)
        self._welcome.pop(wire, None)

    def cut_all(self) -> list[threading.Thread]:
        """Cut everybody. Returns their threads, which will end."""
        for wire in (*self._strangers, *self._welcome):
            wire.cut()
        return [*self._strangers.values(), *self._welcome.values()]


# --- Takes connections on each address that a worker listens on, in a thread for each.
#
# It must never: be left half open, where one of its threads could not be started.


_AGAIN_S = 0.1  # pause after accept fails for want of file descriptors


class Accepting:
    """Gives every new connection to `take`, which closes it or keeps it."""

    def __init__(self, listening: Sequence[socket.socket], take: Callable[[socket.socket], None], kind: str) -> None:
        self._listening = [tracked(listener) for listener in listening]
        self._closing = threading.Event()
        # only they know `take`, and forget it at their end: it knows who knows this
        self._threads = [
            Thread(self._accept, args=(listener, take), name=f"tensorhub-{kind}-accept") for listener in listening
        ]

    def start(self) -> None:
        """Raises `Unavailable` if the process may start no more threads; nothing is listened on then."""
        for thread in self._threads:
            start(thread, otherwise=self._give_up)

    def close(self) -> None:
        """Take nobody any more."""
        self._closing.set()
        for listener in self._listening:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes who polls it

    def join(self, deadline: float) -> None:
        """Until its threads have ended, but no longer."""
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _give_up(self) -> None:
        self.close()
        for listener in self._listening:
            listener.close()

    def _accept(self, listener: socket.socket, take: Callable[[socket.socket], None]) -> None:
        listener.setblocking(False)  # it is waited for outside of what a fork waits for
        coming = select.poll()
        coming.register(listener, select.POLLIN)
        with listener:
            while not self._closing.is_set():
                try:
                    coming.poll()
                    sock = made(lambda: listener.accept()[0])
                    sock.setblocking(True)  # as some systems do not
                except BlockingIOError:
                    continue  # who came has left, or nobody comes any more
                except OSError as error:
                    threads.note(error, did="it accepted a reader")
                    self._closing.wait(_AGAIN_S)
                    continue
                try:
                    take(sock)
                except MemoryError:
                    sock.close()


# --- The source's side of the tcp transport: one thread for each address accepts, one for each connection serves.
#
# A connection reads one export. Its thread sends the chunks asked for, in the order asked for, each as soon as the
# export's `Progress` has it, straight from the registered memory. `Served` counts the threads inside an export: whoever
# withdraws it waits until the last has left, and no thread enters an export that has ended.
#
# An export ends at a chunk boundary where that is near, so that its readers hear why (GONE), and by cutting the
# connection where it is not. It must never: touch memory after its thread was counted out, or let one peer's words harm
# another's connection.


_log = logging.getLogger(__name__)

_MIN_KEEPALIVE_S = 0.01  # whatever a reader says that it needs
_JOIN_S = 5.0  # threads leave within milliseconds once cut; a copy from a device may take longer
_COUNTED = (
    *("sent_bytes", "sent_chunks", "lent_bytes"),
    *("connections_accepted", "connections_refused", "connections_dropped"),
)


class TcpServer:
    """Serves exports to whoever connects and is welcome."""

    kind = "tcp"
    is_announcing = False  # it sends chunks, and does not only say which are there

    def __init__(self, settings: TcpSettings) -> None:
        self._settings = settings
        self._lock = threading.RLock()  # a caller's thread takes it bare: interrupted in a condition, it would keep it
        self._changed = threading.Condition(self._lock)
        self._exports: dict[str, Served] = {}
        self._leaving: dict[str, list[Served]] = {}  # ended, perhaps with threads still inside
        self._door = Door(settings.max_connections)
        self._moving: dict[Wire, Conversation] = {}  # by the native mover, which counts by itself until they end
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._room = Room()
        self._is_closed = False
        with ExitStack() as undo:
            listening = [undo.enter_context(listener) for listener in self.listen()]
            self.endpoint = self.advertised(listening)
            self.addresses = addresses_of(listening)
            self._accepting = Accepting(listening, self._take, self.kind)
            undo.pop_all()
        self._accepting.start()

    # -- what another transport that speaks over a socket does in its own way -----------------------------------------

    def listen(self) -> list[socket.socket]:
        return listeners(self._settings)

    def advertised(self, listening: Sequence[socket.socket]) -> str:
        return advertised_endpoint(self._settings, [listener.getsockname()[1] for listener in listening])

    def make_served(self, export: Export) -> Served:
        return Served(export)

    def why_refused(self, wire: Wire, hello: Hello) -> Refusal | None:
        """A reason to refuse whoever has just said hello."""
        if self._settings.token is None or hmac.compare_digest(hello.token.encode(), self._settings.token.encode()):
            return None
        return Refusal("token", "the token is not the one that this worker was given")

    def why_not(self, served: Served) -> Refusal | None:
        """A reason why this export cannot be read by this transport."""
        return None

    def lending(self, hello: Hello) -> Lending | None:
        """Whether to lend memory to this reader."""
        return Lending(self._settings) if hello.is_checking else None

    def introduce(self, wire: Wire, served: Served, hello: Hello) -> None:
        """What a reader has to know before it asks for chunks."""
        wire.send_frame(tcp_wire.MANIFEST, payload=[served.export.manifest])

    def conversation(self, wire: Wire, served: Served, keepalive_s: float) -> Conversation | None:
        """The mover's, if it can serve this connection."""
        return conversation_for(self._settings, wire, served, keepalive_s, is_announcing=self.is_announcing)

    def send(self, wire: Wire, served: Served, start: int, stop: int) -> int:
        """Send chunk `start`, which is there, and more of [start, stop) if that is easy; return the next one."""
        export = served.export
        first = start * export.chunk_bytes
        last = min(first + export.chunk_bytes, export.stream.size_bytes)
        with export.stream.reading(first, last) as views:
            is_lent = self._lend(wire, served, start, first, last, len(views))
            late = b""
            if isinstance(export.stream, Scarce):
                header = tcp_wire.HEADER.pack(tcp_wire.CHUNK, last - first, start)
                late = brief.bounded_send(wire.sock, [header, *views], export.stream.hold_s)
            elif not is_lent:
                addresses = served.scattered.for_views(len(views))
                if addresses is not None:
                    wire.send_header(tcp_wire.CHUNK, start, last - first)
                    wire.send_located(addresses, first, last)
                else:
                    wire.send_frame(tcp_wire.CHUNK, start, views)
        wire.send([late])
        if wire.lending is not None:
            wire.lending.sent(last - first)
        self.count_sent(served, last - first, is_lent=is_lent)
        return start + 1

    def _lend(self, wire: Wire, served: Served, chunk: int, start: int, stop: int, pieces: int) -> bool:
        """Send bytes [start, stop), which are that chunk, without a copy, if that is possible and worth it."""
        lending = wire.lending
        pipe = lending.pipe(stop - start, pieces) if lending is not None else None
        addresses = served.scattered.known() if pipe is not None else None
        if lending is None or pipe is None or addresses is None or not wire.may_lend():
            return False
        wire.send_header(tcp_wire.LENT, chunk, stop - start)
        if not wire.send_lent(pipe, addresses, start, stop):
            lending.stop()
        return True

    def heard(self, wire: Wire, served: Served, number: int) -> None:
        """The number that came with a request."""
        if number == tcp_wire.COPIED and wire.lending is not None:
            wire.lending.stop()

    def count_sent(self, served: Served, size_bytes: int, *, is_lent: bool) -> None:
        """One chunk went out."""
        with self._changed:
            served.sent_bytes += size_bytes
            self._counts["sent_bytes"] += size_bytes
            self._counts["lent_bytes"] += size_bytes if is_lent else 0
            self._counts["sent_chunks"] += 1

    # -- exports -------------------------------------------------------------------------------------------------------

    def export(self, export: Export) -> None:
        if not 0 < export.chunk_bytes <= tcp_wire.MAX_CHUNK_BYTES:
            raise UsageError(f"export {export.key!r}: chunk_bytes is {export.chunk_bytes}, not in 1..2**30")
        if len(export.manifest) > MAX_MANIFEST_BYTES:
            raise UsageError(f"export {export.key!r}: a manifest of {len(export.manifest)} B is over 64 MiB")
        served = self.make_served(export)
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

    def _spoil(self, served: Served, reason: str) -> None:
        _log.warning("%s, of %s", reason, served.export.key)  # and nobody has withdrawn it: whoever asks is told
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
            counts = {**self._counts, "connections_open": len(self._door), "exports": len(self._exports)}
            for conversation in self._moving.values():
                conversation.add_to(counts)
            return counts

    def close(self) -> None:
        with self._changed:
            if not self._is_closed:
                self._is_closed = True
                self._accepting.close()
                for key in list(self._exports):
                    self._end(key, "its worker closed")
                self._changed.wait_for(lambda: not self._door, self._settings.withdraw_grace_s)
            threads = self._door.cut_all()
        deadline = time.monotonic() + _JOIN_S
        self._accepting.join(deadline)
        for thread in threads:
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))

    # -- connections ---------------------------------------------------------------------------------------------------

    def _take(self, sock: socket.socket) -> None:
        """Give a new connection a thread of its own, or hang up."""
        wire = Wire(sock, self._settings)
        with suppress(OSError):  # it has left
            wire.peer = str(sock.getpeername()[:1])  # of another transport's socket it is no address: all have the same
        thread = Thread(self._run, args=(wire,), name=f"tensorhub-{self.kind}-serve")
        tune(sock, self._settings)
        with self._changed:
            is_taken = not self._is_closed and self._door.enter(wire, thread)
            self._changed.notify_all()  # a stranger that waits for its key may have been cut
            self._counts["connections_accepted" if is_taken else "connections_refused"] += 1
        try:
            if is_taken:
                return thread.start()
        except (RuntimeError, MemoryError) as error:
            shortages.note(error, did="it started a thread for a reader")
            _log.warning("%s transport: a reader is hung up on: %r", self.kind, error)
            self._leave(wire)
        wire.close()

    def _leave(self, wire: Wire) -> None:
        with self._changed:
            self._door.leave(wire)
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
        wire.limit_waits(receive_s=settings.most_greeting_s, send_s=settings.patience_s)
        answer = self._judge(wire)
        if isinstance(answer, Refusal):
            self._count("connections_refused")
            wire.send_greeting(answer)
            return
        served, hello = answer
        wire.lending = self.lending(hello)
        try:
            ending = self._serve(wire, served, hello, interval)
            if ending is not None and wire.has_lent:
                wire.send_gone(*ending)
                return wire.await_return(settings.patience_s)
        finally:
            if wire.lending is not None:
                wire.lending.close()
            with self._changed:
                del served.inside[wire]
                self._leaving = {k: on for k, all_ in self._leaving.items() if (on := [s for s in all_ if s.inside])}
                self._changed.notify_all()
        if ending is not None:
            wire.send_gone(*ending)

    def _judge(self, wire: Wire) -> Refusal | tuple[Served, Hello]:
        """Hear what it wants to read. It is inside the export when this returns, unless it is refused.

        A reader that waits for a key is a stranger as long: it takes no place from those whose key is there.
        """
        try:
            hello = wire.receive_greeting(self._settings.most_greeting_s)
        except Garbled as error:
            return Refusal(error.code, str(error))
        except Silent as error:
            return Refusal("stranger", str(error))
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
            may_idle_s = self._settings.most_greeting_s
            is_further = bool(hello.generation)
            if not self._door.welcome(wire, is_further=is_further, idle_s=self._idle_s, may_idle_s=may_idle_s):
                return Refusal("busy", f"all {self._settings.max_connections} connections are taken")
            if (refusal := self.why_not(served) if served.ended is None else Refusal("gone", served.ended)) is not None:
                return refusal
            served.inside[wire] = 0
            return served, hello

    def _idle_s(self, wire: Wire) -> float:
        moving = self._moving.get(wire)
        return moving.idle_s if moving is not None else idle_s(wire.idle_since, has_asked=wire.has_asked)

    def _serve(self, wire: Wire, served: Served, hello: Hello, interval: ShortSwitchInterval) -> tuple[str, str] | None:
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
                return serve_pieces(self, settings, self._room, wire, served, keepalive_s)
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

    def serve_natively(self, wire: Wire, served: Served, conversation: Conversation) -> str:
        """The same by the mover, to the end of the export or of its chunks. Returns which."""
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

    def _serve_range(self, wire: Wire, served: Served, start: int, stop: int, keepalive_s: float) -> str | None:
        """Send chunks [start, stop), each as soon as it is there. Returns why no further one will come, or None."""
        progress = served.export.progress
        while start < stop:
            while not progress.wait(start, keepalive_s, served.has_ended):
                if served.ended is not None or progress.failed is not None:
                    break
                wire.send_frame(tcp_wire.WAITING)
            if served.ended is not None:
                return served.ended
            if not progress.has(start):
                return progress.failed or "no further chunk will come"
            start = self.send(wire, served, start, stop)
        return None

    def asked(self, wire: Wire, served: Served) -> Iterator[tuple[int, int]]:
        """The ranges asked for. The next request is read when the last one is served: readers ask ahead."""
        while True:
            number, ranges = wire.receive_want(served.chunk_count)
            self.heard(wire, served, number)
            yield from ranges

    def _count(self, name: str) -> None:
        with self._changed:
            self._counts[name] += 1
