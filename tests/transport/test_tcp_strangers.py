"""What the tcp transport does with peers that are not, or not any more, what they should be. Raw sockets play them."""

import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import msgspec
import pytest

from tensorhub.protocol.errors import Refused, SourceLost
from tensorhub.transport.base import MAX_MANIFEST_BYTES, Export, Progress
from tensorhub.transport.tcp import server
from tensorhub.transport.tcp import wire as tcp_wire
from tensorhub.transport.tcp.addresses import parse_endpoint
from tensorhub.transport.tcp.server import MAX_STRANGERS, Admission
from tensorhub.transport.tcp.settings import TcpSettings
from tensorhub.transport.tcp.transport import TcpTransport
from tensorhub.transport.tcp.wire import GREETING, HEADER, MAGIC, VERSION, Hello, Refusal, Welcome, Wire

from . import kit
from .kit import DEADLINE_S, MIB, Gate, Target, content, full, read_all, start_read

CHUNK = 4096
encode = msgspec.msgpack.encode

Tcp = Callable[..., TcpTransport]


@pytest.fixture
def tcp(nothing_left_behind: None) -> Iterator[Tcp]:
    made: list[TcpTransport] = []

    def one(**settings: object) -> TcpTransport:
        made.append(TcpTransport(TcpSettings(**{"stream_bytes": 1024, "stream_rate_bytes_per_s": 0, **settings})))  # type: ignore[arg-type]
        return made[-1]

    yield one
    for transport in made:
        transport.close()


@contextmanager
def dialled(transport: TcpTransport) -> Iterator[socket.socket]:
    with socket.create_connection(parse_endpoint(transport.endpoint)[0], timeout=DEADLINE_S) as sock:
        yield sock


def greeting(body: object, *, magic: bytes = MAGIC, version: int = VERSION, length: int | None = None) -> bytes:
    data = encode(body)
    return GREETING.pack(magic, version, 0, len(data) if length is None else length) + data


def nested(*fields: object) -> msgspec.Raw:
    """A message of these, and of lists in lists, deeper than any decoder goes."""
    fewer = encode(fields)
    return msgspec.Raw(bytes([fewer[0] + 1]) + fewer[1:] + b"\x91" * 12_000 + b"\xc0")


def framed(kind: int, body: object) -> bytes:
    return HEADER.pack(kind, len(encode(body)), 0) + encode(body)


def hello(token: str = "", key: str = "k", generation: int = 0, wants_manifest: bool = False) -> Hello:
    return Hello(token, key, generation, 5000, wants_manifest)


def answer_to(transport: TcpTransport, words: bytes) -> tuple[int, Refusal]:
    """Say something to a listener; the version and the refusal that it answers with, after which it must hang up."""
    with dialled(transport) as sock:
        sock.sendall(words)
        heard = b""
        while part := sock.recv(4096):
            heard += part
    magic, version, _, length = GREETING.unpack_from(heard)
    assert magic == MAGIC
    assert len(heard) == GREETING.size + length
    return version, msgspec.msgpack.decode(heard[GREETING.size :], type=Refusal)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: example\r\nUser-Agent: curl/8\r\n\r\n", "stranger"),
        (bytes(64 * 1024), "stranger"),
        (greeting(hello("", "k", 0, True), version=VERSION + 98), "version"),
        (greeting(hello("", "k", 0, True), length=tcp_wire.MAX_GREETING_BYTES + 1), "malformed"),
        (greeting(hello("", "k", 0, True), length=2**32 - 1), "malformed"),
        (greeting(["hello", 1, 2, 3, 4]), "malformed"),
        (greeting(["\x1b[2J", 1]), "malformed"),
        (greeting(hello("", "\x1b[2J", 0, True)), "malformed"),
        (greeting({"a": 1}), "malformed"),
        (greeting(nested("hello", "", "k", 0, 5000, *[False] * 5)), "malformed"),
        (greeting(["hello", msgspec.Raw(b"\xa1\xff"), "k", 0, 5000, False]), "malformed"),
        (greeting(Welcome(1, 2, 3)), "malformed"),
        (greeting(hello("", "other", 0, True)), "unknown-key"),
        (greeting(hello("", "k", 12345, True)), "gone"),
        (greeting(hello("", "withdrawn", 12345, True)), "gone"),
    ],
)
def test_a_stranger_is_refused_in_words(tcp: Tcp, words: bytes, code: str) -> None:
    source = tcp()
    source.export(full("k", content(CHUNK), CHUNK))
    version, refusal = answer_to(source, words)
    assert (version, refusal.code) == (VERSION, code)
    assert refusal.message.isprintable()
    target = Target(content(CHUNK), CHUNK)
    assert read_all(tcp(), source.endpoint, "k", target) is None


