"""The figures for people and for programs: tables in the terminal, markdown for the README, JSON."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .section import Goal, Section, size_text

BUSY_LOAD = 0.5  # of a core, for each core: more than that and somebody else was measured too


def header(machine: dict[str, object]) -> list[str]:
    """What was measured on, in a few lines."""
    versions = machine["versions"]
    assert isinstance(versions, dict)
    names = ", ".join(f"{name} {number}" for name, number in versions.items())
    load, cores = float(machine["load_average"]), int(machine["cores"])  # type: ignore[arg-type]
    found = [
        f"{machine['cores']} cores of {machine['cpu']}, {size_text(int(machine['memory_bytes']))}, "  # type: ignore[call-overload]
        f"kernel {machine['kernel']}, TCP {machine['congestion']}",
        names,
        f"commit {str(machine['commit'])[:12]}{' with changes' if machine['has_changes'] else ''}, {machine['began']}",
        f"load average {load} before, {machine.get('load_average_after', '?')} after; "
        f"{float(machine['idle_share']):.0%} idle before",  # type: ignore[arg-type]
    ]
    if load > BUSY_LOAD * cores:
        found.append("the machine was busy with other things: the order and the ratios may hold, the figures do not")
    return found


def print_section(console: Console, section: Section) -> None:
    """One table with its notes."""
    if section.skipped:
        console.print(f"[bold]{escape(section.title)}[/]: not measured: {escape(section.skipped)}\n")
        return
    table = Table(title=section.title, title_justify="left", title_style="bold")
    for number, column in enumerate(section.columns):
        is_number = number and column not in ("way", "worker", "remark")
        table.add_column(escape(column), justify="right" if is_number else "left", overflow="fold")
    for row in section.rows:
        table.add_row(*(escape(cell) for cell in row))
    console.print(table)
    for note in section.notes:
        console.print(f"  {escape(note)}", style="dim")
    console.print()


def print_goals(console: Console, goals: Sequence[Goal]) -> None:
    """What was wanted and what came of it."""
    if not goals:
        return
    table = Table(title="Goals", title_justify="left", title_style="bold")
    for column in ("goal", "wanted", "measured", ""):
        table.add_column(column, overflow="fold")
    for goal in goals:
        mark = {True: "[green]met[/]", False: "[red]missed[/]", None: "[dim]–[/]"}[goal.met]
        table.add_row(escape(goal.what), escape(goal.wanted), escape(goal.got), mark)
    console.print(table)


def markdown(machine: dict[str, object], sections: Sequence[Section], command: str) -> str:
    """All of it for a README."""
    lines = [f"Measured with `{command}`:", "", *(f"- {line}" for line in header(machine)), ""]
    for section in sections:
        if section.skipped:
            lines += [f"**{section.title}**: not measured: {section.skipped}.", ""]
            continue
        lines += [f"**{section.title}**", "", _line(section.columns), _line(["---"] * len(section.columns))]
        lines += [_line(row) for row in section.rows]
        lines += ["", *(f"{note[0].upper()}{note[1:]}." for note in section.notes), ""]
    goals = [goal for section in sections for goal in section.goals]
    if goals:
        lines += ["**Goals**", "", _line(["goal", "wanted", "measured", ""]), _line(["---"] * 4)]
        words = {True: "met", False: "**missed**", None: "–"}
        lines += [_line([goal.what, goal.wanted, goal.got, words[goal.met]]) for goal in goals]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def write_json(path: Path, machine: dict[str, object], sections: Sequence[Section], command: str) -> None:
    """Every figure, machine and commit included."""
    parts = {
        section.key: {
            "title": section.title,
            **({"skipped": section.skipped} if section.skipped else section.figures),
            "goals": [vars(goal) for goal in section.goals],
        }
        for section in sections
    }
    content = {"command": command, "machine": machine, "parts": parts}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
