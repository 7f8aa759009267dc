"""The doctor's findings on one screen."""

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .doctor import Check, Findings, TransportCheck
from .words import size_text

MARKS = {"good": ("ok", "green"), "note": ("note", "yellow"), "bad": ("bad", "red"), "absent": ("absent", "dim")}


def draw_findings(found: Findings) -> RenderableType:
    """Transports with their rates, then the machine, then the verdict."""
    return Group(_transports(found.transports), _machine(found.machine), _verdict(found))


def _transports(checks: list[TransportCheck]) -> Table:
    table = _table("transport", "", "for what, and how", rate="rate")
    for check in checks:
        mark, style = MARKS["good" if check.works else "absent"] if check.name != "tcp" or check.works else MARKS["bad"]
        rate = f"{size_text(check.rate_bytes_per_s)}/s" if check.works else ""
        about = f"{check.use}: {check.path}" if check.works else f"{check.use}: {check.reason}"
        table.add_row(check.name, Text(mark, style=style), rate, _with_remedy(about, check.remedy))
    return table


def _machine(checks: list[Check]) -> Table:
    table = _table("machine", "", "what it has")
    for check in checks:
        mark, style = MARKS[check.state]
        table.add_row(check.name, Text(mark, style=style), _with_remedy(check.says, check.remedy))
    return table


def _table(name: str, mark: str, rest: str, *, rate: str = "") -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, expand=True)
    table.add_column(name, min_width=18, no_wrap=True)
    table.add_column(mark, min_width=6, no_wrap=True)
    if rate:
        table.add_column(rate, min_width=10, no_wrap=True, justify="right")
    table.add_column(rest, ratio=1, overflow="fold")
    return table


def _with_remedy(says: str, remedy: str) -> Text:
    text = Text(says)
    if remedy:
        text.append("\n  → ", style="bold").append(remedy, style="cyan")
    return text


def _verdict(found: Findings) -> Text:
    best = next((check for check in found.transports if check.works), None)  # they come in the order of choice
    if best is None:
        return Text("No transport works: workers of this machine cannot move weights.", style="bold red")
    text = Text(f"Two workers of this machine take {best.name}", style="bold")
    text.append(f", {size_text(best.rate_bytes_per_s)}/s with every chunk verified. ", style="not bold")
    if not found.is_well:
        text.append("Mend what is marked bad first.", style="red")
    return text