def test_whoever_says_nothing_is_dropped(tcp: Tcp) -> None:
    source = tcp(silence_s=0.2)
    assert answer_to(source, b"")[1].code == "stranger"
    assert answer_to(source, MAGIC[:3])[1].code == "stranger"


@pytest.mark.parametrize(
    "frame",
    [
        HEADER.pack(tcp_wire.CHUNK, 0, 0),
        HEADER.pack(99, 2**32 - 1, 2**64 - 1),
        HEADER.pack(tcp_wire.WANT, tcp_wire.MAX_WANT_BYTES + 1, 0),
        HEADER.pack(tcp_wire.WANT, 3, 0) + b"\xc1\xc1\xc1",
        *(
            framed(tcp_wire.WANT, body)
            for body in ([(0, 9)], [(-1, 1)], [(2, 2)], [(3, 1)], [(0, 2**63)], [(0,)], "abc", [(0.5, 1)])
        ),
    ],
)
def test_a_malformed_request_ends_its_own_connection_only(tcp: Tcp, frame: bytes) -> None:
    right = content(4 * CHUNK)
    source, reader = tcp(), tcp()
    progress = Progress(4)
    source.export(Export("k", b"m", CHUNK, kit.Pieces(right), progress))
    target = Target(right, CHUNK)
    _, ended = start_read(reader, source.endpoint, "k", target)
    kit.until(lambda: target.manifest is not None, "another reader is being served")
    with dialled(source) as sock:
        sock.sendall(greeting(hello()) + frame)
        wire = Wire(sock, source.settings)
        assert isinstance(wire.receive_greeting(DEADLINE_S), Welcome)
        kind, length, _ = wire.receive_header()
        assert kind == tcp_wire.GONE
        assert wire.receive_gone(length).code == "malformed"
        assert sock.recv(1) == b""
    for chunk in range(4):
        progress.mark(chunk)
    assert ended.wait() is None


def test_ten_thousand_pieces_of_garbage(tcp: Tcp) -> None:
    right = content(8 * CHUNK)
    source = tcp(max_connections=8)
    source.export(full("k", right, CHUNK))
    (address,), rng = parse_endpoint(source.endpoint), random.Random(7)
    welcome_words = greeting(hello())
    kit.until(lambda: source.statistics()["connections_open"] == 0, "nothing is open")
    threads, files = threading.active_count(), kit.open_files()

    def garbage() -> bytes:
        noise = rng.randbytes(rng.randrange(64))
        match rng.randrange(4):
            case 0:
                return noise
            case 1:
                return GREETING.pack(MAGIC, VERSION, 0, rng.randrange(len(noise) + 1)) + noise
            case 2:
                return welcome_words + noise
            case _:
                return (
                    welcome_words
                    + HEADER.pack(tcp_wire.WANT, rng.randrange(len(noise) + 1), rng.getrandbits(64))
                    + noise
                )

    for _ in range(10_000):
        with socket.create_connection(address) as sock:
            sock.sendall(garbage())
    with socket.create_connection(address, timeout=DEADLINE_S) as sock, suppress(OSError):  # behind all of them
        sock.sendall(bytes(GREETING.size))
        sock.recv(1)  # or it is hung up on: now a reader need not stand in a queue of a thousand strangers

    def is_read() -> bool:  # until the last strangers have gone, a reader is told "no room", or is hung up on
        target = Target(right, CHUNK)
        error = read_all(source, source.endpoint, "k", target)
        passing = ("connections are taken", "the peer closed the connection")
        assert error is None or (isinstance(error, SourceLost) and any(why in str(error) for why in passing)), error
        return error is None and target.buffer == right

    kit.until(is_read, "a reader is served again")
    kit.until(lambda: threading.active_count() <= threads, "threads are as many as before")
    kit.until(lambda: kit.open_files() <= files, "file descriptors are as many as before")


