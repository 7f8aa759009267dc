"""The simulator's judges do not ask the judged: what `sim/truth` and `sim/judges` may know of the core."""

import ast

from .sources import PACKAGE, Source, imports_of, snippet, sources

OF_CORE = ("tensorhub.worker.events", "tensorhub.protocol.messages", "tensorhub.protocol.names")
OF_SIM = ("tests.sim.truth", "tests.sim.judges", "tests.sim.plan", "tests.sim.world")
TABLES = ("worker", "control", "cluster", "machine", "server_machine")  # where the machines could be reached

COURT = [*sources("tests/sim/truth"), *sources("tests/sim/judges")]


def partial(source: Source) -> list[str]:
    """Where a judge looks at what it must not see."""
    wrong = []
    for found in imports_of(source):
        if found.module.startswith((PACKAGE, "tests")):
            names = [found.module, f"{found.module}.{found.name}"]
            if not any(name.startswith((*OF_CORE, *OF_SIM)) for name in names):
                wrong.append(f"{source.at(found.node)}: a judge may not import {found.module}")
    looks = [node for node in ast.walk(source.tree) if isinstance(node, ast.Attribute) and node.attr in TABLES]
    return wrong + [f"{source.at(node)}: a judge may not look at .{node.attr}" for node in looks]


def test_judges_ask_the_truth_and_not_the_core() -> None:
    assert len(COURT) > 8
    assert [wrong for source in COURT for wrong in partial(source)] == []
    for code in ("from tensorhub.server import Server", "def look(process): return process.worker.buffer"):
        assert partial(snippet(code, "tests/sim/judges/snippet.py")) != []
