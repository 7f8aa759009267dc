"""The tree drawn in `protocol/errors.py` is the tree that is there."""

import inspect
import re

from tensorhub.protocol import errors

BRANCH = re.compile(r"^(?P<indent>(?:│   |    )*)(?:├── |└── )(?P<name>\w+)(?:\((?P<base>\w+)\))? {2,}(?P<says>\S.*)$")
ROOT = re.compile(r"^(?P<name>\w+)(?:\((?P<base>\w+)\))? {2,}(?P<says>\S.*)$")
CLASSES = [
    found
    for found in vars(errors).values()
    if inspect.isclass(found) and issubclass(found, BaseException) and found.__module__ == errors.__name__
]


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


def test_the_drawing_is_the_tree() -> None:
    assert drawn_tree(errors.__doc__ or "") == {found.__name__: found.__bases__[0].__name__ for found in CLASSES}
    assert list(drawn_tree(errors.__doc__ or "")) == [found.__name__ for found in CLASSES], "the order differs"
