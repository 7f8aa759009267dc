"""The server's rules change nothing: facts in, decisions out.

No file of `core/server/rules/` assigns to an attribute or an item of what it was given, or calls a method that changes
it. `facts` is held to the same.
"""

import ast
from collections.abc import Iterator

from .core_order import SERVER
from .sources import Source, dotted, functions_of

CHANGES = frozenset(
    {
        *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "push"),
        *("remove", "setdefault", "sort", "update", "wake", "mark_dirty", "mark_replica_dirty", "mark_busy_dirty"),
        *("mark_everyone_dirty", "next_number", "forget", "record", "note_exists", "fail", "move", "lose", "arrive"),
        *("note_ended", "witness", "begin", "end", "close", "note", "rest", "wait", "bind_content", "note_said"),
    }
)


def rule_violations(source: Source) -> list[str]:
    """Where a rule changes something that it did not make itself."""
    if not source.module.startswith(f"{SERVER}.rules.") and source.module != f"{SERVER}.facts":
        return []
    return [wrong for function in functions_of(source) for wrong in _changes_in(source, function)]


def _changes_in(source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    own = {target.id for node in ast.walk(function) if _makes(node) for target in _names_given(node)}
    for node in ast.walk(function):
        for target in _targets_of(node):
            root = _root(target)
            if isinstance(target, ast.Attribute) or (isinstance(target, ast.Subscript) and root not in own):
                yield f"{source.at(node)}: {function.name} changes {ast.unparse(target)}"
        method = node.func if isinstance(node, ast.Call) else None
        if isinstance(method, ast.Attribute) and method.attr in CHANGES and _root(method.value) not in own:
            yield f"{source.at(node)}: {function.name} calls {ast.unparse(method)}"


def _makes(node: ast.AST) -> bool:
    """It gives a name to a list, a dict or a Counter that is made right here."""
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    values = value.elts if isinstance(value, ast.Tuple) else [value]
    made = (ast.List, ast.Dict, ast.ListComp, ast.DictComp)
    return any(
        isinstance(each, made) or (isinstance(each, ast.Call) and dotted(each.func) in ("Counter", "list", "dict"))
        for each in values
    )


def _names_given(node: ast.AST) -> Iterator[ast.Name]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    for target in targets:
        for name in target.elts if isinstance(target, ast.Tuple) else [target]:
            if isinstance(name, ast.Name):
                yield name


def _targets_of(node: ast.AST) -> Iterator[ast.expr]:
    found: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        found = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        found = [node.target]
    for target in found:
        yield from target.elts if isinstance(target, ast.Tuple) else [target]


def _root(node: ast.expr) -> str:
    """The name that a chain of attributes, items and calls begins with."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
