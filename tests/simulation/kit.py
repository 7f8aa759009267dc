"""The seeds that are always run, and how to run one in a process of its own."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FIXED = range(0, 61)
HERE = Path(__file__).parent

RUN = """
import sys
from tests.sim.runner import run_seed
for seed in map(int, sys.argv[1:]):
    result = run_seed(seed)
    print(seed, result.digest, result.events, flush=True)
"""


@dataclass(frozen=True)
class Regression:
    """A seed that once failed."""

    seed: int
    why: str  # it failed
    is_long: bool  # seven seconds of a core, and more


def regressions() -> list[Regression]:
    """All that are kept in the file beside."""
    found: list[Regression] = []
    for line in (HERE / "regressions.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            seed, why = line.split(maxsplit=1)
            assert all(int(seed) != each.seed for each in found), f"seed {seed} is there twice"
            found.append(Regression(int(seed), why.removeprefix("LONG "), why.startswith("LONG ")))
    return found


def histories(seeds: list[int], *, hash_seed: int) -> str:
    """Seed, digest and number of events of each history, as a fresh process under that hash seed makes them."""
    command = [sys.executable, "-c", RUN, *map(str, seeds)]
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True)
    return done.stdout
