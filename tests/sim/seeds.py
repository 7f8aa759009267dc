"""Running many seeds of the simulator at once, in processes of their own, and saying which of them failed."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait as wait_for

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tensorhub.cli.output import shown
from tensorhub.protocol.errors import TensorHubError

from .runner import SeedResult, run_seed

MAX_FAILED = 20  # then it is plain that something is wrong
MAX_SEED = 10**18  # a run has to be counted: its length is a machine's word
IN_HAND = 4  # seeds given to each process ahead of time
LINE_EVERY_S = 10.0  # where there is no terminal to draw a bar on, or a dumb one


@dataclass
class Tally:
    """What came of the seeds so far."""

    done: int = 0
    events: int = 0
    virtual_s: float = 0.0
    failed: list[SeedResult] = field(default_factory=list)

    def add(self, result: SeedResult) -> None:
        """Count one history."""
        self.done += 1
        self.events += result.events
        self.virtual_s += result.virtual_s
        if not result.ok:
            self.failed.append(result)


def run_all(seeds: Iterable[int], *, jobs: int, until: Callable[[], bool] = lambda: False) -> Iterator[SeedResult]:
    """Results in the order in which they end. No new seed is begun once `until` says so."""
    waiting = iter(seeds)
    open_runs: dict[Future[SeedResult], int] = {}
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_follow_the_parent)
    try:
        while True:
            room = 0 if until() else jobs * IN_HAND - len(open_runs)
            for seed in itertools.islice(waiting, max(room, 0)):
                open_runs[pool.submit(run_seed, seed)] = seed
            if not open_runs:
                return
            for ended in wait(open_runs, return_when=FIRST_COMPLETED).done:
                seed = open_runs.pop(ended)
                try:
                    yield ended.result()
                except BrokenProcessPool as error:
                    raise TensorHubError(f"a simulating process died; seed {seed} was in hand") from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _follow_the_parent() -> None:
    """Leave Ctrl-C to it, and end when it has ended, however that was."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait_for([sentinel])
    os._exit(1)


def show_seeds(
    seeds: Iterable[int], console: Console, *, total: int | None, jobs: int, seconds: float | None = None
) -> Tally:
    """Run them with a progress bar; print a line for each that failed. Ctrl-C and `seconds` end it early."""
    tally = Tally()
    began = time.monotonic()
    is_over = lambda: len(tally.failed) >= MAX_FAILED or (seconds is not None and time.monotonic() - began > seconds)  # noqa: E731 - a question
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    line_at = began + LINE_EVERY_S
    bar = Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_interactive)
    with shown(bar) as progress:
        task = progress.add_task("simulating", total=total)
        try:
            for result in run_all(seeds, jobs=jobs, until=is_over):
                tally.add(result)
                progress.update(task, advance=1, description=f"{len(tally.failed)} failed")
                if not result.ok:
                    first = (result.error or "no reason given").splitlines()[0]
                    progress.console.print(
                        f"seed {result.seed} failed: {first}", markup=False, highlight=False, soft_wrap=True
                    )
                if not console.is_interactive and time.monotonic() >= line_at:
                    line_at += LINE_EVERY_S
                    console.print(f"{tally.done} of {total or 'many'} seeds, {len(tally.failed)} failed")
        except KeyboardInterrupt:
            console.print("interrupted")
    return tally


def parse_seeds(text: str) -> range:
    """`A..B`, both included; or one number. Raises `ValueError` that says why."""
    first, dots, last = text.partition("..")
    try:
        least, most = int(first), int(last if dots else first)
    except ValueError as error:
        raise ValueError(f"{text[:60]!r} is no range of seeds") from error
    if not 0 <= least <= most <= MAX_SEED:
        raise ValueError(f"{text[:60]!r} is not within 0..{MAX_SEED}, the lower one first")
    return range(least, most + 1)
