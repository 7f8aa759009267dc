"""The choice of a transport: a rule, so tables and properties."""

from hypothesis import given
from hypothesis import strategies as st

from tensorhub.transport.base import PREFERENCE, choose, scheme_of

LOCAL, NIXL, TCP = "local://a.1.2.3/x", "nixl://a", "tcp://10.0.0.7:1"


def test_the_best_that_both_have() -> None:
    ways, reasons = choose((TCP, LOCAL), ("local", "tcp"), {})
    assert [way.scheme for way in ways] == ["local", "tcp"]
    assert ways[0].why == ""
    assert reasons == ()


def test_the_readers_order_counts() -> None:
    ways, _ = choose((LOCAL, TCP), ("tcp", "local"), {})
    assert [way.endpoint for way in ways] == [TCP, LOCAL]


def test_a_fallback_says_why() -> None:
    ways, _ = choose((LOCAL, TCP), ("local", "nixl", "tcp"), {LOCAL: "it is on another host"})
    assert [way.scheme for way in ways] == ["tcp"]
    assert ways[0].why == "local: it is on another host; nixl: the source does not offer it"


def test_nothing_in_common() -> None:
    ways, reasons = choose((NIXL, LOCAL), ("local", "tcp"), {LOCAL: "refused"})
    assert ways == ()
    assert reasons == ("local: refused", "tcp: the source does not offer it", "nixl: this worker does not have it")


endpoints = st.builds("{}://{}".format, st.sampled_from([*PREFERENCE, "smoke"]), st.integers(0, 3))


@given(st.lists(endpoints, unique=True), st.lists(st.sampled_from(PREFERENCE), unique=True), st.data())
def test_every_endpoint_is_either_a_way_or_has_its_reason(
    offered: list[str], here: list[str], data: st.DataObject
) -> None:
    excluded = {e: f"because of {e}" for e in offered if data.draw(st.booleans())}
    ways, reasons = choose(offered, here, excluded)
    chosen = [way.endpoint for way in ways]
    usable = [e for e in offered if scheme_of(e) in here and e not in excluded]
    assert sorted(chosen) == sorted(usable)
    assert [here.index(way.scheme) for way in ways] == sorted(here.index(way.scheme) for way in ways)
    said = "; ".join(reasons)
    for endpoint in set(offered) - set(usable):
        is_here = scheme_of(endpoint) in here
        assert (excluded[endpoint] if is_here else f"{scheme_of(endpoint)}: this worker does not have it") in said
