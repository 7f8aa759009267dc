"""Hand mutants: each changes one line that stands once in the core, and seeds of the simulator find three of them."""

import ast
import builtins
import subprocess
import sys

import pytest

from mutants.mutants import MUTANTS
from mutants.substitute import PACKAGE, ROOT, where

FOUND_BY = {  # a mutant, and the first of the seeds that it is shown to
    "two reads write at once": 63,
    "a closed ticket is begun": 1,
    "the last reliable holder withdraws without a host copy": 46,
}
SHOWN = [pytest.param(*each, marks=() if not at else pytest.mark.long) for at, each in enumerate(FOUND_BY.items())]


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


def test_each_line_stands_exactly_once() -> None:
    wrong = []
    for mutant in MUTANTS:
        try:
            file = PACKAGE / where(mutant.old)
        except ValueError as error:
            wrong.append(f"{mutant.name}: {error}")
            continue
        changed = ast.parse(file.read_text(encoding="utf-8").replace(mutant.old, mutant.new))
        if mutant.new == mutant.old or unknown_names(changed):
            wrong.append(f"{mutant.name}: changes nothing, or uses unknown names: {unknown_names(changed)}")
    assert wrong == []


def test_no_two_are_the_same() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert len({(mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.simulation
@pytest.mark.timeout(600)  # up to eighty histories
@pytest.mark.parametrize(("name", "first"), SHOWN)
def test_the_simulator_notices(name: str, first: int) -> None:
    command = [sys.executable, "-m", "tests.mutants", "--only", name, "--no-scenarios", "--jobs", "1"]
    command += ["--first-seed", str(first), "--seeds", "80"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert f"found     {name}  (seed " in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0
