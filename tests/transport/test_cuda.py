"""What the transport `cuda` promises beyond the contract, on a stand-in for a device (`stand_in.py`)."""

import errno
import os
import threading
import weakref
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest

from tensorhub.memory import landing
from tensorhub.protocol.errors import (
    CorruptTransfer,
    SourceLost,
    TensorHubError,
    TransportMissing,
    Unavailable,
)
from tensorhub.transport import cuda
from tensorhub.transport.base import Export, Progress
from tensorhub.transport.cuda import CudaSettings, CudaTransport, Ends

from . import kit, tiles_kit
from .conftest import Make, offered
from .kit import DEADLINE_S, Target, content, full, read_all, stand_in, start_read

CHUNK = 64 * 1024


@pytest.fixture
def kind() -> kit.Kind:
    return kit.KINDS["cuda-stand-in"]


def test_memory_is_opened_once_for_a_registration(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    shares, share = list[int](), stand_in.share
    monkeypatch.setattr(stand_in, "share", lambda view: (shares.append(len(view)), share(view))[1])
    right, source, reader = content(5 * CHUNK), make(), make()
    stream = kit.Pieces(right)
    for version in range(3):
        source.export(Export(f"v{version}", b"manifest", CHUNK, stream, Progress(5, complete=True)))
        target = Target(right, CHUNK)
        assert read_all(reader, source.endpoint, f"v{version}", target) is None
        assert target.buffer == right
        assert source.withdraw(f"v{version}", timeout_s=DEADLINE_S)
    assert shares == [5 * CHUNK]


class Memory:
    """That is open here."""

    size_bytes = CHUNK


def test_memory_is_closed_before_its_source_is_told(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that is told may give the memory back, which no reader may have open then."""
    right, source, reader = offered(make, CHUNK, CHUNK)
    open_still: weakref.WeakSet[object] = weakref.WeakSet()
    when_told: list[int] = []
    start_of, end_of = stand_in.Opened.__init__, cuda.Offered.end

    def opening(self: object, body: bytes) -> None:
        start_of(self, body)
        open_still.add(self)

    def told(self: cuda.Offered) -> None:
        when_told.append(len(open_still))
        end_of(self)

    monkeypatch.setattr(stand_in.Opened, "__init__", opening)
    monkeypatch.setattr(cuda.Offered, "end", told)
    assert read_all(reader, source.endpoint, "k", Target(right, CHUNK)) is None
    assert (len(open_still), when_told) == (1, [])
    reader.close()
    kit.until(lambda: when_told == [0], "the source is told")


@pytest.mark.parametrize("end", ["source", "reader"])
def test_tensors_on_the_host_leave_the_way_to_others(make: Make, end: str, kind: kit.Kind) -> None:
    source, reader = make(), make()
    if end == "source":
        kit.use(None)
    right = content(3 * CHUNK)
    export = full("k", right, CHUNK)
    kit.use(None if end == "reader" else kind)
    target = Target(right, CHUNK)
    source.export(export)
    error = read_all(reader, source.endpoint, "k", target)
    assert isinstance(error, TransportMissing)
    assert not any(target.buffer)


def test_a_reader_leaves_the_device_to_others_for_their_share(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count()  # so each window takes a second, and 60 s of rest follow
    monkeypatch.setattr(cuda, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    right = content(8 * CHUNK)
    source, reader = make(), CudaTransport(CudaSettings(silence_s=60.0, window_bytes=CHUNK, device_share=0.01))
    source.export(full("k", right, CHUNK))
    target = Target(right, CHUNK)
    read, ended = start_read(reader, source.endpoint, "k", target)
    assert target.progress.wait(0, DEADLINE_S)
    read.stop()
    assert ended.wait() is None
    assert target.order == [0]
    reader.close()


@pytest.mark.parametrize(("number", "raised"), [(errno.EMFILE, OSError), (errno.EPERM, TransportMissing)])
def test_a_shortage_of_descriptors_is_no_missing_transport(
    number: int, raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(server: cuda.CudaServer) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(cuda.CudaServer, "listen", refused)
    with pytest.raises(raised, match=os.strerror(number)):
        CudaTransport()


# -- tiles of another layout -------------------------------------------------------------------------------------------


LANDING_BYTES = 800_000


class Pieces:
    """A read of the right half of a matrix's columns, in several windows."""

    def __init__(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(landing, "MAX_BYTES", LANDING_BYTES)
        monkeypatch.setattr(landing, "MIN_WINDOW_BYTES", 4096)
        monkeypatch.setattr(stand_in, "most_room_bytes", stand_in.room_bytes)
        self.found = tiles_kit.columns(1)
        cuts = tiles_kit.cuts_of(self.found.publisher, self.found.grid)
        (source,) = sources = tiles_kit.sources_of(cuts)
        self.across = tiles_kit.across_for(self.found.reader, self.found.grid, sources, batch_bytes=1)
        (self.tile_sink,) = self.across.tile_sinks([source])
        self.source, self.reader = make(), make()
        tiles_kit.exported(self.source, "k", self.found.publisher[0], cuts[0])

    def read(self) -> TensorHubError | None:
        return tiles_kit.Reading(self.across, self.tile_sink, self.reader, self.source.endpoint, "k").wait()


def test_a_wrong_tile_is_put_nowhere(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    its, seen = Pieces(make, monkeypatch), []

    def flip(tile: np.ndarray) -> None:
        seen.append(tile)
        if len(seen) == len(its.across.tiles) // 2:
            tile[17] ^= 1

    monkeypatch.setattr(stand_in, "during_landing", [flip])
    error = its.read()
    assert isinstance(error, CorruptTransfer)
    assert "'w'[" in str(error)
    done = tiles_kit.ROWS * (len(its.across.tiles) - its.across.missing) // len(its.across.tiles)
    assert 0 < done < tiles_kit.ROWS // 2
    part, right = its.found.reader.arrays["part"], its.found.model["w"][:, tiles_kit.COLUMNS // 2 :]
    assert (part[:done] == right[:done]).all()
    assert not part[done:].any()


def test_what_has_landed_when_its_source_withdraws_is_not_judged(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    its, is_withdrawn = Pieces(make, monkeypatch), []

    def withdraw_and_overwrite(tile: np.ndarray) -> None:
        if not is_withdrawn:
            is_withdrawn.append(its.source.withdraw("k", timeout_s=DEADLINE_S))
        tile[0] ^= 1

    monkeypatch.setattr(stand_in, "during_landing", [withdraw_and_overwrite])
    error = its.read()
    assert is_withdrawn == [True]
    assert isinstance(error, SourceLost)
    assert "withdrawn" in str(error)
    assert not its.found.reader.arrays["part"].any()


def test_tiles_land_in_memory_of_bounded_size(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    its = Pieces(make, monkeypatch)
    before = stand_in.room_bytes
    assert its.read() is None
    assert its.across.missing == 0
    assert LANDING_BYTES // 3 < stand_in.most_room_bytes - before <= LANDING_BYTES
    assert stand_in.room_bytes == before


def test_a_tile_that_has_no_room_to_land_leaves_the_way_to_others(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    its = Pieces(make, monkeypatch)
    monkeypatch.setattr(landing, "MAX_TILE_BYTES", 1 << 12)
    error = its.read()
    assert isinstance(error, TransportMissing)
    assert "no room for tiles" in str(error)
    assert not its.found.reader.arrays["part"].any()


def test_a_failure_of_what_is_due_leaves_the_other_pipes_watched() -> None:
    watch, done = cuda.Watch(), threading.Event()
    pipes = [os.pipe() for _ in range(2)]
    dues = [lambda: 1 / 0, done.set]
    for (reading, _), due in zip(pipes, dues, strict=True):
        watch.when_closed(cuda.Ends(lambda number=reading: (number,)), due)  # type: ignore[misc]
    for _, writing in pipes:
        os.close(writing)
    assert done.wait(30)


# -- faults of peers and of this process -------------------------------------------------------------------------------


def server_of(source: object) -> cuda.CudaServer:
    assert isinstance(source, CudaTransport)
    assert isinstance(source._server, cuda.CudaServer)
    return source._server


def test_a_device_is_not_asked_with_the_lock_that_every_reader_needs(make: Make) -> None:
    """The first question compiles kernels."""
    right = content(CHUNK)
    source, reader = make(), make()
    export, asked = full("k", right, CHUNK), []

    class Asked(kit.Pieces):
        @property
        def is_on_device(self) -> bool:
            asked.append(server_of(source)._lock._is_owned())  # type: ignore[attr-defined]
            return True

    export.stream.__class__ = Asked  # type: ignore[assignment]
    source.export(export)
    assert read_all(reader, source.endpoint, "k", Target(right, CHUNK)) is None
    assert not any(asked)


def test_a_source_that_cannot_watch_a_reader_gives_up_no_memory_that_it_has_open(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, source, reader = offered(make, CHUNK, CHUNK)
    still_open: list[int] = []
    opened: weakref.WeakSet[object] = weakref.WeakSet()
    share, start_of = stand_in.share, stand_in.Opened.__init__

    def noted(view: memoryview) -> object:
        found = share(view)
        memory = Memory()
        weakref.finalize(memory, lambda: still_open.append(len(opened)))
        return type(found)(found.body, memory)

    def opening(self: object, body: bytes) -> None:
        start_of(self, body)
        opened.add(self)

    def refused(watch: object, *_: object) -> None:
        raise Unavailable("this process may start no more threads")

    monkeypatch.setattr(stand_in, "share", noted)
    monkeypatch.setattr(stand_in.Opened, "__init__", opening)
    monkeypatch.setattr(server_of(source)._watch, "when_closed", refused)
    read_all(reader, source.endpoint, "k", Target(right, CHUNK))
    source.close()
    assert not any(still_open)


def test_a_closed_transport_hands_over_no_descriptor_of_another_file(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, source, reader = offered(make, CHUNK, CHUNK)
    assert read_all(reader, source.endpoint, "k", Target(right, CHUNK)) is None
    introduce, send, sent = cuda.AnnouncingServer.introduce, cuda.send_with_descriptors, []

    def closing(self: cuda.CudaServer, *arguments: object) -> None:
        introduce(self, *arguments)  # type: ignore[arg-type]
        self.close()

    monkeypatch.setattr(cuda.AnnouncingServer, "introduce", closing)
    monkeypatch.setattr(cuda, "send_with_descriptors", lambda *what: (sent.append(what), send(*what))[1])
    assert read_all(reader, source.endpoint, "k", Target(right, CHUNK)) is not None
    kit.until(lambda: source.statistics()["connections_open"] == 0, "its thread has left")
    assert not sent


def test_a_watch_that_is_busy_delays_nobody() -> None:
    watch, is_due, may_end = cuda.Watch(), threading.Event(), threading.Event()
    pipes = Ends(os.pipe), Ends(os.pipe)

    def due() -> None:
        is_due.set()
        may_end.wait(DEADLINE_S)

    first, second = (each.descriptors() for each in pipes)
    waited_for = Ends(lambda: (os.dup(second[0]),))
    watch.when_closed(Ends(lambda: (os.dup(first[0]),)), due)
    os.dup2(first[0], first[1])
    assert is_due.wait(DEADLINE_S)

    def ask() -> None:
        for _ in range(70_000):  # more than a pipe takes
            watch.when_closed(waited_for, lambda: None)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(DEADLINE_S)
    is_stuck = asking.is_alive()
    may_end.set()
    watch.close()
    for ends in pipes:
        ends.close()
    assert not is_stuck
