"""The reference server's picture of itself as a table for a terminal. Values in, something that rich can print out.

For each model: which versions there are and who has them, then a line for each replica and its shards: what it has,
what it is doing, whom it reads from and why from there. Wider terminals also see leases, where
workers are, and where their bytes came from.
"""

import json
from collections.abc import Collection, Sequence
from typing import TypeVar, cast

import msgspec
from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..core.snapshot import CallView, ModelView, ReplicaView, Status, Transfer
from ..transport.choose import scheme_of
from .rows import Row, bytes_done, rows_of, transfers_of
from .words import count_text, plain_text, shards_text, size_text, some_text, time_text

T = TypeVar("T")
WIDE = 120  # columns; from there on there is room for leases, hosts and bytes by source
MOST_NAMES = 6
MOST_VERSIONS = 5
BAR_COLUMNS = 14

STYLES = {"holding": "green", "filling": "cyan", "withdrawing": "yellow", "poisoned": "bold red", "empty": "dim"}


def draw_status(
    status: Status,
    *,
    server: str = "",
    model: str = "",
    width: int = 80,
    bars: bool = False,
    rates: dict[int, float] | None = None,
) -> RenderableType:
    """The whole picture, or that of one model. `bars` draws progress as bars; `rates` (bytes/s) are by ticket."""
    status = _plain(status)
    parts: list[RenderableType] = [_heading(status, server)]
    if not status.models:
        what = f"No model {model!r} yet: a worker that opens it" if model else "No model yet: a worker that opens one"
        parts.append(Text(f"\n{what} against this server appears here.", style="dim"))
    for each in status.models:
        parts += [Text(""), *_model(status, each, width, bars, rates or {})]
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
    """The same as JSON, for programs."""
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


# --- one model --------------------------------------------------------------------------------------------------------


def _model(status: Status, model: ModelView, width: int, bars: bool, rates: dict[int, float]) -> list[RenderableType]:
    facts = f"  {_latest(model)}, {count_text(model.shards, 'shard')}, {size_text(model.size_bytes)}"
    title = Text.assemble((model.name, "bold"), facts)
    parts: list[RenderableType] = [title, *_versions(model)]
    if not model.replicas:
        return [*parts, Text("  no replica is here now", style="dim")]
    is_wide = width >= WIDE
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, expand=True)
    table.add_column("replica", overflow="fold", max_width=30)
    table.add_column("shard", overflow="fold", max_width=12)
    table.add_column("has", overflow="fold", max_width=19)
    table.add_column("does, and why", ratio=1, overflow="fold")
    table.add_column("readers", justify="right")
    if is_wide:
        table.add_column("lease", justify="right")
        table.add_column("received", max_width=26, overflow="fold")
        table.add_column("where", max_width=26, overflow="fold")
    transfers = transfers_of(status, model)
    for replica in model.replicas:
        _add_replica(table, replica, transfers, is_wide, bars, rates)
    return [*parts, table]


def _latest(model: ModelView) -> str:
    if model.latest is not None:
        return f"latest is {model.latest}"
    return "all versions are lost" if any(version.is_lost for version in model.versions) else "nothing published yet"


def _versions(model: ModelView) -> list[RenderableType]:
    versions, latest, lines = model.versions, model.latest, list[RenderableType]()
    silent = [(each.name, worker) for each in model.replicas for worker in each.workers if not worker.connected]
    cut_off = {name for name, _ in silent}
    pins = [(each.name, worker.pins) for each in model.replicas for worker in each.workers if worker.pins]
    for version in versions[:MOST_VERSIONS]:
        text = Text(f"version {version.version}", style="bold" if version.is_latest else "")
        if version.holders:
            text.append(f" held by {_some(version.holders, cut_off)}", style="not bold")
        elif version.host_copies:
            text.append(" held in host memory only", style="not bold yellow")
        elif version.last_holder:
            text.append(f" held by nobody; {version.last_holder} was the last", style="red")
        else:
            text.append(" held whole by nobody", style="yellow")
        if version.host_copies:
            keep_it = {name for name, worker in silent if version.version in worker.copies}
            text.append(f"; host copies: {_some(version.host_copies, keep_it)}", style="not bold cyan")
        if version.filling:
            text.append(f"; filling {some_text(version.filling, MOST_NAMES)}", style="not bold cyan")
        for site, size_bytes in sorted(version.cross_site_bytes.items()):
            text.append(f"; {size_text(size_bytes)} came into {site or 'no site'} from other sites", style="not bold")
        if version.is_lost and (latest is None or version.version > latest):
            text.append("; lost", style="not bold red")
        if version.is_retained and not version.is_latest:
            text.append("; kept", style="not bold")
        pinned_by = dict.fromkeys(name for name, pinned in pins if version.version in pinned)
        if pinned_by:
            text.append(f"; pinned by {some_text(list(pinned_by), MOST_NAMES)}", style="not bold")
        if not version.is_complete:
            text.append("; being published", style="not bold yellow")
        lines.append(Padding(text, (0, 0, 0, 2)))
    if len(versions) > MOST_VERSIONS:
        lines.append(Padding(Text(f"and {len(versions) - MOST_VERSIONS:,} older ones", style="dim"), (0, 0, 0, 2)))
    return lines


