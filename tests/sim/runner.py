"""Runs one seed, or one plan, and says what came of it."""

import traceback
from dataclasses import dataclass

from tensorhub.protocol.errors import InvariantViolation

from .cluster import Cluster
from .draw import draw_plan
from .plan import Plan
from .world import OracleViolation


@dataclass(frozen=True)
class SeedResult:
    """One history: whether every promise was kept, and enough to tell two histories apart."""

    seed: int
    ok: bool
    error: str | None
    lines: tuple[str, ...]
    events: int
    virtual_s: float
    digest: str


def run_seed(seed: int, *, trace: bool = False) -> SeedResult:
    """Run the history of one seed; with `trace`, keep it as readable lines."""
    return run_cluster(Cluster(draw_plan(seed), trace=trace), seed)


def run_plan(plan: Plan, *, trace: bool = False) -> SeedResult:
    """Run the history of one plan."""
    return run_cluster(Cluster(plan, trace=trace))


def run_cluster(cluster: Cluster, seed: int = -1) -> SeedResult:
    """Run a cluster that has not begun."""
    error = None
    try:
        cluster.run()
    except (OracleViolation, InvariantViolation, AssertionError, LookupError, TypeError, ValueError) as failure:
        kind = type(failure).__name__
        where = "" if isinstance(failure, OracleViolation) else "\n" + traceback.format_exc()
        error = f"{kind}: {failure}{where}"
    world = cluster.world
    return SeedResult(seed, error is None, error, tuple(world.lines), world.events, world.now, world.digest())
