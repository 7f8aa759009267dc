"""A whole scenario: every strategy on the same links, one after the other, then the report: `python -m bench.lab`."""

import os
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from msgspec.structs import replace as with_changes
from rich.console import Console

from tensorhub.protocol.errors import UsageError

from ..demo.parent import ended_in_order
from ..demo.processes import ProcessFailed
from .director import Ground, Run, ground_of
from .ettr import run as ettr
from .fan_out import FanOutRun
from .faults import ElasticRun, SeedKilledRun
from .goals import Finding, judge
from .network import NoLinks, why_not
from .relays import EstablishedRun, SlowRelayRun
from .report import introduction, show, write_report
from .scenarios import SCENARIOS, Scenario
from .storm import StormRun
from .strategies.choose import STRATEGIES
from .summary import Outcome
from .uplinks import UplinkRun

WIDTH = 200
KILLED = "hub-ready"  # the strategy with which a seed is killed: others read behind it


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a user can choose; None: as the scenario has it."""

    strategies: tuple[str, ...] = ()
    rollouts: int | None = None
    sites: int | None = None  # besides the trainer's
    size_bytes: int | None = None
    rate_mbit: int | None = None
    versions: int | None = None
    seconds: float | None = None
    is_idle: bool = False  # the interpreter of who computes
    step_s: float | None = None  # of a training step, in `ettr`
    seed: int | None = None
    out: Path = Path("out/lab")


def run_scenario(name: str, options: Options) -> int:
    """Run it, write the report, print the table. Returns the exit status: 0 if every goal is reached."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)  # a file has room for the whole table
    if name == ettr.NAME:
        return ettr.run_ettr(choice_of(options), options.out, console, machine())
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
    began, series = time.monotonic(), Series(scenario, folder, console)
    try:
        with ended_in_order(), ground_of(scenario, folder) as ground:
            series.run(steps_of(scenario, ground, folder, console))
    except (ProcessFailed, NoLinks) as error:
        console.print(f"[red]the laboratory failed:[/] {error}", highlight=False)
        series.failures.append(Finding("the laboratory runs to its end", "it does", str(error), holds=False))
    except KeyboardInterrupt:
        console.print("interrupted; every process and namespace of the laboratory was removed")
        series.failures.append(Finding("the laboratory runs to its end", "it does", "interrupted", holds=False))
        series.report()
        return 130
    status = series.report()
    console.print(f"{time.monotonic() - began:.0f} s in all", highlight=False)
    return status


def choice_of(options: Options) -> ettr.Choice:
    """What `ettr` knows of a user's changes. Raises `UsageError`: it has no links and no set time."""
    given = {"--mbit": options.rate_mbit, "--sites": options.sites, "--seconds": options.seconds}
    strange = [option for option, value in given.items() if value is not None]
    if strange:
        raise UsageError(f"{ettr.NAME} has no {strange[0]}", hint="--step and --versions say how long it lasts")
    return ettr.Choice(
        ways=options.strategies,
        step_s=options.step_s,
        steps=options.versions,
        rollouts=options.rollouts,
        size_bytes=options.size_bytes,
        held_share=0.0 if options.is_idle else None,
        seed=options.seed,
    )


