"""A source over tcp, its readers played by raw sockets: foreign clients, limits, requests, lending, staging."""

import resource
import socket
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from tensorhub.memory.streams import Copy, Piece, StagedStream, StagingRing
from tensorhub.protocol.errors import CorruptTransfer, Refused, SourceLost
from tensorhub.transport.base import Export, Progress, Scarce
from tensorhub.transport.native import load
from tensorhub.transport.ranges import PIECES, Batches
from tensorhub.transport.tcp import server as tcp_server
from tensorhub.transport.tcp import wire as tcp_wire
from tensorhub.transport.tcp.addresses import parse_endpoint
from tensorhub.transport.tcp.server import MAX_UNAUTHENTICATED, Admission, Conversation
from tensorhub.transport.tcp.settings import TcpSettings
from tensorhub.transport.tcp.transport import TcpTransport
from tensorhub.transport.tcp.wire import GREETING, HEADER, MAGIC, VERSION, Hello, Refusal, Welcome, Wire

from . import kit
from .conftest import Tcp
from .kit import DEADLINE_S, MIB, Gate, Target, content, framed, full, greeting, nested, read_all, start_read

CHUNK = 4096
LENDS = {"streams": 1, "stream_bytes": 8 * MIB, "lend_rate_bytes_per_s": 0, "lend_piece_bytes": 1}


@contextmanager
def dialled(transport: TcpTransport) -> Iterator[socket.socket]:
    with socket.create_connection(parse_endpoint(transport.endpoint)[0], timeout=DEADLINE_S) as sock:
        yield sock


def hello(token: str = "", key: str = "k", generation: int = 0, wants_manifest: bool = False) -> Hello:
    return Hello(token, key, generation, 5000, wants_manifest)


def welcomed(transport: TcpTransport, sock: socket.socket, hello: Hello) -> Wire:
    """A reader that has greeted, and may ask for chunks."""
    sock.sendall(greeting(hello))
    wire = Wire(sock, transport.settings)
    assert isinstance(wire.receive_greeting(DEADLINE_S), Welcome)
    return wire


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


# -- foreign clients ---------------------------------------------------------------------------------------------------


def test_a_stranger_is_refused_in_words(tcp: Tcp) -> None:
    right, source = content(CHUNK), tcp()
    source.export(full("k", right, CHUNK))
    source.export(full("withdrawn", right, CHUNK))
    assert source.withdraw("withdrawn", timeout_s=DEADLINE_S)
    for words, code in [
        (b"GET /metrics HTTP/1.1\r\nHost: example\r\nUser-Agent: curl/8\r\n\r\n", "foreign"),
        (bytes(64 * 1024), "foreign"),
        (greeting(hello(), version=VERSION + 98), "version"),
        (greeting(hello(), length=tcp_wire.MAX_GREETING_BYTES + 1), "malformed"),
        (greeting(hello(), length=2**32 - 1), "malformed"),
        (greeting(["hello", 1, 2, 3, 4]), "malformed"),
        (greeting(["\x1b[2J", 1]), "malformed"),
        (greeting(hello("", "\x1b[2J")), "malformed"),
        (greeting({"a": 1}), "malformed"),
        (greeting(nested("hello", "", "k", 0, 5000, *[False] * 5)), "malformed"),
        (greeting(["hello", msgspec.Raw(b"\xa1\xff"), "k", 0, 5000, False]), "malformed"),
        (greeting(Welcome(1, 2, 3)), "malformed"),
        (greeting(hello("", "other", 0, True)), "unknown-key"),
        (greeting(hello("", "k", 12345)), "gone"),
        (greeting(hello("", "withdrawn", 12345)), "gone"),
    ]:
        version, refusal = answer_to(source, words)
        assert (version, refusal.code) == (VERSION, code), words[:60]
        assert refusal.message.isprintable()
    assert read_all(tcp(), source.endpoint, "k", Target(right, CHUNK)) is None


@pytest.mark.parametrize("words", [b"", greeting(hello())[:-1]])
def test_a_stranger_that_takes_long_to_greet_goes_soon(tcp: Tcp, words: bytes) -> None:
    assert answer_to(tcp(silence_s=60.0, greet_s=0.1), words)[1].code == "foreign"


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
    assert answer_to(source, greeting(hello("wrong", "no such key")))[1].code == "token", "no key is told"


