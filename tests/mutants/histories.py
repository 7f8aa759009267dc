"""Whole histories as judges: seeds and plans of the simulator, and walks of the explorer through a small cluster.

A history is a name: `seed 12`, `plan FILE`, `walk 7`. Nothing here imports the package before a mutant is in its place.
"""

import hashlib
from dataclasses import dataclass

from .substitute import ROOT

PLANS = "tests/simulation/plans"


@dataclass(frozen=True)
class Told:
    """What became of a history: how a promise was broken, if one was, and what tells it from another history."""

    broken: str
    digest: str


def named(seeds: int, walks: int) -> list[str]:
    """The first of the seeds and walks, and every plan that is kept."""
    plans = [path.stem for path in sorted((ROOT / PLANS).glob("*.txt"))]
    return [
        *(f"walk {number}" for number in range(walks)),
        *(f"plan {name}" for name in plans),
        *(f"seed {seed}" for seed in range(seeds)),
    ]


def tell(name: str) -> Told:
    """Let it happen."""
    kind, _, which = name.partition(" ")
    return _tell_walk(int(which)) if kind == "walk" else _tell_seed(kind, which)


def _tell_seed(kind: str, which: str) -> Told:
    from tests.sim.plantext import parse
    from tests.sim.runner import run_plan, run_seed

    if kind == "plan":
        result = run_plan(parse((ROOT / PLANS / f"{which}.txt").read_text(encoding="utf-8")))
    else:
        result = run_seed(int(which))
    return Told("" if result.ok else str(result.error).splitlines()[0], result.digest)


def _tell_walk(number: int) -> Told:
    """Each number has its own cluster: where it begins, how many take part, who leaves, who has room for a copy."""
    from explore.programs import CHAPTERS
    from explore.small import Faults, Shape
    from explore.walks import follow

    turn, place = divmod(number, len(CHAPTERS))
    shape = Shape(
        rollouts=1 + (turn % 3 > 0),
        copies=int(turn % 4 != 1),
        closes=turn % 2 == 1,
        chapter=list(CHAPTERS)[place],
    )
    broken, history = follow(shape, Faults(losses=1, repeats=1, failures=1, crashes=1), number)
    return Told(broken, hashlib.blake2b(str(history).encode(), digest_size=8).hexdigest())
