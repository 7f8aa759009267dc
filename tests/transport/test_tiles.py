"""Reads of pieces, over every transport: what comes is what plain indexing says, and nothing else is touched."""

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from tensorhub.memory.streams import host_view
from tensorhub.protocol.errors import CorruptTransfer, HostMemoryFull, SessionLost, SourceLost, TransportMissing
from tensorhub.reshard import copies
from tensorhub.reshard.plan import Source
from tensorhub.reshard.read import Across
from tensorhub.reshard.wire import TiledShard
from tensorhub.transport.base import Transport
from tensorhub.transport.local import transport as local_transport
from tensorhub.transport.native import load, reads
from tensorhub.transport.nixl import transport as nixl_transport
from tensorhub.transport.ranges import COUNT, COUNTS, ROW_WORDS, RUN, Room, Rows
from tensorhub.transport.tcp.settings import TcpSettings
from tensorhub.transport.tcp.transport import TcpTransport

from . import kit
from .conftest import Make
from .kit import DEADLINE_S
from .tiles_kit import (
    COLUMNS,
    ROWS,
    Columns,
    Reading,
    across_for,
    columns,
    cuts_of,
    drawn,
    exported,
    half_of,
    on_device,
    read_all,
    sources_of,
    transposed,
)
from .tiles_kit import sources_of as sources_of_cuts

SEEDS = 4


@pytest.fixture(params=kit.TILES)
def kind(request: pytest.FixtureRequest) -> kit.Kind:
    """One of each way."""
    found = kit.KINDS[request.param]
    if why_not := found.why_not():
        pytest.skip(why_not)
    return found


