"""Reads over tcp: false sources, the chunk queue, how many streams a read has, and streams that cannot join in."""

import errno
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from tensorhub.protocol.errors import SourceLost
from tensorhub.transport.base import MAX_MANIFEST_BYTES, Export, Progress, Read
from tensorhub.transport.tcp import wire as tcp_wire
from tensorhub.transport.tcp.reader import StreamCount, TcpRead
from tensorhub.transport.tcp.settings import TcpSettings
from tensorhub.transport.tcp.wire import HEADER, VERSION, Hello, Refusal, Welcome
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


@pytest.mark.parametrize(
    ("settings", "connections", "is_native"),
    [
        ({"streams": 4, "stream_rate_bytes_per_s": 1e18}, 1, True),  # the first is not fast enough to have another
        ({"streams": 4, "stream_rate_bytes_per_s": 1e-6}, 4, False),
        ({"streams": 2, "far_streams": 3, "stream_rate_bytes_per_s": 1e18}, 3, True),  # a long path: all at once
    ],
)
def test_further_streams_are_opened_where_the_first_is_not_enough(
    tcp: Tcp, settings: dict[str, float], connections: int, is_native: bool
) -> None:
    right = content(8 * MIB)
    source, reader, progress = tcp(), tcp(stream_bytes=MIB, max_streams=1, **settings), Progress(32)
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
    source, reader, progress = tcp(), tcp(streams=1, max_streams=4, ahead_bytes=2 * CHUNK), Progress(4000)
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


def is_in_reading(name: str, *, further: bool) -> bool:
    """A thread of that name reads; as a further stream, if that is asked for."""
    return "-read-" in name and not (further and name.endswith("-read-0"))


def is_left_to_the_first(read: Read) -> bool:
    """Further streams were started, and have ended. (Or all of it has, which is not wanted.)"""
    assert isinstance(read, TcpRead)
    return len(read._threads) > 1 and read._running <= 1


def read_by_one(make: Make, endpoint: str, right: bytearray, have_rest: Callable[[], object]) -> None:
    """All of it, of which the last chunks come to be there when no further stream is left."""
    target = Target(right, SIZE)
    read, ended = start_read(make(1.0), endpoint, "k", target)
    kit.until(lambda: is_left_to_the_first(read), "no further stream is left")
    have_rest()
    assert ended.wait() is None
    assert target.buffer == right


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *(("tcp-3", how) for how in (None, signal.SIGKILL)),
        *(pytest.param("local-3", how, marks=pytest.mark.long) for how in (None, signal.SIGSTOP, signal.SIGKILL)),
    ],
    indirect=["kind"],
)
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


class NoDescriptor(socket.socket):
    """None is left for a further stream."""

    def __init__(self, *arguments: object, **named: object) -> None:
        if is_in_reading(threading.current_thread().name, further=True):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        super().__init__(*arguments, **named)  # type: ignore[arg-type]


def no_thread(begin: Callable[[Thread], None], served: list[str]) -> Callable[[Thread], None]:
    def limited(thread: Thread) -> None:
        if thread.name.endswith("-serve"):
            served.append(thread.name)
            if len(served) > 1:
                raise RuntimeError("can't start new thread")
        begin(thread)

    return limited


def unless_further(call: Callable[..., int], instead: int) -> Callable[..., int]:
    return lambda *given: instead if is_in_reading(threading.current_thread().name, further=True) else call(*given)


@pytest.mark.parametrize(
    ("kind", "lacking"),
    [
        ("tcp-3", "thread at the source"),
        ("local-3", "descriptor"),
        ("pretended-nixl-2", "NIXL connection"),
    ],
    indirect=["kind"],
)
def test_a_further_stream_that_cannot_join_in_leaves_all_to_the_first(
    make: Make, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacking == "descriptor":
        monkeypatch.setattr(socket, "socket", NoDescriptor)
    elif lacking == "thread at the source":
        monkeypatch.setattr(Thread, "start", no_thread(Thread.start, []))
    else:
        fake = kit._pretended_nixl()
        for name in ("postXferReq", "getXferStatus"):
            call = unless_further(getattr(fake.nixlAgent, name), int(fake.NIXL_IN_PROG))
            monkeypatch.setattr(fake.nixlAgent, name, call)
    right, source, progress = content(COUNT * SIZE), make(1.0), Progress(COUNT)
    progress.mark_all(range(READY))
    source.export(Export("k", b"manifest", SIZE, kit.Pieces(right), progress))
    read_by_one(make, source.endpoint, right, lambda: progress.mark_all(range(READY, COUNT)))
