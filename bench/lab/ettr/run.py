"""`python -m bench.lab ettr`: the same failures, with and without recovery through peers, for some step durations."""

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from rich.console import Console

from tensorhub.protocol.errors import UsageError

from ...demo.parent import ended_in_order
from ...demo.processes import ProcessFailed
from ..goals import Finding
from ..idle import Idle
from .content import expected
from .director import Run
from .plan import MIB, WEIGHTS, Plan, Way, draw_failures
from .report import show, write_report
from .summary import Outcome, summarise

NAME = "ettr"
STEPS_BY_DURATION = {0.5: 100, 2.0: 60}
UNDISTURBED = "undisturbed"
WAYS: dict[str, tuple[Way, str]] = {
    "peers": ("peers", "TensorHub, only who was killed starts again"),
    "same-name": ("same-name", "TensorHub, replicas keep their names"),
    "file": ("file", "restart of everything from a checkpoint file"),
    UNDISTURBED: ("peers", "nobody is killed"),
}
USUAL = ("peers", "file", UNDISTURBED)
MIN_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a user can choose; None or empty: as it is usual."""

    ways: tuple[str, ...] = ()
    step_s: float | None = None
    steps: int | None = None
    rollouts: int | None = None
    size_bytes: int | None = None
    held_share: float | None = None
    seed: int | None = None


def plans_of(choice: Choice) -> list[Plan]:
    """One for each duration of a step. Raises `UsageError`."""
    unknown = [each for each in choice.ways if each not in WAYS]
    if unknown:
        raise UsageError(f"no strategy {unknown[0]!r} in {NAME}", hint=f"some of {', '.join(WAYS)}")
    if choice.steps is not None and choice.steps < MIN_STEPS:
        raise UsageError(f"{choice.steps} steps are too few: one of ten fails", hint=f"{MIN_STEPS} or more")
    if choice.rollouts is not None and choice.rollouts < 2:
        raise UsageError("a single rollout has no peer", hint="--rollouts 2 or more")
    given = {
        "rollouts": choice.rollouts,
        "size_bytes": choice.size_bytes,
        "held_share": choice.held_share,
        "seed": choice.seed,
    }
    plan = replace(Plan(), **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    durations = list(STEPS_BY_DURATION) if choice.step_s is None else [choice.step_s]
    usual = Plan().steps
    steps = {each: choice.steps or STEPS_BY_DURATION.get(each, usual) for each in durations}
    return [replace(plan, step_s=each, steps=steps[each]) for each in durations]


def run_ettr(choice: Choice, out: Path, console: Console, machine: dict[str, object]) -> int:
    """Run it, write the report, print the tables. Returns the exit status: 0 if everything holds."""
    plans, folder = plans_of(choice), out / NAME
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    console.print(introduction(plans), highlight=False, soft_wrap=True)
    outcomes: list[Outcome] = []
    findings: list[Finding] = []
    try:
        with ended_in_order():
            for plan in plans:
                for name in choice.ways or USUAL:
                    outcome = run_one(plan, name, folder / f"{name}-{plan.step_s:g}s", console)
                    outcomes.append(outcome)
                    findings += judge(plan, name, outcome)
    except (ProcessFailed, KeyboardInterrupt) as error:
        said = str(error) or "interrupted; every process was ended"
        console.print(f"[red]it failed:[/] {said}", highlight=False)
        findings.append(Finding("the laboratory runs to its end", "it does", said, holds=False))
    path = write_report(folder, plans, outcomes, findings, machine)
    show(console, outcomes, findings, path)
    return 0 if all(each.holds for each in findings) else 1


def run_one(plan: Plan, name: str, folder: Path, console: Console) -> Outcome:
    """One way. Raises `ProcessFailed`."""
    way, title = WAYS[name]
    plan = replace(plan, failure_share=0.0) if name == UNDISTURBED else plan
    began, idle = time.monotonic(), Idle()
    with console.status(f"{title}, steps of {plan.step_s:g} s"):
        run = Run(plan, way, folder).run()
    share = idle.share()
    outcome = summarise(
        run.events,
        title=title,
        step_s=plan.step_s,
        start_s=plan.start_s,
        steps=plan.steps,
        expected=list(expected(plan.size_bytes, plan.seed, plan.steps)),
    )
    text = f"  {title}, steps of {plan.step_s:g} s: {time.monotonic() - began:.0f} s, {share:.0%} of the processor idle"
    console.print(text, highlight=False)
    return msgspec.structs.replace(outcome, idle_share=share)


def judge(plan: Plan, name: str, outcome: Outcome) -> list[Finding]:
    """What each run must show, whatever its ratio is."""
    title = f"{outcome.title}, steps of {plan.step_s:g} s"
    wrong = outcome.hashes_wrong
    text = f"{outcome.hashes_compared} compared, {len(wrong)} differ" + (f": {wrong[0]}" if wrong else "")
    planned = 0 if name == UNDISTURBED else len(draw_failures(plan))
    behind = "; ".join(f"{each} does not" for each in outcome.missing)
    return [
        Finding(
            f"whoever got weights got those of the step, bit for bit: {title}",
            "no other",
            text,
            outcome.hashes_compared > 0 and not wrong,
        ),
        Finding(
            f"trainer and rollouts hold the last step in the end: {title}",
            f"step {plan.steps}",
            behind or f"all do, after {outcome.steps} steps",
            not behind and outcome.steps == plan.steps,
        ),
        Finding(
            f"every failure was injected, and training went on: {title}",
            f"{planned}",
            f"{sum(each.next_step_s is not None for each in outcome.recoveries)}",
            [each.next_step_s is not None for each in outcome.recoveries] == [True] * planned,
        ),
    ]


def introduction(plans: Sequence[Plan]) -> str:
    """What is about to be run."""
    plan = plans[0]
    weights = ", ".join(f"{role} {weight:.0%}" for role, weight in WEIGHTS.items())
    steps = " and ".join(f"{each.steps} steps of {each.step_s:g} s" for each in plans)
    return (
        f"[bold]{NAME}[/]: the share of time in which training goes on while processes are killed\n"
        f"a trainer, {plan.rollouts} rollouts, a reference server, {plan.size_bytes / MIB:g} MiB of weights; {steps}\n"
        f"in {plan.failure_share:.0%} of the steps one process is killed ({weights}; seed {plan.seed}); a trainer or a "
        f"rollout takes {plan.start_s:g} s to start, the server {plan.server_start_s:g} s; a checkpoint file every "
        f"{plan.checkpoint_every} steps"
    )
