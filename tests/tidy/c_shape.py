"""The same limits for C as for Python: short files, short functions, and words at the top of each."""

import re
from collections.abc import Iterator
from pathlib import Path

from .shape import MOST_LINES_OF_FILE, MOST_LINES_OF_FUNCTION
from .sources import ROOT

FOLDER = "src/tensorhub/transport/native"
OPENS = re.compile(r"^[A-Za-z_].*\(.*")
WIDEST = 120


def c_files() -> list[Path]:
    """Every C file of the product."""
    return sorted(path for path in (ROOT / FOLDER).iterdir() if path.suffix in (".c", ".h"))


def c_violations(name: str, text: str) -> list[str]:
    """Files, functions and lines that have grown too long, and files that do not say what they are."""
    lines = text.splitlines()
    wrong = []
    if len(lines) > MOST_LINES_OF_FILE:
        wrong.append(f"{name}:1: {len(lines)} lines; at most {MOST_LINES_OF_FILE}")
    if not text.startswith("/* "):
        wrong.append(f"{name}:1: no comment: what is this file, in a sentence that a user understands?")
    for first, length in _functions(lines):
        if length > MOST_LINES_OF_FUNCTION:
            wrong.append(f"{name}:{first}: a function of {length} lines; at most {MOST_LINES_OF_FUNCTION}")
    wrong += [f"{name}:{at}: {len(line)} columns" for at, line in enumerate(lines, 1) if len(line) > WIDEST]
    return wrong


def _functions(lines: list[str]) -> Iterator[tuple[int, int]]:
    """(first line, how many) of each: it begins at the margin, and so does the brace that ends it."""
    first = 0
    for at, line in enumerate(lines, 1):
        if OPENS.match(line) and not line.rstrip().endswith(";"):
            first = at
        elif line == "}" and first:
            yield first, at - first + 1
            first = 0
