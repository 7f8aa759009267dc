"""The doctor's findings on one screen: the transports, what of the machine is worth a word, and the verdict."""

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .doctor import Check, Findings, TransportCheck
from .words import size_text

MARKS = {"good": ("ok", "green"), "note": ("note", "yellow"), "bad": ("bad", "red"), "absent": ("absent", "dim")}
OFF, NO, NOT_NEEDED = ("off", "dim"), ("no", "yellow"), ("no", "dim")


def draw_findings(found: Findings, *, is_long: bool = False) -> RenderableType:
    """`is_long`: a line also for each thing that is well."""
    gap = Text("")
    return Group(_transports(found.transports), gap, _machine(found.machine, is_long), gap, _verdict(found))


def _transports(checks: list[TransportCheck]) -> Table:
    table = _table("transport", "for what, and how", rate="rate")
    for check in checks:
        mark, style = _mark(check)
        rate = f"{size_text(check.rate_bytes_per_s)}/s" if check.works else ""
        about = "; ".join(part for part in (check.path, check.reason) if part)
        table.add_row(check.name, Text(mark, style=style), rate, _with_remedy(f"{check.use}: {about}", check.remedy))
    return table


def _mark(check: TransportCheck) -> tuple[str, str]:
    if check.works:
        return MARKS["good"] if check.is_taken else OFF
    if not check.is_taken:
        return NOT_NEEDED
    return NO if check.name != "tcp" else MARKS["bad"]  # what remains where nothing else can be


def _machine(checks: list[Check], is_long: bool) -> Table:
    """What is well needs no line of its own; what is not has one, with its remedy."""
    table = _table("machine", "what it has")
    well = [] if is_long else [check for check in checks if check.state == "good"]
    for check in checks:
        if check not in well:
            mark, style = MARKS[check.state]
            table.add_row(check.name, Text(mark, style=style), _with_remedy(check.says, check.remedy))
    if well:
        table.add_row("the rest", Text(*MARKS["good"]), Text(", ".join(check.name for check in well)))
    return table


def _table(name: str, rest: str, *, rate: str = "") -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, expand=True)
    table.add_column(name, min_width=9, no_wrap=True)
    table.add_column("", min_width=6, no_wrap=True)
    if rate:
        table.add_column(rate, min_width=9, no_wrap=True, justify="right")
    table.add_column(rest, ratio=1, overflow="fold")
    return table


def _with_remedy(says: str, remedy: str) -> Text:
    text = Text(says)
    if remedy:
        text.append("\n  → ", style="bold").append(remedy, style="cyan")
    return text


def _verdict(found: Findings) -> Text:
    best = next((check for check in found.transports if check.works and check.is_taken), None)  # in the order of choice
    if best is None:
        return Text("No transport works that may be taken: workers here cannot move weights.", style="bold red")
    text = Text(f"Two workers of this machine take {best.name}", style="bold")
    text.append(f", {size_text(best.rate_bytes_per_s)}/s with every chunk verified. ", style="not bold")
    if not found.is_well:
        text.append("Mend what is marked bad first.", style="red")
    return text
