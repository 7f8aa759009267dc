"""The judge of retention asks of a spot worker, too, that it does not give up the only reference of what is kept."""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from tensorhub.protocol.messages import HostCopy, Report, Withdrawing
from tensorhub.protocol.names import Version
from tests.sim.judges.retention import RetentionJudge
from tests.sim.truth.life import Copied, Life
from tests.sim.watch import Watch
from tests.sim.world import OracleViolation

from .test_belated import FORMER, NEWER, Bench
from .test_established_truth import TwoShards

pytestmark = pytest.mark.simulation

THIRD, LATEST = Version(3), Version(4)


class SpotBench(Bench):
    """The spot worker has the former version, which is established among such; the trainer has gone on."""

    def __init__(self) -> None:
        super().__init__()
        self.truth.died(self.steady)
        self.passes(2.0, self.spot)
        self.gets(self.spot, THIRD)
        self.truth.published(self.trainer, THIRD, self.gets(self.trainer, THIRD))
        self.truth.established.note_whole(self.spot, THIRD)
        self.passes(1.0, self.trainer, self.spot)
        self.truth.published(self.trainer, LATEST, self.gets(self.trainer, LATEST))
        self.truth.note_known(self.trainer, THIRD, self.spot.root_of(THIRD))
        self.passes(2.0, self.trainer, self.spot)
        self.judge = RetentionJudge(self.truth, self.world)
        self.judge.conditions = replace(self.judge.conditions, retain=1, host_copies=2)

    def gives_up(self, life: Life) -> None:
        """As the simulator tells it: whoever has nothing left is no excuse for himself."""
        where = "in the buffer" if life.held is not None else "in host memory"
        life.held, life.copies = None, {}
        Watch._gives_up(cast("Watch", SimpleNamespace(truth=self.truth, retention=self.judge)), life, THIRD, where)

    def copies_out(self, life: Life) -> None:
        """All that it has is in host memory now."""
        assert life.held is not None
        life.copies[THIRD] = Copied(THIRD, life.held.root, life.held.since, [])
        life.held = None


def test_a_spot_worker_may_not_give_up_the_only_one_that_is_established() -> None:
    bench = SpotBench()
    assert bench.truth.established.is_known("m", THIRD, bench.world.now)
    with pytest.raises(OracleViolation, match=r"G6 established broken.*gave up the last reference of version 3"):
        bench.gives_up(bench.spot)


def test_it_may_beside_another_one() -> None:
    bench = SpotBench()
    bench.gets(bench.life("other", reliable=False), THIRD)
    bench.gives_up(bench.spot)


def test_it_may_while_the_server_can_believe_in_one_that_died() -> None:
    bench = SpotBench()
    other = bench.life("other", reliable=False)
    bench.gets(other, THIRD)
    bench.truth.died(other)
    bench.gives_up(bench.spot)


def test_it_may_where_there_is_no_room() -> None:
    bench = SpotBench()
    bench.spot.full_until = bench.world.now
    bench.gives_up(bench.spot)


def test_nor_the_only_host_copy() -> None:
    bench = SpotBench()
    bench.copies_out(bench.spot)
    with pytest.raises(OracleViolation, match=r"the last reference of version 3, in host memory"):
        bench.gives_up(bench.spot)


def test_a_host_copy_may_go_where_one_that_has_begun_fills_the_room() -> None:
    bench = SpotBench()
    bench.copies_out(bench.spot)
    bench.truth.said(bench.spot, Report(99, copies=(HostCopy(1, LATEST, bench.spot.root_of(THIRD)),)))
    bench.gives_up(bench.spot)


def test_it_may_when_the_next_server_has_found_a_reliable_worker_that_has_it_not() -> None:
    bench = SpotBench()
    bench.restarts()
    bench.passes(2.0, bench.trainer, bench.spot)
    assert not bench.truth.established.is_known("m", THIRD, bench.world.now)
    bench.gives_up(bench.spot)


