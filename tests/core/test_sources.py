"""Which source a reader gets, of which no transcript tells."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub.protocol.messages import (
    CallReport,
    Empty,
    Filling,
    Holding,
    Orders,
    Reading,
)
from tensorhub.protocol.names import Digest, Version
from tensorhub.server import reads, sources
from tensorhub.server.members import Avoided, Member
from tensorhub.server.selection import Candidate, choose_source
from tensorhub.server.state import State

from .kit import candidate, worker
from .town import Town

# --- who reads from whom ---


def chosen(*candidates: Candidate, now: float = 0.0) -> str | None:
    found = choose_source(candidates, now=now)
    return found[0].worker.replica if found is not None else None


@pytest.mark.parametrize(
    ("worse", "better"),
    [
        (candidate("a", is_same_site=False), candidate("b", load=9)),
        (candidate("a", load=1, is_near=True), candidate("b", published=True)),
        (candidate("a", published=True), candidate("b")),
        (candidate("a"), candidate("b", done=2, is_near=True)),
        (candidate("a", done=1), candidate("b", done=5)),
        (candidate("c"), candidate("b")),
    ],
    ids=["site", "readers", "publisher", "host", "progress", "name"],
)
def test_the_better_source_is_chosen_whatever_the_order(worse: Candidate, better: Candidate) -> None:
    assert chosen(worse, better) == chosen(better, worse) == "b"


def test_between_sites_the_uplink_of_the_site_counts_whoever_serves() -> None:
    idle = candidate("a", is_same_site=False, leaving_site=1)
    assert chosen(idle, candidate("b", load=3, done=1, is_same_site=False)) == "b"
    found = choose_source([idle], now=0.0)
    assert found is not None
    assert found[1] == "relay, full, idle, other site that 1 more leave; best of 1"


@st.composite
def candidates(draw: st.DrawFn) -> list[Candidate]:
    names = draw(st.lists(st.sampled_from("abcdef"), unique=True))
    return [
        candidate(
            name,
            load=draw(st.integers(0, 3)),
            done=draw(st.none() | st.integers(0, 4)),
            published=draw(st.booleans()),
            is_withdrawing=draw(st.booleans()),
            is_near=draw(st.booleans()),
            is_same_site=draw(st.booleans()),
            avoided_until=draw(st.sampled_from([float("-inf"), 1.0, float("inf")])),
            leaving_site=draw(st.integers(0, 2)),
        )
        for name in names
    ]


@given(candidates(), st.sampled_from([0.0, 2.0]))
def test_it_is_one_that_may_be_tried_and_stays_if_any_does(found: list[Candidate], now: float) -> None:
    usable = [one for one in found if one.avoided_until <= now]
    choice = choose_source(found, now=now)
    assert (choice is None) == (not usable)
    if choice is not None:
        (best,) = [one for one in usable if one.worker == choice[0].worker]
        assert not best.is_withdrawing or all(one.is_withdrawing for one in usable)


# --- what the server grants and until when it watches, of which no transcript tells ---

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
        assert grant.source.is_cross_site is is_cross_site


def drawn_fleet(chance: Random) -> tuple[Town, Member]:
    """Many holders of a version, some of which fill or serve others, and a reader that has no source yet."""
    town = Town(default_retain=0)
    town.joins(TRAINER, site="a", host="h0", buffer=Holding(ONE, ROOT, published=True))
    others = [worker(f"relay-{number:02}") for number in range(14)]
    chance.shuffle(others)
    for each in others:
        buffer = Holding(ONE, ROOT) if chance.random() < 0.6 else Empty()
        town.joins(each, site=chance.choice("aab"), host=f"h{chance.randrange(6)}", buffer=buffer)
    for each in others:
        if town.told[each]["buffer"] == Empty():
            town.says(each, buffer=Empty(), call=CallReport(1, "replicate", 1))
    for each in others:
        grant = town.orders[each].grant
        if grant is not None:
            reading = Reading(grant.ticket, grant.sources, ONE)
            call, buffer = CallReport(1, "replicate", 1, resolved=ONE), Filling(ONE, chance.randrange(1, 5), 9)
            town.says(each, buffer=buffer, reading=reading, call=call)
    town.joins(READER, site="a", host=f"h{chance.randrange(6)}")
    members = town.server.state.members
    for each in chance.sample(others, 3):
        members[each].avoided = Avoided(town.now + 1.0, 1)
        if chance.random() < 0.5:
            town.loses_its_line(each)
    return town, members[READER]


def test_of_many_holders_the_idle_ones_have_the_best_source_by_the_whole_rule() -> None:
    is_filling = is_near = is_far = False
    for seed in range(10):
        town, reader = drawn_fleet(Random(seed))
        state, model = town.server.state, town.server.state.models[READER.model]
        record = model.versions[ONE]
        assert len(record.holders[reader.layout_key]) > sources.MAX_ALL
        found = sources.idle(state, model, record, reader)
        assert found, f"seed {seed} has no idle source, and so shows nothing"
        best = choose_source(found, now=state.now)
        right = choose_source(sources.possible(state, model, record, reader), now=state.now)
        assert best is not None
        assert right is not None
        assert best[0] == right[0], f"seed {seed}: `sources.idle` does not follow `selection._rank`"
        is_near, is_far = is_near or right[0].is_near, is_far or not right[0].is_near
        is_filling = is_filling or not right[0].is_full
    assert (is_near, is_far, is_filling) == (True, True, True), "each of them is drawn"


def test_rules_that_contradict_each_other_do_not_go_round_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def once_more(state: State, model: object, member: Member, wanted: object) -> None:
        state.mark_dirty(member.worker)

    monkeypatch.setattr(reads, "decide_read", once_more)
    town = Town()
    town.joins(READER)
    assert town.server.state.counters["unsettled"] > 0
    assert town.orders[READER].acknowledged == 1
