"""The shape of a file: its length, the length of its functions, and words at the top of each."""

import ast
from collections.abc import Iterator
from pathlib import Path

from .sources import ROOT, Source, functions_of

MAX_FILE_LINES = 900
MAX_FUNCTION_LINES = 69
MAX_COLUMNS = 120


def shape_violations(source: Source) -> Iterator[str]:
    """Files and functions that are too long, and public names without a docstring."""
    lines = source.text.count("\n")
    if lines > MAX_FILE_LINES:
        yield f"{source.path}:1: {lines} lines; at most {MAX_FILE_LINES}"
    for function in functions_of(source):
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        if lines > MAX_FUNCTION_LINES:
            yield f"{source.at(function)}: {function.name} has {lines} lines; at most {MAX_FUNCTION_LINES}"
    if not ast.get_docstring(source.tree):
        yield f"{source.path}:1: the module has no docstring"
    for node in source.tree.body:
        is_named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if is_named and not node.name.startswith("_") and not ast.get_docstring(node) and not _is_overload(node):
            yield f"{source.at(node)}: {node.name} is public and has no docstring"


def _is_overload(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    return any(isinstance(found, ast.Name) and found.id == "overload" for found in node.decorator_list)


def c_files() -> list[Path]:
    """Every C file of the product."""
    return sorted(path for path in (ROOT / "src").rglob("*.[ch]"))


def c_violations(name: str, text: str) -> Iterator[str]:
    """The same limits for C: file and lines, and a comment at the top."""
    lines = text.splitlines()
    if len(lines) > MAX_FILE_LINES:
        yield f"{name}:1: {len(lines)} lines; at most {MAX_FILE_LINES}"
    if not text.startswith("/* "):
        yield f"{name}:1: the file does not begin with a comment"
    yield from (f"{name}:{at}: {len(line)} columns" for at, line in enumerate(lines, 1) if len(line) > MAX_COLUMNS)
