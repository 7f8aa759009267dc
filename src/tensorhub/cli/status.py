"""`tensorhub status` and `watch`: the server's status as one screen of a terminal of any width.

Rules:
- No line is longer than the terminal. Texts break between words, and never between a number and its unit.
- Short facts stand in columns and never break. A longer text stands beside them where it fits in one line, else below.
- The slowest replica comes first.
"""

import json
import re
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import NamedTuple, TypeVar, cast

import msgspec
from msgspec.structs import replace as changed
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from ..protocol.status import CallView, ModelView, ReplicaView, Status, Transfer, VersionView, WorkerView
from ..transport.base import scheme_of
from .output import count_text, plain_text, shards_text, size_text, some_text, time_text

T = TypeVar("T")
SCREEN_LINES = 40  # that `status` takes without --all
LEAST_LINES = 6  # for the replicas of each model, however many models there are
LEAST_COLUMNS = 40
LEAST_NAME_COLUMNS = 12
NAME_COLUMNS = 32  # of a name in a text, and the least that a wide table gives to a name
GAP_COLUMNS = 2  # before each column
NAMES_COLUMNS = 60  # of several names in a text
BESIDE_COLUMNS = 76  # that columns of little use leave to texts
MAX_VERSIONS = 5
MAX_COUNTS = 6
BAR_COLUMNS = 10
STILL_S = 2.0  # a read that brought nothing for less is none that stands still
HOLDS = ("holding", "withdrawing", "vacated")
UNIT_SPACE = re.compile(r"(?<=\d) (?=(?:B|[KMGTP]iB|s|min|h|d)\b)")
NO_BREAK = "\ue000"  # stands for that space while lines are broken; no text has it, for `plain_text` escapes it

STYLES = {"holding": "green", "filling": "cyan", "withdrawing": "yellow", "poisoned": "bold red", "empty": "dim"}


# --- Which replicas are shown, and as which rows.


def only(status: Status, *, replica: str = "", word: str = "") -> Status:
    """The status with those replicas alone whose name matches the pattern `replica`, and that have the word anywhere.

    `*` and `?` stand for any letters in the pattern. Versions stay as they are.
    """
    models, transfers = [], list[Transfer]()
    for model in status.models:
        reads = reads_of(status, model)
        kept = [
            each
            for each in model.replicas
            if (not replica or fnmatchcase(each.name, replica))
            and (not word or word.casefold() in _words_of(each, reads.get(each.name, [])))
        ]
        models.append(changed(model, replicas=tuple(kept)))
        transfers += [read for each in kept for read in reads.get(each.name, [])]
    return changed(status, models=tuple(models), transfers=tuple(transfers))


def _words_of(replica: ReplicaView, reads: Sequence[Transfer]) -> str:
    call = replica.call
    said = [replica.name, call.verb, call.state, call.waiting_for] if call is not None else [replica.name]
    for worker in replica.workers:
        said += [_state_of(worker), worker.host, worker.site, worker.waiting_for]
    for read in reads:
        said += [read.source, read.transport, read.reason, read.waiting_for]
    return "\n".join(said).casefold()


def reads_of(status: Status, model: ModelView) -> dict[str, list[Transfer]]:
    """The reads of one model, by the replica that reads."""
    found: dict[str, list[Transfer]] = {}
    for transfer in status.transfers:
        if transfer.model == model.name:
            found.setdefault(transfer.target, []).append(transfer)
    return found


# --- The rows of a table: how far each is behind, and which one is the slowest.


class Lag(NamedTuple):
    """By how many versions a worker is behind, and for how long. `age_s` is None where the server cannot know it."""

    versions: int = 0
    age_s: float | None = None