class ClosingBench(TwoShards):
    """Only the trainer has the newest version. One of its shards has no room for a copy, and the other one closes."""

    def __init__(self, *, has_heir: bool = False) -> None:
        super().__init__()
        self.hears(*self.rollouts)
        self.publishes(NEWER)
        for trainer in self.trainers:
            self.truth.note_known(trainer, NEWER, trainer.root_of(NEWER))
        if not has_heir:
            self.truth.died(self.rollouts[1])
        self.passes(10.0, *self.trainers, self.rollouts[0])  # nobody is new any more
        self.judge = RetentionJudge(self.truth, self.world)
        self.judge.conditions = replace(self.judge.conditions, host_copies=2)
        self.leaver, self.closer = self.trainers
        self.leaver.full_until = self.world.now

    def closes(self, life: Life) -> None:
        assert life.held is not None
        life.closing, life.close_deadline = self.world.now, self.world.now + 10
        buffer = Withdrawing(NEWER, life.held.root)
        self.truth.heard(life, Report(self.reports + 1, buffer=buffer, closing=True))

    def gives_up(self) -> None:
        self.leaver.held = None
        self.judge.gives_up(self.leaver, NEWER, "in the buffer")

    def must_keep(self) -> None:
        with pytest.raises(OracleViolation, match=r"trainer\[0\] gave up the last reliable reference of version 2"):
            self.gives_up()


def test_what_another_shard_leaves_with_for_good_need_not_be_kept() -> None:
    bench = ClosingBench()
    bench.closes(bench.closer)
    bench.gives_up()


def test_nor_what_it_was_told_to_let_go() -> None:
    bench = ClosingBench(has_heir=True)
    bench.closes(bench.closer)
    bench.closer.let_go_at = bench.world.now
    bench.gives_up()


def test_it_must_be_kept_where_there_is_room() -> None:
    bench = ClosingBench()
    bench.leaver.full_until = 0.0
    bench.closes(bench.closer)
    bench.must_keep()


def test_it_must_be_kept_while_no_server_has_heard_that_the_other_one_closes() -> None:
    bench = ClosingBench()
    bench.closer.closing = bench.world.now
    bench.must_keep()


def test_it_must_be_kept_while_somebody_could_inherit_though_a_message_of_him_was_lost() -> None:
    bench = ClosingBench(has_heir=True)
    bench.truth.troubles.message(bench.rollouts[1], (), bench.world.now)
    bench.closes(bench.closer)
    bench.must_keep()


@pytest.mark.parametrize("has_room", [True, False])
def test_who_closes_beside_one_that_leaves_for_good_waits_for_no_heir_without_room(has_room: bool) -> None:
    bench = ClosingBench()
    bench.judge.conditions = replace(bench.judge.conditions, host_copies=1)
    bench.closes(bench.closer)
    if not has_room:
        held = bench.leaver.held
        assert held is not None
        bench.leaver.copies[FORMER] = Copied(FORMER, held.root, held.since, [])
    bench.closes(bench.leaver)
    if has_room:
        with pytest.raises(OracleViolation, match=r"left with the last reference of version 2"):
            bench.judge.leaves(bench.leaver)
    else:
        bench.judge.leaves(bench.leaver)


@pytest.mark.parametrize("is_begun", [True, False])
def test_what_seems_lost_goes_before_a_copy_that_has_begun(is_begun: bool) -> None:
    """The other shard of it is cut off."""
    bench = ClosingBench()
    bench.judge.conditions = replace(bench.judge.conditions, host_copies=1)
    bench.leaver.full_until = 0.0
    bench.passes(2.0, bench.leaver, bench.rollouts[0])
    if is_begun:
        copy = HostCopy(1, LATEST, bench.leaver.root_of(NEWER))
        bench.truth.said(bench.leaver, Report(bench.reports + 1, copies=(copy,)))
        bench.gives_up()
    else:
        bench.must_keep()


def test_two_that_were_told_to_go_are_no_excuse_for_each_other() -> None:
    """Neither has room; for each of them somebody could inherit."""
    bench = ClosingBench(has_heir=True)
    bench.judge.conditions = replace(bench.judge.conditions, host_copies=1)
    for trainer in bench.trainers:
        assert trainer.held is not None
        trainer.copies[FORMER] = Copied(FORMER, trainer.held.root, trainer.held.since, [])
        bench.closes(trainer)
        trainer.let_go_at = bench.world.now
    with pytest.raises(OracleViolation, match=r"left with the last reference of version 2"):
        bench.judge.leaves(bench.leaver)
