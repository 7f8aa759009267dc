"""No wake-up is missed: the judge of `wakeups` over simulated histories, and a server that misses some."""

import pytest

from tensorhub.core.server import routine
from tensorhub.core.server.state import State
from tensorhub.sim import network
from tensorhub.sim.runner import run_seed

from .wakeups import Judged

SEEDS = range(9)
EVERY = 9  # events: about a second for each seed


def judge(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(network, "Server", Judged)
    monkeypatch.setattr(Judged, "every", EVERY)
    monkeypatch.setattr(Judged, "events", 0)
    monkeypatch.setattr(Judged, "judged", 0)
    monkeypatch.setattr(Judged, "missed", [])
    for seed in SEEDS:
        run_seed(seed)
    assert Judged.judged > 200
    return Judged.missed


@pytest.mark.replaces
def test_whoever_has_something_new_to_hear_is_decided_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judge(monkeypatch) == []


@pytest.mark.replaces
def test_a_server_that_wakes_nobody_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(State, "mark_waiting_dirty", lambda state, model, *topics: None)
    assert judge(monkeypatch)


@pytest.mark.replaces
def test_a_server_that_takes_every_report_for_nothing_new_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routine, "_is_still", lambda state, model, member, report: True)
    assert any("would hear" in missed for missed in judge(monkeypatch))
