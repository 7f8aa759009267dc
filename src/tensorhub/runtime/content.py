"""A version in a worker's memory: its export, the routes to other workers, and the read that is open."""

import asyncio
import ipaddress
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from ..memory.digests import changed_chunks, changed_of
from ..memory.fill import FillSink
from ..memory.host_memory import size_text
from ..memory.registration import Registration
from ..protocol.errors import SourceLost, TensorHubError, TransportMissing, Unavailable, error_from_code
from ..protocol.manifest import Manifest
from ..protocol.messages import MAX_CROSS_SITE_VERSIONS, MAX_SOURCES, MAX_TEXT, Grant, add_up
from ..protocol.names import Digest, Version, WorkerId
from ..reshard.read import Across, TiledVersion
from ..transport.base import Export, Progress, Read, Transport, Way, choose, scheme_of
from ..transport.local import memory
from ..transport.tcp.addresses import parse_endpoint
from ..transport.threads import as_ours
from ..worker.events import ReadMeasured
from .loops import in_thread
from .trust import TrustedSink

# --- Which endpoints of a source nobody can reach from here, as far as the endpoints themselves say so.
#
# A worker listens at the address that its host has on the way to the reference server. Who went there by `127.0.0.1`
# can be read on its own host only. On another host a connection to that address would end at a stranger, or nowhere;
# so it is not tried, and the reader says what to change. Where a source is, its endpoint of `local` tells.


LISTENING = ("tcp", "nixl")  # both are begun by a connection to an address


def out_of_reach(offered: Sequence[str]) -> dict[str, str]:
    """Of a source's endpoints those that cannot be reached from this process, and why in words."""
    if not _is_elsewhere(offered):
        return {}
    found = {}
    for endpoint in offered:
        at = _loopback(endpoint)
        if at:
            found[endpoint] = (
                f"it is to be reached at {at}, which only its own host reaches: open it with a server= address that "
                "other hosts use too, or with host= (TENSORHUB_HOST)"
            )
    return found


def _is_elsewhere(offered: Sequence[str]) -> bool:
    """The source is known to be on another host, or in another network namespace of this one."""
    try:
        here = memory.here()
    except (TransportMissing, Unavailable):
        return False
    for endpoint in offered:
        try:
            place, _ = memory.parse_endpoint(endpoint)
        except ValueError:
            continue
        return (place.boot, place.network_namespace) != (here.boot, here.network_namespace)
    return False


def _loopback(endpoint: str) -> str:
    """The endpoint's first host, if all of them are loopback addresses; else an empty string."""
    scheme = endpoint.partition("://")[0]
    if scheme not in LISTENING:
        return ""
    try:
        hosts = [host for host, _ in parse_endpoint(endpoint, scheme)]
        return hosts[0] if all(ipaddress.ip_address(host).is_loopback for host in hosts) else ""
    except ValueError:  # garbage, or a name, which may mean anything
        return ""


# --- Taking an export back, from every transport that has it, however long its readers take.


TRY_S = 1.0  # one try; they go on until nobody reads any more
SLOW_S = 10.0  # longer than this is worth a line in the log

_log = logging.getLogger(__name__)


def withdraw_everywhere(
    transports: Iterable[Transport], key: str, *, who: object, is_closed: Callable[[], bool]
) -> None:
    """Wait until nobody reads it any more, or all is closed. In a thread; `who` is for the log."""
    began, is_told = time.monotonic(), False
    for transport in transports:
        while not is_closed() and not transport.withdraw(key, timeout_s=TRY_S):
            if not is_told and time.monotonic() - began > SLOW_S:
                is_told = True
                _log.warning("%s: %s is still being read after %.0f s", who, key, SLOW_S)


# --- One version in a worker's memory, whole or being filled, and its export by every transport.


Known = Manifest | TiledVersion  # what a version is, in whichever way it was published


def key_of(model: str, version: int, shard: int, *, on_host: bool = False) -> str:
    """Under which peers read what a worker has of a version, in its tensors or in host memory."""
    return f"{model}/{version}/{shard}{'/host' if on_host else ''}"


def _as_ours(error: Exception, scheme: str) -> TensorHubError:
    """Without a traceback: it would hold all that is exported."""
    text = f"it is held, but peers cannot read it by {scheme}: {error}"
    hint = f"unpublish() takes it back; TENSORHUB_TRANSPORTS can leave {scheme} out"
    code = error.code if isinstance(error, TensorHubError) else as_ours(error, scheme).code
    return error_from_code(code, text, hint=hint)


