"""The core with another source than on disk, for this process alone: a mutant's, or one that notes which lines ran.

Call `install` before anything of the package is imported.
"""

import ast
import builtins
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import cast

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "src" / "tensorhub" / "core"

Change = Callable[[str, bytes], CodeType]  # (file below the package, its source) → what is run instead
Ran = dict[str, set[int]]  # by file: first lines of statements inside functions


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles what `change` makes of the source, and keeps nothing on disk."""

    def __init__(self, name: str, path: Path, change: Change) -> None:
        super().__init__(name, str(path))
        self.change = change

    def get_code(self, fullname: str) -> CodeType:
        path = Path(self.path)
        return self.change(f"core/{path.name}", path.read_bytes())


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, change: Change) -> None:
        self.change = change

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if package != "tensorhub.core":
            return None
        file = CORE / f"{name}.py"
        spec = importlib.machinery.ModuleSpec(fullname, _Loader(fullname, file, self.change), origin=str(file))
        spec.has_location = True
        return spec


def install(change: Change) -> None:
    """From now on the modules of the core are what `change` compiles."""
    loaded = [name for name in sys.modules if name.split(".")[0] == "tensorhub"]
    assert not loaded, f"too late: {loaded[0]} is imported already"
    sys.meta_path.insert(0, _Finder(change))


def mutated(file: str, text: bytes) -> Change:
    """The core with this text in place of that file."""

    def change(name: str, source: bytes) -> CodeType:
        return compile(text if name == file else source, str(CORE / Path(name).name), "exec")

    return change


def recording(ran: Ran) -> Change:
    """The core as it is, which notes in `ran` each statement that it begins."""

    def change(name: str, source: bytes) -> CodeType:
        mark = f"__ran_{Path(name).stem}__"
        setattr(builtins, mark, ran.setdefault(name, set()).add)
        tree = _Marker(mark).visit(ast.parse(source))
        return cast(CodeType, compile(ast.fix_missing_locations(tree), str(CORE / Path(name).name), "exec"))

    return change


class _Marker(ast.NodeTransformer):
    """Puts a call of `mark` with the line before every statement inside a function."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self.depth = 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if self.depth and isinstance(body, list) and not isinstance(node, ast.ClassDef):
                setattr(node, name, [each for statement in body for each in (self._marked(statement), statement)])
        return node

    def _marked(self, statement: ast.stmt) -> ast.stmt:
        call = ast.Call(ast.Name(self.mark, ast.Load()), [ast.Constant(statement.lineno)], [])
        return ast.copy_location(ast.Expr(call), statement)
