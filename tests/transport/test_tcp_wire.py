"""Bytes and last words over one socket, whatever the peer does meanwhile."""

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from tensorhub.protocol.errors import SourceLost
from tensorhub.transport import announcing
from tensorhub.transport.announcing import AnnouncedStream
from tensorhub.transport.tcp import wire as tcp_wire
from tensorhub.transport.tcp.reader import Job
from tensorhub.transport.tcp.settings import TcpSettings
from tensorhub.transport.tcp.wire import (
    CHUNK,
    GONE,
    HEADER,
    LINGER_S,
    MAX_GONE_BYTES,
    Vanished,
    Wire,
    bounded_send,
)

from . import kit
from .kit import DEADLINE_S, MIB, Target, content

CHUNK_BYTES = 2 * MIB  # more than the reader's side takes without reading


@pytest.fixture
def wires() -> Iterator[tuple[Wire, Wire]]:
    left, right = socket.socketpair()
    pair = Wire(left, TcpSettings()), Wire(right, TcpSettings())
    yield pair
    for wire in pair:
        wire.close()


def test_what_has_come_of_a_chunk_under_way_is_seen(wires: tuple[Wire, Wire]) -> None:
    (source, reader), buffer = wires, memoryview(bytearray(1000))
    job = Job(TcpSettings(), "tcp://x:1", "k", Target(bytearray(1000), 1000))
    job.enter(reader)
    thread = threading.Thread(target=reader.receive_into, args=([buffer[:300], buffer[300:]],))
    thread.start()
    source.send([memoryview(b"x" * 400)])
    kit.until(lambda: job.arrived_bytes == 400, "the part that has come is counted")
    assert job.received_bytes == 0
    source.send([memoryview(b"x" * 600)])
    thread.join(DEADLINE_S)
    job.leave(reader)
    assert job.arrived_bytes == 1000


LEAVERS = """
import signal, socket, sys
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
sys.path.insert(0, sys.argv[1])
import kit
from tensorhub.transport.tcp.transport import TcpTransport
from tensorhub.transport.tcp.addresses import parse_endpoint
from tensorhub.transport.tcp.wire import Hello, Wire
source = TcpTransport()
source.export(kit.full("k", kit.content(16 << 20), 1 << 20))
for _ in range(20):
    wire = Wire(socket.create_connection(parse_endpoint(source.endpoint)[0]), source.settings)
    wire.send_greeting(Hello("", "k", 0, 5000, False))
    wire.send_want(range(16))
    wire.receive_greeting(5)
    wire.close()
kit.until(lambda: source.statistics()["connections_open"] == 0, "all are seen to have left")
source.close()
print("alive")
"""


def test_readers_that_leave_do_not_end_a_program_with_sigpipe_at_its_default() -> None:
    command = [sys.executable, "-c", LEAVERS, str(Path(__file__).parent)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (found.returncode, found.stdout) == (0, "alive\n"), found.stderr


# -- what lies in room that others wait for is sent in a moment, or copied ---------------------------------------------


def test_a_bounded_send_keeps_its_room_for_a_moment_only() -> None:
    ours, theirs = socket.socketpair()
    right, heard = content(4 * MIB, seed=5), bytearray()
    with ours, theirs:
        theirs.settimeout(DEADLINE_S)
        late = bounded_send(ours, [b"abc", memoryview(right)], 0.01)
        assert late
        while len(heard) < len(right) + 3 - len(late):
            heard.extend(theirs.recv(1 << 16))
        assert heard + late == b"abc" + right
        theirs.close()
        with pytest.raises(Vanished):
            bounded_send(ours, [memoryview(right)], DEADLINE_S)


# -- the last words of a source whose reader still speaks --------------------------------------------------------------


@pytest.fixture
def ends() -> Iterator[tuple[Wire, socket.socket]]:
    """A source's end of a connection, and its reader's, which has little room."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        reader.connect(listener.getsockname())
        reader.settimeout(DEADLINE_S)
        sock, _ = listener.accept()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * CHUNK_BYTES)
        wire = Wire(sock, TcpSettings())
        yield wire, reader
        wire.close()


def sent_and_called_out(wire: Wire) -> threading.Thread:
    """It has sent a chunk, was woken from its wait for the next request, and says why it ends."""
    wire.send_header(CHUNK, 0, CHUNK_BYTES)
    wire.send([bytes(CHUNK_BYTES)])
    wire.wake()
    wire.send_gone("gone", "it was withdrawn")
    closing = threading.Thread(target=lambda: wire.close(politely=True))
    closing.start()
    return closing


def receive(reader: socket.socket, size_bytes: int) -> bytes:
    found = bytearray()
    while len(found) < size_bytes:
        found += (got := reader.recv(size_bytes - len(found)))
        assert got, "the source hung up"
    return bytes(found)


def test_a_reader_that_asks_for_more_meanwhile_still_gets_them(ends: tuple[Wire, socket.socket]) -> None:
    wire, reader = ends
    closing = sent_and_called_out(wire)
    closing.join(LINGER_S / 5)
    reader.sendall(bytes(1024))
    closing.join(LINGER_S / 5)  # the request has arrived
    receive(reader, HEADER.size + CHUNK_BYTES)
    kind, length, _ = HEADER.unpack(receive(reader, HEADER.size))
    assert kind == GONE
    assert 0 < length <= MAX_GONE_BYTES
    assert b"withdrawn" in receive(reader, length)
    closing.join(DEADLINE_S)
    assert not closing.is_alive()


@pytest.mark.parametrize("how", ["reads a little now and then", "is cut"])
def test_a_reader_that_does_not_take_them_is_not_waited_for(
    ends: tuple[Wire, socket.socket], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or one strange reader would keep a thread and a place for as long as it likes."""
    wire, reader = ends
    if how == "is cut":
        monkeypatch.setattr(tcp_wire, "LINGER_S", 10 * DEADLINE_S)
    if how == "reads a little now and then":
        monkeypatch.setattr(tcp_wire, "MAX_S", 2 * LINGER_S)
    closing, taken = sent_and_called_out(wire), 0
    if how == "is cut":
        wire.cut()
    while how == "reads a little now and then" and closing.is_alive():
        taken += len(reader.recv(16384))
        assert taken < CHUNK_BYTES * 3 // 4, "it is waited for all the time"
        closing.join(LINGER_S / 25)
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    with contextlib.suppress(ConnectionResetError):
        while how == "is cut" and reader.recv(MIB):
            pass


# -- announcements: how the last word of a source is heard that sends no chunks ----------------------------------------


def announced_to(wire: Wire) -> AnnouncedStream:
    return AnnouncedStream(Job(TcpSettings(), "local://there", "k", Target(bytearray(8), 8)), wire, 0)


def test_a_source_that_only_says_that_it_waits_is_not_heard_for_ever(
    wires: tuple[Wire, Wire], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, heard = count(), list[int]()
    monkeypatch.setattr(announcing, "time", SimpleNamespace(monotonic=lambda: next(seconds)))

    def waiting() -> tuple[int, int, int]:
        heard.append(tcp_wire.WAITING)
        assert len(heard) < 1000, "it would be heard for ever"
        return tcp_wire.WAITING, 0, 0

    monkeypatch.setattr(wires[0], "receive_header", waiting)
    assert isinstance(announced_to(wires[0]).why_ended(), SourceLost)
