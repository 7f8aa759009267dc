"""Mutants made from the syntax tree: every small change of a file that could be a bug, each at its place.

A mutant is one replacement of a stretch of the source. What no test can or should notice is left out: annotations,
docstrings, text for people and what is computed only for it, assertions, and module-level constants, whose values are
choices. `STRANGERS` lists what is left out by name.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

PEOPLE = ("note", "append_story")  # calls that only tell people
PEOPLE_NAMES = ("text", "hint")  # local names that become part of an error's text
PEOPLE_FUNCTIONS = ("story", "statistics", "__str__", "__repr__", "_reason")
PEOPLE_TABLES = ("counters",)  # statistics
STRANGERS = {"snapshot.py": "the picture for people, and its values", "settings.py": "choices, not rules"}

BOUNDARY: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}
OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any"}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Mechanical:
    """One replacement: bytes [start, stop) of the file become `new`. `line`: its statement's, 0 outside functions."""

    file: str
    function: str
    operator: str
    line: int
    start: int
    stop: int
    new: str
    before: str  # the source lines that it touches, joined
    after: str
    nth: int = 1  # of those that are the same but for their place

    @property
    def key(self) -> str:
        """Names it as long as its lines stay, wherever their function stands."""
        return f"{self.function} | {self.before} => {self.after}" + (f" #{self.nth}" if self.nth > 1 else "")

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.stop :]


def mutants_of(file: str, source: bytes) -> list[Mechanical]:
    """All mutants of one file, in the order of their places; two that make the same text are one."""
    maker = _Maker(file, source)
    maker.visit_body(ast.parse(source).body, inside=None)
    found: dict[bytes, Mechanical] = {}
    for mutant in sorted(maker.found, key=lambda m: (m.start, m.stop, m.operator, m.new)):
        found.setdefault(mutant.apply(source), mutant)
    found.pop(source, None)
    return list(found.values())


class _Maker:
    """Walks statements, then the expressions of each."""

    def __init__(self, file: str, source: bytes) -> None:
        self.file, self.source = file, source
        self.lines = [0]
        for line in source.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))
        self.found: list[Mechanical] = []
        self.function, self.statement = "", 0

    def _at(self, line: int, column: int) -> int:
        return self.lines[line - 1] + column

    def add(self, operator: str, node: ast.expr | ast.stmt, new: ast.AST | str) -> None:
        start = self._at(node.lineno, node.col_offset)
        stop = self._at(node.end_lineno or node.lineno, node.end_col_offset or 0)
        text = new if isinstance(new, str) else ast.unparse(new)
        if isinstance(new, ast.expr) and not isinstance(new, ast.Constant | ast.Name | ast.Call | ast.Attribute):
            text = f"({text})"
        first, last = self.lines[node.lineno - 1], self.lines[node.end_lineno or node.lineno]
        before = self.source[first:last].decode()
        after = (self.source[first:start] + text.encode() + self.source[stop:last]).decode()
        told = (" ".join(before.split()), " ".join(after.split()))
        self.found.append(Mechanical(self.file, self.function, operator, self.statement, start, stop, text, *told))

    # --- statements ---------------------------------------------------------------------------------------------------

    def visit_body(self, body: list[ast.stmt], inside: ast.AST | None) -> None:
        for statement in body:
            self.visit_statement(statement, inside)

    def visit_statement(self, node: ast.stmt, inside: ast.AST | None) -> None:
        """`inside`: the function that it stands in."""
        if _is_for_people(node) or (inside is None and _is_constant(node)):
            return
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            self._visit_definition(node)
            return
        self.statement = node.lineno if isinstance(inside, FUNCTIONS) else 0
        if isinstance(inside, FUNCTIONS):
            self._change_statement(node, inside)
        for expression in _expressions_of(node):
            self.visit_expression(expression)
        for part in _bodies_of(node):
            self.visit_body(part, inside)

    def _visit_definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        if node.name in PEOPLE_FUNCTIONS or node.name.endswith("_text"):
            return
        outer, self.function = self.function, f"{self.function}.{node.name}".lstrip(".")
        if isinstance(node, FUNCTIONS):
            self.statement = 0
            for default in [*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)]:
                self.visit_expression(default)
            self.visit_body(node.body, node)
        else:
            for statement in node.body:
                self.visit_statement(statement, None if not isinstance(statement, ast.AnnAssign) else node)
        self.function = outer

    def _change_statement(self, node: ast.stmt, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        match node:
            case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Continue() | ast.Break() | ast.Delete():
                self.add("statement removed", node, "pass")
            case ast.Raise():
                self.add("statement removed", node, "pass")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                self.add("statement removed", node, "pass")
            case ast.Assign(targets=[ast.Name(id=name)]) if _is_assigned_before(name, node, function):
                self.add("statement removed", node, "pass")
            case ast.Return(value=None):
                self.add("statement removed", node, "pass")
            case ast.Return(value=value) if value is not None:
                self._change_return(value, function)
            case ast.If(test=test) | ast.While(test=test) if not isinstance(test, ast.Compare | ast.UnaryOp):
                self.add("condition turned round", test, ast.UnaryOp(ast.Not(), test))
            case ast.Match(cases=cases):
                for case in cases:
                    if case.guard is not None:
                        self.add("guard removed", case.guard, "True")

    def _change_return(self, value: ast.expr, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        promised = ast.unparse(function.returns) if function.returns is not None else ""
        if isinstance(value, ast.Constant):
            return  # flipped as a constant
        if promised == "bool":
            for constant in ("True", "False"):
                self.add("constant returned", value, constant)
        elif promised.endswith("| None"):
            self.add("constant returned", value, "None")

    # --- expressions --------------------------------------------------------------------------------------------------

    def visit_expression(self, node: ast.expr) -> None:
        if isinstance(node, ast.JoinedStr):
            return
        self._change_expression(node)
        if isinstance(node, ast.Call) and _name(node.func) == "isinstance" and len(node.args) == 2:
            self._change_kinds(node.args[1])
            self.visit_expression(node.args[0])
            return
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.visit_expression(child)
            elif isinstance(child, ast.comprehension):
                self._change_comprehension(child)
            elif isinstance(child, ast.keyword):
                self.visit_expression(child.value)

    def _change_expression(self, node: ast.expr) -> None:
        match node:
            case ast.Compare(left=left, ops=ops, comparators=others):
                for place, op in enumerate(ops):
                    for name, table in (("boundary moved", BOUNDARY), ("comparison turned round", OPPOSITE)):
                        if type(op) in table:
                            changed = [*ops[:place], table[type(op)](), *ops[place + 1 :]]
                            self.add(name, node, ast.Compare(left, changed, others))
            case ast.BoolOp(op=op, values=values):
                self.add("and/or", node, ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values))
                for place in range(len(values)):
                    rest = [*values[:place], *values[place + 1 :]]
                    self.add("operand removed", node, rest[0] if len(rest) == 1 else ast.BoolOp(op, rest))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                self.add("not removed", node, operand)
            case ast.Constant(value=bool() as value):
                self.add("constant flipped", node, str(not value))
            case ast.Constant(value=int() as value):
                self.add("one more", node, str(value + 1))
                self.add("one less", node, f"({value - 1})" if value < 1 else str(value - 1))
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self.add("branches swapped", node, ast.IfExp(test, orelse, body))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC and not _is_text(left, right):
                self.add("arithmetic", node, ast.BinOp(left, ARITHMETIC[type(op)](), right))
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=keywords) if name in SWAPPED:
                self.add(f"{name}/{SWAPPED[name]}", node, ast.Call(ast.Name(SWAPPED[name]), arguments, keywords))

    def _change_kinds(self, kinds: ast.expr) -> None:
        """`isinstance(x, A | B)`: each alternative alone is left out in turn."""
        alternatives = _alternatives(kinds)
        for place in range(len(alternatives)) if len(alternatives) > 1 else ():
            rest = [ast.unparse(each) for each in [*alternatives[:place], *alternatives[place + 1 :]]]
            self.add("kind removed", kinds, " | ".join(rest))

    def _change_comprehension(self, node: ast.comprehension) -> None:
        self.visit_expression(node.iter)
        for condition in node.ifs:
            self.add("filter removed", condition, "True")
            self.visit_expression(condition)


