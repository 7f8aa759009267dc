"""What the server grants and until when it watches, of which no transcript tells."""

from collections.abc import Iterator

import pytest

from tensorhub.core.messages import Answer, CallReport, Filling, Holding, HostCopy, Orders, Reading, Withdrawing
from tensorhub.core.names import Digest, Version
from tensorhub.core.server.decisions import Decision
from tensorhub.core.server.membership import Member
from tensorhub.core.server.rules import grants, sources
from tensorhub.core.server.state import State

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


def test_who_waits_long_for_a_reliable_heir_is_not_looked_at_over_and_over() -> None:
    town = Town(spot_heir_s=5.0, lease_s=4.0, report_s=1.0)
    town.joins(TRAINER, buffer=Holding(ONE, ROOT, published=True))
    town.joins(SPOT, reliable=False, buffer=Holding(ONE, ROOT))
    town.joins(READER, copies_left=1)
    leaving = {"buffer": Withdrawing(ONE, ROOT, published=True), "closing": True}
    town.says(TRAINER, **leaving)
    grant = town.orders[READER].grant
    assert grant is not None
    assert (grant.source, grant.to_host) == (SPOT, True)
    reading = Reading(grant.ticket, grant.source, ONE, to_host=True)
    copy = HostCopy(1, ONE, ROOT, whole=False)
    for second in range(1, 12):
        town.until(float(second))
        town.says(TRAINER, **leaving)
        town.says(SPOT, buffer=Holding(ONE, ROOT))
        town.says(READER, reading=reading, copies=(copy,))
        assert town.orders[TRAINER].drained is None
        assert town.server.next_deadline() > town.now


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_receipt_is_owed_for_what_is_whole(is_whole: bool) -> None:
    town = Town()
    town.joins(TRAINER, buffer=Holding(ONE, ROOT, published=True))
    town.joins(READER, copies=(HostCopy(1, ONE, ROOT, whole=is_whole),))
    assert (ONE in town.orders[READER].receipts) is is_whole


def test_what_was_told_to_go_and_is_gone_is_forgotten() -> None:
    town = Town(keep_established=False)
    town.joins(TRAINER, buffer=Holding(ONE, ROOT, published=True))
    town.joins(READER)
    for number in range(1, 4):
        town.says(READER, copies=(HostCopy(number, ONE, ROOT, whole=True),))
        assert town.orders[READER].release == (number,)
        assert list(town.server.state.known(READER).releasing) == [number]
    town.says(READER, buffer=Filling(ONE))
    assert not town.server.state.known(READER).releasing


def test_who_has_a_line_again_counts_from_its_hello_on() -> None:
    town = Town()
    town.joins(TRAINER, buffer=Holding(ONE, ROOT, published=True))
    first, second = worker("a"), worker("b")
    for who in (first, second):
        town.joins(who, buffer=Holding(ONE, ROOT), copies_left=1)
    assert (town.orders[first].offload, town.orders[second].offload) == (ONE, None)
    town.loses_its_line(first)
    assert town.orders[second].offload == ONE, "somebody else makes the copy ahead"
    town.says_hello_again(first)
    assert (town.orders[first].offload, town.orders[second].offload) == (ONE, None)


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


def test_a_read_from_a_host_copy_that_is_gone_is_taken_back() -> None:
    town, copy = Town(), HostCopy(1, ONE, ROOT, whole=True)
    town.joins(SPOT, reliable=False, copies=(copy,))
    town.joins(READER)
    town.says(READER, call=CallReport(1, "replicate", 1))
    grant = town.orders[READER].grant
    assert grant is not None
    assert (grant.source, grant.from_host) == (SPOT, True)
    town.says(SPOT)
    assert town.orders[READER].grant is None


def test_rules_that_contradict_each_other_do_not_go_round_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def once_more(state: State, model: object, member: Member, wanted: object) -> Iterator[Decision]:
        state.mark_dirty(member.worker)
        yield from ()

    monkeypatch.setattr(grants, "decide_read", once_more)
    town = Town()
    town.joins(READER)
    assert town.server.state.counters["unsettled"] > 0
    assert town.orders[READER].acknowledged == 1
