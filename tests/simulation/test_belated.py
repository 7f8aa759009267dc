"""What only spot workers have is established when the reliable ones beside them lose their sessions, and not before."""

from dataclasses import replace

import pytest

from tensorhub.protocol.messages import PROTOCOL, Hello, Holding, Report, Withdrawing
from tensorhub.protocol.names import Digest, Version, worker_id
from tests.sim.draw import draw_plan
from tests.sim.judges.stalls import StallJudge
from tests.sim.plan import Misfortune
from tests.sim.truth.life import Held, Life
from tests.sim.truth.record import Truth
from tests.sim.world import OracleViolation, World

pytestmark = pytest.mark.simulation

FORMER, NEWER = Version(1), Version(2)


class Bench:
    """A reliable rollout has the former version, a spot one got the newer, and the server heard both of that."""

    def __init__(self) -> None:
        self.begins(shards=1)
        self.trainer, self.steady, self.spot = (
            self.life("trainer"),
            self.life("steady"),
            self.life("spot", reliable=False),
        )
        for version in (FORMER, NEWER):
            root = self.gets(self.trainer, version)
            self.truth.published(self.trainer, version, root)
            self.gets(self.steady if version == FORMER else self.spot, version)
            self.hears(self.steady)
        self.hears(self.spot)

    def begins(self, shards: int) -> None:
        """Nobody is there, and no misfortune comes."""
        plan = draw_plan(0)
        plan = replace(plan, conditions=replace(plan.conditions, shards=shards), misfortunes=())
        self.world = World("0")
        self.truth = Truth(self.world, plan, {})
        self.truth.server_life = 1
        self.lease_s = plan.settings.lease_s
        self.shards, self.reports = shards, 0
        self.withdrawing: list[Life] = []

    def life(self, replica: str, index: int = 0, *, reliable: bool = True) -> Life:
        me = worker_id("m", replica, index)
        hello = Hello(PROTOCOL, "m", replica, index, self.shards, replica, reliable=reliable)
        life = Life(me, str(me), hello, [], lambda _version: [], lambda: self.world.now, started=self.world.now)
        self.truth.born(life)
        return life

    def gets(self, life: Life, version: Version) -> Digest:
        root = Digest(f"content {version}")
        life.held = Held(version, root, self.world.now, published=life is self.trainer)
        self.truth.established.note_whole(life, version)
        return root

    def hears(self, *lives: Life) -> None:
        self.world.now += 0.1
        for life in lives:
            assert life.held is not None
            self.reports += 1
            state = Withdrawing if life in self.withdrawing else Holding
            held = life.held
            self.truth.heard(life, Report(self.reports, buffer=state(held.version, held.root, held.published)))

    def withdraws(self, life: Life) -> None:
        """It asks whether it may give up what it has, and has it until it is told."""
        self.withdrawing.append(life)
        self.hears(life)

    def passes(self, leases: float, *heard: Life) -> None:
        """So much time, in which the server hears those."""
        until = self.world.now + leases * self.lease_s
        while self.world.now < until:
            self.world.now += self.lease_s / 8
            self.hears(*heard)

    def may_be_newer(self) -> bool:
        """Though the truth itself knows of none: when the spot worker got it, the reliable one had a session."""
        assert self.truth.established.version("m") == FORMER
        return self.truth.established.may_be_newer("m", FORMER, self.world.now, told=self.world.now)

    def restarts(self) -> None:
        """The server dies and is back at once."""
        self.strikes("restart-server")
        self.truth.server_life += 1

    def strikes(self, kind: str, leases: float = 0.0) -> None:
        """A misfortune of the server, for so long."""
        self.truth.troubles.struck(0, Misfortune(self.world.now, kind, ""), self.world.now)
        self.world.now += leases * self.lease_s
        self.truth.troubles.passed(0, self.world.now)


def test_not_while_who_is_relied_on_has_a_session() -> None:
    bench = Bench()
    bench.passes(2.0, bench.steady, bench.spot)
    assert not bench.may_be_newer()


def test_when_who_is_relied_on_has_lost_it_and_though_it_is_back() -> None:
    bench = Bench()
    bench.passes(1.2, bench.spot)
    assert bench.may_be_newer()
    bench.passes(0.5, bench.steady, bench.spot)
    assert bench.may_be_newer()


