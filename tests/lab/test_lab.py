"""The laboratory itself, for some seconds: real processes in namespaces on shaped links. Needs root."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from bench.lab.director import Run, ground_of
from bench.lab.events import Published, Updated
from bench.lab.network import PREFIX, Network, NoLinks, run, why_not
from bench.lab.scenarios import MIB, SITES, STANDALONE
from bench.lab.uplinks import UplinkRun

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(why_not() is not None, reason=f"no laboratory here: {why_not()}"),
]

TINY = replace(
    STANDALONE,
    rollouts=2,
    size_bytes=MIB,
    chunk_bytes=MIB // 8,
    rate_mbit=100,
    versions=2,
    train_s=0.3,
    generate_s=0.2,
)


@pytest.fixture(scope="module", autouse=True)
def links_can_be_made() -> None:
    """Root in a container may still be refused."""
    try:
        with Network() as network:
            network.add_site("home")
            network.add("probe", "home", rate_mbit=10)
    except NoLinks as error:
        pytest.skip(f"no laboratory here: {error}")


OTHERS = ("hub-recut", "hub-always", "hub-python", "star", "store")


@pytest.mark.parametrize("strategy", ["hub", *(pytest.param(each, marks=pytest.mark.long) for each in OTHERS)])
def test_every_rollout_ends_with_the_last_version(strategy: str, tmp_path: Path) -> None:
    with ground_of(TINY, tmp_path) as ground:
        done = Run(TINY, strategy, ground, tmp_path / strategy).run()
    outcome = done.outcome()
    assert done.nursery.living == []
    assert f"{PREFIX}{os.getpid()}-" not in run("ip", "netns", "list")
    assert outcome.hashes_wrong == []
    assert outcome.versions == TINY.versions
    last = {e.process: e.version for e in done.events if isinstance(e, Updated)}
    assert last == {"rollout-0": TINY.versions, "rollout-1": TINY.versions}
    assert len([event for event in done.events if isinstance(event, Published)]) == TINY.versions + 1
    assert set(outcome.slices) == {"trainer", "rollout-0", "rollout-1"}
    assert all(slices.moving + slices.still for slices in outcome.slices.values()), "each of them computes"
    assert all(each.still for each in outcome.slices.values())


@pytest.mark.long
def test_what_leaves_a_site_goes_through_its_uplink(tmp_path: Path) -> None:
    scenario = replace(SITES, rollouts=4, far_sites=2, size_bytes=MIB, chunk_bytes=MIB // 8, uplink_mbit=50, versions=1)
    scenario = replace(scenario, train_s=0.3, generate_s=0.2)
    with ground_of(scenario, tmp_path) as ground:
        done = UplinkRun(scenario, "hub", ground, tmp_path / "hub")
        done.run()
    (finding,) = done.judge()
    assert 1.0 <= done.copies < scenario.rollouts, finding
    assert done.outcome().hashes_wrong == []
