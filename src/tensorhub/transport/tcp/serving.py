"""One connection of a source: exports as readers see them, the native mover, and reads of batches."""

import ctypes
import os
import secrets
import time
from collections.abc import Iterator
from math import inf
from typing import Protocol, runtime_checkable

from ...protocol.manifest import chunk_count
from ..base import Export, StopFlag
from ..native import load, shapes
from ..rows import (
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
    table_of,
)
from ..threads import ShortSwitchInterval, scope
from ..views import Scattered, bare_addresses
from . import wire as tcp_wire
from .settings import TcpSettings
from .wire import Garbled, Pipe, Silent, Unlendable, Vanished, Wire, WireError, lost

# --- What a source exports, as its readers see it, and the count of what they were sent.
#
# It must never: be changed without its server's lock.


class Served:
    """One export as its readers see it. Its fields are guarded by the server's lock; `ended` may be read without."""

    def __init__(self, export: Export) -> None:
        self.export = export
        self.scattered = Scattered(export.stream)
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


# --- A source's connection that the native mover serves: what Python prepares for it, and how it ends.
#
# Python has greeted the reader and said what it must know. From then on the mover hears its requests and sends, lends
# or announces chunks, in the thread of that connection and without the interpreter. It comes back for a pipe, once
# the connection is fast enough to lend memory to, and at the end.
#
# It must never: give the mover memory that may be moved only inside a block of its stream.


class Conversation:
    """One connection as the library sees it. Holds all memory that the library is given."""

    def __init__(
        self,
        library: load.Library,
        wire: Wire,
        served: Served,
        held: object,
        state: shapes.ServeState,
    ) -> None:
        self._library = library
        self._wire = wire
        self._served = served
        self._held = held
        self._state = state

    def run(self) -> str:
        """Serve until the export ends, or its chunks do: returns why. Raises what ends the connection before."""
        state, pipe = self._state, None
        try:
            while True:
                self._library.serve(state)
                if state.status != shapes.NEEDS_PIPE:
                    return self._end()
                try:
                    with ShortSwitchInterval():
                        pipe = Pipe()
                    state.pipe_in, state.pipe_out = pipe.ends
                except Unlendable:
                    state.may_lend = 0
        finally:
            if pipe is not None:
                pipe.close()

    @property
    def sent_bytes(self) -> int:
        return int(self._state.sent_bytes)

    @property
    def idle_s(self) -> float:
        """How long the reader has asked for nothing: infinite if it never has, 0 while it is served."""
        state = self._state
        return idle_s(state.idle_since or None, has_asked=bool(state.kind))

    def add_to(self, counts: dict[str, int]) -> None:
        """What it has sent so far."""
        state = self._state
        counts["sent_bytes"] += int(state.sent_bytes)
        counts["sent_chunks"] += int(state.sent_chunks)
        counts["lent_bytes"] += int(state.lent_bytes)

    def _end(self) -> str:
        state, served = self._state, self._served
        if state.status == shapes.ENDED:
            return served.ended or "it has ended"
        if state.status == shapes.FAILED:
            return served.export.progress.failed or "no further chunk will come"
        raise self._failure()

    def _failure(self) -> WireError:
        """What ended the connection, as Python's own way would say it."""
        state = self._state
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
            ranges = self._wire.decode_want(bytes(state.words[: state.length]), int(state.chunk_count))
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
    served: Served,
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
        lent=wire.lent.address,
        may_lend=wire.lending is not None,
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


# --- The source's side of a read of pieces: hears what is wanted, looks at all of it, and sends it batch by batch.
#
# Like `tcp_server` and `announcing`, between the greetings and the end, for any transport that speaks over a
# socket. It must never: begin before every number of what is wanted was looked at, or keep it when the connection is
# over.


MAX_BYTES, MAX_VIEWS = 1 << 20, 4096  # that Python handles at once
BODY_S = 30.0  # for all of what a reader wants to come: meanwhile it has room that others may need


class Server(Protocol):
    """What is asked of a transport's server."""

    is_announcing: bool

    def heard(self, wire: Wire, served: Served, number: int) -> None: ...

    def count_sent(self, served: Served, size_bytes: int, *, is_lent: bool) -> None: ...

    def serve_natively(self, wire: Wire, served: Served, conversation: Conversation) -> str: ...


@runtime_checkable
class Announcing(Protocol):
    """A server whose readers fetch the bytes themselves."""

    def announce(self, wire: Wire, start: int, stop: int) -> None: ...


def serve_pieces(
    server: Server, settings: TcpSettings, room: Room, wire: Wire, served: Served, keepalive_s: float
) -> tuple[str, str]:
    """Send what is asked for until the export ends: code and reason. Raises `WireError` when the reader leaves."""
    with _received(room, wire, served) as batches:
        wire.send_frame(tcp_wire.WAITING)  # there is room: a further stream asks for nothing before it hears that
        conversation = conversation_for(
            settings, wire, served, keepalive_s, is_announcing=server.is_announcing, batches=batches
        )
        if conversation is not None:
            return "gone", server.serve_natively(wire, served, conversation)
        while True:
            number, ranges = wire.receive_want(len(batches))
            server.heard(wire, served, number)
            for start, stop in ranges:
                for batch in range(start, stop):
                    reason = _await_there(wire, served, batches, batch, keepalive_s)
                    if reason is not None:
                        return "gone", reason
                    _send(server, wire, served, batches, batch)


@scope
def _received(room: Room, wire: Wire, served: Served) -> Iterator[Batches]:
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


def _await_there(wire: Wire, served: Served, batches: Batches, batch: int, keepalive_s: float) -> str | None:
    """Until all chunks are there that it takes bytes from. Returns why one never will be, or None.

    Rows are a peer's wish, and each may span all chunks: what is known to be there is passed over, and nobody is kept
    waiting who ends the export.
    """
    progress, needs = served.export.progress, batches.rows.needs
    for row in range(batches.first_row[batch], batches.first_row[batch + 1]):
        if progress.is_complete:
            break
        for chunk in range(max(needs[2 * row], progress.prefix), needs[2 * row + 1] + 1):
            if served.ended is not None:
                return served.ended
            while not progress.wait(chunk, keepalive_s, served.has_ended):
                if served.ended is not None:
                    return served.ended
                if progress.failed is not None:
                    return progress.failed
                wire.send_frame(tcp_wire.WAITING)
    return served.ended


def _send(server: Server, wire: Wire, served: Served, batches: Batches, batch: int) -> None:
    if isinstance(server, Announcing) and not batches.is_sent(batch):
        server.announce(wire, batch, batch + 1)
        return
    start, stop = batches.span(batch)
    rows, stream = batches.rows, RowStream(served.export.stream, batches.rows)
    shortest = min(rows.words[ROW_WORDS * row + RUN] for row in range(*batches.first_row[batch : batch + 2]))
    step = min(MAX_BYTES, shortest * MAX_VIEWS)
    wire.send_header(tcp_wire.CHUNK, batch, stop - start)
    for first in range(start, stop, step):
        with stream.reading(first, min(stop, first + step)) as views:
            wire.send(views)
    if not server.is_announcing:  # else the reader says what it has read, this too
        server.count_sent(served, stop - start, is_lent=False)