def test_not_once_it_must_seem_lost_again() -> None:
    bench = Bench()
    bench.passes(1.2, bench.spot)
    bench.passes(1.2, bench.steady)
    assert not bench.may_be_newer()


def test_while_nobody_can_know_that_the_spot_worker_is_dead() -> None:
    bench = Bench()
    bench.passes(1.2, bench.spot)
    bench.truth.died(bench.spot)
    assert bench.may_be_newer()


def test_though_the_spot_worker_waits_for_the_word_that_it_may_give_it_up() -> None:
    bench = Bench()
    bench.withdraws(bench.spot)
    bench.passes(1.2, bench.spot)
    assert bench.may_be_newer()


def test_not_once_the_spot_worker_has_that_word() -> None:
    bench = Bench()
    bench.withdraws(bench.spot)
    bench.spot.let_go_at = bench.world.now
    bench.passes(1.2, bench.spot)
    assert not bench.may_be_newer()


def test_not_for_the_next_life_of_the_server_where_no_life_before_it_took_it_for_that() -> None:
    bench = Bench()
    bench.passes(0.5, bench.steady, bench.spot)
    bench.restarts()
    bench.hears(bench.steady, bench.spot)
    assert not bench.may_be_newer()


def test_for_the_next_life_of_the_server_by_what_the_one_before_had_said_to_the_spot_worker() -> None:
    bench = Bench()
    bench.passes(1.2, bench.spot)
    bench.restarts()
    bench.hears(bench.steady)
    assert not bench.may_be_newer()
    bench.hears(bench.spot)
    assert bench.may_be_newer()


def test_not_where_whoever_has_it_has_come_since() -> None:
    bench = Bench()
    bench.passes(1.2, bench.spot)
    bench.restarts()
    bench.truth.died(bench.spot)
    late = bench.life("late", reliable=False)
    bench.gets(late, NEWER)
    bench.passes(0.5, bench.steady, late)
    assert not bench.may_be_newer()


def test_not_while_a_new_server_waits_for_who_is_relied_on() -> None:
    bench = Bench()
    bench.passes(1.5, bench.steady, bench.spot)
    bench.steady.trust_until = bench.world.now + 0.9 * bench.lease_s
    bench.restarts()
    bench.passes(0.5, bench.spot)
    assert not bench.may_be_newer()
    bench.passes(0.5, bench.spot)
    assert bench.may_be_newer()


def test_though_the_server_stands_still_who_is_relied_on_has_a_session() -> None:
    bench = Bench()
    bench.strikes("pause-server", leases=1.5)
    bench.hears(bench.spot)
    assert not bench.may_be_newer()
    bench.passes(1.2, bench.spot)
    assert bench.may_be_newer()


def test_not_if_the_worker_was_told_before_that_it_may_go() -> None:
    bench = Bench()
    told = bench.world.now
    bench.passes(1.2, bench.spot)
    assert bench.may_be_newer()
    assert not bench.truth.established.may_be_newer("m", FORMER, told, told=told)


def test_not_by_a_report_that_was_refused() -> None:
    bench = Bench()
    bench.truth.turned_away(bench.spot)
    bench.passes(1.2, bench.trainer)
    assert not bench.may_be_newer()


def test_who_is_refused_has_no_session_until_it_is_heard_again_whatever_the_time() -> None:
    bench = Bench()
    bench.truth.turned_away(bench.steady)
    assert not bench.truth.is_in_session(bench.steady)
    assert not bench.truth.may_be_in_session(bench.steady)
    report = bench.steady.heard
    assert report is not None
    bench.truth.heard(bench.steady, report)  # over another connection, where it was late
    assert bench.truth.is_in_session(bench.steady)


def test_who_has_a_session_may_not_be_refused() -> None:
    bench = Bench()
    judge = StallJudge(bench.truth, bench.world)
    with pytest.raises(OracleViolation, match="was refused"):
        judge.turned_away(bench.steady)
    bench.passes(1.2, bench.spot)
    judge.turned_away(bench.steady)


def test_not_what_its_publisher_alone_has() -> None:
    bench = Bench()
    bench.spot.held = None
    bench.passes(1.2, bench.trainer)
    assert not bench.may_be_newer()
