"""The source's side of a read of pieces: hears what is wanted, looks at all of it, and sends it parcel by parcel.

Like `tcp_server` and `announcing`, between the greetings and the farewell, for any transport that speaks over a socket.
It must never: begin before every number of what is wanted was looked at, or keep it when the connection is over.
"""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from . import tcp_wire
from .native_serve import Conversation, conversation_for
from .parcels import MAX_PIECES_BYTES, PIECES, BadPieces, Parcels, Room
from .rows import ROW_WORDS, RUN, RowStream
from .scopes import scope
from .tcp_served import Served
from .tcp_settings import TcpSettings
from .tcp_wire import Garbled, Wire

MOST_BYTES, MOST_VIEWS = 1 << 20, 4096  # that Python handles at once
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
    with _received(room, wire, served) as parcels:
        wire.send_frame(tcp_wire.WAITING)  # there is room: a further stream asks for nothing before it hears that
        conversation = conversation_for(
            settings, wire, served, keepalive_s, is_announcing=server.is_announcing, parcels=parcels
        )
        if conversation is not None:
            return "gone", server.serve_natively(wire, served, conversation)
        while True:
            number, ranges = wire.receive_want(len(parcels))
            server.heard(wire, served, number)
            for start, stop in ranges:
                for parcel in range(start, stop):
                    reason = _await_there(wire, served, parcels, parcel, keepalive_s)
                    if reason is not None:
                        return "gone", reason
                    _send(server, wire, served, parcels, parcel)


@scope
def _received(room: Room, wire: Wire, served: Served) -> Iterator[Parcels]:
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
            parcels = Parcels.decode(wanted, export.stream.size_bytes, export.chunk_bytes)
        except BadPieces as error:
            raise Garbled(f"pieces that cannot be: {error}") from error
        yield parcels


def _await_there(wire: Wire, served: Served, parcels: Parcels, parcel: int, keepalive_s: float) -> str | None:
    """Until all chunks are there that it takes bytes from. Returns why one never will be, or None.

    Rows are a peer's wish, and each may span all chunks: what is known to be there is passed over, and nobody is kept
    waiting who ends the export.
    """
    progress, needs = served.export.progress, parcels.rows.needs
    for row in range(parcels.first_row[parcel], parcels.first_row[parcel + 1]):
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


def _send(server: Server, wire: Wire, served: Served, parcels: Parcels, parcel: int) -> None:
    if isinstance(server, Announcing) and not parcels.is_sent(parcel):
        server.announce(wire, parcel, parcel + 1)
        return
    start, stop = parcels.span(parcel)
    rows, stream = parcels.rows, RowStream(served.export.stream, parcels.rows)
    shortest = min(rows.words[ROW_WORDS * row + RUN] for row in range(*parcels.first_row[parcel : parcel + 2]))
    step = min(MOST_BYTES, shortest * MOST_VIEWS)
    wire.send_header(tcp_wire.CHUNK, parcel, stop - start)
    for first in range(start, stop, step):
        with stream.reading(first, min(stop, first + step)) as views:
            wire.send(views)
    if not server.is_announcing:  # else the reader says what it has read, this too
        server.count_sent(served, stop - start, is_lent=False)
