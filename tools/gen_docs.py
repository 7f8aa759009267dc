"""Writes the tables in docs/ that say what the code says: errors, messages, settings, the buffer.

A page has places for them, between `<!-- generated: NAME -->` and `<!-- end -->`; everything else in it is prose and is
left alone. `--check` writes nothing and ends with 1 if a table is not what the code says now.
"""

import ast
import difflib
import io
import re
import sys
import tokenize
from collections.abc import Callable
from pathlib import Path

from tensorhub.protocol import errors, events, messages
from tensorhub.worker import buffer

ROOT = Path(__file__).resolve().parents[1]
PLACE = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

GROUPS = {  # the headings of protocol/messages.py → name of the table
    "the buffer of a worker": "buffer",
    "from a worker": "from-worker",
    "from the server": "from-server",
}


def cell(text: str) -> str:
    """Text that may stand in a table: one line, with no bar of its own."""
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    """A code span in a table; empty stays empty."""
    return f"`{cell(text)}`" if text else ""


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# --- errors -----------------------------------------------------------------------------------------------------------


def error_table() -> str:
    """Class, its base, code, retry or not, and what it means."""
    rows = []
    for found in vars(errors).values():
        if isinstance(found, type) and issubclass(found, errors.TensorHubError):
            retry = "yes" if found.retryable else "no"
            meaning = cell((found.__doc__ or "").split("\n\n")[0])
            base = found.__bases__[0].__name__
            kind = code(base) if issubclass(found.__bases__[0], errors.TensorHubError) else ""
            rows.append((code(found.__name__), kind, code(found.code), retry, meaning))
    return table(("class", "a kind of", "code", "retry", "what it means"), rows)


# --- messages ---------------------------------------------------------------------------------------------------------


