"""A whole scenario: every strategy on the same links, one after the other, then the report: `tensorhub lab`."""

import os
import platform
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from msgspec.structs import replace as with_changes
from rich.console import Console

from ..core.errors import UsageError
from ..demo.parent import ended_in_order
from ..demo.processes import ProcessFailed
from .director import Ground, Run, ground_of
from .faults import ElasticRun, SeedKilledRun
from .goals import Finding, judge
from .network import NoLinks, why_not
from .report import introduction, show, write_report
from .scenarios import SCENARIOS, Scenario
from .storm import StormRun
from .strategies.choose import STRATEGIES
from .summary import Outcome

KILLED = "hub-ready"  # the strategy with which a seed is killed: others read behind it


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a user can choose; None: as the scenario has it."""

    strategies: tuple[str, ...] = ()
    rollouts: int | None = None
    size_bytes: int | None = None
    rate_mbit: int | None = None
    versions: int | None = None
    seconds: float | None = None
    seed: int | None = None
    out: Path = Path("out/lab")


def run_scenario(name: str, options: Options) -> int:
    """Run it, write the report, print the table. Returns the exit status: 0 if every goal is reached."""
    console = Console()
    scenario = scenario_of(name, options)
    problem = why_not()
    if problem is not None:
        console.print(f"the laboratory cannot be built here: {problem}", highlight=False)
        return 1
    scenario = _without_what_is_missing(scenario, console)
    folder = options.out / scenario.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    console.print(introduction(scenario), highlight=False, soft_wrap=True)
    try:
        with ended_in_order(), ground_of(scenario, folder) as ground:
            return _run_all(scenario, ground, folder, console)
    except (ProcessFailed, NoLinks) as error:
        console.print(f"[red]the laboratory failed:[/] {error}", highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; every process and namespace of the laboratory was removed")
        return 130


def scenario_of(name: str, options: Options) -> Scenario:
    """The scenario with a user's changes. Raises `UsageError`."""
    if name not in SCENARIOS:
        raise UsageError(f"no scenario {name!r}", hint=f"one of {', '.join(SCENARIOS)}")
    scenario = SCENARIOS[name]
    unknown = [each for each in options.strategies if each not in STRATEGIES]
    if unknown:
        raise UsageError(f"no strategy {unknown[0]!r}", hint=f"some of {', '.join(STRATEGIES)}")
    fixed = [each for each in options.strategies if STRATEGIES[each].is_fixed and scenario.spots]
    if fixed:
        raise UsageError(f"{STRATEGIES[fixed[0]].title} cannot run in {name}: nobody can join or leave a collective")
    given = {
        "strategies": options.strategies or None,
        "rollouts": options.rollouts,
        "size_bytes": options.size_bytes,
        "rate_mbit": options.rate_mbit,
        "versions": options.versions,
        "duration_s": options.seconds if scenario.duration_s else None,
        "seed": options.seed,
    }
    return replace(scenario, **{key: value for key, value in given.items() if value is not None})  # type: ignore[arg-type]


def _without_what_is_missing(scenario: Scenario, console: Console) -> Scenario:
    missing = [each for each in scenario.strategies if STRATEGIES[each].needs_torch and find_spec("torch") is None]
    for each in missing:
        console.print(f"left out: {STRATEGIES[each].title} (torch is not installed)", highlight=False)
    return replace(scenario, strategies=tuple(each for each in scenario.strategies if each not in missing))


def _run_all(scenario: Scenario, ground: Ground, folder: Path, console: Console) -> int:
    began, outcomes = time.monotonic(), list[Outcome]()
    findings: list[Finding] = []
    for strategy in scenario.strategies:
        with console.status(STRATEGIES[strategy].title):
            run = _make(scenario, strategy, ground, folder / strategy).run()
        outcomes.append(run.outcome())
        console.print(f"  {outcomes[-1].title}: {run.seconds:.0f} s", highlight=False)
        if isinstance(run, StormRun):
            findings += run.judge()
    if scenario.name == "cross-site" and KILLED in scenario.strategies:
        with console.status("the seed is killed at 50 %"):
            killed = SeedKilledRun(replace(scenario, versions=2), KILLED, ground, folder / "seed-killed").run()
        title = f"{STRATEGIES[KILLED].title}, seed killed at 50 %"
        outcomes.append(with_changes(killed.outcome(), title=title, is_faulty=True))
    findings = [*judge(scenario, outcomes, round_trip_s=0.0), *findings]
    files = [write_report(folder, scenario, outcomes, findings, machine())]
    files += _draw(folder, scenario, [each for each in outcomes if not each.is_faulty], console)
    show(console, outcomes, findings, files)
    console.print(f"{time.monotonic() - began:.0f} s in all", highlight=False)
    return 0 if all(each.holds for each in findings) else 1


def _make(scenario: Scenario, strategy: str, ground: Ground, folder: Path) -> Run:
    if scenario.name == "storm":
        return StormRun(scenario, strategy, ground, folder)
    return (ElasticRun if scenario.spots else Run)(scenario, strategy, ground, folder)


def _draw(folder: Path, scenario: Scenario, outcomes: Sequence[Outcome], console: Console) -> list[Path]:
    if find_spec("matplotlib") is None:
        console.print("no figure: matplotlib is not installed")
        return []
    from .plots import draw

    return draw(folder, scenario, outcomes)


def machine() -> dict[str, object]:
    """On what it ran."""
    model = next((x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), "")
    return {
        "cpu": model.partition(":")[2].strip(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
