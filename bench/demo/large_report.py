"""The page of the demo with a large model: what was measured, the same as JSON, and a short table for the terminal."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

import msgspec
from rich.console import Console
from rich.table import Table

from ..section import GIB, MIB, size_text
from .checks import Check
from .large_summary import Disturbed, Fetch, Kill, Large, Round
from .plots import as_svg, blank_axes, colours_of, draw_sources, mark
from .report import (
    LARGE_PAGE,
    WHAT,
    Report,
    check_list,
    legend,
    page_of,
    paragraphs,
    pictures,
    show_checks,
    table_of,
    write_report,
)
from .summary import bytes_from

VERSION_COLUMNS = {
    "version": "",
    "rollouts": "those that fetched it, all at once",
    "last rollout, s": "from publish until the last rollout had all of it, verified",
    "GiB/s in all": "what came to all rollouts in this time",
    "GiB/s each": "the slowest and the fastest rollout, each over the time of its own call",
    "trainer sent, GiB": "bytes that left the trainer",
    "trainer waited, s": "unpublish, and publish with its hashing, in which the trainer cannot compute",
}
ROLLOUT_COLUMNS = {
    "rollout": "",
    "GiB/s": "median of the undisturbed versions",
    "from trainer, GiB": "what it read from the trainer, in all versions",
    "from rollouts, GiB": "what it read from other rollouts",
    "to rollouts, GiB": "what other rollouts read from it",
}
KILL_COLUMNS = {
    "rollout": "",
    "lost its source": "the share of the model that a reader of the killed rollout had by then",
    "pause, s": "from then until bytes of another source came",
    "took, s": "its call in this version",
    "usually, s": "median of its calls in the undisturbed versions",
    "longer, s": "the difference",
}


def write_large(folder: Path, large: Large, checks: Sequence[Check]) -> Path:
    """Write large.json and large.html, and link to the page from the report if that is there. Returns the page."""
    folder.mkdir(parents=True, exist_ok=True)
    told = {"ok": all(check.holds for check in checks), "checks": list(checks), "run": large}
    (folder / "large.json").write_bytes(msgspec.json.format(msgspec.json.encode(told)))
    page, report = folder / LARGE_PAGE, folder / "report.json"
    page.write_text(html(large, checks, has_report=report.exists()), encoding="utf-8")
    if report.exists():
        with suppress(msgspec.ValidationError):  # of another release
            first = msgspec.json.decode(report.read_bytes(), type=Report)
            write_report(folder, first.summary, first.checks, first.events)
    return page


def html(large: Large, checks: Sequence[Check], *, has_report: bool) -> str:
    """The page."""
    link = '<p><a href="report.html">The run in which a policy learns</a></p>' if has_report else ""
    parts = [
        paragraphs([WHAT, *sentences(large)]),
        link,
        check_list(checks),
        table_of([tuple(VERSION_COLUMNS), *(_version_cells(large, one) for one in large.rounds)]),
        legend(_meanings(VERSION_COLUMNS)),
        table_of([tuple(ROLLOUT_COLUMNS), *_rollout_rows(large)]),
        legend(_meanings(ROLLOUT_COLUMNS)),
        *_kill_parts(large),
        pictures({"Bytes by source": _by_source_drawn(large)}),
    ]
    return page_of("A large model over TensorHub", parts)


def show_large(console: Console, large: Large, checks: Sequence[Check], page: Path) -> None:
    """The table of versions, each check, and where the page is."""
    console.print()
    for each in sentences(large):
        console.print(each, highlight=False, soft_wrap=True)
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for heading in VERSION_COLUMNS:
        table.add_column(heading, justify="right")
    for one in large.rounds:
        table.add_row(*_version_cells(large, one))
    console.print(table)
    console.print(_meanings(VERSION_COLUMNS), style="dim", highlight=False, soft_wrap=True)
    console.print()
    show_checks(console, checks)
    console.print(f"\nreport: {page}  (and large.json beside it)", highlight=False, soft_wrap=True)


def sentences(large: Large) -> list[str]:
    """What happened, in figures."""
    usual = large.undisturbed
    rate = median(large.rate(one) for one in usual) / GIB
    each = median(large.size_bytes / fetch.seconds for one in usual for fetch in one.fetches) / GIB
    last_s = median(one.seconds for one in usual)
    sent = median(one.sent_bytes for one in usual)
    peak = max(one.peak_bytes for one in large.rounds)
    numbers = f"{usual[0].version} to {usual[-1].version}"
    found = [
        f"In this run a trainer published {len(large.rounds)} versions of {size_text(large.size_bytes)}, each with all "
        f"bytes changed, and {large.rollouts} rollouts fetched each version at the same time. All are processes of "
        f"this machine and have the weights in host memory; the bytes went over its loopback, by TCP. "
        f"It took {large.seconds:.0f} s, and {size_text(peak)} of memory in all at most.",
        f"Medians of versions {numbers}: the last rollout had all of it {last_s:.2f} s after it was published. "
        f"That is {rate:.2f} GiB/s in all, and {each:.2f} GiB/s for each rollout. "
        f"The trainer sent {size_text(sent)}, {sent / large.size_bytes:.2f} times the model; rollouts sent the rest.",
    ]
    return [*found, _of_kill(large.kill)] if large.kill is not None else found


def _of_kill(kill: Kill) -> str:
    readers = [each for each in kill.disturbed if each.is_reader]
    others = [each.longer_s for each in kill.disturbed if not each.is_reader]
    beside = f", the other rollouts {_longer(others)}" if others else ""
    return (
        f"In version {kill.version} {kill.rollout} was killed (SIGKILL) {kill.at_s:.2f} s after the version was "
        f"published, while {', '.join(each.rollout for each in readers)} read from it. Bytes of another source came "
        f"within {max(each.pause_s for each in readers):.2f} s. Its readers took "
        f"{_longer([each.longer_s for each in readers])} than in the undisturbed versions{beside} (medians). "
        "From then on one rollout less shared the machine."
    )


def _longer(seconds: list[float]) -> str:
    value = median(seconds)
    return f"{abs(value):.2f} s {'longer' if value > 0 else 'less'}"


def _version_cells(large: Large, one: Round) -> tuple[str, ...]:
    rates = [large.size_bytes / fetch.seconds / GIB for fetch in one.fetches]
    return (
        str(one.version),
        str(len(one.fetches)),
        f"{one.seconds:.2f}",
        f"{large.rate(one) / GIB:.2f}",
        f"{min(rates):.2f} … {max(rates):.2f}",
        f"{one.sent_bytes / GIB:.2f}",
        f"{one.stall_s:.2f}",
    )


def _rollout_rows(large: Large) -> list[tuple[str, ...]]:
    by_source = _by_source(large)
    rows = []
    for name, sources in by_source.items():
        seconds = [each.seconds for one in large.undisturbed for each in one.fetches if each.rollout == name]
        read = (bytes_from(sources, trainer=True), bytes_from(sources, trainer=False))
        sent = sum(each.get(name, 0) for each in by_source.values())
        words = f"{name}, killed" if large.kill is not None and large.kill.rollout == name else name
        rate = large.size_bytes / median(seconds) / GIB
        rows.append((words, f"{rate:.2f}", *(f"{size_bytes / GIB:.2f}" for size_bytes in (*read, sent))))
    return rows


def _by_source(large: Large) -> dict[str, dict[str, int]]:
    """Of each rollout: what it has received in all versions, by source."""
    found: dict[str, dict[str, int]] = {}
    for fetch in (fetch for one in large.rounds for fetch in one.fetches):
        mine = found.setdefault(fetch.rollout, {})
        for source, size_bytes in fetch.bytes_by_source.items():
            mine[source] = mine.get(source, 0) + size_bytes
    return found


def _by_source_drawn(large: Large) -> str:
    by_source = _by_source(large)
    figure, axes = blank_axes("", xlabel="MiB received, in all versions")
    draw_sources(axes, list(by_source.items()), colours_of(list(by_source)))
    return as_svg(figure, axes)


def _kill_parts(large: Large) -> list[str]:
    """The table and the figure of the version in which a rollout was killed."""
    if large.kill is None:
        return []
    rows = [tuple(KILL_COLUMNS), *map(_kill_cells, large.kill.disturbed)]
    title = f"Bytes that came to each rollout in version {large.kill.version}"
    return [pictures({title: _curves(large, large.kill)}), table_of(rows), legend(_meanings(KILL_COLUMNS))]


def _kill_cells(each: Disturbed) -> tuple[str, ...]:
    lost = ("no", "") if each.share is None else (f"at {each.share:.0%}", f"{each.pause_s:.2f}")
    return (each.rollout, *lost, f"{each.seconds:.2f}", f"{each.usual_s:.2f}", f"{each.longer_s:+.2f}")


def _curves(large: Large, kill: Kill) -> str:
    figure, axes = blank_axes("MiB received", xlabel="seconds since the version was published")
    colours = colours_of(list(_by_source(large)))
    readers = {each.rollout for each in kill.disturbed if each.is_reader}
    for fetch in next(one.fetches for one in large.rounds if one.version == kill.version):
        is_reader = fetch.rollout in readers
        words = f"{fetch.rollout}, lost its source" if is_reader else fetch.rollout
        times, sizes = _curve(fetch)
        axes.plot(times, sizes, c=colours[fetch.rollout], lw=2.4 if is_reader else 1.0, label=words)
    mark(axes, kill.at_s, f"{kill.rollout} killed")
    return as_svg(figure, axes)


def _curve(fetch: Fetch) -> tuple[list[float], list[float]]:
    times = [fetch.began_s, *dict.fromkeys(when for when, _, _ in fetch.curve)]
    return times, [fetch.received_at(when) / MIB for when in times]


def _meanings(columns: dict[str, str]) -> str:
    return "; ".join(f"{heading}: {meaning}" for heading, meaning in columns.items() if meaning) + "."
