"""What the server grants and until when it watches, of which no transcript tells."""

from collections.abc import Iterator

import pytest

from tensorhub.protocol.messages import (
    Answer,
    CallReport,
    Filling,
    Holding,
    HostCopy,
    Orders,
    Reading,
)
from tensorhub.protocol.names import Digest, Version, WorkerId
from tensorhub.server.decisions import Decision
from tensorhub.server.members import Member
from tensorhub.server.rules import reads, sources
from tensorhub.server.state import State

from .kit import worker
from .town import Town

ONE, ROOT = Version(1), Digest("r")
TRAINER, READER, SPOT = worker("trainer"), worker("reader"), worker("spot")


def reads_from(town: Town, site: str) -> Orders:
    town.joins(TRAINER, site="a", buffer=Holding(ONE, ROOT, published=True))
    town.joins(READER, site=site)
    town.says(READER, call=CallReport(1, "replicate", 1))
    return town.orders[READER]


def test_a_grant_says_whether_it_leads_to_another_site() -> None:
    for site, is_cross_site in (("a", False), ("b", True)):
        grant = reads_from(Town(), site).grant
        assert grant is not None
        assert grant.is_cross_site is is_cross_site


def test_among_very_many_one_that_has_everything_comes_before_one_that_is_filling() -> None:
    town, filling = Town(), worker("a")
    for number in range(sources.MAX_ALL):
        town.joins(worker(f"relay-{number:02}"), host=f"{number}", buffer=Holding(ONE, ROOT))
    call = CallReport(1, "replicate", 1)
    for who in (filling, READER):
        town.joins(who, host=str(who))
        town.says(who, call=call)
        grant = town.orders[who].grant
        assert grant is not None
        assert grant.source == worker("relay-00" if who == filling else "relay-01")
        town.says(who, call=call, buffer=Filling(ONE), reading=Reading(grant.ticket, grant.source, ONE))


def test_among_very_many_a_relay_comes_before_the_publisher() -> None:
    town = Town()
    town.joins(worker("a"), host="a", buffer=Holding(ONE, ROOT, published=True))
    for number in range(sources.MAX_ALL):
        town.joins(worker(f"relay-{number:02}"), host=f"{number}", buffer=Holding(ONE, ROOT))
    town.joins(READER, host="reader")
    town.says(READER, call=CallReport(1, "replicate", 1))
    grant = town.orders[READER].grant
    assert grant is not None
    assert grant.source == worker("relay-00")


def test_prefetched_is_the_newest_of_the_copies_that_are_whole() -> None:
    town = Town()
    town.joins(TRAINER, buffer=Holding(Version(4), ROOT, published=True))
    copies = tuple(HostCopy(number, Version(number), ROOT, whole=number < 4) for number in (3, 2, 4))
    has = {"buffer": Holding(ONE, ROOT), "copies": copies, "pins": (Version(2), Version(3))}
    town.joins(READER, **has)
    town.says(READER, **has, call=CallReport(1, "update", "prefetched"))
    assert town.orders[READER].answer == Answer(1, Version(3))


@pytest.mark.parametrize("brings", [False, True])
def test_a_source_without_a_session_is_left_where_nothing_comes_from_it(brings: bool) -> None:
    """It may well go on serving. But one that was filling may say for ever that it has no more yet."""
    town, relay, call = Town(lease_s=1.0, report_s=0.2), worker("relay"), CallReport(1, "replicate", 1)
    town.joins(TRAINER, host="a", buffer=Holding(ONE, ROOT, published=True))
    readings: dict[WorkerId, Reading] = {}
    for who in (relay, READER):
        town.joins(who, host="b")
        town.says(who, call=call)
        grant = town.orders[who].grant
        assert grant is not None
        readings[who] = Reading(grant.ticket, grant.source, ONE)
        town.says(who, call=call, buffer=Filling(ONE, 1, 100), reading=readings[who])
    assert readings[READER].source == relay
    for step in range(1, 40):
        town.until(step * 0.2)
        town.says(TRAINER, buffer=Holding(ONE, ROOT, published=True))
        filling = Filling(ONE, 1 + step * brings, 100)
        town.says(READER, call=call, buffer=filling, reading=readings[READER])
    assert relay not in town.server.state.members
    grant = town.orders[READER].grant
    assert grant is not None
    assert grant.source == (relay if brings else TRAINER)


def test_rules_that_contradict_each_other_do_not_go_round_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def once_more(state: State, model: object, member: Member, wanted: object) -> Iterator[Decision]:
        state.mark_dirty(member.worker)
        yield from ()

    monkeypatch.setattr(reads, "decide_read", once_more)
    town = Town()
    town.joins(READER)
    assert town.server.state.counters["unsettled"] > 0
    assert town.orders[READER].acknowledged == 1
