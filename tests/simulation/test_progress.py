"""At the end of a history a rollout has the newest version; only a call that has just begun is waited for."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from tensorhub.protocol.messages import PROTOCOL, Failure, Hello
from tensorhub.protocol.names import Digest, Version, worker_id
from tensorhub.worker.events import Finished
from tests.sim.draw import draw_plan
from tests.sim.judges.progress import ProgressJudge
from tests.sim.plan import Misfortune, Plan, Replica, Step
from tests.sim.truth.life import Call, Held, Life
from tests.sim.truth.record import Truth
from tests.sim.world import OracleViolation, World

pytestmark = pytest.mark.simulation

ROOT, VERSION = Digest("root"), Version(1)


class Bench:
    """A trainer that holds version 1, and a rollout that is without it when the history ends."""

    def __init__(self, *misfortunes: Misfortune, replicas: Sequence[Replica] = ()) -> None:
        plan = draw_plan(0)
        plan = replace(plan, replicas=(*plan.replicas, *replicas))
        self.conditions = replace(plan.conditions, shards=1)
        self.world = World("0")
        self.truth = Truth(self.world, replace(plan, conditions=self.conditions, misfortunes=misfortunes), {ROOT: (7,)})
        self.judge = ProgressJudge(self.truth, self.world)
        self.trainer, self.rollout = self.life("trainer"), self.life("rollout")
        self.trainer.held = Held(VERSION, ROOT, since=1.0, published=True)
        self.truth.published(self.trainer, VERSION, ROOT)
        self.world.now = self.conditions.storm_s + self.conditions.calm_s

    def life(self, replica: str) -> Life:
        me = worker_id("m", replica, 0)
        hello = Hello(PROTOCOL, "m", replica, 0, 1, replica)
        life = Life(me, replica, hello, [7], lambda _version: [7], lambda: self.world.now, started=0.0)
        self.truth.born(life)
        return life

    def calls(
        self,
        ago_s: float,
        *,
        failed_ago_s: float = -inf,
        timeout_s: float = inf,
        spec: str = "latest",
        resolved: Version | None = VERSION,
    ) -> None:
        """The rollout has called so long ago, and that call lasts, or has failed when version 1 was what it awaited."""
        began = self.world.now - ago_s
        call = Call("update", spec, Digest(""), began, began + timeout_s, None, Digest(""), resolved=resolved)
        if failed_ago_s > 0:
            call.ended = self.world.now - failed_ago_s
            call.outcome = Finished(1, error=Failure("deadline-exceeded", "in vain"))
            self.rollout.past.append(call)
        else:
            self.rollout.call = call

    def look(self) -> None:
        self.judge.rollout("m/rollout", None, None, is_refused=False)


def test_a_call_that_has_just_begun_is_waited_for() -> None:
    bench = Bench()
    bench.calls(1.0)
    bench.look()


def test_a_rollout_that_hangs_in_its_only_call_is_behind() -> None:
    bench = Bench()
    bench.calls(bench.conditions.calm_s / 3)
    with pytest.raises(OracleViolation, match="has version None"):
        bench.look()


def test_a_rollout_whose_calls_fail_one_after_the_other_is_behind() -> None:
    bench = Bench()
    bench.calls(bench.conditions.calm_s * 0.7, failed_ago_s=1.0)  # begun before the calm: not counted as a first call
    bench.calls(0.9)
    with pytest.raises(OracleViolation, match="has version None"):
        bench.look()


@pytest.mark.parametrize("is_plain", [False, True])
def test_what_a_program_still_gave_too_little_time_is_no_plain_call(is_plain: bool) -> None:
    bench = Bench(Misfortune(1.0, "stutter", "elsewhere", inf, value=0.999))
    slowest_s = bench.truth.plan.slowest_read_s
    timeout_s = slowest_s + 5.0 if is_plain else 0.9 * bench.conditions.calm_s / 2
    assert (timeout_s < slowest_s) is not is_plain
    bench.calls(bench.conditions.calm_s / 2 - 0.1, failed_ago_s=1.0, timeout_s=timeout_s)  # one shard was a little late
    bench.calls(0.9, timeout_s=slowest_s + 5.0)
    if is_plain:
        with pytest.raises(OracleViolation, match="has version None"):
            bench.look()
    else:
        bench.look()


@pytest.mark.parametrize("is_in_storm", [True, False])
def test_the_time_of_a_failed_call_counts_from_the_end_of_the_storm(is_in_storm: bool) -> None:
    """And the next one has only just begun, as one for another version took so long."""
    bench = Bench()
    calm_s = bench.conditions.calm_s
    had_s = -0.1 if is_in_storm else bench.truth.plan.slowest_read_s + 0.1
    bench.calls(calm_s + 2.0, failed_ago_s=calm_s - had_s)
    bench.calls(0.1)
    if is_in_storm:
        bench.look()
    else:
        with pytest.raises(OracleViolation, match="has version None"):
            bench.look()


@pytest.mark.parametrize(("ago_s", "spec"), [(1.9, "latest-1"), (2.3, "latest-1"), (1.9, "latest")])
def test_who_rests_after_its_last_step_of_the_storm_is_waited_for(ago_s: float, spec: str) -> None:
    """At whole seconds: it goes on after 1.2 s, and up to one more. But not if that step was for the newest version."""
    step = Step("replicate", spec, rest_s=1.2)
    bench = Bench(replicas=[Replica("m", "rollout", is_in_step=True, steps=(step,))])
    bench.calls(bench.conditions.calm_s / 2 + 1.0, failed_ago_s=ago_s, spec=spec, resolved=None)
    if ago_s < 2.2 and spec != "latest":
        bench.look()
    else:
        with pytest.raises(OracleViolation, match="has version None"):
            bench.look()


@pytest.mark.parametrize("spec", ["prefetched", "latest"])
def test_a_step_that_is_not_plain_is_none_of_its_tries_though_it_came_late(spec: str) -> None:
    bench = Bench()
    bench.calls(5.0, failed_ago_s=1.5, spec=spec, resolved=None)
    bench.calls(0.1)
    if spec == "prefetched":
        bench.look()
    else:
        with pytest.raises(OracleViolation, match="has version None"):
            bench.look()


@pytest.mark.parametrize("is_in_step", [True, False])
def test_a_plain_program_in_step_rests_until_the_next_whole_second(is_in_step: bool) -> None:
    bench = Bench(replicas=[Replica("m", "rollout", is_in_step=is_in_step)])
    made = bench.truth.exists("m", VERSION)
    assert made is not None
    made.exists = bench.world.now - 1.2
    if is_in_step:
        bench.look()
    else:
        with pytest.raises(OracleViolation, match="has version None"):
            bench.look()


@pytest.mark.parametrize("ended_ago_s", [0.3, 10.0])
def test_a_trainer_whose_long_step_of_the_storm_has_just_ended_need_not_have_published(ended_ago_s: float) -> None:
    bench = Bench()
    calm_s, now = bench.conditions.calm_s, bench.world.now
    call = Call("unpublish", "", Digest(""), now - calm_s, now, None, Digest(""), ended=now - ended_ago_s)
    call.outcome = Finished(1)
    bench.trainer.past.append(call)
    if ended_ago_s < 1.0:
        bench.judge.trainer("m/trainer", None, is_refused=False)
    else:
        with pytest.raises(OracleViolation, match="never published anything"):
            bench.judge.trainer("m/trainer", None, is_refused=False)


def test_a_version_that_came_while_the_rollout_rested_is_not_missed_yet() -> None:
    bench = Bench()
    made = bench.truth.exists("m", VERSION)
    assert made is not None
    made.exists = bench.world.now - 0.5
    bench.look()
    made.exists -= 1.0
    with pytest.raises(OracleViolation, match="has version None"):
        bench.look()


def test_who_keeps_the_last_usable_version_waits_only_where_all_others_are_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    bench.conditions = replace(bench.conditions, host_copies=0)
    bench.truth.plan = replace(bench.truth.plan, conditions=bench.conditions)
    bench.rollout.held = Held(Version(0), ROOT, since=0.5)
    monkeypatch.setattr(bench.truth.established, "version", lambda model: Version(0))
    other = bench.life("other")
    judge = ProgressJudge(bench.truth, bench.world)
    down = [other]
    monkeypatch.setattr(judge, "_is_down", lambda life: life in down)
    judge.rollout("m/rollout", None, None, is_refused=False)
    judge.left_over({5: str(bench.rollout.me)}, {})  # it was granted a read, and begins it when it has let go
    down.clear()
    with pytest.raises(OracleViolation, match="has version None"):
        judge.rollout("m/rollout", None, None, is_refused=False)
    with pytest.raises(OracleViolation, match=r"ticket 5 of m/rollout\[0\] is open for ever"):
        judge.left_over({5: str(bench.rollout.me)}, {})


@pytest.mark.parametrize(
    ("began", "ended_ago_s", "is_excused"),
    [
        ("in the storm", 0.2, True),
        ("in the storm", 0.4, False),  # since then there was time for a fill and a publish
        ("as a plain program", 0.2, False),  # such a call has the time that the network may take
    ],
)
def test_a_trainer_whose_step_of_the_storm_took_all_its_time(began: str, ended_ago_s: float, is_excused: bool) -> None:
    bench = Bench()
    calm_s = bench.conditions.calm_s
    assert bench.truth.plan.slowest_read_s <= calm_s / 4
    ago_s = calm_s if began == "in the storm" else 0.4 * calm_s
    start = bench.world.now - ago_s
    call = Call("unpublish", "", Digest(""), start, bench.world.now - ended_ago_s * calm_s, None, Digest(""))
    call.ended = call.deadline
    call.outcome = Finished(1, error=Failure("deadline-exceeded", "waits for shard 5 of 8 to call unpublish()"))
    bench.trainer.past.append(call)
    if is_excused:
        bench.judge.trainer("m/trainer", None, is_refused=False)
    else:
        with pytest.raises(OracleViolation, match="never published anything"):
            bench.judge.trainer("m/trainer", None, is_refused=False)


@pytest.mark.parametrize("others_read", [None, Version(0)])
def test_versions_that_are_read_at_a_time_share_the_time(
    monkeypatch: pytest.MonkeyPatch, others_read: Version | None
) -> None:
    bench = Bench()
    bench.rollout.read, other = _reading(VERSION), bench.life("other")
    other.read = None if others_read is None else _reading(others_read)
    monkeypatch.setattr(Plan, "slowest_read_s", bench.conditions.calm_s / 4)
    bench.calls(bench.conditions.calm_s * 0.4)
    if others_read is not None:
        bench.look()
    else:
        with pytest.raises(OracleViolation, match="has version None"):
            bench.look()


def _reading(version: Version) -> Any:
    return SimpleNamespace(grant=SimpleNamespace(version=version), tickets={}, is_ended=False)
