"""Metrics for Prometheus: the table of all metrics, the server's page, and the page of a process with workers.

Rules:
1. `tensorhub_…` is what the server knows of the whole job. `tensorhub_worker_…` is what one worker has measured.
2. A label has few values. Models and replicas are the only names of users; `MAX_SERIES` bounds them.
3. The package prometheus-client writes the pages, and is imported with the first of them. Values are kept here: the
   package's own would go to PROMETHEUS_MULTIPROC_DIR, where an engine has set it for itself.
4. Everything is counted and read in one event loop, so nothing is locked.
"""

import asyncio
import contextlib
import errno
import heapq
import hmac
import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Literal, cast
from weakref import WeakKeyDictionary

from ..protocol import events
from ..protocol.errors import HostMemoryFull
from ..protocol.messages import PROTOCOL, Filling, Holding, Vacated, Withdrawing
from ..protocol.names import Version
from .config import MAX_PORT, Options
from .loops import in_thread
from .transports import TRANSPORTS

if TYPE_CHECKING:
    from aiohttp import web
    from prometheus_client import Metric as Family
    from prometheus_client.registry import Collector

    from ..server import Server
    from ..server.groups import Replica
    from ..server.state import State
    from .admission import Accepted, Names
    from .driver import Driver

_log = logging.getLogger(__name__)

# --- the table --------------------------------------------------------------------------------------------------------

# 10 ms: a small model on one host; 2 s: a call that is said to stall; 300 s: the default timeout of a call
SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0)
# links of 0.1, 1, 10, 25, 50, 100, 200, 400 and 800 Gbit/s, and NVLink of 450 GB/s: a read ends below its link's rate
RATES = (12.5e6, 125e6, 1.25e9, 3.125e9, 6.25e9, 12.5e9, 25e9, 50e9, 100e9, 450e9)
# 2 ms: a slice of the server's work; 1 s: a report is late; 10 s: a lease
LAGS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

MAX_SERIES = 2_000  # of one metric: a larger fleet shows the replicas that lag most, and the sum of other models
OTHERS = "(others)"  # in place of a name beyond that


@dataclass(frozen=True, eq=False)
class Metric:
    """One metric as its page shows it; a counter's name gets `_total` there."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def shown_name(self) -> str:
        """The name as queries use it, without the `_bucket`, `_sum` and `_count` of a histogram."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    @property
    def is_of_worker(self) -> bool:
        """A worker's page shows it, with the labels of the worker."""
        return self.name.startswith("tensorhub_worker_")


METRICS: list[Metric] = []


def _counter(name: str, text: str, *labels: str) -> Metric:
    return _listed(Metric("counter", name, text, labels))


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return _listed(Metric("gauge", name, text, labels))


def _histogram(name: str, text: str, *labels: str, buckets: tuple[float, ...] = SECONDS) -> Metric:
    return _listed(Metric("histogram", name, text, labels, buckets))


def _listed(metric: Metric) -> Metric:
    METRICS.append(metric)
    return metric


