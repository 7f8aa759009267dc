"""What the reference server's decisions cost as the fleet grows: a version, a report, a death, a restart.

Each figure is taken at each size, with 1 shard and with 8, on virtual time (see `fleet`). What would cost more than
`max_cpu_s` is not taken: the table then says what the two sizes before lead one to expect, and marks it so.
"""

import asyncio
import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tensorhub.runtime.metrics import server_record, server_sheet

from .fleet import GONE, IDLE, READ_S, TICK, Fleet, TooDear
from .section import Goal, Options, Section

SHARDS = (1, 8)
STEEPEST, FLATTEST = 3.0, 0.0  # powers of the size that an extrapolation may assume
UNKNOWN = 2.0  # after one size only: what it was when this was first measured
IDLE_S = 3.0
MIDWAY_S = 1.5  # after the first call of an update: all have called, and nobody is done

COLUMNS = {
    "version": "one version, CPU per worker",
    "idle": "an idle report",
    "death": "a death: hang-up",
    "lease": "and end of its lease",
    "death_midway": "hang-up in mid-update",
    "restart": "restart, all idle",
    "restart_midway": "restart in mid-update",
    "scrape": "a page of metrics",
    "join": "all join",
    "bytes": "memory per worker",
}
PER_WORKER = ("version",)  # taken for the whole fleet, shown for one worker
OF_ONE = ("idle", "bytes")  # taken for one worker: expected to stay as they are


@dataclass
class Curve:
    """One figure over the sizes: seconds, or bytes; and which of them were only expected."""

    unknown: float = UNKNOWN
    found: dict[int, float] = field(default_factory=dict)
    expected: dict[int, float] = field(default_factory=dict)

    def expect(self, size: int) -> float | None:
        """From the last one or two sizes that were measured; None where there is none."""
        known = sorted(self.found.items())
        if not known:
            return None
        last, power = known[-1], self.unknown
        if len(known) > 1 and known[-2][1] > 0:
            before = known[-2]
            power = math.log(last[1] / before[1]) / math.log(last[0] / before[0])
        return last[1] * (size / last[0]) ** min(STEEPEST, max(FLATTEST, power))


@dataclass
class Curves:
    """All figures of one number of shards."""

    shards: int
    max_cpu_s: float
    of: dict[str, Curve] = field(
        default_factory=lambda: {name: Curve(0.0 if name in OF_ONE else UNKNOWN) for name in COLUMNS}
    )
    notes: list[str] = field(default_factory=list)

    def take(self, size: int, name: str, measure: Callable[[], float]) -> bool:
        """Measure it, unless it is expected to be too dear or turns out to be. Returns whether it was measured."""
        curve = self.of[name]
        expected = curve.expect(size)
        if expected is None or expected <= self.max_cpu_s:
            try:
                curve.found[size] = measure()
            except TooDear as error:
                self.notes.append(f"{size} workers, {self.shards} shards, {COLUMNS[name]}: given up after {error}")
                expected = max(expected or 0.0, self.max_cpu_s)
            else:
                return True
        curve.expected[size] = expected
        return False

    def leave_out(self, size: int) -> None:
        """What was not measured at this size, for it needs what was too dear."""
        for curve in self.of.values():
            expected = curve.expect(size)
            if size not in curve.found and size not in curve.expected and expected is not None:
                curve.expected[size] = expected


def measure(curves: Curves, size: int, *, read_s: float = READ_S) -> None:
    """All figures of one size."""
    fleet = Fleet(size, curves.shards, read_s=read_s)
    most_s = curves.max_cpu_s

    def join() -> float:
        with fleet.counting(most_s=most_s) as meter:
            fleet.join()
        return meter.own_s

    def idle() -> float:
        fleet.run(within_s=1.0)
        with fleet.counting() as meter:
            fleet.run(within_s=IDLE_S)
        return meter.cpu_s[IDLE] / meter.counts[IDLE]

    if curves.take(size, "join", join):
        curves.take(size, "idle", idle)
        curves.of["bytes"].found[size] = fleet.bytes_per_worker()
        _measure_update(curves, size, fleet)
        curves.take(size, "scrape", lambda: _scrape(fleet))
        fleet = Fleet(size, curves.shards, read_s=read_s)
        fleet.join()
        _measure_death(curves, size, fleet)
        curves.take(size, "restart", lambda: _restart(fleet, most_s))
    curves.leave_out(size)


def _measure_update(curves: Curves, size: int, fleet: Fleet) -> None:
    """A version; a death and a restart with one under way."""
    most_s = curves.max_cpu_s

    def version() -> float:
        with fleet.counting(most_s=most_s) as meter:
            fleet.publish(2)
            fleet.begin_update()
            fleet.finish_update()
        return meter.own_s

    def death_midway() -> float:
        with fleet.counting(most_s=most_s):  # the half that comes before
            fleet.publish(3)
            fleet.begin_update()
            fleet.run(within_s=MIDWAY_S)
        source = next(thin for thin in fleet.rollouts if fleet.server.state.reads.load(thin.me))
        with fleet.counting() as meter:
            fleet.kill(source)
        with fleet.counting(most_s=most_s):
            fleet.finish_update()
        return meter.cpu_s[GONE]

    def restart_midway() -> float:
        with fleet.counting(most_s=most_s):
            fleet.publish(4)
            fleet.begin_update()
            fleet.run(within_s=MIDWAY_S)
        with fleet.counting(most_s=most_s) as meter:
            fleet.restart_server()
            fleet.finish_update()
        return meter.own_s

    if curves.take(size, "version", version) and curves.take(size, "death_midway", death_midway):
        curves.take(size, "restart_midway", restart_midway)


