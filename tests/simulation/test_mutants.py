"""The removed lines (`make mutants`): each still stands exactly once, and the simulator notices two of them at once."""

import subprocess
import sys
from pathlib import Path

import pytest

from mutants.mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("two reads write at once", "publish while readers of the old version remain")
ENOUGH = 10  # mutants: each promise has a line that keeps it


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_its_line_stands_exactly_once(mutant: Mutant) -> None:
    text = (ROOT / "src/tensorhub" / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1
    assert mutant.new != mutant.old
    assert mutant.protects


def test_names_are_different() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names)) >= ENOUGH


@pytest.mark.simulation
@pytest.mark.parametrize("name", QUICK)
def test_the_simulator_notices(name: str) -> None:
    command = [sys.executable, "-m", "tests.mutants", "--only", name, "--seeds", "40", "--jobs", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert "found" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0
