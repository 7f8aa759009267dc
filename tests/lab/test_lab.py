"""The laboratory itself, for some seconds: real processes in namespaces on shaped links. Needs root."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tensorhub.lab.director import Run, ground_of
from tensorhub.lab.events import Published, Updated
from tensorhub.lab.network import PREFIX, Network, NoLinks, run, why_not
from tensorhub.lab.scenarios import MIB, STANDALONE
from tensorhub.lab.summary import Outcome

pytestmark = [
    pytest.mark.processes,
    pytest.mark.root,
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


def outcome_of(strategy: str, folder: Path) -> tuple[Run, Outcome]:
    with ground_of(TINY, folder) as ground:
        done = Run(TINY, strategy, ground, folder / strategy).run()
    return done, done.outcome()


@pytest.mark.parametrize("strategy", ["hub", "hub-always", "star", "store"])
def test_every_rollout_ends_with_the_last_version(strategy: str, tmp_path: Path) -> None:
    done, outcome = outcome_of(strategy, tmp_path)
    assert outcome.hashes_wrong == []
    assert outcome.versions == TINY.versions
    last = {e.process: e.version for e in done.events if isinstance(e, Updated)}
    assert last == {"rollout-0": TINY.versions, "rollout-1": TINY.versions}
    assert len([event for event in done.events if isinstance(event, Published)]) == TINY.versions + 1


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    done, _ = outcome_of("hub", tmp_path)
    assert done.nursery.living == []
    assert f"{PREFIX}{os.getpid()}-" not in run("ip", "netns", "list")
