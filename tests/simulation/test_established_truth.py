"""What a server must know to be established: it has heard so from all shards at a time."""

import pytest

from tensorhub.protocol.messages import Empty, Holding, Report
from tensorhub.protocol.names import Digest, Version
from tests.sim.plan import Misfortune
from tests.sim.truth.life import Held, Life

from .test_belated import FORMER, NEWER, Bench

pytestmark = pytest.mark.simulation

THIRD = Version(3)


class TwoShards(Bench):
    """Both shards of a rollout have all of a version; no server has heard of that yet."""

    def __init__(self) -> None:
        self.begins(shards=2)
        self.trainers = [self.life("trainer", index) for index in range(2)]
        self.rollouts = [self.life("rollout", index) for index in range(2)]
        self.publishes(FORMER)
        for rollout in self.rollouts:
            self.gets(rollout, FORMER)
        self.hears(*self.trainers)

    def publishes(self, version: Version) -> None:
        for trainer in self.trainers:
            self.trainer = trainer
            self.truth.published(trainer, version, self.gets(trainer, version))

    def is_known(self) -> bool:
        assert self.truth.established.version("m") == FORMER
        return self.truth.established.is_known("m", FORMER, self.world.now + 1)


def gets_third(bench: Bench) -> None:
    """A spot worker gets what is published next."""
    bench.truth.published(bench.trainer, THIRD, bench.gets(bench.trainer, THIRD))
    bench.gets(bench.spot, THIRD)


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


@pytest.mark.parametrize("comes", ["before the server decides", "later", "never"])
def test_the_next_server_wants_one_that_is_relied_on_where_such_a_one_lives(comes: str) -> None:
    """As it finds out anew what is established, from whom it hears before it decides anything."""
    bench = TwoShards()
    spots = [bench.life("spot", index, reliable=False) for index in range(2)]
    for spot in spots:
        bench.gets(spot, FORMER)
    bench.hears(*bench.rollouts, *spots)
    assert bench.is_known()
    bench.truth.died(bench.rollouts[1])
    bench.restarts()
    there = [*bench.trainers, bench.rollouts[0], *spots]
    bench.passes(0.5, *there)
    if comes == "before the server decides":
        bench.life("rollout", 1)
    bench.passes(5.0, *there)
    if comes == "later":
        bench.life("rollout", 1)
        bench.passes(1.0, *there)
    assert bench.is_known() is (comes != "before the server decides")


@pytest.mark.parametrize("is_down", [True, False])
def test_a_server_that_was_down_when_it_became_so_is_the_next_one(is_down: bool) -> None:
    """It finds out anew what is established, and one that is relied on comes before it decides."""
    bench = Bench()
    bench.truth.died(bench.steady)
    bench.passes(2.0, bench.trainer, bench.spot)
    if is_down:
        bench.truth.troubles.struck(0, Misfortune(bench.world.now, "restart-server", ""), bench.world.now)
        bench.world.now += 0.1
        gets_third(bench)
        bench.world.now += 0.1
        bench.truth.troubles.passed(0, bench.world.now)
        bench.truth.server_life += 1
    else:
        gets_third(bench)
    bench.hears(bench.spot)
    bench.passes(0.5, bench.trainer, bench.spot)
    bench.life("steady")
    bench.passes(5.0, bench.trainer, bench.spot)
    assert bench.truth.established.version("m") == THIRD
    assert bench.truth.established.is_known("m", THIRD, bench.world.now) is not is_down


@pytest.mark.parametrize("is_heard", [True, False])
def test_not_where_a_server_knows_of_one_between_it_and_the_newest(is_heard: bool) -> None:
    """Who first had that has gone on, unheard; another one has it since."""
    bench = Bench()
    bench.truth.died(bench.steady)
    bench.passes(2.0, bench.trainer, bench.spot)
    former, other = bench.life("former", reliable=False), bench.life("other", reliable=False)
    bench.gets(former, THIRD)
    bench.truth.published(bench.trainer, THIRD, bench.gets(bench.trainer, THIRD))
    bench.truth.established.note_whole(former, THIRD)
    bench.hears(former)
    bench.passes(1.0, bench.trainer, former)
    assert bench.truth.established.is_known("m", THIRD, bench.world.now)
    for version in (Version(4), Version(5)):
        bench.truth.published(bench.trainer, version, bench.gets(bench.trainer, version))
        bench.gets(bench.spot, version)
        if version == 4:
            bench.gets(other, version)
    if is_heard:
        bench.hears(other)
    assert bench.truth.established.version("m") == 5
    assert bench.truth.established.is_known("m", THIRD, bench.world.now) is not is_heard


