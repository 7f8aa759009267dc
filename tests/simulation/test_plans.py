"""Plans: a seed is data, data is text, and a failing plan is made small. Small plans that once failed are run again."""

from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from tensorhub.protocol.errors import UsageError
from tensorhub.worker.events import Finished
from tests.sim.cluster import Cluster
from tests.sim.draw import draw_plan
from tests.sim.judges.groups import GroupJudge
from tests.sim.plan import MAX_LEASES, Misfortune
from tests.sim.plantext import parse, render
from tests.sim.runner import run_cluster, run_plan
from tests.sim.shrink import shrink, what_broke
from tests.sim.truth.life import Call, Life

pytestmark = pytest.mark.simulation

PLANS = sorted((Path(__file__).parent / "plans").glob("*.txt"))
SEEDS = [1, 2, 5, 10, 28]
MAX_LINES = 40


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_what_a_plan_once_broke_is_kept(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# "), "say what was broken"
    assert len(text.splitlines()) < MAX_LINES
    result = run_plan(parse(text))
    assert result.ok, f"python -m tests.sim --plan {path}\n{result.error}"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_is_the_text_that_it_is_written_as(seed: int) -> None:
    plan = draw_plan(seed)
    assert parse(render(plan)) == plan


@pytest.mark.parametrize("seed", SEEDS)
def test_what_was_drawn_can_be_written_down_and_is_the_same_history(seed: int) -> None:
    plan = draw_plan(seed)
    drawn = Cluster(plan)
    first = run_cluster(drawn)
    written = parse(render(replace(plan, fates=tuple(drawn.fates.noted))))
    assert run_plan(written).digest == first.digest


def test_who_sends_nothing_for_most_of_the_time_is_as_slow_as_one_that_takes_longer() -> None:
    plan = replace(draw_plan(0), misfortunes=()).with_conditions(is_shared=False)
    staying = Misfortune(1.0, "stutter", "trainer", inf, value=0.9)
    slow = replace(plan, misfortunes=(staying,))
    assert slow.slowest_read_s == pytest.approx(10 * plan.slowest_read_s)
    passing = replace(plan, misfortunes=(replace(staying, length_s=5.0),))
    assert passing.slowest_read_s == plan.slowest_read_s


def test_all_may_read_from_one_that_is_slow_and_a_chunk_takes_no_longer_than_transports_let_it() -> None:
    plan = replace(draw_plan(0), misfortunes=()).with_conditions(is_shared=True, chunk_s=0.01)
    slower = [replace(plan, misfortunes=(Misfortune(1.0, "slow", "trainer", inf, value=times),)) for times in (3, 5000)]
    assert slower[0].slowest_read_s == pytest.approx(3 * plan.slowest_read_s * len(plan.replicas))
    alone_s = slower[1].with_conditions(is_shared=False).slowest_read_s
    assert slower[1].slowest_read_s == max(alone_s, plan.conditions.chunks * MAX_LEASES * plan.settings.lease_s)


def test_a_misfortune_less_leaves_what_was_before_it_as_it_was() -> None:
    plan = next(p for p in map(draw_plan, range(100)) if len(p.misfortunes) > 3)
    last = plan.misfortunes[-1]
    fewer = replace(plan, misfortunes=plan.misfortunes[:-1])
    histories = [Cluster(each, trace=True) for each in (plan, fewer)]
    before = []
    for cluster in histories:
        run_cluster(cluster)
        before.append([line for line in cluster.world.lines if float(line[:10]) < last.at_s - 1e-3])
    assert before[0] == before[1]
    assert len(before[0]) > 50


def test_a_failing_plan_is_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_second_version(self: GroupJudge, life: Life, call: Call, finished: Finished) -> None:
        if finished.version == 2 and call.verb == "update":
            self.broken(f"{life.name} has version 2", "G0 nobody gets version 2")

    monkeypatch.setattr(GroupJudge, "shard_ended", no_second_version)
    plan = draw_plan(3)
    found = shrink(plan)
    assert found is not None
    assert "G0" in found.error
    assert len(found.text.splitlines()) < MAX_LINES < len(render(plan).splitlines())
    again = run_plan(parse(found.text))
    assert again.error is not None
    assert what_broke(again.error) == what_broke(found.error)


def test_nothing_is_shrunk_where_nothing_is_broken() -> None:
    assert shrink(draw_plan(0)) is None


@pytest.mark.parametrize("line", ["nonsense", "at 3 flood for 2", "conditions depth=3", "message x up"])
def test_what_is_no_plan_says_which_line(line: str) -> None:
    with pytest.raises(UsageError, match="line 2 of the plan"):
        parse(f"seed 1\n{line}\n")
