"""A second crossing into a site is a fault, unless the first one had brought nothing for long when it began."""

from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest

from tensorhub.protocol.messages import PROTOCOL, Grant, Hello
from tensorhub.protocol.names import Digest, Ticket, Version, WorkerId, worker_id
from tensorhub.worker.events import ReadEnded, StopRead
from tests.sim.draw import draw_plan
from tests.sim.judges.crossings import CrossingJudge
from tests.sim.truth.life import Copied, Held, Life, Memory
from tests.sim.truth.record import Truth
from tests.sim.world import OracleViolation, World

pytestmark = pytest.mark.simulation

ROOT, VERSION = Digest("root"), Version(1)


@dataclass
class Reading:
    """A read into a host copy, from another site or from `first`."""

    grant: Grant
    began: float
    is_stopped: bool = False
    is_ended: bool = False
    shares: bool = False
    is_cross_site: bool = True
    done: int = 0
    root: Digest = ROOT

    @property
    def ticket(self) -> Ticket:
        return self.grant.ticket

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

    def reading(self, ticket: int, *, began: float, source: str = "far") -> Reading:
        is_far = source == "far"
        grant = Grant(
            *(Ticket(ticket), VERSION, ROOT, worker_id("m", source, 0), (), ""),
            from_host=not is_far,
            to_host=True,
            is_cross_site=is_far,
        )
        return Reading(grant, began, is_cross_site=is_far)

    def at(self, now: float) -> None:
        self.world.now = now

    def chunk_comes_to_first(self, now: float, chunk: int = 0) -> None:
        self.at(now)
        self.truth.accepted(self.first, self.early, chunk)

    def chunk_comes_to_second_behind_first(self, now: float, *, first_had_it_at: float) -> None:
        """Its first chunk, just after `first` has got the last one; later the second reads from afar."""
        self.at(10.0)
        behind = self.reading(3, began=10.0, source="first")
        self.truth.begins(self.second, behind)
        self.chunk_comes_to_first(first_had_it_at, 0)
        self.chunk_comes_to_first(now - 0.1, 1)
        self.truth.told(self.first, ReadEnded(self.early.ticket, complete=True))
        self.at(now)
        self.truth.accepted(self.second, behind, 0)

    def second_leaves_first(self, now: float) -> None:
        self.at(now)
        self.truth.wants(self.second, StopRead(Ticket(3)))

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


def test_who_got_nothing_for_long_of_what_its_source_had_may_read_from_afar_though_the_source_got_on() -> None:
    bench = Bench()
    bench.chunk_comes_to_second_behind_first(13.5, first_had_it_at=11.0)
    bench.chunk_goes_to_second(20.5)


def test_who_got_a_chunk_soon_after_its_source_had_it_may_not_read_from_afar() -> None:
    bench = Bench()
    bench.chunk_comes_to_second_behind_first(13.5, first_had_it_at=11.9)
    with pytest.raises(OracleViolation, match="has or reads it"):
        bench.chunk_goes_to_second(20.5)


def test_whose_source_got_nothing_for_long_either_may_read_from_afar_though_it_got_something_then() -> None:
    bench = Bench()
    bench.chunk_comes_to_second_behind_first(13.1, first_had_it_at=12.9)
    bench.second_leaves_first(12.9 + 0.9 * bench.truth.spread_s)
    bench.chunk_goes_to_second(20.5)


@pytest.mark.parametrize("leaves", [False, True])
def test_who_did_not_leave_it_for_that_may_not(leaves: bool) -> None:
    bench = Bench()
    bench.chunk_comes_to_second_behind_first(13.1, first_had_it_at=12.9)
    if leaves:
        bench.second_leaves_first(12.9 + 1.1 * bench.truth.spread_s)
    with pytest.raises(OracleViolation, match="has or reads it"):
        bench.chunk_goes_to_second(20.5)


@pytest.mark.parametrize("was_filling", [True, False])
def test_who_got_nothing_behind_one_that_got_nothing_may_read_from_afar_though_that_one_has_begun_anew(
    was_filling: bool,
) -> None:
    """Seed 4107069: the first one began to read the same from somebody else just before the second one left it."""
    bench = Bench()
    behind = bench.reading(3, began=10.0, source="first")
    bench.truth.begins(bench.second, behind)
    bench.at(12.9)
    if not was_filling:
        bench.first.filling = None
    bench.truth.begins(bench.first, bench.reading(4, began=12.9))
    bench.second_leaves_first(13.0)
    for now in range(14, 21):
        bench.chunk_comes_to_first(float(now))
    with nullcontext() if was_filling else pytest.raises(OracleViolation, match="has or reads it"):
        bench.chunk_goes_to_second(20.5)


@pytest.mark.parametrize(
    ("is_told", "is_held", "is_fault"), [(True, True, False), (True, False, True), (False, True, True)]
)
def test_a_copy_that_goes_as_somebody_holds_the_version_is_there_no_more(
    is_told: bool, is_held: bool, is_fault: bool
) -> None:
    """Seed 4105136: the one who held it was of another site, and the reader's call came at the same moment."""
    bench = Bench()
    bench.at(19.0)
    bench.truth.told(bench.first, ReadEnded(bench.early.ticket))
    bench.first.copies[VERSION] = Copied(VERSION, ROOT, 12.0, [7])
    if is_told:
        bench.first.released[VERSION] = None
    if is_held:
        bench.far.held = Held(VERSION, ROOT, 5.0)
    with pytest.raises(OracleViolation, match="has or reads it") if is_fault else nullcontext():
        bench.chunk_goes_to_second(20.5)
