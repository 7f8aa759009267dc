"""A version in a worker's memory: its export, the routes to other workers, the open read, and what that may count."""

import _thread
import asyncio
import ipaddress
import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Protocol

from ..memory.digests import Parts, changed_chunks, changed_of, small_parts
from ..memory.fill import FillSink
from ..memory.host_memory import size_text
from ..memory.registration import Registration
from ..protocol.errors import (
    InvariantViolation,
    SessionLost,
    SourceLost,
    TensorHubError,
    TransportMissing,
    Unavailable,
    error_from_code,
)
from ..protocol.manifest import Manifest
from ..protocol.messages import MAX_CROSS_SITE_VERSIONS, MAX_SOURCES, MAX_TEXT, Grant, Source, add_up
from ..protocol.names import Digest, Version, WorkerId
from ..reshard.read import Across, Offer, TiledVersion, TileSink
from ..transport.base import (
    ByteStream,
    Export,
    Progress,
    Read,
    StopFlag,
    Terms,
    Transport,
    Until,
    Way,
    choose,
    scheme_of,
)
from ..transport.local import memory
from ..transport.ranges import Batches
from ..transport.sealed import Shared
from ..transport.tcp.addresses import parse_endpoint
from ..transport.threads import as_ours
from ..worker.events import ReadMeasured
from .loops import held_lock, in_thread
from .metrics import RATE, READ, RECEIVED, Record
from .transports import TRANSPORTS

NOTHING = Batches.of(array("q"), [], 0)


class Lease:
    """Until when this worker trusts what it reads (`time.monotonic()`); written by the loop, read by any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.end = Until(-inf)
        self.clock = clock
        self.is_touched = False  # a byte may have been written, of which the machine has not heard yet

    @property
    def until(self) -> float:
        return self.end.value

    @until.setter
    def until(self, moment: float) -> None:
        self.end.value = moment

    @property
    def is_over(self) -> bool:
        return self.clock() >= self.until


class Touch:
    """Whether a read may have written anything yet; and its end."""

    def __init__(self, lease: Lease, on_touch: Callable[[], None]) -> None:
        """`on_touch` is called once, in a transport's thread, before the first byte is written."""
        self.stop_flag = StopFlag()
        self.lease = lease
        self.is_touched = False
        self._on_touch = on_touch
        self._lock = threading.Lock()

    def touch(self, check: Callable[[], None]) -> None:
        """Something is about to be written, unless `check` raises."""
        if self.is_touched:
            return
        with self._lock:
            check()
            is_first, self.is_touched = not self.is_touched, True
            self.lease.is_touched |= is_first
        if is_first:
            self._on_touch()

    def bar(self) -> bool:
        """Let nothing count any more. Returns whether anything may have been written; if not, it never will be."""
        with self._lock:
            self.stop_flag.set()
            return self.is_touched

    def let_go(self) -> None:
        """Nothing of it runs any more. Held from both sides, read and content would wait for the garbage collector."""
        self._on_touch = _touched_late


def _touched_late() -> None:
    raise InvariantViolation("a read that was over has touched something")


class Trusted:
    """What all sinks ask before and after anything counts."""

    def __init__(self, touch: Touch, *, is_cross_site: bool) -> None:
        self.is_cross_site = is_cross_site  # the source is in another site, which a transport may like to know
        self._touch = touch

    @property
    def is_stopped(self) -> bool:
        """Nothing of it counts any more."""
        return self._touch.stop_flag.is_set

    def check(self) -> None:
        """`SessionLost` says that no source is to blame."""
        if self.is_stopped:
            raise SessionLost("this read was told to stop")
        if self._touch.lease.is_over:
            raise SessionLost("the lease under which this read was granted has ended")


class ForwardingSink(Trusted):
    """Hands on what a transport brings, to a fill or to a tile sink of one."""

    def __init__(self, target: FillSink | TileSink, touch: Touch, *, is_cross_site: bool) -> None:
        super().__init__(touch, is_cross_site=is_cross_site)
        self._target = target

    @property
    def stream(self) -> ByteStream:
        return self._target.stream

    @property
    def is_checking(self) -> bool:
        return self._target.is_checking

    @property
    def chunk_bytes(self) -> int:
        return self._target.chunk_bytes

    def begin(self, manifest: bytes) -> Sequence[int]:
        self.check()
        return self._target.begin(manifest)

    def touch(self) -> None:
        self.check()
        self._touch.touch(self.check)
        self._target.touch()

    def terms(self) -> Terms | None:
        """The terms of its target, as long as this read is trusted."""
        terms = self._target.terms()
        if terms is None or self._touch.lease.clock is not time.monotonic:
            return None
        stop_flags = (*terms.stop_flags, self._touch.stop_flag)
        return replace(terms, stop_flags=stop_flags, until=self._touch.lease.end)

    def told(self, size_bytes: int) -> None:
        self._target.told(size_bytes)

    def check(self) -> None:
        super().check()
        self._target.check()

    def accept(self, chunk: int, views: Sequence[memoryview]) -> None:
        self.check()
        self._target.accept(chunk, views)
        self.check()

    def stored(self, chunk: int) -> None:
        self.check()
        self._target.stored(chunk)


