"""What a peer may want of a source, made up and mutated: it is refused with its reason, or served to the byte.

`FUZZ_ROUNDS=200000` runs more of it. It runs with the sanitizers, too (`test_native_sanitized.py`).
"""

import contextlib
import os
import random
import socket
import threading
import time
from array import array
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tensorhub.transport.base import Export, Progress
from tensorhub.transport.native import load
from tensorhub.transport.ranges import MAX_PIECES_BYTES, MAX_ROWS, PIECES, BadPieces, Batches, Room
from tensorhub.transport.tcp import server as tcp_server
from tensorhub.transport.tcp import wire as tcp_wire
from tensorhub.transport.tcp.addresses import parse_endpoint
from tensorhub.transport.tcp.server import ServedExport, TcpServer
from tensorhub.transport.tcp.settings import TcpSettings
from tensorhub.transport.tcp.transport import TcpTransport
from tensorhub.transport.tcp.wire import HEADER, Hello, Refusal, Welcome, Wire, WireError

from . import kit
from .kit import DEADLINE_S
from .native import needs_mover

TAKEN = HEADER.pack(tcp_wire.WAITING, 0, 0)
ROUNDS = int(os.environ.get("FUZZ_ROUNDS", "600"))
SIZE, CHUNK = 5000, 700
RIGHT = kit.content(SIZE, seed=9)
SETTINGS = TcpSettings(silence_s=5.0)
TOP = (1 << 64) - 1


