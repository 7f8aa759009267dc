"""The simulator's judges do not ask the judged: what `sim/truth` and `sim/judges` may know of the core."""

import ast

import pytest

from .sources import PACKAGE, Source, imports_of, snippet, sources

OF_CORE = ("tensorhub.core.worker.events", "tensorhub.core.messages", "tensorhub.core.names")
OF_SIM = ("tensorhub.sim.truth", "tensorhub.sim.judges", "tensorhub.sim.plan", "tensorhub.sim.world")
TABLES = ("worker", "control", "cluster", "machine", "server_machine")  # where the machines could be reached

COURT = [*sources("src/tensorhub/sim/truth"), *sources("src/tensorhub/sim/judges")]


def partial(source: Source) -> list[str]:
    """Where a judge looks at what it must not see."""
    wrong = []
    for found in imports_of(source):
        if found.module.startswith(PACKAGE):
            names = [found.module, f"{found.module}.{found.name}"]
            if not any(name.startswith((*OF_CORE, *OF_SIM)) for name in names):
                wrong.append(f"{source.at(found.node)}: a judge may not import {found.module}")
    looks = [node for node in ast.walk(source.tree) if isinstance(node, ast.Attribute) and node.attr in TABLES]
    return wrong + [f"{source.at(node)}: a judge may not look at .{node.attr}" for node in looks]


@pytest.mark.parametrize("source", COURT, ids=lambda source: source.path)
def test_judges_ask_the_truth_and_not_the_core(source: Source) -> None:
    assert partial(source) == []


def test_there_are_judges() -> None:
    assert len(COURT) > 8


@pytest.mark.parametrize(
    "code",
    [
        "from ...core.server import Server",
        "from ...core import retention",
        "from ..cluster import Cluster",
        "def look(process): return process.worker.buffer",
    ],
)
def test_a_judge_that_asks_is_found_out(code: str) -> None:
    assert partial(snippet(code, "src/tensorhub/sim/judges/snippet.py")) != []


def test_a_judge_may_know_the_words() -> None:
    code = "from ...core.messages import Holding\nfrom ...core.worker import events\nfrom ..truth.life import Life"
    assert partial(snippet(code, "src/tensorhub/sim/judges/snippet.py")) == []
