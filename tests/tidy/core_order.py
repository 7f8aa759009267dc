"""The core in one direction: each half is a row of files, and a file imports only what stands before it in the row.

The halves share words and know nothing of each other. A newcomer can read a row from left to right.
"""

import ast
from collections.abc import Iterator

from .sources import PACKAGE, Source, imports_of

CORE = f"{PACKAGE}.core"
WORKER = f"{CORE}.worker"

SHARED = ("names", "errors", "manifest", "messages", "specs", "sums", "settings")  # what the worker's half may import

ROWS: dict[str, tuple[str, ...]] = {
    WORKER: (
        "events",
        # the parts of a worker's state, each with its own rules
        *("buffer", "read_slot", "host_copies", "report_book", "proofs", "call", "departure"),
        "state",
        # questions
        *("mistakes", "deadlines", "reporting", "invariants"),
        # steps
        *("filling", "reading", "calling", "closing", "orders"),
        "machine",
    ),
}

OWNED = ("buffer", "serving", "withdrawn_in", "is_disowned")  # what `RegisteredMemory` alone changes


def order_violations(source: Source) -> list[str]:
    """Imports inside the core that run against the direction."""
    return list(_in_row(source)) if source.module.startswith(CORE) else []


def _in_row(source: Source) -> Iterator[str]:
    package, _, name = source.module.rpartition(".")
    row = ROWS.get(package, ())
    for found in imports_of(source):
        there = f"{found.module}.{found.name}" if found.name is not None else found.module
        if not there.startswith(CORE):
            continue
        its_package, its_name = _place(there)
        if package == its_package and row:
            if name not in row or its_name not in row[: row.index(name)]:
                yield f"{source.at(found.node)}: {its_name} does not stand before {name} in core_order.py"
        elif its_package in ROWS:
            yield f"{source.at(found.node)}: only what runs the core may import {its_package} ({its_name})"
        elif row and its_name not in SHARED:
            yield f"{source.at(found.node)}: {its_name} is not shared by both halves of the core"


def _place(module: str) -> tuple[str, str]:
    """The package and the file that a dotted name inside the core leads to."""
    for package in ROWS:
        if module == package or module.startswith(f"{package}."):
            return package, module.removeprefix(package).strip(".").split(".")[0]
    return CORE, module.removeprefix(CORE).strip(".").split(".")[0]


def ownership_violations(source: Source) -> list[str]:
    """Where a worker's buffer is changed without its table of transitions."""
    if not source.module.startswith(WORKER) or source.module == f"{WORKER}.buffer":
        return []
    return [
        f"{source.at(node)}: .{node.attr} is changed in buffer.py only, through its table"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in OWNED
    ]
