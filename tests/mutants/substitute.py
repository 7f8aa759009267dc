"""The core with another source than on disk, for this process alone: a mutant's, or one that notes which lines ran.

Call `install` before anything of the package is imported.
"""

import ast
import builtins
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType
from typing import cast

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "tensorhub"
CORE = ("protocol", "server", "worker")  # its folders

Change = Callable[[str, bytes], CodeType]  # (file below the package, its source) → what is run instead
PREFIX = "tensorhub."
compiled: dict[str, CodeType] = {}  # files of the core as they are, so that each is compiled once for many mutants
Ran = dict[str, set[int]]  # by file: first lines of statements inside functions


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles what `change` makes of the source, and keeps nothing on disk."""

    def __init__(self, name: str, path: str, change: Change) -> None:
        super().__init__(name, path)
        self.change = change

    def get_code(self, fullname: str) -> CodeType:
        path = Path(self.path)
        return self.change(file_of(path), path.read_bytes())


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, change: Change) -> None:
        self.change = change

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        parts = fullname.split(".")[1:]
        if not fullname.startswith(PREFIX) or parts[0] not in CORE:
            return None
        place = PACKAGE.joinpath(*parts)
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        spec = importlib.machinery.ModuleSpec(
            fullname, _Loader(fullname, str(file), self.change), origin=str(file), is_package=place.is_dir()
        )
        if place.is_dir():
            spec.submodule_search_locations = [str(place)]
        spec.has_location = True
        return spec


def file_of(path: Path) -> str:
    """How a file of the core is called: below the package."""
    return path.relative_to(PACKAGE).as_posix()


def files() -> list[Path]:
    """Every file of the core, in one order."""
    return sorted(path for folder in CORE for path in (PACKAGE / folder).rglob("*.py"))


def compile_all() -> None:
    """Now, for all processes that are forked from this one."""
    for path in files():
        compiled[file_of(path)] = compile(path.read_bytes(), str(path), "exec")


def install(change: Change) -> None:
    """From now on the modules of the core are what `change` compiles."""
    loaded = [name for name in sys.modules if name.split(".")[0] == "tensorhub"]
    assert not loaded, f"too late: {loaded[0]} is imported already"
    sys.meta_path.insert(0, _Finder(change))


def unchanged(name: str, source: bytes) -> CodeType:
    """The core as it is."""
    return compiled.get(name) or cast(CodeType, compile(source, str(PACKAGE / name), "exec"))


def mutated(file: str, text: bytes) -> Change:
    """The core with this text in place of that file."""

    def change(name: str, source: bytes) -> CodeType:
        return compile(text, str(PACKAGE / name), "exec") if name == file else unchanged(name, source)

    return change


@cache
def _texts() -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in files()}


def where(text: str) -> str:
    """The file in which this stretch of source stands, once in all of the core. Raises ValueError otherwise."""
    found = [path for path, source in _texts().items() for _ in range(source.count(text))]
    if len(found) != 1:
        names = ", ".join(file_of(path) for path in found) or "no file"
        raise ValueError(f"this is to stand once in the core, and stands in {names}: {text!r}")
    return file_of(found[0])


def replaced(old: str, new: str) -> Change:
    """The core with `new` in the one place where `old` stands, whichever file that is."""
    file = where(old)
    return mutated(file, (PACKAGE / file).read_text(encoding="utf-8").replace(old, new).encode())


def recording(ran: Ran) -> Change:
    """The core as it is, which notes in `ran` each statement that it begins."""

    def change(name: str, source: bytes) -> CodeType:
        mark = "__ran_" + "".join(letter if letter.isalnum() else "_" for letter in name) + "__"
        setattr(builtins, mark, ran.setdefault(name, set()).add)
        tree = _Marker(mark).visit(ast.parse(source))
        return cast(CodeType, compile(ast.fix_missing_locations(tree), str(PACKAGE / name), "exec"))

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