def test_token(tcp: Tcp) -> None:
    right = content(CHUNK)
    source = tcp(token="only for friends")
    source.export(full("k", right, CHUNK))
    assert read_all(tcp(token="only for friends"), source.endpoint, "k", Target(right, CHUNK)) is None
    for wrong in (None, "", "only for friend", "größer"):
        target = Target(right, CHUNK)
        error = read_all(tcp(token=wrong), source.endpoint, "k", target)
        assert isinstance(error, SourceLost)
        assert isinstance(error.__cause__, Refused)
        assert "token" in str(error)
        assert target.manifest is None
    # without the token nobody learns which keys exist
    assert answer_to(source, greeting(hello("wrong", "no such key", 0, True)))[1].code == "token"


def test_no_room_is_said_and_passes(tcp: Tcp) -> None:
    right = content(8 * MIB)
    source, reader = tcp(max_connections=2), tcp(streams=1)
    source.export(full("k", right, MIB))
    gates = [Gate(), Gate()]
    held = [Target(right, MIB, gates={0: gate}) for gate in gates]
    ends = [start_read(reader, source.endpoint, "k", target)[1] for target in held]
    assert all(gate.reached.wait(DEADLINE_S) for gate in gates)
    for _ in range(5):
        error = read_all(reader, source.endpoint, "k", Target(right, MIB))
        assert isinstance(error, SourceLost)
        assert error.retryable
        assert "all 2 connections are taken" in str(error)
    for gate in gates:
        gate.release.set()
    assert [ended.wait() for ended in ends] == [None, None]
    kit.until(lambda: source.statistics()["connections_open"] == 0, "the connections are free again")
    assert read_all(reader, source.endpoint, "k", Target(right, MIB)) is None


@pytest.mark.parametrize(("rate", "connections"), [(1e18, 1), (1e-6, 4), (0, 4)])
def test_further_streams_are_opened_where_the_first_is_not_enough(tcp: Tcp, rate: float, connections: int) -> None:
    right = content(32 * MIB)
    source, reader = tcp(), tcp(streams=4, stream_bytes=MIB, stream_rate_bytes_per_s=rate)
    source.export(full("k", right, MIB))
    gate = Gate()
    read, ended = start_read(reader, source.endpoint, "k", Target(right, MIB, gates={1: gate}))
    assert gate.reached.wait(DEADLINE_S)  # by then the first chunk has told
    kit.until(lambda: source.statistics()["connections_accepted"] == connections, "the streams are there")
    assert read.path.startswith(f"{connections} stream")
    gate.release.set()
    assert ended.wait() is None
    assert source.statistics()["connections_accepted"] == connections


@pytest.mark.parametrize(("is_cross_site", "connections"), [(False, 1), (True, 3)])
def test_a_long_path_gets_all_its_streams_at_once(tcp: Tcp, is_cross_site: bool, connections: int) -> None:
    right = content(32 * MIB)
    source, reader = tcp(), tcp(streams=2, far_streams=3, stream_rate_bytes_per_s=1e18)
    source.export(full("k", right, MIB))
    gate = Gate()
    target = Target(right, MIB, gates={1: gate})
    target.is_cross_site = is_cross_site
    _, ended = start_read(reader, source.endpoint, "k", target)
    assert gate.reached.wait(DEADLINE_S)
    kit.until(lambda: source.statistics()["connections_accepted"] == connections, "the streams are there")
    gate.release.set()
    assert ended.wait() is None
    assert source.statistics()["connections_accepted"] == connections


