"""The drawing at the top of `protocol/errors.py`, read back as a tree."""

import re

BRANCH = re.compile(r"^(?P<indent>(?:│   |    )*)(?:├── |└── )(?P<name>\w+)(?:\((?P<base>\w+)\))? {2,}(?P<says>\S.*)$")
ROOT = re.compile(r"^(?P<name>\w+)(?:\((?P<base>\w+)\))? {2,}(?P<says>\S.*)$")


def drawn_tree(docstring: str) -> dict[str, str]:
    """Class → its base, as drawn, from top to bottom. A root's base is in brackets, or else `Exception`."""
    found: dict[str, str] = {}
    path: list[str] = []
    for line in docstring.splitlines():
        if not line.startswith("    "):
            continue
        line = line[4:]
        if branch := BRANCH.match(line):
            depth = len(branch["indent"]) // 4 + 1
            path = [*path[:depth], branch["name"]]
            found[branch["name"]] = path[depth - 1]
        elif root := ROOT.match(line):
            path = [root["name"]]
            found[root["name"]] = root["base"] or "Exception"
    return found
