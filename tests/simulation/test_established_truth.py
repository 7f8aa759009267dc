"""What a server must know to be established: it has heard so from all shards at a time."""

import pytest

from .test_belated import FORMER, Bench

pytestmark = pytest.mark.simulation


class TwoShards(Bench):
    """Both shards of a rollout have all of a version; no server has heard of that yet."""

    def __init__(self) -> None:
        self.begins(shards=2)
        self.trainers = [self.life("trainer", index) for index in range(2)]
        self.rollouts = [self.life("rollout", index) for index in range(2)]
        for trainer in self.trainers:
            self.trainer = trainer
            self.truth.published(trainer, FORMER, self.gets(trainer, FORMER))
        for rollout in self.rollouts:
            self.gets(rollout, FORMER)
        self.hears(*self.trainers)

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
