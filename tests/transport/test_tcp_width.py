"""How many streams a read has: as many as bring more, on paths that limit each stream, all of them, or none."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from tensorhub.transport.tcp import reader as tcp_reader
from tensorhub.transport.tcp.addresses import format_endpoint, parse_endpoint
from tensorhub.transport.tcp.reader import StreamCount, TcpRead
from tensorhub.transport.tcp.settings import TcpSettings
from tensorhub.transport.tcp.transport import TcpTransport

from . import kit
from .kit import MIB, Target, content, full, start_read

NEAR = TcpSettings(probe_s=1.0)
FAR = NEAR.across_sites()
LOOK_S = 0.05  # so often news come
CREDIT_S = 0.05  # a link makes up for so much time in which nobody sent


def widths(width: StreamCount, rate_of: Callable[[int, float], float], for_s: float) -> list[int]:
    """How many streams there are from look to look, on a path that gives so many bytes a second to so many streams."""
    now, arrived, found = 100.0, 0.0, [width.streams]
    while now < 100.0 + for_s:
        arrived += LOOK_S * rate_of(width.streams, now - 100.0)
        now += LOOK_S
        streams = width.look(now, int(arrived))
        if streams != found[-1]:
            found.append(streams)
    return found


def each_gets(limit: float, link: float = 1e12) -> Callable[[int, float], float]:
    return lambda streams, _now: min(streams * limit, link)


@pytest.mark.parametrize(
    ("link", "in_the_end"),
    [(1e12, 8), (5.5e9, 8), (2.6e9, 4), (1.3e9, 2), (0.9e9, 2), (0.7e9, 1)],
)
def test_it_widens_as_long_as_that_brings_more(link: float, in_the_end: int) -> None:
    width = StreamCount(NEAR, 1, cores=64)
    widths(width, each_gets(6.2e8, link), 8.0)
    assert width.streams == in_the_end


def test_what_is_slow_inside_a_site_is_never_doubted() -> None:
    assert widths(StreamCount(NEAR, 1, cores=64), each_gets(1e8), 100.0) == [1]


def test_across_sites_everything_is_tried() -> None:
    assert widths(StreamCount(FAR, 4, cores=64), each_gets(3e7), 20.0) == [4, 8]


def test_a_trial_in_vain_is_taken_back_and_repeated_more_and_more_rarely() -> None:
    found = widths(StreamCount(NEAR, 1, cores=64), each_gets(1e12, link=8e8), 100.0)
    assert found == [1, 2] * 4 + [1]  # after 8, 16, 32 windows


def test_streams_that_are_held_up_by_their_cores_are_no_more_than_those() -> None:
    assert widths(StreamCount(NEAR, 1, cores=2), each_gets(3e9), 20.0) == [1, 2]
    assert widths(StreamCount(NEAR, 1, cores=2), each_gets(6e8), 20.0) == [1, 2, 4, 8]


def test_a_path_that_has_become_slow_gets_one_stream_again() -> None:
    found = widths(StreamCount(NEAR, 1, cores=64), lambda streams, now: streams * 6e8 if now < 10.0 else 1e8, 30.0)
    assert found == [1, 2, 4, 8, 1]


def test_what_somebody_else_has_decided_is_measured_anew() -> None:
    width = StreamCount(NEAR, 1, cores=64)
    width.look(100.0, 0)
    width.look(101.0, int(6e8))
    assert width.streams == 2
    width.set(4)
    assert width.look(102.0, int(6e8)) == 4, "nothing came, while streams came"
    assert width.look(103.0, int(3e9)) == 8, "it is compared with no rate before"


# -- real streams, through a path that limits each of them, or all together -----------------------------------------


class Limit:
    """So many bytes a second for all who share it."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def wait(self, size_bytes: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - CREDIT_S) + size_bytes / self._bytes_per_s
            pause_s = self._free_at - now
        time.sleep(max(0.0, pause_s))  # this is the link: it takes so long


@contextmanager
def link_to(endpoint: str, limit_of: Callable[[], Limit]) -> Iterator[str]:
    """A proxy to that source; each connection has the limit that it is given."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        threads: list[threading.Thread] = []

        def run(work: Callable[[], None]) -> None:
            threads.append(threading.Thread(target=work))
            threads[-1].start()

        def carry(one: socket.socket, other: socket.socket, limit: Limit | None) -> None:
            with suppress(OSError):
                while data := one.recv(1 << 16):
                    if limit is not None:
                        limit.wait(len(data))
                    other.sendall(data)
            for end in (one, other):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    reader, _ = listener.accept()
                    source = socket.create_connection(parse_endpoint(endpoint)[0])
                    for end in (reader, source):
                        stack.callback(end.close)
                    limit = limit_of()
                    run(lambda reader=reader, source=source: carry(reader, source, None))  # type: ignore[misc]
                    run(lambda reader=reader, source=source, limit=limit: carry(source, reader, limit))  # type: ignore[misc]

        run(accept)
        try:
            yield format_endpoint(("127.0.0.1", listener.getsockname()[1]))
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()


@pytest.mark.usefixtures("mover")
@pytest.mark.parametrize("is_gain", [True, False], ids=["each trial is worth it", "each trial is in vain"])
def test_streams_come_and_go_as_is_judged(is_gain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """How it is judged is shown above: here no busy processor has a say in it."""
    monkeypatch.setattr(tcp_reader, "GAIN", 0.0 if is_gain else 1e9)
    right = content(48 * MIB)
    settings = TcpSettings(most_streams=4, probe_rate_bytes_per_s=1.0, probe_s=0.2, stream_rate_bytes_per_s=1e18)
    source, reader = TcpTransport(TcpSettings()), TcpTransport(settings)
    shared, opened = Limit(2e7), 0

    def limit() -> Limit:
        nonlocal opened
        opened += 1
        return Limit(1e7) if is_gain else shared

    try:
        source.export(full("k", right, MIB // 4))
        with link_to(source.endpoint, limit) as endpoint:
            target = Target(right, MIB // 4)
            read, ended = start_read(reader, endpoint, "k", target)
            assert ended.wait() is None
            assert target.buffer == right
            assert read.received_bytes == len(right)
            assert opened == 4 if is_gain else opened >= 2
            assert is_gain or (isinstance(read, TcpRead) and read.streams in (1, 2))
        kit.until(lambda: source.statistics()["connections_open"] == 0, "everybody has left")
    finally:
        reader.close()
        source.close()


def test_further_streams_take_half_of_the_room_at_most() -> None:
    right = content(8 * MIB)
    gate = kit.Gate()
    source = TcpTransport(TcpSettings(max_connections=4))
    readers = [TcpTransport(TcpSettings(streams=4, stream_bytes=1024, stream_rate_bytes_per_s=0)) for _ in range(3)]
    try:
        source.export(full("k", right, MIB // 4))
        target = Target(right, MIB // 4, gates=dict.fromkeys(range(32), gate))  # who has one does not leave before
        _, first = start_read(readers[0], source.endpoint, "k", target)
        assert gate.reached.wait(kit.DEADLINE_S)
        kit.until(lambda: source.statistics()["connections_refused"] >= 2, "further streams find no room")
        for reader in readers[1:]:
            assert kit.read_all(reader, source.endpoint, "k", Target(right, MIB // 4)) is None
        gate.release.set()
        assert first.wait() is None
    finally:
        for transport in (*readers, source):
            transport.close()
