"""The report of `python -m bench.lab ettr`: two tables and a verdict in the terminal, the same as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from ..goals import Finding
from ..report import show_findings
from .plan import WEIGHTS, Plan
from .summary import Outcome, spread

TIMES = ("way to go on", "step", "ETTR", "wall", "steps kept", "again", "cut short", "else", "steps again", "idle")
RECOVERIES = ("way to go on", "step", "killed", "times", "started again", "next new step", "most", "back", "most")


class Report(msgspec.Struct, frozen=True):
    """What the JSON file holds. Times in seconds."""

    plans: list[dict[str, object]]
    machine: dict[str, object]
    ok: bool
    findings: list[Finding]
    ratios: list[float]  # of each outcome
    outcomes: list[Outcome]


def write_report(
    folder: Path,
    plans: Sequence[Plan],
    outcomes: Sequence[Outcome],
    findings: Sequence[Finding],
    machine: dict[str, object],
) -> Path:
    """Write the JSON, and return where."""
    ok = all(each.holds for each in findings)
    ratios = [outcome.ratio for outcome in outcomes]
    report = Report([asdict(plan) for plan in plans], machine, ok, list(findings), ratios, list(outcomes))
    path = folder / "ettr.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    return path


def show(console: Console, outcomes: Sequence[Outcome], findings: Sequence[Finding], path: Path) -> None:
    """Both tables, each finding, and where the report is."""
    console.print()
    console.print(_table(TIMES, [_times(outcome) for outcome in outcomes]))
    console.print(
        "ETTR: computing of steps that are part of the result, over the whole time; again: computed before and lost; "
        "cut short: its trainer was killed; else: starts, fills, waits for samples, publishing",
        style="dim",
        soft_wrap=True,
    )
    console.print()
    console.print(_table(RECOVERIES, [row for outcome in outcomes for row in _recoveries(outcome)], words=3))
    console.print(
        "median and most, from the kill: until a step was done that nobody had done before; until who was killed "
        "did its work again",
        style="dim",
        soft_wrap=True,
    )
    console.print()
    show_findings(console, findings)
    console.print(f"\nreport: {path}", highlight=False, soft_wrap=True)


def _table(headings: Sequence[str], rows: Sequence[tuple[str, ...]], *, words: int = 1) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < words else "right", no_wrap=not index)
    for row in rows:
        table.add_row(*row)
    return table


def _times(outcome: Outcome) -> tuple[str, ...]:
    return (
        outcome.title,
        f"{outcome.step_s:g} s",
        f"{outcome.ratio:.1%}",
        f"{outcome.wall_s:.1f} s",
        f"{outcome.useful_s:.1f} s",
        f"{outcome.repeated_s:.1f} s",
        f"{outcome.cut_s:.1f} s",
        f"{outcome.other_s:.1f} s",
        str(outcome.steps_repeated),
        f"{outcome.idle_share:.0%}",
    )


def _recoveries(outcome: Outcome) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for role in WEIGHTS:
        mine = [each for each in outcome.recoveries if each.role == role]
        if mine:
            new, back = spread(each.next_step_s for each in mine), spread(each.back_s for each in mine)
            start = (outcome.title, f"{outcome.step_s:g} s", role, str(len(mine)), str(outcome.restarts[role]))
            rows.append((*start, *_both(new), *_both(back)))
    return rows


def _both(found: tuple[float, float] | None) -> tuple[str, str]:
    return ("–", "–") if found is None else (f"{found[0]:.1f} s", f"{found[1]:.1f} s")
