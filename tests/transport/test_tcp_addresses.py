"""Addresses of the tcp transport: what is listened on and told, names that are looked up, and several networks."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import pytest

from tensorhub.protocol.errors import SourceLost, UsageError
from tensorhub.transport.tcp import addresses as tcp_addresses
from tensorhub.transport.tcp.addresses import advertised_endpoint, format_endpoint, listeners, parse_endpoint
from tensorhub.transport.tcp.settings import PORTS, TcpSettings
from tensorhub.transport.tcp.transport import TcpTransport

from . import kit
from .conftest import Tcp
from .kit import DEADLINE_S, MIB, Target, content, full, read_all, start_read

SIZE, CHUNK = 8 * MIB, MIB // 4
READER = {"streams": 2, "stream_bytes": MIB, "max_streams": 2, "ahead_bytes": 2 * MIB}


# -- what is said ------------------------------------------------------------------------------------------------------


def test_endpoints_survive_the_way_and_what_is_none_is_refused() -> None:
    addresses = (("10.0.0.5", 41234), ("fd00::1", 7), ("node-3.example", 65535))
    assert format_endpoint(*addresses) == "tcp://10.0.0.5:41234,[fd00::1]:7,node-3.example:65535"
    assert parse_endpoint(format_endpoint(*addresses)) == addresses
    wrong = ["tcp://", "tcp://a:1,", "tcp://a:1,,b:2", "tcp://a:1,b", "tcp://a:1,b:70000", "tcp://a:1,b:2/path"]
    wrong += ["tcp://a:1,u@b:2", "nixl://a:1", "tcp://" + ",".join(f"a:{port}" for port in range(1, 10))]
    for endpoint in wrong:
        with pytest.raises(ValueError, match=r"form|limit|[Pp]ort"):
            parse_endpoint(endpoint)


@pytest.mark.parametrize(
    ("host", "advertise", "endpoint"),
    [
        ("127.0.0.1", None, "tcp://127.0.0.1:7"),
        ("0.0.0.0", "10.0.0.7", "tcp://10.0.0.7:7"),
        ("0.0.0.0", "head.example:99", "tcp://head.example:99"),
        ("::", "[fd00::1]", "tcp://[fd00::1]:7"),
        ("::", "[fd00::1]:99", "tcp://[fd00::1]:99"),
        ("127.0.0.1, 127.0.0.2", None, "tcp://127.0.0.1:7,127.0.0.2:8"),
        ("lo,127.0.0.2", None, "tcp://127.0.0.1:7,127.0.0.2:8"),
        ("127.0.0.1,127.0.0.2", "a.example,b.example:99", "tcp://a.example:7,b.example:99"),
        ("127.0.0.1,127.0.0.2", "a.example:5,a.example:6", "tcp://a.example:5,a.example:6"),
        ("127.0.0.1,127.0.0.2", "head.example", "tcp://head.example:7"),
    ],
)
def test_what_peers_are_told(host: str, advertise: str | None, endpoint: str) -> None:
    ports = [7, 8] if "," in host else [7]
    assert advertised_endpoint(TcpSettings(host=host, advertise=advertise), ports) == endpoint


def test_settings_that_make_no_sense_are_refused_by_name() -> None:
    for settings, what in (
        ({"host": "127.0.0.1,"}, "names 'nothing' beside"),
        ({"host": "0.0.0.0,127.0.0.1"}, "names '0.0.0.0' beside"),
        ({"host": "127.0.0.1,lo"}, "names 127.0.0.1 twice"),
        ({"host": ",".join(f"127.0.0.{at}" for at in range(1, 10))}, "names 9 addresses"),
        ({"advertise": "a.example:1,b.example"}, "has more addresses than host="),
        ({"advertise": "a.example,:5"}, "is not host or host:port"),
        *(({name: 0}, name) for name in ("silence_s", "streams", "max_connections", "ahead_bytes")),
    ):
        with pytest.raises(UsageError, match=what):
            TcpTransport(TcpSettings(**settings))  # type: ignore[arg-type]
    with pytest.raises(OSError, match=r"assign|not available"):  # and nothing is listened on
        listeners(TcpSettings(host="127.0.0.1,192.0.2.7"))


def test_all_interfaces_are_those_of_both_families_and_never_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    ((host, port),) = parse_endpoint(advertised_endpoint(TcpSettings(host="0.0.0.0"), [7]))
    assert host != "0.0.0.0"
    assert port == 7
    (listener,) = listeners(TcpSettings(host="::"))
    with listener:
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, listener.getsockname()[1]), timeout=DEADLINE_S).close()
    ways = {socket.AF_INET: "10.0.0.5", socket.AF_INET6: "fd00::5"}
    monkeypatch.setattr(tcp_addresses, "_outward_address", lambda family, target: ways[family])
    assert advertised_endpoint(TcpSettings(host="::"), [7]) == "tcp://[fd00::5]:7,10.0.0.5:7"
    ways[socket.AF_INET6] = ""
    assert advertised_endpoint(TcpSettings(host="::"), [7]) == "tcp://10.0.0.5:7"
    ways[socket.AF_INET] = ""
    assert advertised_endpoint(TcpSettings(host="::"), [7]) == "tcp://[::1]:7"
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with pytest.raises(UsageError, match="IPv6 is switched off"):
        listeners(TcpSettings(host="::"))


def test_a_port_that_was_given_is_the_first_of_those_that_are_tried() -> None:
    """So that a firewall can let them through: several workers of one host take one after another."""
    with socket.socket() as first:
        first.bind(("127.0.0.1", 0))
        first.listen()
        port = first.getsockname()[1]
        (second,) = listeners(TcpSettings(port=port))
        with second:
            (third,) = listeners(TcpSettings(port=port))
            with third:
                found = [each.getsockname()[1] for each in (second, third)]
                assert port < found[0] < found[1] < port + PORTS
    with socket.socket() as last:
        last.bind(("127.0.0.1", 65535))
        last.listen()
        with pytest.raises(OSError, match="in use"):
            listeners(TcpSettings(port=65535))


# -- names -------------------------------------------------------------------------------------------------------------


NAME = "node-17.example"


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
    monkeypatch.setattr(tcp_addresses, "_lookups", {})
    monkeypatch.setattr(socket, "getaddrinfo", found)
    yield found
    found.may_answer.set()


def by_name(source: TcpTransport) -> str:
    ((_, port),) = parse_endpoint(source.endpoint)
    return format_endpoint((NAME, port))


def test_what_is_not_found_is_lost_and_asked_again(tcp: Tcp, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, asked = tcp(), []

    def refuse(host: str, *_: object, **__: object) -> object:
        asked.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "it is known nowhere")

    for name in ("x" * 70 + ".example", "[fe80::1%nowhere]"):
        error = read_all(reader, f"tcp://{name}:9", "k", Target(content(CHUNK), CHUNK))
        assert isinstance(error, SourceLost)
        assert "cannot find the host" in str(error)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for _ in range(2):
        error = read_all(reader, f"tcp://{NAME}:9", "k", Target(content(CHUNK), CHUNK))
        assert isinstance(error, SourceLost)
        assert "it is known nowhere" in str(error)
    assert asked == [NAME, NAME]


@pytest.mark.parametrize("how", ["the read is stopped", "its worker closes"])
def test_a_read_ends_though_the_resolver_does_not_answer(resolver: Resolver, tcp: Tcp, how: str) -> None:
    reader = tcp(connect_s=2 * DEADLINE_S)
    read, ended = start_read(reader, f"tcp://{NAME}:9", "k", Target(content(CHUNK), CHUNK))
    assert resolver.is_asked.wait(DEADLINE_S)
    if how == "its worker closes":
        reader.close()
    else:
        read.stop()
    assert ended.wait() is None
    assert not resolver.may_answer.is_set()
    resolver.may_answer.set()


@pytest.mark.parametrize("is_old", [False, True])
def test_a_late_answer_serves_the_next_read_unless_it_is_old(
    resolver: Resolver, tcp: Tcp, is_old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, source, reader = content(4 * CHUNK), tcp(), tcp(streams=1, connect_s=0.05)
    source.export(full("k", right, CHUNK))
    for _ in range(2):
        error = read_all(reader, by_name(source), "k", Target(right, CHUNK))
        assert isinstance(error, SourceLost)
        assert f"within 0.05 s where {NAME} is" in str(error)
    (lookup,) = tcp_addresses._lookups.values()
    resolver.may_answer.set()
    assert lookup.wait(DEADLINE_S, lambda: False)
    if is_old:
        monkeypatch.setattr(tcp_addresses, "_KEPT_S", -1.0)
    kit.until(lambda: read_all(reader, by_name(source), "k", Target(right, CHUNK)) is None, "it is found")
    assert is_old == (len(resolver.asked) > 1), "all of them have waited for one lookup"


# -- several networks --------------------------------------------------------------------------------------------------


class Wires:
    """Stands before a source at one more address, and counts what goes by."""

    def __init__(self, listener: socket.socket, source: tuple[str, int]) -> None:
        self.address: tuple[str, int] = listener.getsockname()
        self.carried_bytes = 0
        self.pause_at = 0  # bytes carried, if it is to wait there until it may go on
        self.may_go_on = threading.Event()
        self.peers: list[str] = []
        self._listener, self._source = listener, source
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._run(self._accept)

    def _run(self, work: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=work))
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                reader, peer = self._listener.accept()
            except OSError:
                return
            self.peers.append(peer[0])
            source = socket.create_connection(self._source)
            self._open += [reader, source]
            self._run(lambda reader=reader, source=source: self._carry(reader, source, is_counted=False))  # type: ignore[misc]
            self._run(lambda reader=reader, source=source: self._carry(source, reader, is_counted=True))  # type: ignore[misc]

    def _carry(self, one: socket.socket, other: socket.socket, *, is_counted: bool) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data)
                self.carried_bytes += len(data) if is_counted else 0
                if is_counted and 0 < self.pause_at <= self.carried_bytes:
                    self.may_go_on.wait(DEADLINE_S)
        for end in (one, other):
            shut(end)

    def cut(self) -> None:
        """Every connection, and those to come."""
        self.may_go_on.set()
        for end in (self._listener, *self._open):
            shut(end)

    def close(self) -> None:
        self.cut()
        for thread in self._threads:
            thread.join()
        for end in (self._listener, *self._open):
            end.close()


def shut(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


@contextmanager
def source_behind(tcp: Tcp, right: bytearray, *hosts: str) -> Iterator[list[Wires]]:
    """A source that is reached at these hosts, each with wires of its own."""
    with ExitStack() as stack:
        source = tcp()
        source.export(full("k", right, CHUNK))
        (inner,) = parse_endpoint(source.endpoint)
        wires = [Wires(socket.create_server((host, 0)), inner) for host in hosts]
        for each in wires:
            stack.callback(each.close)
        yield wires


def endpoint_of(wires: list[Wires]) -> str:
    return format_endpoint(*[each.address for each in wires])


@pytest.mark.parametrize(("is_native", "away"), [(True, None), (False, None), (True, 0), (False, 1)])
def test_each_address_carries_its_share_and_one_that_is_away_is_left_out(
    tcp: Tcp, is_native: bool, away: int | None
) -> None:
    right, reader, gates = content(SIZE), tcp(**READER), None if is_native else {SIZE // CHUNK: kit.Gate()}
    with source_behind(tcp, right, "127.0.0.1", "127.0.0.2") as wires:
        target = Target(right, CHUNK, gates=gates)
        if away is None:
            wires[0].pause_at = SIZE // 4
        else:
            wires[away].cut()
        read, ended = start_read(reader, endpoint_of(wires), "k", target)
        if away is None:
            kit.until(lambda: wires[1].carried_bytes > SIZE // 4, "the second address carries its share")
            wires[0].may_go_on.set()
        assert ended.wait() is None
        assert target.buffer == right
        assert f"to {2 if away is None else 1} of 2 addresses" in read.path
        assert sum(each.carried_bytes for each in wires) < 1.1 * SIZE
        assert away is None or wires[away].carried_bytes == 0


def test_addresses_that_say_nothing_or_belong_to_another_program_are_left_out(tcp: Tcp) -> None:
    right, reader = content(SIZE), tcp(**READER, try_s=0.05, connect_s=DEADLINE_S)
    with ExitStack() as stack:
        full_house = stack.enter_context(socket.create_server(("127.0.0.3", 0), backlog=0))
        for _ in range(4):  # a reader that comes now gets no answer
            guest = stack.enter_context(socket.socket())
            guest.setblocking(False)
            guest.connect_ex(full_house.getsockname())
        rude = stack.enter_context(socket.create_server(("127.0.0.4", 0)))

        def hang_up() -> None:
            with suppress(OSError):
                while True:
                    rude.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        stack.callback(thread.join)
        stack.callback(shut, rude)
        wires = stack.enter_context(source_behind(tcp, right, "127.0.0.2"))
        for endpoint in (
            format_endpoint(full_house.getsockname(), wires[0].address),
            format_endpoint(wires[0].address, rude.getsockname()),
        ):
            target = Target(right, CHUNK)
            assert read_all(reader, endpoint, "k", target) is None
            assert target.buffer == right


def test_each_stream_leaves_from_its_own_network_or_else_the_first_from_anywhere(tcp: Tcp) -> None:
    right, reader = content(SIZE), tcp(**READER, host="127.0.0.3,127.0.0.4")
    for leave_from, peers in ((reader.settings.leave_from, [1, 1]), (("::1", "::1"), [1, 0])):  # of another family
        reader.settings = replace(reader.settings, leave_from=leave_from)
        with source_behind(tcp, right, "127.0.0.1", "127.0.0.2") as wires:
            assert read_all(reader, endpoint_of(wires), "k", Target(right, CHUNK)) is None
            assert [len(each.peers) for each in wires] == peers
            assert peers == [1, 0] or [each.peers for each in wires] == [["127.0.0.3"], ["127.0.0.4"]]
