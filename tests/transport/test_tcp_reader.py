"""Reads over tcp: false sources, the chunk queue, how many streams a read has, and streams that cannot join in."""

import errno
import os
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub.protocol.errors import SourceLost
from tensorhub.transport.base import MAX_MANIFEST_BYTES, Export, Progress, Read
from tensorhub.transport.tcp import wire as tcp_wire
from tensorhub.transport.tcp.addresses import dial
from tensorhub.transport.tcp.reader import ChunkQueue, Job, StreamCount, TcpRead, Window
from tensorhub.transport.tcp.settings import TcpSettings
from tensorhub.transport.tcp.wire import HEADER, VERSION, Hello, Refusal, Vanished, Welcome
from tensorhub.transport.threads import Thread

from . import kit
from .conftest import Make, Spawn, Tcp, line
from .kit import DEADLINE_S, MIB, Gate, Target, content, framed, full, greeting, nested, read_all, start_read

CHUNK = 4096


# -- sources that are not what they should be --------------------------------------------------------------------------


@contextmanager
def fake_source(*words: bytes) -> Iterator[str]:
    """A listener that says this to each reader, hears it out and hangs up."""
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
FALSE: list[tuple[list[bytes], str]] = [
    ([b"HTTP/1.1 400 Bad Request\r\n\r\n"], "protocol"),
    ([b"SSH-2.0"], "closed"),
    ([greeting(Welcome(7, CHUNK, 2 * CHUNK), version=VERSION + 1)], f"version {VERSION}"),
    ([greeting(Hello("", "k", 0, 5000, True))], "Welcome or Refusal"),
    ([greeting(Refusal("an unheard-of code", "a reason of tomorrow"))], "a reason of tomorrow"),
    ([greeting(Refusal("busy", "\x1b]0;owned\x07\nWARNING all is well"))], "\\x1b]0;owned\\x07\\nWARNING"),
    ([greeting(Refusal("busy", "x" * 5_000))], "5000 characters"),
    ([greeting(["\x1b[2J", 1])], "\\x1b[2J"),
    ([greeting(nested("welcome", 7, CHUNK, 2 * CHUNK))], "malformed"),
    ([WELCOME], "closed"),
    ([WELCOME, HEADER.pack(tcp_wire.MANIFEST, MAX_MANIFEST_BYTES + 1, 0)], "limit"),
    ([WELCOME, HEADER.pack(tcp_wire.CHUNK, CHUNK, 0), bytes(CHUNK)], "manifest"),
    ([greeting(Welcome(7, CHUNK, 2**63)), MANIFEST], "expected"),
    *(
        ([WELCOME, MANIFEST, *words], says)
        for words, says in (
            ([], "closed"),
            ([framed(tcp_wire.GONE, Refusal("gone", "a\u202eb"))], "a\\u202eb"),
            ([HEADER.pack(tcp_wire.CHUNK, CHUNK, 1), bytes(CHUNK)], "chunk 1"),
            ([HEADER.pack(tcp_wire.CHUNK, CHUNK - 1, 0), bytes(CHUNK)], "were due"),
            ([HEADER.pack(tcp_wire.CHUNK, 2**32 - 1, 0), bytes(CHUNK)], "were due"),
            ([HEADER.pack(77, 0, 0)], "frame 77"),
            ([HEADER.pack(tcp_wire.WAITING, 8, 0)], "keepalive"),
            ([HEADER.pack(tcp_wire.GONE, 2**31, 0)], "limit"),
            ([HEADER.pack(tcp_wire.GONE, 1, 0) + b"\xc1"], "malformed"),
            ([framed(tcp_wire.GONE, nested("refusal", "gone", "a reason"))], "malformed"),
            ([HEADER.pack(tcp_wire.CHUNK, CHUNK, 0), bytes(CHUNK // 2)], "closed"),
        )
    ),
]


@pytest.mark.parametrize("is_native", [True, False])
def test_a_false_source_is_lost_and_writes_nothing_wrong(tcp: Tcp, is_native: bool) -> None:
    reader, right = tcp(streams=1), content(2 * CHUNK)
    for words, says in FALSE:
        with fake_source(*words) as endpoint:
            target = Target(right, CHUNK, gates=None if is_native else {1: Gate()})
            error = read_all(reader, endpoint, "k", target)
        assert isinstance(error, SourceLost)
        assert says in str(error)
        assert str(error).isprintable()
        assert target.order == []
        assert not any(target.buffer)


# -- the queue and the window ------------------------------------------------------------------------------------------


@given(st.integers(0, 200), st.integers(1, 5), st.lists(st.integers(0, 40), min_size=1))
def test_the_queue_gives_each_chunk_once_and_in_order(count: int, streams: int, sizes: list[int]) -> None:
    queue = ChunkQueue(range(count), streams)
    given_out: list[int] = []
    for size in sizes:
        taken = queue.take(size)
        assert len(taken) <= size
        given_out.extend(taken)
    while taken := queue.take(1000):
        given_out.extend(taken)
    assert given_out == list(range(count))
    assert len(ChunkQueue(range(10), 3).take(10)) == 4, "something is left for the other streams at the end"


def test_the_window_grows_while_chunks_come_soon_and_shrinks_when_they_are_late() -> None:
    window = Window(TcpSettings(), 4 << 20)
    assert window.chunks == 2
    for took_s, rounds, chunks in ((0.01, 10, 16), (0.3, 1, 16), (5.0, 10, 2)):  # 64 MiB of chunks of 4 MiB
        for _ in range(rounds):
            window.adjust(took_s)
        assert window.chunks == chunks


@pytest.mark.usefixtures("no_collector")
def test_a_dial_that_comes_too_late_holds_nothing() -> None:
    """The last chunk is in before a further stream has connected: with busy processors that is every other read."""

    def dial_late() -> "weakref.ref[Target]":
        with socket.create_server(("127.0.0.1", 0)) as server:
            target = Target(content(8), 8)
            job = Job(TcpSettings(), f"tcp://127.0.0.1:{server.getsockname()[1]}", "k", target)
            job.finish()
            with pytest.raises(Vanished, match="cut"):
                dial(job, 0)
        return weakref.ref(target)

    assert dial_late()() is None


# -- how many streams --------------------------------------------------------------------------------------------------


NEAR = TcpSettings(probe_s=1.0)
LOOK_S = 0.05  # so often news come


def counts(count: StreamCount, rate_of: Callable[[int, float], float], for_s: float) -> list[int]:
    """How many streams there are from look to look, on a path that gives so many bytes a second to so many streams."""
    now, arrived, found = 100.0, 0.0, [count.streams]
    while now < 100.0 + for_s:
        arrived += LOOK_S * rate_of(count.streams, now - 100.0)
        now += LOOK_S
        streams = count.look(now, int(arrived))
        if streams != found[-1]:
            found.append(streams)
    return found


def each_gets(limit: float, link: float = 1e12) -> Callable[[int, float], float]:
    return lambda streams, _now: min(streams * limit, link)


@pytest.mark.parametrize(
    ("first", "settings", "cores", "rate_of", "for_s", "found"),
    [
        *(
            (1, NEAR, 64, each_gets(6.2e8, link), 8.0, range(end + 1))
            for link, end in ((1e12, 8), (2.6e9, 4), (7e8, 1))
        ),
        (1, NEAR, 64, each_gets(1e8), 100.0, [1]),  # what is slow inside a site is never doubted
        (4, NEAR.across_sites(), 64, each_gets(3e7), 20.0, [4, 8]),  # across sites all is tried
        (1, NEAR, 64, each_gets(1e12, link=8e8), 100.0, [1, 2] * 4 + [1]),  # in vain: again after 8, 16, 32 windows
        (1, NEAR, 2, each_gets(3e9), 20.0, [1, 2]),  # held up by their cores: no more than those
        (1, NEAR, 2, each_gets(6e8), 20.0, [1, 2, 4, 8]),
        (1, NEAR, 64, lambda streams, now: streams * 6e8 if now < 10.0 else 1e8, 30.0, [1, 2, 4, 8, 1]),
    ],
)
def test_there_are_as_many_streams_as_bring_more(
    first: int,
    settings: TcpSettings,
    cores: int,
    rate_of: Callable[[int, float], float],
    for_s: float,
    found: list[int] | range,
) -> None:
    history = counts(StreamCount(settings, first, cores=cores), rate_of, for_s)
    assert history[-1] == found[-1] if isinstance(found, range) else history == found


def test_what_the_read_has_decided_is_measured_anew_and_each_address_keeps_its_stream() -> None:
    count = StreamCount(NEAR, 1, cores=64)
    count.look(100.0, 0)
    count.look(101.0, int(6e8))
    assert count.streams == 2
    count.set(4)
    assert count.look(102.0, int(6e8)) == 4, "nothing came, while streams came"
    assert count.look(103.0, int(3e9)) == 8, "it is compared with no rate before"
    count = StreamCount(NEAR, 1, cores=64, least=3)
    count.set(3)
    for at in range(8):
        assert count.look(100.0 + at, at * 1000) == 3, "a slow link, but there are three of them"


@pytest.mark.parametrize(
    ("settings", "connections"),
    [
        ({"streams": 4, "stream_rate_bytes_per_s": 1e18}, 1),  # the first is not fast enough to have another
        ({"streams": 4, "stream_rate_bytes_per_s": 1e-6}, 4),
        ({"streams": 4, "stream_rate_bytes_per_s": 0}, 4),
        ({"streams": 2, "far_streams": 3, "stream_rate_bytes_per_s": 1e18}, 3),  # a long path: all at once
    ],
)
@pytest.mark.parametrize("is_native", [True, False])
def test_further_streams_are_opened_where_the_first_is_not_enough(
    tcp: Tcp, settings: dict[str, float], connections: int, is_native: bool
) -> None:
    right = content(8 * MIB)
    source, reader, progress = tcp(), tcp(stream_bytes=MIB, most_streams=1, **settings), Progress(32)
    progress.mark_all(range(8))
    source.export(Export("k", b"", MIB // 4, kit.Pieces(right), progress))
    target = Target(right, MIB // 4, gates=None if is_native else {31: Gate()})
    target.is_cross_site = "far_streams" in settings
    for gate in target._gates.values():
        gate.release.set()
    read, ended = start_read(reader, source.endpoint, "k", target)
    assert target.progress.wait(7, DEADLINE_S)
    kit.until(lambda: source.statistics()["connections_accepted"] == connections, "the streams are there")
    assert read.path.startswith(f"{connections} stream")
    progress.mark_all(range(8, 32))
    assert ended.wait() is None
    assert target.buffer == right
    assert source.statistics()["connections_accepted"] == connections


@pytest.mark.parametrize("is_native", [True, False])
def test_streams_come_and_go_as_is_judged(tcp: Tcp, is_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """How it is judged is shown above: here no busy processor has a say in it."""
    wanted = 4
    monkeypatch.setattr(StreamCount, "look", lambda *_: wanted)
    right = content(4000 * CHUNK)
    source, reader, progress = tcp(), tcp(streams=1, most_streams=4, ahead_bytes=2 * CHUNK), Progress(4000)
    source.export(Export("k", b"", CHUNK, kit.Pieces(right), progress))
    target = Target(right, CHUNK, gates=None if is_native else {4000: Gate()})
    read, ended = start_read(reader, source.endpoint, "k", target)
    assert isinstance(read, TcpRead)
    there = 0

    def are_open(count: int) -> bool:
        nonlocal there
        progress.mark(there)  # it is judged while chunks come
        there = min(there + 1, 3900)
        return source.statistics()["connections_open"] == count

    kit.until(lambda: are_open(4), "three more streams are there")
    wanted = 1
    kit.until(lambda: are_open(1), "those that are too many have ended")
    assert not ended.event.is_set()
    progress.mark_all(range(4000))
    assert ended.wait() is None
    assert target.buffer == right
    assert read.streams == 1


def test_further_streams_take_half_of_the_room_at_most(tcp: Tcp) -> None:
    right = content(8 * MIB)
    gate = Gate()
    source, readers = tcp(max_connections=4), [tcp(streams=4) for _ in range(3)]
    source.export(full("k", right, MIB // 4))
    target = Target(right, MIB // 4, gates=dict.fromkeys(range(32), gate))  # each stays
    _, first = start_read(readers[0], source.endpoint, "k", target)
    assert gate.reached.wait(DEADLINE_S)
    kit.until(lambda: source.statistics()["connections_refused"] >= 2, "further streams find no room")
    for reader in readers[1:]:
        assert read_all(reader, source.endpoint, "k", Target(right, MIB // 4)) is None
    gate.release.set()
    assert first.wait() is None
    assert target.buffer == right


# -- whatever keeps a further stream from joining in, the first one brings all -----------------------------------------


COUNT, READY, SIZE = 8, 5, 64 * 1024
several = pytest.mark.parametrize(
    "kind", ["tcp-3", "tcp-lending-2", "local-3", "pretended-nixl-2", "nixl-3"], indirect=True
)
two = pytest.mark.parametrize("kind", ["tcp-3", "local-3"], indirect=True)


def is_in_reading(name: str, *, further: bool) -> bool:
    """A thread of that name reads; as a further stream, if that is asked for."""
    return "-read-" in name and not (further and name.endswith("-read-0"))


def half_of(make: Make, right: bytearray) -> tuple[str, Progress]:
    """A source that has the first chunks; the others are marked by the test."""
    source, progress = make(1.0), Progress(COUNT)
    progress.mark_all(range(READY))
    source.export(Export("k", b"manifest", SIZE, kit.Pieces(right), progress))
    return source.endpoint, progress


def is_left_to_the_first(read: Read) -> bool:
    """Further streams were started, and have ended. (Or all of it has, which is not wanted.)"""
    assert isinstance(read, TcpRead)
    return len(read._threads) > 1 and read._running <= 1


def read_by_one(make: Make, endpoint: str, right: bytearray, have_rest: Callable[[], object]) -> Read:
    """All of it, of which the last chunks come to be there when no further stream is left."""
    target = Target(right, SIZE)
    read, ended = start_read(make(1.0), endpoint, "k", target)
    kit.until(lambda: is_left_to_the_first(read), "no further stream is left")
    have_rest()
    assert ended.wait() is None
    assert target.buffer == right
    return read


@pytest.mark.processes
@two
@pytest.mark.parametrize("how", [None, signal.SIGSTOP, signal.SIGKILL])
def test_a_source_without_room_for_all_connections(make: Make, spawn: Spawn, how: signal.Signals | None) -> None:
    """Its kernel takes in further streams, and it never can: they get no answer. Where it is gone the first notices."""
    source, right = spawn("source", COUNT * SIZE, SIZE, READY, 1.0), content(COUNT * SIZE)
    endpoint = line(source)
    kit.leave_one_descriptor(source)
    if how is None:
        assert source.stdin is not None
        stdin = source.stdin
        read_by_one(make, endpoint, right, lambda: (stdin.write("\n"), stdin.flush()))
        return
    read, ended = start_read(make(1.0), endpoint, "k", Target(right, SIZE))
    assert isinstance(read, TcpRead)
    kit.until(lambda: len(read.job._wires) > 1, "a further stream has begun to join in")
    os.kill(source.pid, how)
    error = ended.wait()
    assert isinstance(error, SourceLost)
    assert endpoint in str(error)


@several
def test_a_source_that_may_start_no_thread_for_them(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, served = Thread.start, []

    def limited(thread: Thread) -> None:
        if thread.name.endswith("-serve"):
            served.append(thread.name)
            if len(served) > 1:
                raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(Thread, "start", limited)
    right = content(COUNT * SIZE)
    endpoint, progress = half_of(make, right)
    read_by_one(make, endpoint, right, lambda: progress.mark_all(range(READY, COUNT)))
    assert len(served) > 1


@several
def test_a_reader_without_a_descriptor_for_them(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    class Limited(socket.socket):
        def __init__(self, *arguments: object, **named: object) -> None:
            if is_in_reading(threading.current_thread().name, further=True):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            super().__init__(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "socket", Limited)
    right = content(COUNT * SIZE)
    endpoint, progress = half_of(make, right)
    read_by_one(make, endpoint, right, lambda: progress.mark_all(range(READY, COUNT)))


@pytest.mark.parametrize("kind", ["pretended-nixl-2"], indirect=True)
def test_a_thread_that_nixl_does_not_connect(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = kit._pretended_nixl()

    def without(call: Callable[..., int]) -> Callable[..., int]:
        def answer(*arguments: object) -> int:
            is_further = is_in_reading(threading.current_thread().name, further=True)
            return int(fake.NIXL_IN_PROG) if is_further else call(*arguments)

        return answer

    for name in ("postXferReq", "getXferStatus"):
        monkeypatch.setattr(fake.nixlAgent, name, without(getattr(fake.nixlAgent, name)))
    right = content(COUNT * SIZE)
    endpoint, progress = half_of(make, right)
    read = read_by_one(make, endpoint, right, lambda: progress.mark_all(range(READY, COUNT)))
    assert read.path.startswith("NIXL/UCX: shared memory")