MALFORMED = [
    HEADER.pack(tcp_wire.CHUNK, 0, 0),
    HEADER.pack(99, 2**32 - 1, 2**64 - 1),
    HEADER.pack(tcp_wire.WANT, tcp_wire.MAX_WANT_BYTES + 1, 0),
    HEADER.pack(tcp_wire.WANT, 3, 0) + b"\xc1\xc1\xc1",
    *(
        framed(tcp_wire.WANT, body)
        for body in ([(0, 9)], [(-1, 1)], [(2, 2)], [(3, 1)], [(0, 2**63)], [(0,)], "abc", [(0.5, 1)])
    ),
]


@pytest.mark.parametrize("is_native", [True, False])
def test_a_malformed_request_ends_its_own_connection_only(
    tcp: Tcp, is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_server, "conversation_for", served_by(is_native))
    right = content(4 * CHUNK)
    source, reader, progress = tcp(), tcp(), Progress(4)
    source.export(Export("k", b"m", CHUNK, kit.Pieces(right), progress))
    target = Target(right, CHUNK)
    _, ended = start_read(reader, source.endpoint, "k", target)
    kit.until(lambda: target.manifest is not None, "another reader is being served")
    for frame in MALFORMED:
        with dialled(source) as sock:
            wire = welcomed(source, sock, hello())
            sock.sendall(frame)
            kind, length, _ = wire.receive_header()
            assert kind == tcp_wire.GONE
            assert wire.receive_gone(length).code == "malformed"
            assert sock.recv(1) == b""
    progress.mark_all(range(4))
    assert ended.wait() is None


# -- admission ---------------------------------------------------------------------------------------------------------


def test_a_flood_of_strangers_is_bounded_and_keeps_no_reader_out(tcp: Tcp) -> None:
    right = content(CHUNK)
    source = tcp(max_connections=4, silence_s=60.0, greet_s=60.0, token="t")
    source.export(full("k", right, CHUNK))
    flood = [socket.create_connection(parse_endpoint(source.endpoint)[0], timeout=DEADLINE_S) for _ in range(200)]
    kit.until(lambda: source.statistics()["connections_open"] <= MAX_UNAUTHENTICATED, "the oldest were hung up on")
    assert read_all(tcp(token="t", silence_s=60.0), source.endpoint, "k", Target(right, CHUNK)) is None
    assert source.statistics()["connections_open"] >= MAX_UNAUTHENTICATED - 1, "they are there all the time"
    for sock in flood:
        sock.close()
    kit.until(lambda: source.statistics()["connections_open"] == 0, "the flood is over")
    admission = Admission(4)

    def enter(peer: str) -> Wire:
        wire = Wire(socket.socket(), TcpSettings())
        wire.peer = peer
        assert admission.enter(wire, threading.current_thread())
        return wire

    other, wires = enter("other"), [enter("flood") for _ in range(2 * MAX_UNAUTHENTICATED - 1)]
    assert not other.is_cut, "a flood takes the places of its own address"
    assert sum(wire.is_cut for wire in wires) == MAX_UNAUTHENTICATED
    for wire in (other, *wires):
        wire.close()


def test_a_reader_that_waits_for_a_key_takes_no_place_from_one_whose_key_is_there(tcp: Tcp) -> None:
    right = content(CHUNK)
    source = tcp(max_connections=2, silence_s=60.0, greet_s=60.0, expect_s=60.0)
    source.export(full("k", right, CHUNK))
    with ExitStack() as stack:
        for _ in range(2 * MAX_UNAUTHENTICATED):
            stack.enter_context(dialled(source)).sendall(greeting(Hello("", "none", 0, 10**6, False)))
        assert read_all(tcp(), source.endpoint, "k", Target(right, CHUNK)) is None
        assert source.statistics()["connections_open"] >= MAX_UNAUTHENTICATED - 1, "they wait all the time"
        source.export(full("none", right, CHUNK))
        kit.until(lambda: source.statistics()["connections_open"] <= 2, "two find it, and the others no room")


