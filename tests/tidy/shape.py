"""Short files, short functions, and words at the top of each."""

import ast

from .sources import Source, functions_of

MOST_LINES_OF_FILE = 900
MOST_LINES_OF_FUNCTION = 69


def shape_violations(source: Source) -> list[str]:
    """Files and functions that have grown too long, and what has no docstring."""
    wrong = []
    lines = source.text.count("\n")
    if lines > MOST_LINES_OF_FILE:
        wrong.append(f"{source.path}:1: {lines} lines; at most {MOST_LINES_OF_FILE}")
    for function in functions_of(source):
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        if lines > MOST_LINES_OF_FUNCTION:
            wrong.append(f"{source.at(function)}: {function.name} has {lines} lines; at most {MOST_LINES_OF_FUNCTION}")
    if not ast.get_docstring(source.tree):
        wrong.append(f"{source.path}:1: no docstring: what is this module, in a sentence that a user understands?")
    for node in source.tree.body:
        is_named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if is_named and not node.name.startswith("_") and not ast.get_docstring(node) and not _is_overload(node):
            wrong.append(f"{source.at(node)}: {node.name} is public and has no docstring")
    return wrong


def _is_overload(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    return any(isinstance(found, ast.Name) and found.id == "overload" for found in node.decorator_list)