KEPT_OPEN_S = 0.25  # a round trip to the server and back; the source keeps a connection for it


class TrustedSink(ForwardingSink):
    """A `Sink` for one read of one source: the fill behind it, as long as the read is trusted."""

    def __init__(
        self,
        fill: FillSink,
        lease: Lease,
        *,
        is_cross_site: bool = False,
        is_only_opened: bool = False,
        shares: bool = False,
        on_touch: Callable[[], None] = lambda: None,
        on_opened: Callable[[], None] = lambda: None,
    ) -> None:
        """`is_only_opened`: the manifest is wanted, and no chunk. `shares`: and the source's memory if it can be had.

        `on_touch` is called once, in a transport's thread, before the first byte is written. The same thread calls
        `on_opened` when the manifest has arrived, if the read fetches no chunks yet.
        """
        super().__init__(fill, Touch(lease, on_touch), is_cross_site=is_cross_site)
        self.is_only_opened = is_only_opened or shares
        self.shares = shares
        self._on_opened = on_opened
        self._kept_open: _thread.LockType | None = None  # what the transport's thread waits for
        self._lock = threading.Lock()
        self.shared: tuple[Shared, int] | None = None  # the memory, and where in it the bytes begin
        self._fill = fill

    def begin(self, manifest: bytes) -> Sequence[int]:
        """For what is only opened, it waits a moment for `go_on`: the same connection then brings the chunks."""
        missing = super().begin(manifest)
        if self.is_only_opened and not self.shares:
            with self._lock:
                self.check()
                going_on = self._kept_open = held_lock()
            self._on_opened()
            going_on.acquire(timeout=KEPT_OPEN_S)
            with self._lock:
                self._kept_open = None
            self.check()
        return () if self.is_only_opened else missing

    def go_on(self) -> bool:
        """Read what was opened, over its connection. Returns whether there still is one."""
        with self._lock:
            kept, self._kept_open = self._kept_open, None
        if kept is None:
            return False
        self.is_only_opened = False
        kept.release()
        return True

    @property
    def manifest(self) -> Manifest:
        """The source's, once it has come and is the right one."""
        return self._fill.manifest

    def share(self, memory: object, address: int) -> None:
        assert isinstance(memory, Shared), "memory that cannot be kept"
        self.shared = (memory, address)

    def bar(self) -> bool:
        """Let nothing be written any more unless something was before. Returns whether it was; final either way."""
        is_touched = self._touch.bar()
        with self._lock:
            kept, self._kept_open = self._kept_open, None
        if kept is not None:
            kept.release()
        return is_touched

    def stored(self, chunk: int) -> None:
        self.check()
        self._fill.check_in_place(chunk)  # it takes a while
        super().stored(chunk)

    def take(self, chunks: range, digests: bytes | None) -> None:
        self.check()
        self._fill.take(chunks, digests)
        self.check()


class TrustedTileSink(ForwardingSink):
    """One tile sink of a fill, for as long as its read is trusted."""

    def __init__(self, tile_sink: TileSink, touch: Touch, *, is_cross_site: bool) -> None:
        super().__init__(tile_sink, touch, is_cross_site=is_cross_site)
        self.tile_sink = tile_sink

    @property
    def batches(self) -> Batches:
        return self.tile_sink.batches

    def count(self, batches: range) -> None:
        self.check()
        self.tile_sink.count(batches)

    def wrong_tile(self, tile: int) -> TensorHubError:
        return self.tile_sink.wrong_tile(tile)


