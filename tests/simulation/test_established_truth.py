"""What a server must know to be established: it has heard so from all shards at a time."""

from dataclasses import replace

import pytest

from tensorhub.core.messages import PROTOCOL, Hello
from tensorhub.core.names import worker_id
from tensorhub.sim.draw import draw_plan
from tensorhub.sim.truth.life import Life
from tensorhub.sim.truth.record import Truth
from tensorhub.sim.world import World

from .test_belated import FORMER, Bench

pytestmark = pytest.mark.simulation


class TwoShards(Bench):
    """Both shards of a rollout have all of a version; no server has heard of that yet."""

    def __init__(self) -> None:
        plan = draw_plan(0)
        plan = replace(plan, conditions=replace(plan.conditions, shards=2), misfortunes=())
        self.world = World("0")
        self.truth = Truth(self.world, plan, {})
        self.truth.server_life = 1
        self.lease_s = plan.settings.lease_s
        self.reports = 0
        self.trainers = [self.shard("trainer", index) for index in range(2)]
        self.rollouts = [self.shard("rollout", index) for index in range(2)]
        for trainer in self.trainers:
            self.trainer = trainer
            self.truth.published(trainer, FORMER, self.gets(trainer, FORMER))
        for rollout in self.rollouts:
            self.gets(rollout, FORMER)
        self.hears(*self.trainers)

    def shard(self, replica: str, index: int) -> Life:
        me = worker_id("m", replica, index)
        hello = Hello(PROTOCOL, "m", replica, index, 2, replica, reliable=True)
        life = Life(me, str(me), hello, [], lambda _version: [], lambda: self.world.now, started=0.0)
        self.truth.born(life)
        return life

    def is_known(self) -> bool:
        assert self.truth.established.version("m") == FORMER
        return self.truth.established.is_known("m", FORMER, self.world.now + 1)


def test_when_all_shards_have_been_heard() -> None:
    bench = TwoShards()
    bench.hears(bench.rollouts[1])
    assert not bench.is_known()
    bench.passes(0.5, *bench.trainers)
    bench.hears(bench.rollouts[0])
    assert bench.is_known()


def test_not_when_one_was_forgotten_before_the_other_was_heard() -> None:
    bench = TwoShards()
    bench.hears(bench.rollouts[1])
    bench.passes(1.5, *bench.trainers)
    bench.hears(bench.rollouts[0])
    assert not bench.is_known()
    bench.hears(bench.rollouts[1])
    assert bench.is_known()


def test_it_stays_so_when_both_are_cut_off_later() -> None:
    bench = TwoShards()
    bench.hears(*bench.rollouts)
    bench.passes(2.0, *bench.trainers)
    assert bench.is_known()


def test_while_the_server_stands_still_nobody_is_forgotten() -> None:
    bench = TwoShards()
    bench.hears(bench.rollouts[1])
    bench.strikes("pause-server", leases=1.5)
    bench.hears(bench.rollouts[0])
    assert bench.is_known()