BUILD = _gauge("tensorhub_build_info", "1; the labels say which release runs", "version", "protocol")
RECOVERING = _gauge("tensorhub_recovering_seconds", "for how long a restarted server still listens, at most")
LOOP_LAG = _histogram("tensorhub_loop_lag_seconds", "how late timers of the server came", buckets=LAGS)
CONNECTIONS = _gauge("tensorhub_connections", "connections of workers")
REPORTS = _counter("tensorhub_reports", "reports of workers that were handled")
REFUSALS = _counter("tensorhub_refusals", "workers that were refused, and questions without the right token")
WORKERS = _gauge("tensorhub_workers", "workers that live, by state of their buffer", "model", "state")
SESSIONS = _counter("tensorhub_sessions", "sessions begun: workers that joined, or were back after their lease")
LEASES_LOST = _counter("tensorhub_leases_lost", "sessions that ended without a word of their workers")
NEWEST = _gauge("tensorhub_newest_version", "the newest version that was ever published", "model")
LATEST = _gauge("tensorhub_latest_version", "the newest version that is not lost: what `latest` means", "model")
LAG = _gauge("tensorhub_version_lag", "versions newer than what it holds or fills", "model", "replica")
LAG_LEFT_OUT = _gauge("tensorhub_version_lag_left_out", f"replicas beyond the {MAX_SERIES:_} that lag most")
VERSIONS_LOST = _counter("tensorhub_versions_lost", "versions that no worker holds any more", "model")
PUBLISHED = _counter("tensorhub_published_bytes", "bytes of versions that were published", "model")
PUBLISH_HASH = _histogram("tensorhub_publish_hash_seconds", "hashing of a publish, of the shard that took longest")
OPEN_READS = _gauge("tensorhub_open_reads", "reads that are granted now")
GRANTS = _counter("tensorhub_grants", "reads that were granted")
FINISHED = _histogram("tensorhub_read_seconds", "reads that brought a version to its end", "transport")
FINISHED_RATE = _histogram("tensorhub_read_bytes_per_second", "rate of one of them", "transport", buckets=RATES)
FINISHED_BYTES = _counter("tensorhub_read_bytes", "bytes that came by them", "transport", "cross_site")
READS_MOVED = _counter("tensorhub_reads_moved", "reads that went on at another source, by cause", "cause")
OFFLOADS = _counter("tensorhub_offloaded_bytes", "bytes copied to host memory, because a version must be kept")
STALLS = _histogram("tensorhub_stall_seconds", "how long a call stood still, of calls that did so for 2 s")
READ_FAILURES = _counter("tensorhub_read_failures", "reads that failed and were tried again, by code", "code")
WAITED = _histogram("tensorhub_call_seconds", "calls that ended well, from the first shard to the last", "verb")
CALLS = _gauge("tensorhub_calls", "calls that have not ended", "model", "verb")
LONGEST_CALL = _gauge(
    "tensorhub_longest_call_seconds",
    "how long the longest of them has waited; 0 while it waits for a version that is not published yet",
    "model",
    "verb",
)
HOST_COPIES = _gauge("tensorhub_host_copies_bytes", "whole copies of versions in host memory", "model")
HOST_FULL = _gauge("tensorhub_host_memory_full", "replicas whose last call found no room for a host copy", "model")
PAUSES = _counter("tensorhub_pauses", "times that the server itself stood still, and prolonged all leases")

OF_WORKER = ("model", "replica", "shard")
CALL = _histogram("tensorhub_worker_call_seconds", "how long a caller waited in a call: its stall", *OF_WORKER, "verb")
CALL_ERRORS = _counter("tensorhub_worker_call_errors", "calls that raised, by error code", *OF_WORKER, "verb", "code")
HASH = _histogram("tensorhub_worker_hash_seconds", "hashing of a publish, with its casts", *OF_WORKER)
DRAIN = _histogram("tensorhub_worker_drain_seconds", "from withdrawing a version until no worker reads it", *OF_WORKER)
READ = _histogram("tensorhub_worker_read_seconds", "one read of one source", *OF_WORKER, "transport")
RATE = _histogram(
    "tensorhub_worker_read_bytes_per_second", "rate of one read, verified", *OF_WORKER, "transport", buckets=RATES
)
VERIFY = _histogram(
    "tensorhub_worker_verify_seconds",
    "`check()`, and checks of a mapped host copy; a read checks as it goes",
    *OF_WORKER,
)
RECEIVED = _counter("tensorhub_worker_received_bytes", "bytes read from peers", *OF_WORKER, "transport", "memory")
SENT = _counter("tensorhub_worker_sent_bytes", "bytes read by peers", *OF_WORKER, "transport")
FAILURES = _counter("tensorhub_worker_read_failures", "reads and copies that failed, by code", *OF_WORKER, "code")
GIVEN_UP = _counter("tensorhub_worker_transports_given_up", "ways to a source that failed", *OF_WORKER, "transport")
HELD = _gauge("tensorhub_worker_version", "the version held; absent without one", *OF_WORKER)
HEARD = _gauge("tensorhub_worker_newest_version", "the newest version that it has heard of", *OF_WORKER)
COPIES = _gauge("tensorhub_worker_host_copies_bytes", "host memory that copies take", *OF_WORKER)
COPIES_LIMIT = _gauge("tensorhub_worker_host_copies_limit_bytes", "what copies may take (`host_bytes`)", *OF_WORKER)
OFFLOADED = _counter("tensorhub_worker_offloaded_bytes", "bytes copied from tensors to host copies", *OF_WORKER)
CONNECTED = _gauge("tensorhub_worker_connected", "1 while it is connected to the server", *OF_WORKER)
CONNECTS = _counter("tensorhub_worker_connects", "connections made to the server", *OF_WORKER)
WORKER_LOOP_LAG = _histogram(
    "tensorhub_worker_loop_lag_seconds", "how late timers of the workers' loop came", buckets=LAGS
)