def served_by(is_native: bool) -> Callable[..., Conversation | None]:
    return tcp_server.conversation_for if is_native else lambda *_, **__: None


@pytest.mark.parametrize(("is_native", "has_asked"), [(True, False), (True, True)])
def test_readers_that_ask_for_nothing_make_room(
    tcp: Tcp, is_native: bool, has_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They know the key, and the token too. The source would bear their silence for twenty seconds and more."""
    monkeypatch.setattr(tcp_server, "conversation_for", served_by(is_native))
    right = content(CHUNK)
    source = tcp(max_connections=4, silence_s=60.0, greet_s=0.2 if has_asked else 60.0, token="t")
    source.export(full("k", right, CHUNK))
    with ExitStack() as stack:
        for _ in range(4):
            wire = welcomed(source, stack.enter_context(dialled(source)), hello("t"))
            if has_asked:
                wire.send_want([0])
                assert wire.receive_header() == (tcp_wire.CHUNK, CHUNK, 0)
        kit.until(lambda: source.statistics()["connections_open"] == 4, "all places are taken")
        reader = tcp(token="t")
        kit.until(lambda: read_all(reader, source.endpoint, "k", Target(right, CHUNK)) is None, "it is read")
        kit.until(lambda: source.statistics()["connections_open"] < 4, "one of them was cut")


def test_readers_that_wait_for_what_they_asked_for_keep_their_places_and_another_is_told_so(tcp: Tcp) -> None:
    source, progress = tcp(max_connections=2, silence_s=60.0, greet_s=0.4), Progress(2)
    source.export(Export("k", b"m", CHUNK, kit.Pieces(content(2 * CHUNK)), progress))
    with dialled(source) as first, dialled(source) as second:
        wires = [welcomed(source, sock, Hello("", "k", 0, 400, False)) for sock in (first, second)]
        for wire in wires:
            wire.send_want([0])
            heard = [wire.receive_header() for _ in range(6)]  # longer than it may take to greet
            assert heard == [(tcp_wire.WAITING, 0, 0)] * 6
        for _ in range(10):
            error = read_all(tcp(streams=1), source.endpoint, "k", Target(content(2 * CHUNK), CHUNK))
            assert isinstance(error, SourceLost)
            assert error.retryable
            assert "all 2 connections are taken" in str(error)
        progress.mark(0)
        for wire in wires:
            kind, length, _ = wire.receive_header()
            while kind == tcp_wire.WAITING:
                kind, length, _ = wire.receive_header()
            assert (kind, length) == (tcp_wire.CHUNK, CHUNK)
    progress.mark(1)
    kit.until(lambda: source.statistics()["connections_open"] == 0, "the connections are free again")
    assert read_all(tcp(), source.endpoint, "k", Target(content(2 * CHUNK), CHUNK)) is None


@pytest.mark.parametrize("is_checking", [False, True])
def test_a_reader_that_takes_nothing_is_dropped_in_the_end(tcp: Tcp, is_checking: bool) -> None:
    """What it takes nothing of may be lent memory."""
    source = tcp(**LENDS, silence_s=0.1)
    source.export(full("k", bytearray(64 * MIB), MIB))
    source.export(full("idle", bytearray(1), MIB))
    with dialled(source) as stuck, dialled(source) as idle:
        welcomed(source, stuck, Hello("", "k", 0, 5000, False, is_checking)).send_want(range(64))
        welcomed(source, idle, hello("", "idle"))
        kit.until(lambda: source.statistics()["lent_bytes"] > 0 or not is_checking or not load.library(), "it is lent")
        kit.until(lambda: source.statistics()["connections_open"] == 0, "both were dropped")
        assert source.statistics()["connections_dropped"] == 2
        assert source.withdraw("k", timeout_s=0.0)


# -- memory that is lent to a socket may change before its reader has it -----------------------------------------------


LENT_CHUNK = 64 * 1024
lends = pytest.mark.skipif(load.library() is None, reason=f"the mover lends, and there is none: {load.why_not()}")


class Pair:
    """A source that lends and a reader, in one process."""

    def __init__(self, tcp: Tcp) -> None:
        self.source, self.reader = tcp(**LENDS), tcp(**LENDS)
        self.memory = kit.content(8 * LENT_CHUNK)
        self.right = bytes(self.memory)
        self.stream = kit.Pieces(self.memory)
        self.source.export(Export("k", b"manifest", LENT_CHUNK, self.stream, Progress(8, complete=True)))

    def read(self, target: Target) -> kit.Ended:
        ended = kit.Ended()
        self.read_of = self.reader.read(self.source.endpoint, "k", target, ended)
        return ended

    def target(self, **options: object) -> Target:
        return Target(bytearray(self.right), LENT_CHUNK, **options)  # type: ignore[arg-type]

    def await_lent(self, chunks: int) -> None:
        kit.until(lambda: self.source.statistics()["lent_bytes"] >= chunks * LENT_CHUNK, f"{chunks} chunks are lent")

    def spoil(self, chunk: int) -> None:
        """The owner writes over a chunk."""
        self.memory[chunk * LENT_CHUNK] ^= 0xFF


@pytest.fixture
def pair(tcp: Tcp) -> Pair:
    return Pair(tcp)


@lends
@pytest.mark.parametrize("why_not", ["", "unchecked", "no pipe", "few descriptors"])
def test_what_is_lent_arrives_and_what_cannot_be_lent_is_copied(
    pair: Pair, why_not: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why_not == "no pipe":
        monkeypatch.setattr(tcp_wire, "MIN_PIPE_BYTES", 1 << 30)
    if why_not == "few descriptors":
        monkeypatch.setattr(resource, "getrlimit", lambda _: (kit.open_files(), 1 << 20))
    odd = kit.content(8 * LENT_CHUNK + 77)
    pair.source.export(Export("odd", b"", LENT_CHUNK, kit.Pieces(odd, 5003), Progress(9, complete=True)))
    target, pieces = pair.target(), Target(bytearray(odd), LENT_CHUNK, piece_bytes=3001)
    target.is_checking = pieces.is_checking = why_not != "unchecked"
    assert pair.read(target).wait() is None
    assert read_all(pair.reader, pair.source.endpoint, "odd", pieces) is None
    assert (target.buffer, pieces.buffer) == (pair.right, odd)
    lent = 0 if why_not else len(pair.right) + len(odd)
    sent = len(pair.right) + len(odd)
    kit.until(lambda: pair.source.statistics()["sent_bytes"] == sent, "a source counts after it has sent")
    assert pair.source.statistics()["lent_bytes"] == lent
    assert ("zero copy" in pair.read_of.path) == (not why_not)


@lends
def test_a_lent_chunk_that_changed_on_its_way_is_asked_for_again(pair: Pair) -> None:
    """The reader stands still at chunk 0 while chunk 1 is in its socket, and its owner writes to it for a moment."""
    first, second = Gate(), Gate()
    target = pair.target(wanted=[0, 1, 2], gates={0: first, 1: second})
    ended = pair.read(target)
    assert first.reached.wait(DEADLINE_S)
    pair.await_lent(2)
    pair.spoil(1)
    first.release.set()
    assert second.reached.wait(DEADLINE_S)
    pair.spoil(1)  # as it was
    second.release.set()
    assert ended.wait() is None
    assert target.order == [0, 2, 1]
    assert target.buffer[: 3 * LENT_CHUNK] == pair.right[: 3 * LENT_CHUNK]
    kit.until(lambda: pair.source.statistics()["sent_bytes"] == 4 * LENT_CHUNK, "four chunks are counted")
    assert pair.source.statistics()["lent_bytes"] <= 3 * LENT_CHUNK, "the second time it is copied"


@lends
@pytest.mark.parametrize("gates", [None, {8: Gate()}], ids=["native", "python"])
def test_a_source_whose_bytes_are_wrong_is_found_out_by_the_copy(pair: Pair, gates: dict[int, Gate] | None) -> None:
    pair.spoil(3)
    target = pair.target(gates=gates)
    assert isinstance(pair.read(target).wait(), CorruptTransfer)
    assert 3 not in target.order
    assert pair.source.statistics()["sent_bytes"] <= len(pair.right) + LENT_CHUNK, "it is asked no third time"


@lends
@pytest.mark.parametrize("is_slow", [True, False], ids=["cut off", "waited for"])
def test_a_withdrawal_leaves_nothing_out_that_counts(
    pair: Pair, is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader stands still: it takes what is in its socket in time, all of it right, or is cut off."""
    source, gate, progress = pair.source, Gate(), Progress(8)
    grace_s = source.settings.withdraw_grace_s if is_slow else DEADLINE_S
    source._server._settings = replace(source.settings, withdraw_grace_s=grace_s)
    source.export(Export("k", b"manifest", LENT_CHUNK, pair.stream, progress))
    progress.mark_all(range(3))
    target = pair.target(gates={0: gate})
    ended = pair.read(target)
    assert gate.reached.wait(DEADLINE_S)
    pair.await_lent(3)
    awaited, withdrawn, await_return = threading.Event(), threading.Event(), Wire.await_return

    def note(wire: Wire, within_s: float) -> None:
        awaited.set()
        await_return(wire, within_s)

    monkeypatch.setattr(Wire, "await_return", note)

    def withdraw() -> None:
        assert source.withdraw("k", timeout_s=DEADLINE_S)
        pair.memory[:] = bytes(len(pair.memory))  # from here on it is another version's
        withdrawn.set()

    leaving = threading.Thread(target=withdraw, daemon=True)
    leaving.start()
    assert awaited.wait(DEADLINE_S), "it has said its last word"
    if is_slow:
        assert withdrawn.wait(DEADLINE_S)
    else:
        assert not withdrawn.is_set()
    gate.release.set()
    assert withdrawn.wait(DEADLINE_S)
    assert isinstance(ended.wait(), SourceLost)
    assert is_slow or target.order == [0, 1, 2], "all that was lent was taken"
    for chunk in target.order:
        span = slice(chunk * LENT_CHUNK, (chunk + 1) * LENT_CHUNK)
        assert target.buffer[span] == pair.right[span]
    leaving.join(DEADLINE_S)


# -- bytes that pass through a small ring of host memory: a reader that takes nothing keeps no slot --------------------


class Copier:
    """A device that is plain memory."""

    def __init__(self, memory: bytearray) -> None:
        self._memory = memoryview(memory)

    def staging(self, size_bytes: int) -> memoryview:
        self._staging = memoryview(bytearray(size_bytes))
        return self._staging

    def to_host(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            came = self._memory[copy.inside : copy.inside + copy.size_bytes]
            self._staging[copy.at : copy.at + copy.size_bytes] = came

    def to_device(self, copies: Sequence[Copy]) -> None:
        raise AssertionError("nothing is written here")


@pytest.mark.parametrize("has_pieces", [False, True])
def test_a_reader_that_takes_nothing_keeps_no_slot(tcp: Tcp, has_pieces: bool) -> None:
    slots, size = 2, 4 * MIB
    right = content(size, seed=5)
    owner = np.frombuffer(right, np.uint8)
    piece = Piece(0, size, owner.ctypes.data, "cuda:0", 1, (owner,))
    stream = StagedStream([piece], Copier(right), StagingRing(MIB, slots))
    assert isinstance(stream, Scarce)
    source = tcp(silence_s=2.0, send_buffer_bytes=4096, receive_buffer_bytes=4096)
    source.export(Export("k", b"m", MIB, stream, Progress(size // MIB, complete=True)))
    with ExitStack() as stack:
        for _ in range(slots):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(parse_endpoint(source.endpoint)[0])
            wire = welcomed(source, sock, Hello("", "k", 0, 60_000, False, has_pieces=has_pieces))
            if has_pieces:
                wanted = Batches.of(array("Q", [0, size, 1, 0, 1, 0]), [1], size)
                wire.send_frame(PIECES, payload=[wanted.encode()])
                assert wire.receive_header() == (tcp_wire.WAITING, 0, 0)
            wire.send_want([0])
            assert wire.receive_header()[0] == tcp_wire.CHUNK  # it is being sent: a slot is taken
        target = Target(right, MIB)
        assert read_all(tcp(), source.endpoint, "k", target) is None
        assert target.buffer == right
        kit.until(lambda: stream.ring.free_count == slots, "all slots are free")
