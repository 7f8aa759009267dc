"""A read of pieces on one host: rows of the source's memory, copied by the kernel or out of a mapping, or sent.

Where the runs of a parcel are short, to have each of them copied out of another process costs more than to let the
source's kernel pack them into a socket: 0.7 us for each, whatever its length. So such a parcel is asked for with the
wish that it be sent. Mapped memory is copied run by run, whatever their length.
"""

from collections.abc import Sequence

from .base import Look
from .local_memory import Lost
from .local_reader import LocalStream
from .native import load, shapes
from .native_read import Mover
from .parcels import Parcels
from .rows import BadRow, Placed, Rows, RowStream
from .tcp_stream import Stream
from .vectors import Addresses

SENT_BELOW_BYTES = 4096  # runs that are shorter on an average are sent


class LocalPieces(LocalStream):
    """One connection of such a read."""

    _is_sent = False  # the parcel that comes

    def send_parcels(self) -> None:
        parcels, remote = self.job.parcels, self._its.remote
        if parcels is not None and remote is not None and self.index == 0 and not remote.is_mapped:
            rows, firsts = parcels.rows, parcels.first_row
            short = [rows.run_bytes(firsts[at], firsts[at + 1]) < SENT_BELOW_BYTES for at in range(len(parcels))]
            self.job.parcels = parcels.sending(short)
        super().send_parcels()

    @property
    def _parcels(self) -> Parcels:
        assert self.job.parcels is not None, "bytes of pieces before it is known which"
        return self.job.parcels

    # -- by the mover --------------------------------------------------------------------------------------------------

    def mover_for(self, wanted: Sequence[int], streams: int) -> Mover | None:
        remote = self._its.remote
        if not wanted or remote is None or load.library() is None:
            return None
        try:
            self._its.placed = Placed(self._parcels.rows, remote.addresses)
        except BadRow:
            return None  # of several pieces of memory: Python goes through them
        return super().mover_for(wanted, streams)

    def state_for(self, mover: Mover) -> shapes.StreamState:
        state, placed = super().state_for(mover), self._its.placed
        assert placed is not None, "a mover without addresses"
        state.theirs = placed.table
        return state

    # -- by Python -----------------------------------------------------------------------------------------------------

    def await_chunk(self, chunk: int, size_bytes: int) -> None:
        self._is_sent = self._parcels.is_sent(chunk)
        if self._is_sent:
            Stream.await_chunk(self, chunk, size_bytes)
        else:
            super().await_chunk(chunk, size_bytes)

    def transfer(self, start: int, stop: int, views: Sequence[memoryview], look: Look | None) -> None:
        if self._is_sent:
            Stream.transfer(self, start, stop, views, look)
            return
        self._have_remote()
        try:
            Stream.transfer(self, start, stop, views, look)
        except Lost as error:
            raise self.farewell() from error

    def take_bytes(self, start: int, stop: int, views: Sequence[memoryview]) -> None:
        if self._is_sent:
            self.wire.receive_into(views)
            return
        remote = self._have_remote()
        remote.read(
            start, stop, Addresses.of_views(views, start), _part(remote.addresses, self._parcels.rows, start, stop)
        )

    def taken(self, size_bytes: int) -> None:
        if self._is_sent:
            self.note_read(size_bytes, is_last=not self.asked)
        else:
            super().taken(size_bytes)


def _part(memory: Addresses, rows: Rows, start: int, stop: int) -> Addresses:
    """Where bytes [start, stop) of the parcels' stream lie at the source."""
    found: list[tuple[int, int]] = []
    for place, length in RowStream.ranges_of(rows, start, stop):
        at, end = place, place + length
        while at < end:
            pairs = memory.part(at, end)
            found += zip(pairs[0::2], pairs[1::2], strict=True)
            at += sum(pairs[1::2])
    return Addresses.of_ranges(found, start)
