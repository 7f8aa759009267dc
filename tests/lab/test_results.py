"""Figures, verdicts and reports of the laboratory, over events made up."""

import io
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from bench.demo.processes import ProcessFailed
from bench.lab.director import Ground, Run
from bench.lab.events import AnyEvent, Fault, Seen, SeenRead
from bench.lab.fan_out import FanOutRun
from bench.lab.goals import Finding, judge
from bench.lab.interpreter import SLICE_S, Slices
from bench.lab.network import Place
from bench.lab.relays import SLOWED, SlowRelayRun
from bench.lab.report import Report
from bench.lab.run import Series, Step
from bench.lab.scenarios import LAYOUTS, SCENARIOS, SITES, SLOW_RELAY, STANDALONE, Scenario
from bench.lab.summary import Outcome
from bench.lab.uplinks import UplinkRun

from .story import computed, condensed, published, run_of, seen, updated


def test_stall_counts_from_the_beginning() -> None:
    found = condensed(
        [
            published(9.0, 0, unpublish_s=5.0),
            updated(9.5, 0, stall_s=7.0, is_first=True),
            published(11.0, 1, unpublish_s=0.1, publish_s=0.2),
            updated(12.0, 1, stall_s=0.5),
            updated(13.0, 1, stall_s=0.25, sha256=""),  # looked, found nothing newer
        ]
    )
    assert found.rollout_stall_s == pytest.approx(0.75)
    assert found.trainer_stall_s == pytest.approx(0.3)
    assert found.total_stall_s == pytest.approx(1.05)
    assert (found.updates, found.versions, found.update_s, found.join_s) == (1, 1, [0.5], [])


def test_a_wrong_hash_is_found() -> None:
    events = [published(9.0, 0), published(11.0, 1), updated(12.0, 1), updated(13.0, 1, sha256="another")]
    found = condensed([*events, updated(14.0, 7, sha256="hash of 7")])  # nobody published 7
    assert found.hashes_compared == 3
    assert [text.split(":")[0] for text in found.hashes_wrong] == ["rollout-0, version 1", "rollout-0, version 7"]


def test_slices_while_weights_move_are_compared_with_those_of_the_same_worker() -> None:
    found = condensed(
        [
            published(9.0, 0),
            computed(11.0, "trainer", still=100, still_s=0.5),
            computed(12.0, "trainer", moving=100, moving_s=0.55, still=100, still_s=0.5),
            computed(12.0, "rollout-0", moving=300, moving_s=3.0, still=10, still_s=0.1),
            computed(12.0, "rollout-1", still=100, still_s=5.0),  # slow, but nothing ever moved here
        ]
    )
    assert found.slices["trainer"] == Slices(100, 0.55, 200, 1.0)
    assert found.slices["trainer"].ratio == pytest.approx(1.1)
    assert found.moving_ratio == pytest.approx((0.55 + 3.0) / (0.5 + 3.0))
    assert found.slice_ratio == pytest.approx((0.55 + 1.0 + 3.1 + 5.0) / (710 * SLICE_S))


def test_the_better_of_the_global_stages_counts() -> None:
    outcomes = [run_of("hub", stall_s=1.0), run_of("ring", stall_s=8.0), run_of("broadcast", stall_s=20.0)]
    found = judge(STANDALONE, outcomes, round_trip_s=0.0)[0]
    assert found.holds
    assert "the ring over the hub" in found.sentence
    assert found.found.endswith("= 8.0x")
    below = [run_of("hub", stall_s=2.0), run_of("ring", stall_s=8.0)]
    assert not judge(STANDALONE, below, round_trip_s=0.0)[0].holds


def test_what_a_busy_processor_made_is_not_valid() -> None:
    outcomes = [run_of("hub", stall_s=0.1, idle_share=0.1), run_of("ring", stall_s=8.0)]
    findings = judge(STANDALONE, outcomes, round_trip_s=0.0)
    assert not findings[0].holds
    assert "not valid" in findings[0].found
    assert not findings[-1].holds


def test_a_wrong_byte_fails() -> None:
    outcome = condensed([published(9.0, 0), published(11.0, 1), updated(12.0, 1, sha256="another")])
    assert not judge(STANDALONE, [outcome], round_trip_s=0.0)[-2].holds


def test_unpublish_is_held_to_a_chunk_and_two_round_trips() -> None:
    scenario = replace(STANDALONE, chunk_bytes=500_000, rate_mbit=400)  # 10 ms
    for unpublish_s, holds in ((0.075, True), (0.085, False)):
        outcome = condensed([published(9.0, 0), published(11.0, 1, unpublish_s=unpublish_s), updated(12.0, 1)])
        found = next(f for f in judge(scenario, [outcome], round_trip_s=0.01) if "unpublish" in f.sentence)
        assert found.holds == holds


def test_across_the_wan_goes_one_copy() -> None:
    for count, holds in ((1000, True), (1004, True), (1006, False)):
        outcome = condensed([published(9.0, 0), updated(12.0, 0), seen(12.0, {0: count})])
        found = next(f for f in judge(SCENARIOS["cross-site"], [outcome], round_trip_s=0.0) if "WAN" in f.sentence)
        assert found.holds == holds


