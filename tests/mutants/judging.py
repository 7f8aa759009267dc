"""Who judges a mutant: tests of the core and scenarios, types, then whole histories; each in a process of its own.

The judges are first run once over the core as it is, which records what each of them executes and how long it takes.
A mutant is then shown only to those that execute its line, up to the first that fails: first the one that noticed it
the last time, then the cheapest. Times are processor time, so that a busy machine changes no verdict. Nothing here
imports the package before it is substituted.
"""

import contextlib
import io
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from types import FrameType
from typing import Any

import hypothesis  # noqa: F401 (loaded once, before the forks)
import msgspec  # noqa: F401
import pytest

from . import histories, typed
from .substitute import ROOT, Change, Ran, install

TESTS = ("tests/core", "tests/scenarios")
USUAL_S = 0.5  # of what nobody has measured
QUIET = ["-q", "-x", "--no-header", "-p", "no:cacheprovider", "--tb=line", "-p", "no:timeout"]
MAX_MEMORY = 4 * 2**30  # bytes of address space of one mutant's process
SLOWER = 20.0  # a test or seed that takes so many times its usual processor time, and 5 s more, hangs
PATIENCE_S = 5.0
ENOUGH_ALIKE = 25  # seeds whose histories are the same to the letter: further ones would be so too


@dataclass
class Judge:
    """A test or a history by its name: what it executes, and the processor seconds that it takes."""

    name: str
    cost_s: float = USUAL_S
    lines: dict[str, list[int]] = field(default_factory=dict)
    digest: str = ""  # of a history

    def sees(self, file: str, line: int) -> bool:
        """It executes that statement; what stands outside functions is executed by all who load the file."""
        return line in self.lines.get(file, ()) if line else True


@dataclass
class Verdict:
    """What became of a mutant."""

    outcome: str  # "killed", "timed out", "survived"
    by: str = ""
    why: str = ""
    took_s: float = 0.0
    seeds: int = 0
    other_histories: int = 0  # of those seeds: how many went otherwise, though no promise was broken


class Hang(BaseException):
    """The test or seed takes far longer than it should. No handler of a test takes it for its own."""


