"""A source's connection that the native mover serves: what Python prepares for it, and how it ends.

Python has greeted the reader and said what it must know. From then on the mover hears its requests and sends, lends or
announces chunks, in the thread of that connection and without the interpreter. It comes back for a pipe, once the
connection is fast enough to lend memory to, and at the end.

It must never: give the mover memory that may be moved only inside a block of its stream.
"""

import ctypes
import os
import time
from math import inf

from . import tcp_wire
from .brisk import Brisk
from .located import bare_addresses
from .native import load, shapes
from .parcels import Parcels
from .rows import BadRow, Placed, table_of
from .tcp_lend import Pipe, Unlendable
from .tcp_served import Served
from .tcp_settings import TcpSettings
from .tcp_wire import Garbled, Silent, Vanished, Wire
from .wire_errors import WireError, lost


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
                    with Brisk():
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
    parcels: Parcels | None = None,
) -> Conversation | None:
    """The mover for this connection; None where Python serves it: no library, or memory that its owner must show.

    `parcels` are what the reader wants in place of the export's chunks.
    """
    library, export = load.library(), served.export
    marks = export.progress.marks
    if library is None or marks is None:
        return None
    is_touched = not is_announcing or (parcels is not None and any(parcels.flags))
    addresses = bare_addresses(export.stream) if is_touched else None
    if is_touched and (addresses is None or addresses.stop != export.stream.size_bytes):
        return None
    table = table_of(addresses) if addresses is not None else shapes.Table(size=export.stream.size_bytes)
    held: tuple[object, ...] = (addresses,)
    wanted = _state_of(parcels) if parcels is not None else None
    if parcels is not None and addresses is not None:
        try:
            there = Placed(parcels.rows, addresses)
        except BadRow:
            return None  # of several pieces of memory: Python asks the stream, run by run
        table, held = there.table, (addresses, there)
    elif parcels is not None:
        table = shapes.Table(size=parcels.size_bytes)
    state = shapes.ServeState(
        table=table,
        chunk_bytes=export.chunk_bytes,
        chunk_count=served.chunk_count if parcels is None else len(parcels),
        parcels=ctypes.pointer(wanted) if wanted is not None else None,
        progress=ctypes.pointer(marks),
        ended=ctypes.pointer(served.gate.state),
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
    return Conversation(library, wire, served, (held, parcels, wanted), state)


def _state_of(parcels: Parcels) -> shapes.Parcels:
    return shapes.Parcels(
        bounds=parcels.bounds.buffer_info()[0],
        flags=ctypes.cast(ctypes.c_char_p(parcels.flags), ctypes.c_void_p).value,
        count=len(parcels),
        first_row=parcels.first_row.buffer_info()[0],
        needs=parcels.rows.needs.buffer_info()[0],
    )
