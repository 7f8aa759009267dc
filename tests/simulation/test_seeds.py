"""Fixed seeds of the cluster simulator, and every seed that ever failed: all promises are kept."""

import pytest

from tests.sim.runner import run_seed

from .kit import FIXED, Regression, histories, regressions

pytestmark = pytest.mark.simulation

TWICE = [0, 3, 17, 40, 58]  # one and several models, shards, kinds of source


@pytest.mark.parametrize("seed", FIXED)
def test_every_promise_is_kept(seed: int) -> None:
    result = run_seed(seed)
    assert result.ok, f"python -m tests.sim --seed {seed}\n{result.error}"


@pytest.mark.parametrize(
    "kept",
    [pytest.param(each, id=str(each.seed), marks=[pytest.mark.long] * each.is_long) for each in regressions()],
)
def test_what_failed_once_does_not_fail_again(kept: Regression) -> None:
    result = run_seed(kept.seed)
    assert result.ok, f"python -m tests.sim --seed {kept.seed}; it once found: {kept.why}\n{result.error}"


def test_every_regression_says_what_was_wrong() -> None:
    assert [each.seed for each in regressions() if len(each.why) < 20] == []


def test_the_same_seed_is_the_same_history_under_any_hash_seed() -> None:
    assert histories(TWICE, hash_seed=1) == histories(TWICE, hash_seed=4242)


def test_a_history_is_kept_as_lines_when_asked_for() -> None:
    plain, traced = run_seed(7), run_seed(7, trace=True)
    assert plain.digest == traced.digest
    assert plain.lines == ()
    assert any("calls publish" in line for line in traced.lines)
    assert any("reads version" in line for line in traced.lines)
    assert [float(line[:10]) for line in traced.lines] == sorted(float(line[:10]) for line in traced.lines)
