"""Effective training time, for some seconds: real processes, killed and started again. Needs no root."""

import io
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from bench.demo.processes import ProcessFailed
from bench.lab.ettr import director
from bench.lab.ettr.content import Weights
from bench.lab.ettr.director import Run
from bench.lab.ettr.events import Began
from bench.lab.ettr.plan import Failure, Plan
from bench.lab.ettr.report import Report
from bench.lab.ettr.run import Choice, run_ettr, run_one
from bench.lab.ettr.summary import Outcome
from bench.lab.ettr.worker import load, save

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

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


def test_who_is_killed_too_late_is_not_killed_again_as_soon_as_it_starts(
    tmp_path: Path, injected: Injected, monkeypatch: pytest.MonkeyPatch
) -> None:
    strike = Run._strike

    def late(run: Run, failure: Failure) -> None:
        """The second one comes when the trainer computes the step of the fourth."""
        while failure is FAILURES[1] and not any(isinstance(e, Began) and e.step >= 7 for e in run.events):
            run._look(time.monotonic() + 60.0, "step 7")
        strike(run, failure)

    monkeypatch.setattr(Run, "_strike", late)
    assert run(injected(FAILURES), "file", tmp_path).steps_repeated >= LOST


def test_a_run_that_takes_too_long_ends(tmp_path: Path, injected: Injected, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = injected([])
    monkeypatch.setattr(Plan, "most_s", 0.0)
    with pytest.raises(ProcessFailed, match="still waiting for the end; step 0 was the last"):
        Run(plan, "peers", tmp_path / "run").run()


def test_the_command_reports_what_it_measured(tmp_path: Path) -> None:
    said = io.StringIO()
    choice = Choice(ways=("peers",), step_s=0.1, steps=10, rollouts=2, size_bytes=1 << 20)
    assert run_ettr(choice, tmp_path, Console(file=said, width=200), {}) == 0, said.getvalue()
    report = msgspec.json.decode((tmp_path / "ettr" / "ettr.json").read_bytes(), type=Report)
    (outcome,) = report.outcomes
    assert report.ok
    assert report.ratios == [outcome.ratio]
    assert f"{outcome.ratio:.1%}" in said.getvalue()
    assert "✗" not in said.getvalue()


def test_a_checkpoint_is_read_as_it_was_written(tmp_path: Path) -> None:
    written, read = Weights(1000, 1), Weights(1000, 1)
    written.step(1)
    save(tmp_path / "checkpoint", 1, written)
    assert load(tmp_path / "checkpoint", read) == 1
    assert all((read.tensors[name] == written.tensors[name]).all() for name in written.tensors)
    with pytest.raises(ValueError, match="shorter than the weights"):
        load(tmp_path / "checkpoint", Weights(1001, 1))
