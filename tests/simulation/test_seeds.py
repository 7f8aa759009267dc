"""Seeds of the cluster simulator: a dozen in every run; more, and each that once found a fault, with `--long`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim import runner, seeds
from tests.sim.runner import SeedResult, run_seed

pytestmark = pytest.mark.simulation

DOZEN = [2, 9, 10, 14, 16, 22, 24, 34, 37, 38, 40, 49]  # restarts, lasting faults, layouts, models, no host memory
MORE = [seed for seed in range(61) if seed not in DOZEN]
TWICE = (2, 40)

RUN = """
import sys
from tests.sim.runner import run_seed
for seed in map(int, sys.argv[1:]):
    result = run_seed(seed)
    print(seed, result.digest, result.events, flush=True)
"""


def regressions() -> list[tuple[int, str]]:
    """Seeds that once failed, and why."""
    lines = (Path(__file__).parent / "regressions.txt").read_text(encoding="utf-8").splitlines()
    found = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    return [(int(seed), why) for seed, why in found]


@pytest.mark.parametrize("seed", [*DOZEN, *(pytest.param(seed, marks=pytest.mark.long) for seed in MORE)])
def test_every_promise_is_kept(seed: int) -> None:
    result = run_seed(seed)
    assert result.ok, f"python -m tests.sim --seed {seed}\n{result.error}"


@pytest.mark.long
@pytest.mark.parametrize(("seed", "why"), regressions(), ids=lambda value: str(value)[:9])
def test_what_failed_once_does_not_fail_again(seed: int, why: str) -> None:
    result = run_seed(seed)
    assert result.ok, f"python -m tests.sim --seed {seed}; it once found: {why}\n{result.error}"


def test_a_seed_is_one_history_under_any_hash_seed() -> None:
    command = [sys.executable, "-c", RUN, *map(str, TWICE)]
    environment = {**os.environ, "PYTHONHASHSEED": "4242"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True)
    here = [(seed, run_seed(seed)) for seed in TWICE]  # hashed as this process does
    assert done.stdout.splitlines() == [f"{seed} {result.digest} {result.events}" for seed, result in here]


def test_a_history_is_kept_as_lines_when_asked_for() -> None:
    plain, traced = run_seed(49), run_seed(49, trace=True)
    assert (plain.digest, plain.lines) == (traced.digest, ())
    assert any("calls publish" in line for line in traced.lines)
    assert any("reads version" in line for line in traced.lines)


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_runs_many_seeds() -> None:
    command = [sys.executable, "-m", "tests.sim", "--seeds", "48..49", "--jobs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 seeds, ")
    assert done.stdout.strip().endswith("every promise kept")


def test_a_failure_is_an_error_of_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    from tests.sim.__main__ import app

    def fails(seed: int, *, trace: bool) -> SeedResult:
        return SeedResult(seed, False, "OracleViolation: a promise", ("a line",), 10, 2.0, "digest")

    monkeypatch.setattr(runner, "run_seed", fails)
    with pytest.raises(SystemExit) as ended:
        app(["--seed", "3"])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (1, "a line\n")
    assert "seed 3 failed after 10 events" in err


def test_seeds_are_named_by_both_ends() -> None:
    assert list(seeds.parse_seeds("3..5")) == [3, 4, 5]
    assert list(seeds.parse_seeds("7")) == [7]
    for text in ("", "..", "5..3", "a..b", "-3..5", "1..2..3"):
        with pytest.raises(ValueError, match=r".*"):
            seeds.parse_seeds(text)