def _some(names: Sequence[str], cut_off: Collection[str]) -> str:
    """The first few of them; of which the server hears nothing, it cannot know whether they live."""
    return some_text([f"{name} (cut off)" if name in cut_off else name for name in names], MOST_NAMES)


# --- one replica ------------------------------------------------------------------------------------------------------


def _add_replica(
    table: Table,
    replica: ReplicaView,
    transfers: dict[tuple[str, int], list[Transfer]],
    is_wide: bool,
    bars: bool,
    rates: dict[int, float],
) -> None:
    for number, row in enumerate(rows_of(replica, transfers)):
        does: list[RenderableType] = []
        if number == 0 and (doing := _call(replica.call)) is not None:
            does.append(doing)
        if number == 0 and (claims := sorted({each.claim for each in replica.workers if each.claim is not None})):
            does.append(Text(f"is to publish {', '.join(map(str, claims))}", style="cyan"))
        worker = row.worker
        is_heard = worker is not None and worker.connected
        does += [_reading(transfer, rates, is_heard=is_heard) for transfer in row.transfers]
        cells: list[RenderableType] = [
            _name(replica) if number == 0 else Text(""),
            Text(shards_text(row.shards)),
            _has(row, bars),
            Group(*does) if does else Text(""),
            Text(str(worker.readers) if worker is not None and worker.readers else ""),
        ]
        if is_wide:
            cells += [_lease(row), _received(row), _where(row)]
        table.add_row(*cells)


def _name(replica: ReplicaView) -> Text:
    text = Text(replica.name)
    if replica.workers and not any(worker.reliable for worker in replica.workers):
        text.append(" (spot)", style="dim")
    return text


def _has(row: Row, bars: bool) -> RenderableType:
    worker = row.worker
    if worker is None:
        return Text("missing", style="red")
    text = Text(worker.state if worker.version is None else f"{worker.version} {worker.state}")
    text.stylize(STYLES.get(worker.state, ""))
    if worker.state == "filling":
        share = worker.done / worker.chunks if worker.chunks else 0.0
        text.append(f" {share:4.0%}")
    if not worker.connected:
        text.append(f"\ncut off, {time_text(worker.lease_left_s)} left", style="yellow")
    if not bars or worker.state != "filling":
        return text
    return Group(text, ProgressBar(total=max(worker.chunks, 1), completed=worker.done, width=BAR_COLUMNS))


def _call(call: CallView | None) -> Text | None:
    """What the replica does as a group; nothing where that has ended well."""
    if call is None or call.state == "finished":
        return None
    spec = "" if call.spec == "" else json.dumps(call.spec)
    is_choice = call.verb == "choose"  # with which both begin: nobody calls it by that name
    text = Text(f"replicate or update({spec}) of a set" if is_choice else f"{call.verb}({spec})")
    if call.version is not None and str(call.version) != spec:
        text.append(f" is {call.version}")
    style = {"failed": "red", "waiting": "yellow"}.get(call.state, "")
    if call.state != "running":
        text.append(f", {call.state}", style=style)
    if call.waiting_for:
        text.append(f": {call.waiting_for}", style=style)
    return text


def _reading(transfer: Transfer, rates: dict[int, float], *, is_heard: bool = True) -> Text:
    if transfer.is_void:
        return Text(f"stops reading from {transfer.source}", style="dim")
    text = Text.assemble("reads from ", (transfer.source, "bold"))
    if transfer.transport:
        text.append(" by ").append(transfer.transport, style="bold")
    if transfer.chunks:
        text.append(f", {size_text(bytes_done(transfer))} of {size_text(transfer.size_bytes)}")
    # the target's own count is the finer one, and its 0 is a 0; before it names its transport it has counted nothing
    rate = transfer.rate_bytes_per_s if transfer.transport else rates.get(transfer.ticket)
    if rate is not None and is_heard:  # of who is cut off nobody knows it
        text.append(f" at {size_text(rate)}/s", style="cyan")
    if transfer.reason:
        text.append(f": {transfer.reason}", style="dim")
    if transfer.path:
        text.append(f"; {transfer.path}", style="dim")
    if transfer.why:
        text.append(f"\n  not by {transfer.why}", style="yellow")
    return text


def _lease(row: Row) -> Text:
    return Text(time_text(row.worker.lease_left_s) if row.worker is not None else "")


def _received(row: Row) -> Text:
    received = row.worker.received_bytes if row.worker is not None else {}
    most_first = sorted(received.items(), key=lambda item: (-item[1], item[0]))
    return Text(some_text([f"{size_text(size)} from {source}" for source, size in most_first], 3))


def _where(row: Row) -> Text:
    if row.worker is None:
        return Text("")
    places = [place for place in (row.worker.site, row.worker.host) if place]
    if row.worker.endpoints:  # by what it can be read: where exactly is for programs
        places.append(", ".join(dict.fromkeys(scheme_of(endpoint) for endpoint in row.worker.endpoints)))
    worker = row.worker
    copies = len(worker.copies) + len(worker.copies_filling)
    if worker.size_bytes:  # what it may cost in host memory to keep versions
        most = (copies + worker.copies_left) * worker.size_bytes
        used = f"{size_text(copies * worker.size_bytes)} of {size_text(most)}"
        places.append(f"copies: {used}" if most else f"copies: no room for one of {size_text(worker.size_bytes)}")
    return Text("\n".join(places), style="dim")