@contextlib.contextmanager
def hurried(limit_s: float) -> Iterator[None]:
    """Raises `Hang` in the middle of what takes more processor time than that."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hang

    signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, limit_s, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@dataclass(eq=False)
class _Chosen:
    """A pytest plugin: runs the tests of these names, or all, the cheapest first. Says which failed or hangs."""

    costs: dict[str, float] | None
    ran: Ran | None = None
    seen: list[Judge] = field(default_factory=list)
    failed: str = ""
    why: str = ""
    has_hung: bool = False

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.costs is not None:
            costs = self.costs
            items[:] = sorted((i for i in items if i.nodeid in costs), key=lambda i: costs[i.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        before = time.process_time()
        for lines in (self.ran or {}).values():
            lines.clear()
        try:
            with hurried(PATIENCE_S + SLOWER * (self.costs or {}).get(item.nodeid, USUAL_S)):
                yield
        except Hang:
            self.has_hung = True
            raise AssertionError("it takes too long") from None
        finally:
            if self.ran is not None:
                lines_now = {file: sorted(lines) for file, lines in self.ran.items() if lines}
                self.seen.append(Judge(item.nodeid, time.process_time() - before, lines_now))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed, self.why = report.nodeid, str(report.longrepr).strip().splitlines()[-1][:200]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.failed:
            self.failed, self.why = report.nodeid or "collection", str(report.longrepr).strip().splitlines()[-1][:200]


def _prepare() -> None:
    """What is random in tests is the same each time; a mutant that eats memory ends itself alone."""
    os.environ["CI"] = "1"
    os.chdir(ROOT)
    first = [str(ROOT / "src"), str(ROOT / "tests")]
    sys.path[:] = [*first, *(path for path in sys.path if path not in first)]
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))


def _run_tests(plugin: _Chosen, files: list[str]) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = pytest.main([*QUIET, *files], plugins=[plugin])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) and not plugin.failed:
        plugin.failed, plugin.why = "collection", f"pytest ended with {code!r}"


# --- in the forked process --------------------------------------------------------------------------------------------


def record_tests(change: Change, ran: Ran) -> list[Judge]:
    """All tests over the core as it is. Raises if one fails: nothing could be said of a mutant then."""
    _prepare()
    install(change)
    plugin = _Chosen(None, ran)
    _run_tests(plugin, list(TESTS))
    if plugin.failed:
        raise SystemExit(f"without any mutant {plugin.failed} fails: {plugin.why}")
    return plugin.seen


def record_histories(change: Change, ran: Ran, names: list[str]) -> list[Judge]:
    """These histories over the core as it is."""
    _prepare()
    install(change)
    found = []
    for name in names:
        before = time.process_time()
        for lines in ran.values():
            lines.clear()
        told = histories.tell(name)
        if told.broken:
            raise SystemExit(f"without any mutant {name} fails: {told.broken}")
        lines_now = {file: sorted(lines) for file, lines in ran.items() if lines}
        found.append(Judge(name, time.process_time() - before, lines_now, told.digest))
    return found


def judge(
    change: Change,
    tests: list[Judge],
    others: list[Judge],
    budget_s: float,
    suspect: str = "",
    types: Callable[[], str] = str,
) -> Verdict:
    """Show the mutant to these, and stop at the first that notices.

    `others` are histories, told in this order for at most so many seconds. `types` says what is wrong with its types.
    `suspect` is the name of who noticed it before, and comes first.
    """
    began = time.process_time()
    _prepare()
    install(change)
    suspects = [each for each in tests if each.name == suspect], [each for each in others if each.name == suspect]
    verdict = Verdict("survived")
    steps = [
        lambda: _judge_by_types(types if suspect == typed.BY else str),
        lambda: _judge_by_tests(suspects[0]),
        lambda: _judge_by_histories(suspects[1], inf),
        lambda: _judge_by_tests(tests),
        lambda: _judge_by_types(types),
        lambda: _judge_by_histories(others, budget_s),
    ]
    for step in steps:
        verdict = step()
        if verdict.outcome != "survived":
            break
    verdict.took_s = time.process_time() - began
    return verdict


def _judge_by_types(types: Callable[[], str]) -> Verdict:
    wrong = types()
    return Verdict("killed", typed.BY, wrong[:200]) if wrong else Verdict("survived")


def _judge_by_tests(tests: list[Judge]) -> Verdict:
    if not tests:
        return Verdict("survived")
    plugin = _Chosen({each.name: each.cost_s for each in tests})
    _run_tests(plugin, sorted({each.name.partition("::")[0] for each in tests}))
    if not plugin.failed:
        return Verdict("survived")
    return Verdict("timed out" if plugin.has_hung else "killed", plugin.failed, plugin.why)


def _judge_by_histories(others: list[Judge], budget_s: float) -> Verdict:
    began, verdict = time.process_time(), Verdict("survived")
    for each in others:
        seems_equivalent = verdict.seeds >= ENOUGH_ALIKE and not verdict.other_histories
        if seems_equivalent or time.process_time() - began > budget_s:
            break
        try:
            with hurried(PATIENCE_S + SLOWER * each.cost_s):
                told = histories.tell(each.name)
        except Hang:
            return Verdict("timed out", each.name, "it takes too long")
        except Exception as error:  # noqa: BLE001 (a mutant may fail in any way, or fail to load)
            return Verdict("killed", each.name, repr(error)[:200])
        if each.name.startswith("seed"):
            verdict.seeds += 1
            verdict.other_histories += told.digest != each.digest
        if told.broken:
            return Verdict("killed", each.name, told.broken[:200], seeds=verdict.seeds)
    return verdict


def as_dict(judges: list[Judge]) -> list[dict[str, Any]]:
    """For JSON."""
    return [vars(each) for each in judges]
