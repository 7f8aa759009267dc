"""The source's side where readers fetch the bytes themselves: what `local` and `nixl` share.

A reader gets, once, MEMORY: where the bytes lie, as its transport says it; and for chunks that are there

    source  READY   chunks [`number`, number + n) are there; n is the body

and its requests carry as their `number` how many bytes it has read so far on this connection: that is what is counted.
It must never: send a chunk.
"""

import struct

from .tcp_lend import Lending
from .tcp_served import Served
from .tcp_server import TcpServer
from .tcp_wire import Hello, Wire

READY, MEMORY = 16, 17
COUNT = struct.Struct("=Q")
MAX_MEMORY_BYTES = 64 << 20  # 2 million pieces and more


class AnnouncingServer(TcpServer):
    """Says which chunks are there, and counts what its readers say that they have read."""

    is_announcing = True

    def lending(self, hello: Hello) -> Lending | None:
        return None

    def send(self, wire: Wire, served: Served, start: int, stop: int) -> int:
        """Announce all of [start, stop) that is there, up to the first gap."""
        progress = served.export.progress
        end = start + 1
        while end < stop and progress.has(end):
            end += 1
        self.announce(wire, start, end)
        return end

    def announce(self, wire: Wire, start: int, stop: int) -> None:
        """Say that chunks, or parcels, [start, stop) are there."""
        wire.send_frame(READY, start, [COUNT.pack(stop - start)])

    def heard(self, wire: Wire, served: Served, number: int) -> None:
        """The reader has read that many bytes on this connection, so it says."""
        with self._changed:
            news = number - served.inside.get(wire, 0)
            if 0 < news <= served.export.stream.size_bytes:
                served.inside[wire] = number
                served.sent_bytes += news
                self._counts["sent_bytes"] += news
                self._counts["sent_chunks"] += -(-news // served.export.chunk_bytes)
