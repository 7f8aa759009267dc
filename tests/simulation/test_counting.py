"""Memory that several have counts once: the simulated kernel says where, and the judge sees who counts it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from tensorhub.protocol.messages import PROTOCOL, Hello
from tensorhub.protocol.names import Digest, Version, worker_id
from tensorhub.worker.events import CopyDropped, DropCopy
from tests.sim.draw import draw_plan
from tests.sim.hostcopies import Mapped
from tests.sim.judges.memory import UNCOUNTED_S, MemoryJudge
from tests.sim.process import Process
from tests.sim.truth.life import Copied, Life
from tests.sim.truth.record import Truth
from tests.sim.world import OracleViolation, World

pytestmark = pytest.mark.simulation

ROOT = Digest("root")
LATER_S = UNCOUNTED_S + 1.0


class Bench:
    """A judge, and two workers of one host with the same memory: one has read it there, and one shares it."""

    def __init__(self) -> None:
        plan = draw_plan(0)
        self.world = World("0")
        self.truth = Truth(self.world, replace(plan, misfortunes=()), {ROOT: (7,)})
        self.judge = MemoryJudge(self.truth, self.world)
        self.memory = [7]
        self.owner, self.reader = self.life("owner"), self.life("reader")
        self.has(self.owner, is_counted=True)
        self.has(self.reader, is_counted=False)

    def life(self, replica: str) -> Life:
        me = worker_id("m", replica, 0)
        hello = Hello(PROTOCOL, "m", replica, 0, 1, replica)
        life = Life(me, replica, hello, [0], lambda version: self.memory, lambda: self.world.now, started=0.0)
        self.truth.born(life)
        return life

    def has(self, life: Life, *, is_counted: bool) -> None:
        life.copies[Version(1)] = Copied(Version(1), ROOT, self.world.now, self.memory, is_counted)

    def look(self, after_s: float = 0.0) -> None:
        self.world.now += after_s
        for life in self.truth.same_shard(self.reader.shard):
            self.judge.shared(life)


def test_who_is_about_to_free_what_others_share_counts_it_until_then() -> None:
    bench = Bench()
    bench.look()
    bench.truth.wants(bench.owner, DropCopy(Version(1)))
    bench.look(LATER_S)
    bench.truth.told(bench.owner, CopyDropped(Version(1)))
    bench.look()
    with pytest.raises(OracleViolation, match="nobody counts the memory of version 1 that reader has"):
        bench.look(LATER_S)


def test_memory_counts_once_also_while_it_is_being_freed() -> None:
    bench = Bench()
    bench.truth.wants(bench.owner, DropCopy(Version(1)))
    bench.reader.copies[Version(1)].is_counted = True
    with pytest.raises(OracleViolation, match="2 workers count the memory of version 1"):
        bench.look()


def test_that_a_copy_is_uncounted_is_held_against_nobody_who_had_another_one_before() -> None:
    bench = Bench()
    bench.look()
    bench.truth.wants(bench.reader, DropCopy(Version(1)))
    bench.truth.told(bench.reader, CopyDropped(Version(1)))
    bench.look(LATER_S)
    bench.truth.died(bench.owner)
    bench.has(bench.reader, is_counted=False)
    bench.look()
    bench.look(UNCOUNTED_S)
    with pytest.raises(OracleViolation, match="nobody counts"):
        bench.look(1.0)


def test_memory_counts_where_somebody_asked_first_after_its_counter_was_gone() -> None:
    owner, slow, quick = (cast("Process", SimpleNamespace(is_alive=True)) for _ in range(3))
    mapped = Mapped([owner, slow, quick], owner)
    assert not mapped.counts_at(quick)
    assert not mapped.let_go(owner)
    assert [mapped.counts_at(quick), mapped.counts_at(slow)] == [True, False]  # who has it mapped and does not ask yet
    quick.is_alive = False
    assert mapped.counts_at(slow)
    assert mapped.let_go(slow)
