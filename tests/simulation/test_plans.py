"""Plans: a seed is data, data is text, and a failing plan is made small. Small plans that once failed are run again."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from tensorhub.protocol.errors import UsageError
from tensorhub.worker.events import Finished
from tests.sim import sweep
from tests.sim.cluster import Cluster
from tests.sim.draw import draw_plan
from tests.sim.oracles import Oracles
from tests.sim.plan import Fate, Plan
from tests.sim.plantext import parse, render
from tests.sim.runner import SeedResult, run_cluster, run_plan
from tests.sim.shrink import shrink, what_broke
from tests.sim.truth import Call, Life

pytestmark = pytest.mark.simulation

PLANS = sorted((Path(__file__).parent / "plans").glob("*.txt"))
MAX_LINES = 40


@pytest.mark.long
@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_what_a_plan_once_broke_is_kept(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# "), "say what was broken"
    assert len(text.splitlines()) < MAX_LINES
    result = run_plan(parse(text))
    assert result.ok, f"python -m tests.sim --plan {path}\n{result.error}"


@pytest.mark.parametrize("seed", [2, 22])
def test_a_plan_with_what_was_drawn_is_text_and_the_same_history(seed: int) -> None:
    plan = draw_plan(seed)
    assert parse(render(plan)) == plan
    drawn = Cluster(plan)
    first = run_cluster(drawn)
    written = parse(render(replace(plan, fates=tuple(drawn.fates.noted))))
    assert run_plan(written).digest == first.digest


@pytest.mark.parametrize("line", ["nonsense", "at 3 flood for 2", "conditions depth=3", "message x up"])
def test_what_is_no_plan_says_which_line(line: str) -> None:
    with pytest.raises(UsageError, match="line 2 of the plan"):
        parse(f"seed 1\n{line}\n")


def test_a_misfortune_less_leaves_what_was_before_it_as_it_was() -> None:
    plan = next(p for p in map(draw_plan, range(100)) if len(p.misfortunes) > 3)
    last = plan.misfortunes[-1]
    histories = [Cluster(each, trace=True) for each in (plan, replace(plan, misfortunes=plan.misfortunes[:-1]))]
    before = []
    for cluster in histories:
        run_cluster(cluster)
        before.append([line for line in cluster.world.lines if float(line[:10]) < last.at_s - 1e-3])
    assert before[0] == before[1]
    assert len(before[0]) > 50


@pytest.mark.long
def test_a_failing_plan_is_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_second_version(self: Oracles, life: Life, call: Call, finished: Finished) -> None:
        if finished.version == 2 and call.verb == "update":
            self.broken("G0 no worker gets version 2", f"{life.name} has version 2")

    monkeypatch.setattr(Oracles, "call_ended", no_second_version)
    plan = draw_plan(3)
    found = shrink(plan)
    assert found is not None
    assert "G0" in found.error
    assert len(found.text.splitlines()) < MAX_LINES < len(render(plan).splitlines())
    again = run_plan(parse(found.text))
    assert again.error is not None
    assert what_broke(again.error) == what_broke(found.error)


# --- single faults ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [8, pytest.param(400, marks=pytest.mark.long)])
def test_no_single_fault_breaks_a_small_history(count: int) -> None:
    for plan in islice(sweep.plans(), count):
        result = run_plan(plan)
        assert result.ok, f"{result.error}\n{render(plan)}"


def test_a_sweep_says_which_fault_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Fate("policy/rollout-0[0]#1", "up", 3, ())
    monkeypatch.setattr(sweep, "plans", lambda: iter([sweep.struck(sweep.base(one_sided=True, copies=1), lost)] * 99))
    monkeypatch.setattr(sweep, "_run", _fails)
    done, text = sweep.sweep(1.0, jobs=1)
    assert done == 1
    assert text.startswith("# OracleViolation: lost\n")
    assert parse(text).fates == (lost,)


def _fails(plan: Plan) -> SeedResult:
    return SeedResult(0, False, "OracleViolation: lost", (), 1, 1.0, "")
