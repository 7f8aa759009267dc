"""The dashboard: a page at `/` for people, and `/v1/dashboard`, which sends it what has changed.

Rules:
1. While no page asks, only the version of each replica is noted, for the charts. All pages share each look.
2. Looks take `SHARE` of one core: a larger fleet is looked at less often.
3. Rows hold times of day, not ages. A row in which nothing happens stays equal, and is not sent.
4. The page is one file with a strict Content-Security-Policy. It asks this server alone. It keeps the token in its tab.
   Names come from workers: the page shows them as text, and never reads them as HTML.
"""

import asyncio
import base64
import contextlib
import hashlib
import json
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from functools import cache
from importlib import resources
from itertools import islice, takewhile
from typing import cast

import msgspec
from aiohttp import web

from ..protocol.events import Event, Published, ReadFinished, Stalled, is_alarming
from ..protocol.status import CallView, ModelView, ReplicaView, Status, Transfer, VersionView, WorkerView
from ..server import Server
from .admission import Accepted
from .answers import in_slices
from .event_log import EventLog

SHARE = 0.025  # of one core: a look at 2,000 workers in an update takes some 0.1 s, so that it comes every 4 s
LEAST_REST_S = 1.0  # workers report once a second
MAX_REST_S = 30.0
MAX_PATCHES = 8  # a page that missed more gets everything
MAX_EVENTS = 100  # in one answer
MAX_PAST = 1000  # stalls and publishes, for the charts of a page that is opened
MAX_VERSIONS = 12  # of each model, the newest
WATCH_S = 5.0  # 2,000 replicas take 2 ms
MAX_STEPS = 100  # of each replica that are kept
STEADY_S = 1.5  # times that differ by less, and what the look took, are equal: it sees replicas one after the other
STEP = 64  # replicas: about 2 ms

HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}
Row = list[object]
Table = dict[str, Row]
TIMES = {"server": (0, 1), "versions": (10,), "replicas": (11, 13, 14), "reads": (8,), "progress": (3,)}  # columns


