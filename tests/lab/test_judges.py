"""What a run says of itself: copies over an uplink, a relay that became slow, what it costs to keep a version."""

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from socket import socketpair

import pytest

from bench.lab.director import Ground, Run
from bench.lab.events import AnyEvent, Fault, Seen, SeenRead
from bench.lab.fan_out import FanOutRun
from bench.lab.goals import Finding
from bench.lab.network import Place
from bench.lab.relays import SLOWED, EstablishedRun, SlowRelayRun
from bench.lab.scenarios import ESTABLISHED, LAYOUTS, SITES, SLOW_RELAY, Scenario
from bench.lab.storm import MEMORY, judge_open, kinds_open
from bench.lab.uplinks import UplinkRun

from .story import published, updated

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


def test_a_relay_that_was_never_caught_in_mid_transfer_shows_nothing(tmp_path: Path) -> None:
    assert not judged(over(SlowRelayRun, SLOW_RELAY, tmp_path, [])).holds


def test_who_kept_a_copy_is_told_from_the_others(tmp_path: Path) -> None:
    seen = Seen(
        time=11.0,
        process="watcher",
        latest=1,
        has_latest=[],
        copies={"rollout-1": [1], "trainer": [1]},
        cross_site_bytes={},
        reads=[],
    )
    events: list[AnyEvent] = [
        seen,
        updated(12.0, 1, process="rollout-0", stall_s=0.5),
        updated(12.5, 1, process="rollout-1", stall_s=0.75),
    ]
    finding = judged(over(EstablishedRun, ESTABLISHED, tmp_path, events))
    assert "1 of 4 kept a copy" in finding.sentence
    assert finding.found == (
        "who kept a copy: mean 0.75 s, longest 0.75 s over 1; the others: mean 0.50 s, longest 0.50 s over 1"
    )


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


def test_without_one_alone_or_a_version_that_all_have_nothing_is_shown(tmp_path: Path) -> None:
    assert not judged(fan_out(tmp_path / "none", [1.0, 2.0], {})).holds
    run = fan_out(tmp_path / "half", [1.0, 2.0], {"hub": 10.0})
    run.events = [event for event in run.events if getattr(event, "process", "") != "rollout-1"]
    assert not judged(run).holds


@pytest.mark.parametrize(
    ("after", "copies", "holds"),
    [
        ({"socket": 9}, [], True),
        ({"socket": 10}, [], False),
        ({"socket": 9, MEMORY: 2}, [7], True),  # one is for the next
        ({"socket": 9, MEMORY: 3}, [7], False),
        ({"socket": 9, MEMORY: 1}, [], False),
        ({"socket": 10, MEMORY: 0}, [7], False),
    ],
)
def test_what_is_open_after_a_storm(after: dict[str, int], copies: list[int], holds: bool) -> None:
    before = {"trainer": Counter({"socket": 9, MEMORY: 1})}
    assert judge_open(before, {"trainer": Counter(after)}, {"trainer": copies}).holds is holds


def test_descriptors_are_counted_by_kind() -> None:
    ours, theirs = socketpair()
    before = kinds_open(os.getpid())
    with ours, theirs, open(os.devnull) as file:
        assert kinds_open(os.getpid()) - before == {os.devnull: 1}
        assert before["socket"] >= 2
        assert file
    assert before - kinds_open(os.getpid()) == {"socket": 2}
