"""The small parts of the tcp transport, each alone: settings, endpoints, queue, the window ahead, the wire's bytes."""

import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub.protocol.errors import UsageError
from tensorhub.transport.base import Progress
from tensorhub.transport.tcp.addresses import advertised_endpoint, dial, format_endpoint, parse_endpoint
from tensorhub.transport.tcp.reader import ChunkQueue, Job, Window
from tensorhub.transport.tcp.server import Conversation, Served, TcpServer
from tensorhub.transport.tcp.settings import TcpSettings
from tensorhub.transport.tcp.wire import Silent, Vanished, Wire, as_ranges

from . import kit
from .kit import DEADLINE_S, Target, content


@pytest.mark.parametrize(("host", "port"), [("10.0.0.7", 41234), ("::1", 1), ("node-3.example", 65535)])
def test_an_endpoint_survives_the_way(host: str, port: int) -> None:
    assert parse_endpoint(format_endpoint((host, port))) == ((host, port),)


@pytest.mark.parametrize(
    ("host", "advertise", "endpoint"),
    [
        ("127.0.0.1", None, "tcp://127.0.0.1:7"),
        ("0.0.0.0", "10.0.0.7", "tcp://10.0.0.7:7"),
        ("0.0.0.0", "gate.example:99", "tcp://gate.example:99"),
        ("::", "[fd00::1]", "tcp://[fd00::1]:7"),
        ("::", "[fd00::1]:99", "tcp://[fd00::1]:99"),
    ],
)
def test_advertised_endpoint(host: str, advertise: str | None, endpoint: str) -> None:
    assert advertised_endpoint(TcpSettings(host=host, advertise=advertise), [7]) == endpoint


def test_a_wildcard_is_never_advertised() -> None:
    ((host, port),) = parse_endpoint(advertised_endpoint(TcpSettings(host="0.0.0.0"), [7]))
    assert host != "0.0.0.0"
    assert port == 7


@pytest.mark.parametrize("wrong", [{"silence_s": 0}, {"streams": 0}, {"max_connections": -1}, {"ahead_bytes": 0}])
def test_settings_that_make_no_sense(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        TcpSettings(**wrong)  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 50)))
def test_ranges_keep_the_chunks_and_their_order(chunks: list[int]) -> None:
    ranges = as_ranges(chunks)
    assert [chunk for start, stop in ranges for chunk in range(start, stop)] == chunks
    assert all(stop != start for (_, stop), (start, _) in pairwise(ranges))


@given(st.integers(0, 200), st.integers(1, 5), st.lists(st.integers(0, 40), min_size=1))
def test_claims_give_each_chunk_once_and_in_order(count: int, streams: int, sizes: list[int]) -> None:
    queue = ChunkQueue(range(count), streams)
    given_out: list[int] = []
    for size in sizes:
        taken = queue.take(size)
        assert len(taken) <= size
        given_out.extend(taken)
    while taken := queue.take(1000):
        given_out.extend(taken)
    assert given_out == list(range(count))


def test_claims_leave_something_for_the_other_streams_at_the_end() -> None:
    assert len(ChunkQueue(range(10), 3).take(10)) == 4


def test_ahead_grows_while_chunks_come_soon_and_shrinks_when_they_are_late() -> None:
    window = Window(TcpSettings(), 4 << 20)
    assert window.chunks == 2
    for _ in range(10):
        window.adjust(0.01)
    assert window.chunks == 16, "64 MiB of chunks of 4 MiB"
    window.adjust(0.3)
    assert window.chunks == 16
    for _ in range(10):
        window.adjust(5.0)
    assert window.chunks == 2


@pytest.fixture
def wires() -> Iterator[tuple[Wire, Wire]]:
    left, right = socket.socketpair()
    pair = Wire(left, TcpSettings()), Wire(right, TcpSettings())
    yield pair
    for wire in pair:
        wire.close()


@given(st.lists(st.integers(0, 3000), max_size=40), st.lists(st.integers(0, 3000), max_size=40))
def test_bytes_arrive_however_they_are_cut(sent: list[int], received: list[int]) -> None:
    total = min(sum(sent), sum(received))
    right = content(total)
    left_socket, right_socket = socket.socketpair()
    left, other = Wire(left_socket, TcpSettings()), Wire(right_socket, TcpSettings())
    buffer = bytearray(total)
    sender = threading.Thread(target=left.send, args=(_cut(memoryview(right), sent),))
    sender.start()
    other.receive_into(_cut(memoryview(buffer), received))
    sender.join(DEADLINE_S)
    left.close()
    other.close()
    assert buffer == right