class Looking(Trusted):
    """Takes what a source shows of itself, and wants no piece of it. It is a stream of nothing at the same time."""

    is_checking = True
    size_bytes = 0
    chunk_bytes = 1

    def __init__(self, source: Source, touch: Touch) -> None:
        super().__init__(touch, is_cross_site=source.is_cross_site)
        self.offer: Offer | None = None
        self.batches = NOTHING
        self._source = source

    @property
    def stream(self) -> ByteStream:
        return self

    def begin(self, manifest: bytes) -> Sequence[int]:
        self.check()
        offer = Offer(str(self._source.worker), self._source.root, bytes(manifest))
        self.batches = replace(NOTHING, source_bytes=offer.shard.table.size_bytes)
        self.offer = offer
        return ()

    def views_to_read(self, start: int, stop: int) -> AbstractContextManager[Sequence[memoryview]]:
        return nullcontext(())

    def views_to_write(self, start: int, stop: int) -> AbstractContextManager[Sequence[memoryview]]:
        raise InvariantViolation("a look wrote something")

    def touch(self) -> None:
        raise InvariantViolation("a look touched something")

    def wrong_tile(self, tile: int) -> TensorHubError:
        raise InvariantViolation("a look was given bytes")

    def accept(self, chunk: int, views: Sequence[memoryview]) -> None:
        raise InvariantViolation("a look was given bytes")

    def stored(self, chunk: int) -> None:
        raise InvariantViolation("a look was given bytes")


# A worker that went to the server by 127.0.0.1 listens there. A reader on another host does not try that address.


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
    if scheme not in TRANSPORTS or not TRANSPORTS[scheme].is_networked:
        return ""
    try:
        hosts = [host for host, _ in parse_endpoint(endpoint, scheme)]
        return hosts[0] if all(ipaddress.ip_address(host).is_loopback for host in hosts) else ""
    except ValueError:  # garbage, or a name, which may mean anything
        return ""


TRY_S = 1.0  # one try; they go on until there are no readers
SLOW_S = 10.0  # longer than this is worth a line in the log

_log = logging.getLogger(__name__)


def withdraw_everywhere(
    transports: Iterable[Transport], key: str, *, who: object, is_closed: Callable[[], bool]
) -> None:
    """Wait until it has no readers, or all is closed. In a thread; `who` is for the log."""
    began, is_told = time.monotonic(), False
    for transport in transports:
        while not is_closed() and not transport.withdraw(key, timeout_s=TRY_S):
            if not is_told and time.monotonic() - began > SLOW_S:
                is_told = True
                _log.warning("%s: %s is still being read after %.0f s", who, key, SLOW_S)


def withdraw_unread(transports: Iterable[Transport], key: str) -> bool:
    """Whether it has no readers, and gets none: known at once."""
    return all(transport.withdraw_unread(key) for transport in transports)


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

        Returns why, if a transport does not take it: two peers that share that one would choose it.
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


def changed_tensors(
    registration: Registration, known: Known, parts: Parts | None = None
) -> tuple[list[str], dict[int, list[str]]]:
    """Names of the tensors whose bytes now differ, and by chunk the names of those of which at least one does.

    `parts` are digests of when it was published. Blocks; raises `UsageError` if that cannot be told.
    """
    if isinstance(known, TiledVersion):
        return known.names(known.changed(registration), registration), {}
    chunks = changed_chunks(registration, known)
    now = small_parts(registration, known.chunk_bytes, set(chunks)) if parts and chunks else {}
    return changed_of(registration.layout, known, chunks, parts or {}, now)