def test_not_while_a_server_takes_a_newer_one_for_it_from_such_as_have_died() -> None:
    bench = TwoShards()
    bench.hears(*bench.rollouts)
    assert bench.is_known()
    bench.publishes(NEWER)
    bench.gets(bench.rollouts[0], NEWER)
    bench.hears(bench.rollouts[0])  # nobody has the other shard yet
    bench.gets(bench.rollouts[1], NEWER)
    for rollout in bench.rollouts:
        bench.truth.died(rollout)
    bench.hears(bench.rollouts[1])  # that was on its way
    assert not bench.truth.established.is_known("m", FORMER, bench.world.now + 1)


def test_but_not_from_such_as_it_has_forgotten() -> None:
    bench = TwoShards()
    bench.hears(*bench.rollouts)
    others = [bench.life("other", index) for index in range(2)]
    bench.publishes(NEWER)
    for other in others:
        bench.gets(other, NEWER)
    bench.hears(others[0])
    bench.truth.died(others[0])
    bench.passes(1.5, *bench.trainers, *bench.rollouts)
    bench.truth.died(others[1])
    bench.hears(others[1])
    assert bench.truth.established.is_known("m", FORMER, bench.world.now + 1)


@pytest.mark.parametrize("stands_still", [True, False])
def test_who_died_while_the_server_stood_still_is_thought_to_live_for_a_lease_more(stands_still: bool) -> None:
    """So long one that is relied on seems to be there, and what only a spot worker gets is not established."""
    bench = Bench()
    bench.hears(bench.steady)
    bench.truth.died(bench.steady)
    if stands_still:
        bench.strikes("pause-server", leases=1.5)
    else:
        bench.passes(1.5, bench.spot)
    gets_third(bench)
    assert (bench.truth.established.version("m") == FORMER) is stands_still


@pytest.mark.parametrize("leases", [0.01, 1.5])
def test_who_died_long_before_the_server_stood_still_stays_dead(leases: float) -> None:
    bench = Bench()
    bench.truth.died(bench.steady)
    bench.passes(2.0, bench.spot)
    bench.strikes("pause-server", leases=leases)
    gets_third(bench)
    assert bench.truth.established.version("m") == THIRD


class Twins(Bench):
    """Two trainers have published the same content, and then the server has been started anew. A spot worker has it."""

    def __init__(self) -> None:
        self.begins(shards=1)
        self.trainer, self.twin = self.life("trainer"), self.life("twin")
        for each in (self.trainer, self.twin):
            each.held = Held(FORMER, Digest(f"content {FORMER}"), self.world.now, published=True)
            self.truth.published(each, FORMER, each.held.root)
            self.says(each)
        self.restarts()

    def says(self, life: Life) -> None:
        self.world.now += 0.1
        self.reports += 1
        held = life.held
        buffer = Holding(held.version, held.root, held.published) if held is not None else Empty()
        self.truth.heard(life, Report(self.reports, buffer=buffer))


@pytest.mark.parametrize("is_shown", [True, False])
def test_whoever_has_published_it_too_and_had_gone_on_by_then_is_relied_on_like_any_other(is_shown: bool) -> None:
    """Seed 4107950: the server knew of one publisher, and the other one lived and had not what spot workers had."""
    bench = Twins()
    if is_shown:
        bench.says(bench.twin)
    bench.twin.held = None
    bench.says(bench.twin)
    spot = bench.life("spot", reliable=False)
    bench.gets(spot, FORMER)
    for life in (bench.twin, bench.trainer, spot):
        bench.says(life)
    assert bench.truth.established.version("m") == FORMER
    assert bench.truth.established.is_known("m", FORMER, bench.world.now + 1) == is_shown
