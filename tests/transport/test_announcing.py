"""What readers make of announcements: how a source's last word is heard."""

import socket
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tensorhub.protocol.errors import SourceLost
from tensorhub.transport import announcing
from tensorhub.transport.announcing import COUNT, READY, AnnouncedStream
from tensorhub.transport.base import Sink
from tensorhub.transport.tcp import wire as tcp_wire
from tensorhub.transport.tcp.reader import Job
from tensorhub.transport.tcp.settings import TcpSettings
from tensorhub.transport.tcp.wire import Wire

from .kit import Target, memory


@pytest.fixture
def ends() -> Any:
    ours, theirs = socket.socketpair()
    yield Wire(ours, TcpSettings()), Wire(theirs, TcpSettings())
    ours.close()
    theirs.close()


def stream_of(wire: Wire) -> AnnouncedStream:
    job = Job(TcpSettings(), "local://there", "k", cast(Sink, Target(memory(8), 8)))
    return AnnouncedStream(job, wire, 0)


def test_a_last_word_that_came_early_is_what_ended_the_export(ends: tuple[Wire, Wire]) -> None:
    mine, source = ends
    stream = stream_of(mine)
    source.send_gone("gone", "it was withdrawn")
    assert not stream.has_ready(0)
    source.close()
    assert "it was withdrawn" in str(stream.why_ended())


def test_what_was_announced_before_the_last_word_is_passed_over(ends: tuple[Wire, Wire]) -> None:
    mine, source = ends
    source.send_frame(READY, 0, [COUNT.pack(1)])
    source.send_gone("gone", "it was withdrawn")
    assert "it was withdrawn" in str(stream_of(mine).why_ended())


def test_a_source_that_only_says_that_it_waits_is_not_heard_for_ever(
    ends: tuple[Wire, Wire], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, _ = ends
    seconds = count()
    monkeypatch.setattr(announcing, "time", SimpleNamespace(monotonic=lambda: next(seconds)), raising=False)
    heard: list[int] = []

    def waiting() -> tuple[int, int, int]:
        heard.append(tcp_wire.WAITING)
        assert len(heard) < 1000, "it would be heard for ever"
        return tcp_wire.WAITING, 0, 0

    monkeypatch.setattr(mine, "receive_header", waiting)
    stream = stream_of(mine)
    assert isinstance(stream.why_ended(), SourceLost)
    monkeypatch.setattr(announcing, "is_readable", lambda wire: True)
    assert not stream.has_ready(0)
