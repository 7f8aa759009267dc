"""Code that runs what it is sent, hides what went wrong, or waits for a time instead of a condition."""

import ast
import re
from collections.abc import Iterator

from .sources import Source, comments_of, dotted, functions_of, imports_of

UNSAFE_MODULES = frozenset(["pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "jsonpickle"])
UNSAFE_CALLS = frozenset(["eval", "exec", "compile", "__import__"])
BLIND = frozenset({"Exception", "BaseException"})
NOQA = re.compile(r"noqa(?P<codes>:\s*[A-Z]+[0-9]+(?:\s*,\s*[A-Z]+[0-9]+)*)?(?P<reason>.*)")
MAX_POLL_S = 0.1

# Sleeps in tests that wait for nothing: file::function → what the time is for.
ALLOWED_SLEEPS: dict[str, str] = {}


def unsafe_violations(source: Source) -> list[str]:
    """Ways in which bytes from a stranger could become code."""
    wrong = [
        f"{source.at(found.node)}: {found.module} runs what it reads; messages are msgspec structs"
        for found in imports_of(source)
        if found.module.split(".")[0] in UNSAFE_MODULES
    ]
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        says = {keyword.arg: keyword.value for keyword in node.keywords}
        if name in UNSAFE_CALLS:
            wrong.append(f"{source.at(node)}: calls {name}()")
        if "allow_pickle" in says and not _is_constant(says["allow_pickle"], False):
            wrong.append(f"{source.at(node)}: {name}(allow_pickle=…) reads pickles")
        if name == "torch.load" and not _is_constant(says.get("weights_only"), True):
            wrong.append(f"{source.at(node)}: torch.load without weights_only=True reads pickles")
    return wrong


def _is_constant(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def blind_violations(source: Source) -> list[str]:
    """Handlers that take everything: each raises again, or says on its line why it may end there."""
    wrong = []
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ExceptHandler) or not _is_blind(node):
            continue
        raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
        if not raises and not _reason(source.comment_on(node.lineno)):
            wrong.append(f"{source.at(node)}: takes every exception; name those meant, or say on this line why")
    return wrong


def _is_blind(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(dotted(found) in BLIND for found in types)


def _reason(comment: str) -> str:
    found = NOQA.match(comment)
    return (found["reason"] if found else comment).strip(" -–—:")


def noqa_violations(source: Source) -> list[str]:
    """Every `noqa` and `type: ignore` names its rule; a `noqa` in the product also says why."""
    wrong = []
    for line, comment in comments_of(source).items():
        where = f"{source.path}:{line}"
        found = NOQA.match(comment)
        if found and not found["codes"]:
            wrong.append(f"{where}: noqa without a rule silences all of them")
        elif found and source.path.startswith("src/") and not _reason(comment):
            wrong.append(f"{where}: noqa without a reason after it")
        if re.match(r"type:\s*ignore(?!\[)", comment):
            wrong.append(f"{where}: type: ignore without [rule]")
    return wrong


def sleep_violations(source: Source) -> list[str]:
    """Tests that wait for a time. Polling is a short sleep inside a `while`; everything else has its reason listed."""
    return [
        f"{source.at(call)}: {function} waits for a time; wait for a condition with a deadline"
        for function, call, is_poll in _sleeps(source)
        if not is_poll and f"{source.path}::{function}" not in ALLOWED_SLEEPS
    ]


def _sleeps(source: Source) -> Iterator[tuple[str, ast.Call, bool]]:
    """(function, call, is a poll) of every sleep that is longer than nothing."""
    polls = {
        call
        for loop in ast.walk(source.tree)
        if isinstance(loop, ast.While)
        for call in ast.walk(loop)
        if isinstance(call, ast.Call) and _is_short(call)
    }
    owner = {call: f.name for f in functions_of(source) for call in ast.walk(f)}  # the innermost comes last
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        is_sleep = dotted(node.func) in ("time.sleep", "asyncio.sleep", "sleep")
        is_yield = isinstance(node.args[0], ast.Constant) and node.args[0].value == 0
        if is_sleep and not is_yield:
            yield owner.get(node, "<module>"), node, node in polls


def _is_short(call: ast.Call) -> bool:
    match call.args:
        case [ast.Constant(value=float() | int() as seconds)]:
            return seconds <= MAX_POLL_S
    return False
