"""A second crossing into a site is a fault, unless the first one had brought nothing for long when it began."""

from dataclasses import dataclass, replace

import pytest

from tensorhub.core.messages import PROTOCOL, Grant, Hello
from tensorhub.core.names import Digest, Ticket, Version, WorkerId, worker_id
from tensorhub.sim.draw import draw_plan
from tensorhub.sim.judges.crossings import CrossingJudge
from tensorhub.sim.truth.life import Life, Memory
from tensorhub.sim.truth.record import Truth
from tensorhub.sim.world import OracleViolation, World

pytestmark = pytest.mark.simulation

ROOT, VERSION = Digest("root"), Version(1)


@dataclass
class Reading:
    """A read into a host copy, from another site."""

    grant: Grant
    began: float
    is_stopped: bool = False
    is_ended: bool = False
    shares: bool = False
    is_cross_site: bool = True

    @property
    def tickets(self) -> dict[Ticket, WorkerId]:
        return {self.grant.ticket: self.grant.source}

    @property
    def into(self) -> Memory:
        return [0]


class Bench:
    """A publisher afar, and two of one site: `first` reads across from 10 s on, `second` from 20 s on."""

    def __init__(self) -> None:
        plan = draw_plan(0)
        self.world = World("0")
        settings = replace(plan.settings, lease_s=4.0, stalled_s=2.0)
        self.truth = Truth(self.world, replace(plan, misfortunes=(), settings=settings), {ROOT: (7,)})
        self.judge = CrossingJudge(self.truth, self.world)
        self.far, self.first, self.second = self.life("far", "a"), self.life("first", "b"), self.life("second", "b")
        self.early, self.late = self.reading(1, began=10.0), self.reading(2, began=20.0)
        self.at(10.0)
        self.truth.begins(self.first, self.early)

    def life(self, replica: str, site: str) -> Life:
        me = worker_id("m", replica, 0)
        hello = Hello(PROTOCOL, "m", replica, 0, 1, replica, site=site)
        life = Life(me, replica, hello, [0], lambda _version: [0], lambda: self.world.now, started=0.0)
        self.truth.born(life)
        life.heard_by, life.heard_since, life.trust_until = self.truth.server_life, 0.0, 1000.0
        return life

    def reading(self, ticket: int, *, began: float) -> Reading:
        grant = Grant(Ticket(ticket), VERSION, ROOT, worker_id("m", "far", 0), (), "", to_host=True, is_cross_site=True)
        return Reading(grant, began)

    def at(self, now: float) -> None:
        self.world.now = now

    def chunk_comes_to_first(self, now: float) -> None:
        self.at(now)
        self.truth.accepted(self.first, self.early)

    def chunk_goes_to_second(self, now: float) -> None:
        self.at(now)
        self.second.read = self.late
        self.judge.sent(self.far, self.second, self.late, 0)


def test_a_second_crossing_beside_one_that_goes_on_is_a_fault() -> None:
    bench = Bench()
    for now in range(11, 25):
        bench.chunk_comes_to_first(float(now))
    with pytest.raises(OracleViolation, match="has or reads it"):
        bench.chunk_goes_to_second(24.5)


def test_that_the_first_had_stood_still_is_remembered_though_it_stood_still_again() -> None:
    bench = Bench()
    for now in (16.0, 19.8, 22.1):  # nothing for 3.8 s when the second began, and then nothing for 2.3 s once more
        bench.chunk_comes_to_first(now)
    bench.chunk_goes_to_second(22.5)
