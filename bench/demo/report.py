"""The report of a run: a page that needs nothing but itself, the same as JSON, and a short table for the terminal."""

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from .checks import Check
from .events import SERVER, AnyEvent
from .plots import figures
from .summary import RolloutSummary, Summary, bytes_from
from .task import LETTERS

MIB = 1 << 20
COLUMNS = {
    "rollout": "",
    "fate": "what became of it",
    "versions run": "how many versions it generated samples with",
    "version": "held at its end",
    "samples": "how many it generated",
    "stall": "how long an update kept it from generating (median)",
    "longest stall": "the longest of these",
    "trainer MiB": "what it read from the trainer",
    "rollouts MiB": "what it read from other rollouts",
}
HEADINGS = tuple(COLUMNS)
LEGEND = "; ".join(f"{heading}: {meaning}" for heading, meaning in COLUMNS.items() if meaning) + "."
WHAT = (
    "TensorHub copies the weights of a model from the trainer that changes them to the rollouts, the workers that "
    "generate with them. Each rollout reads them from the memory of the trainer or of another rollout, and a small "
    "reference server knows which of them holds which version."
)
LARGE_PAGE = "large.html"  # beside the report, once `--large` has run

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; width: 100% } th, td { padding: .25rem .6rem; text-align: right }
th { border-bottom: 1px solid #999; font-weight: 600 } :is(td, th):is(:first-child, :nth-child(2)) { text-align: left }
ul { list-style: none; padding: 0 }
.yes::before { content: "✓ "; color: #178a17 } .no::before { content: "✗ "; color: #c00 }
.detail { color: #777 } img { width: 100% } h2 { margin-top: 2rem }
"""


class Report(msgspec.Struct, frozen=True):
    """What `report.json` holds."""

    ok: bool
    checks: list[Check]
    summary: Summary
    events: list[AnyEvent]


def write_report(folder: Path, summary: Summary, checks: Sequence[Check], events: Sequence[AnyEvent]) -> Path:
    """Write report.json and report.html. Returns the page."""
    report = Report(all(check.holds for check in checks), list(checks), summary, list(events))
    (folder / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    page = folder / "report.html"
    has_large = (folder / LARGE_PAGE).exists()
    page.write_text(html(summary, checks, figures(events, summary), has_large=has_large), encoding="utf-8")
    return page


def html(summary: Summary, checks: Sequence[Check], drawn: dict[str, str], *, has_large: bool = False) -> str:
    """The page."""
    rows = [HEADINGS, *(_cells(rollout) for rollout in summary.rollouts)]
    words = [introduction(summary), _sentence(summary), _effective(summary)]
    link = f'<p><a href="{LARGE_PAGE}">A larger model, and more rollouts</a></p>' if has_large else ""
    parts = [paragraphs(words), link, check_list(checks), table_of(rows), legend(LEGEND), pictures(drawn)]
    return page_of("An RL run over TensorHub", parts)


def page_of(title: str, parts: Sequence[str]) -> str:
    """A page that needs nothing but itself."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
        f"<h1>{escape(title)}</h1>{''.join(parts)}</html>\n"
    )


def paragraphs(words: Sequence[str]) -> str:
    """Text."""
    return "".join(f"<p>{escape(each)}</p>" for each in words)


def check_list(checks: Sequence[Check]) -> str:
    """Each check with its mark."""
    return f"<ul>{''.join(_check_item(check) for check in checks)}</ul>"


def table_of(rows: Sequence[Sequence[str]]) -> str:
    """The first row has the headings."""
    return f"<table>{''.join(_row(row, 'td' if number else 'th') for number, row in enumerate(rows))}</table>"


def legend(text: str) -> str:
    """What the columns of a table mean."""
    return f'<p class="detail">{escape(text)}</p>'


def pictures(drawn: dict[str, str]) -> str:
    """SVG by title."""
    return "".join(
        f"<h2>{escape(title)}</h2>"
        f'<img alt="{escape(title)}" src="data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}">'
        for title, svg in drawn.items()
    )


def show(console: Console, summary: Summary, checks: Sequence[Check], page: Path) -> None:
    """The short table, each check, and where the report is."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for heading in HEADINGS:
        is_words = heading in HEADINGS[:2]
        table.add_column(heading, justify="left" if is_words else "right", no_wrap=is_words)
    for rollout in summary.rollouts:
        table.add_row(*_cells(rollout))
    console.print()
    console.print(_sentence(summary), highlight=False, soft_wrap=True)
    console.print(_effective(summary), highlight=False, soft_wrap=True)
    console.print(table)
    console.print(LEGEND, style="dim", highlight=False, soft_wrap=True)
    console.print()
    show_checks(console, checks)
    console.print(f"\nreport: {page}  (and report.json, events/, logs/ beside it)", highlight=False, soft_wrap=True)


def show_checks(console: Console, checks: Sequence[Check]) -> None:
    """Each check with its mark."""
    for check in checks:
        mark = "[green]✓[/]" if check.holds else "[red]✗[/]"
        console.print(f"{mark} {check.sentence}  [dim]{check.detail}[/]", highlight=False, soft_wrap=True)


def introduction(summary: Summary) -> str:
    """What TensorHub is, and what happened in this run."""
    late = [rollout.name for rollout in summary.rollouts if rollout.fate == "joined late"]
    names = {SERVER: "the reference server"}
    faults = [f"{names.get(e.process, e.process)} was {e.what}" for e in summary.faults if e.process not in late]
    faults += [f"{name} joined late" for name in late]
    meanwhile = f", while {', '.join(faults)}" if faults else ""
    rollouts = len(summary.rollouts)
    took = "updated to them" if summary.updates else "kept the first ones"
    return (
        f"{WHAT} In this run a trainer published its weights after each step as a new version, "
        f"and {rollouts} rollouts {took}{meanwhile}."
    )


def _sentence(summary: Summary) -> str:
    stall = summary.trainer_stall
    return (
        f"{summary.steps} steps of learning to put {LETTERS} letters in order, {_who(summary)}seed {summary.seed}, "
        f"{'' if summary.updates else 'without weight updates, '}in {summary.seconds:.0f} s. "
        f"Reward, the share of right answers: {summary.reward_start:.3f} at the start, "
        f"{summary.reward_end:.3f} at the end. "
        f"Samples, the answers that it learned from, were {summary.mean_lag:.1f} versions old on average. "
        f"Publishing kept the trainer from computing for {_milliseconds(stall.median_s)} a step (median), "
        f"{stall.total_s:.1f} s in all. The trainer sent each version {summary.trainer_copies:.2f} times on average, "
        "and rollouts sent it to each other."
    )


def _effective(summary: Summary) -> str:
    time = summary.training_time
    if time is None:
        return ""
    lost = f"{time.lost_s:.1f} s of computing were lost with a trainer, " if time.lost_s else ""
    return (
        f"Effective training time (ETTR): {time.ratio:.0%}. Of {summary.seconds:.1f} s the trainer computed for "
        f"{time.computed_s:.1f} s, {lost}published for {time.published_s:.1f} s, and for {time.other_s:.1f} s it "
        "started, waited for samples, served the last version or was gone."
    )


def _who(summary: Summary) -> str:
    return "two ranks of FSDP2 and engines of vLLM on the CPU, " if summary.engine else ""


def _cells(rollout: RolloutSummary) -> tuple[str, ...]:
    return (
        rollout.name,
        rollout.fate,
        str(rollout.versions_run),
        "–" if rollout.held_version is None else str(rollout.held_version),
        f"{rollout.samples:,}",
        _milliseconds(rollout.stall.median_s),
        _milliseconds(rollout.stall.most_s),
        f"{bytes_from(rollout.bytes_by_source, trainer=True) / MIB:.1f}",
        f"{bytes_from(rollout.bytes_by_source, trainer=False) / MIB:.1f}",
    )


def _row(cells: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _check_item(check: Check) -> str:
    mark = "yes" if check.holds else "no"
    return f'<li class="{mark}">{escape(check.sentence)} <span class="detail">{escape(check.detail)}</span></li>'


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
