"""Effective training time, for some seconds: real processes, killed and started again. Needs no root."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from bench.lab.ettr import director
from bench.lab.ettr.plan import Failure, Plan
from bench.lab.ettr.run import run_one
from bench.lab.ettr.summary import Outcome

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600), pytest.mark.long]

TINY = Plan(steps=16, step_s=0.1, start_s=0.2, server_start_s=0.2, rollouts=2, size_bytes=1 << 20, lease_s=2.0)
FAILURES = [
    Failure(3, 0.5, "trainer", "trainer"),
    Failure(5, 0.9, "rollout", "rollout-1"),
    Failure(6, 0.1, "server", "server"),
    Failure(7, 0.0, "trainer", "trainer"),
    Failure(11, 0.5, "rollout", "rollout-0"),
]
LOST = 2 + 4 + 5 + 6 + 0  # steps done before each since the file, which is written after the tenth
Injected = Callable[[list[Failure]], Plan]


@pytest.fixture
def injected(monkeypatch: pytest.MonkeyPatch) -> Injected:
    """A tiny plan with these failures."""

    def inject(failures: list[Failure]) -> Plan:
        monkeypatch.setattr(director, "draw_failures", lambda plan: failures)
        return replace(TINY, failure_share=len(failures) / TINY.steps)

    return inject


def run(plan: Plan, name: str, folder: Path) -> Outcome:
    outcome = run_one(plan, name, folder / name, Console(file=io.StringIO()))
    assert outcome.hashes_wrong == []
    assert outcome.hashes_compared > 0
    assert outcome.missing == []
    assert outcome.steps == TINY.steps
    assert all(each.next_step_s is not None and each.back_s is not None for each in outcome.recoveries)
    assert [each.step for each in outcome.recoveries] == [each.step for each in FAILURES]
    assert 0 < outcome.ratio < 1
    return outcome


@pytest.mark.parametrize("name", ["peers", "same-name"])
def test_only_who_was_killed_starts_again_and_goes_on_with_what_the_others_hold(
    tmp_path: Path, injected: Injected, name: str
) -> None:
    outcome = run(injected(FAILURES), name, tmp_path)
    assert outcome.restarts == {"trainer": 2, "rollout": 2, "server": 1}
    assert outcome.steps_repeated < LOST, "only what nobody had got yet"


def test_from_a_file_everything_starts_again_and_steps_are_done_again(tmp_path: Path, injected: Injected) -> None:
    outcome = run(injected(FAILURES), "file", tmp_path)
    assert outcome.restarts == {"trainer": 5, "rollout": 10, "server": 5}
    assert outcome.steps_repeated >= LOST, "more where the machine was slow to kill"