# --- values -----------------------------------------------------------------------------------------------------------


@dataclass
class Observed:
    """The values of one histogram: how many lie up to each bound and above the one before, and their sum."""

    counts: list[int]
    sum: float = 0.0


@dataclass
class Record:
    """Counters and histograms by their labels."""

    labels: tuple[str, ...] = ()  # that all of them have, before their own
    counts: dict[Metric, dict[tuple[str, ...], float]] = field(default_factory=dict)
    observed: dict[Metric, dict[tuple[str, ...], Observed]] = field(default_factory=dict)

    def add(self, metric: Metric, amount: float, *labels: str) -> None:
        """Counts so much."""
        series = self.counts.setdefault(metric, {})
        key = self._key(labels, series)
        series[key] = series.get(key, 0) + amount

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        """One more value of a histogram."""
        series = self.observed.setdefault(metric, {})
        key = self._key(labels, series)
        found = series.get(key)
        if found is None:
            found = series[key] = Observed([0] * (len(metric.buckets) + 1))
        found.counts[bisect_left(metric.buckets, value)] += 1
        found.sum += value

    def _key(self, labels: tuple[str, ...], series: Mapping[tuple[str, ...], object]) -> tuple[str, ...]:
        key = self.labels + labels
        is_new_and_full = len(series) >= MAX_SERIES and key not in series
        return self.labels + (OTHERS,) * len(labels) if is_new_and_full else key

    def total(self, metric: Metric, *labels: str) -> float:
        """The sum of all values of a histogram that have these labels first."""
        wanted = self.labels + labels
        series = self.observed.get(metric, {})
        return sum(each.sum for key, each in series.items() if key[: len(wanted)] == wanted)

    @contextlib.contextmanager
    def timed(self, metric: Metric, *labels: str) -> Iterator[None]:
        """Observes how long the block takes, in seconds, also where it raises."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.observe(metric, time.monotonic() - began, *labels)


class Sheet:
    """What one page shows. It is filled in the loop, and read by a thread: nothing in it changes any more."""

    def __init__(self) -> None:
        self._values: dict[Metric, list[tuple[tuple[str, ...], float]]] = {}
        self._observed: dict[Metric, list[tuple[tuple[str, ...], list[tuple[str, float]], float]]] = {}

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        """A gauge; or a counter that is kept elsewhere."""
        self._values.setdefault(metric, []).append((labels, value))

    def take(self, record: Record) -> None:
        """What was counted so far."""
        for metric, counts in record.counts.items():
            self._values.setdefault(metric, []).extend(counts.items())
        for metric, observed in record.observed.items():
            found = [(labels, _buckets(metric, each), each.sum) for labels, each in observed.items()]
            self._observed.setdefault(metric, []).extend(found)

    def collect(self) -> "Iterator[Family]":
        """The families of prometheus-client, in the order of the table."""
        from prometheus_client import core

        kinds = {"counter": core.CounterMetricFamily, "gauge": core.GaugeMetricFamily}
        for metric in METRICS:
            if metric in self._observed:
                histogram = core.HistogramMetricFamily(metric.name, metric.text, labels=metric.labels)
                for labels, buckets, total in self._observed[metric]:
                    histogram.add_metric(labels, buckets, total)
                yield histogram
            elif metric in self._values:
                family = kinds[metric.kind](metric.name, metric.text, labels=metric.labels)
                for labels, value in self._values[metric]:
                    family.add_metric(labels, value)
                yield family

    async def page(self, accept: str) -> tuple[bytes, str]:
        """The page in the format that its reader accepts, and its content type. A thread writes it."""
        self.set(BUILD, 1, metadata.version("tensorhub"), PROTOCOL)
        return await in_thread(partial(_page, self, accept), name="metrics", otherwise="here")


def _buckets(metric: Metric, observed: Observed) -> list[tuple[str, float]]:
    """Bound and number of values up to it, for each bucket."""
    found, total = [], 0
    for bound, count in zip([*map(repr, metric.buckets), "+Inf"], observed.counts, strict=True):
        total += count
        found.append((bound, float(total)))
    return found


def _page(sheet: Sheet, accept: str) -> tuple[bytes, str]:
    from prometheus_client import CollectorRegistry, ProcessCollector
    from prometheus_client.exposition import choose_encoder

    registry = CollectorRegistry()
    registry.register(cast("Collector", sheet))
    ProcessCollector(registry=registry)
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


async def watch_loop(record: Record, metric: Metric) -> None:
    """Observes how late the timers of this loop come, until it is cancelled."""
    while True:
        began = time.monotonic()
        await asyncio.sleep(WATCH_S)
        record.observe(metric, max(0.0, time.monotonic() - began - WATCH_S))


WATCH_S = 0.25  # a pause is seen less that much at worst; four timers a second cost nothing


# --- the server -------------------------------------------------------------------------------------------------------

_COUNTED = {  # counters of the machine
    "reports": REPORTS,
    "sessions": SESSIONS,
    "grants": GRANTS,
    "pauses": PAUSES,
}

WATCHED = ("corrupt-transfer", "source-lost")  # 0 from the beginning: an increase is seen only of what was there before


def server_record() -> Record:
    """For a server that has counted nothing yet."""
    record = Record()
    for metric in (REFUSALS, LEASES_LOST, OFFLOADS):
        record.add(metric, 0)
    return record


def take(record: Record, state: "State") -> None:
    """Counts what the machine has told, and leaves the events there."""
    while state.waited:
        verb, seconds = state.waited.popleft()
        record.observe(WAITED, seconds, verb)
    for event in state.events:
        _note(record, event)


def _note(record: Record, event: events.Event) -> None:
    match event:
        case events.Died() if event.seen != "replaced":
            record.add(LEASES_LOST, 1)
        case events.Published():
            record.add(PUBLISHED, event.size_bytes, event.model)
            record.observe(PUBLISH_HASH, event.hash_s)
        case events.Lost():
            record.add(VERSIONS_LOST, 1, event.model)
        case events.ReadFinished():
            transport = event.transport if event.transport in TRANSPORTS else OTHERS
            record.observe(FINISHED, event.seconds, transport)
            record.observe(FINISHED_RATE, event.rate_bytes_per_s, transport)
            record.add(FINISHED_BYTES, event.size_bytes, transport, "yes" if event.is_cross_site else "no")
        case events.ReadMoved():
            record.add(READS_MOVED, 1, event.cause)
        case events.Offloaded():
            record.add(OFFLOADS, event.size_bytes)
        case events.Stalled() if event.is_over:
            record.observe(STALLS, event.waited_s)
        case _:
            pass


def server_sheet(machine: "Server", record: Record) -> Sheet:
    """Everything that a server knows now. 2,000 workers take it some milliseconds."""
    sheet, state = Sheet(), machine.state
    for name in state.models:
        record.add(VERSIONS_LOST, 0, name)
    sheet.take(record)
    sheet.set(RECOVERING, max(0.0, state.recovered_at - state.now) if state.is_recovering else 0.0)
    sheet.set(CONNECTIONS, len(state.hellos))
    sheet.set(OPEN_READS, len(state.reads.all()))
    for counter, metric in _COUNTED.items():
        sheet.set(metric, state.counters[counter])
    for code in {**dict.fromkeys(WATCHED), **state.failed_reads}:
        sheet.set(READ_FAILURES, state.failed_reads[code], code)
    for model in state.models.values():
        if model.newest is not None:
            sheet.set(NEWEST, model.newest, model.name)
        if (latest := model.latest) is not None:
            sheet.set(LATEST, latest, model.name)
    _set_members(sheet, state)
    _set_calls(sheet, state)
    _set_lags(sheet, state)
    return sheet


def _set_members(sheet: Sheet, state: "State") -> None:
    """Workers by state, and their host copies."""
    states: Counter[tuple[str, str]] = Counter()
    copies: Counter[str] = Counter()
    for member in state.members.all():
        name, content, report = member.hello.model, member.content, member.report
        states[name, type(content.buffer).__name__.lower()] += 1
        copies[name] += report.size_bytes * sum(copy.whole and not copy.shared for copy in content.copies)
    for labels, count in states.items():
        sheet.set(WORKERS, count, *labels)
    for model in copies:
        sheet.set(HOST_COPIES, copies[model], model)


def _set_calls(sheet: Sheet, state: "State") -> None:
    from ..server.stalls import is_expected  # no worker needs a server

    calls: Counter[tuple[str, str]] = Counter()
    longest: dict[tuple[str, str], float] = {}
    full: Counter[str] = Counter()
    for model in state.models.values():
        full[model.name] = 0
        for replica in model.replicas.values():
            call = replica.call
            if call is not None and not call.is_over:
                key = model.name, call.kind
                calls[key] += 1
                waited_s = 0.0 if is_expected(model, call) else state.now - call.began
                longest[key] = max(longest.get(key, 0.0), waited_s)
            why = (call.error or call.waiting) if call is not None else None
            full[model.name] += why is not None and why.code == HostMemoryFull.code
    for name, count in full.items():
        sheet.set(HOST_FULL, count, name)
    for labels, count in calls.items():
        sheet.set(CALLS, count, *labels)
        sheet.set(LONGEST_CALL, longest[labels], *labels)


def _set_lags(sheet: Sheet, state: "State") -> None:
    """How far each replica is behind. The writer is left out, and a replica that never held anything."""
    found: list[tuple[int, str, str]] = []
    for model in state.models.values():
        existing, writer = model.available(), model.writer.replica if model.writer is not None else None
        behind = {version: place for place, version in enumerate(existing)}
        for replica in model.replicas.values():
            held = _held_by(state, replica) if replica.name != writer else None
            if held is not None:
                lag = behind.get(held)
                lag = sum(version > held for version in existing) if lag is None else lag
                found.append((lag, model.name, replica.name))
    shown = heapq.nlargest(MAX_SERIES, found) if len(found) > MAX_SERIES else found
    for lag, name, who in shown:
        sheet.set(LAG, lag, name, who)
    sheet.set(LAG_LEFT_OUT, len(found) - len(shown))


def _held_by(state: "State", replica: "Replica") -> Version | None:
    """The oldest version among its shards; of one that is being filled, the one that it will have."""
    found = None
    for worker in replica.members.values():
        member = state.members.get(worker)
        buffer = member.content.buffer if member is not None else None
        if isinstance(buffer, Holding | Filling | Withdrawing | Vacated):
            found = buffer.version if found is None else min(found, buffer.version)
    return found


def targets(machine: "Server") -> list[dict[str, object]]:
    """The pages of workers, as Prometheus' `http_sd_configs` wants them."""
    found = {member.hello.metrics: None for member in machine.state.members.all() if member.hello.metrics}
    return [{"targets": sorted(found), "labels": {}}] if found else []


