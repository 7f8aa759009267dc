"""No wake-up is missed: the judge of `wakeups` over simulated histories, and a server that misses some."""

from collections.abc import Callable

import pytest

from tensorhub.server import sessions
from tensorhub.server.state import State
from tests.sim import network
from tests.sim.runner import run_seed

from .wakeups import Judged

SEEDS = range(9)
EVERY = 29  # events: each that is judged takes two copies of the server, some 25 ms
OFTEN = 9


def judge(
    monkeypatch: pytest.MonkeyPatch, found: Callable[[], bool] = lambda: False, *, every: int = EVERY
) -> list[str]:
    """What was missed, up to the seed after which enough was `found`."""
    monkeypatch.setattr(network, "Server", Judged)
    monkeypatch.setattr(Judged, "every", every)
    monkeypatch.setattr(Judged, "events", 0)
    monkeypatch.setattr(Judged, "judged", 0)
    monkeypatch.setattr(Judged, "missed", [])
    for seed in SEEDS:
        run_seed(seed)
        if found():
            return Judged.missed
    assert Judged.judged > 200
    return Judged.missed


@pytest.mark.parametrize("every", [EVERY, pytest.param(OFTEN, marks=pytest.mark.long)])
def test_whoever_has_something_new_to_hear_is_decided_for(monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    assert judge(monkeypatch, every=every) == []


def test_a_server_that_wakes_nobody_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(State, "mark_waiting_dirty", lambda state, model, *topics: None)
    assert judge(monkeypatch, lambda: bool(Judged.missed))


def test_a_server_that_takes_every_report_for_nothing_new_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_is_still", lambda state, model, member, report: True)

    def found() -> bool:
        return any("would hear" in missed for missed in Judged.missed)

    judge(monkeypatch, found)
    assert found()
