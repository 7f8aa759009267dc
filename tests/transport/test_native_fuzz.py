"""Garbage for the native mover: what a peer may send, mutated and made up, round after round, always the same rounds.

Whatever comes, a stream or a conversation ends in a way that is known; no chunk counts that is not right, byte for
byte; and not a byte is written outside the memory that was given. `FUZZ_ROUNDS=200000` runs more of them.
"""

import contextlib
import ctypes
import os
import random
import socket
import struct
import threading
import time

import msgspec
import pytest

from tensorhub.protocol.manifest import chunk_count
from tensorhub.transport.base import Export, Progress
from tensorhub.transport.native import shapes
from tensorhub.transport.native.reads import make_mover
from tensorhub.transport.tcp import wire as tcp_wire
from tensorhub.transport.tcp.server import ServedExport, conversation_for
from tensorhub.transport.tcp.settings import TcpSettings
from tensorhub.transport.tcp.wire import HEADER, Wire, WireError

from . import kit
from .native import needs_mover

pytestmark = needs_mover

ROUNDS = int(os.environ.get("FUZZ_ROUNDS", "300"))
SIZE, CHUNK = 5000, 700
COUNT = chunk_count(SIZE, CHUNK)
MARGIN = 256
RIGHT = kit.content(SIZE, seed=9)
SETTINGS = TcpSettings(ahead_bytes=64 * CHUNK, stream_bytes=64 * CHUNK, silence_s=5.0)
ENDS = {shapes.DONE, shapes.VANISHED, shapes.GARBLED, shapes.SAID_GONE, shapes.CORRUPT}


def frame(kind: int, number: int, body: bytes = b"", length: int | None = None) -> bytes:
    return HEADER.pack(kind, len(body) if length is None else length, number) + body


def conversation(chance: random.Random) -> list[bytes]:
    """What an honest source sends, with a keepalive or a farewell among it."""
    frames = []
    for chunk in range(COUNT):
        kind = tcp_wire.LENT if chance.random() < 0.3 else tcp_wire.CHUNK
        frames.append(frame(kind, chunk, bytes(RIGHT[chunk * CHUNK : (chunk + 1) * CHUNK])))
        if chance.random() < 0.2:
            frames.append(frame(tcp_wire.WAITING, 0))
    if chance.random() < 0.2:
        gone = msgspec.msgpack.encode(tcp_wire.Refusal("gone", "it was withdrawn"))
        frames.insert(chance.randrange(len(frames)), frame(tcp_wire.GONE, 0, gone))
    return frames


def mutated(frames: list[bytes], chance: random.Random) -> bytes:
    """The frames exchanged, dropped, repeated or with other headers; then bytes changed, cut off or put in."""
    frames = list(frames)
    for _ in range(chance.randrange(3)):
        at = chance.randrange(len(frames))
        match chance.randrange(5):
            case 0:
                frames.append(frames.pop(at))
            case 1 if len(frames) > 1:
                del frames[at]
            case 2:
                frames.insert(at, frames[at])
            case 3:
                length = chance.choice([0, 1, CHUNK, CHUNK + 1, 1 << 14, (1 << 14) + 1, 1 << 31, (1 << 32) - 1])
                number = chance.choice([0, COUNT - 1, COUNT, 1 << 62, (1 << 64) - 1])
                frames[at] = frame(chance.randrange(20), number, chance.randbytes(chance.randrange(40)), length)
            case 4:
                frames[at] = chance.randbytes(chance.randrange(60))
    data = bytearray(b"".join(frames))
    for _ in range(chance.randrange(4) if data else 0):
        data[chance.randrange(len(data))] = chance.randrange(256)
    if data and chance.random() < 0.2:
        del data[chance.randrange(len(data)) :]
    return bytes(data)


class Sink(kit.Target):
    """A sink with a margin around its memory."""

    def __init__(self, piece_bytes: int) -> None:
        super().__init__(RIGHT, CHUNK)
        self.memory = bytearray(b"\x5a" * (SIZE + 2 * MARGIN))
        self.stream = kit.Pieces(self.memory, piece_bytes)
        self.stream.view = memoryview(self.memory)[MARGIN : MARGIN + SIZE]

    def check_memory(self, seed: int) -> None:
        """What counts is right, and nothing is written beside it."""
        for chunk in filter(self.progress.has, range(COUNT)):
            right = RIGHT[chunk * CHUNK : (chunk + 1) * CHUNK]
            assert self.memory[MARGIN + chunk * CHUNK :][: len(right)] == right, (seed, chunk)
        assert self.memory[:MARGIN] == self.memory[MARGIN + SIZE :] == b"\x5a" * MARGIN, seed


def test_whatever_a_source_sends() -> None:
    ended = dict.fromkeys(ENDS, 0)
    for seed in range(ROUNDS):
        chance = random.Random(seed)
        frames = conversation(chance)
        data = b"".join(frames) if chance.random() < 0.05 else mutated(frames, chance)
        sink = Sink(chance.choice([0, 1, 37, 256]))
        mover = make_mover(SETTINGS, sink, range(COUNT), 1, chance.choice([64, 1000, 1 << 20]))
        assert mover is not None
        mover.answer(may_write=True)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)
            state = mover.stream(ours.fileno())
            mover.run(state)
        assert state.status in ENDS, (seed, state.status)
        ended[state.status] += 1
        assert state.heard_bytes <= len(data)
        sink.check_memory(seed)
        assert state.status != shapes.DONE or sink.progress.is_complete, seed
        assert mover.missing == COUNT - sum(map(sink.progress.has, range(COUNT))), seed
    assert all(ended.values()), f"every end was reached: {ended}"


