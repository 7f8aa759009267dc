"""What the transport `cuda` promises beyond the contract, on a stand-in for a device (`stand_in.py`)."""

import gc
import os
import signal
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace

import pytest

from tensorhub.core.errors import CorruptTransfer, TransportMissing, UsageError
from tensorhub.transport import cuda
from tensorhub.transport.base import Export
from tensorhub.transport.cuda import CudaSettings, CudaTransport
from tensorhub.transport.progress import Progress

from . import kit
from .conftest import Make, Spawn, line
from .kit import DEADLINE_S, Gate, Target, content, full, read_all, stand_in, start_read

CHUNK = 64 * 1024


@pytest.fixture
def kind() -> kit.Kind:
    return kit.KINDS["cuda-stand-in"]


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of each memory that was shared."""
    found: list[int] = []
    share = stand_in.share

    def noted(view: memoryview) -> object:
        found.append(len(view))
        return share(view)

    monkeypatch.setattr(stand_in, "share", noted)
    return found


@pytest.fixture
def during_copy() -> Iterator[list[object]]:
    yield stand_in.during_copy
    stand_in.during_copy.clear()


def opened_by(reader: object) -> int:
    assert isinstance(reader, CudaTransport)
    return len(reader._peers._known)


def test_memory_is_opened_once_for_a_registration(make: Make, shares: list[int]) -> None:
    right = content(5 * CHUNK)
    source, reader = make(), make()
    stream = kit.Pieces(right)
    for version in range(3):
        source.export(Export(f"v{version}", b"manifest", CHUNK, stream, Progress(5, complete=True)))
        target = Target(right, CHUNK)
        assert read_all(reader, source.endpoint, f"v{version}", target) is None
        assert target.buffer == right
        assert source.withdraw(f"v{version}", timeout_s=DEADLINE_S)
    assert shares == [5 * CHUNK]


def test_memory_is_let_go_when_its_source_registers_anew(make: Make, shares: list[int]) -> None:
    right = content(CHUNK)
    source, reader = make(), make()
    for times in (1, 2):
        source.export(full("k", right, CHUNK))  # a stream of its own each time
        assert read_all(reader, source.endpoint, "k", Target(right, CHUNK)) is None
        assert len(shares) == times
        assert opened_by(reader) == 1
        assert source.withdraw("k", timeout_s=DEADLINE_S)
        gc.collect()
        kit.until(lambda: opened_by(reader) == 0, "the reader has let the memory go")


def test_memory_is_let_go_when_its_source_closes(make: Make) -> None:
    right = content(CHUNK)
    source, reader = make(), make()
    export = full("k", right, CHUNK)
    source.export(export)
    assert read_all(reader, source.endpoint, "k", Target(right, CHUNK)) is None
    source.close()
    kit.until(lambda: opened_by(reader) == 0, "the reader has let the memory go")


@pytest.mark.processes
def test_memory_of_a_killed_source_is_let_go(make: Make, spawn: Spawn) -> None:
    source = spawn("source", 8 * CHUNK, CHUNK, 8)
    reader, right = make(), content(8 * CHUNK)
    assert read_all(reader, line(source), "k", Target(right, CHUNK)) is None
    assert opened_by(reader) == 1
    source.kill()
    kit.until(lambda: opened_by(reader) == 0, "the reader has let the memory go")


@pytest.mark.processes
def test_a_stopped_source_is_read_to_its_end(make: Make, spawn: Spawn) -> None:
    source = spawn("source", 64 * CHUNK, CHUNK, 64)
    endpoint, right, reader = line(source), content(64 * CHUNK), make(DEADLINE_S)
    gate = Gate()
    target = Target(right, CHUNK, gates={3: gate})
    _, ended = start_read(reader, endpoint, "k", target)
    assert gate.reached.wait(DEADLINE_S)
    os.kill(source.pid, signal.SIGSTOP)
    gate.release.set()
    assert ended.wait() is None
    assert target.buffer == right


def test_a_byte_that_flips_after_its_arrival_is_found(make: Make, during_copy: list[object]) -> None:
    right = content(8 * CHUNK)
    source, reader = make(), make()
    source.export(full("k", right, CHUNK))

    def flip(start: int, copied: memoryview) -> None:
        if start == 5 * CHUNK:
            copied[17] ^= 1

    during_copy.append(flip)
    target = Target(right, CHUNK)
    assert isinstance(read_all(reader, source.endpoint, "k", target), CorruptTransfer)
    assert target.order == [0, 1, 2, 3, 4]


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


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(UsageError, match="device_share"):
        CudaSettings(device_share=share)
