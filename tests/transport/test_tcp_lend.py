"""Memory that is lent to a socket may change before its reader has it. What must hold then, and when it is not lent."""

import resource
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from tensorhub.protocol.errors import CorruptTransfer, SourceLost
from tensorhub.transport.base import Export, Progress
from tensorhub.transport.tcp import wire as tcp_lend
from tensorhub.transport.tcp import wire as tcp_wire
from tensorhub.transport.tcp.addresses import parse_endpoint
from tensorhub.transport.tcp.server import TcpServer
from tensorhub.transport.tcp.settings import TcpSettings
from tensorhub.transport.tcp.transport import TcpTransport
from tensorhub.transport.tcp.wire import Hello, Wire

from . import kit

pytestmark = pytest.mark.skipif(not tcp_lend.IS_THERE, reason="vmsplice is a call of Linux")

CHUNK = 64 * 1024
SETTINGS = TcpSettings(streams=1, lend_rate_bytes_per_s=0, lend_piece_bytes=1)


class Pair:
    """A source that lends and a reader, in one process."""

    def __init__(self) -> None:
        self.made: list[TcpTransport] = []
        self.source = self.transport(SETTINGS)
        self.reader = self.transport(SETTINGS)
        self.memory = kit.content(8 * CHUNK)
        self.right = bytes(self.memory)
        self.stream = kit.Pieces(self.memory)
        self.source.export(Export("k", b"manifest", CHUNK, self.stream, Progress(8, complete=True)))

    def transport(self, settings: TcpSettings) -> TcpTransport:
        self.made.append(TcpTransport(settings))
        return self.made[-1]

    def read(self, target: kit.Target) -> kit.Ended:
        ended = kit.Ended()
        self.read_of = self.reader.read(self.source.endpoint, "k", target, ended)
        return ended

    def target(self, **options: object) -> kit.Target:
        return kit.Target(bytearray(self.right), CHUNK, **options)  # type: ignore[arg-type]

    def await_lent(self, chunks: int) -> None:
        kit.until(lambda: self.source.statistics()["lent_bytes"] >= chunks * CHUNK, f"{chunks} chunks are lent")

    def await_counted(self, what: str, count: int) -> None:
        """A source counts after it has sent, so its reader may have ended before."""
        kit.until(lambda: self.source.statistics()[what] >= count, f"{count} of {what} are counted")
        assert self.source.statistics()[what] == count

    def spoil(self, chunk: int) -> None:
        """The owner writes over a chunk."""
        self.memory[chunk * CHUNK] ^= 0xFF


@pytest.fixture
def pair(nothing_left_behind: None) -> Iterator[Pair]:
    pair = Pair()
    yield pair
    for transport in pair.made:
        transport.close()


def test_what_is_lent_arrives_and_is_said(pair: Pair) -> None:
    target = pair.target()
    assert pair.read(target).wait() is None
    assert target.buffer == pair.right
    pair.await_counted("lent_bytes", len(pair.right))
    assert pair.read_of.path.removesuffix(", native") == "1 stream, zero copy"


def test_to_a_reader_that_checks_nothing_nothing_is_lent(pair: Pair) -> None:
    target = pair.target()
    target.is_checking = False
    assert pair.read(target).wait() is None
    assert target.buffer == pair.right
    assert pair.source.statistics()["lent_bytes"] == 0


def test_a_lent_chunk_that_changed_on_its_way_is_asked_for_again(pair: Pair) -> None:
    """The reader stands still at chunk 0 while chunk 1 is in its socket, and its owner writes to it for a moment."""
    first, second = kit.Gate(), kit.Gate()
    target = pair.target(wanted=[0, 1, 2], gates={0: first, 1: second})
    ended = pair.read(target)
    assert first.reached.wait(kit.DEADLINE_S)
    pair.await_lent(2)
    pair.spoil(1)
    first.release.set()
    assert second.reached.wait(kit.DEADLINE_S)
    pair.spoil(1)  # as it was
    second.release.set()
    assert ended.wait() is None
    assert target.order == [0, 2, 1]
    assert target.buffer[: 3 * CHUNK] == pair.right[: 3 * CHUNK]
    pair.await_counted("sent_bytes", 4 * CHUNK)
    assert pair.source.statistics()["lent_bytes"] <= 3 * CHUNK, "the second time it is copied"


def test_a_source_whose_bytes_are_wrong_is_found_out_by_the_copy(pair: Pair) -> None:
    pair.spoil(3)
    target = pair.target()
    error = pair.read(target).wait()
    assert isinstance(error, CorruptTransfer)
    assert 3 not in target.order
    assert pair.source.statistics()["sent_bytes"] <= len(pair.right) + CHUNK