@pytest.mark.parametrize("how", ["one view", "several"])
def test_what_has_come_of_a_chunk_under_way_is_seen(wires: tuple[Wire, Wire], how: str) -> None:
    source, reader = wires
    buffer = bytearray(1000)
    job = Job(TcpSettings(), "tcp://x:1", "k", Target(bytes(1000), 1000))
    job.enter(reader)

    def receive() -> None:
        match how:
            case "one view":
                reader.receive_into([memoryview(buffer)])
            case _:
                reader.receive_into([memoryview(buffer)[:300], memoryview(buffer)[300:]])

    thread = threading.Thread(target=receive)
    thread.start()
    source.send([memoryview(b"x" * 400)])
    kit.until(lambda: job.arrived_bytes == 400, "the part that has come is counted")
    assert job.received_bytes == 0
    source.send([memoryview(b"x" * 600)])
    thread.join(DEADLINE_S)
    job.leave(reader)
    assert job.arrived_bytes == 1000


def _cut(view: memoryview, sizes: list[int]) -> list[memoryview]:
    parts = []
    for size in sizes:
        parts.append(view[:size])
        view = view[size:]
    return [*parts, view]


def test_views_of_other_items_than_bytes(wires: tuple[Wire, Wire]) -> None:
    numbers = memoryview(bytearray(64)).cast("d", (2, 4))
    wires[0].send_frame(3, 1, [numbers])
    assert wires[1].receive_header() == (3, 64, 1)
    buffer = bytearray(64)
    wires[1].receive_into([memoryview(buffer).cast("I")])


def test_a_wait_ends_by_the_limit_or_by_a_cut(wires: tuple[Wire, Wire]) -> None:
    wires[0].limit_waits(receive_s=0.05, send_s=0.05)
    with pytest.raises(Silent):
        wires[0].receive_header()
    with pytest.raises(Silent):
        wires[0].send([bytes(1 << 26)])
    wires[1].limit_waits(receive_s=DEADLINE_S, send_s=DEADLINE_S)
    cutter = threading.Thread(target=wires[1].cut)
    cutter.start()
    with pytest.raises(Vanished):
        wires[1].receive_into([memoryview(bytearray(1 << 27))])  # more than was sent above
    cutter.join(DEADLINE_S)


def test_progress_wakes_a_waiter_that_gave_up() -> None:
    progress, gave_up, result = Progress(2), threading.Event(), []
    waiter = threading.Thread(target=lambda: result.append(progress.wait(1, DEADLINE_S, gave_up.is_set)))
    waiter.start()
    progress.mark(0)
    gave_up.set()
    progress.wake()
    waiter.join(DEADLINE_S)
    assert result == [False]


LEAVERS = """
import signal, socket, sys
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
sys.path.insert(0, sys.argv[1])
import kit
from tensorhub.transport.base import Export
from tensorhub.transport.tcp.server import Conversation
from tensorhub.transport.base import Progress
from tensorhub.transport.tcp.transport import TcpTransport
from tensorhub.transport.tcp.addresses import parse_endpoint
from tensorhub.transport.tcp.wire import Hello, Wire
source = TcpTransport()
source.export(Export("k", b"m", 1 << 20, kit.Pieces(kit.content(16 << 20)), Progress(16, complete=True)))
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


@pytest.mark.usefixtures("no_collector")
def test_a_peer_that_takes_nothing_leaves_nothing_behind() -> None:
    right = content(8 << 20)
    memory = Target(right, 8)

    def send() -> "weakref.ref[Wire]":
        ours, theirs = socket.socketpair()
        wire = Wire(ours, TcpSettings())
        wire.limit_waits(receive_s=0.05, send_s=0.05)
        with pytest.raises(Silent):
            wire.send([memory.stream.view])
        wire.close()
        theirs.close()
        return weakref.ref(wire)

    assert send()() is None


class Moving:
    """As the native mover's part of a connection. While it is counted, another connection begins, or tries to."""

    sent_bytes = 5

    def __init__(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.meanwhile = meanwhile

    def run(self) -> str:
        return "it has ended"

    def add_to(self, counts: dict[str, int]) -> None:
        self.meanwhile()
        counts["sent_bytes"] += self.sent_bytes


def test_connections_may_begin_and_end_while_others_are_counted(
    wires: tuple[Wire, Wire], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, (first, second) = TcpServer(TcpSettings()), wires
    served, ended = cast(Served, SimpleNamespace(sent_bytes=0)), []
    other = threading.Thread(
        target=lambda: ended.append(server.serve_natively(second, served, cast(Conversation, Moving()))), daemon=True
    )

    def begin() -> None:
        if not other.ident:
            other.start()
            other.join(0.2)  # it waits for its turn, or else has begun and ended by now

    try:
        monkeypatch.setitem(server._moving, first, cast(Conversation, Moving(begin)))
        assert server.statistics()["sent_bytes"] == 5
        other.join(5)
        assert ended == ["it has ended"]
    finally:
        monkeypatch.undo()
        server.close()