def test_whatever_a_source_announces() -> None:
    """Counts and numbers of READY, to a reader that copies out of this very process."""
    ended = set[int]()
    theirs_memory = ctypes.create_string_buffer(bytes(RIGHT), SIZE)
    seal = ctypes.create_string_buffer(b"0123456789abcdef", 16)
    pidfd = os.pidfd_open(os.getpid())
    for seed in range(ROUNDS // 3):
        chance = random.Random(seed)
        sink = Sink(chance.choice([0, 37]))
        mover = make_mover(SETTINGS, sink, range(COUNT), 1, 1000)
        assert mover is not None
        mover.answer(may_write=True)
        data = b""
        at = 0
        while at < COUNT:
            count = chance.randrange(1, 4)
            if chance.random() < 0.1:
                at, count = chance.choice([0, at + 1, 1 << 62, (1 << 64) - 1]), chance.choice([0, 1, 1 << 63])
            kind = 16 if chance.random() < 0.97 else chance.randrange(256)
            data += frame(kind, at, struct.pack("=Q", count))
            at += count
        if chance.random() < 0.1:
            data = data[: chance.randrange(len(data))]
        starts, pairs = (ctypes.c_uint64 * 1)(0), (ctypes.c_uint64 * 2)(ctypes.addressof(theirs_memory), SIZE)
        table = shapes.Table(pairs=ctypes.addressof(pairs), starts=ctypes.addressof(starts), count=1, size=SIZE)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)
            state = mover.stream(ours.fileno())
            state.is_local, state.pid, state.pidfd, state.theirs = 1, os.getpid(), pidfd, table
            state.seal_address, state.seal[:] = ctypes.addressof(seal), seal.raw
            mover.run(state)
        ended.add(state.status)
        assert state.status in {shapes.DONE, shapes.VANISHED, shapes.GARBLED, shapes.SAID_GONE}, seed
        sink.check_memory(seed)
    os.close(pidfd)
    assert ended >= {shapes.DONE, shapes.VANISHED, shapes.GARBLED}


def requests(chance: random.Random) -> bytes:
    """What readers ask for, mutated."""
    data = bytearray()
    for _ in range(1 + chance.randrange(3)):
        ranges = [
            [start, start + 1 + chance.randrange(3)] for start in chance.sample(range(COUNT), chance.randrange(4))
        ]
        body = msgspec.msgpack.encode(ranges)
        kind = tcp_wire.WANT if chance.random() < 0.95 else chance.randrange(256)
        length = len(body) if chance.random() < 0.95 else chance.choice([0, 1, 1 << 16, (1 << 16) + 1, (1 << 32) - 1])
        data += frame(kind, chance.choice([0, 1, 1 << 63]), body, length)
    for _ in range(chance.randrange(3)):
        data[chance.randrange(len(data))] = chance.randrange(256)
    if chance.random() < 0.2:
        del data[chance.randrange(len(data)) :]
    return bytes(data)


def heard(sock: socket.socket, into: bytearray) -> None:
    with contextlib.suppress(ConnectionResetError):  # it may not have taken all that was sent
        while piece := sock.recv(65536):
            into += piece


@pytest.mark.parametrize("is_announcing", [False, True])
def test_whatever_a_reader_asks_for(is_announcing: bool) -> None:
    served = ServedExport(Export("k", b"", CHUNK, kit.Pieces(RIGHT, 256), Progress(COUNT, complete=True)))
    failures = set[str]()
    for seed in range(ROUNDS // 3):
        chance = random.Random(seed)
        ours, theirs = socket.socketpair()
        with theirs:
            wire, came = Wire(ours, SETTINGS), bytearray()
            conversation = conversation_for(SETTINGS, wire, served, 5.0, is_announcing=is_announcing)
            assert conversation is not None
            hearing = threading.Thread(target=heard, args=(theirs, came))
            hearing.start()
            theirs.sendall(requests(chance))
            theirs.shutdown(socket.SHUT_WR)
            with pytest.raises(WireError) as failure:
                conversation.run()
            failures.add(type(failure.value).__name__)
            wire.close()
            hearing.join()
        at = 0
        while at < len(came):
            kind, length, number = HEADER.unpack_from(came, at)
            body = came[at + HEADER.size : at + HEADER.size + length]
            at += HEADER.size + length
            if is_announcing:
                assert kind == 16
                assert 1 <= struct.unpack("=Q", body)[0] <= COUNT - number
            else:
                assert kind == tcp_wire.CHUNK
                assert body == RIGHT[number * CHUNK : (number + 1) * CHUNK], seed
        assert at == len(came)
    assert failures == {"Vanished", "Garbled"}


def test_a_stop_flag_that_is_set_at_any_moment_lets_nothing_count_afterwards() -> None:
    """G4 to the chunk: as soon as `set` has returned, the marks stay as they are."""
    data = b"".join(frame(tcp_wire.CHUNK, chunk, bytes(RIGHT[chunk * CHUNK :][:CHUNK])) for chunk in range(COUNT))
    cut_short = 0
    for seed in range(ROUNDS // 3):
        sink = Sink(0)
        mover = make_mover(SETTINGS, sink, range(COUNT), 1, 1 << 20)
        assert mover is not None
        mover.answer(may_write=True)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            state = mover.stream(ours.fileno())
            theirs.sendall(data)
            mover.start(state)
            until = time.perf_counter() + random.Random(seed).random() * 60e-6
            while time.perf_counter() < until:
                pass
            sink.stop_flag.set()
            marks = bytes(sink.progress._have)
            mover.join(state)
        assert bytes(sink.progress._have) == marks, seed
        assert state.status in (shapes.DONE, shapes.UNTRUSTED)
        cut_short += state.status == shapes.UNTRUSTED
    assert cut_short, "some were cut short"
