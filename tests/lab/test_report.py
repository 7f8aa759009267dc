"""The report: a table with every strategy, JSON with everything, a figure."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from bench.lab.goals import judge
from bench.lab.report import Report, introduction, show, write_report
from bench.lab.scenarios import SCENARIOS, STANDALONE

from .story import run_of


def test_every_strategy_is_in_the_table_and_the_file(tmp_path: Path) -> None:
    outcomes = [run_of("hub", stall_s=1.0), run_of("ring", stall_s=8.0, idle_share=0.05)]
    findings = judge(STANDALONE, outcomes, round_trip_s=0.0)
    path = write_report(tmp_path, STANDALONE, outcomes, findings, {"cores": 2})
    console = Console(record=True, width=160)
    show(console, outcomes, findings, [path])
    text = console.export_text()
    assert "the hub" in text
    assert "5% busy" in text
    report = msgspec.json.decode(path.read_bytes(), type=Report)
    assert report.outcomes == outcomes
    assert not report.ok
    assert report.scenario["rate_mbit"] == STANDALONE.rate_mbit


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_introduction_says_what_is_modelled(name: str) -> None:
    text = introduction(SCENARIOS[name])
    assert f"{SCENARIOS[name].rollouts} rollouts" in text
    assert "holds its interpreter for 50% of that, 5 ms at a time" in text
    assert "idle" in introduction(replace(SCENARIOS[name], held_share=0.0))
    assert ("between the sites" in text) == bool(SCENARIOS[name].wan_mbit)


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    plots = pytest.importorskip("bench.lab.plots", reason="matplotlib is not installed")
    outcomes = [run_of("hub", stall_s=1.0), run_of("ring", stall_s=8.0)]
    for path in plots.draw(tmp_path, STANDALONE, outcomes):
        assert path.stat().st_size > 1000