class Lags:
    """How far the workers of one model are behind."""

    def __init__(self, model: ModelView) -> None:
        latest = model.latest if model.latest is not None else -1
        found = (each for each in model.versions if each.is_complete and each.version <= latest)
        self._newer = sorted(found, key=lambda each: each.version)
        self._numbers = [each.version for each in self._newer]

    def behind(self, version: int, *, has_it: bool = True) -> Lag:
        """That of a worker that has this version, or is about to."""
        at = bisect_left(self._numbers, version + has_it)
        return Lag(len(self._numbers) - at, self._newer[at].age_s) if at < len(self._numbers) else Lag()

    def of(self, worker: WorkerView) -> Lag:
        """That of this worker; none for one that publishes, or has nothing."""
        if worker.version is None or worker.is_writer:
            return Lag()
        return self.behind(worker.version, has_it=worker.state in HOLDS)


@dataclass(frozen=True)
class Row:
    """Shards of one replica that are in the same state. `worker` is None for shards that are missing."""

    replica: ReplicaView
    shards: tuple[int, ...]
    worker: WorkerView | None
    reads: tuple[Transfer, ...] = ()
    lag: Lag = Lag()
    is_first: bool = False  # of its replica

    @property
    def urgency(self) -> tuple[float, ...]:
        """Orders rows: faults first, then waits, reads, and workers that are behind; of the same kind the slowest."""
        worker, call, reads = self.worker, self.replica.call, self.reads
        done = sum(read.done / read.chunks for read in reads if read.chunks)
        slow = -self.lag.versions, -(self.lag.age_s or 0.0), done
        if worker is None or worker.state == "poisoned" or _is_away(worker):
            return (0, -worker.heard_s if worker is not None else 0.0, *slow)
        if call is not None and call.state == "failed":
            return (1, 0.0, *slow)
        if worker.waiting_for or any(read.waiting_for for read in reads):
            return (2, -max([worker.waits_s, *(read.still_s for read in reads)]), *slow)
        if call is not None and call.state in ("waiting", "running"):
            return (3, -call.since_s, *slow)
        return (4 if reads or self.lag.versions else 5, 0.0, *slow)


def rows_of(model: ModelView, reads: dict[str, list[Transfer]], lags: Lags) -> list[Row]:
    """The rows of all replicas of a model: the slowest replica first, and of that its slowest shards."""
    groups = []
    for replica in model.replicas:
        rows = sorted(_rows_of(replica, reads.get(replica.name, ()), lags), key=lambda row: row.urgency)
        if rows:
            groups.append((rows[0].urgency, replica.name, [replace(rows[0], is_first=True), *rows[1:]]))
    return [row for _, _, rows in sorted(groups, key=lambda group: group[:2]) for row in rows]


def _rows_of(replica: ReplicaView, reads: Sequence[Transfer], lags: Lags) -> list[Row]:
    workers = {worker.shard: worker for worker in replica.workers}
    of_shard: dict[int, list[Transfer]] = {}
    for read in reads:
        of_shard.setdefault(read.shard, []).append(read)
    rows: dict[tuple[object, ...], Row] = {}
    for shard in range(max(replica.shards, max(workers, default=-1) + 1)):
        worker, its = workers.get(shard), tuple(of_shard.get(shard, ()))
        kind = _kind(worker, shard) if not its else (shard,)
        former = rows.get(kind)
        if former is None:
            rows[kind] = Row(replica, (shard,), worker, its, lags.of(worker) if worker is not None else Lag())
        else:
            both = _merged(former.worker, worker) if former.worker is not None and worker is not None else worker
            rows[kind] = replace(former, shards=(*former.shards, shard), worker=both)
    return list(rows.values())


def _kind(worker: WorkerView | None, shard: int) -> tuple[object, ...]:
    """Shards of one replica without a read that agree in this are one row."""
    if worker is None:
        return ("missing",)
    if worker.state == "filling":
        return (shard,)
    waiting_for = "" if _is_away(worker) else worker.waiting_for
    return worker.version, _state_of(worker), worker.connected, worker.reliable, worker.site, waiting_for


