"""Sources whose bytes pass through a small ring of host memory: who takes nothing keeps nobody else from it."""

import socket
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from tensorhub.memory.streams import Copy, Piece, StagedStream, StagingRing
from tensorhub.transport.base import Export, Progress, Scarce
from tensorhub.transport.ranges import PIECES, Batches
from tensorhub.transport.tcp import wire as brief
from tensorhub.transport.tcp import wire as tcp_wire
from tensorhub.transport.tcp.addresses import parse_endpoint
from tensorhub.transport.tcp.settings import TcpSettings
from tensorhub.transport.tcp.transport import TcpTransport
from tensorhub.transport.tcp.wire import Hello, Vanished, Welcome, Wire

from . import kit
from .kit import DEADLINE_S, Target, read_all

CHUNK, SLOTS = 1 << 20, 2
SIZE = 4 * CHUNK
RIGHT = kit.content(SIZE, seed=5)
SETTINGS = TcpSettings(silence_s=2.0, send_buffer_bytes=4096, receive_buffer_bytes=4096)


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


@pytest.fixture
def stream() -> StagedStream:
    owner = np.frombuffer(RIGHT, np.uint8)
    piece = Piece(0, SIZE, owner.ctypes.data, "cuda:0", 1, (owner,))
    found = StagedStream([piece], Copier(RIGHT), StagingRing(CHUNK, SLOTS))
    assert isinstance(found, Scarce)
    return found


@pytest.fixture
def source(stream: StagedStream) -> Iterator[TcpTransport]:
    transport = TcpTransport(SETTINGS)
    transport.export(Export("k", b"m", CHUNK, stream, Progress(SIZE // CHUNK, complete=True)))
    yield transport
    transport.close()


@contextmanager
def stalled(source: TcpTransport, *, has_pieces: bool) -> Iterator[None]:
    """As many readers as there are slots, which ask for everything and take nothing of it."""
    wires = []
    for _ in range(SLOTS):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(parse_endpoint(source.endpoint)[0])
        wires.append(wire := Wire(sock, SETTINGS))
        wire.limit_waits(receive_s=DEADLINE_S, send_s=DEADLINE_S)
        wire.send_greeting(Hello("", "k", 0, 60_000, False, has_pieces=has_pieces))
        assert isinstance(wire.receive_greeting(DEADLINE_S), Welcome)
        if has_pieces:
            wire.send_frame(PIECES, payload=[Batches.of(array("Q", [0, SIZE, 1, 0, 1, 0]), [1], SIZE).encode()])
            assert wire.receive_header() == (tcp_wire.WAITING, 0, 0)
        wire.send_want([0])
        assert wire.receive_header()[0] == tcp_wire.CHUNK  # it is being sent: a slot is taken
    try:
        yield
    finally:
        for wire in wires:
            wire.cut()
            wire.close()


@pytest.mark.parametrize("has_pieces", [False, True])
def test_who_takes_nothing_keeps_no_slot(source: TcpTransport, stream: StagedStream, has_pieces: bool) -> None:
    with stalled(source, has_pieces=has_pieces):
        reader = TcpTransport(TcpSettings(silence_s=2.0))
        target = Target(RIGHT, CHUNK)
        assert read_all(reader, source.endpoint, "k", target) is None
        assert target.buffer == RIGHT
        kit.until(lambda: stream.ring.free_count == SLOTS, "all slots are free")
        reader.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    theirs.settimeout(DEADLINE_S)
    with ours, theirs:
        yield ours, theirs


def test_what_is_taken_at_once_is_not_copied(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    heard = bytearray()

    def take() -> None:
        while len(heard) < SIZE + 3:
            heard.extend(theirs.recv(1 << 16))

    taking = threading.Thread(target=take)
    taking.start()
    assert brief.bounded_send(ours, [b"abc", memoryview(RIGHT)], DEADLINE_S) == b""
    taking.join(DEADLINE_S)
    assert heard == b"abc" + RIGHT


def test_what_is_not_taken_in_time_is_kept_to_be_sent(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    late = brief.bounded_send(ours, [b"abc", memoryview(RIGHT)], 0.01)
    theirs.setblocking(False)
    heard = bytearray()
    while len(heard) + len(late) < SIZE + 3:
        heard.extend(theirs.recv(1 << 16))
    assert heard + late == b"abc" + RIGHT
    assert late


def test_a_peer_that_leaves_is_gone(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.close()
    with pytest.raises(Vanished):
        brief.bounded_send(ours, [memoryview(RIGHT)], DEADLINE_S)
