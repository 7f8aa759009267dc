"""The transport `cuda` through rings: memory that cannot be shared, and another device (`stand_in.py`).

The contract's tests run here as they are; then what rings promise besides.
"""

import threading
from collections.abc import Iterator, Sequence

import pytest

from tensorhub.protocol.errors import SourceLost, TransportMissing
from tensorhub.transport import cuda
from tensorhub.transport.base import Export, Progress
from tensorhub.transport.cuda import PINNED, RING, SLOTS, CudaServer, CudaStream, CudaTransport
from tensorhub.transport.tcp import wire as tcp_wire
from tensorhub.transport.tcp.wire import Wire

from . import kit, test_contract
from .conftest import Make, offered
from .kit import DEADLINE_S, MIB, Target, content, full, read_all, stand_in, start_read

CHUNK = 64 * 1024
RINGS = {"cuda-stand-in-ring": "a ring on the device", "cuda-stand-in-pinned": "pinned memory"}

test_everything_arrives = test_contract.test_everything_arrives
test_a_chain_of_sources = test_contract.test_chain_of_sources_that_are_themselves_filling
test_several_reads_at_once = test_contract.test_several_readers_at_once_and_a_slow_one_disturbs_no_other
test_how_a_source_that_waits_ends = test_contract.test_a_source_that_waits_and_fails_or_withdraws_says_why
test_stop_ends_a_read_without_error = test_contract.test_stop_ends_a_read_without_error
test_no_write_after_the_end = test_contract.test_no_write_after_the_end
test_nothing_grows_over_many_reads = test_contract.test_nothing_grows_over_many_reads
test_memory_that_cannot_be_read = test_contract.test_memory_that_cannot_be_read_is_the_sources_fault_and_only_this_reads


@pytest.fixture(params=["cuda-stand-in-ring"])
def kind(request: pytest.FixtureRequest) -> kit.Kind:
    return kit.KINDS[request.param]


@pytest.fixture(autouse=True)
def no_ring_is_left(nothing_left_behind: None) -> Iterator[None]:
    yield
    for hooks in (stand_in.during_copy, stand_in.during_fill):
        hooks.clear()
    kit.until(lambda: not stand_in.rings, "every ring is closed")


def feeds(source: object) -> int:
    assert isinstance(source, CudaTransport)
    server = source._server
    assert isinstance(server, CudaServer)
    return len(server._feeds)


@pytest.mark.parametrize("kind", list(RINGS), indirect=True)
def test_a_read_says_which_way_it_goes_and_gives_its_ring_back(make: Make, kind: kit.Kind) -> None:
    right = content(16 * CHUNK)
    source, reader = make(), make()
    stream = kit.Pieces(right)
    for key in ("a", "b"):
        source.export(Export(key, b"manifest", CHUNK, stream, Progress(16, complete=True)))
        target = Target(right, CHUNK)
        read, ended = start_read(reader, source.endpoint, key, target)
        assert ended.wait() is None
        assert target.buffer == right
        assert RINGS[kind.name] in read.path
        kit.until(lambda: feeds(source) == 0 and not stand_in.rings, "its ring is given back")


def test_a_slot_is_filled_while_another_is_read_and_never_before_it_was(make: Make) -> None:
    right, source, reader = offered(make, 64 * CHUNK, CHUNK)
    filled: list[int] = []
    release = threading.Event()
    stand_in.during_fill.append(lambda start, view: filled.append(start))
    stand_in.during_copy.append(lambda start, view: release.wait(DEADLINE_S))
    target = Target(right, CHUNK)
    _, ended = start_read(reader, source.endpoint, "k", target)
    kit.until(lambda: len(filled) == SLOTS, "the source goes on while the reader copies")
    assert not target.order
    release.set()
    assert ended.wait() is None
    assert target.buffer == right
    assert len(filled) == 8, "a slot has an eighth of what is read"


def test_rings_of_all_readers_have_a_limit(make: Make) -> None:
    source = make()
    assert isinstance(source, CudaTransport)
    server, export = source._server, full("k", kit.memory(64 * MIB), MIB)
    assert isinstance(server, CudaServer)
    for room, size in ((64 * MIB, 16 * MIB), (16 * MIB, 8 * MIB), (2 * MIB, 2 * MIB)):
        ring = server._make_ring(export, RING, room)
        assert ring.size_bytes == size
        ring.close()
    with pytest.raises(TransportMissing, match="have all of their"):
        server._make_ring(export, RING, 2 * MIB - 1)


def test_a_reader_hears_from_a_source_that_is_busy_with_another_ring(make: Make) -> None:
    right, source, reader = offered(make, CHUNK, CHUNK, 0.4)
    assert isinstance(source, CudaTransport)
    assert isinstance(source._server, CudaServer)
    with source._server._feeding:
        _, ended = start_read(reader, source.endpoint, "k", Target(right, CHUNK))
        assert not ended.event.wait(1.0), "more than twice the silence limit"
    assert ended.wait() is None


