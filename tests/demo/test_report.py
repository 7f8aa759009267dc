"""The report: a page that needs nothing else, JSON that says the same, a table that fits the terminal."""

import re
from base64 import b64decode
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from rich.console import Console

from bench.demo.checks import judge
from bench.demo.events import AnyEvent, Generated
from bench.demo.plots import centred_means
from bench.demo.progress import Progress
from bench.demo.report import HEADINGS, LEGEND, Report, html, introduction, show, write_report
from bench.demo.summary import Summary, summarise

from .story import STEPS, good_run

TITLES = ["Reward", "Version held by each rollout", "Stall per update", "Bytes by source"]


def summary_of(events: list[AnyEvent]) -> Summary:
    return summarise(events, steps=STEPS, seed=3, updates=True, seconds=12.0)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    summary = summary_of(good_run())
    return write_report(tmp_path, summary, judge(summary), good_run())


def test_the_page_needs_nothing_but_itself(written: Path) -> None:
    page = written.read_text(encoding="utf-8")
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    images = re.findall(r'<img alt="([^"]+)" src="data:image/svg\+xml;base64,([^"]+)">', page)
    assert [title for title, _ in images] == TITLES
    for _, picture in images:
        assert ElementTree.fromstring(b64decode(picture)).tag.endswith("svg")


def test_the_page_says_what_held_and_who_did_what(written: Path) -> None:
    page = written.read_text(encoding="utf-8")
    assert page.count('class="yes"') == 7
    assert 'class="no"' not in page
    for words in ("was killed", "joined late", "rollout-2", "none from the trainer", "seed 3"):
        assert words in page


def test_the_page_begins_with_what_it_is_about(written: Path) -> None:
    first = re.findall(r"<p>(.*?)</p>", written.read_text(encoding="utf-8"))[0]
    assert first.startswith("TensorHub hands the weights of a model")
    assert first.endswith(
        "In this run a trainer published its weights after each step and 3 rollouts updated to them, while rollout-1"
        " was killed, the reference server was killed, the reference server was restarted, rollout-2 joined late."
    )
    assert re.findall(r"[.] ", first) == [". "], "two sentences"
    kept = summarise(good_run(), steps=STEPS, seed=3, updates=False, seconds=12.0)
    assert "3 rollouts kept the first ones, while" in introduction(kept)


def test_each_column_says_what_it_is(written: Path) -> None:
    page = written.read_text(encoding="utf-8")
    for heading in HEADINGS[1:]:
        assert f"<th>{heading}</th>" in page
        assert f"{heading}: " in LEGEND
    assert f'<p class="detail">{LEGEND}</p>' in page


def test_the_report_and_the_live_table_show_one_version_of_each_rollout() -> None:
    """Also of a rollout that was killed between an update and the batch that it would have made."""
    events = [event for event in good_run() if not (isinstance(event, Generated) and event.time > 1.5)]
    progress = Progress(STEPS)
    progress.take(events)
    told = {rollout.name: rollout.held_version for rollout in summary_of(events).rollouts}
    assert told == {name: row.version for name, row in progress.rollouts.items()}
    assert told["rollout-1"] == 2
    row = next(line for line in re.findall(r"<tr>.*?</tr>", html(summary_of(events), [], {})) if "rollout-1" in line)
    assert re.findall(r"<td>(.*?)</td>", row)[3] == "2"


def test_a_moving_mean_is_centred_on_its_points() -> None:
    line = [float(n) for n in range(9)]
    assert centred_means(line, 2) == line, "of a straight line it is that line, also at the ends"
    step = [0.0] * 5 + [1.0] * 5
    assert centred_means(step, 2) == [0.0, 0.0, 0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0]
    assert centred_means([], 2) == []


def test_faults_are_marked_in_the_figures(written: Path) -> None:
    page = written.read_text(encoding="utf-8")
    pictures = [b64decode(text).decode() for text in re.findall(r"base64,([^\"]+)", page)]
    for picture in pictures[:3]:
        assert "rollout-1 killed" in picture
        assert "server restarted" in picture


def test_json_says_the_same(written: Path) -> None:
    report = msgspec.json.decode((written.parent / "report.json").read_bytes(), type=Report)
    assert report.ok
    assert report.summary == summary_of(good_run())
    assert report.events == good_run()


def test_the_table_fits_a_terminal_of_eighty_columns(tmp_path: Path) -> None:
    summary = summary_of(good_run())
    shown = StringIO()
    show(Console(width=80, file=shown), summary, judge(summary), tmp_path / "report.html")
    lines = [line for line in shown.getvalue().splitlines() if line.startswith("rollout")]
    assert len(lines) == 1 + len(summary.rollouts), "no line is broken in two"
    assert "…" not in "".join(lines)


def test_a_run_of_which_nothing_is_known_has_a_report_too(tmp_path: Path) -> None:
    summary = summary_of([])
    assert write_report(tmp_path, summary, judge(summary), []).exists()
