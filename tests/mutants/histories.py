"""Whole histories as judges: seeds and plans of the simulator.

A history is a name: `seed 12`, `plan FILE`. Nothing here imports the package before a mutant is in its place.
"""

from dataclasses import dataclass

from .substitute import ROOT

PLANS = "tests/simulation/plans"


@dataclass(frozen=True)
class Told:
    """What became of a history: how a promise was broken, if one was, and what tells it from another history."""

    broken: str
    digest: str


def named(seeds: int) -> list[str]:
    """Every plan that is kept, and the first of the seeds."""
    plans = [path.stem for path in sorted((ROOT / PLANS).glob("*.txt"))]
    return [*(f"plan {name}" for name in plans), *(f"seed {seed}" for seed in range(seeds))]


def tell(name: str) -> Told:
    """Let it happen."""
    from tests.sim.plantext import parse
    from tests.sim.runner import run_plan, run_seed

    kind, _, which = name.partition(" ")
    if kind == "plan":
        result = run_plan(parse((ROOT / PLANS / f"{which}.txt").read_text(encoding="utf-8")))
    else:
        result = run_seed(int(which))
    return Told("" if result.ok else str(result.error).splitlines()[0], result.digest)
