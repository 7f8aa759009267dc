"""The ways from a worker to a source: what it says where there is none."""

import dataclasses

import pytest

from tensorhub.protocol.errors import SourceLost, TransportMissing
from tensorhub.protocol.messages import Grant
from tensorhub.protocol.names import Digest, Shard, Ticket, Version, WorkerId
from tensorhub.runtime.content import Routes
from tensorhub.transport.base import Transport
from tensorhub.transport.local.memory import format_endpoint, here
from tensorhub.transport.tcp.transport import TcpTransport

ME, SOURCE = WorkerId("m", "rollout", Shard(0)), WorkerId("m", "trainer", Shard(0))
ELSEWHERE = format_endpoint(dataclasses.replace(here(), boot="0123-4567"), "some-socket")


@pytest.fixture
def transports():  # type: ignore[no-untyped-def]
    transport = TcpTransport()
    yield {"tcp": transport}
    transport.close()


def grant(*endpoints: str) -> Grant:
    return Grant(Ticket(1), Version(1), Digest(b"r" * 16), SOURCE, endpoints, "as the test wants")


def test_a_source_that_only_its_own_host_reaches(transports: dict[str, Transport]) -> None:
    with pytest.raises(SourceLost, match=r"m/trainer\[0\] cannot be reached from here: .*127\.0\.0\.1.*TENSORHUB_HOST"):
        Routes(ME, transports).to(grant(ELSEWHERE, "tcp://127.0.0.1:4000"))


def test_an_address_that_others_reach_is_taken(transports: dict[str, Transport]) -> None:
    ways = Routes(ME, transports).to(grant(ELSEWHERE, "tcp://10.0.0.7:4000"))
    assert [way.endpoint for way in ways] == ["tcp://10.0.0.7:4000"]


def test_nothing_in_common(transports: dict[str, Transport]) -> None:
    with pytest.raises(TransportMissing, match="share no transport: here tcp, there local"):
        Routes(ME, transports).to(grant(ELSEWHERE))