# --- workers ----------------------------------------------------------------------------------------------------------
#
# All workers of a process share one page. It is there while one of them is open, at the first free port of `PORTS` from
# TENSORHUB_METRICS_PORT on: several processes of one host need no further setting.

PORTS = 32  # processes of one host: 8 devices, and four replicas that share them
ASK_S, STUCK_S, IDLE_S = 5.0, 5.0, 75.0  # for a first question; for the answer to be taken; between two questions


class WorkerPage:
    """The page of one process. Used in the worker loop only."""

    def __init__(self) -> None:
        self.address = ""  # where others reach it; empty: nowhere
        self._drivers: dict[Driver, str] = {}  # with the token that each of them asks for
        self._loop_lag = Record()
        self._changing = asyncio.Lock()
        self._runner: web.AppRunner | None = None
        self._watch: asyncio.Task[None] | None = None

    async def open(self, first_port: int, host: str, reached_at: str) -> str:
        """Listens, unless it does already. Returns the address, empty if no port could be had: the log says why."""
        async with self._changing:
            if self._runner is None:
                await self._listen(first_port, host, reached_at)
            return self.address

    async def _listen(self, first_port: int, host: str, reached_at: str) -> None:
        from aiohttp import web

        from .admission import Accepted, Names

        accepted = Accepted(time.monotonic)
        app = web.Application(middlewares=[accepted.note])
        app.router.add_get("/metrics", partial(self._metrics, Names((host, reached_at)), accepted))
        runner = web.AppRunner(app, access_log=None, keepalive_timeout=IDLE_S, shutdown_timeout=0.1)
        await runner.setup()
        try:
            port = await _first_free(runner, host, first_port)
        except OSError as error:
            await runner.cleanup()
            text = "no page of metrics: none of the ports %d to %d of %s can be had: %s"
            _log.warning(text, first_port, first_port + PORTS - 1, host, error)
            return
        self._runner, accepted.server = runner, runner.server
        self._watch = asyncio.create_task(self._watched(accepted))
        self.address = f"[{reached_at}]:{port}" if ":" in reached_at else f"{reached_at}:{port}"
        _log.info("metrics of this process: http://%s/metrics", self.address)

    def show(self, driver: "Driver", token: str) -> None:
        """It shows this worker too. A reader needs the token of one of its workers."""
        self._drivers[driver], driver.page = token, self

    async def leave(self, driver: "Driver | None") -> None:
        """The worker has gone. The page ends with the last one."""
        if driver is not None:
            self._drivers.pop(driver, None)
        async with self._changing:
            if self._drivers or self._runner is None:
                return
            runner, self._runner, self.address = self._runner, None, ""
            if self._watch is not None:
                self._watch.cancel()
            await runner.cleanup()

    async def _metrics(self, names: "Names", accepted: "Accepted", request: "web.Request") -> "web.StreamResponse":
        refused = names.why_refuse(request)
        if refused is not None:
            return refused
        shown = request.headers.get("Authorization", "").removeprefix("Bearer ").encode(errors="surrogateescape")
        if not any(not token or hmac.compare_digest(shown, token.encode()) for token in self._drivers.values()):
            from aiohttp import web

            raise web.HTTPUnauthorized(text="this page wants a token\n", headers={"WWW-Authenticate": "Bearer"})
        sheet = Sheet()
        sheet.take(self._loop_lag)
        for driver in self._drivers:
            _set_worker(sheet, driver)
        body, content_type = await sheet.page(request.headers.get("Accept", ""))
        return await accepted.answer(request, body, content_type=content_type)

    async def _watched(self, accepted: "Accepted") -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(watch_loop(self._loop_lag, WORKER_LOOP_LAG))
            while True:
                await asyncio.sleep(WATCH_S)
                accepted.sweep(time.monotonic(), hello_s=ASK_S, stuck_s=STUCK_S, idle_s=IDLE_S)


