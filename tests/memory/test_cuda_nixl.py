"""CUDA tensors by NIXL, as far as that can be known without a device: with a NIXL and with devices that only pretend.

What runs here is ours, from the registered pieces to the last chunk; what is copied, the pretended NIXL copies, and
only between memory that was registered as what it is. Nothing here tells that a real device would agree.
"""

from collections.abc import Callable, Iterator, Sequence

import pytest

from tensorhub.memory.digests import digest
from tensorhub.memory.streams import StagedStream, StagingRing
from tensorhub.protocol.errors import CorruptTransfer, SourceLost
from tensorhub.protocol.manifest import chunk_count
from tensorhub.transport.base import Export, Progress
from tensorhub.transport.nixl import agent
from tensorhub.transport.nixl.agent import Facts
from tensorhub.transport.nixl.transport import NixlSettings, NixlTransport
from transport import kit

from . import nixl_fake
from .kit import FakeDevice

Make = Callable[[], NixlTransport]
CHUNK = 1000
ALL_DEVICE = [("cuda:0", 3300), ("cuda:0", 1), ("cuda:1", 2500), ("cuda:0", 777)]
MIXED = [("cuda:0", 1500), ("cpu", 900), ("cuda:1", 10), ("cpu", 5), ("cuda:0", 4096)]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(agent, "facts", lambda tls="": Facts("this host", (), ""))
    made: list[NixlTransport] = []

    def one() -> NixlTransport:
        made.append(NixlTransport(NixlSettings(thread_bytes=1024, silence_s=2.0), bindings=nixl_fake))
        return made[-1]

    yield one
    for transport in made:
        transport.close()


class Devices(FakeDevice):
    """Pretended devices, and their memory as a worker registers it."""

    def __init__(self, sizes: Sequence[tuple[str, int]]) -> None:
        super().__init__(sizes)
        self.ring = StagingRing(slot_bytes=CHUNK, slot_count=8)
        self.stream = StagedStream(self.pieces, self, self.ring)

    def clear(self) -> "Devices":
        for memory in self.memory:
            memory[:] = 0
        return self

    def export(self) -> Export:
        progress = Progress(chunk_count(self.stream.size_bytes, CHUNK), complete=True)
        return Export("k", b"manifest", CHUNK, self.stream, progress)


class Sink(kit.Target):
    """Of memory on pretended devices."""

    def __init__(self, devices: Devices, right: bytes) -> None:
        super().__init__(bytearray(right), CHUNK)
        self.stream = devices.stream  # type: ignore[assignment]

    def accept(self, chunk: int, views: Sequence[memoryview]) -> None:
        if digest(views) != self.digests[chunk]:
            raise CorruptTransfer(f"chunk {chunk}")


def read(reader: NixlTransport, source: NixlTransport, sink: Sink) -> tuple[object, str]:
    found, ended = kit.start_read(reader, source.endpoint, "k", sink)
    return ended.wait(), found.path


@pytest.mark.parametrize("target", [ALL_DEVICE, MIXED])
def test_device_memory_is_registered_as_what_it_is(target: list[tuple[str, int]], make: Make) -> None:
    devices, transport = Devices(target), make()
    region = transport._agents.current().region(devices.stream)
    assert region is not None
    assert sum(place.size_bytes for place in region.places) == devices.stream.size_bytes
    by_kind = {one.kind: one.descriptors for one in region.lists}
    assert {device for _, _, device in by_kind["VRAM"]} == {0, 1}, "as CUDA counts them"
    assert ("DRAM" in by_kind) == (target is MIXED)


@pytest.mark.parametrize(("source", "path"), [(ALL_DEVICE, "CUDA IPC"), (MIXED, "CUDA IPC and shared memory (cma)")])
def test_from_device_to_device_without_a_copy_on_the_host(source: list[tuple[str, int]], path: str, make: Make) -> None:
    """The target's devices are cut otherwise than the source's. Only what the judge looks at is copied to the host."""
    ours = Devices(source)
    total = ours.stream.size_bytes
    target = Devices([("cuda:1", total - 1234), ("cuda:0", 1234)]).clear()
    one, other, sink = make(), make(), Sink(target, ours.image)
    one.export(ours.export())
    error, way = read(other, one, sink)
    assert error is None
    assert target.image == ours.image
    assert sorted(sink.order) == list(range(chunk_count(total, CHUNK)))
    assert ours.copied_bytes == {"to_host": 0, "to_device": 0}, "the source does nothing"
    assert target.copied_bytes == {"to_host": total, "to_device": 0}
    assert target.ring.free_count == 8
    assert way == f"NIXL/UCX: {path}, 2 threads"


def test_a_chunk_that_came_wrong_is_not_stored(make: Make) -> None:
    ours, target = Devices(ALL_DEVICE), Devices(ALL_DEVICE).clear()
    one, other, sink = make(), make(), Sink(target, ours.image)
    export = ours.export()
    ours.memory[2][100] ^= 1  # chunk 3: changed after it was published
    one.export(export)
    error, _ = read(other, one, sink)
    assert isinstance(error, CorruptTransfer)
    assert 3 not in sink.order


def test_what_is_read_after_the_withdrawal_does_not_count_on_devices_either(make: Make) -> None:
    ours, target = Devices(ALL_DEVICE), Devices(ALL_DEVICE).clear()
    one, other = make(), make()
    one.export(ours.export())

    class Withdrawing(Sink):
        def accept(self, chunk: int, views: Sequence[memoryview]) -> None:
            super().accept(chunk, views)
            one.withdraw("k", timeout_s=0.0)
            for memory in ours.memory:
                memory[:] = 0xEE

    sink = Withdrawing(target, ours.image)
    error, _ = read(other, one, sink)
    assert isinstance(error, SourceLost), "not corrupt: nothing of what came later was judged"
    assert len(sink.order) <= 2, "one for each thread"