def _measure_death(curves: Curves, size: int, fleet: Fleet) -> None:
    """One that holds a version and does nothing is gone."""
    with fleet.counting() as meter:
        fleet.kill(fleet.rollouts[-1])
    curves.of["death"].found[size] = meter.cpu_s[GONE]
    lease_s, report_s = fleet.settings.lease_s, fleet.settings.report_s
    fleet.run(within_s=lease_s - 2 * report_s)
    with fleet.counting() as meter:
        fleet.run(until=lambda: len(fleet.server.state.members) < size, within_s=4 * report_s)
    curves.of["lease"].found[size] = meter.longest_of[TICK]


def _restart(fleet: Fleet, most_s: float) -> float:
    """From a server with empty memory to the end of its recovery; without the reports of those that go on idling."""
    with fleet.counting(most_s=most_s) as meter:
        fleet.restart_server()
        fleet.run(within_s=fleet.settings.lease_s + 2.0)
    return meter.own_s


def _scrape(fleet: Fleet) -> float:
    """What Prometheus asks for, once the first page has imported what it needs."""
    for _ in range(2):
        began_s = time.process_time()
        asyncio.run(server_sheet(fleet.server, server_record()).page(""))
    return time.process_time() - began_s


# --- the table --------------------------------------------------------------------------------------------------------


def _text(name: str, value: float, size: int) -> str:
    if name == "bytes":
        return f"{value / 1024:.1f} KiB"
    seconds = value / size if name in PER_WORKER else value
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (math.inf, 1.0, "s")):
        if seconds < limit:
            return f"{seconds * factor:,.0f} {unit}" if unit == "µs" else f"{seconds * factor:,.1f} {unit}"
    raise AssertionError("infinity is the last limit")


def _cell(curves: Curves, name: str, size: int) -> str:
    curve = curves.of[name]
    if size in curve.found:
        return _text(name, curve.found[size], size)
    return f"(about {_text(name, curve.expected[size], size)})" if size in curve.expected else "–"


def _goals(all_curves: list[Curves], sizes: tuple[int, ...]) -> list[Goal]:
    found = []
    first, last = sizes[0], sizes[-1]
    for curves in all_curves:
        words = f"{last:,} workers, {curves.shards} shard{'s' if curves.shards > 1 else ''}"

        def figure(name: str, size: int, curves: Curves = curves) -> float | None:
            curve = curves.of[name]
            value = curve.found.get(size, curve.expected.get(size))
            return value / size if value is not None and name in PER_WORKER else value

        version, small = figure("version", last), figure("version", first)
        if version is not None and small is not None:
            got = f"{version * 1e6:,.0f} µs, {version / small:.1f} times that of {first}"
            is_met = version < 400e-6 and version <= 1.5 * small
            found.append(
                Goal(f"a version, per worker: {words}", f"< 400 µs, <= 1.5 times that of {first}", got, is_met)
            )
        for name, most, text in (
            ("idle", 20e-6, "< 20 µs"),
            ("restart", 2.0, "< 2 s"),
            ("restart_midway", 2.0, "< 2 s"),
        ):
            value = figure(name, last)
            if value is not None:
                found.append(Goal(f"{COLUMNS[name]}: {words}", text, _text(name, value, last), value < most))
    return found


def run(options: Options) -> list[Section]:
    """The part."""
    sizes = (24, 48) if options.is_tiny else options.fleets
    read_s = 1.0 if options.is_tiny else READ_S
    title = "The reference server: decisions over the size of the fleet"
    section = Section("decisions", title, ("workers", "shards", *COLUMNS.values()))
    all_curves = []
    for shards in SHARDS:
        curves = Curves(shards, options.max_cpu_s)
        all_curves.append(curves)
        for size in sizes:
            options.tell(f"{size} workers, {shards} shards")
            measure(curves, size, read_s=read_s)
            gc.collect()
            section.rows.append([f"{size:,}", str(shards), *(_cell(curves, name, size) for name in COLUMNS)])
        section.notes += curves.notes
    section.figures = {
        "unit": "seconds of CPU of the server, for the whole fleet; bytes",
        "curves": [
            {"shards": each.shards, **{name: vars(curve) for name, curve in each.of.items()}} for each in all_curves
        ],
    }
    section.goals = [] if options.is_tiny else _goals(all_curves, sizes)
    section.notes += [
        "real core server and workers, virtual time, no sockets: only the CPU of the server's handle, tick and "
        "disconnected is counted, garbage collector off",
        f"a version: everybody holds the one before, one replica publishes, all others update within a second, a read "
        f"takes {read_s:g} s of virtual time; idle reports in this time are not counted",
        f"in brackets: not measured, for it would take more than {options.max_cpu_s:g} s of CPU; expected from the "
        "two sizes before",
    ]
    return [section]
