"""The reference server with real connections: how late orders are, and the last holder beside what sockets alone allow.

Thin workers in a few processes (see `crowd`), everybody holds a version, the next is published, all others update
within a second; a read takes `READ_S`. Then the same with a stand-in server that grants at once (see `ideal`). A
worker's wait counts from the sending of a report to the first orders that acknowledge it; a report that nobody ever
answered counts with the time that it had waited at the end.
"""

import contextlib
import heapq
import time

from .crowd import share_of
from .processes import Child, Failed, Server
from .section import Goal, Options, Section

READ_S = 4.0
SPREAD_S = 1.0
PER_PROCESS = 500
WITHIN_S = 60.0
PUBLISHER = 1  # replicas of one shard: the first worker of the first crowd


def _crowds(address: str, workers: int, *, spread_s: float, stack: contextlib.ExitStack) -> tuple[list[Child], float]:
    """Processes with so many workers together, all joined. Returns them and the seconds that it took."""
    count = -(-workers // PER_PROCESS)
    sizes = [workers // count + (index < workers % count) for index in range(count)]
    crowds = [stack.enter_context(Child(f"crowd {i}", module="bench.crowd")) for i in range(count)]
    for crowd in crowds:
        crowd.wait_started()
    began, first, joining = time.monotonic(), 0, []
    for crowd, size in zip(crowds, sizes, strict=True):
        more = {"spread_s": spread_s, "read_s": READ_S, "within_s": WITHIN_S}
        joining.append(crowd.ask("join", address=address, first=first, count=size, **more))
        first += size
    for each in joining:
        each.result()
    return crowds, time.monotonic() - began


def measure(
    workers: int, *, is_ideal: bool, spread_s: float = SPREAD_S, within_s: float = WITHIN_S
) -> dict[str, object]:
    """One update of a crowd of that size."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Server(is_ideal=is_ideal))
        before_bytes = server.resident_bytes()
        crowds, joined_s = _crowds(server.address, workers, spread_s=max(1.0, workers / 400), stack=stack)
        bytes_per_worker = (server.resident_bytes() - before_bytes) / workers
        for crowd in crowds:
            crowd.do("begin")
        cpu_s = server.cpu_s()
        began = float(crowds[0].do("publish", version=2, within_s=within_s))
        running = [
            crowd.ask("update", version=2, skip=0 if n else PUBLISHER, spread_s=spread_s, within_s=within_s)
            for n, crowd in enumerate(crowds)
        ]
        ended = [each.result() for each in running]
        took_s = time.monotonic() - began
        cpu_s = server.cpu_s() - cpu_s
        figures = [crowd.do("figures") for crowd in crowds]
        for crowd in crowds:
            crowd.do("close")
    return {"workers": workers, "joined_s": joined_s, "cpu_s": cpu_s, "took_s": took_s, "bytes": bytes_per_worker} | (
        _together(workers, began, ended, figures)
    )


def _together(
    workers: int, began: float, ended: list[dict[str, float | None]], figures: list[dict[str, object]]
) -> dict[str, object]:
    waits = list(heapq.merge(*(each["waits"] for each in figures)))  # type: ignore[call-overload]
    lags = list(heapq.merge(*(each["lags"] for each in figures)))  # type: ignore[call-overload]
    held = [each["held_at"] for each in ended]
    done = [each["ended_at"] for each in ended]
    return {
        "wait_p50_s": share_of(waits, 0.5),
        "wait_p99_s": share_of(waits, 0.99),
        "reports": len(waits),
        "lag_p99_s": share_of(lags, 0.99),
        "sessions_lost": sum(int(each["sessions"]) for each in figures) - workers,  # type: ignore[call-overload]
        "reconnections": sum(int(each["connects"]) for each in figures) - workers,  # type: ignore[call-overload]
        "last_holder_s": None if None in held else max(held) - began,  # type: ignore[type-var]
        "last_caller_s": None if None in done else max(done) - began,  # type: ignore[type-var]
        "missing": sum(int(each["missing"] or 0) for each in ended),
        "failed": sum(int(each["failed"] or 0) for each in ended),
    }


def _row(found: dict[str, object], ideal: dict[str, object]) -> list[str]:
    last, best = found["last_holder_s"], ideal["last_holder_s"]
    return [
        f"{found['workers']:,}",
        f"{_ms(found['wait_p50_s'])} / {_ms(found['wait_p99_s'])}",
        f"{_ms(ideal['wait_p50_s'])} / {_ms(ideal['wait_p99_s'])}",
        str(found["sessions_lost"]),
        str(found["reconnections"]),
        f"{last:.2f} s" if isinstance(last, float) else f"never: {found['missing']} did not get it",
        f"{best:.2f} s" if isinstance(best, float) else "–",
        f"{last / best:.2f}" if isinstance(last, float) and isinstance(best, float) else "–",
        f"{float(found['cpu_s']):.1f} / {float(ideal['cpu_s']):.1f} s",  # type: ignore[arg-type]
        f"{float(found['bytes']) / 1024:.0f} KiB",  # type: ignore[arg-type]
        f"{_ms(found['lag_p99_s'])} / {_ms(ideal['lag_p99_s'])}",
    ]


def _ms(seconds: object) -> str:
    assert isinstance(seconds, float | int)
    return f"{seconds * 1e3:,.0f} ms"


def run(options: Options) -> list[Section]:
    """The part."""
    section = Section(
        "lateness",
        "The reference server: real connections",
        (
            *("workers", "orders p50 / p99", "the same, ideal", "sessions lost", "reconnections", "last holder"),
            *("ideal", "ratio", "CPU of server / ideal", "server's memory per worker", "workers' own lateness p99"),
        ),
    )
    figures = []
    for workers in (8,) if options.is_tiny else options.crowds:
        options.tell(f"{workers} workers with connections, ideal")
        ideal = measure(workers, is_ideal=True)
        options.tell(f"{workers} workers with connections")
        found = measure(workers, is_ideal=False)
        if ideal["missing"] or ideal["failed"]:
            raise Failed(f"the stand-in server left {ideal['missing']} of {workers} without the version")
        figures.append({"server": found, "ideal": ideal})
        section.rows.append(_row(found, ideal))
        section.goals += [] if options.is_tiny else _goals(workers, found, ideal)
    section.figures = {"read_s": READ_S, "spread_s": SPREAD_S, "crowds": figures}
    section.notes += [
        f"thin workers, {PER_PROCESS} in a process, with the product's connections; all update within {SPREAD_S:g} s, "
        f"and a read takes {READ_S:g} s from its grant",
        "ideal: a server that answers each report at once from that report alone, and grants everybody the publisher",
        "where the workers' own processes are late, they and the server share too few cores: so are the ideal's orders",
    ]
    return [section]


def _goals(workers: int, found: dict[str, object], ideal: dict[str, object]) -> list[Goal]:
    lost, again = int(found["sessions_lost"]), int(found["reconnections"])  # type: ignore[call-overload]
    goals = [
        Goal(
            f"{workers:,} real connections", "no session lost, nobody reconnects", f"{lost}, {again}", lost + again == 0
        )
    ]
    last, best = found["last_holder_s"], ideal["last_holder_s"]
    ratio = last / best if isinstance(last, float) and isinstance(best, float) else None
    got = "never" if ratio is None else f"{ratio:.2f}"
    goals.append(Goal(f"last holder of {workers:,}, of the ideal", "<= 1.2", got, ratio is not None and ratio <= 1.2))
    return goals
