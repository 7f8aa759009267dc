"""A source with several addresses: each carries its share, and one that is away is left out."""

import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import pytest

from tensorhub.protocol.errors import SourceLost, UsageError
from tensorhub.transport.tcp import addresses as tcp_addresses
from tensorhub.transport.tcp.addresses import advertised_endpoint, format_endpoint, listeners, parse_endpoint
from tensorhub.transport.tcp.reader import StreamCount
from tensorhub.transport.tcp.settings import TcpSettings
from tensorhub.transport.tcp.transport import TcpTransport

from . import kit
from .kit import MIB, Target, content, full, start_read

SIZE, CHUNK = 32 * MIB, MIB // 4
READER = TcpSettings(stream_bytes=MIB, most_streams=2, ahead_bytes=2 * MIB)


# -- what is said ------------------------------------------------------------------------------------------------------


def test_an_endpoint_of_several_addresses_survives_the_way() -> None:
    addresses = (("10.0.0.5", 41234), ("fd00::1", 7), ("node-3.example", 65535))
    assert format_endpoint(*addresses) == "tcp://10.0.0.5:41234,[fd00::1]:7,node-3.example:65535"
    assert parse_endpoint(format_endpoint(*addresses)) == addresses


@pytest.mark.parametrize(
    "wrong",
    [
        "tcp://",
        "tcp://a:1,",
        "tcp://a:1,,b:2",
        "tcp://a:1,b",
        "tcp://a:1,b:70000",
        "tcp://a:1,b:2/path",
        "tcp://a:1,u@b:2",
        "nixl://a:1",
        "tcp://" + ",".join(f"a:{port}" for port in range(1, 10)),
    ],
)
def test_what_is_no_endpoint_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"form|limit|[Pp]ort"):
        parse_endpoint(wrong)


@pytest.mark.parametrize(
    ("host", "advertise", "endpoint"),
    [
        ("127.0.0.1, 127.0.0.2", None, "tcp://127.0.0.1:7,127.0.0.2:8"),
        ("lo,127.0.0.2", None, "tcp://127.0.0.1:7,127.0.0.2:8"),
        ("127.0.0.1,127.0.0.2", "a.example,b.example:99", "tcp://a.example:7,b.example:99"),
        ("127.0.0.1,127.0.0.2", "gate.example:5,gate.example:6,gate.example:7", None),
        ("127.0.0.1,127.0.0.2", "gate.example", "tcp://gate.example:7"),
    ],
)
def test_what_peers_are_told(host: str, advertise: str | None, endpoint: str | None) -> None:
    told = advertised_endpoint(TcpSettings(host=host, advertise=advertise), [7, 8])
    assert told == endpoint if endpoint is not None else told.count(",") == 2


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (TcpSettings(host="127.0.0.1,"), "names 'nothing' beside"),
        (TcpSettings(host="0.0.0.0,127.0.0.1"), "names '0.0.0.0' beside"),
        (TcpSettings(host="127.0.0.1,lo"), "names 127.0.0.1 twice"),
        (TcpSettings(host=",".join(f"127.0.0.{at}" for at in range(1, 10))), "names 9 addresses"),
        (TcpSettings(advertise="a.example:1,b.example"), "has more addresses than host="),
        (TcpSettings(advertise="a.example,:5"), "is not host or host:port"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(settings: TcpSettings, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        TcpTransport(settings)


def test_all_interfaces_are_those_of_both_families(monkeypatch: pytest.MonkeyPatch) -> None:
    (listener,) = listeners(TcpSettings(host="::"))
    with listener:
        port = listener.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port), timeout=kit.DEADLINE_S).close()
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


def test_where_one_address_is_not_of_this_machine_nothing_is_listened_on() -> None:
    with pytest.raises(OSError, match=r"assign|not available"):
        listeners(TcpSettings(host="127.0.0.1,192.0.2.7"))


def test_no_fewer_streams_than_addresses() -> None:
    width = StreamCount(TcpSettings(probe_s=1.0), 1, cores=64, least=3)
    width.set(3)
    for at in range(8):
        assert width.look(100.0 + at, at * 1000) == 3, "a slow link, but there are three of them"


# -- what moves --------------------------------------------------------------------------------------------------------


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
                    self.may_go_on.wait(kit.DEADLINE_S)
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
def source_behind(*hosts: str) -> Iterator[tuple[TcpTransport, list[Wires]]]:
    """A source that is reached at these hosts, each with wires of its own."""
    with ExitStack() as stack:
        source = TcpTransport()
        stack.callback(source.close)
        (inner,) = parse_endpoint(source.endpoint)
        wires = [Wires(socket.create_server((host, 0)), inner) for host in hosts]
        for each in wires:
            stack.callback(each.close)
        yield source, wires


def endpoint_of(wires: list[Wires]) -> str:
    return format_endpoint(*[each.address for each in wires])


