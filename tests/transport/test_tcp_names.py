"""A source that is known by name, and a resolver that takes its time: no read is held by it."""

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from tensorhub.protocol.errors import SourceLost
from tensorhub.transport.tcp import addresses
from tensorhub.transport.tcp.addresses import format_endpoint, parse_endpoint
from tensorhub.transport.tcp.settings import TcpSettings
from tensorhub.transport.tcp.transport import TcpTransport
from tensorhub.transport.threads import Thread

from . import kit
from .kit import DEADLINE_S, Target, content, full, read_all, start_read

NAME, CHUNK = "node-17.example", 4096
Tcp = Callable[..., TcpTransport]


class Resolver:
    """Knows one name, and says nothing before it may."""

    def __init__(self) -> None:
        self.is_asked, self.may_answer = threading.Event(), threading.Event()
        self.asked: list[str] = []  # in these threads
        self._look_up = socket.getaddrinfo

    def __call__(self, host: str, *arguments: object, **named: object) -> object:
        if host == NAME:
            self.asked.append(threading.current_thread().name)
            self.is_asked.set()
            assert self.may_answer.wait(2 * DEADLINE_S)
            host = "127.0.0.1"
        return self._look_up(host, *arguments, **named)  # type: ignore[arg-type]


@pytest.fixture
def resolver(nothing_left_behind: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    found = Resolver()
    monkeypatch.setattr(addresses, "_questions", {})
    monkeypatch.setattr(socket, "getaddrinfo", found)
    yield found
    found.may_answer.set()


@pytest.fixture
def tcp(resolver: Resolver) -> Iterator[Tcp]:
    made: list[TcpTransport] = []

    def one(**settings: object) -> TcpTransport:
        made.append(TcpTransport(TcpSettings(**settings)))  # type: ignore[arg-type]
        return made[-1]

    yield one
    for transport in made:
        transport.close()


def by_name(source: TcpTransport) -> str:
    ((_, port),) = parse_endpoint(source.endpoint)
    return format_endpoint((NAME, port))


@pytest.mark.parametrize("name", ["x" * 70 + ".example", "[fe80::1%nowhere]"])
def test_what_can_be_no_host_is_a_source_that_is_lost(tcp: Tcp, name: str) -> None:
    error = read_all(tcp(), f"tcp://{name}:9", "k", Target(content(CHUNK), CHUNK))
    assert isinstance(error, SourceLost)
    assert "cannot find the host" in str(error)


@pytest.mark.parametrize("how", ["the read is stopped", "its worker closes"])
def test_a_read_ends_though_the_resolver_does_not_answer(tcp: Tcp, resolver: Resolver, how: str) -> None:
    reader = tcp(connect_s=2 * DEADLINE_S)
    read, ended = start_read(reader, f"tcp://{NAME}:9", "k", Target(content(CHUNK), CHUNK))
    assert resolver.is_asked.wait(DEADLINE_S)
    if how == "its worker closes":
        reader.close()
    else:
        read.stop()
    assert ended.wait() is None
    assert not resolver.may_answer.is_set()


def test_who_is_not_found_in_time_is_lost_and_the_late_answer_serves_the_next_read(
    tcp: Tcp, resolver: Resolver
) -> None:
    right, source, reader = content(4 * CHUNK), tcp(), tcp(connect_s=0.05)
    source.export(full("k", right, CHUNK))
    for _ in range(2):
        error = read_all(reader, by_name(source), "k", Target(right, CHUNK))
        assert isinstance(error, SourceLost)
        assert f"within 0.05 s where {NAME} is" in str(error)
    (question,) = addresses._questions.values()
    resolver.may_answer.set()
    assert question.wait(DEADLINE_S, lambda: False)
    target = Target(right, CHUNK)
    assert read_all(reader, by_name(source), "k", target) is None
    assert target.buffer == right
    assert resolver.asked == ["tensorhub-find-host"], "all of them have waited for one question"


def test_what_a_resolver_does_not_know_is_asked_again(tcp: Tcp, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(host: str, *_: object, **__: object) -> object:
        asked.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "nobody knows it")

    reader = tcp()
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for _ in range(2):
        error = read_all(reader, f"tcp://{NAME}:9", "k", Target(content(CHUNK), CHUNK))
        assert isinstance(error, SourceLost)
        assert "nobody knows it" in str(error)
    assert asked == [NAME, NAME]


def test_an_address_in_numbers_is_asked_of_nobody(tcp: Tcp, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: Thread) -> None:
        raise AssertionError(f"{thread.name} was started")

    right, source = content(CHUNK), tcp()
    source.export(full("k", right, CHUNK))
    monkeypatch.setattr(addresses, "start", start)
    assert read_all(tcp(), source.endpoint, "k", Target(right, CHUNK)) is None


def test_where_no_thread_may_be_started_the_read_asks_by_itself(
    tcp: Tcp, resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = Thread.start

    def limited(thread: Thread) -> None:
        if thread.name == "tensorhub-find-host":
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(Thread, "start", limited)
    right, source = content(CHUNK), tcp()
    source.export(full("k", right, CHUNK))
    resolver.may_answer.set()
    target = Target(right, CHUNK)
    assert read_all(tcp(), by_name(source), "k", target) is None
    assert target.buffer == right
    assert resolver.asked[0] == "tensorhub-tcp-read-0"


def test_an_answer_that_is_old_is_not_used(tcp: Tcp, resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    right, source, reader = content(CHUNK), tcp(), tcp(connect_s=0.05)
    source.export(full("k", right, CHUNK))
    assert isinstance(read_all(reader, by_name(source), "k", Target(right, CHUNK)), SourceLost)
    (question,) = addresses._questions.values()
    resolver.may_answer.set()
    assert question.wait(DEADLINE_S, lambda: False)
    monkeypatch.setattr(addresses, "_KEPT_S", -1.0)
    kit.until(lambda: read_all(reader, by_name(source), "k", Target(right, CHUNK)) is None, "it is found anew")
    assert len(resolver.asked) > 1
