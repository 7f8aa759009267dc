"""The choice among transports, and sources that cannot be within reach: rules, so tables and properties."""

import dataclasses

from tensorhub.runtime.content import out_of_reach
from tensorhub.transport.base import choose
from tensorhub.transport.local.memory import Place, format_endpoint, here

LOCAL, TCP = "local://a.1.2.3/x", "tcp://10.0.0.7:1"


def test_the_readers_order_counts_and_a_fallback_says_why() -> None:
    ways, reasons = choose((LOCAL, TCP), ("tcp", "local"), {})
    assert [(way.endpoint, way.why) for way in ways] == [(TCP, ""), (LOCAL, "")]
    assert reasons == ()
    (way,), reasons = choose((LOCAL, TCP), ("local", "nixl", "tcp"), {LOCAL: "far"})
    assert reasons == ("local: far", "nixl: the source does not offer it")
    assert (way.endpoint, way.why) == (TCP, "; ".join(reasons))
    assert choose(("smoke://1",), (), {}) == ((), ("smoke: this worker does not have it",))


HERE = here()
ELSEWHERE = (
    dataclasses.replace(HERE, boot="0123-4567"),
    dataclasses.replace(HERE, network_namespace=HERE.network_namespace + 1),
)
SAME_HOST = (HERE, dataclasses.replace(HERE, user=HERE.user + 1), dataclasses.replace(HERE, pid_namespace=7))


def local(place: Place) -> str:
    return format_endpoint(place, "some-socket")


def test_a_loopback_address_is_read_on_its_own_host_only() -> None:
    for place in ELSEWHERE:
        for endpoint in ("tcp://127.0.0.1:4000", "tcp://[::1]:4000", "nixl://127.0.1.1:1,127.0.0.1:2"):
            found = out_of_reach((local(place), endpoint))
            assert list(found) == [endpoint]
            assert endpoint.partition("//")[2].split(",")[0].rpartition(":")[0].strip("[]") in found[endpoint]
            assert "TENSORHUB_HOST" in found[endpoint]
    for place in SAME_HOST:
        assert out_of_reach((local(place), "tcp://127.0.0.1:4000")) == {}
    one_is_enough, a_name = "tcp://127.0.0.1:1,10.0.0.7:2", "tcp://head:4000"
    for endpoint in (TCP, one_is_enough, a_name, "tcp://127.0.0.1:port", "smoke://127.0.0.1:4000"):
        assert out_of_reach((local(ELSEWHERE[0]), endpoint)) == {}
    for unknown in ((), ("tcp://127.0.0.1:4000",), ("local://garbage", "tcp://127.0.0.1:4000")):
        assert out_of_reach(unknown) == {}