def test_a_flood_of_strangers_is_bounded_and_keeps_nobody_else_out(tcp: Tcp) -> None:
    right = content(CHUNK)
    source = tcp(max_connections=4, silence_s=60.0, greet_s=60.0, token="t")
    source.export(full("k", right, CHUNK))
    flood = [socket.create_connection(parse_endpoint(source.endpoint)[0], timeout=DEADLINE_S) for _ in range(200)]
    kit.until(lambda: source.statistics()["connections_open"] <= MAX_STRANGERS, "the oldest were hung up on")
    reader = tcp(token="t", silence_s=60.0)
    assert read_all(reader, source.endpoint, "k", Target(right, CHUNK)) is None
    assert source.statistics()["connections_open"] >= MAX_STRANGERS - 1, "they are there all the time"
    for sock in flood:
        sock.close()
    kit.until(lambda: source.statistics()["connections_open"] == 0, "the flood is over")


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("asks_for", [None, []])
def test_readers_that_ask_for_nothing_make_room(
    tcp: Tcp, is_native: bool, asks_for: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They know the key, and the token too. The source would bear their silence for twenty seconds and more."""
    monkeypatch.setattr(server, "conversation_for", server.conversation_for if is_native else lambda *_, **__: None)
    right = content(CHUNK)
    source = tcp(max_connections=4, silence_s=60.0, greet_s=60.0 if asks_for is None else 0.2, token="t")
    source.export(full("k", right, CHUNK))
    with ExitStack() as stack:
        idle = [stack.enter_context(dialled(source)) for _ in range(4)]
        for sock in idle:
            sock.sendall(greeting(hello("t")))
            wire = Wire(sock, source.settings)
            assert isinstance(wire.receive_greeting(DEADLINE_S), Welcome)
            if asks_for is not None:
                wire.send_want([0])
                assert wire.receive_header() == (tcp_wire.CHUNK, CHUNK, 0)
        kit.until(lambda: source.statistics()["connections_open"] == 4, "all places are taken")
        reader = tcp(token="t")
        if asks_for is None:
            assert read_all(reader, source.endpoint, "k", Target(right, CHUNK)) is None
        kit.until(lambda: read_all(reader, source.endpoint, "k", Target(right, CHUNK)) is None, "it is read")
        kit.until(lambda: source.statistics()["connections_open"] < 4, "one of them was cut")


def test_readers_that_wait_for_what_they_asked_for_keep_their_places(tcp: Tcp) -> None:
    source = tcp(max_connections=2, silence_s=60.0, greet_s=0.05)
    progress = Progress(2)
    source.export(Export("k", b"m", CHUNK, kit.Pieces(content(2 * CHUNK)), progress))
    with dialled(source) as first, dialled(source) as second:
        for sock in (first, second):
            sock.sendall(greeting(hello()))
            wire = Wire(sock, source.settings)
            assert isinstance(wire.receive_greeting(DEADLINE_S), Welcome)
            wire.send_want([0])
        for _ in range(20):
            kit.until(lambda: source.statistics()["connections_open"] == 2, "both are there")
            error = read_all(tcp(streams=1), source.endpoint, "k", Target(content(2 * CHUNK), CHUNK))
            assert "all 2 connections are taken" in str(error)
        progress.mark(0)
        for sock in (first, second):
            assert Wire(sock, source.settings).receive_header() == (tcp_wire.CHUNK, CHUNK, 0)


def test_whoever_waits_for_a_key_takes_no_place_from_a_reader_whose_key_is_there(tcp: Tcp) -> None:
    right = content(CHUNK)
    source = tcp(max_connections=2, silence_s=60.0, greet_s=60.0, expect_s=60.0)
    source.export(full("k", right, CHUNK))
    with ExitStack() as stack:
        for _ in range(2 * MAX_STRANGERS):
            stack.enter_context(dialled(source)).sendall(greeting(Hello("", "none", 0, 10**6, False)))
        assert read_all(tcp(), source.endpoint, "k", Target(right, CHUNK)) is None
        assert source.statistics()["connections_open"] >= MAX_STRANGERS - 1, "they wait all the time"
        source.export(full("none", right, CHUNK))
        kit.until(lambda: source.statistics()["connections_open"] <= 2, "two find it, and the others no room")


def test_a_flood_from_one_address_takes_the_places_of_that_address() -> None:
    door = Admission(4)

    def enter(peer: str) -> Wire:
        wire = Wire(socket.socket(), TcpSettings())
        wire.peer = peer
        assert door.enter(wire, threading.current_thread())
        return wire

    other, flood = enter("other"), [enter("flood") for _ in range(2 * MAX_STRANGERS - 1)]
    assert not other.is_cut
    assert sum(wire.is_cut for wire in flood) == MAX_STRANGERS
    for wire in (other, *flood):
        wire.close()


@pytest.mark.parametrize("words", [b"", MAGIC, greeting(hello())[:-1]])
def test_whoever_takes_long_to_say_who_it_is_goes_soon(tcp: Tcp, words: bytes) -> None:
    source = tcp(silence_s=60.0, greet_s=0.1)
    assert answer_to(source, words)[1].code == "stranger"


def test_streams_that_find_no_room_leave_the_work_to_the_others(tcp: Tcp) -> None:
    right = content(20 * CHUNK)
    source, reader = tcp(max_connections=1), tcp(streams=4)
    source.export(full("k", right, CHUNK))
    target = Target(right, CHUNK)
    assert read_all(reader, source.endpoint, "k", target) is None
    assert target.buffer == right


def test_a_reader_that_takes_nothing_is_dropped_in_the_end(tcp: Tcp) -> None:
    source = tcp(silence_s=0.1)
    source.export(full("k", bytearray(64 * MIB), MIB))
    source.export(full("idle", bytearray(1), MIB))
    with dialled(source) as stuck, dialled(source) as idle:
        stuck.sendall(greeting(hello()))
        Wire(stuck, source.settings).send_want(range(64))
        idle.sendall(greeting(hello("", "idle", 0, False)))
        kit.until(lambda: source.statistics()["connections_accepted"] == 2, "both are there")
        kit.until(lambda: source.statistics()["connections_open"] == 0, "both were dropped")
        assert source.statistics()["connections_dropped"] == 2
        assert source.withdraw("k", timeout_s=0.0)


# -- sources that are not what they should be ------------------------------------------------------------------------


@contextmanager
def fake_source(*words: bytes) -> Iterator[str]:
    """A listener that says this to whoever connects, hears it out and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                with sock, suppress(OSError):
                    for part in words:
                        sock.sendall(part)
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(4096):
                        pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


WELCOME = greeting(Welcome(7, CHUNK, 2 * CHUNK))
MANIFEST = HEADER.pack(tcp_wire.MANIFEST, 1, 0) + b"m"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([b"HTTP/1.1 400 Bad Request\r\n\r\n"], "protocol"),
        ([b"SSH-2.0"], "closed"),
        ([greeting(Welcome(7, CHUNK, 2 * CHUNK), version=VERSION + 1)], f"version {VERSION}"),
        ([greeting(hello("", "k", 0, True))], "Welcome or Refusal"),
        ([greeting(Refusal("an unheard-of code", "a reason of tomorrow"))], "a reason of tomorrow"),
        ([greeting(Refusal("busy", "\x1b]0;owned\x07\nWARNING all is well"))], "\\x1b]0;owned\\x07\\nWARNING"),
        ([greeting(Refusal("busy", "x" * 5_000))], "5000 characters"),
        ([greeting(["\x1b[2J", 1])], "\\x1b[2J"),
        ([WELCOME, MANIFEST, framed(tcp_wire.GONE, Refusal("gone", "a\u202eb"))], "a\\u202eb"),
        ([greeting(nested("welcome", 7, CHUNK, 2 * CHUNK))], "malformed"),
        ([WELCOME], "closed"),
        ([WELCOME, HEADER.pack(tcp_wire.MANIFEST, MAX_MANIFEST_BYTES + 1, 0)], "limit"),
        ([WELCOME, HEADER.pack(tcp_wire.CHUNK, CHUNK, 0), bytes(CHUNK)], "manifest"),
        ([greeting(Welcome(7, CHUNK, 2**63)), MANIFEST], "expected"),
        ([WELCOME, MANIFEST], "closed"),
        ([WELCOME, MANIFEST, HEADER.pack(tcp_wire.CHUNK, CHUNK, 1), bytes(CHUNK)], "chunk 1"),
        ([WELCOME, MANIFEST, HEADER.pack(tcp_wire.CHUNK, CHUNK - 1, 0), bytes(CHUNK)], "were due"),
        ([WELCOME, MANIFEST, HEADER.pack(tcp_wire.CHUNK, 2**32 - 1, 0), bytes(CHUNK)], "were due"),
        ([WELCOME, MANIFEST, HEADER.pack(77, 0, 0)], "frame 77"),
        ([WELCOME, MANIFEST, HEADER.pack(tcp_wire.WAITING, 8, 0)], "keepalive"),
        ([WELCOME, MANIFEST, HEADER.pack(tcp_wire.GONE, 2**31, 0)], "limit"),
        ([WELCOME, MANIFEST, HEADER.pack(tcp_wire.GONE, 1, 0) + b"\xc1"], "malformed"),
        ([WELCOME, MANIFEST, framed(tcp_wire.GONE, nested("refusal", "gone", "a reason"))], "malformed"),
        ([WELCOME, MANIFEST, HEADER.pack(tcp_wire.CHUNK, CHUNK, 0), bytes(CHUNK // 2)], "closed"),
    ],
)
def test_a_false_source_is_lost_and_writes_nothing_wrong(tcp: Tcp, words: list[bytes], says: str) -> None:
    with fake_source(*words) as endpoint:
        target = Target(content(2 * CHUNK), CHUNK)
        error = read_all(tcp(streams=1), endpoint, "k", target)
    assert isinstance(error, SourceLost)
    assert says in str(error)
    assert str(error).isprintable()
    assert target.order == []
    assert not any(target.buffer)


def test_keepalives_come_four_times_per_silence_limit(tcp: Tcp) -> None:
    source = tcp(silence_s=60.0)  # what counts is the silence that the reader bears
    source.export(Export("k", b"m", CHUNK, kit.Pieces(content(CHUNK)), Progress(1)))
    with dialled(source) as sock:
        sock.sendall(greeting(Hello("", "k", 0, 400, False)))
        wire = Wire(sock, source.settings)
        assert wire.receive_greeting(DEADLINE_S)
        wire.send_want([0])
        assert [wire.receive_header() for _ in range(5)] == [(tcp_wire.WAITING, 0, 0)] * 5
        source.withdraw("k", timeout_s=DEADLINE_S)
        kind, length, _ = wire.receive_header()
        while kind == tcp_wire.WAITING:
            kind, length, _ = wire.receive_header()
        assert wire.receive_gone(length) == Refusal("gone", "it was withdrawn")


def test_chunks_come_in_the_order_asked_for(tcp: Tcp) -> None:
    right = content(6 * CHUNK)
    source = tcp()
    source.export(full("k", right, CHUNK))
    with dialled(source) as sock:
        sock.sendall(greeting(hello()))
        wire = Wire(sock, source.settings)
        assert wire.receive_greeting(DEADLINE_S) == Welcome(source._server._exports["k"].generation, CHUNK, 6 * CHUNK)
        order = [5, 2, 3, 0, 4]
        wire.send_want(order)
        for chunk in order:
            assert wire.receive_header() == (tcp_wire.CHUNK, CHUNK, chunk)
            heard = bytearray(CHUNK)
            wire.receive_into([memoryview(heard)])
            assert heard == right[chunk * CHUNK : (chunk + 1) * CHUNK]
    kit.until(lambda: source.served_bytes("k") == 5 * CHUNK, "what was served is counted")
    assert source.served_bytes("other") == 0


def test_header_sizes_are_what_the_protocol_says() -> None:
    assert (GREETING.size, HEADER.size) == (16, 16)
    assert struct.calcsize("!8sHHI") == GREETING.size
