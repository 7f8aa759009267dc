"""The nixl transport: weights by NIXL's one-sided reads over UCX, straight from tensors to tensors.

For RDMA, NVLink and CUDA IPC; on one host without any of them UCX copies from process to process (cma). The source's
CPU carries no byte. It needs the extra `tensorhub[nixl]`; loading it is tried in a child process first (`nixl_probe`).

What is said goes over a socket of the tcp transport's kind (`nixl_server`, `nixl_reader`); what is copied, NIXL copies
(`nixl_agent`, `nixl_agents`, `nixl_meeting`), from places that both ends know (`nixl_memory`); pieces of another layout
by way of host memory here (`nixl_pieces`). UCX falls back to TCP in silence, where our own sockets are several times
faster, and where a read from a stopped source can neither be called back nor fenced without harm. So each thread of a
read proves its way first (`nixl_path`), and where it is TCP the read ends with `TransportMissing`.

Measured: 1 GiB between two processes of one host, 2 cores (AMD EPYC) with five times more work than they could do, six
rounds in random order, medians of two runs: NIXL alone, one list of 256 descriptors, 8.7 and 5.3 GiB/s; this transport
without digests 8.0 and 7.2, with them 5.8 and 6.5; `process_vm_readv` alone 10.3 and 9.3; local with digests 8.0 and
7.4; tcp with digests 3.2 and 2.9. CPU seconds per GiB, reader + source: 0.13 + 0.00 without digests, 0.15 + 0.00 with.

Why what was read is right: as with `local`, a chunk counts only if the export's seal was seen after its bytes, and the
digest is checked besides. Why nothing comes late: tensors are written to only over a way that has been proved, `on_end`
waits until no transfer is open, and one that does not end within `silence_s` ends its agent, which fences.

UCX itself knows no token: whoever may read the host's RDMA network is trusted, as NIXL trusts it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import nixl_path
from .base import OnEnd, Sink
from .nixl_agent import load
from .nixl_agents import Agents
from .nixl_pieces import NixlPieces
from .nixl_probe import DEADLINE_S, Probe, require
from .nixl_reader import NixlJob, NixlRead, NixlStream
from .nixl_server import NixlServer
from .parcels import Piecewise
from .tcp import TcpTransport
from .tcp_reader import TcpRead
from .tcp_server import TcpServer
from .tcp_settings import MIB, TcpSettings


@dataclass(frozen=True)
class NixlSettings:
    """How one worker reads and lets read by NIXL."""

    host: str = "127.0.0.1"  # of the control conversation; open to other hosts only when asked for
    port: int = 0  # any free port
    advertise: str | None = None  # "host" or "host:port" as peers see it
    token: str | None = field(
        default=None, repr=False
    )  # shared secret that a reader must show before it is told where the bytes are
    silence_s: float = 5.0  # as tcp's: the keepalive comes every 1.25 s
    threads: int = 2  # each fetches and hashes; UCX has a worker for each, so that they do not wait for one another
    thread_bytes: int = 8 * MIB  # what makes a further thread worth its connection
    max_connections: int = 64  # 32 readers with 2 threads each
    tls: str = ""  # UCX_TLS for this transport; empty: what the environment says, or UCX's own choice
    probe_s: float = DEADLINE_S  # how long the child process may take that tries NIXL first
    allow_tcp: bool = False  # for tests and comparison; a source that stops in mid-read may abort when it goes on

    def as_tcp(self) -> TcpSettings:
        """For what is shared with the tcp transport."""
        return TcpSettings(
            host=self.host,
            port=self.port,
            advertise=self.advertise,
            token=self.token,
            silence_s=self.silence_s,
            connect_s=self.silence_s,
            streams=self.threads,
            stream_bytes=self.thread_bytes,
            stream_rate_bytes_per_s=0,
            max_connections=self.max_connections,
            congestion=None,
        )


class NixlTransport(TcpTransport):
    """Moves registered bytes by one-sided reads. Raises `TransportMissing` where NIXL does not work."""

    kind = "nixl"
    is_revocable = True

    def __init__(self, settings: NixlSettings | None = None, *, bindings: Any = None) -> None:
        """`bindings` stand for NIXL's own in tests; otherwise those are probed, then loaded."""
        self._mine = settings or NixlSettings()
        self.probed: Probe = require(self._mine.probe_s) if bindings is None else Probe(bindings.__name__)
        self._facts = nixl_path.facts(self._mine.tls)
        bindings = bindings or load(self.probed.module)
        mine = self._mine
        self._agents = Agents(bindings, workers=mine.threads, tls=mine.tls, emulates=mine.allow_tcp)
        try:
            super().__init__(self._mine.as_tcp())
        except BaseException:
            self._agents.close()
            raise

    def make_server(self) -> TcpServer:
        return NixlServer(self.settings, self._agents, self._facts)

    def make_read(self, endpoint: str, key: str, sink: Sink, ending: Callable[[TcpRead], OnEnd]) -> TcpRead:
        streams = NixlPieces if isinstance(sink, Piecewise) else NixlStream
        return NixlRead(self.settings, endpoint, key, sink, ending, self._make_job, streams)

    def _make_job(self, endpoint: str, key: str, sink: Sink) -> NixlJob:
        return NixlJob(self.settings, endpoint, key, sink, self._agents, self._facts, self._mine.allow_tcp)

    def statistics(self) -> dict[str, int]:
        return {**super().statistics(), "nixl_agents_replaced": self._agents.replaced}

    def close(self) -> None:
        super().close()
        self._agents.close()
