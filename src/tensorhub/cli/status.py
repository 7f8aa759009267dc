"""`tensorhub status` and `watch`: the server's status as tables for a terminal."""

import json
import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple, TypeVar, cast

import msgspec
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..protocol.errors import ServerUnreachable
from ..protocol.status import CallView, ModelView, ReplicaView, Status, Transfer, WorkerView
from ..transport.base import scheme_of
from .output import count_text, plain_text, shards_text, shown, size_text, some_text, time_text


@dataclass(frozen=True)
class Row:
    """Shards of one replica that are in the same state. `worker` is None for shards that are missing."""

    shards: tuple[int, ...]
    worker: WorkerView | None
    transfers: tuple[Transfer, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Nothing about it needs a line of its own."""
        return not self.transfers and (self.worker is None or self.worker.state != "filling")


def rows_of(replica: ReplicaView, transfers: dict[tuple[str, int], list[Transfer]]) -> tuple[Row, ...]:
    """The lines of one replica, in order of their first shard. `transfers`: by (target, shard), of its model."""
    workers = {worker.shard: worker for worker in replica.workers}
    rows: list[Row] = []
    for shard in range(max(replica.shards, max(workers, default=-1) + 1)):
        reads = tuple(transfers.get((replica.name, shard), ()))
        row = Row((shard,), workers.get(shard), reads)
        alike = next((n for n, other in enumerate(rows) if _are_alike(row, other)), None)
        if alike is None:
            rows.append(row)
        else:
            rows[alike] = _together(rows[alike], row)
    return tuple(rows)


def transfers_of(status: Status, model: ModelView) -> dict[tuple[str, int], list[Transfer]]:
    """The reads of one model, by (target, shard)."""
    found: dict[tuple[str, int], list[Transfer]] = {}
    for transfer in status.transfers:
        if transfer.model == model.name:
            found.setdefault((transfer.target, transfer.shard), []).append(transfer)
    return found


def _are_alike(row: Row, other: Row) -> bool:
    if not row.is_plain or not other.is_plain:
        return False
    a, b = row.worker, other.worker
    if a is None or b is None:
        return a is b
    return all(getattr(a, name) == getattr(b, name) for name in ("state", "version", "connected", "reliable", "site"))


def _together(row: Row, more: Row) -> Row:
    worker = row.worker
    if worker is not None and more.worker is not None:
        received = dict(worker.received_bytes)
        for source, size_bytes in more.worker.received_bytes.items():
            received[source] = received.get(source, 0) + size_bytes
        worker = _merged(worker, more.worker, received)
    return replace(row, shards=row.shards + more.shards, worker=worker)


def _merged(a: WorkerView, b: WorkerView, received: dict[str, int]) -> WorkerView:
    """Two workers as one line: what adds up is added, and of a lease the shorter one matters."""
    fields = {name: getattr(a, name) for name in a.__struct_fields__}
    fields |= {
        "size_bytes": a.size_bytes + b.size_bytes,
        "readers": a.readers + b.readers,
        "lease_left_s": min(a.lease_left_s, b.lease_left_s),
        "received_bytes": received,
        "endpoints": a.endpoints + b.endpoints,
        "host": a.host if a.host == b.host else "",
    }
    return WorkerView(**fields)


def bytes_done(transfer: Transfer) -> float:
    """What the target has of the version, as far as chunks tell."""
    return transfer.size_bytes * transfer.done / transfer.chunks if transfer.chunks else 0.0


T = TypeVar("T")
DOES = "does, and why"
DOES_COLUMNS = 64  # a read's source, transport, bytes and rate
GAP_COLUMNS = 2  # beside each cell
MAX_NAMES = 6
MAX_VERSIONS = 5
BAR_COLUMNS = 14
UNIT_SPACE = re.compile(r"(?<=\d) (?=(?:B|[KMGTP]iB|s|min|h|d)\b)")
NO_BREAK = "\ue000"  # stands for that space while lines are broken; no text has it, for `plain_text` escapes it

STYLES = {"holding": "green", "filling": "cyan", "withdrawing": "yellow", "poisoned": "bold red", "empty": "dim"}


def draw_status(
    status: Status, *, server: str = "", model: str = "", width: int = 80, bars: bool = False
) -> RenderableType:
    """The whole picture, or that of one model. `bars` draws progress as bars."""
    status = _plain(status)
    parts: list[RenderableType] = [_Words(_heading(status, server))]
    if not status.models:
        what = f"No model {model!r} yet: a worker that opens it" if model else "No model yet: a worker that opens one"
        parts.append(Text(f"\n{what} against this server appears here.", style="dim"))
    for each in status.models:
        parts += [Text(""), *_model(status, each, width, bars)]
    return Group(*parts)


def _plain(value: T) -> T:
    """The same, with no word in it that a terminal would obey: workers say what they like of themselves."""
    found: object = value
    match value:
        case str():
            found = plain_text(value)
        case tuple():
            found = tuple(map(_plain, value))
        case dict():
            found = {_plain(key): _plain(each) for key, each in value.items()}
        case msgspec.Struct():
            found = type(value)(*(_plain(getattr(value, name)) for name in value.__struct_fields__))
    return cast(T, found)


def status_json(status: Status) -> str:
    """The status as JSON, for programs."""
    return json.dumps(msgspec.to_builtins(status), indent=2)


def _heading(status: Status, server: str) -> Text:
    workers = sum(len(replica.workers) for model in status.models for replica in model.replicas)
    text = Text.assemble(("reference server", "bold"), f" {server}" if server else "")
    text.append(f", up {time_text(status.uptime_s)}, {count_text(workers, 'worker')}")
    text.append(f", {count_text(len(status.transfers), 'read')} open")
    if status.recovering_s > 0:
        text.append(
            f"\nrecovering: for up to {time_text(status.recovering_s)} it hears who is there, and ", style="yellow"
        )
        text.append("drains and resolves nothing", style="yellow")
    return text


def _model(status: Status, model: ModelView, width: int, bars: bool) -> list[RenderableType]:
    facts = f"  {_latest(model)}, {count_text(model.shards, 'shard')}, {size_text(model.size_bytes)}"
    title = Text.assemble((model.name, "bold"), facts)
    parts: list[RenderableType] = [_Words(title), *_versions(model)]
    if not model.replicas:
        return [*parts, Text("  no replica is here now", style="dim")]
    transfers = transfers_of(status, model)
    lines = [
        _Line(replica, row, is_first=number == 0)
        for replica in model.replicas
        for number, row in enumerate(rows_of(replica, transfers))
    ]
    return [*parts, _table(lines, width, bars)]


def _latest(model: ModelView) -> str:
    if model.latest is not None:
        return f"latest is {model.latest}"
    return "all versions are lost" if any(version.is_lost for version in model.versions) else "nothing published yet"


def _versions(model: ModelView) -> list[RenderableType]:
    versions, latest, lines = model.versions, model.latest, list[RenderableType]()
    silent = [(each.name, worker) for each in model.replicas for worker in each.workers if not worker.connected]
    cut_off = {name for name, _ in silent}
    pins = [(each.name, worker.pins) for each in model.replicas for worker in each.workers if worker.pins]
    for version in versions[:MAX_VERSIONS]:
        text = Text(f"version {version.version}", style="bold" if version.is_latest else "")
        if version.holders:
            text.append(f" held by {_some(version.holders, cut_off)}", style="not bold")
        elif version.host_copies:
            text.append(" held in host memory only", style="not bold yellow")
        elif version.last_holder:
            text.append(f" held by no worker; {version.last_holder} was the last", style="red")
        else:
            text.append(" held whole by no worker", style="yellow")
        if version.host_copies:
            keep_it = {name for name, worker in silent if version.version in worker.copies}
            text.append(f"; host copies: {_some(version.host_copies, keep_it)}", style="not bold cyan")
        if version.filling:
            text.append(f"; filling {some_text(version.filling, MAX_NAMES)}", style="not bold cyan")
        for site, size_bytes in sorted(version.cross_site_bytes.items()):
            text.append(f"; {size_text(size_bytes)} came into {site or 'no site'} from other sites", style="not bold")
        if version.is_lost and (latest is None or version.version > latest):
            text.append("; lost", style="not bold red")
        if version.is_retained and not version.is_latest:
            text.append("; kept", style="not bold")
        pinned_by = dict.fromkeys(name for name, pinned in pins if version.version in pinned)
        if pinned_by:
            text.append(f"; pinned by {some_text(list(pinned_by), MAX_NAMES)}", style="not bold")
        if not version.is_complete:
            text.append("; being published", style="not bold yellow")
        lines.append(Padding(_Words(text), (0, 0, 0, 2)))
    if len(versions) > MAX_VERSIONS:
        lines.append(Padding(Text(f"and {len(versions) - MAX_VERSIONS:,} older ones", style="dim"), (0, 0, 0, 2)))
    return lines


def _some(names: Sequence[str], cut_off: Collection[str]) -> str:
    """The first few of them; of which the server hears nothing, it cannot know whether they live."""
    return some_text([f"{name} (cut off)" if name in cut_off else name for name in names], MAX_NAMES)


class _Line(NamedTuple):
    """Shards of one replica that say the same."""

    replica: ReplicaView
    row: Row
    is_first: bool  # of its replica


@dataclass(frozen=True)
class _Words:
    """A text whose lines break between words, and never between a number and its unit."""

    text: Text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        whole = self.text.copy()
        whole.plain = UNIT_SPACE.sub(NO_BREAK, whole.plain)
        for part in console.render(whole, options):
            yield part._replace(text=part.text.replace(NO_BREAK, " "))


def _table(lines: Sequence[_Line], width: int, bars: bool) -> Table:
    does = [_does(line) for line in lines]
    columns: dict[str, list[Text]] = {
        "replica": [_name(line) for line in lines],
        "shard": [Text(shards_text(line.row.shards)) for line in lines],
        "has": [_has(line.row) for line in lines],
        "readers": [_readers(line.row) for line in lines],
    }
    # with bars it is drawn again and again: the columns stay the same when a read begins
    least = DOES_COLUMNS if bars else min(DOES_COLUMNS, _width(DOES, [text for texts in does for text in texts]))
    room = width - least - GAP_COLUMNS - sum(_width(*column) + GAP_COLUMNS for column in columns.items())
    for header, cell in IF_IT_FITS:
        cells = [cell(line.row) for line in lines]
        before = _width(header, columns[header]) if header in columns else -GAP_COLUMNS
        more = _width(header, cells) - before
        if more <= room:
            columns[header], room = cells, room - more
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, expand=True)
    table.add_column("replica", overflow="fold", max_width=max(30, width // 4))
    table.add_column("shard", overflow="fold", max_width=12)
    table.add_column("has", overflow="fold")
    table.add_column(DOES, ratio=1, overflow="fold")
    table.add_column("readers", justify="right")
    further = [header for header in ("lease", "received", "where") if header in columns]
    for header in further:
        table.add_column(header, justify="right" if header == "lease" else "left")
    for number, line in enumerate(lines):
        as_one = Text("; ").join(does[number])
        texts = [as_one] if as_one.cell_len <= least + room else does[number]
        has = columns["has"][number]
        table.add_row(
            columns["replica"][number],
            columns["shard"][number],
            _with_bar(has, line.row.worker) if bars else has,
            Group(*map(_Words, texts)),
            columns["readers"][number],
            *(columns[header][number] for header in further),
        )
    return table


def _width(header: str, cells: Sequence[Text]) -> int:
    return max([cell_len(header), *(cell.cell_len for cell in cells)])


def _does(line: _Line) -> list[Text]:
    does = list[Text]()
    replica, worker = line.replica, line.row.worker
    is_heard = worker is not None and worker.connected
    if worker is not None and not is_heard:
        does.append(Text(f"cut off, {time_text(worker.lease_left_s)} left", style="yellow"))
    if line.is_first and (doing := _call(replica.call)) is not None:
        does.append(doing)
    if line.is_first and any(each.is_writer for each in replica.workers):
        does.append(Text("writer", style="cyan"))
    return [*does, *(_reading(transfer, is_heard=is_heard) for transfer in line.row.transfers)]


def _name(line: _Line) -> Text:
    if not line.is_first:
        return Text("")
    workers = line.replica.workers
    is_spot = bool(workers) and not any(worker.reliable for worker in workers)
    return Text.assemble(line.replica.name, (" (spot)", "dim") if is_spot else "")


def _has(row: Row) -> Text:
    worker = row.worker
    if worker is None:
        return Text("missing", style="red")
    text = Text(worker.state if worker.version is None else f"{worker.version} {worker.state}")
    text.stylize(STYLES.get(worker.state, ""))
    if worker.state == "filling":
        share = worker.done / worker.chunks if worker.chunks else 0.0
        text.append(f" {share:4.0%}")
    return text


def _with_bar(has: Text, worker: WorkerView | None) -> RenderableType:
    if worker is None or worker.state != "filling":
        return has
    return Group(has, ProgressBar(total=max(worker.chunks, 1), completed=worker.done, width=BAR_COLUMNS))


def _readers(row: Row) -> Text:
    return Text(str(row.worker.readers) if row.worker is not None and row.worker.readers else "")


def _call(call: CallView | None) -> Text | None:
    """What the replica does as a group; nothing if that has ended well and waits for nothing."""
    if call is None or (call.state == "finished" and not call.waiting_for):
        return None
    spec = "" if call.spec == "" else json.dumps(call.spec)
    text = Text(f"{call.verb}({spec})")
    if call.version is not None and str(call.version) != spec:
        text.append(f" is {call.version}")
    style = {"failed": "red", "waiting": "yellow", "finished": "yellow"}.get(call.state, "")
    if call.state != "running":
        text.append(f", {call.state}", style=style)
    if call.waiting_for:
        text.append(f": {call.waiting_for}", style=style)
    return text


def _reading(transfer: Transfer, *, is_heard: bool = True) -> Text:
    if transfer.is_void:
        return Text(f"stops reading from {transfer.source}", style="dim")
    text = Text.assemble("reads from ", (transfer.source, "bold"))
    if transfer.transport:
        text.append(" by ").append(transfer.transport, style="bold")
    if transfer.chunks:
        text.append(f", {size_text(bytes_done(transfer))} of {size_text(transfer.size_bytes)}")
    if transfer.transport and is_heard:  # before a target names its transport it has counted nothing
        text.append(f" at {size_text(transfer.rate_bytes_per_s)}/s", style="cyan")
    if transfer.reason:
        text.append(f": {transfer.reason}", style="dim")
    if transfer.path:
        text.append(f"; {transfer.path}", style="dim")
    if transfer.why:
        text.append(f"; not by {transfer.why}", style="yellow")
    return text


def _lease(row: Row) -> Text:
    return Text(time_text(row.worker.lease_left_s) if row.worker is not None else "")


def _received(row: Row, most: int) -> Text:
    received = row.worker.received_bytes if row.worker is not None else {}
    most_first = sorted(received.items(), key=lambda item: (-item[1], item[0]))
    return Text(some_text([f"{size_text(size)} from {source}" for source, size in most_first], most))


def _host(row: Row) -> Text:
    return Text(row.worker.host if row.worker is not None else "", style="dim")


def _where(row: Row) -> Text:
    if row.worker is None:
        return Text("")
    # by what it can be read: where exactly is for programs
    transports = dict.fromkeys(scheme_of(endpoint) for endpoint in row.worker.endpoints)
    places = [place for place in (row.worker.site, row.worker.host, *transports) if place]
    return Text(", ".join(places), style="dim")


def _where_and_copies(row: Row) -> Text:
    text, worker = _where(row), row.worker
    if worker is None or not worker.size_bytes:
        return text
    copies = len(worker.copies) + len(worker.copies_filling)
    most = (copies + worker.copies_left) * worker.size_bytes  # what it may cost in host memory to keep versions
    used = f"{size_text(copies * worker.size_bytes)} of {size_text(most)}"
    said = f"copies: {used}" if most else f"copies: no room for one of {size_text(worker.size_bytes)}"
    return text.append(f", {said}" if text else said)


# What else is known of a row, the most useful first. A later one of the same column says more than an earlier one.
IF_IT_FITS: tuple[tuple[str, Callable[[Row], Text]], ...] = (
    ("lease", _lease),
    ("where", _host),
    ("received", lambda row: _received(row, 1)),
    ("where", _where),
    ("where", _where_and_copies),
    ("received", lambda row: _received(row, 3)),
)


class Watcher:
    """Turns one answer after another into pictures. While the server is away, the last picture stays."""

    def __init__(
        self, server: str, ask: Callable[[], Status], clock: Callable[[], float] = time.monotonic, *, model: str = ""
    ) -> None:
        self._server, self._model = server, model
        self._ask = ask
        self._clock = clock
        self._last: Status | None = None
        self._away_since: float | None = None

    def look(self, width: int) -> RenderableType:
        """The picture as it is now. Raises `ServerUnreachable` only if there never was one."""
        now = self._clock()
        try:
            status = self._ask()
        except ServerUnreachable:
            if self._last is None:
                raise
            self._away_since = now if self._away_since is None else self._away_since
            away = Text(f"no answer for {now - self._away_since:.0f} s; below is what was last heard", style="bold red")
            return Group(away, self._draw(self._last, width))
        self._away_since = None
        self._last = status
        return self._draw(status, width)

    def _draw(self, status: Status, width: int) -> RenderableType:
        return draw_status(status, server=self._server, model=self._model, width=width, bars=True)


def watch(watcher: Watcher, console: Console, *, every_s: float, times: int | None) -> None:
    """Show it every `every_s` seconds, `times` times or until Ctrl-C.

    SIGTERM and SIGHUP raise `SystemExit` while it draws in place, once the terminal is as it was.
    """
    rounds = range(times) if times is not None else count()
    if not console.is_interactive:  # no terminal, or a dumb one, in which nothing can be drawn over
        for number in rounds:
            time.sleep(every_s if number else 0.0)
            console.print(watcher.look(console.width))
        return
    first = watcher.look(console.width)  # an error before the screen is taken stays readable
    with shown(Live(first, console=console, screen=times is None, auto_refresh=False)) as live:
        for number in rounds:
            if number:
                time.sleep(every_s)
                live.update(watcher.look(console.width))
            live.refresh()
