"""Half of a publish that never ended may be called another content only where nobody can show what was published."""

from contextlib import nullcontext
from math import inf

import pytest

from tensorhub.protocol.messages import Failure
from tensorhub.protocol.names import Digest, Version
from tests.sim.judges.drains import DrainJudge
from tests.sim.judges.errors import ErrorJudge
from tests.sim.truth.life import Call, Held, Life
from tests.sim.world import OracleViolation

from .test_belated import FORMER, Bench

pytestmark = pytest.mark.simulation

CONTENT = Digest("the same")
CONFLICT = Failure("version-conflict", "another publish of that number counts")


class Halves(Bench):
    """A trainer has published a version; a shard of a second one the same content under that number."""

    def __init__(self) -> None:
        self.begins(shards=2)
        self.judge = ErrorJudge(DrainJudge(self.truth, self.world))
        first, self.second = ([self.life(name, index) for index in range(2)] for name in ("trainer", "trainer-2"))
        self.first = first
        for life in (*first, self.second[0]):
            self.publishes(life)

    def publishes(self, life: Life) -> None:
        self.world.now += 0.1
        life.held = Held(FORMER, CONTENT, self.world.now, published=True)
        self.truth.published(life, FORMER, CONTENT)
        self.hears(life)

    def is_told(self) -> None:
        """The unpublish of the second one's shard ends in a conflict."""
        call = Call("unpublish", "", Digest(""), self.world.now, inf, FORMER, CONTENT)
        self.judge.call_ended(self.second[0], call, CONFLICT)


def test_where_the_server_has_heard_nobody_who_has_that_shard() -> None:
    bench = Halves()
    for life in bench.first:
        life.held = None
    bench.is_told()


@pytest.mark.parametrize("who", ["the first publisher", "a reader of it"])
def test_not_where_it_has_heard_one(who: str) -> None:
    bench = Halves()
    if who == "a reader of it":
        reader = bench.life("reader")
        reader.held, bench.first[0].held = Held(FORMER, CONTENT, bench.world.now), None
        bench.hears(reader)
    with pytest.raises(OracleViolation, match="published nothing"):
        bench.is_told()


def test_not_where_its_own_publish_has_ended() -> None:
    bench = Halves()
    bench.publishes(bench.second[1])
    for life in bench.first:
        life.held = None
    with pytest.raises(OracleViolation, match="published nothing"):
        bench.is_told()


@pytest.mark.parametrize("was_late", [True, False])
def test_where_all_of_its_shards_had_it_though_no_server_has_heard_so(was_late: bool) -> None:
    """Seed 4106594: one of them had let go before another one was first heard. Else the server knew of all of it."""
    bench = Halves()
    bench.publishes(bench.second[1])
    bench.first[0].held = None
    gone, came = bench.second[1].held, max(each.heard_since for each in bench.second)
    assert gone is not None
    gone.stopped_at = came - 0.01 if was_late else came + 0.01
    with nullcontext() if was_late else pytest.raises(OracleViolation, match="published nothing"):
        bench.is_told()


@pytest.mark.parametrize("why", ["a server has said that it exists", "nobody has anything of the other one"])
def test_not_where_that_was_known_or_there_is_no_other(why: str) -> None:
    bench = Halves()
    bench.publishes(bench.second[1])
    bench.first[0].held = None
    assert bench.second[1].held is not None
    bench.second[1].held.stopped_at = bench.second[0].heard_since - 0.01
    if why == "a server has said that it exists":
        bench.truth.note_known(bench.second[1], FORMER, CONTENT)
    else:
        bench.first[1].held = None
    with pytest.raises(OracleViolation, match="published nothing"):
        bench.is_told()


def test_not_where_nobody_else_has_published_it() -> None:
    bench = Halves()
    bench.truth.made["m", Version(FORMER)].pop(bench.first[0].me.replica)
    for life in bench.first:
        life.held = None
    with pytest.raises(OracleViolation, match="published nothing"):
        bench.is_told()
