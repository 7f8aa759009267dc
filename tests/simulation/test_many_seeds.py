"""Many seeds: failures are named as they come, and running ends early when it has become plain, or time is up."""

import io
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from runtime.kit import eventually
from tensorhub.protocol.errors import TensorHubError
from tests.sim import seeds
from tests.sim.runner import SeedResult

Results = Callable[..., Iterator[SeedResult]]


def result(seed: int, error: str | None = None) -> SeedResult:
    """One history of ten events and two seconds."""
    return SeedResult(seed, error is None, error, (), 10, 2.0, "digest")


def run_at_once(failing: Callable[[int], bool]) -> Results:
    """Instead of processes: every seed at once, in order."""

    def run_all(numbers: Iterable[int], *, jobs: int, until: Callable[[], bool]) -> Iterator[SeedResult]:
        for seed in numbers:
            if until():
                return
            yield result(seed, "OracleViolation: a [bold] promise\nTraceback …" if failing(seed) else None)

    return run_all


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=40, force_terminal=False)


def printed(console: Console) -> str:
    """What was printed so far."""
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_failures_are_named(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "run_all", run_at_once(lambda seed: seed == 3))
    tally = seeds.show_seeds(range(5), console, total=5, jobs=1)
    assert (tally.done, tally.events, tally.virtual_s) == (5, 50, 10.0)
    assert [failed.seed for failed in tally.failed] == [3]
    assert printed(console) == "seed 3 failed: OracleViolation: a [bold] promise\n"


def test_it_ends_when_it_is_plain_that_something_is_wrong(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "run_all", run_at_once(lambda seed: True))
    tally = seeds.show_seeds(itertools.count(), console, total=None, jobs=1)
    assert len(tally.failed) == seeds.MAX_FAILED


def test_a_storm_ends_when_its_time_is_up(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "run_all", run_at_once(lambda seed: False))
    assert seeds.show_seeds(itertools.count(), console, total=None, jobs=1, seconds=0.05).done > 0


def test_an_interrupt_keeps_what_was_found(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(numbers: Iterable[int], **_: object) -> Iterator[SeedResult]:
        yield result(0, "broken")
        raise KeyboardInterrupt

    monkeypatch.setattr(seeds, "run_all", interrupted)
    tally = seeds.show_seeds(range(9), console, total=9, jobs=1)
    assert [failed.seed for failed in tally.failed] == [0]
    assert printed(console).endswith("interrupted\n")


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be drawn over there: a bar would be shown once, at the end."""
    monkeypatch.setattr(seeds, "LINE_EVERY_S", 0.0)
    monkeypatch.setattr(seeds, "run_all", run_at_once(lambda seed: False))
    dumb = Console(file=io.StringIO(), width=40, force_terminal=True, _environ={"TERM": "dumb"})
    seeds.show_seeds(range(2), dumb, total=2, jobs=1)
    assert printed(dumb).splitlines() == ["1 of 2 seeds, 0 failed", "2 of 2 seeds, 0 failed"]


def die(seed: int) -> SeedResult:
    """A simulation that takes its process with it."""
    os.kill(os.getpid(), signal.SIGKILL)
    return result(seed)


@pytest.mark.simulation
def test_a_process_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "run_seed", die)
    with pytest.raises(TensorHubError, match=r"process died; seed \d was in hand"):
        list(seeds.run_all(range(3), jobs=1))


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def processor_s(pid: int) -> float:
    """That it has used by itself."""
    used = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11]
    return int(used) / os.sysconf("SC_CLK_TCK")


def test_nobody_goes_on_simulating_when_the_command_was_killed() -> None:
    command = [sys.executable, "-m", "tests.sim", "--storm", "--jobs", "2"]
    storm = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        eventually(lambda: sum(processor_s(child) > 1.5 for child in children_of(storm.pid)) >= 2, "both simulate")
        children = children_of(storm.pid)
    finally:
        storm.kill()
        storm.wait()
    eventually(lambda: not any(Path(f"/proc/{child}").exists() for child in children), "all have ended")


@pytest.mark.simulation
def test_the_command_runs_many_seeds() -> None:
    command = [sys.executable, "-m", "tests.sim", "--seeds", "3..5", "--jobs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 seeds, ")
    assert done.stdout.strip().endswith("every promise kept")


def test_seeds_are_named_by_both_ends() -> None:
    assert list(seeds.parse_seeds("3..5")) == [3, 4, 5]
    assert list(seeds.parse_seeds("7")) == [7]
    for text in ("", "..", "5..3", "a..b", "-3..5", "1..2..3"):
        with pytest.raises(ValueError, match=r".*"):
            seeds.parse_seeds(text)
