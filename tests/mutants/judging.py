"""Who judges a mutant: tests of the core and scenarios, then seeds of the simulator; each in a process of its own.

The judges are first run once over the core as it is, which records what each of them executes and how long it takes.
A mutant is then shown only to those that execute its line, the cheapest first, up to the first that fails. Times are
processor time, so that a busy machine changes no verdict. Nothing here imports the package before it is substituted.
"""

import contextlib
import io
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import hypothesis  # noqa: F401 (loaded once, before the forks)
import msgspec  # noqa: F401
import pytest

from .substitute import ROOT, Change, Ran, install

TESTS = ("tests/core", "tests/scenarios")
QUIET = ["-q", "-x", "--no-header", "-p", "no:cacheprovider", "--tb=line", "-p", "no:timeout"]
MOST_MEMORY = 4 * 2**30  # bytes of address space of one mutant's process
SLOWER = 20.0  # a test or seed that takes so many times its usual processor time, and 5 s more, hangs
PATIENCE_S = 5.0
ENOUGH_ALIKE = 25  # seeds whose histories are the same to the letter: further ones would be so too


@dataclass
class Judge:
    """A test by its name, or a seed by its number: what it executes, and the processor seconds that it takes."""

    name: str
    cost_s: float
    lines: dict[str, list[int]]
    digest: str = ""  # of a seed's history

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
    """A pytest plugin: runs the tests of these names in this order, each with its limit; says which failed."""

    costs: dict[str, float]
    ran: Ran | None = None
    seen: list[Judge] = field(default_factory=list)
    failed: str = ""
    why: str = ""
    has_hung: bool = False

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.ran is None:
            items[:] = sorted((i for i in items if i.nodeid in self.costs), key=lambda i: self.costs[i.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        before = time.process_time()
        for lines in (self.ran or {}).values():
            lines.clear()
        try:
            with hurried(PATIENCE_S + SLOWER * self.costs.get(item.nodeid, 10.0)):
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
    source = str(ROOT / "src")
    sys.path[:] = [source, *(path for path in sys.path if path != source)]
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))


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
    plugin = _Chosen({}, ran)
    _run_tests(plugin, list(TESTS))
    if plugin.failed:
        raise SystemExit(f"without any mutant {plugin.failed} fails: {plugin.why}")
    return plugin.seen


def record_seeds(change: Change, ran: Ran, seeds: list[int]) -> list[Judge]:
    """These seeds over the core as it is."""
    _prepare()
    install(change)
    from tensorhub.sim.runner import run_seed

    found = []
    for seed in seeds:
        before = time.process_time()
        for lines in ran.values():
            lines.clear()
        result = run_seed(seed)
        if not result.ok:
            raise SystemExit(f"without any mutant seed {seed} fails: {result.error}")
        lines_now = {file: sorted(lines) for file, lines in ran.items() if lines}
        found.append(Judge(str(seed), time.process_time() - before, lines_now, result.digest))
    return found


def judge(change: Change, tests: list[Judge], seeds: list[Judge], budget_s: float) -> Verdict:
    """Show the mutant to these, in this order, and stop at the first that notices. `budget_s`: for the seeds."""
    began = time.process_time()
    _prepare()
    install(change)
    if tests:
        plugin = _Chosen({each.name: each.cost_s for each in tests})
        _run_tests(plugin, sorted({each.name.partition("::")[0] for each in tests}))
        if plugin.failed:
            outcome = "timed out" if plugin.has_hung else "killed"
            return Verdict(outcome, plugin.failed, plugin.why, time.process_time() - began)
    verdict = _judge_by_seeds(seeds, budget_s)
    verdict.took_s = time.process_time() - began
    return verdict


def _judge_by_seeds(seeds: list[Judge], budget_s: float) -> Verdict:
    began, verdict = time.process_time(), Verdict("survived")
    try:
        from tensorhub.sim.runner import run_seed
    except Exception as error:  # noqa: BLE001 (a mutant may fail to load in any way)
        return Verdict("killed", "import", repr(error)[:200])
    for each in seeds:
        seems_equivalent = verdict.seeds >= ENOUGH_ALIKE and not verdict.other_histories
        if seems_equivalent or time.process_time() - began > budget_s:
            break
        try:
            with hurried(PATIENCE_S + SLOWER * each.cost_s):
                result = run_seed(int(each.name))
        except Hang:
            return Verdict("timed out", f"seed {each.name}", "it takes too long")
        except Exception as error:  # noqa: BLE001 (a mutant may fail in any way)
            return Verdict("killed", f"seed {each.name}", repr(error)[:200])
        verdict.seeds += 1
        verdict.other_histories += result.digest != each.digest
        if not result.ok:
            return Verdict("killed", f"seed {each.name}", str(result.error).splitlines()[0][:200], seeds=verdict.seeds)
    return verdict


def as_dict(judges: list[Judge]) -> list[dict[str, Any]]:
    """For JSON."""
    return [vars(each) for each in judges]
