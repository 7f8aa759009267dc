"""What keeps the machines and `tests/sim/` the same on every run: no clock, no chance, no world, no order of hashes.

What they may import is a list, not what they may not: a new module of the standard library is impure until looked at.
"""

import ast
from collections.abc import Iterator

from .sources import PACKAGE, FunctionNode, Source, dotted, imports_of

PURE_MODULES = frozenset(
    {
        *(
            "__future__",
            "abc",
            "bisect",
            "collections",
            "copy",
            "dataclasses",
            "enum",
            "functools",
            "hashlib",
            "heapq",
            "struct",
            "zlib",
        ),
        *("itertools", "math", "operator", "re", "string", "textwrap", "types", "typing", "msgspec"),
    }
)

# Folder or file → what it may import beyond that, and why.
ALSO_PURE: dict[str, tuple[str, ...]] = {
    "src/tensorhub/protocol/manifest.py": ("json",),  # whole numbers of any length, where msgspec has 64 bits
    "tests/sim/": ("random",),  # only Random(seed), see below
    "tests/sim/runner.py": ("time", "concurrent", "multiprocessing", "os", "traceback"),  # runs many seeds
}

PURE = (*(f"{PACKAGE}.{folder}" for folder in ("protocol", "server", "worker")), "tests.sim")
SHELLS = ("tests.sim.__main__", "tests.sim.seeds", "tests.sim.sweep")  # run many histories

IMPURE_CALLS = frozenset(
    {
        *("id", "hash", "open", "print", "input", "eval", "exec", "compile"),
        *("breakpoint", "globals", "locals", "__import__"),
    }
)
SET_OPERATORS = (ast.BitAnd, ast.BitOr, ast.BitXor, ast.Sub)
ORDERLESS = frozenset({"sorted", "len"})  # what may be asked of a set: the answer is the same in any order
CHANGES = frozenset({"add", "discard", "remove", "update", "clear"})


def is_pure(source: Source) -> bool:
    """The rules of this module hold there."""
    return source.module.startswith(PURE) and source.module not in SHELLS


def purity_violations(source: Source) -> list[str]:
    """Everything in the file that could make two runs of one history differ."""
    return [*_impure_imports(source), *_impure_calls(source), *_set_violations(source)]


def _impure_imports(source: Source) -> Iterator[str]:
    allowed = {*PURE_MODULES}
    for where, modules in ALSO_PURE.items():
        if source.path.startswith(where):
            allowed.update(modules)
    for found in imports_of(source):
        top = found.module.split(".")[0]
        if top not in (PACKAGE, "tests") and top not in allowed:
            yield f"{source.at(found.node)}: imports {top}, which is not on the list of pure modules"
        elif top == "random" and found.name not in (None, "Random"):
            yield f"{source.at(found.node)}: random.{found.name} is shared chance; use random.Random(seed)"


def _impure_calls(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and dotted(node).startswith("random.") and dotted(node) != "random.Random":
            yield f"{source.at(node)}: {dotted(node)} is shared chance; use random.Random(seed)"
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        if name in IMPURE_CALLS:
            yield f"{source.at(node)}: calls {name}()"
        elif name in ("random.Random", "Random") and not node.args and not node.keywords:
            yield f"{source.at(node)}: {name}() without a seed takes one from the machine"


# --- sets -------------------------------------------------------------------------------------------------------------


def _set_violations(source: Source) -> Iterator[str]:
    """A set may be asked for membership, compared, sorted and counted, also under a name; it may not show its order."""
    parents = {child: node for node in ast.walk(source.tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(source.tree):
        if not _is_set(node) or _is_set(parents.get(node)):
            continue
        name = _name_given_by(parents[node])
        if not name and not _is_orderless_use(node, parents):
            yield f"{source.at(node)}: a set whose order could show ({ast.unparse(node)[:60]}); use a dict or sorted()"
        for use in ast.walk(_scope_of(node, parents)) if name else ():
            is_load = isinstance(use, ast.Name) and use.id == name and isinstance(use.ctx, ast.Load)
            if is_load and not _is_orderless_use(use, parents):
                yield f"{source.at(use)}: {name} is a set whose order could show here; use a dict or sorted()"


def _is_set(node: ast.AST | None) -> bool:
    match node:
        case ast.Set() | ast.SetComp():
            return True
        case ast.Call(func=ast.Name(id="set" | "frozenset")):
            return True
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, SET_OPERATORS):
            return any(_is_set(side) or _is_view_of_keys(side) for side in (left, right))
    return False


def _is_view_of_keys(node: ast.AST) -> bool:
    """`d.keys() & e.keys()` makes a set, though no word of it says so."""
    match node:
        case ast.Call(func=ast.Attribute(attr="keys" | "items"), args=[], keywords=[]):
            return True
    return False


def _name_given_by(parent: ast.AST) -> str:
    """The local or module name that this assignment gives; empty for anything else, attributes too."""
    match parent:
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return name
        case ast.AugAssign(target=ast.Name(id=name), op=op) if isinstance(op, SET_OPERATORS):
            return name
    return ""


def _scope_of(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> ast.AST:
    while not isinstance(node, FunctionNode | ast.Module):
        node = parents[node]
    return node


def _is_orderless_use(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    match parents[node]:
        case ast.Compare():
            return True
        case ast.Call(func=ast.Name(id=name), args=[first, *_]):
            return name in ORDERLESS and first is node
        case ast.Attribute(attr=attribute) as method:
            return attribute in CHANGES and isinstance(parents[method], ast.Call)
        case ast.BinOp(op=op) as larger if isinstance(op, SET_OPERATORS):
            return _is_orderless_use(larger, parents)
    return False
