"""The files under test, parsed once, and what every checker asks of them."""

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "tensorhub"

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One Python file. `path` is relative to the project's root, with slashes."""

    path: str
    text: str
    tree: ast.Module = field(repr=False)

    @property
    def module(self) -> str:
        """`tensorhub.worker`; a package has the name of its folder."""
        return self.path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def package(self) -> str:
        """What a relative import of one dot is relative to."""
        return self.module if self.path.endswith("/__init__.py") else self.module.rpartition(".")[0]

    def at(self, node: ast.AST) -> str:
        """Where a finding is, so that an editor can jump there."""
        return f"{self.path}:{getattr(node, 'lineno', 1)}"

    def comment_on(self, line: int) -> str:
        """The comment at the end of that line, without its `#`; empty if there is none."""
        return comments_of(self).get(line, "")


@cache
def comments_of(source: Source) -> dict[int, str]:
    """Line number → comment of every comment in the file."""
    tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
    return {t.start[0]: t.string.lstrip("#").strip() for t in tokens if t.type == tokenize.COMMENT}


def snippet(text: str, path: str = "src/tensorhub/server/snippet.py") -> Source:
    """A piece of code as if it lay at `path`."""
    return Source(path, text, ast.parse(text))


@cache
def sources(folder: str) -> tuple[Source, ...]:
    """Every Python file below a folder of the project, in order."""
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found.append(Source(path.relative_to(ROOT).as_posix(), text, ast.parse(text, filename=str(path))))
    return tuple(found)


@dataclass(frozen=True)
class Import:
    """One imported name, with relative imports resolved. `name` is None for `import module`."""

    module: str
    name: str | None
    node: ast.stmt


def imports_of(source: Source) -> Iterator[Import]:
    """Every import in the file, wherever it stands: in a function or under TYPE_CHECKING too."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, None, node)
        elif isinstance(node, ast.ImportFrom):
            base = source.package.split(".") if node.level else []
            base = base[: len(base) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(module, alias.name, node)


def functions_of(source: Source) -> Iterator[FunctionNode]:
    """Every function and method, nested ones too."""
    for node in ast.walk(source.tree):
        if isinstance(node, FunctionNode):
            yield node


def dotted(node: ast.expr) -> str:
    """`a.b.c` for an attribute of names; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (value := dotted(node.value)):
        return f"{value}.{node.attr}"
    return ""
