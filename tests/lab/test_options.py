"""What a user may ask the laboratory for, and what it answers to what it cannot do."""

import pytest

from bench.lab.run import Options, scenario_of
from bench.lab.strategies.choose import STRATEGIES
from tensorhub import UsageError
from tensorhub.protocol.settings import Settings
from tensorhub.runtime.config import server_settings


def test_what_is_given_replaces_what_the_scenario_has() -> None:
    found = scenario_of("standalone", Options(rollouts=2, rate_mbit=100, versions=1, strategies=("hub", "star")))
    assert (found.rollouts, found.rate_mbit, found.versions, found.strategies) == (2, 100, 1, ("hub", "star"))
    assert found.held_share == 0.5
    assert scenario_of("standalone", Options(is_idle=True)).held_share == 0.0
    assert found.size_bytes == scenario_of("standalone", Options()).size_bytes


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("nowhere", Options(), "no scenario 'nowhere'"),
        ("standalone", Options(strategies=("pigeon",)), "no strategy 'pigeon'"),
        ("elastic", Options(strategies=("ring",)), "nobody can join or leave"),
    ],
)
def test_what_cannot_be_is_refused(name: str, options: Options, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        scenario_of(name, options)


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_server_of_each_strategy_takes_its_settings(name: str) -> None:
    given = dict(setting.split("=", 1) for setting in STRATEGIES[name].server)
    assert (server_settings(given) != Settings()) == bool(given), "it says what is not so by default"
