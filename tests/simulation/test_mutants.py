"""The removed lines (`make mutants`): each stands exactly once, and the simulator notices three of them at once."""

import ast
import builtins
import subprocess
import sys

import pytest

from mutants.mutants import MUTANTS, Mutant
from mutants.substitute import PACKAGE, ROOT, where

QUICK = {  # and the seed that shows it; another weather may want some more
    "two reads write at once": 9,
    "a closed ticket may be begun": 1,
    "a spot worker keeps nothing": 16,
}
ENOUGH = 10  # mutants: each promise has a line that keeps it


def unknown_names(tree: ast.Module) -> list[str]:
    """Names that are used and that nothing in the file gives a value."""
    known, used = set(dir(builtins)), set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                known.add(name)
            case ast.MatchAs(name=str(name)) | ast.ExceptHandler(name=str(name)):
                known.add(name)
            case ast.alias(name=name, asname=other):
                known.add(other or name.partition(".")[0])
    return sorted(used - known - {"__file__"})


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_its_line_stands_exactly_once(mutant: Mutant) -> None:
    file = PACKAGE / where(mutant.old)  # which raises unless it is there once
    changed = ast.parse(file.read_text(encoding="utf-8").replace(mutant.old, mutant.new))
    assert unknown_names(changed) == [], "whoever runs it would notice that, whatever it protects"
    assert mutant.new != mutant.old
    assert mutant.protects


def test_no_two_are_the_same() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names)) >= ENOUGH
    assert len({(mutant.old, mutant.new) for mutant in MUTANTS}) == len(names)


@pytest.mark.simulation
@pytest.mark.timeout(600)  # it runs up to eighty histories
@pytest.mark.parametrize(("name", "first"), QUICK.items())
def test_the_simulator_notices(name: str, first: int) -> None:
    command = [sys.executable, "-m", "tests.mutants", "--only", name, "--no-scenarios", "--jobs", "1"]
    command += ["--first-seed", str(first), "--seeds", "80"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert f"found     {name}  (seed " in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0
