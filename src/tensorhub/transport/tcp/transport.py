"""The tcp transport: weights over plain sockets, with nothing to install. For hosts without RDMA, and across sites.

A read costs each end one thread for each stream. The mover's threads carry the bytes from registered memory to
registered memory. Python's threads carry what only a block of a stream may touch, such as a device's memory, and all
bytes where there is no mover.

It keeps the rules of `base`. It must never: know what a key means, pickle, or wait without a limit.

Measured beside bare sockets: docs/benchmarks.md. Through a proxy with a round trip of 100 ms and 25 MB/s for each
stream: 1 stream 24 MB/s, 4 streams 85, whatever the chunk size.
"""

import threading
from collections.abc import Callable
from dataclasses import replace

from ...protocol.errors import Closed, TensorHubError, Unavailable
from ..base import Export, OnEnd, Read, Sink, Transport
from .reader import Job, TcpRead
from .server import TcpServer
from .settings import TcpSettings

_JOIN_S = 5.0  # a read's threads return at once when cut, but may be inside the sink


class TcpTransport(Transport):
    """Moves registered bytes between two workers over TCP. Listens from the start."""

    kind = "tcp"
    is_revocable = True

    def __init__(self, settings: TcpSettings | None = None) -> None:
        self.settings = settings or TcpSettings()
        self._server = self.make_server()
        self.settings = replace(self.settings, leave_from=self._server.addresses)
        self._lock = threading.Lock()
        self._reads: dict[TcpRead, None] = {}
        self._is_closed = False
        self._counts = dict.fromkeys(("received_bytes", "received_chunks", "reads_ended", "reads_failed"), 0)

    def make_server(self) -> TcpServer:
        return TcpServer(self.settings)

    def make_read(self, endpoint: str, key: str, sink: Sink, ending: Callable[[TcpRead], OnEnd]) -> TcpRead:
        settings = self.settings.across_sites() if sink.is_cross_site else self.settings
        return TcpRead(Job(settings, endpoint, key, sink), ending)

    def why_not(self, endpoint: str) -> str | None:
        return None

    @property
    def endpoint(self) -> str:
        return self._server.endpoint

    @property
    def addresses(self) -> tuple[str, ...]:
        """What it listens at on a network."""
        return self._server.addresses

    def export(self, export: Export) -> None:
        self._server.export(export)

    def withdraw(self, key: str, *, timeout_s: float) -> bool:
        return self._server.withdraw(key, timeout_s=timeout_s)

    def withdraw_unread(self, key: str) -> bool:
        return self._server.withdraw_unread(key)

    def served_bytes(self, key: str) -> int:
        """Payload bytes sent of what is exported as `key` now."""
        return self._server.served_bytes(key)

    def read(self, endpoint: str, key: str, sink: Sink, on_end: OnEnd) -> Read:
        read = self.make_read(endpoint, key, sink, lambda read: self._ending(read, on_end))
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._reads[read] = None
        try:
            if is_closed:
                raise Closed(f"this {self.kind} transport was closed")
            read.start()
        except (Closed, Unavailable):
            with self._lock:
                self._reads.pop(read, None)
            read.forget()
            raise
        return read

    def _ending(self, read: TcpRead, on_end: OnEnd) -> OnEnd:
        """`on_end`, and before it the bookkeeping: a read that has ended is gone from the statistics."""

        def end(error: TensorHubError | None) -> None:
            with self._lock:
                self._reads.pop(read, None)
                self._counts["received_bytes"] += read.job.received_bytes
                self._counts["received_chunks"] += read.job.received_chunks
                self._counts["reads_failed" if error else "reads_ended"] += 1
            on_end(error)

        return end

    def statistics(self) -> dict[str, int]:
        with self._lock:
            counts = {**self._counts, "reads_open": len(self._reads)}
            for read in self._reads:
                counts["received_bytes"] += read.job.received_bytes
                counts["received_chunks"] += read.job.received_chunks
        return {**self._server.statistics(), **counts}

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            reads = list(self._reads)
        for read in reads:
            read.stop()
        self._server.close()
        for read in reads:
            read.join(_JOIN_S)