class Module:
    """A module's source: its classes in order, with the comment that stands beside each field."""

    def __init__(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
        self.comments = {t.start[0]: t.string.strip("# -") for t in tokens if t.type == tokenize.COMMENT}
        self.classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
        self.constants = [node for node in ast.parse(text).body if isinstance(node, ast.Assign)]

    def heading_of(self, node: ast.ClassDef) -> str:
        """The last comment before the class that is a heading of the module."""
        before = [text for line, text in self.comments.items() if line < node.lineno and text in GROUPS]
        return before[-1] if before else ""

    def fields_of(self, node: ast.ClassDef) -> list[tuple[str, ...]]:
        """(name, type, default, comment) of each field."""
        return [
            (
                field.target.id,
                ast.unparse(field.annotation),
                ast.unparse(field.value) if field.value is not None else "",
                self.comments.get(field.lineno, ""),
            )
            for field in node.body
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        ]


def message_tables(heading: str) -> str:
    """Every message under one heading of the module: what it says, and its fields as a listing."""
    module = Module(Path(str(messages.__file__)))
    parts = []
    shown: dict[str, list[str]] = {}  # by class: the names of its fields
    for node in module.classes:
        if node.name.startswith("_") or GROUPS.get(module.heading_of(node)) != heading:
            continue
        tags = [ast.literal_eval(word.value) for word in node.keywords if word.arg == "tag"]
        tag = f" (`{tags[0]}`)" if tags else ""
        part = f"**{node.name}**{tag}: {(ast.get_docstring(node) or '').strip()}\n"
        fields = module.fields_of(node)
        names = [field[0] for field in fields]
        same = next((each for each, those in shown.items() if len(those) > 3 and names[: len(those)] == those), "")
        if same:
            fields = fields[len(shown[same]) :]
            part += f"Fields as {same} has them{', and:' if fields else '.'}\n"
        if fields:
            part += "\n" + listing(fields)
        parts.append(part)
        shown[node.name] = names
    return "\n".join(parts)


EMPTY = {"None", "''", "b''", "()", "{}", "0", "0.0", "False", "Empty()", "Digest('')", "Number(0)", "Ticket(0)"}


def listing(fields: list[tuple[str, ...]]) -> str:
    """Fields with their comments in one column; `?` marks one that is empty, zero or false where it is left out."""
    return noted([(field_text(*field[:3]), field[3]) for field in fields])


def field_text(name: str, kind: str, default: str) -> str:
    """A field as a message has it."""
    if default in EMPTY:
        return f"{name}?: {kind.removesuffix(' | None')}"
    return f"{name}: {kind}" + (f" = {default}" if default else "")


def noted(lines: list[tuple[str, str]], language: str = "text") -> str:
    """Lines of code, with their comments in one column."""
    width = max((len(line) for line, why in lines if why), default=0)
    shown = "".join(f"{line:<{width}}  # {why}\n" if why else f"{line}\n" for line, why in lines)
    return f"```{language}\n{shown}```\n"


# --- the buffer -------------------------------------------------------------------------------------------------------


def buffer_table() -> str:
    """Each transition: what triggers it, and why it happens."""
    lines = [(f"{each.trigger}: {tag_of(each.before)} → {tag_of(each.after)}", each.why) for each in buffer.TRANSITIONS]
    return noted(lines)


def tag_of(state: type) -> str:
    """What a state is called in a report."""
    return str(state.__struct_config__.tag)  # type: ignore[attr-defined]


def limit_table() -> str:
    """The limits on what may travel."""
    module = Module(Path(str(messages.__file__)))
    lines = []
    for node in module.constants:
        name = ast.unparse(node.targets[0])
        if name.startswith("MAX_") or name == "PROTOCOL":
            value = getattr(messages, name)
            shown = f"{value:_}" if isinstance(value, int) else repr(value)
            lines.append((f"{name} = {shown}", module.comments.get(node.lineno, "")))
    return noted(lines)


def setting_table(of: str) -> str:
    """The settings of a worker, or of the reference server."""
    from tensorhub.runtime.config import table as setting_rows

    rows = [(code(r.name), code(r.variable), code(r.default), cell(r.text)) for r in setting_rows() if r.of == of]
    return table(("setting", "variable", "default", "meaning"), rows)


def event_table() -> str:
    """Each kind of event: whether the log has it as a warning, what it means, and its own fields."""
    module = Module(Path(str(events.__file__)))
    of_kind = {kind.__name__: kind for kind in events.Event.__args__}
    rows = []
    for node in module.classes:
        if node.name not in of_kind:
            continue
        kind = of_kind[node.name].__struct_config__.tag
        fields = [f"{code(name)}{f' ({why})' if why else ''}" for name, _, _, why in module.fields_of(node)]
        rows.append((code(kind), cell((ast.get_docstring(node) or "").strip()), cell("; ".join(fields))))
    return table(("kind", "what has happened", "fields"), rows)


def metric_table(*, of_worker: bool) -> str:
    """The metrics of one page, as queries name them."""
    from tensorhub.runtime.metrics import METRICS, OF_WORKER

    rows = []
    for metric in METRICS:
        if metric.is_of_worker == of_worker:
            own = ", ".join(code(label) for label in metric.labels if not of_worker or label not in OF_WORKER)
            rows.append((code(metric.shown_name), metric.kind, own, cell(metric.text)))
    return table(("metric", "kind", "labels", "meaning"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "events": event_table,
    "server-metrics": lambda: metric_table(of_worker=False),
    "worker-metrics": lambda: metric_table(of_worker=True),
    "error-table": error_table,
    "limits": limit_table,
    "buffer-table": buffer_table,
    "server-settings": lambda: setting_table("server"),
    "worker-settings": lambda: setting_table("worker"),
    **{f"messages-{name}": (lambda name=name: message_tables(name)) for name in GROUPS.values()},
}


def written(text: str) -> str:
    """The page with its tables as they are now."""
    return PLACE.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n{found[3]}", text)


def main(*, check: bool) -> int:
    """Rewrite every page that needs it, or only say which would change."""
    stale = 0
    for page in sorted((ROOT / "docs").rglob("*.md")):
        before = page.read_text(encoding="utf-8")
        after = written(before)
        if before == after:
            continue
        stale += 1
        name = page.relative_to(ROOT).as_posix()
        if check:
            difference = difflib.unified_diff(before.splitlines(), after.splitlines(), name, "as the code says", n=0)
            print(f"{name} is out of date: run `make docs`", *difference, sep="\n")
        else:
            page.write_text(after, encoding="utf-8")
            print(f"rewrote {name}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
