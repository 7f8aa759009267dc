"""First contact over nixl is made by one thread at a time, and nobody waits long for a source that does not answer."""

from typing import cast

import pytest

from tensorhub.protocol.errors import SourceLost
from tensorhub.transport.base import Transport
from tensorhub.transport.nixl.agent import Agent
from tensorhub.transport.nixl.transport import NixlJob, NixlRead, NixlTransport

from . import kit
from .conftest import Make
from .kit import DEADLINE_S, Target, content, full, read_all, start_read

CHUNK = 4096
pytestmark = pytest.mark.parametrize("kind", ["pretended-nixl-2"], indirect=True)


def agent_of(transport: Transport) -> Agent:
    return cast(NixlTransport, transport)._agents.current()


def test_whoever_holds_the_turn_delays_the_others_only(make: Make) -> None:
    right, source, reader = content(CHUNK), make(), make(1.0)
    source.export(full("k", right, CHUNK))
    target = Target(right, CHUNK)
    with agent_of(reader).connecting:
        assert read_all(reader, source.endpoint, "k", target) is None
    assert target.buffer == right


def test_a_read_that_waits_for_its_turn_can_be_stopped(make: Make) -> None:
    right, source, reader = content(CHUNK), make(), make(8 * DEADLINE_S)
    source.export(full("k", right, CHUNK))
    target = Target(right, CHUNK)
    with agent_of(reader).connecting:
        read, ended = start_read(reader, source.endpoint, "k", target)
        job = cast(NixlRead, read).job
        kit.until(lambda: cast(NixlJob, job).meeting is not None, "only its turn is missing")
        read.stop()
        assert ended.wait() is None
    assert not target.order
    assert not agent_of(reader).connecting.locked()


def test_a_source_that_does_not_answer_has_its_turn_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, right = kit._pretended_nixl(), content(CHUNK)
    source, reader = make(), make(4.0)
    source.export(full("k", right, CHUNK))
    agent = agent_of(reader)
    for name in ("postXferReq", "getXferStatus"):
        monkeypatch.setattr(fake.nixlAgent, name, lambda *_: fake.NIXL_IN_PROG)
    _, ended = start_read(reader, source.endpoint, "k", Target(right, CHUNK))
    kit.until(agent.connecting.locked, "it has its turn")
    kit.until(lambda: not agent.connecting.locked(), "it has had it")
    assert not ended.event.is_set(), "it is tried again"
    error = ended.wait()
    assert isinstance(error, SourceLost)
    assert "was not over after" in str(error)