async def _first_free(runner: "web.AppRunner", host: str, first_port: int) -> int:
    """Listens at the first free port. Raises `OSError` where there is none, or where the host is not this machine's."""
    from aiohttp import web

    for port in range(first_port, min(first_port + PORTS, MAX_PORT + 1)):
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port + 1 == first_port + PORTS:
                raise
        else:
            return port
    raise OSError(errno.EADDRINUSE, "all of them are in use")


_pages: "WeakKeyDictionary[asyncio.AbstractEventLoop, WorkerPage]" = WeakKeyDictionary()


async def open_page(options: Options, host: str, reached_at: str) -> WorkerPage | None:
    """The page of this process, if the settings want one."""
    if options.metrics_port is None:
        return None
    found = _pages.setdefault(asyncio.get_running_loop(), WorkerPage())
    await found.open(options.metrics_port, host, reached_at)
    return found


def _set_worker(sheet: Sheet, driver: "Driver") -> None:
    """What one worker has counted, and how it is now."""
    me, worker, copies = driver.record.labels, driver.worker, driver.data.copies
    sheet.take(driver.record)
    if worker.held is not None:
        sheet.set(HELD, worker.held, *me)
    if worker.state.newest is not None:
        sheet.set(HEARD, worker.state.newest, *me)
    sheet.set(COPIES, copies.used_bytes, *me)
    sheet.set(COPIES_LIMIT, copies.limit_bytes, *me)
    sheet.set(OFFLOADED, copies.offloaded_bytes, *me)
    sheet.set(CONNECTED, driver.connection.is_connected, *me)
    sheet.set(CONNECTS, driver.connection.connects, *me)
    for scheme, transport in driver.data.transports.items():
        sheet.set(SENT, transport.statistics().get("sent_bytes", 0), *me, scheme)