@pytest.fixture(params=["native", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Numbers are looked at by the mover, or by Python."""
    if request.param == "native" and load.library() is None:
        pytest.skip(f"no native mover: {load.why_not()}")
    if request.param == "python":
        monkeypatch.setenv(load.VARIABLE, "no")
        load.reset()
    yield request.param
    monkeypatch.undo()
    load.reset()


def body(counts: list[int], *rows: list[int], count: int | None = None, row_count: int | None = None) -> bytes:
    heads = [len(counts) if count is None else count, len(rows) if row_count is None else row_count]
    return array("Q", [*heads, *counts, *(number for row in rows for number in row)]).tobytes()


GOOD = [10, 4, 3, 8, 2, 100]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "no numbers"),
        (b"1234567", "no numbers"),
        (body([1], GOOD, count=2), "2 batches of 1 rows"),
        (body([1], GOOD, row_count=2), "1 batches of 2 rows"),
        (body([1], GOOD, row_count=TOP), f"{TOP} rows"),
        (body([1], GOOD, count=TOP), f"{TOP} batches"),
        (body([1], GOOD, row_count=MAX_ROWS + 1), "are the limit"),
        (body([2], GOOD), "batches of 2 rows, but 1 rows"),
        (body([1, 0], GOOD, GOOD), "batch 1 has no rows"),
        (body([1 | 1 << 33], GOOD), "flags"),
        (body([1], [0, 0, 1, 0, 1, 0]), "row 0 has no bytes"),
        (body([2], GOOD, [0, 1, 0, 0, 1, 0]), "row 1 has no bytes"),
        (body([1], [SIZE, 1, 1, 0, 1, 0]), f"bytes {SIZE} to {SIZE + 1} of a stream of {SIZE} B"),
        (body([1], [0, 4, 2, SIZE - 3, 1, 0]), f"bytes 0 to {SIZE + 1}"),
        (body([1], [0, 4, 1, 0, 2, SIZE - 3]), f"bytes 0 to {SIZE + 1}"),
        (body([1], [TOP, 1, 1, 0, 1, 0]), f"bytes {TOP} to {TOP + 1}"),
        (body([1], [TOP - 3, 8, 1, 0, 1, 0]), "of a stream of"),
        (body([1], [0, 1, 2, TOP, 1, 0]), "of a stream of"),
        (body([1], [0, 1, 2, TOP, 2, 2]), "of a stream of"),
        (body([1], [0, 1, 3, 1 << 63, 1, 0]), "of a stream of"),
        (body([1], [0, TOP, 1, 0, 1, 0]), "are the limit"),
        (body([1], [0, 1, TOP, 0, 1, 0]), "are the limit"),
        (body([1], [0, 1, 1 << 40, 0, 1 << 40, 0]), "are the limit"),
        (body([1], [0, 1 << 32, 1 << 32, 0, 1, 0]), "are the limit"),
        (body([2], [0, 1, 1 << 30, 0, 1, 0], [0, 1, 1, 0, 1, 0]), "a batch of 1073741825 B"),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(way: str, data: bytes, why: str) -> None:
    with pytest.raises(BadPieces) as failure:
        Batches.decode(data, SIZE, CHUNK)
    assert why in str(failure.value)


def drawn_rows(chance: random.Random) -> tuple[list[int], array]:
    """Rows that can be, in batches."""
    words, counts = array("Q"), []
    for _ in range(1 + chance.randrange(4)):
        counts.append(1 + chance.randrange(3))
        for _ in range(counts[-1]):
            run, count, counts_ = chance.randint(1, 40), chance.randint(1, 6), chance.randint(1, 4)
            stride, strides = chance.randint(0, 60), chance.randint(0, 300)
            reach = run + (count - 1) * stride + (counts_ - 1) * strides
            words.extend([chance.randrange(SIZE - reach), run, count, stride, counts_, strides])
    return counts, words


def bytes_of(words: array, first: int, last: int) -> bytes:
    """What the definition of a row says."""
    found = bytearray()
    for row in range(first, last):
        place, run, count, stride, counts, strides = words[6 * row : 6 * row + 6]
        for i in range(counts):
            for j in range(count):
                at = place + i * strides + j * stride
                found += RIGHT[at : at + run]
    return bytes(found)


def requests(chance: random.Random) -> tuple[bytes, bytes]:
    """What a reader wants, and asks for, mutated."""
    counts, words = drawn_rows(chance)
    data = bytearray(array("Q", [len(counts), len(words) // 6, *counts]).tobytes() + words.tobytes())
    for _ in range(chance.choice((0, 0, 0, 1, 2))):
        at = 8 * chance.randrange(len(data) // 8)
        value = chance.choice((0, 1, SIZE, 1 << 31, 1 << 32, 1 << 62, TOP, chance.randrange(SIZE)))
        data[at : at + 8] = value.to_bytes(8, "little")
    if chance.random() < 0.1:
        del data[chance.randrange(len(data)) :]
    wants = bytearray()
    for _ in range(1 + chance.randrange(3)):
        first = chance.randrange(len(counts) + (chance.random() < 0.1))
        ranges = tcp_wire._encode([[first, first + 1]])
        wants += HEADER.pack(tcp_wire.WANT, len(ranges), 0) + ranges
    for _ in range(chance.choice((0, 0, 0, 1))):
        wants[chance.randrange(len(wants))] = chance.randrange(256)
    return bytes(data), bytes(wants)


def hear(sock: socket.socket, into: bytearray) -> None:
    with contextlib.suppress(ConnectionResetError):  # it was hung up on before all its words were heard
        while piece := sock.recv(65536):
            into += piece


def test_whatever_a_reader_wants(way: str) -> None:
    """A conversation after the greetings: refused, or served to the byte, and nothing else."""
    served = ServedExport(Export("k", b"", CHUNK, kit.Pieces(RIGHT), Progress(-(-SIZE // CHUNK), complete=True)))
    server = TcpServer(SETTINGS)
    failures, frames = set[str](), 0
    for seed in range(ROUNDS // 3):
        data, wants = requests(random.Random(seed))
        ours, theirs = socket.socketpair()
        with theirs:
            wire, came = Wire(ours, SETTINGS), bytearray()
            hearing = threading.Thread(target=hear, args=(theirs, came))
            hearing.start()
            theirs.sendall(HEADER.pack(PIECES, len(data), 0) + data + wants)
            theirs.shutdown(socket.SHUT_WR)
            with pytest.raises(WireError) as failure:
                server._serve_batches(wire, served, 5.0)
            failures.add(type(failure.value).__name__)
            wire.close()
            hearing.join()
        if not came:
            continue
        batches, at = Batches.decode(data, SIZE, CHUNK), HEADER.size
        assert came[:at] == TAKEN, "first it hears that there is room"
        while at < len(came):
            kind, length, number = HEADER.unpack_from(came, at)
            found = came[at + HEADER.size : at + HEADER.size + length]
            at += HEADER.size + length
            assert kind == tcp_wire.CHUNK
            expected = bytes_of(batches.rows.words, *batches.first_row[number : number + 2])
            assert found == expected[: len(found)], seed
            assert len(found) == len(expected) or at > len(came), seed
            frames += 1
    server.close()
    assert failures == {"Vanished", "Garbled"}
    assert frames


# -- over a real connection --------------------------------------------------------------------------------------------


@pytest.fixture
def source() -> Iterator[TcpTransport]:
    transport = TcpTransport(SETTINGS)
    transport.export(kit.full("k", RIGHT, CHUNK))
    yield transport
    transport.close()


def welcomed(source: TcpTransport, key: str) -> Wire:
    """A reader of tiles that has greeted."""
    wire = Wire(socket.create_connection(parse_endpoint(source.endpoint)[0]), SETTINGS)
    wire.limit_waits(receive_s=DEADLINE_S, send_s=DEADLINE_S)
    wire.send_greeting(Hello("", key, 0, 5000, False, has_pieces=True))
    assert isinstance(wire.receive_greeting(DEADLINE_S), Welcome)
    return wire


def wanting(
    source: TcpTransport, data: bytes, *, kind: int = PIECES, length: int | None = None, key: str = "k"
) -> Wire:
    """A reader that has said what it wants."""
    wire = welcomed(source, key)
    wire.send([HEADER.pack(kind, len(data) if length is None else length, 0), data])
    return wire


def withdraw(source: TcpTransport, key: str) -> None:
    """Its readers have the time to hear why, however busy the machine is."""
    source._server._settings = replace(SETTINGS, withdraw_grace_s=DEADLINE_S)
    assert source.withdraw(key, timeout_s=DEADLINE_S)


def farewell(wire: Wire) -> Refusal:
    kind, length, _ = wire.receive_header()
    assert kind == tcp_wire.GONE
    found = wire.receive_gone(length)
    wire.close()
    return found


def test_a_reader_hears_why_and_nobody_else_suffers(source: TcpTransport) -> None:
    said = [
        farewell(wanting(source, body([1], [SIZE, 1, 1, 0, 1, 0]))),
        farewell(wanting(source, b"", length=MAX_PIECES_BYTES + 1)),
        farewell(wanting(source, b"", kind=tcp_wire.CHUNK)),
    ]
    assert [refusal.code for refusal in said] == ["malformed"] * 3
    assert "row 0 has bytes 5000 to 5001 of a stream of 5000 B" in said[0].message
    assert "ask for them in several reads" in said[1].message
    assert "where pieces were due" in said[2].message
    target = kit.Target(RIGHT, CHUNK)
    assert kit.read_all(source, source.endpoint, "k", target) is None
    assert target.buffer == RIGHT


def test_a_source_has_room_for_so_much_only(source: TcpTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    good = body([1], GOOD)
    monkeypatch.setattr(source._server, "_room", Room(3 * len(good)))
    first = wanting(source, good)
    assert first.receive_header() == (tcp_wire.WAITING, 0, 0)
    first.send_want([0])
    assert first.receive_header() == (tcp_wire.CHUNK, 24, 0)
    assert farewell(wanting(source, good)).code == "busy"
    first.close()

    def is_room() -> bool:
        with source._server._room.taken(2 * len(good)) as found:
            return found

    kit.until(is_room, "who has left takes no room any more")


def test_who_drips_what_it_wants_keeps_nobody_out(source: TcpTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    good = body([1], GOOD)
    monkeypatch.setattr(source._server, "_room", Room(2 << 20))
    monkeypatch.setattr(tcp_server, "BODY_S", 0.2)
    slow = wanting(source, good, length=1 << 20)

    def is_room() -> bool:
        with contextlib.suppress(OSError):
            slow.sock.send(b"x")
        with source._server._room.taken(2 * len(good)) as found:
            return found

    kit.until(lambda: not is_room(), "all room is kept for what is to come")
    kit.until(is_room, "its room is others' again")
    slow.close()


def test_what_is_wanted_lasts_no_longer_than_its_export(source: TcpTransport) -> None:
    """A source that waits for what a reader wants, and for what it asks for, can be called away."""
    waiting = welcomed(source, "k")
    asking = wanting(source, body([1], GOOD))
    assert asking.receive_header() == (tcp_wire.WAITING, 0, 0)
    withdraw(source, "k")
    assert farewell(waiting).code == farewell(asking).code == "gone"


@needs_mover
def test_rows_that_span_everything_keep_no_export(way: str, source: TcpTransport) -> None:
    """To look at all chunks that such a wish takes bytes from is seconds of work: it ends with the export."""
    chunks = 20_000
    progress = Progress(chunks)
    for chunk in range(1, chunks - 1):
        progress.mark(chunk)
    source.export(Export("long", b"", 1, kit.Pieces(kit.content(chunks, seed=3)), progress))
    row = [1, 1, 2, chunks - 3, 1, 0]  # its second byte is the last that is there
    last = [1, 1, 2, chunks - 2, 1, 0]  # and that of the last row is not
    reader = wanting(source, body([MAX_ROWS - 1, 1], *[row] * (MAX_ROWS - 1), last), key="long")
    assert reader.receive_header() == (tcp_wire.WAITING, 0, 0)
    reader.send_want([0])
    before = time.process_time()
    kit.until(lambda: time.process_time() > before + 0.1, "the source looks")
    before = time.process_time()
    withdraw(source, "long")
    assert farewell(reader).code == "gone"
    assert time.process_time() < before + 1.0, "it has looked on"
