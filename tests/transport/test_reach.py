"""A source at a loopback address is read on its own host only, and elsewhere nobody connects to a stranger."""

import dataclasses

import pytest

from tensorhub.runtime.content import out_of_reach
from tensorhub.transport.local.memory import Place, format_endpoint, here

HERE = here()
ELSEWHERE = {
    "another host": dataclasses.replace(HERE, boot="0123-4567"),
    "another network namespace": dataclasses.replace(HERE, network_namespace=HERE.network_namespace + 1),
}


def local(place: Place) -> str:
    return format_endpoint(place, "some-socket")


@pytest.mark.parametrize("where", ELSEWHERE)
@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:4000", "tcp://[::1]:4000", "nixl://127.0.1.1:1,127.0.0.1:2"])
def test_a_loopback_address_elsewhere(where: str, endpoint: str) -> None:
    found = out_of_reach((local(ELSEWHERE[where]), endpoint))
    assert list(found) == [endpoint]
    assert endpoint.partition("//")[2].split(",")[0].rpartition(":")[0].strip("[]") in found[endpoint]
    assert "TENSORHUB_HOST" in found[endpoint]


@pytest.mark.parametrize(
    "place", [HERE, dataclasses.replace(HERE, user=HERE.user + 1), dataclasses.replace(HERE, pid_namespace=7)]
)
def test_a_loopback_address_of_this_host(place: Place) -> None:
    assert out_of_reach((local(place), "tcp://127.0.0.1:4000")) == {}


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://10.0.0.7:4000",
        "tcp://127.0.0.1:1,10.0.0.7:2",  # one that can be reached is enough
        "tcp://head:4000",  # a name may mean anything
        "tcp://127.0.0.1:port",
        "smoke://127.0.0.1:4000",
    ],
)
def test_what_may_be_within_reach(endpoint: str) -> None:
    assert out_of_reach((local(ELSEWHERE["another host"]), endpoint)) == {}


@pytest.mark.parametrize("endpoints", [(), ("tcp://127.0.0.1:4000",), ("local://garbage", "tcp://127.0.0.1:4000")])
def test_nobody_knows_where_the_source_is(endpoints: tuple[str, ...]) -> None:
    assert out_of_reach(endpoints) == {}