class Dashboard:
    """Answers the page. `now` is the machine's clock, `authorise` raises where the asker may not ask."""

    def __init__(
        self,
        machine: Server,
        now: Callable[[], float],
        events: EventLog,
        accepted: Accepted,
        authorise: Callable[[web.Request], None],
        *,
        wants_token: bool,
    ) -> None:
        self._machine, self._now, self._events, self._accepted = machine, now, events, accepted
        self._authorise, self._wants_token = authorise, wants_token
        self._life = str(machine.state.numbers.first)  # of this server: what another one has sent means nothing here
        self._tables: dict[str, Table] = {}
        self._patches: deque[bytes] = deque(maxlen=MAX_PATCHES)
        self._number = 0  # of the last patch
        self._seen = events.last  # the last event of the last patch
        self._held: dict[str, list[tuple[float, int | None]]] = {}  # by replica: from when on it held which version
        self._rest_s, self._rests_until = LEAST_REST_S, 0.0
        self._looking: asyncio.Task[None] | None = None
        self._is_over = asyncio.Event()

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/", self._page)
        app.router.add_get("/v1/dashboard", self._changes)

    async def watch(self) -> None:
        """Notes which version each replica holds, until it is cancelled."""
        while True:
            await in_slices(self._note_held(round(time.time(), 1)))
            await asyncio.sleep(WATCH_S)

    def _note_held(self, at: float) -> Generator[None, None, None]:
        state, found = self._machine.state, dict[str, list[tuple[float, int | None]]]()
        for model in list(state.models.values()):
            for count, replica in enumerate(list(model.replicas.values())):
                if count % STEP == STEP - 1:
                    yield
                members = [state.members.get(worker) for worker in replica.members.values()]
                versions = {member.content.held if member is not None else None for member in members}
                held = versions.pop() if len(versions) == 1 and len(members) == replica.shards else None
                key = f"{model.name}/{replica.name}"
                steps = found[key] = self._held.get(key, [])
                if not steps or steps[-1][1] != held:
                    steps.append((at, held))
                    del steps[:-MAX_STEPS]
        self._held = found

    def end(self) -> None:
        """The server stops: no page is kept waiting."""
        self._is_over.set()

    async def _page(self, request: web.Request) -> web.StreamResponse:
        """The page has no data. It asks for the token, where there is one."""
        text, policy = page()
        if self._wants_token:
            text = text.replace("<body>", '<body data-token="wanted">', 1)
        return web.Response(text=text, content_type="text/html", headers={"Content-Security-Policy": policy, **HEADERS})

    async def _changes(self, request: web.Request) -> web.StreamResponse:
        """All patches after the one that `after` names, once there is one; everything where it names none we keep."""
        self._authorise(request)
        after = request.query.get("after", "")
        missed = self._missed(after)
        if missed == 0 or asyncio.get_running_loop().time() > self._rests_until:
            await self._look()
            if self._is_over.is_set():
                raise web.HTTPServiceUnavailable(text="the server stops\n")
            missed = self._missed(after)
        head = {"next": f"{self._life}-{self._number}", "now": time.time(), "every_s": round(self._rest_s, 1)}
        if missed is not None:
            newer = [msgspec.Raw(each) for each in islice(self._patches, len(self._patches) - missed, None)]
            body = msgspec.json.encode({**head, "patches": newer})
        else:
            body = self._whole(head)
        return await self._accepted.answer(request, body, content_type="application/json")

    def _missed(self, after: str) -> int | None:
        """How many patches came after that one; None if they are not all here."""
        life, _, number = after.partition("-")
        if life != self._life or not number.isdecimal() or not number.isascii():
            return None
        missed = self._number - int(number[:20])
        return missed if 0 <= missed <= len(self._patches) else None

    def _whole(self, head: dict[str, object]) -> bytes:
        began = time.thread_time()
        newest = list(takewhile(lambda event: event.number <= self._seen, self._events))
        past = [_event(each) for each in newest if isinstance(each, Published | Stalled)][-MAX_PAST:]
        whole = {**self._tables, "events": _shown(newest)[0], "past": past, "held": self._held}
        body = msgspec.json.encode({**head, "whole": whole})
        self._rests_until += (time.thread_time() - began) / SHARE
        return body

    async def _look(self) -> None:
        """Waits for the next look, which all pages share."""
        if self._looking is None:
            self._looking = asyncio.create_task(self._take())
        await asyncio.shield(self._looking)

    async def _take(self) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._rests_until):
                    await self._is_over.wait()
                    return
            patch, cpu_s = await in_slices(self._steps())
            self._patches.append(patch)
            self._number += 1
            self._rest_for(cpu_s)
        finally:
            self._looking = None

    def _rest_for(self, cpu_s: float) -> None:
        """So much was worked just now."""
        self._rest_s = min(MAX_REST_S, max(LEAST_REST_S, cpu_s / SHARE))
        self._rests_until = asyncio.get_running_loop().time() + self._rest_s

    def _steps(self) -> Generator[None, None, bytes]:
        """Takes the tables anew. Returns what changed, encoded."""
        now, began_at = self._now(), time.monotonic()
        at = time.time() - (began_at - now)  # the time of the machine, which is behind while messages wait
        status = yield from self._machine.status_steps(now=now)
        tables = yield from tables_of(status, at)
        steady_s = STEADY_S + time.monotonic() - began_at
        changed, gone = dict[str, Table](), dict[str, list[str]]()
        for name, rows in tables.items():
            former = self._tables.get(name, {})
            changed[name] = {key: row for key, row in rows.items() if not _settle(row, former.get(key), name, steady_s)}
            if former.keys() - rows.keys():
                gone[name] = [key for key in former if key not in rows]
            yield
        self._tables = tables
        newer = list(takewhile(lambda event: event.number > self._seen, reversed(self._events)))[::-1]
        self._seen = self._events.last
        events, left_out = _shown(newer)
        changed = {name: rows for name, rows in changed.items() if rows}
        patch = {"at": round(at, 1), "set": changed, "gone": gone, "events": events, "left_out": left_out}
        return msgspec.json.encode(patch)


def _settle(row: Row, former: Row | None, table: str, steady_s: float) -> bool:
    """Takes over times of the former row that differ by less. Returns true if the rows are equal then."""
    if former is None:
        return False
    for column in TIMES.get(table, ()):
        new, old = cast(float, row[column]), cast(float, former[column])
        if new and old and abs(new - old) < steady_s:
            row[column] = old
    return row == former


