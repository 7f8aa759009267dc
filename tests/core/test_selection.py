"""Who reads from whom."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tensorhub.server.rules.selection import Candidate, choose_source

from .kit import candidate, worker


def chosen(*candidates: Candidate, now: float = 0.0) -> str | None:
    found = choose_source(candidates, now=now)
    return found[0].worker.replica if found is not None else None


def test_nobody_has_it() -> None:
    assert choose_source([], now=0.0) is None


def test_the_same_site_comes_first() -> None:
    assert chosen(candidate("a", is_same_site=False), candidate("b", load=9)) == "b"


def test_between_sites_the_uplink_of_the_site_counts_whoever_serves() -> None:
    idle = candidate("a", is_same_site=False, leaving_site=1)
    assert chosen(idle, candidate("b", load=3, done=1, is_same_site=False)) == "b"
    found = choose_source([idle], now=0.0)
    assert found is not None
    assert found[1] == "relay, full, idle, other site that 1 more leave; best of 1"


def test_fewer_readers_come_before_everything_but_the_site() -> None:
    assert chosen(candidate("a", load=1, is_near=True), candidate("b", published=True)) == "b"


def test_a_relay_spares_the_publisher() -> None:
    assert chosen(candidate("a", published=True), candidate("b")) == "b"


def test_the_same_host_comes_before_a_whole_one() -> None:
    assert chosen(candidate("a"), candidate("b", done=2, is_near=True)) == "b"


def test_the_further_of_two_that_are_filling() -> None:
    assert chosen(candidate("a", done=1), candidate("b", done=5)) == "b"


def test_ties_are_broken_by_name_whatever_the_order() -> None:
    assert chosen(candidate("b"), candidate("a")) == "a"
    assert chosen(candidate("a"), candidate("b")) == "a"


def test_one_that_withdraws_is_the_last_resort() -> None:
    assert chosen(candidate("a", is_withdrawing=True), candidate("b", load=7, is_same_site=False)) == "b"
    found = choose_source([candidate("a", is_withdrawing=True)], now=0.0)
    assert found is not None
    assert "withdrawing, but nobody else has it" in found[1]


def test_one_that_failed_is_not_tried_before_its_time() -> None:
    failed = candidate("a", avoided_until=5.0)
    assert chosen(failed, now=4.9) is None
    assert chosen(failed, now=5.0) == "a"
    assert chosen(failed, candidate("b", load=9), now=4.9) == "b"


def test_the_reason_says_what_was_weighed() -> None:
    found = choose_source([candidate("a", load=2, done=3, is_near=True), candidate("b", load=3)], now=0.0)
    assert found is not None
    assert found[0].worker == worker("a")
    assert found[1] == "relay, filling, 3 chunks in place, serves 2 more, same host; best of 2"


def test_the_reason_says_where_a_host_copy_lies() -> None:
    found = choose_source([replace(candidate("a"), from_host=True)], now=0.0)
    assert found is not None
    assert found[1].startswith("relay, full from host memory, idle")


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


@given(candidates(), st.randoms(use_true_random=False), st.sampled_from([0.0, 2.0]))
def test_the_order_of_the_facts_does_not_matter(found: list[Candidate], dice, now: float) -> None:
    shuffled = list(found)
    dice.shuffle(shuffled)
    assert choose_source(found, now=now) == choose_source(shuffled, now=now)


@given(candidates(), st.sampled_from([0.0, 2.0]))
def test_it_is_one_that_may_be_tried_and_stays_if_any_does(found: list[Candidate], now: float) -> None:
    usable = [one for one in found if one.avoided_until <= now]
    choice = choose_source(found, now=now)
    assert (choice is None) == (not usable)
    if choice is not None:
        (best,) = [one for one in usable if one.worker == choice[0].worker]
        assert not best.is_withdrawing or all(one.is_withdrawing for one in usable)
