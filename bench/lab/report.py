"""The report of a scenario: a table and a verdict in the terminal, the same as JSON, and one figure."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from .goals import Finding
from .interpreter import SLICE_S
from .scenarios import MIB, Scenario
from .summary import Outcome, mean, quantile

HEADINGS = (
    "strategy",
    "total stall",
    "rollouts",
    "trainer",
    "updates",
    "mean",
    "p99",
    "joins",
    "mean",
    "slices",
    "moving",
    "behind",
    "trainer sent",
    "CPU idle",
    "CPU of the lab",
)


class Report(msgspec.Struct, frozen=True):
    """What the JSON file holds. Times in seconds."""

    scenario: dict[str, object]
    machine: dict[str, object]
    ok: bool
    findings: list[Finding]
    outcomes: list[Outcome]


def write_report(
    folder: Path,
    scenario: Scenario,
    outcomes: Sequence[Outcome],
    findings: Sequence[Finding],
    machine: dict[str, object],
) -> Path:
    """Write the JSON, and return where."""
    facts = {name: getattr(scenario, name) for name in scenario.__dataclass_fields__}
    ok = all(each.holds for each in findings)
    report = Report(facts, machine, ok, list(findings), list(outcomes))
    path = folder / f"{scenario.name}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    return path


def introduction(scenario: Scenario) -> str:
    """What is about to be run."""
    between = ""
    if scenario.wan_mbit:
        between = f", {scenario.wan_mbit} Mbit/s and {scenario.wan_delay_ms} ms one way between the sites"
    elif scenario.uplink_mbit:
        between = f", each site behind an uplink of {scenario.uplink_mbit} Mbit/s"
    spots = f", {scenario.spots} places for spot replicas" if scenario.spots else ""
    return (
        f"[bold]{scenario.name}[/]: {scenario.title}\n"
        f"a trainer and {scenario.rollouts} rollouts{spots}, each a process behind a link of its own of "
        f"{scenario.rate_mbit} Mbit/s{between}; {scenario.size_bytes / MIB:g} MiB of weights "
        f"(one copy over one link: {scenario.transfer_s:.2f} s)\n"
        f"a training step takes {scenario.train_s:g} s, a generation {scenario.generate_s:g} s "
        f"± {scenario.jitter:.0%}; {_interpreter(scenario)}"
    )


def _interpreter(scenario: Scenario) -> str:
    if not scenario.held_share:
        return "the interpreter of who computes is idle"
    return f"who computes holds its interpreter for {scenario.held_share:.0%} of that, {1000 * SLICE_S:g} ms at a time"


def show(console: Console, outcomes: Sequence[Outcome], findings: Sequence[Finding], files: Sequence[Path]) -> None:
    """The table, each finding, and where the files are."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for index, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if index else "left", no_wrap=not index)
    for outcome in outcomes:
        table.add_row(*_cells(outcome))
    console.print()
    console.print(table)
    console.print(
        "stall: seconds in which workers could have computed and did not; slices: how much longer than asked those of "
        "their interpreters took; moving: the same while weights moved over the worker's link, over while none did; "
        "behind: versions that a rollout was behind; trainer sent: copies of each version",
        style="dim",
        soft_wrap=True,
    )
    console.print()
    show_findings(console, findings)
    console.print(f"\nreport: {', '.join(str(path) for path in files)}", highlight=False, soft_wrap=True)


def show_findings(console: Console, findings: Sequence[Finding]) -> None:
    """A line each."""
    for each in findings:
        mark = "[green]✓[/]" if each.holds else "[red]✗[/]"
        console.print(
            f"{mark} {each.sentence}: {each.found}  [dim](wanted: {each.wanted})[/]", highlight=False, soft_wrap=True
        )


def _cells(outcome: Outcome) -> tuple[str, ...]:
    return (
        outcome.title,
        f"{outcome.total_stall_s:.1f} s",
        f"{outcome.rollout_stall_s:.1f} s",
        f"{outcome.trainer_stall_s:.1f} s",
        str(outcome.updates),
        _seconds(mean(outcome.update_s)),
        _seconds(quantile(outcome.update_s, 0.99)),
        str(len(outcome.join_s)) if outcome.join_s else "",
        _seconds(mean(outcome.join_s)) if outcome.join_s else "",
        f"{outcome.slice_ratio - 1:+.1%}" if outcome.slice_ratio else "",
        f"{outcome.moving_ratio - 1:+.1%}" if outcome.moving_ratio else "",
        f"{outcome.lag:.1f}",
        f"{outcome.from_trainer:.1f}" if outcome.from_trainer else "",
        f"{outcome.idle_share:.0%}" + ("" if outcome.is_valid else " busy"),
        f"{outcome.own_cpu_s / max(1e-9, outcome.seconds):.2f} cores",
    )


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