@pytest.mark.usefixtures("mover")
def test_each_address_carries_its_share() -> None:
    right = content(SIZE)
    reader = TcpTransport(READER)
    try:
        with source_behind("127.0.0.1", "127.0.0.2") as (source, wires):
            source.export(full("k", right, CHUNK))
            wires[0].pause_at = SIZE // 4
            target = Target(right, CHUNK)
            read, ended = start_read(reader, endpoint_of(wires), "k", target)
            kit.until(lambda: wires[1].carried_bytes > SIZE // 4, "the second address carries its share")
            wires[0].may_go_on.set()
            assert ended.wait() is None
            assert target.buffer == right
            assert read.path.startswith("2 streams to 2 of 2 addresses")
            assert sum(each.carried_bytes for each in wires) < 1.1 * SIZE
    finally:
        reader.close()


@pytest.mark.usefixtures("mover")
@pytest.mark.parametrize("away", [0, 1])
def test_an_address_that_is_away_is_left_out(away: int) -> None:
    right = content(SIZE)
    reader = TcpTransport(READER)
    try:
        with source_behind("127.0.0.1", "127.0.0.2") as (source, wires):
            source.export(full("k", right, CHUNK))
            wires[away].cut()
            target = Target(right, CHUNK)
            read, ended = start_read(reader, endpoint_of(wires), "k", target)
            assert ended.wait() is None
            assert target.buffer == right
            assert "to 1 of 2 addresses" in read.path
            assert wires[away].carried_bytes == 0
    finally:
        reader.close()


def test_a_first_address_that_says_nothing_is_given_up_early() -> None:
    right = content(SIZE)
    reader = TcpTransport(replace(READER, try_s=0.05, connect_s=kit.DEADLINE_S))
    with ExitStack() as stack:
        stack.callback(reader.close)
        full_house = stack.enter_context(socket.create_server(("127.0.0.3", 0), backlog=0))
        for _ in range(4):  # who comes now gets no answer
            guest = stack.enter_context(socket.socket())
            guest.setblocking(False)
            guest.connect_ex(full_house.getsockname())
        source, wires = stack.enter_context(source_behind("127.0.0.2"))
        source.export(full("k", right, CHUNK))
        target = Target(right, CHUNK)
        endpoint = format_endpoint(full_house.getsockname(), wires[0].address)
        assert kit.read_all(reader, endpoint, "k", target) is None
        assert target.buffer == right


def test_an_address_that_is_lost_in_mid_read_costs_what_was_under_way() -> None:
    """The read ends with `SourceLost`, as for any stream that is lost; the next one does without that address."""
    right = content(SIZE)
    gate = kit.Gate()
    reader = TcpTransport(READER)
    try:
        with source_behind("127.0.0.1", "127.0.0.2") as (source, wires):
            source.export(full("k", right, CHUNK))
            target = Target(right, CHUNK, gates={SIZE // CHUNK // 2: gate})
            _, ended = start_read(reader, endpoint_of(wires), "k", target)
            assert gate.reached.wait(kit.DEADLINE_S)
            kit.until(lambda: wires[1].carried_bytes > 0, "both addresses carry something")
            wires[1].cut()
            gate.release.set()
            error = ended.wait()
            assert error is None or isinstance(error, SourceLost)
            left = [chunk for chunk in range(SIZE // CHUNK) if not target.progress.has(chunk)]
            assert len(left) < SIZE // CHUNK
            again = Target(right, CHUNK, wanted=left)
            assert kit.read_all(reader, endpoint_of(wires), "k", again) is None
    finally:
        reader.close()


def test_each_stream_leaves_from_the_address_of_its_own_network() -> None:
    right = content(SIZE)
    reader = TcpTransport(replace(READER, host="127.0.0.3,127.0.0.4"))
    try:
        with source_behind("127.0.0.1", "127.0.0.2") as (source, wires):
            source.export(full("k", right, CHUNK))
            assert kit.read_all(reader, endpoint_of(wires), "k", Target(right, CHUNK)) is None
            assert [each.peers for each in wires] == [["127.0.0.3"], ["127.0.0.4"]]
    finally:
        reader.close()


def test_where_that_does_not_get_through_the_first_stream_leaves_from_anywhere() -> None:
    right = content(SIZE)
    reader = TcpTransport(READER)
    reader.settings = replace(reader.settings, leave_from=("::1", "::1"))  # of another family
    try:
        with source_behind("127.0.0.1", "127.0.0.2") as (source, wires):
            source.export(full("k", right, CHUNK))
            assert kit.read_all(reader, endpoint_of(wires), "k", Target(right, CHUNK)) is None
            assert len(wires[0].peers) == 1
            assert wires[1].peers == []
    finally:
        reader.close()


@pytest.mark.usefixtures("mover")
def test_an_address_of_another_program_is_left_out() -> None:
    """It takes the connection, and says nothing that a source would say."""
    right = content(SIZE)
    reader = TcpTransport(READER)
    with ExitStack() as stack:
        stack.callback(reader.close)
        rude = stack.enter_context(socket.create_server(("127.0.0.2", 0)))

        def hang_up() -> None:
            with suppress(OSError):
                while True:
                    rude.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        stack.callback(thread.join)
        stack.callback(shut, rude)
        source, wires = stack.enter_context(source_behind("127.0.0.1"))
        source.export(full("k", right, CHUNK))
        target = Target(right, CHUNK)
        assert kit.read_all(reader, format_endpoint(wires[0].address, rude.getsockname()), "k", target) is None
        assert target.buffer == right


@pytest.mark.usefixtures("no_collector")
def test_a_closed_transport_waits_for_no_collector() -> None:
    def closed() -> "weakref.ref[object]":
        transport = TcpTransport(TcpSettings(host="127.0.0.1,127.0.0.2"))
        transport.close()
        return weakref.ref(transport._server)

    assert closed()() is None


def test_a_source_serves_at_each_of_its_addresses() -> None:
    right = content(SIZE)
    source, reader = TcpTransport(TcpSettings(host="127.0.0.1,127.0.0.2")), TcpTransport()
    try:
        source.export(full("k", right, CHUNK))
        addresses = parse_endpoint(source.endpoint)
        assert [host for host, _ in addresses] == ["127.0.0.1", "127.0.0.2"]
        for address in addresses:
            assert kit.read_all(reader, format_endpoint(address), "k", Target(right, CHUNK)) is None
    finally:
        reader.close()
        source.close()
