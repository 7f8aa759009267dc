"""The last words of a source whose reader still speaks."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from tensorhub.transport.tcp.settings import TcpSettings
from tensorhub.transport.tcp.wire import CHUNK, GONE, HEADER, LINGER_S, MAX_GONE_BYTES, Wire

from .kit import DEADLINE_S, MIB

CHUNK_BYTES = 2 * MIB  # more than the reader's side takes without reading


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
    """It has sent a chunk, was woken from its wait for the next request, and says farewell."""
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


def test_who_asks_for_more_meanwhile_still_gets_them(ends: tuple[Wire, socket.socket]) -> None:
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


def test_who_never_reads_them_is_not_waited_for(ends: tuple[Wire, socket.socket]) -> None:
    wire, _ = ends
    closing = sent_and_called_out(wire)
    closing.join(DEADLINE_S)
    assert not closing.is_alive()


def test_who_takes_a_little_now_and_then_is_not_waited_for(
    ends: tuple[Wire, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or one strange reader would keep a thread and a place for as long as it likes."""
    monkeypatch.setattr("tensorhub.transport.tcp.wire.MAX_S", 2 * LINGER_S)
    wire, reader = ends
    closing = sent_and_called_out(wire)
    taken = 0
    while closing.is_alive():
        taken += len(reader.recv(16384))
        assert taken < CHUNK_BYTES * 3 // 4, "it is waited for all the time"
        closing.join(LINGER_S / 25)


def test_a_cut_ends_the_wait_for_them(ends: tuple[Wire, socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorhub.transport.tcp.wire.LINGER_S", 10 * DEADLINE_S)
    wire, reader = ends
    closing = sent_and_called_out(wire)
    wire.cut()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    with contextlib.suppress(ConnectionResetError):
        while reader.recv(MIB):
            pass