# A transport that does not work between two workers is tried once, and the reason is logged once. The reason may have
# been one version whose memory was freed. So without another way it is tried once for each version.


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

    def to(self, source: Source, version: Version) -> list[Way]:
        """Ways to that source of the version, best first.

        If there is none it says why: `SourceLost` where the source can be reached on its own host only, so that others
        may do; else `TransportMissing`.
        """
        ways, reasons = self._choose(source)
        if not ways and self._forget_others(source, version):
            ways, reasons = self._choose(source)
        if ways:
            return list(ways)
        for why in out_of_reach(source.endpoints).values():
            raise SourceLost(f"{source.worker} cannot be reached from here: {why}")
        theirs = ", ".join(map(scheme_of, source.endpoints)) or "none"
        raise TransportMissing(
            f"{self._me} and {source.worker} share no transport: here {', '.join(self._transports)}, there {theirs}"
            + "".join(f"; {reason}" for reason in reasons),
            hint="see what each of them has with `tensorhub doctor`, and what TENSORHUB_TRANSPORTS allows",
        )

    def failed(self, way: Way, source: Source, version: Version, error: TensorHubError) -> None:
        """Gives this way up for this version: no answer of the source can help."""
        if way.endpoint not in self._failed:
            hint = f" ({error.hint})" if error.hint else ""
            _log.info("%s: no %s from %s: %s%s", self._me, way.scheme, source.worker, error, hint)
            while len(self._failed) >= MAX_FAILED:
                del self._failed[next(iter(self._failed))]
            self._failed[way.endpoint] = (version, f"{error}"[: MAX_TEXT // 4])

    def _choose(self, source: Source) -> tuple[tuple[Way, ...], tuple[str, ...]]:
        excluded = {endpoint: why for endpoint in source.endpoints if (why := self._why_not(endpoint))}
        excluded |= out_of_reach(source.endpoints)
        return choose(source.endpoints, tuple(self._transports), excluded)

    def _forget_others(self, source: Source, version: Version) -> bool:
        """Forget what failed for other versions of that source. Returns whether there was any."""
        known = {each: self._failed[each] for each in source.endpoints if each in self._failed}
        others = [endpoint for endpoint, (failed_for, _) in known.items() if failed_for != version]
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
    """The measured path, rate and bytes of a read."""

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
        """Measures the read now."""
        now, arrived = self._clock(), self._read.arrived_bytes
        self._seen.append((now, arrived))
        while len(self._seen) > 2 and self._seen[1][0] <= now - RATE_OVER_S:
            self._seen.popleft()
        then, before = self._seen[0]
        return Measured(self._read.path, _rate(arrived - before, now - then), arrived)

    def goes_on(self) -> None:
        """The read was open, and waited until it might write: it begins now."""
        self.began = self._clock()

    def ended(self, record: Record, scheme: str) -> Measured:
        """What was measured from the beginning of the read until now: counts it."""
        received, seconds = self._read.received_bytes, self._clock() - self.began
        rate = _rate(received, seconds)
        record.observe(READ, seconds, scheme)
        record.observe(RATE, rate, scheme)
        return Measured(self._read.path, rate, received)


def _rate(size_bytes: int, seconds: float) -> int:
    return round(size_bytes / seconds) if seconds > 0 else 0


def memory_of(registration: Registration) -> str:
    """Where these tensors lie: "device", or "host" of host copies too."""
    return "host" if registration.devices == ("cpu",) else "device"


class Counted(Protocol):
    """A read whose bytes are counted."""

    source: Source
    version: Version
    read: Read | None
    way: Way | None
    counted_bytes: int
    memory: str  # that it fills: "device" or "host"


class OpenRead:
    """One read, from its grant to its end. `read` is None before it begins on its first way."""

    def __init__(self, grant: Grant, content: Content, sink: TrustedSink) -> None:
        self.grant, self.source, self.version = grant, grant.source, grant.version
        self.content = content
        self.memory = memory_of(content.registration)
        self.sink = sink
        self.ways: list[Way] = []  # left to try
        self.way: Way | None = None  # under way
        self.read: Read | None = None
        self.meter: Meter | None = None
        self.counted_bytes = 0
        self.measured: ReadMeasured | None = None
        self.told = -1
        self.is_opened = False  # it has the manifest, and no connection
        self.has_gone_on = False  # over the connection by which it was opened
        self.is_waking = False
        self.measuring: asyncio.Handle | None = None  # the next look at its rate
        self.looking: asyncio.Handle | None = None  # the next look at its progress

    def log_end(self, me: WorkerId, record: Record) -> None:
        """Log and count the end of the read."""
        if self.way is not None and self.meter is not None and self.counted_bytes:
            found = self.meter.ended(record, self.way.scheme)
            _log.debug(
                "%s has read %s of version %d from %s by %s (%s) at %.1f MiB/s%s",
                *(me, size_text(self.counted_bytes), self.version, self.source.worker),
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

    record: Record = field(default_factory=Record)
    by_replica: dict[str, int] = field(default_factory=dict)  # of the sources: the latest few, and all others
    cross_site: dict[int, int] = field(default_factory=dict)  # by version: from other sites, the latest few
    by_transport: dict[str, int] = field(default_factory=dict)

    def count(self, reading: Counted) -> None:
        """Counts the new bytes of that read."""
        if reading.read is None:
            return
        replica, received = reading.source.worker.replica, reading.read.received_bytes
        news, reading.counted_bytes = received - reading.counted_bytes, received
        if not news:  # a source that was tried, and was not there, is none
            return
        add_up(self.by_replica, replica, news, most=MAX_SOURCES)
        if reading.source.is_cross_site:
            self._count_cross_site(reading.version, news)
        if reading.way is not None:
            self.by_transport[reading.way.scheme] = self.by_transport.get(reading.way.scheme, 0) + news
            self.record.add(RECEIVED, news, reading.way.scheme, reading.memory)

    def _count_cross_site(self, version: Version, size_bytes: int) -> None:
        self.cross_site[version] = self.cross_site.pop(version, 0) + size_bytes
        while len(self.cross_site) > MAX_CROSS_SITE_VERSIONS:
            del self.cross_site[next(iter(self.cross_site))]
