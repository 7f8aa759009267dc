"""The core in one direction: a row of files for each part, and a file imports only what stands before it in its row.

The server's half and the worker's half share words and know nothing of each other; the words know neither. A newcomer
can read a row from left to right.
"""

import ast
from collections.abc import Iterator

from .sources import PACKAGE, Source, imports_of

CORE = f"{PACKAGE}.core"
SERVER = f"{CORE}.server"
WORKER = f"{CORE}.worker"

ROWS: dict[str, tuple[str, ...]] = {
    SERVER: (
        # tables, each of which knows nothing of the rules
        *(
            "lines",
            "clock",
            "receipts",
            "numbers",
            "pace",
            "roster",
            "open_reads",
            "content",
            "groups",
            "watches",
            "keepers",
            "companions",
            "records",
            "catalog",
            "membership",
        ),
        # the one owner of all of them, and what is read from it
        *("state", "facts", "decisions"),
        # rules: facts in, decisions out
        *(
            "rules",
            "rules.selection",
            "rules.crossing",
            "rules.admission",
            "rules.claims",
            "rules.witness",
            "rules.election",
        ),
        *(
            "rules.covered",
            "rules.established",
            "rules.heirs",
            "rules.resting",
            "rules.retention",
            "rules.draining",
            "rules.wanted",
            "rules.sources",
            "rules.progress",
        ),
        *("rules.sharing", "rules.moving", "rules.across", "rules.grants", "rules.interests"),
        *("rules.resolving", "rules.choosing", "rules.calls"),
        *("rules.numbering", "rules.held", "rules.cuts", "rules.described"),
        # what changes the state, and the machine, which alone says when
        *(
            "places",
            "apply",
            "parts",
            "evidence",
            "judging",
            "rollcall",
            "intake",
            "routine",
            "sessions",
            "invariants",
            "snapshot",
            "machine",
        ),
    ),
    WORKER: (
        "events_across",
        "events",
        # the parts of a worker's state, each with its own rules
        *("parts", "buffer", "read_slot", "host_copies", "report_book", "proofs", "call", "departure"),
        "state",
        # questions
        *("mistakes", "deadlines", "reporting", "invariants"),
        # steps
        *("filling", "reading", "calling", "closing", "orders"),
        "machine",
    ),
    # what both halves may import, and whoever is outside
    CORE: (
        *(
            "names",
            "errors",
            "decoding",
            "metadata",
            "manifest",
            "settings",
            "messages",
            "sums",
            "version_spec",
            "snapshot",
        ),
        *("boxes", "placements", "tile_manifest"),
    ),
}

OWNED = ("buffer", "serving", "withdrawn_in", "is_disowned")  # what `RegisteredMemory` alone changes


def order_violations(source: Source) -> list[str]:
    """Imports inside the core that run against the direction."""
    return list(_in_row(source)) if _place(source.module) is not None else []


def _in_row(source: Source) -> Iterator[str]:
    package, name = _place(source.module) or ("", "")
    for found in imports_of(source):
        place = _place(f"{found.module}.{found.name}" if found.name is not None else found.module)
        if place is None:
            continue
        its_package, its_name = place
        if package == its_package:
            row = ROWS[package]
            if name and (name not in row or its_name not in row[: row.index(name)]):
                yield f"{source.at(found.node)}: {its_name} does not stand before {name} in core_order.py"
        elif its_package != CORE:
            yield f"{source.at(found.node)}: only what runs the core may import {its_package} ({its_name})"
        elif its_name not in ROWS[CORE]:
            yield f"{source.at(found.node)}: {its_name} is not shared by both halves of the core"


def _place(module: str) -> tuple[str, str] | None:
    """The row, and the file in it, that a dotted name inside the core leads to. A package itself has no name there."""
    for package, row in ROWS.items():
        if module == package:
            return package, ""
        if module.startswith(f"{package}."):
            inside = module.removeprefix(f"{package}.")
            files = [file for file in row if f"{inside}.".startswith(f"{file}.")]
            return package, max(files, key=len, default=inside)
    return None


def ownership_violations(source: Source) -> list[str]:
    """Where a worker's buffer is changed without its table of transitions."""
    if not source.module.startswith(WORKER) or source.module == f"{WORKER}.buffer":
        return []
    return [
        f"{source.at(node)}: .{node.attr} is changed in buffer.py only, through its table"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in OWNED
    ]