class Content:
    """A version in the registered memory or in a host copy."""

    def __init__(self, version: Version, root: Digest, key: str, registration: Registration) -> None:
        self.version = version
        self.root = root
        self.key = key
        self.registration = registration
        self.manifest: Known | None = None
        self.progress: Progress | None = None
        self.fill: FillSink | Across | None = None
        self._lock = threading.Lock()
        self._is_stopped = False

    def is_of(self, version: Version, root: Digest) -> bool:
        """It is this content, and no other that has the same number."""
        return (self.version, self.root) == (version, root)

    def export(self, transports: Mapping[str, Transport], manifest: Known, progress: Progress) -> TensorHubError | None:
        """Let peers read it, unless it was stopped meanwhile: a fill learns its manifest in a transport's thread.

        Returns why not everybody can, if a transport does not take it: two peers that share that one would choose it.
        """
        wrong: list[TensorHubError] = []
        export = Export(self.key, manifest.encode(), manifest.chunk_bytes, self.registration.stream, progress)
        for scheme, transport in transports.items():
            with self._lock:
                self.manifest, self.progress = manifest, progress
                if not self._is_stopped:
                    try:
                        transport.export(export)
                    except Exception as error:  # noqa: BLE001 - whatever is wrong with one way, the others serve
                        wrong.append(_as_ours(error, scheme))
                        _log.warning("%s cannot be read by %s: %r", self.key, scheme, error)
        return wrong[0] if wrong else None

    async def noted(self) -> None:
        """All of it has come, and was verified: note what no manifest has a digest of. Raises `UsageError`."""
        if isinstance(self.manifest, TiledVersion) and not self.manifest.is_whole:
            await in_thread(partial(self.manifest.note_parts, self.registration), name="digest")

    def stop(self, why: TensorHubError) -> None:
        """No export of it begins any more, and no further chunk comes."""
        with self._lock:
            self._is_stopped = True
        if self.fill is not None:
            self.fill.revoke(why)
        if self.progress is not None:
            self.progress.fail(str(why))


def changed_tensors(registration: Registration, known: Known) -> tuple[list[str], dict[int, list[str]]]:
    """Names of the tensors whose bytes now differ, and by chunk the names of those of which at least one does.

    Blocks; raises `UsageError` if that cannot be told.
    """
    if isinstance(known, TiledVersion):
        return known.names(known.changed(registration), registration), {}
    return changed_of(registration.layout, known, changed_chunks(registration, known))


# --- Which way each read of this worker goes: the facts for `transport.choose`, and the memory of what does not work.
#
# A transport that cannot work between this worker and a peer is tried once; then the next one is taken within the same
# grant, and the first no more for that peer. The reason is logged once. But it may have been about one version only,
# whose memory was freed, say: where there is no other way, it is tried once for each version.
#
# Used in the worker's loop only.


MAX_FAILED = 4096  # endpoints remembered; one of each life of each peer
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
            while len(self._failed) >= MAX_FAILED:
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


# --- The read that is under way at a worker: by which way it goes, and what the machine was told of it.


class Counted(Protocol):
    """A read whose bytes are counted."""

    grant: Grant
    read: Read | None
    way: Way | None
    counted_bytes: int


class OpenRead:
    """One read, from its grant to its end. `read` is None before it begins on its first way."""

    def __init__(self, grant: Grant, content: Content, sink: TrustedSink) -> None:
        self.grant = grant
        self.content = content
        self.sink = sink
        self.ways: list[Way] = []  # left to try
        self.way: Way | None = None  # under way
        self.read: Read | None = None
        self.meter: Meter | None = None
        self.counted_bytes = 0
        self.measured: ReadMeasured | None = None
        self.told = -1
        self.is_opened = False  # it has the manifest, and waits
        self.is_waking = False
        self.measuring: asyncio.Handle | None = None  # the next look at its rate
        self.looking: asyncio.Handle | None = None  # the next look at its progress

    def log_end(self, me: WorkerId) -> None:
        """For people: how it went."""
        if self.way is not None and self.meter is not None and self.counted_bytes:
            found, grant = self.meter.average(), self.grant
            _log.info(
                "%s has read %s of version %d from %s by %s (%s) at %.1f MiB/s%s",
                *(me, size_text(self.counted_bytes), grant.version, grant.source),
                *(self.way.scheme, found.path, found.rate_bytes_per_s / 2**20),
                f"; not by {self.way.why}" if self.way.why else "",
            )

    def end(self) -> None:
        """It is over: no timer keeps it, or else those of the last half second would be there, with all they hold."""
        for handle in (self.measuring, self.looking):
            if handle is not None:
                handle.cancel()


@dataclass
class Received:
    """Bytes that came by reads."""

    by_replica: dict[str, int] = field(default_factory=dict)  # of the sources: the latest few, and all others
    cross_site: dict[int, int] = field(default_factory=dict)  # by version: from other sites, the latest few
    by_transport: dict[str, int] = field(default_factory=dict)

    def count(self, reading: Counted) -> None:
        """What is new of that read."""
        if reading.read is None:
            return
        replica, received = reading.grant.source.replica, reading.read.received_bytes
        news, reading.counted_bytes = received - reading.counted_bytes, received
        if not news:  # a source that was tried, and was not there, is none
            return
        add_up(self.by_replica, replica, news, most=MAX_SOURCES)
        if reading.grant.is_cross_site:
            self._count_cross_site(reading.grant.version, news)
        if reading.way is not None:
            self.by_transport[reading.way.scheme] = self.by_transport.get(reading.way.scheme, 0) + news

    def _count_cross_site(self, version: Version, size_bytes: int) -> None:
        self.cross_site[version] = self.cross_site.pop(version, 0) + size_bytes
        while len(self.cross_site) > MAX_CROSS_SITE_VERSIONS:
            del self.cross_site[next(iter(self.cross_site))]