@pytest.fixture(params=[False, True], ids=["", "fetched"])
def is_fetched(request: pytest.FixtureRequest, kind: kit.Kind, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a reader that can fetch fetches short runs as well, which it would rather be sent."""
    if request.param and ("tcp" in kind.name or kind.is_on_device):
        pytest.skip("only where a reader can fetch, and need not")
    if request.param:
        monkeypatch.setattr(local_transport, "SENT_BELOW_BYTES", 0)
        monkeypatch.setattr(nixl_transport, "SENT_BELOW_BYTES", 0)
    return bool(request.param)


def check_read(
    source: Transport, reader: Transport, drawn: Columns, cuts: Sequence[TiledShard], *, batch_bytes: int
) -> None:
    """All that the reader wants comes, and nothing else of its memory is touched."""
    model, publisher, target, grid = drawn
    for number, (shard, cut) in enumerate(zip(publisher, cuts, strict=True)):
        exported(source, str(number), shard, cut)
    before = target.outside()
    sources = sources_of(cuts)
    across = across_for(target, grid, sources, batch_bytes=batch_bytes)
    read_all(across, sources, reader, [source.endpoint] * len(sources))
    assert not target.wrong(model)
    assert all((one == other).all() for one, other in zip(target.outside(), before, strict=True))
    for number in range(len(publisher)):
        assert source.withdraw(str(number), timeout_s=kit.DEADLINE_S)


@pytest.mark.usefixtures("is_fetched")
@pytest.mark.parametrize("is_known", [True, False], ids=["cut", "uncut"])
def test_any_layout_from_any_layout(make: Make, is_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    source, reader = make(), make()
    for seed in range(SEEDS):
        chance = Random(seed)
        monkeypatch.setattr(copies, "SHORT_BYTES", (0, 12, 64)[seed % 3])  # what goes straight, and what is turned
        columns = drawn(chance, is_known=is_known)
        cuts = cuts_of(columns.publisher, columns.grid)
        check_read(source, reader, columns, cuts, batch_bytes=chance.choice((1, 100, 1 << 20)))


@pytest.mark.usefixtures("is_fetched")
@pytest.mark.parametrize("is_here", [True, False], ids=["here", "there"])
def test_what_lies_transposed_at_one_end(make: Make, is_here: bool) -> None:
    columns = transposed(301, 77, is_here=is_here)
    cuts = cuts_of(columns.publisher, columns.grid)
    across = across_for(columns.reader, columns.grid, sources_of(cuts))
    orders = [tile_sink._order for tile_sink in across.tile_sinks(sources_of(cuts))]
    is_turned = any(order.scatter.first_reorder_row[-1] for order in orders)
    assert is_turned is not is_here, "for its digest what comes in another order is gone through in that of the tile"
    check_read(make(), make(), columns, cuts, batch_bytes=1 << 20)


@pytest.mark.parametrize("who", ["source", "reader", "both"])
def test_also_where_memory_must_be_entered_block_by_block(make: Make, kind: kit.Kind, who: str) -> None:
    """A device's: what is written between two runs would be what the staging ring happened to hold."""
    if kind.is_on_device:
        pytest.skip("there all of it is on a device")
    if "local" in kind.name and who != "reader":
        pytest.skip("what has no addresses is not served by this transport")
    if kind.name.startswith("nixl") and who != "reader":
        pytest.skip("a real NIXL cannot be told of a device that is none")
    source, reader = make(), make()
    for seed in range(SEEDS):
        chance = Random(seed)
        columns = drawn(chance, is_known=bool(seed % 2))
        _, publisher, target, grid = columns
        cuts = cuts_of(publisher, grid)
        if who != "reader":
            for shard in publisher:
                shard.registration = on_device(shard.registration)
        if who != "source":
            target.registration = on_device(target.registration)
        check_read(source, reader, columns, cuts, batch_bytes=chance.choice((1, 100, 1 << 20)))


BATCH = 64 * 1024


def fetch_all(monkeypatch: pytest.MonkeyPatch, from_bytes: int) -> None:
    """Runs of so many bytes and more are fetched, where the transport can fetch."""
    for module in (local_transport, nixl_transport):
        monkeypatch.setattr(module, "SENT_BELOW_BYTES", from_bytes)


@pytest.fixture(params=["short", "long"])
def found(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Columns:
    """With runs that a reader who can fetch would rather be sent, and with runs that it fetches."""
    fetch_all(monkeypatch, COLUMNS if request.param == "short" else 0)
    return columns()


class Scene:
    """Two sources that have the same, and a fill that reads from the first."""

    def __init__(self, found: Columns, source: Transport, reader: Transport) -> None:
        self.found, self.source, self.reader = found, source, reader
        self.cuts = cuts_of(found.publisher, found.grid)
        self.sources = sources_of_cuts(self.cuts)
        self.across: Across = across_for(found.reader, found.grid, self.sources, batch_bytes=BATCH)

    def export(self, number: int, **options: object) -> None:
        exported(self.source, str(number), self.found.publisher[number], self.cuts[number], **options)

    def read(self, number: int) -> Reading:
        """All that is missing, from that source."""
        source: Source = self.sources[number]
        (tile_sink,) = self.across.tile_sinks([source])
        return Reading(self.across, tile_sink, self.reader, self.source.endpoint, str(number))

    def finish(self) -> None:
        """What is missing comes from the other one, and then all of it is right."""
        self.export(1)
        if self.across.missing:
            assert self.read(1).wait() is None
        assert self.across.missing == 0
        assert self.across.progress.is_complete
        assert not self.found.reader.wrong(self.found.model)


def test_a_source_that_is_filling_sends_what_it_has(make: Make, found: Columns) -> None:
    scene = Scene(found, make(0.4), make(0.4))  # and it says often enough that it waits
    progress = half_of(found.publisher[0])
    scene.export(0, progress=progress)
    reading = scene.read(0)
    half = len(scene.across.tiles) // 2
    kit.until(lambda: scene.across.missing == half, "half of it is there")
    assert not reading.ended.event.wait(1.2), "a source that waits is not a silent one"
    for chunk in range(progress.chunk_count // 2, progress.chunk_count):
        progress.mark(chunk)
    assert reading.wait() is None
    assert scene.across.missing == 0
    assert not found.reader.wrong(found.model)


@pytest.mark.long
def test_withdraw_under_load_again_and_again(make: Make, found: Columns) -> None:
    source, reader = make(), make()
    right = found.publisher[0].arrays["w"].copy()
    for trial in range(4):
        scene = Scene(found, source, reader)
        scene.export(0)
        reading = scene.read(0)
        enough = trial * BATCH
        kit.until(lambda: reading.read.received_bytes >= enough or reading.ended.event.is_set(), "some of it has come")  # noqa: B023
        assert source.withdraw("0", timeout_s=DEADLINE_S)
        found.publisher[0].arrays["w"][:] = 0xEE
        error = reading.wait()
        assert error is None or isinstance(error, SourceLost), "what was taken too late is not judged: never corrupt"
        scene.finish()
        assert source.withdraw("1", timeout_s=DEADLINE_S)
        found.publisher[0].arrays["w"][:] = right


def test_a_source_that_lies_about_a_tile(make: Make, found: Columns) -> None:
    scene = Scene(found, make(), make())
    wrong = found.publisher[0].arrays["w"]
    wrong[ROWS // 2, COLUMNS - 1] ^= 1
    scene.export(0)
    reading = scene.read(0)
    error = reading.wait()
    assert isinstance(error, CorruptTransfer)
    assert "'w'[" in str(error)
    assert "trainer[0]" in str(error)
    assert reading.left > 0
    scene.finish()


def test_what_lies_beside_the_wanted_part_may_change(kind: kit.Kind, make: Make, found: Columns) -> None:
    scene = Scene(found, make(), make())
    found.publisher[0].arrays["w"][:, : COLUMNS // 2] = 0xEE
    scene.export(0)
    reading = scene.read(0)
    assert reading.wait() is None
    assert ("mapped" in reading.read.path) == kit.maps()
    if "nixl" not in kind.name and not kind.is_on_device:  # which have threads, or a device, of their own
        assert ("native" in reading.read.path) == (load.library() is not None)
    assert not found.reader.wrong(found.model)
    kit.until(lambda: scene.source.statistics()["sent_bytes"] == ROWS * COLUMNS // 2, "no byte more was sent")


def test_nothing_counts_once_it_is_revoked(make: Make, found: Columns) -> None:
    scene = Scene(found, make(60.0), make(60.0))
    progress = half_of(found.publisher[0])
    scene.export(0, progress=progress)
    reading = scene.read(0)
    kit.until(lambda: scene.across.missing == len(scene.across.tiles) // 2, "half of it is there")
    scene.across.revoke(SessionLost("the lease has ended"))
    before = scene.across.missing
    for chunk in range(progress.chunk_count):
        progress.mark(chunk)
    error = reading.ended.wait()
    assert isinstance(error, SessionLost)
    assert scene.across.missing == before
    with pytest.raises(SessionLost):
        scene.across.tile_sinks([scene.sources[1]])


def test_memory_that_was_freed(kind: kit.Kind, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source's worker lives on, and its reader goes elsewhere."""
    if kit.maps() or kit.is_on_device():
        pytest.skip("a host copy is nobody else's to free, and a device keeps what it has shared")
    if "nixl" in kind.name:
        pytest.skip("NIXL's own threads read it: memory must not be freed while it is published (docs/status.md)")
    size = ROWS * COLUMNS
    pages = mmap.mmap(-1, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    array = np.frombuffer(host_view(address, size, pages), np.uint8).reshape(ROWS, COLUMNS)
    for threshold in (0, COLUMNS):
        fetch_all(monkeypatch, threshold)
        scene = Scene(columns(array=array), make(), make())
        scene.export(0)
        protect(address + size // 2, size // 2, 0)
        try:
            error = scene.read(0).wait()
        finally:
            protect(address + size // 2, size // 2, mmap.PROT_READ | mmap.PROT_WRITE)
        assert isinstance(error, SourceLost | TransportMissing), repr(error)
        scene.finish()


def protect(address: int, size: int, how: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), how) == 0


@pytest.mark.parametrize("way", ["native", "Python"])
def test_a_further_stream_without_room_takes_nothing_along(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its share is the others': a read that ends well has brought all."""
    monkeypatch.setenv(load.VARIABLE, "yes" if way == "native" else "no")
    load.reset()
    try:
        if (load.library() is not None) != (way == "native"):
            pytest.skip(f"no native mover: {load.why_not()}")
        settings = TcpSettings(streams=2, stream_rate_bytes_per_s=0, stream_bytes=BATCH)
        for _ in range(4):
            with contextlib.closing(TcpTransport(settings)) as source, contextlib.closing(TcpTransport(settings)) as to:
                scene = Scene(columns(), source, to)
                scene.export(0)
                (tile_sink,) = scene.across.tile_sinks([scene.sources[0]])
                room = 3 * len(tile_sink.batches.encode())  # for one connection of this read, not for two
                monkeypatch.setattr(source._server, "_room", Room(room))
                reading = Reading(scene.across, tile_sink, to, source.endpoint, "0")
                assert reading.wait() is None
                assert (reading.left, scene.across.missing) == (0, 0)
                assert not scene.found.reader.wrong(scene.found.model)
    finally:
        load.reset()


def test_the_mover_takes_no_rows_that_end_too_soon() -> None:
    """It would go on behind them, where no tensor is."""
    found = columns()
    sources = sources_of_cuts(cuts_of(found.publisher, found.grid))
    across = across_for(found.reader, found.grid, sources, batch_bytes=BATCH)
    (tile_sink,) = across.tile_sinks(sources[:1])
    scatter = tile_sink._order.scatter
    assert reads._fits(scatter, tile_sink.batches)
    ours = scatter.ours
    for column, number in ((RUN, ours.words[RUN] - 1), (COUNT, ours.words[COUNT] - 1), (COUNTS, 2)):
        words = ours.words[:]
        words[column] = number
        assert not reads._fits(replace(scatter, ours=Rows.at(words, ours.starts)), tile_sink.batches)
    fewer = Rows.at(ours.words[:-ROW_WORDS], ours.starts[:-1])
    assert not reads._fits(replace(scatter, ours=fewer), tile_sink.batches)


@pytest.mark.parametrize("kind", ["pretended-nixl-2"], indirect=True)
@pytest.mark.parametrize("is_enough_for_one", [True, False])
def test_without_memory_for_what_lands_fewer_threads_read_or_that_is_the_error(
    make: Make, monkeypatch: pytest.MonkeyPatch, is_enough_for_one: bool
) -> None:
    fetch_all(monkeypatch, 0)
    create, made = os.memfd_create, []

    def limited(name: str) -> int:
        if is_enough_for_one and threading.current_thread().name.endswith("-read-0"):
            return create(name)
        made.append(name)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    scene = Scene(columns(), make(), make())
    scene.export(0)
    monkeypatch.setattr(os, "memfd_create", limited)
    error = scene.read(0).wait()
    assert made
    if is_enough_for_one:
        assert error is None
        assert not scene.across.missing
    else:
        assert isinstance(error, HostMemoryFull)
        assert "for what NIXL brings: [Errno 24] Too many open files" in str(error)