def test_who_lends_what_it_was_asked_to_copy_is_corrupt(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or else a source that does not listen would be asked for ever."""
    pair.spoil(3)
    monkeypatch.setattr(TcpServer, "heard", lambda *_: None)
    target = pair.target()
    error = pair.read(target).wait()
    assert isinstance(error, CorruptTransfer)
    assert 3 not in target.order
    assert pair.source.statistics()["sent_bytes"] <= len(pair.right) + CHUNK


def test_a_farewell_is_read_though_the_source_hears_no_more(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """It withdrew, its owner wrote over what it had lent, and it was cut off: its reader says why all the same."""
    progress, gate, send_want = Progress(8), kit.Gate(), Wire.send_want
    pair.source.export(Export("k", b"manifest", CHUNK, pair.stream, progress))
    progress.mark(0)
    progress.mark(1)

    def refuse(wire: Wire, chunks: Sequence[int], number: int = 0) -> None:
        if number == tcp_wire.COPIED:
            raise tcp_wire.Vanished("broken pipe")
        send_want(wire, chunks, number)

    monkeypatch.setattr(Wire, "send_want", refuse)
    target = pair.target(wanted=range(4), gates={0: gate})
    ended = pair.read(target)
    assert gate.reached.wait(kit.DEADLINE_S)
    pair.await_lent(2)
    pair.spoil(1)
    progress.fail("its own source was lost")
    gate.release.set()
    assert isinstance(error := ended.wait(), SourceLost)
    assert "its own source was lost" in str(error)
    assert target.order == [0]


def test_a_reader_that_takes_nothing_of_what_is_lent_is_dropped(pair: Pair) -> None:
    source = pair.transport(replace(SETTINGS, silence_s=0.1))
    source.export(kit.full("k", bytearray(64 * kit.MIB), kit.MIB))
    with socket.create_connection(parse_endpoint(source.endpoint)[0]) as sock:
        wire = Wire(sock, source.settings)
        wire.send_greeting(Hello("", "k", 0, 5000, wants_manifest=False, is_checking=True))
        wire.send_want(range(64))
        kit.until(lambda: source.statistics()["lent_bytes"] > 0, "it is lent to")
        kit.until(lambda: source.statistics()["connections_open"] == 0, "it was dropped")
    assert source.statistics()["connections_dropped"] == 1, "by us, before the kernel loses its patience"


def test_a_withdrawal_waits_until_the_reader_has_what_was_lent(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader stands still for a while; then it takes what is in its socket, all of it right, and hears why."""
    source, gate, progress = pair.source, kit.Gate(), Progress(8)
    source._server._settings = replace(SETTINGS, withdraw_grace_s=kit.DEADLINE_S)
    source.export(Export("k", b"manifest", CHUNK, pair.stream, progress))
    for chunk in range(3):
        progress.mark(chunk)
    target = pair.target(gates={0: gate})
    ended = pair.read(target)
    assert gate.reached.wait(kit.DEADLINE_S)
    pair.await_lent(3)
    awaited, withdrawn, await_return = threading.Event(), threading.Event(), Wire.await_return

    def note(wire: Wire, within_s: float) -> None:
        awaited.set()
        await_return(wire, within_s)

    monkeypatch.setattr(Wire, "await_return", note)

    def withdraw() -> None:
        assert source.withdraw("k", timeout_s=kit.DEADLINE_S)
        pair.memory[:] = bytes(len(pair.memory))  # from here on it is another version's
        withdrawn.set()

    leaving = threading.Thread(target=withdraw, daemon=True)
    leaving.start()
    assert awaited.wait(kit.DEADLINE_S), "it has said farewell"
    assert not withdrawn.is_set()
    gate.release.set()
    assert withdrawn.wait(kit.DEADLINE_S)
    assert isinstance(ended.wait(), SourceLost)
    assert target.order == [0, 1, 2], "all that was lent was taken"
    assert target.buffer[: 3 * CHUNK] == pair.right[: 3 * CHUNK]
    leaving.join(kit.DEADLINE_S)


def test_a_reader_that_stands_still_is_cut_off_and_takes_nothing_wrong(pair: Pair) -> None:
    gate = kit.Gate()
    target = pair.target(gates={0: gate})
    ended = pair.read(target)
    assert gate.reached.wait(kit.DEADLINE_S)
    pair.await_lent(2)
    assert pair.source.withdraw("k", timeout_s=kit.DEADLINE_S)
    pair.memory[:] = bytes(len(pair.memory))
    gate.release.set()
    assert isinstance(error := ended.wait(), SourceLost), error
    for chunk in target.order:
        assert target.buffer[chunk * CHUNK : (chunk + 1) * CHUNK] == pair.right[chunk * CHUNK : (chunk + 1) * CHUNK]


def test_without_a_pipe_everything_is_copied(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_lend, "LEAST_PIPE_BYTES", 1 << 30)
    target = pair.target()
    assert pair.read(target).wait() is None
    assert target.buffer == pair.right
    assert pair.source.statistics()["lent_bytes"] == 0


def test_where_descriptors_are_scarce_none_goes_into_a_pipe(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (kit.open_files(), 1 << 20))
    target = pair.target()
    assert pair.read(target).wait() is None
    assert target.buffer == pair.right
    assert pair.source.statistics()["lent_bytes"] == 0


def test_many_pieces_at_odd_addresses(pair: Pair) -> None:
    memory = kit.content(8 * CHUNK + 77)
    stream = kit.Pieces(memory, 5003)
    pair.source.export(Export("odd", b"manifest", CHUNK, stream, Progress(9, complete=True)))
    target, ended = kit.Target(bytearray(memory), CHUNK, piece_bytes=3001), kit.Ended()
    pair.reader.read(pair.source.endpoint, "odd", target, ended)
    assert ended.wait() is None
    assert target.buffer == memory
    pair.await_counted("lent_bytes", len(memory))
