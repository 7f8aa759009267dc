"""The index of idle sources gives the source that a look at all of them gives, wherever it gives one."""

import pytest

from tensorhub.server.members import Member
from tensorhub.server.rules import sources
from tensorhub.server.rules.selection import Candidate, choose_source
from tensorhub.server.state import State
from tensorhub.server.versions import Model, VersionRecord
from tests.sim.runner import run_seed

SEEDS = (3, 4, 5, 6, 8)  # those in which there is often a choice


def test_the_best_idle_source_is_the_best_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    by_index = sources.to_choose_from

    def both(state: State, model: Model, record: VersionRecord, reader: Member) -> list[Candidate]:
        found = by_index(state, model, record, reader)
        if model.roll.is_over and sources.idle(state, model, record, reader):
            best, of_all = (choose_source(some, now=state.now) for some in (found, _all(state, model, record, reader)))
            assert best is not None
            assert of_all is not None
            assert best[0] == of_all[0]
            compared.append(best[0])
        return found

    monkeypatch.setattr(sources, "MAX_ALL", 0)
    monkeypatch.setattr(sources, "to_choose_from", both)
    for seed in SEEDS:
        result = run_seed(seed)
        assert result.ok, result.error
    assert len(compared) > 300


def _all(state: State, model: Model, record: VersionRecord, reader: Member) -> list[Candidate]:
    """Every holder looked at; how many leave another site does not matter to who is in the reader's own."""
    return sources.possible(state, model, record, reader)
