"""Which way each read of this worker goes: the facts for `transport.choose`, and the memory of what does not work.

A transport that cannot work between this worker and a peer is tried once; then the next one is taken within the same
grant, and the first no more for that peer. The reason is logged once. But it may have been about one version only,
whose memory was freed, say: where there is no other way, it is tried once for each version.

Used in the worker's loop only.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..core.errors import SourceLost, TensorHubError, TransportMissing
from ..core.messages import MAX_TEXT, Grant
from ..core.names import Version, WorkerId
from ..transport.base import Read, Transport
from ..transport.choose import Way, choose, scheme_of
from ..transport.reach import out_of_reach

_log = logging.getLogger(__name__)

MOST_FAILED = 4096  # endpoints remembered; one of each life of each peer
RATE_OVER_S = 1.0
MEASURE_EVERY_S = 0.5  # twice for each report


class Routes:
    """The ways from here to the sources."""

    def __init__(self, me: WorkerId, transports: Mapping[str, Transport]) -> None:
        """`transports` by scheme, best first."""
        self._me = me
        self._transports = transports
        self._failed: dict[str, tuple[Version, str]] = {}

    def to(self, grant: Grant) -> list[Way]:
        """Ways to the grant's source, best first.

        If there is none it says why: `SourceLost` where the source can be reached on its own host only, so that others
        may do; else `TransportMissing`.
        """
        ways, reasons = self._choose(grant)
        if not ways and self._forget_others(grant):
            ways, reasons = self._choose(grant)
        if ways:
            return list(ways)
        for why in out_of_reach(grant.endpoints).values():
            raise SourceLost(f"{grant.source} cannot be reached from here: {why}")
        theirs = ", ".join(map(scheme_of, grant.endpoints)) or "none"
        raise TransportMissing(
            f"{self._me} and {grant.source} share no transport: here {', '.join(self._transports)}, there {theirs}"
            + "".join(f"; {reason}" for reason in reasons),
            hint="see what each of them has with `tensorhub doctor`, and what TENSORHUB_TRANSPORTS allows",
        )

    def failed(self, way: Way, grant: Grant, error: TensorHubError) -> None:
        """This way cannot work, whatever the source does, for this version at least."""
        if way.endpoint not in self._failed:
            hint = f" ({error.hint})" if error.hint else ""
            _log.info("%s: no %s from %s: %s%s", self._me, way.scheme, grant.source, error, hint)
            while len(self._failed) >= MOST_FAILED:
                del self._failed[next(iter(self._failed))]
            self._failed[way.endpoint] = (grant.version, f"{error}"[: MAX_TEXT // 4])

    def _choose(self, grant: Grant) -> tuple[tuple[Way, ...], tuple[str, ...]]:
        excluded = {endpoint: why for endpoint in grant.endpoints if (why := self._why_not(endpoint))}
        excluded |= out_of_reach(grant.endpoints)
        return choose(grant.endpoints, tuple(self._transports), excluded)

    def _forget_others(self, grant: Grant) -> bool:
        """Forget what failed for other versions of that source. Returns whether there was any."""
        known = {each: self._failed[each] for each in grant.endpoints if each in self._failed}
        others = [endpoint for endpoint, (version, _) in known.items() if version != grant.version]
        for endpoint in others:
            del self._failed[endpoint]
        return bool(others)

    def _why_not(self, endpoint: str) -> str | None:
        transport, known = self._transports.get(scheme_of(endpoint)), self._failed.get(endpoint)
        if known is not None:
            return known[1]
        return transport.why_not(endpoint) if transport is not None else None


@dataclass(frozen=True)
class Measured:
    """How a read goes."""

    path: str
    rate_bytes_per_s: int
    arrived_bytes: int  # by this read so far, of chunks under way too


class Meter:
    """The rate of one read over about the last second."""

    def __init__(self, read: Read, clock: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque([(clock(), read.arrived_bytes)])
        self.began = clock()

    def look(self) -> Measured:
        """How it goes now."""
        now, arrived = self._clock(), self._read.arrived_bytes
        self._seen.append((now, arrived))
        while len(self._seen) > 2 and self._seen[1][0] <= now - RATE_OVER_S:
            self._seen.popleft()
        then, before = self._seen[0]
        return Measured(self._read.path, _rate(arrived - before, now - then), arrived)

    def average(self) -> Measured:
        """From its beginning until now."""
        received = self._read.received_bytes
        return Measured(self._read.path, _rate(received, self._clock() - self.began), received)


def _rate(size_bytes: int, seconds: float) -> int:
    return round(size_bytes / seconds) if seconds > 0 else 0