def scenario_of(name: str, options: Options) -> Scenario:
    """The scenario with a user's changes. Raises `UsageError`."""
    if name not in SCENARIOS:
        raise UsageError(f"no scenario {name!r}", hint=f"one of {', '.join([*SCENARIOS, ettr.NAME])}")
    if options.step_s is not None:
        raise UsageError(f"{name} has no --step", hint=f"that is of {ettr.NAME}")
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
        "far_sites": options.sites if scenario.far_sites else None,
        "size_bytes": options.size_bytes,
        "rate_mbit": options.rate_mbit,
        "versions": options.versions,
        "duration_s": options.seconds if scenario.duration_s else None,
        "held_share": 0.0 if options.is_idle else None,
        "seed": options.seed,
    }
    if options.size_bytes is not None:  # as many chunks as the scenario has: few large ones are another workload
        given["chunk_bytes"] = max(1, scenario.chunk_bytes * options.size_bytes // scenario.size_bytes)
    return replace(scenario, **{key: value for key, value in given.items() if value is not None})  # type: ignore[arg-type]


def _without_what_is_missing(scenario: Scenario, console: Console) -> Scenario:
    missing = [each for each in scenario.strategies if STRATEGIES[each].needs_torch and find_spec("torch") is None]
    for each in missing:
        console.print(f"left out: {STRATEGIES[each].title} (torch is not installed)", highlight=False)
    return replace(scenario, strategies=tuple(each for each in scenario.strategies if each not in missing))


@dataclass(frozen=True)
class Step:
    """One run of a scenario."""

    title: str
    make: Callable[[], Run]
    is_faulty: bool = False  # something is done to it that its strategy is not to blame for


class Series:
    """The steps of a scenario. What one has measured is kept and reported, whatever becomes of those after it."""

    def __init__(self, scenario: Scenario, folder: Path, console: Console) -> None:
        self.scenario, self.folder, self.console = scenario, folder, console
        self.outcomes: list[Outcome] = []
        self.findings: list[Finding] = []
        self.failures: list[Finding] = []

    def run(self, steps: Sequence[Step]) -> None:
        """One after the other; one that fails is noted, and the next one gets its chance."""
        for step in steps:
            try:
                with self.console.status(step.title):
                    run = step.make().run()
            except (ProcessFailed, NoLinks) as error:
                self.console.print(f"  [red]{step.title} failed:[/] {error}", highlight=False)
                self.failures.append(Finding(f"{step.title} runs to its end", "it does", str(error), holds=False))
                continue
            self.console.print(f"  {step.title}: {run.seconds:.0f} s", highlight=False)
            self.outcomes.append(with_changes(run.outcome(), title=step.title, is_faulty=step.is_faulty))
            self.findings += run.judge()

    def report(self) -> int:
        """Print and write what was measured. Returns the exit status."""
        judged = judge(self.scenario, self.outcomes, round_trip_s=0.0) if self.outcomes else []
        findings = [*judged, *self.findings, *self.failures]
        files = [write_report(self.folder, self.scenario, self.outcomes, findings, machine())]
        whole = [each for each in self.outcomes if not each.is_faulty]
        if whole:
            files += _draw(self.folder, self.scenario, whole, self.console)
        show(self.console, self.outcomes, findings, files)
        return 0 if all(each.holds for each in findings) else 1


def steps_of(scenario: Scenario, ground: Ground, folder: Path, console: Console) -> list[Step]:
    """What is run, in order."""
    kinds: dict[str, type[Run]] = {
        "storm": StormRun,
        "elastic": ElasticRun,
        "sites": UplinkRun,
        "slow-relay": SlowRelayRun,
        "established": EstablishedRun,
    }
    if scenario.name == "layouts":
        return _alone_and_together(scenario, ground, folder)
    kind = kinds.get(scenario.name, Run)
    steps = [
        Step(STRATEGIES[each].title, partial(kind, scenario, each, ground, folder / each))
        for each in scenario.strategies
    ]
    if scenario.name == "cross-site" and KILLED in scenario.strategies:
        title, short = f"{STRATEGIES[KILLED].title}, seed killed at 50 %", replace(scenario, versions=2)
        if why_not := SeedKilledRun.why_not(short):
            console.print(f"left out: {title} ({why_not})", highlight=False)
        else:
            steps.append(Step(title, partial(SeedKilledRun, short, KILLED, ground, folder / "seed-killed"), True))
    return steps


def _alone_and_together(scenario: Scenario, ground: Ground, folder: Path) -> list[Step]:
    """Each strategy with one rollout, and then with all of them."""
    steps, alone, one = [], dict[str, float](), replace(scenario, rollouts=1)
    for each in scenario.strategies:
        title, where = STRATEGIES[each].title, folder / each
        steps.append(Step(f"{title}, alone", partial(FanOutRun, one, each, ground, folder / f"{each}-alone", alone)))
        steps.append(Step(title, partial(FanOutRun, scenario, each, ground, where, alone)))
    return steps


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
