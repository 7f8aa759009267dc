"""The verdict: against whom a scenario is compared, and when it may not be believed."""

from dataclasses import replace

import pytest

from bench.lab.goals import BESIDE, Finding, judge
from bench.lab.scenarios import SCENARIOS, STANDALONE

from .story import computed, condensed, published, run_of, seen, updated


def first(findings: list[Finding]) -> Finding:
    return findings[0]


def test_the_better_of_the_global_stages_counts() -> None:
    outcomes = [run_of("hub", stall_s=1.0), run_of("ring", stall_s=8.0), run_of("broadcast", stall_s=20.0)]
    found = first(judge(STANDALONE, outcomes, round_trip_s=0.0))
    assert found.holds
    assert "the ring over the hub" in found.sentence
    assert found.found.endswith("= 8.0x")


def test_of_our_strategies_the_best_is_held_to_the_goal() -> None:
    outcomes = [run_of("hub", stall_s=4.0), run_of("hub-ready", stall_s=0.5), run_of("ring", stall_s=8.0)]
    best, other = judge(STANDALONE, outcomes, round_trip_s=0.0)[:2]
    assert (best.holds, best.found) == (True, "8.00 s / 0.50 s = 16.0x")
    assert (other.holds, other.wanted) == (True, BESIDE)
    assert other.found.endswith("= 2.0x")


def test_a_ratio_below_the_goal_fails() -> None:
    found = first(judge(STANDALONE, [run_of("hub", stall_s=2.0), run_of("ring", stall_s=8.0)], round_trip_s=0.0))
    assert not found.holds


def test_what_a_busy_processor_made_is_not_valid() -> None:
    outcomes = [run_of("hub", stall_s=0.1, idle_share=0.1), run_of("ring", stall_s=8.0)]
    findings = judge(STANDALONE, outcomes, round_trip_s=0.0)
    assert not first(findings).holds
    assert "not valid" in first(findings).found
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