@pytest.mark.parametrize(
    ("moving_s", "idle_share", "holds"), [(1.04, 0.5, True), (1.06, 0.5, False), (1.04, 0.1, False)]
)
def test_transfers_may_not_keep_a_worker_from_its_interpreter(moving_s: float, idle_share: float, holds: bool) -> None:
    events = [published(9.0, 0), updated(12.0, 0)]
    events.append(computed(12.0, "rollout-0", moving=200, moving_s=moving_s, still=200, still_s=1.0))
    events.append(computed(12.0, "rollout-1", moving=1, moving_s=0.005, still=1, still_s=0.005))  # too few to be named
    outcome = condensed(events, idle_share=idle_share)
    (found,) = [f for f in judge(STANDALONE, [outcome], round_trip_s=0.0) if "slice" in f.sentence]
    assert found.holds == holds
    assert "rollout-0" in found.found
    star = condensed(events, strategy="star", idle_share=idle_share)
    assert not [f for f in judge(STANDALONE, [star], round_trip_s=0.0) if "slice" in f.sentence], "nobody's goal"


NOWHERE = Place("nowhere", "nowhere", "10.0.0.1")


def over(kind: type[Run], scenario: Scenario, folder: Path, events: list[AnyEvent]) -> Run:
    """A run that has had these events."""
    run = kind(scenario, "hub", Ground(NOWHERE, NOWHERE, NOWHERE, []), folder / "run")
    run.events = events
    return run


def judged(run: Run) -> Finding:
    (finding,) = run.judge()
    return finding


@pytest.mark.parametrize(("copies", "holds"), [(1.04, True), (1.2, False), (0.0, False)])
def test_copies_that_leave_are_counted_by_version(tmp_path: Path, copies: float, holds: bool) -> None:
    events: list[AnyEvent] = [updated(9.0, 0, is_first=True)]
    for version in (1, 2):
        events += [published(10.0 * version, version), updated(10.0 * version + 3, version)]
    run = over(UplinkRun, SITES, tmp_path, events)
    assert isinstance(run, UplinkRun)
    run.sent_bytes = round(copies * 2 * SITES.size_bytes)
    finding = judged(run)
    assert finding.holds == holds
    assert finding.found.startswith(f"{copies:.2f}; everybody had it within 3.0 s")


@pytest.mark.parametrize(("last_s", "holds"), [(12.9, True), (13.1, False)])
def test_the_others_are_compared_with_the_version_before_the_link_became_slow(
    tmp_path: Path, last_s: float, holds: bool
) -> None:
    events: list[AnyEvent] = [published(0.0, 1), published(100.0, 2)]
    for name, took_s in (("rollout-0", 9.0), ("rollout-1", 10.0), ("rollout-2", 8.0)):
        events.append(updated(took_s, 1, process=name))
    for name, took_s in (("rollout-0", 40.0), ("rollout-1", 10.0), ("rollout-2", last_s)):
        events.append(updated(100.0 + took_s, 2, process=name))
    read = SeenRead("rollout-1", "rollout-0", 2, 1, 4, False)
    for time, reads in ((103.0, [read]), (105.0, [])):
        events.append(
            Seen(time=time, process="watcher", latest=2, has_latest=[], copies={}, cross_site_bytes={}, reads=reads)
        )
    events.append(Fault(time=102.0, process="rollout-0", what=SLOWED))
    run = over(SlowRelayRun, replace(SLOW_RELAY, rollouts=3), tmp_path, events)
    assert isinstance(run, SlowRelayRun)
    run.slowed = "rollout-0"
    finding = judged(run)
    assert finding.holds == holds
    ratio = last_s / 10
    assert finding.found == f"{last_s:.1f} s / 10.0 s = {ratio:.2f}, left after 3.0 s; rollout-0 itself 40.0 s"


def fan_out(folder: Path, took_s: list[float], alone: dict[str, float]) -> FanOutRun:
    """A run of so many rollouts, the first of which has each of three versions at once, and the last so much later."""
    events: list[AnyEvent] = [published(0.0, 0), updated(9.0, 0, is_first=True)]
    for version in (1, 2, 3):
        events.append(published(100.0 * version, version))
        for number, s in enumerate(took_s):
            events.append(updated(100.0 * version + s * version, version, process=f"rollout-{number}"))
    run = FanOutRun(
        replace(LAYOUTS, rollouts=len(took_s)), "hub", Ground(NOWHERE, NOWHERE, NOWHERE, []), folder / "run", alone
    )
    run.events = events
    return run


@pytest.mark.parametrize(("last_s", "holds"), [(5.7, True), (5.8, False)])
def test_the_last_of_many_is_held_to_what_one_alone_took(tmp_path: Path, last_s: float, holds: bool) -> None:
    alone: dict[str, float] = {}
    assert fan_out(tmp_path / "one", [5.0], alone).judge() == []
    assert alone == {"hub": 10.0}
    finding = judged(fan_out(tmp_path / "many", [4.0, last_s, 5.0], alone))
    assert finding.holds == holds
    assert finding.found.startswith(f"{2 * last_s:.2f} s / 10.00 s = {last_s / 5:.2f} (")


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
