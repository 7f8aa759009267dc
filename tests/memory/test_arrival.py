"""Fills of a device through host memory: each chunk is judged where it lies, once it is there."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import xxhash

from tensorhub.memory.digests import build_manifest
from tensorhub.memory.fill import FillSink
from tensorhub.memory.registration import Registration, register
from tensorhub.memory.streams import StagedStream, StagingRing
from tensorhub.protocol.errors import (
    CorruptTransfer,
    SessionLost,
    TensorHubError,
)
from tensorhub.protocol.manifest import Manifest
from tensorhub.transport.base import Export, Progress
from tensorhub.transport.native import load
from tensorhub.transport.tcp.settings import TcpSettings
from tensorhub.transport.tcp.transport import TcpTransport

from .kit import FakeDevice, image_of, scatter

CHUNK, COUNT = 1000, 8
SIZES = [("cuda:0", 2500), ("cpu", 200), ("cuda:0", CHUNK * COUNT - 2700)]  # chunk 2 is partly on the host
WAIT_S = 20.0


class Hashing(StagedStream):
    """Memory of a stand-in for a device, which hashes. `before_digest` sees it with chunks in place, and not judged."""

    def __init__(self) -> None:
        self.device = FakeDevice(SIZES)
        super().__init__(self.device.pieces, self.device, StagingRing(CHUNK, 2 * COUNT))
        for memory in self.device.memory:
            memory[:] = 0
        self.calls: list[list[int]] = []
        self.fails = False
        self.before_digest: Callable[[Sequence[int]], object] = lambda chunks: None

    def hashes(self, start: int, stop: int) -> bool:
        return True

    def device_digests(self, chunk_bytes: int) -> list[tuple[range, bytes]]:
        raise NotImplementedError("what arrives is hashed by chunks")

    def device_digests_of(self, chunk_bytes: int, chunks: Sequence[int]) -> dict[int, bytes]:
        assert chunk_bytes == CHUNK
        self.calls.append(sorted(chunks))
        self.before_digest(chunks)
        image = self.device.image
        digests = {it: xxhash.xxh3_128_digest(image[it * CHUNK : (it + 1) * CHUNK]) for it in chunks if it != 2}
        return {} if self.fails else digests

    def flip(self, at: int) -> None:
        piece = next(piece for piece in self.device.pieces if piece.start <= at < piece.stop)
        self.device.memory[self.device.pieces.index(piece)][at - piece.start] ^= 1


@pytest.fixture
def source() -> Registration:
    rng = np.random.default_rng(11)
    return register({f"t{at}": rng.integers(0, 256, size, np.uint8) for at, (_, size) in enumerate(SIZES)})


@pytest.fixture
def manifest(source: Registration) -> Manifest:
    return build_manifest(source, CHUNK)


@pytest.fixture
def stream() -> Hashing:
    return Hashing()


@pytest.fixture
def sink(source: Registration, manifest: Manifest, stream: Hashing) -> FillSink:
    return FillSink(replace(source, stream=stream, pieces=()), manifest.root())


def place(source: Registration, sink: FillSink, chunk: int) -> None:
    """What a transport does before `stored`."""
    data = image_of(source)[chunk * CHUNK : (chunk + 1) * CHUNK]
    with sink.stream.views_to_write(chunk * CHUNK, (chunk + 1) * CHUNK) as views:
        scatter(data, views)
        sink.accept(chunk, views)


@pytest.fixture
def tcp(request: pytest.FixtureRequest, source: Registration, manifest: Manifest) -> Iterator[list[TcpTransport]]:
    """A reader, and two sources; these lend their memory if the test says so."""
    lends = TcpSettings(lend_rate_bytes_per_s=0, lend_piece_bytes=1) if request.param else TcpSettings()
    one_after_another = replace(lends, streams=1, stream_bytes=1, stream_rate_bytes_per_s=0, ahead_bytes=2 * CHUNK)
    transports = [TcpTransport(one_after_another) for _ in range(3)]
    for each in transports[1:]:
        done = Progress(COUNT, complete=True)
        each.export(Export("k", manifest.encode(), CHUNK, source.stream, done))
    yield transports
    for each in transports:
        each.close()


def read(reader: TcpTransport, endpoint: str, sink: FillSink) -> TensorHubError | None:
    errors: list[TensorHubError | None] = []
    ended = threading.Event()

    def on_end(error: TensorHubError | None) -> None:
        errors.append(error)
        ended.set()

    reader.read(endpoint, "k", sink, on_end)
    assert ended.wait(WAIT_S)
    return errors[0]


@pytest.mark.parametrize("fails", [False, True], ids=["hashed by the device", "read back by the host"])
@pytest.mark.parametrize("tcp", [False, True], ids=["copied", "lent"], indirect=True)
@pytest.mark.parametrize("chunk", [2, 5], ids=["partly on the host", "on the device"])
def test_a_byte_that_flips_after_its_arrival_is_found_over_tcp(
    tcp: list[TcpTransport],
    request: pytest.FixtureRequest,
    source: Registration,
    sink: FillSink,
    stream: Hashing,
    chunk: int,
    fails: bool,
) -> None:
    flips = [chunk]

    def flip(chunks: Sequence[int]) -> None:
        if flips and chunk in chunks:
            stream.flip(flips.pop() * CHUNK)

    stream.before_digest, stream.fails = flip, fails
    reader, first, second = tcp
    error = read(reader, first.endpoint, sink)
    assert flips == []
    is_lent = first.statistics()["lent_bytes"] > 0
    assert is_lent == (request.node.callspec.params["tcp"] and load.library() is not None)
    if not is_lent:  # else it has asked the same source for a copy: the memory that was lent may have changed
        assert isinstance(error, CorruptTransfer)
        assert f"chunk {chunk} (bytes {chunk * CHUNK} to" in str(error)
        assert not sink.progress.has(chunk)
        error = read(reader, second.endpoint, sink)
    assert error is None
    assert sink.progress.is_complete
    assert stream.device.image == image_of(source)


def test_nothing_counts_after_a_revoke_while_the_device_hashes(
    source: Registration, manifest: Manifest, sink: FillSink, stream: Hashing
) -> None:
    sink.begin(manifest.encode())
    stream.before_digest = lambda chunks: sink.revoke(SessionLost("told to stop"))
    place(source, sink, 0)
    with pytest.raises(SessionLost, match="told to stop"):
        sink.stored(0)
    assert not sink.progress.has(0)


def test_what_the_hardware_puts_in_place_is_judged_there(
    source: Registration, manifest: Manifest, sink: FillSink, stream: Hashing
) -> None:
    sink.begin(manifest.encode())
    for chunk in (3, 2):
        with sink.stream.views_to_write(chunk * CHUNK, (chunk + 1) * CHUNK) as views:
            scatter(image_of(source)[chunk * CHUNK : (chunk + 1) * CHUNK], views)
        stream.before_digest = lambda chunks: stream.flip(chunks[0] * CHUNK)  # and back
        with pytest.raises(CorruptTransfer, match=f"chunk {chunk} "):
            sink.take(range(chunk, chunk + 1), None)
        assert not sink.progress.has(chunk)
        sink.take(range(chunk, chunk + 1), None)
        assert sink.progress.has(chunk)