# --- what is left out -------------------------------------------------------------------------------------------------


def _is_for_people(node: ast.stmt) -> bool:
    match node:
        case ast.Assert() | ast.Import() | ast.ImportFrom() | ast.Pass():
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))) if name in PEOPLE:
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AugAssign(target=ast.Name(id=name)):
            return name in PEOPLE_NAMES
        case ast.AugAssign(target=ast.Subscript(value=ast.Attribute(attr=name))):
            return name in PEOPLE_TABLES
    return False


def _is_constant(node: ast.stmt) -> bool:
    """A module-level constant: a choice."""
    return isinstance(node, ast.Assign | ast.AnnAssign)


def _is_assigned_before(name: str, node: ast.Assign, function: ast.AST) -> bool:
    """The name has a value without this assignment; otherwise its removal is only an error."""
    for other in ast.walk(function):
        if isinstance(other, ast.arg) and other.arg == name:
            return True
        is_stored = isinstance(other, ast.Name) and other.id == name and isinstance(other.ctx, ast.Store)
        if is_stored and other.lineno < node.lineno:
            return True
    return False


def _is_text(*operands: ast.expr) -> bool:
    return any(
        isinstance(each, ast.JoinedStr) or (isinstance(each, ast.Constant) and isinstance(each.value, str | bytes))
        for each in operands
    )


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _alternatives(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_alternatives(node.left), *_alternatives(node.right)]
    return list(node.elts) if isinstance(node, ast.Tuple) else [node]


def _expressions_of(node: ast.stmt) -> Iterator[ast.expr]:
    """The expressions of the statement itself, without its bodies, annotations and the names it assigns to."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "target", "targets", "type_comment", "returns"):
            continue
        if isinstance(value, ast.expr):
            yield value
        elif isinstance(value, list):
            yield from (each for each in value if isinstance(each, ast.expr))
            yield from (each.context_expr for each in value if isinstance(each, ast.withitem))
            yield from (each.guard for each in value if isinstance(each, ast.match_case) and each.guard is not None)


def _bodies_of(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        yield getattr(node, name, [])
    for part in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
        yield part.body
