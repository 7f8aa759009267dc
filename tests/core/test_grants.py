"""What the server grants and until when it watches, of which no transcript tells."""

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from tensorhub.protocol.messages import (
    Answer,
    CallReport,
    Filling,
    Holding,
    HostCopy,
    Orders,
    Poisoned,
    Reading,
    TicketFailure,
    Withdrawing,
)
from tensorhub.protocol.names import Digest, Ticket, Version, WorkerId
from tensorhub.server.decisions import Decision
from tensorhub.server.members import Member
from tensorhub.server.rules import reads, sources
from tensorhub.server.state import State
from tensorhub.server.versions import publisher_in

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
    town.joins(TRAINER, buffer=Holding(ONE, ROOT, published=True), receipts=town.receipts(TRAINER, ONE, ROOT))
    town.joins(READER, copies=(HostCopy(1, ONE, ROOT, whole=is_whole),))
    assert (ONE in town.orders[READER].receipts) is is_whole


def test_no_receipt_is_owed_for_what_nothing_has_proved() -> None:
    town = Town()
    town.joins(TRAINER, buffer=Holding(ONE, ROOT, published=True))
    town.joins(READER, buffer=Holding(ONE, ROOT))
    assert not town.orders[TRAINER].receipts
    assert not town.orders[READER].receipts


def test_a_receipt_that_is_of_no_use_is_replaced() -> None:
    town = Town()
    known = town.receipts(TRAINER, ONE, ROOT, publisher=TRAINER.replica)
    town.joins(TRAINER, buffer=Holding(ONE, ROOT, published=True), receipts=known)
    town.joins(READER, buffer=Holding(ONE, ROOT), receipts=town.receipts(READER, ONE, Digest("of another layout")))
    right = town.orders[READER].receipts
    assert publisher_in(right[ONE]) == TRAINER.replica
    town.says(READER, buffer=Holding(ONE, ROOT), receipts=right)
    assert not town.orders[READER].receipts


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


def test_nobody_goes_on_reading_a_buffer_that_was_cut_short_because_its_worker_fetches_into_host_memory() -> None:
    town, last, call = Town(), worker("last"), CallReport(1, "replicate", 1)
    whole = (HostCopy(1, ONE, ROOT, whole=True),)
    town.joins(SPOT, host="here", place="p", copies=whole)
    town.joins(last, host="far")
    town.says(last, call=call)
    failed = town.orders[last].grant
    assert failed is not None
    waits: dict[str, Any] = {
        "call": replace(call, resolved=ONE),
        "closed": failed.ticket,
        "failures": (TicketFailure(failed.ticket, SPOT, "source-lost", "reset"),),
    }
    town.says(last, **waits)
    town.says(SPOT, copies=whole)  # it lives, whatever one reader says
    room: dict[str, Any] = {"copies_left": 1}
    ahead_too = {**room, "prefetch": "latest"}
    town.joins(READER, host="here", place="p", **room)
    town.says(READER, **room, call=call)
    first, behind = town.orders[READER].grant, town.orders[last].grant
    assert first is not None
    assert behind is not None
    assert (first.source, first.to_host, behind.source) == (SPOT, False, READER)
    filling, reading = Filling(ONE, 1, 3), Reading(behind.ticket, READER, ONE)
    has: dict[str, Any] = {"buffer": filling, "call": replace(call, resolved=ONE)}
    town.says(READER, **room, **has, reading=Reading(first.ticket, SPOT, ONE, from_host=True))
    town.says(last, **waits, buffer=Filling(ONE), reading=reading)
    assert town.orders[last].grant == behind
    hopeless = TicketFailure(Ticket(1), worker("gone"), "layout-mismatch", "others")
    town.says(READER, **ahead_too, **has, failures=(hopeless,), closed=first.ticket)
    ahead = town.orders[READER].grant
    assert ahead is not None
    assert (ahead.source, ahead.to_host, ahead.shares) == (SPOT, True, True)
    town.says(READER, **ahead_too, buffer=Poisoned(ONE), ended=1, closed=first.ticket)
    assert town.orders[last].grant is None, "it waits until it may try again who failed it"
    assert town.orders[READER].drained is None
    town.says(last, **{**waits, "closed": behind.ticket}, buffer=Filling(ONE))
    assert town.orders[READER].drained == ONE, "nobody is left there"


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


def test_what_comes_from_a_source_without_a_session_is_no_measure_for_others() -> None:
    """It is not known any more over what distance: what a neighbour sends is not what comes from afar."""
    town, relay, call = Town(lease_s=1.0, report_s=0.2, slow_s=0.4), worker("relay"), CallReport(1, "replicate", 1)
    town.joins(relay, host="b", buffer=Holding(ONE, ROOT, published=True))
    town.joins(READER, host="b")
    town.says(READER, call=call)
    grant = town.orders[READER].grant
    assert grant is not None
    measured = []
    for step in range(1, 30):
        town.until(step * 0.2)
        if step < 10:
            town.says(relay, buffer=Holding(ONE, ROOT, published=True))
        reading = Reading(grant.ticket, relay, ONE, arrived_bytes=step << 20)
        town.says(READER, call=call, buffer=Filling(ONE, step, 100), reading=reading)
        measured.append(set(town.server.state.known(READER).best))
    assert relay not in town.server.state.members
    assert town.server.state.reads.current[READER].pace.rate is not None
    assert measured[-1] == measured[9] == {(False, False)}


def test_rules_that_contradict_each_other_do_not_go_round_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def once_more(state: State, model: object, member: Member, wanted: object) -> Iterator[Decision]:
        state.mark_dirty(member.worker)
        yield from ()

    monkeypatch.setattr(reads, "decide_read", once_more)
    town = Town()
    town.joins(READER)
    assert town.server.state.counters["unsettled"] > 0
    assert town.orders[READER].acknowledged == 1
