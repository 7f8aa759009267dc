"""The steps of a scenario: what one of them has measured outlives the failure of another."""

import io
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from bench.demo.processes import ProcessFailed
from bench.lab.faults import SeedKilledRun
from bench.lab.goals import Finding
from bench.lab.report import Report
from bench.lab.run import Options, Series, Step, scenario_of
from bench.lab.scenarios import CROSS_SITE, MIB, STANDALONE
from bench.lab.summary import Outcome

from .story import run_of


class Done:
    """A run that has measured what it was to measure."""

    seconds = 7.0

    def run(self) -> "Done":
        return self

    def outcome(self) -> Outcome:
        return run_of("hub", stall_s=0.5)

    def judge(self) -> list[Finding]:
        return []


class Failing(Done):
    """A run in which something fails."""

    def run(self) -> "Done":
        raise ProcessFailed("waited 90 s for a read that is half done")


def reported(folder: Path, *steps: Step) -> tuple[int, str, Report]:
    """Exit status, what was printed, what was written."""
    said = io.StringIO()
    series = Series(STANDALONE, folder, Console(file=said, width=200))
    series.run(steps)
    status = series.report()
    written = (folder / f"{STANDALONE.name}.json").read_bytes()
    return status, said.getvalue(), msgspec.json.decode(written, type=Report)


def step(title: str, kind: type[Done], *, is_faulty: bool = False) -> Step:
    return Step(title, kind, is_faulty)  # type: ignore[arg-type]


def test_what_was_measured_is_reported_although_a_later_step_fails(tmp_path: Path) -> None:
    status, said, report = reported(tmp_path, step("first", Done), step("second", Failing), step("third", Done))
    assert status == 1
    assert [outcome.title for outcome in report.outcomes] == ["first", "third"]
    assert not report.ok
    (failure,) = [finding for finding in report.findings if not finding.holds]
    assert failure.sentence == "second runs to its end"
    assert failure.found == "waited 90 s for a read that is half done"
    assert "second failed: waited 90 s" in said
    assert "✗ second runs to its end" in said
    assert said.count("500 ms") >= 2


def test_a_scenario_of_which_nothing_was_measured_says_so(tmp_path: Path) -> None:
    status, said, report = reported(tmp_path, step("only", Failing))
    assert (status, report.outcomes, report.ok) == (1, [], False)
    assert "✗ only runs to its end" in said


def test_all_that_went_well_is_a_success(tmp_path: Path) -> None:
    status, _, report = reported(tmp_path, step("only", Done), step("broken on purpose", Done, is_faulty=True))
    assert (status, report.ok) == (0, True)
    assert [outcome.is_faulty for outcome in report.outcomes] == [False, True]


@pytest.mark.parametrize(("mib", "is_long_enough"), [(16, True), (12, True), (5, False), (1, False)])
def test_a_crossing_too_short_to_be_hit_in_its_middle_is_left_out_with_the_reason(
    mib: int, is_long_enough: bool
) -> None:
    why_not = SeedKilledRun.why_not(replace(CROSS_SITE, size_bytes=mib * MIB))
    assert (why_not is None) == is_long_enough
    assert is_long_enough or f"{mib} MiB cross the WAN within" in str(why_not)


@pytest.mark.parametrize("mib", [1, 12, 100])
def test_another_size_has_as_many_chunks(mib: int) -> None:
    scenario = scenario_of("cross-site", Options(size_bytes=mib * MIB))
    assert scenario.size_bytes // scenario.chunk_bytes == CROSS_SITE.size_bytes // CROSS_SITE.chunk_bytes
