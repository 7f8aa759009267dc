"""The local transport: weights between two workers of one host, copied once, straight from tensors to tensors.

The reader's threads let the kernel copy out of the source's memory (`process_vm_readv`); the source only says, over a
unix socket, where its bytes are and which chunks are there. Nothing to install, no payload in a socket, no work and no
GIL at the source. It needs Linux, one user, one PID and one network namespace, and a kernel that permits it: a reader
finds out by reading a cookie, and ends with `TransportMissing` where it may not, so that the pair takes tcp.

`local_host` says who may read whom, `local_memory` reads, `local_server` announces, `local_reader` copies. The rest is
the tcp transport's: what is said, by which threads, and how everything ends.

Why what was read is right, though the source cannot call a reader back: a chunk counts only if the source's seal, 16
random bytes in its memory, was seen there *after* the copy. `withdraw` breaks the seal before anything else, so what is
copied later, by a reader that was stopped, say, is not even judged; and to have read what it should not harms nobody.
The digest is checked besides, by the same thread, while the bytes are in its cache.

Measured: 512 MiB and 1 GiB between two processes, 2 cores (AMD EPYC) shared with other work, programs in random order,
12-40 rounds, against the best of bare `process_vm_readv` in 1 or 2 threads with calls of 4 or 16 MiB, as medians.
Without digests 1.00 and 1.02 of it; with them 0.77 to 0.79. The cores were the limit: a GiB costs 0.083 s of CPU bare,
0.095 here, 0.118 with xxh3-128, all of it at the reader, none at the source. When the memory was the limit (2 threads
bare only 1.2 times as fast as 1), 0.92 without and 0.80 with. A read costs 0.7 ms besides, and 0.3 MiB of memory.
Small tensors pay the kernel for each piece of the source, 0.7 us whatever the length, unless they lie near each other,
as those do that were allocated one after another: then they are read across the gaps (`vectors`, decision 0009).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from ..core.errors import TransportMissing
from .base import OnEnd, Sink
from .local_host import allow_readers, format_place, here, parse_endpoint
from .local_memory import probe_self
from .local_pieces import LocalPieces
from .local_reader import LocalRead, LocalStream
from .local_server import LocalServer
from .parcels import Piecewise
from .shortages import is_shortage
from .tcp import TcpTransport
from .tcp_reader import TcpRead
from .tcp_server import TcpServer
from .tcp_settings import MIB, TcpSettings


@dataclass(frozen=True)
class LocalSettings:
    """How one worker reads and lets read on its host."""

    token: str | None = field(
        default=None, repr=False
    )  # shared secret that a reader must show, besides being of the same user
    silence_s: float = 5.0  # as tcp's: the keepalive comes every 1.25 s
    threads: int = 2  # one copies 16-18 GiB/s, or 12.7 with the digest; two 20-24, which is all that the memory gives
    thread_bytes: int = 8 * MIB  # what makes a further thread worth its connection: 0.5 ms of copying
    block_bytes: int = 4 * MIB  # copied, then hashed, where a chunk lies in many pieces
    ahead_bytes: int = 256 * MIB  # each request wakes the source, which takes a core from a reader for 0.1 ms
    max_connections: int = 64  # 32 readers with 2 threads each
    maps: bool = True  # memory that the source hands over, rather than let the kernel copy out of its process
    allow_readers: bool = True  # under Yama's scope 1 only: without it nobody may read (as Open MPI and UCX do)

    def as_tcp(self) -> TcpSettings:
        """For what is shared with the tcp transport."""
        return TcpSettings(
            token=self.token,
            silence_s=self.silence_s,
            connect_s=self.silence_s,
            streams=self.threads,
            stream_rate_bytes_per_s=0,
            stream_bytes=self.thread_bytes,
            block_bytes=self.block_bytes,
            ahead_bytes=self.ahead_bytes,
            max_connections=self.max_connections,
            congestion=None,
        )


class LocalTransport(TcpTransport):
    """Moves registered bytes between two workers of one host. Raises `TransportMissing` where that cannot be."""

    kind = "local"

    def __init__(self, settings: LocalSettings | None = None) -> None:
        settings = settings or LocalSettings()
        self._place = here()
        self._maps = settings.maps
        probe_self()
        if settings.allow_readers:
            allow_readers()
        super().__init__(settings.as_tcp())

    @property
    def mapping_place(self) -> str:
        """Those who have the same one can map each other's memory, as far as is known; empty: it maps none."""
        return format_place(self._place) if self._maps else ""

    def make_server(self) -> TcpServer:
        try:
            return LocalServer(self.settings, self._place)
        except OSError as error:
            if is_shortage(error):
                raise
            raise TransportMissing(f"no unix socket can be had here: {error}", hint="use tcp") from error

    def make_read(self, endpoint: str, key: str, sink: Sink, ending: Callable[[TcpRead], OnEnd]) -> TcpRead:
        streams = LocalPieces if isinstance(sink, Piecewise) else LocalStream
        return LocalRead(self.settings, endpoint, key, sink, ending, self._place, maps=self._maps, streams=streams)

    def why_not(self, endpoint: str) -> str | None:
        try:
            place, _ = parse_endpoint(endpoint)
        except ValueError as error:
            return str(error)
        return self._place.difference(place)