def test_a_reader_may_take_its_time_to_open(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    right, source, reader = offered(make, CHUNK, CHUNK, 0.3)
    release, open_ring = threading.Event(), stand_in.open_ring

    def slow(handle: bytes, size_bytes: int) -> object:
        assert release.wait(DEADLINE_S)
        return open_ring(handle, size_bytes)

    monkeypatch.setattr(stand_in, "open_ring", slow)
    _, ended = start_read(reader, source.endpoint, "k", Target(right, CHUNK))
    assert not ended.event.wait(0.6), "twice as long as a stranger may take"
    release.set()
    assert ended.wait() is None


def test_a_device_without_room_for_a_ring_takes_pinned_memory_or_leaves_the_way_to_others(make: Make) -> None:
    right, source, reader = offered(make, 3 * CHUNK, CHUNK)
    stand_in.cannot.add("ring")
    read, ended = start_read(reader, source.endpoint, "k", Target(right, CHUNK))
    assert ended.wait() is None
    assert "pinned memory" in read.path
    stand_in.cannot.add("pin")
    error = read_all(make(), source.endpoint, "k", Target(right, CHUNK))
    assert isinstance(error, TransportMissing)
    for reason in ("cannot be shared", "device is full", "can be pinned"):
        assert reason in str(error)


def test_what_is_in_a_slot_when_it_is_withdrawn_does_not_count(make: Make) -> None:
    right = content(64 * CHUNK)
    memory = kit.copy_of(right)
    source, reader = make(60.0), make(60.0)
    source.export(full("k", memory, CHUNK))
    filled: list[int] = []
    stand_in.during_fill.append(lambda start, view: filled.append(start))
    gate = kit.Gate()
    target = Target(right, CHUNK, gates={0: gate})
    _, ended = start_read(reader, source.endpoint, "k", target)
    assert gate.reached.wait(DEADLINE_S)
    kit.until(lambda: len(filled) == SLOTS + 1, "the slots behind it are filled")
    assert source.withdraw("k", timeout_s=DEADLINE_S)
    memory[:] = b"\xee" * len(memory)
    gate.release.set()
    assert isinstance(ended.wait(), SourceLost)
    assert len(filled) == SLOTS + 1
    assert target.order == list(range(8)), "one slot was read before"


@pytest.mark.parametrize("end", ["withdrawn", "closed"])
def test_a_ring_outlives_its_connection_until_the_reader_has_copied(
    make: Make, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(tcp_wire, "LINGER_S", 0.0)
    right, source, reader = offered(make, 64 * CHUNK, CHUNK, 60.0)
    is_copying, may_end = threading.Event(), threading.Event()

    def copying(start: int, view: memoryview) -> None:
        is_copying.set()
        may_end.wait(DEADLINE_S)

    stand_in.during_copy.append(copying)
    _, ended = start_read(reader, source.endpoint, "k", Target(right, CHUNK))
    assert is_copying.wait(DEADLINE_S)
    if end == "withdrawn":
        source.withdraw("k", timeout_s=DEADLINE_S)
    else:
        source.close()
    kit.until(lambda: feeds(source) == 0, "the source's thread has left")
    assert len(stand_in.rings) == 2, "both ends have the ring open"
    may_end.set()
    assert isinstance(ended.wait(), SourceLost)


# -- peers that break the rules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("more", "why"), [(8, "in a slot of"), (100, "not all of them are due")])
def test_a_source_that_announces_more_than_a_slot_has(
    make: Make, monkeypatch: pytest.MonkeyPatch, more: int, why: str
) -> None:
    right, source, reader = offered(make, 64 * CHUNK, CHUNK)
    announce = CudaServer.announce

    def lie(self: CudaServer, wire: Wire, start: int, stop: int) -> None:
        announce(self, wire, start, stop + more)

    monkeypatch.setattr(CudaServer, "announce", lie)
    target = Target(right, CHUNK)
    error = read_all(reader, source.endpoint, "k", target)
    assert isinstance(error, SourceLost)
    assert why in str(error)
    assert not target.order


@pytest.mark.parametrize("off", [-1, 1 << 62])
def test_a_reader_that_has_read_what_it_cannot_have(make: Make, monkeypatch: pytest.MonkeyPatch, off: int) -> None:
    right, source, reader = offered(make, 64 * CHUNK, CHUNK)

    def lie(self: CudaStream, chunks: Sequence[int]) -> None:
        self.wire.send_want(chunks, 0 if chunks else off % (1 << 64))

    monkeypatch.setattr(CudaStream, "ask", lie)
    error = read_all(reader, source.endpoint, "k", Target(right, CHUNK))
    assert isinstance(error, SourceLost)
    assert "B were read" in str(error)
    monkeypatch.undo()
    assert read_all(reader, source.endpoint, "k", Target(right, CHUNK)) is None, "the source goes on"


@pytest.mark.parametrize("opened", [RING, PINNED + 1, 1 << 60])
def test_a_reader_that_takes_a_way_that_is_none(make: Make, monkeypatch: pytest.MonkeyPatch, opened: int) -> None:
    right, source, reader = offered(make, CHUNK, CHUNK)
    send = Wire.send_frame

    def lie(self: Wire, kind: int, number: int = 0, payload: Sequence[bytes | memoryview] = ()) -> None:
        send(self, kind, opened if (kind, number) == (cuda.OPEN, cuda.OPENED) else number, payload)

    monkeypatch.setattr(Wire, "send_frame", lie)
    error = read_all(reader, source.endpoint, "k", Target(right, CHUNK))
    assert isinstance(error, SourceLost)
    assert "where OPEN was due" in str(error)


@pytest.mark.parametrize(("slot_bytes", "slots"), [(0, 2), (CHUNK, 0), (1 << 63, 2), (CHUNK, 1 << 40), (1 << 30, 4)])
def test_a_ring_that_cannot_be(make: Make, monkeypatch: pytest.MonkeyPatch, slot_bytes: int, slots: int) -> None:
    right, source, reader = offered(make, CHUNK, CHUNK)

    class Lie:
        size = cuda.SIZES.size
        unpack_from = cuda.SIZES.unpack_from

        @staticmethod
        def pack(*_: int) -> bytes:
            return cuda_sizes.pack(slot_bytes, slots)

    cuda_sizes = cuda.SIZES
    monkeypatch.setattr(cuda, "SIZES", Lie)
    error = read_all(reader, source.endpoint, "k", Target(right, CHUNK))
    assert isinstance(error, SourceLost)
    assert "malformed handles" in str(error)