@cache
def page() -> tuple[str, str]:
    """The page, and the policy that lets a browser run its script, use its style, and nothing else."""
    text = resources.files(__package__).joinpath("dashboard.html").read_text(encoding="utf-8")
    policy = {"default-src": "'none'", "connect-src": "'self'", "img-src": "data:", "base-uri": "'none'"}
    policy |= {"form-action": "'none'", "frame-ancestors": "'none'", "require-trusted-types-for": "'script'"}
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        (found,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        policy[rule] = f"'sha256-{base64.b64encode(hashlib.sha256(found.encode()).digest()).decode()}'"
    return text, "; ".join(f"{rule} {value}" for rule, value in policy.items())


# --- Rows. The page names the columns in the same order (`COLUMNS` there).


def tables_of(status: Status, at: float) -> Generator[None, None, dict[str, Table]]:
    """What the page shows, as rows by key. `at`: when the status was taken, in seconds since 1970."""
    recovered = at + status.recovering_s if status.recovering_s else 0.0
    tables: dict[str, Table] = {
        "server": {"": [_when(at, status.uptime_s), round(recovered, 1), status.counters["workers"]]},
        **{name: {} for name in ("models", "versions", "replicas", "hosts", "reads", "progress")},
    }
    for model in status.models:
        tables["models"][model.name] = [model.name, model.shards, model.latest, model.newest, model.size_bytes]
        for count, version in enumerate(model.versions):
            if count < MAX_VERSIONS or version.is_latest:
                tables["versions"][f"{model.name}/{version.version}"] = _version(model, version, at)
        for count, replica in enumerate(model.replicas):
            if count % STEP == STEP - 1:
                yield
            tables["replicas"][f"{model.name}/{replica.name}"] = _replica(model, replica, at)
            for worker in replica.workers:
                _add_host(tables["hosts"], worker)
    for count, read in enumerate(status.transfers):
        if count % STEP == STEP - 1:
            yield
        tables["reads"][str(read.ticket)] = _read(read, at)
        tables["progress"][str(read.ticket)] = _progress(read, at)
    return tables


def _when(at: float, age_s: float | None) -> float:
    return 0 if age_s is None else round(at - age_s, 1)


def _version(model: ModelView, it: VersionView, at: float) -> Row:
    flags = [int(flag) for flag in (it.is_latest, it.is_complete, it.is_lost, it.is_established, it.is_retained)]
    copies, last = it.host_copies, "" if it.holders or it.host_copies else it.last_holder
    holders = [len(it.holders), list(it.holders[:3]), len(it.filling), len(copies), list(copies[:3]), last]
    return [model.name, it.version, flags, *holders, it.cross_site_bytes, _when(at, it.age_s)]


def _replica(model: ModelView, replica: ReplicaView, at: float) -> Row:
    workers, call = replica.workers, replica.call
    missing = replica.shards - len(workers)
    states = Counter({"missing": missing} if missing > 0 else {}) + Counter(map(_state, workers))
    held = [worker.version for worker in workers if worker.state in ("holding", "withdrawing", "vacated")]
    fills = [worker.version for worker in workers if worker.state == "filling" and worker.version is not None]
    has = held[0] if held and len(held) == replica.shards and len(set(held)) == 1 else None
    flags = [int(any(worker.is_writer for worker in workers)), int(any(not worker.reliable for worker in workers))]
    hosts = list(dict.fromkeys(worker.host for worker in workers))
    site = workers[0].site if workers else ""
    called_at = _when(at, call.since_s) if call is not None else 0
    waiting = next((worker for worker in workers if worker.waiting_for), None)
    why = (call.waiting_for if call is not None else "") or (waiting.waiting_for if waiting is not None else "")
    waits_at = _when(at, waiting.waits_s) if waiting is not None else 0
    heard_at = _when(at, max((w.heard_s for w in workers if w.is_silent or not w.connected), default=None))
    what = [model.name, replica.name, replica.shards, states, has, min(fills, default=None), flags]
    return [*what, hosts[:2], len(hosts), site, _call(call), called_at, why, waits_at, heard_at]


def _state(worker: WorkerView) -> str:
    return "cut off" if not worker.connected else "silent" if worker.is_silent else worker.state


def _call(call: CallView | None) -> list[str]:
    """The call as its caller wrote it, and how it stands; nothing if it has ended well and waits for nothing."""
    if call is None or (call.state == "finished" and not call.waiting_for):
        return []
    return [f"{call.verb}({json.dumps(call.spec) if call.spec != '' else ''})", call.state]


def _add_host(hosts: Table, worker: WorkerView) -> None:
    """Counts its workers, what their host copies take, and what those may take."""
    most = len(worker.copies) + len(worker.copies_filling) + worker.copies_left
    key = f"{worker.site} {worker.host}"
    name, site, *sums = hosts.get(key, [worker.host, worker.site, 0, 0, 0])
    more = (1, len(worker.copies) * worker.size_bytes, most * worker.size_bytes)
    hosts[key] = [name, site, *(cast(int, old) + new for old, new in zip(sums, more, strict=True))]


def _read(read: Transfer, at: float) -> Row:
    flags = [int(flag) for flag in (read.to_host, read.from_host, read.is_cross_site, read.is_void)]
    what = [read.model, read.version, read.shard, read.target, read.source, read.size_bytes, read.reason, flags]
    return [*what, _when(at, read.since_s), read.transport, read.path, read.why]


def _progress(read: Transfer, at: float) -> Row:
    done = round(1000 * read.done / read.chunks) if read.chunks else 0
    still_at = _when(at, read.still_s) if read.waiting_for else 0
    return [done, float(f"{read.rate_bytes_per_s:.3g}"), read.waiting_for, still_at]


def _shown(events: Sequence[Event]) -> tuple[list[Row], int]:
    """The events that the page gets, and how many are left out: first of all reads that finished, the older ones."""
    others = [event for event in events if not isinstance(event, ReadFinished)][-MAX_EVENTS:]
    room = MAX_EVENTS - len(others)
    reads = [event for event in events if isinstance(event, ReadFinished)][-room:] if room else []
    shown = sorted([*others, *reads], key=lambda event: event.number)
    return [_event(event) for event in shown], len(events) - len(shown)


def _event(event: Event) -> Row:
    kind, version = str(type(event).__struct_config__.tag), getattr(event, "version", None)
    row = [
        event.number,
        round(event.at, 1),
        kind,
        int(is_alarming(event)),
        event.model,
        event.replica,
        version,
        event.text,
    ]
    return [*row, event.waited_s, int(event.is_over)] if isinstance(event, Stalled) else row
