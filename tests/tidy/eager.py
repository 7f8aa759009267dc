"""No lazy generator under a name in the server's half of the core.

Compiled, a generator expression is a list: made at once, whole (decision 0035). One that is given to `any` or `sum` is
a loop all the same. One that is kept under a name, or gone through until something is found, would go through the whole
fleet: that has happened twice, and no test of what is decided can see it.
"""

import ast

from .core_order import SERVER
from .sources import Source

TAKE_ALL = frozenset({"any", "all", "next", "sum", "min", "max", "sorted", "tuple", "list", "set", "dict", "Counter"})
TAKE_ALL_METHODS = frozenset({"update", "extend", "fromkeys", "join"})


def lazy_violations(source: Source) -> list[str]:
    """Where a generator expression is anything but the argument of a call that is known to do well with it."""
    if not source.module.startswith(SERVER):
        return []
    fine = {
        argument
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and _takes_all(node.func)
        for argument in node.args
    }
    return [
        f"{source.at(node)}: make it a list, or a function that is asked: {ast.unparse(node)}"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.GeneratorExp) and node not in fine
    ]


def _takes_all(called: ast.expr) -> bool:
    if isinstance(called, ast.Attribute):
        return called.attr in TAKE_ALL_METHODS
    return isinstance(called, ast.Name) and called.id in TAKE_ALL
