"""Code that runs what it is sent, silences a rule without a reason, or waits for a time instead of a condition."""

import ast
import re

from .sources import Source, comments_of, dotted, imports_of

UNSAFE_MODULES = frozenset(["pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "jsonpickle"])
UNSAFE_CALLS = frozenset(["eval", "exec", "compile", "__import__"])
NOQA = re.compile(r"noqa(?P<codes>:\s*[A-Z]+[0-9]+(?:\s*,\s*[A-Z]+[0-9]+)*)?(?P<reason>.*)")
MAX_POLL_S = 0.1
SLEEPS = ("time.sleep", "asyncio.sleep", "sleep")


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


def noqa_violations(source: Source) -> list[str]:
    """Every `noqa` says why. That it names its rule, and that no handler takes everything without one, ruff sees."""
    return [
        f"{source.path}:{line}: noqa without a reason after it"
        for line, comment in comments_of(source).items()
        if (found := NOQA.match(comment)) and not found["reason"].strip(" -–—:")
    ]


def sleep_violations(source: Source) -> list[str]:
    """Tests that wait for a time. Polling is a short sleep inside a `while`."""
    polls = {
        call
        for loop in ast.walk(source.tree)
        if isinstance(loop, ast.While)
        for call in ast.walk(loop)
        if isinstance(call, ast.Call) and _is_short(call)
    }
    return [
        f"{source.at(node)}: waits for a time; wait for a condition with a deadline"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and dotted(node.func) in SLEEPS and node not in polls and not _is_yield(node)
    ]


def _is_yield(call: ast.Call) -> bool:
    return not call.args or (isinstance(call.args[0], ast.Constant) and call.args[0].value == 0)


def _is_short(call: ast.Call) -> bool:
    match call.args:
        case [ast.Constant(value=float() | int() as seconds)]:
            return seconds <= MAX_POLL_S
    return False