def _merged(a: WorkerView, b: WorkerView) -> WorkerView:
    """Two workers as one row: what adds up is added; of a lease the shorter one matters."""
    return changed(
        a,
        size_bytes=a.size_bytes + b.size_bytes,
        readers=a.readers + b.readers,
        lease_left_s=min(a.lease_left_s, b.lease_left_s),
        heard_s=max(a.heard_s, b.heard_s),
        received_bytes=dict(Counter(a.received_bytes) + Counter(b.received_bytes)),
        endpoints=a.endpoints + b.endpoints,
        host=a.host if a.host == b.host else "",
    )


def _state_of(worker: WorkerView) -> str:
    """The state of its buffer, as far as the server hears of it."""
    if not worker.connected:
        return "cut off"
    return "silent" if worker.is_silent else worker.state


def _is_away(worker: WorkerView) -> bool:
    return worker.is_silent or not worker.connected


def bytes_done(transfer: Transfer) -> float:
    """What the target has of the version, as far as chunks tell."""
    return transfer.size_bytes * transfer.done / transfer.chunks if transfer.chunks else 0.0


# --- The screen.


def draw_status(
    status: Status, *, server: str = "", model: str = "", width: int = 80, most_lines: int | None = None
) -> Iterator[Text]:
    """The lines of the screen, drawn one after another as they are asked for.

    `model`: the model that was asked for. `most_lines`: replicas that do not fit are counted; without it all are shown.
    """
    width = max(width, LEAST_COLUMNS)
    heading = list(_wrapped(_heading(status, server), width))
    yield from heading
    if not status.models:
        what = f"No model {model!r} yet: a worker that opens it" if model else "No model yet: a worker that opens one"
        yield Text("")
        yield from _wrapped(Text(f"{plain_text(what)} against this server appears here.", style="dim"), width)
    lags = {each.name: Lags(each) for each in status.models}
    above = {each.name: list(_summary(each, lags[each.name], width)) for each in status.models}
    waiting = sum(bool(each.replicas) for each in status.models)  # models whose replicas are not drawn yet
    left = (most_lines or 0) - len(heading) - sum(1 + len(lines) for lines in above.values())
    for each in status.models:
        yield Text("")
        yield from above[each.name]
        if each.replicas:
            most = None if most_lines is None else max(LEAST_LINES, left // waiting)
            for line in _replicas(each, reads_of(status, each), lags[each.name], width, most):
                left -= 1
                yield line
            waiting -= 1


def status_json(status: Status, *, indent: int | None = 2) -> str:
    """The status as JSON, for programs; in one line without `indent`."""
    return json.dumps(msgspec.to_builtins(status), indent=indent)


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


def _heading(status: Status, server: str) -> Text:
    workers = sum(len(replica.workers) for model in status.models for replica in model.replicas)
    workers = status.counters.get("workers", workers)
    text = Text.assemble(("reference server", "bold"), f" {server}" if server else "")
    text.append(f", up {time_text(status.uptime_s)}, {count_text(workers, 'worker')}")
    text.append(f", {count_text(status.counters.get('open_reads', len(status.transfers)), 'read')} open")
    if status.recovering_s > 0:
        text.append(
            f"\nrecovering: for up to {time_text(status.recovering_s)} it hears who is there, and ", style="yellow"
        )
        text.append("drains and resolves nothing", style="yellow")
    return text


# --- The summary of a model: what each version is held by, and which replicas are behind.


class _Away(NamedTuple):
    """A replica with a worker that the server does not hear."""

    state: str
    copies: tuple[int, ...]  # versions in the host memory of such workers


def _summary(model: ModelView, lags: Lags, width: int) -> Iterator[Text]:
    said = _plain(changed(model, replicas=()))
    facts = f"  {_latest(model)}, {count_text(model.shards, 'shard')}, {size_text(model.size_bytes)}"
    yield from _wrapped(Text.assemble((said.name, "bold"), facts), width)
    yield from _wrapped(_counts(model, lags), width, indent=2)
    away = {  # of which the server hears nothing: whether they live it cannot know
        plain_text(each.name): _Away(_state_of(gone[0]), tuple(copy for worker in gone for copy in worker.copies))
        for each in model.replicas
        if (gone := [worker for worker in each.workers if _is_away(worker)])
    }
    pins = [(plain_text(each.name), worker.pins) for each in model.replicas for worker in each.workers if worker.pins]
    versions = [each for each in said.versions if _is_worth_a_line(each, model)]
    for version in versions[:MAX_VERSIONS]:
        pinned_by = list(dict.fromkeys(name for name, pinned in pins if version.version in pinned))
        lag = lags.behind(version.version)
        yield from _wrapped(_version(version, lag, away, pinned_by), width, indent=2)
    if len(versions) > MAX_VERSIONS:
        yield Text(f"  and {len(versions) - MAX_VERSIONS:,} older ones", style="dim")


def _latest(model: ModelView) -> str:
    if model.latest is not None:
        return f"latest is {model.latest}"
    return "all versions are lost" if any(version.is_lost for version in model.versions) else "nothing published yet"


def _counts(model: ModelView, lags: Lags) -> Text:
    """How many workers are in which state."""
    states: Counter[str] = Counter()
    behind = present = missing = 0
    for replica in model.replicas:
        present += len(replica.workers)
        missing += max(0, replica.shards - len(replica.workers))
        for worker in replica.workers:
            behind += bool(lags.of(worker).versions)
            state = _state_of(worker)
            states[state if worker.version is None or _is_away(worker) else f"{state} {worker.version}"] += 1
    states["missing"] = missing
    said = [f"{number:,} {state}" for state, number in states.most_common() if number]
    if not present:
        return Text("no replica is here now", style="dim")
    replicas = count_text(len(model.replicas), "replica")
    workers = f" of {count_text(present, 'worker')}" if present != len(model.replicas) else ""
    text = Text(f"{replicas}{workers}: {some_text(said, MAX_COUNTS)}")
    if behind:
        text.append(f"; {behind:,} behind", style="yellow")
    return text


def _is_worth_a_line(version: VersionView, model: ModelView) -> bool:
    """It is held, comes into being, or was lost without a newer one. An old one that was let go is not."""
    is_there = version.holders or version.filling or version.host_copies or not version.is_complete
    return bool(is_there) or version.is_latest or model.latest is None or version.version > model.latest


def _version(version: VersionView, lag: Lag, away: dict[str, _Away], pinned_by: Sequence[str]) -> Text:
    text = Text(f"version {version.version}", style="bold" if version.is_latest else "")
    plain = "not bold"
    if version.age_s is not None:
        text.append(f", {time_text(version.age_s)} old", style=plain)
    if version.holders:
        text.append(f", held by {_names(version.holders, away)}", style=plain)
    elif version.host_copies:
        text.append(", held in host memory only", style="not bold yellow")
    elif version.last_holder:
        text.append(f", held by no worker; {version.last_holder} was the last", style="not bold red")
    else:
        text.append(", held whole by no worker", style="not bold yellow")
    if version.holders and lag.versions:
        text.append(f": {_lag_words(lag)}", style="not bold yellow")
    if version.host_copies:
        keep_it = {name: each for name, each in away.items() if version.version in each.copies}
        text.append(f"; host copies: {_names(version.host_copies, keep_it)}", style="not bold cyan")
    if version.filling:
        text.append(f"; filling {_names(version.filling)}", style="not bold cyan")
    for site, size_bytes in sorted(version.cross_site_bytes.items()):
        text.append(f"; {size_text(size_bytes)} came into {site or 'no site'} from other sites", style=plain)
    if version.is_lost:
        text.append("; lost", style="not bold red")
    elif version.is_retained and not version.is_latest:
        text.append("; kept", style=plain)
    if pinned_by:
        text.append(f"; pinned by {_names(pinned_by)}", style=plain)
    if not version.is_complete:
        text.append("; being published", style="not bold yellow")
    return text


def _lag_words(lag: Lag) -> str:
    since = f" for {time_text(lag.age_s)}" if lag.age_s is not None else ""
    return f"{count_text(lag.versions, 'version')} behind{since}"


def _names(names: Sequence[str], away: Mapping[str, _Away] = {}) -> str:
    """The first few of them, and which of these the server does not hear."""
    said, room = list[str](), NAMES_COLUMNS
    for name in names:
        word = f"{_short(name)} ({away[name].state})" if name in away else _short(name)
        room -= cell_len(word)
        if room < 0 and said:
            break
        said.append(word)
    return some_text([*said, *names[len(said) :]], len(said))


def _short(name: str, most: int = NAME_COLUMNS) -> str:
    """The name in that many columns: of a longer one its two ends, for it is the end in which names differ."""
    if cell_len(name) <= most:
        return name
    first, last = (most - 1) // 2, most - 1 - (most - 1) // 2
    while cell_len(name[:first]) > (most - 1) // 2:
        first -= 1
    while last and cell_len(name[-last:]) > most - 1 - (most - 1) // 2:
        last -= 1
    return f"{name[:first]}…{name[len(name) - last :]}"


# --- The replicas of a model: columns of short facts, and what each does and waits for.


def _replicas(
    model: ModelView, reads: dict[str, list[Transfer]], lags: Lags, width: int, most_lines: int | None
) -> Iterator[Text]:
    rows = rows_of(model, reads, lags)
    columns = _Columns(rows, width)
    yield Text("")
    yield columns.header()
    drawn, names = 2, 0
    for number, row in enumerate(rows):
        lines = columns.draw(row)
        drawn += len(lines)
        is_last = number == len(rows) - 1
        if most_lines is not None and names and drawn + (not is_last) > most_lines:
            more = count_text(len(model.replicas) - names + (not row.is_first), "more replica")
            yield Text(f"  and {more}: --all, --replica, --filter", style="dim")
            return
        names += row.is_first
        yield from lines


class _Columns:
    """Columns for a list of rows: those that the terminal has room for, and how wide they are."""

    def __init__(self, rows: Sequence[Row], width: int) -> None:
        self._width = width
        cells = [("has", _has), ("behind", _behind), ("heard", _heard)]
        if any(row.replica.shards > 1 for row in rows):
            cells = [("shard", _shards), *cells]
        found = [(header, cell, _widest(header, cell, rows)) for header, cell in cells]
        while self._used(found) + LEAST_NAME_COLUMNS > width:
            found.pop()
        left = width - self._used(found)
        self._name_columns = min(_widest("replica", _name, rows), max(LEAST_NAME_COLUMNS, min(left, width // 3)))
        left -= self._name_columns + (BESIDE_COLUMNS if any(row.reads or row.urgency[0] < 4 for row in rows) else 0)
        for header, cell in IF_IT_FITS:
            more = _widest(header, cell, rows)
            if more <= left - GAP_COLUMNS and any(map(cell, rows)):
                found.append((header, cell, more))
                left -= more + GAP_COLUMNS
        self._cells = found

    def _used(self, cells: Sequence[tuple[str, Callable[[Row], str], int]]) -> int:
        return GAP_COLUMNS + sum(columns + GAP_COLUMNS for _, _, columns in cells)

    def header(self) -> Text:
        """The names of the columns."""
        names = ["", "replica".ljust(self._name_columns), *(name.ljust(columns) for name, _, columns in self._cells)]
        return Text((" " * GAP_COLUMNS).join(names).rstrip(), style="bold dim")

    def draw(self, row: Row) -> list[Text]:
        """The lines of one row: its facts, and its texts beside or below them."""
        row = replace(row, replica=_plain(row.replica), worker=_plain(row.worker), reads=_plain(row.reads))
        note = _note(row.replica) if row.is_first else ""
        name = _short(row.replica.name, self._name_columns - len(note)) if row.is_first else ""
        text = Text(f"  {name}").append(note, style="dim")
        text.pad_right(GAP_COLUMNS + self._name_columns - text.cell_len)
        for header, cell, columns in self._cells:
            value = _short(cell(row), columns)
            text.append(f"  {value}", style=_style(header, row)).pad_right(columns - cell_len(value))
        texts = _texts(row)
        whole = Text("; ").join(texts)
        if text.cell_len + GAP_COLUMNS + whole.cell_len <= self._width and texts:
            return [text.append("  ").append_text(whole)]
        text.rstrip()
        return [text, *(line for each in texts for line in _wrapped(each, self._width, indent=4))]


def _widest(header: str, cell: Callable[[Row], str], rows: Sequence[Row]) -> int:
    return max(len(header), *(cell_len(cell(row)) for row in rows))


def _style(header: str, row: Row) -> str:
    worker = row.worker
    if header == "has":
        return STYLES.get(_state_of(worker), "yellow") if worker is not None else "red"
    return "yellow" if header == "behind" or (worker is not None and _is_away(worker)) else "dim"


def _name(row: Row) -> str:
    return row.replica.name + _note(row.replica) if row.is_first else ""


def _note(replica: ReplicaView) -> str:
    if any(worker.is_writer for worker in replica.workers):
        return " (writer)"
    return "" if any(worker.reliable for worker in replica.workers) or not replica.workers else " (spot)"


def _shards(row: Row) -> str:
    return _short(shards_text(row.shards), 12)


def _has(row: Row) -> str:
    worker = row.worker
    if worker is None:
        return "missing"
    text = _state_of(worker) if worker.version is None else f"{worker.version} {_state_of(worker)}"
    share = worker.done / worker.chunks if worker.chunks else 0.0
    return f"{text} {share:4.0%}" if text.endswith("filling") else text


def _behind(row: Row) -> str:
    if not row.lag.versions:
        return ""
    return str(row.lag.versions) if row.lag.age_s is None else f"{row.lag.versions}, {_age(row.lag.age_s)}"


def _heard(row: Row) -> str:
    return _age(row.worker.heard_s) if row.worker is not None else ""


def _age(seconds: float) -> str:
    """`0.3 s`, `59 s`, `3 min`, `2 h`, `4 d`."""
    return " ".join(time_text(seconds).split()[:2])


def _readers(row: Row) -> str:
    return str(row.worker.readers) if row.worker is not None and row.worker.readers else ""


def _received(row: Row) -> str:
    received = row.worker.received_bytes if row.worker is not None else {}
    most_first = sorted(received.items(), key=lambda item: (-item[1], item[0]))
    return some_text([f"{size_text(size)} from {_short(source)}" for source, size in most_first], 1)


def _where(row: Row) -> str:
    worker = row.worker
    if worker is None:
        return ""
    # by what it can be read: where exactly is for programs
    transports = dict.fromkeys(scheme_of(endpoint) for endpoint in worker.endpoints)
    return ", ".join(place for place in (worker.site, worker.host, *transports) if place)


def _copies(row: Row) -> str:
    """What its host copies take, and the most that they may."""
    worker = row.worker
    if worker is None or not worker.size_bytes:
        return ""
    copies = len(worker.copies) + len(worker.copies_filling)
    most = (copies + worker.copies_left) * worker.size_bytes
    return f"{size_text(copies * worker.size_bytes)} of {size_text(most)}" if most else "no room"


IF_IT_FITS = (("readers", _readers), ("where", _where), ("host copies", _copies), ("received", _received))


def _texts(row: Row) -> list[Text]:
    """What the row does and waits for."""
    replica, worker, found = row.replica, row.worker, list[Text]()
    is_away = worker is not None and _is_away(worker)
    if worker is not None and is_away:
        why = "it has no connection" if not worker.connected else "its process may be stopped"
        away = f"not heard for {time_text(worker.heard_s)}: {why}; {time_text(worker.lease_left_s)} of its lease left"
        found.append(Text(away, style="yellow"))
    said = {read.waiting_for for read in row.reads} | (
        {worker.waiting_for} if worker is not None and is_away else set()
    )
    if row.is_first and replica.call is not None:
        found += _call(replica.call, said)
        said.add(replica.call.waiting_for)
    is_said = worker is not None and any(each.endswith(worker.waiting_for) for each in said)
    if worker is not None and worker.waiting_for and not (is_away or is_said):
        is_called = replica.call is not None and replica.call.state in ("waiting", "running")
        what = "" if is_called else f"close(), for {time_text(worker.waits_s)}: "
        found.append(Text(f"{what}{worker.waiting_for}", style="yellow"))
    return [*found, *(_reading(read, is_heard=not is_away) for read in row.reads)]


def _call(call: CallView, said: Collection[str]) -> list[Text]:
    """What the replica does as a group; nothing if that has ended well and waits for nothing."""
    if call.state == "finished" and not call.waiting_for:
        return []
    spec = "" if call.spec == "" else json.dumps(call.spec)
    text = Text(f"{call.verb}({spec})")
    if call.version is not None and str(call.version) != spec:
        text.append(f" is {call.version}")
    style = {"failed": "red", "waiting": "yellow", "finished": "yellow"}.get(call.state, "")
    since = f" for {time_text(call.since_s)}" if call.state in ("waiting", "running") else ""
    text.append(f", {call.state}{since}", style=style)
    if call.waiting_for and not any(each and call.waiting_for.endswith(each) for each in said):
        text.append(f": {call.waiting_for}", style=style or "yellow")
    return [text]


def _reading(transfer: Transfer, *, is_heard: bool = True) -> Text:
    source = _short(transfer.source)
    if transfer.is_void:
        return Text(f"stops reading from {source}", style="dim")
    text = Text()
    if transfer.chunks:
        full = round(BAR_COLUMNS * transfer.done / transfer.chunks)
        text.append("━" * full, style="cyan").append("─" * (BAR_COLUMNS - full) + " ", style="dim")
    text.append("reads from ").append(source, style="bold").append("'s host copy" if transfer.from_host else "")
    if transfer.transport:
        text.append(" by ").append(transfer.transport, style="bold")
    text.append(f" for {time_text(transfer.since_s)}")
    if transfer.chunks:
        text.append(f", {size_text(bytes_done(transfer))} of {size_text(transfer.size_bytes)}")
    rate = transfer.rate_bytes_per_s
    if transfer.transport and is_heard:  # before a target names its transport it has counted nothing
        text.append(f" at {size_text(rate)}/s", style="cyan")
        if rate and transfer.chunks:
            text.append(f", {time_text((transfer.size_bytes - bytes_done(transfer)) / rate)} left")
    if transfer.waiting_for:
        text.append(f"; nothing for {time_text(transfer.still_s)}: {transfer.waiting_for}", style="yellow")
    if transfer.reason:
        text.append(f": {transfer.reason}" if not transfer.waiting_for else f"; {transfer.reason}", style="dim")
    if transfer.path:
        text.append(f"; {transfer.path}", style="dim")
    if transfer.why:
        text.append(f"; not by {transfer.why}", style="yellow")
    return text


def _wrapped(text: Text, width: int, *, indent: int = 0) -> Iterator[Text]:
    """The text as lines, which break between words, and never between a number and its unit."""
    whole = text.copy()
    whole.plain = UNIT_SPACE.sub(NO_BREAK, whole.plain)
    for line in whole.wrap(_ruler(), width - indent, overflow="fold"):
        line.rstrip()
        line.plain = line.plain.replace(NO_BREAK, " ")
        yield Text(" " * indent).append_text(line) if indent else line


@cache
def _ruler() -> Console:
    return Console(file=sys.stderr)


def print_lines(console: Console, lines: Iterator[Text]) -> None:
    """Print lines that are as wide as the console, as they are."""
    console.print(Text("\n").join(lines), no_wrap=True, overflow="ignore", crop=False)
