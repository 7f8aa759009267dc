"""A version comes to be when all shards of a replica have published it, whatever of an earlier attempt was left."""

from dataclasses import replace

import pytest

from tensorhub.protocol.messages import PROTOCOL, Hello
from tensorhub.protocol.names import Digest, Version, worker_id
from tensorhub.worker.events import Called, StartServing
from tests.sim.draw import draw_plan
from tests.sim.truth.life import Life
from tests.sim.truth.record import Truth
from tests.sim.world import World

pytestmark = pytest.mark.simulation

VERSION = Version(1)
SHARDS = (0, 1, 2)


class Bench:
    """A trainer of three shards. What it publishes first fails before it gets to the last of them."""

    def __init__(self) -> None:
        plan = draw_plan(0)
        plan = replace(plan, conditions=replace(plan.conditions, shards=len(SHARDS)), misfortunes=())
        self.world = World("0")
        self.truth = Truth(self.world, plan, {})
        self.lives = [self.life(shard) for shard in SHARDS]
        self.calls("first")
        self.serves(0, "first")
        self.serves(1, "first")

    def life(self, shard: int) -> Life:
        me = worker_id("m", "trainer", shard)
        hello = Hello(PROTOCOL, "m", "trainer", shard, len(SHARDS), "trainer")
        life = Life(me, str(me), hello, [], lambda _version: [], lambda: self.world.now, started=0.0)
        self.truth.born(life)
        return life

    def calls(self, content: str) -> None:
        self.world.now += 1.0
        for shard, life in enumerate(self.lives):
            life.call = None
            self.truth.told(life, Called("publish", VERSION, self.world.now + 9.0, Digest(f"{content}/{shard}")))

    def leaves(self, *shards: int) -> None:
        for shard in shards:
            self.lives[shard].held = None

    def serves(self, shard: int, content: str) -> None:
        self.world.now += 1.0
        life, root = self.lives[shard], Digest(f"{content}/{shard}")
        self.truth.wants(life, StartServing(VERSION, root))
        self.truth.published(life, VERSION, root)


@pytest.mark.parametrize("order", [(2, 1, 0), (2, 0, 1), (0, 1, 2), (1, 2, 0)])
def test_whoever_is_first_when_a_number_is_published_again(order: tuple[int, ...]) -> None:
    bench = Bench()
    bench.leaves(0, 1)
    bench.calls("second")
    for shard in order:
        assert bench.truth.exists("m", VERSION) is None
        bench.serves(shard, "second")
    made = bench.truth.exists("m", VERSION)
    assert made is not None
    assert made.roots == {shard: f"second/{shard}" for shard in SHARDS}


def test_what_is_half_of_one_attempt_and_half_of_another_does_not_exist() -> None:
    bench = Bench()
    bench.leaves(1)
    bench.calls("second")
    bench.serves(2, "second")
    bench.serves(1, "second")
    assert bench.truth.exists("m", VERSION) is None
