"""The contract of `transport/base.py`, for every transport: what a read brings, in which order, and how it ends."""

import threading
import weakref
from collections.abc import Sequence
from functools import partial

import pytest

from tensorhub.protocol.errors import Closed, CorruptTransfer, LayoutMismatch, SourceLost, UsageError
from tensorhub.transport.base import Export, Progress, Read

from . import kit
from .conftest import Make
from .kit import DEADLINE_S, MIB, Ended, Gate, Target, content, full, read_all, start_read

CHUNK = 4096


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, 7 * CHUNK, 40 * CHUNK + 1234])
def test_everything_arrives(make: Make, size: int) -> None:
    right = content(size)
    source, reader = make(), make()
    source.export(full("k", right, CHUNK, manifest=b"what it is"))
    target = Target(right, CHUNK)
    assert read_all(reader, source.endpoint, "k", target) is None
    assert target.buffer == right
    assert target.manifest == b"what it is"
    assert sorted(target.order) == list(range(target.progress.chunk_count))
    assert reader.statistics()["received_bytes"] == size
    kit.until(lambda: source.statistics()["sent_bytes"] == size, "the source has counted what it sent")


def test_many_small_pieces_on_both_sides(make: Make) -> None:
    right = content(3 * MIB + 5)
    source, reader = make(DEADLINE_S), make(DEADLINE_S)  # beside busy processes a chunk of them takes seconds
    source.export(full("k", right, MIB, piece_bytes=37))  # 28,000 views in a chunk: far more than one call may take
    target = Target(right, MIB, piece_bytes=101)
    assert read_all(reader, source.endpoint, "k", target) is None
    assert target.buffer == right


def test_a_large_manifest(make: Make) -> None:
    right, manifest = content(CHUNK), bytes(content(3 * MIB, seed=5))
    source, reader = make(), make()
    source.export(full("k", right, CHUNK, manifest=manifest))
    target = Target(right, CHUNK)
    assert read_all(reader, source.endpoint, "k", target) is None
    assert target.manifest == manifest


def test_only_what_is_wanted_is_sent(make: Make) -> None:
    right = content(20 * CHUNK + 10)
    source, reader = make(), make()
    source.export(full("k", right, CHUNK))
    target = Target(right, CHUNK, wanted=[*range(15, 21), 3])
    read, ended = start_read(reader, source.endpoint, "k", target)
    assert ended.wait() is None
    assert sorted(target.order) == [3, *range(15, 21)]
    assert read.received_bytes == 6 * CHUNK + 10
    assert read.arrived_bytes >= read.received_bytes
    kit.until(lambda: source.statistics()["sent_bytes"] == 6 * CHUNK + 10, "the source has counted what it sent")
    assert target.buffer[15 * CHUNK :] == right[15 * CHUNK :]
    assert not any(target.buffer[4 * CHUNK : 15 * CHUNK])


def test_nothing_wanted(make: Make) -> None:
    right = content(5 * CHUNK)
    source, reader = make(), make()
    source.export(full("k", right, CHUNK))
    target = Target(right, CHUNK, wanted=[])
    assert read_all(reader, source.endpoint, "k", target) is None
    assert source.statistics()["sent_bytes"] == 0
    assert target.manifest is not None
    assert target.touches == 0, "who only opens a read has nothing written"


def test_nothing_is_written_before_the_sink_is_touched(make: Make) -> None:
    right = content(5 * CHUNK)
    source, reader = make(), make()
    progress = Progress(5)
    source.export(Export("k", b"", CHUNK, kit.Pieces(right), progress))
    target = Target(right, CHUNK)
    target.touch_error = error = SourceLost("what is there must stay")
    read, ended = start_read(reader, source.endpoint, "k", target)
    kit.until(lambda: target.manifest is not None, "the manifest is there")
    progress.mark(0)
    assert ended.wait() is error
    assert not any(target.buffer)
    assert read.received_bytes == 0


def test_each_chunk_touches(make: Make) -> None:
    right = content(7 * CHUNK)
    source, reader = make(), make()
    source.export(full("k", right, CHUNK))
    target = Target(right, CHUNK)
    assert read_all(reader, source.endpoint, "k", target) is None
    assert target.touches >= 1


def test_chain_of_sources_that_are_themselves_filling(make: Make) -> None:
    right = content(12 * CHUNK)
    first, second, third = make(), make(), make()
    progress = Progress(12)
    first.export(Export("k", b"manifest", CHUNK, kit.Pieces(right), progress))
    middle, last = Target(right, CHUNK), Target(right, CHUNK)
    second.export(middle.export("k"))
    _, middle_ended = start_read(second, first.endpoint, "k", middle)
    _, last_ended = start_read(third, second.endpoint, "k", last)
    for chunk in range(12):
        assert not last.progress.has(chunk)
        assert last.progress.prefix == chunk
        progress.mark(chunk)
        assert last.progress.wait(chunk, DEADLINE_S), f"chunk {chunk} must come through the chain by itself"
    assert middle_ended.wait() is None
    assert last_ended.wait() is None
    assert last.buffer == right


def test_chunks_that_become_complete_in_any_order(make: Make) -> None:
    right = content(30 * CHUNK)
    source, reader = make(), make()
    progress = Progress(30)
    source.export(Export("k", b"manifest", CHUNK, kit.Pieces(right), progress))
    target = Target(right, CHUNK)
    _, ended = start_read(reader, source.endpoint, "k", target)
    for chunk in [*range(29, 0, -2), *range(0, 30, 2)]:
        progress.mark(chunk)
    assert ended.wait() is None
    assert target.buffer == right


def test_a_waiting_source_is_not_a_silent_one(make: Make) -> None:
    right = content(4 * CHUNK)
    source, reader = make(0.4), make(0.4)
    progress = Progress(4)
    source.export(Export("k", b"manifest", CHUNK, kit.Pieces(right), progress))
    _, ended = start_read(reader, source.endpoint, "k", Target(right, CHUNK))
    assert not ended.event.wait(2.0), "five times the silence limit, but the source said that it waits"
    for chunk in range(4):
        progress.mark(chunk)
    assert ended.wait() is None


def test_a_failed_source_says_why(make: Make) -> None:
    right = content(4 * CHUNK)
    source, reader = make(), make()
    progress = Progress(4)
    progress.mark(0)
    source.export(Export("k", b"manifest", CHUNK, kit.Pieces(right), progress))
    target = Target(right, CHUNK)
    _, ended = start_read(reader, source.endpoint, "k", target)
    assert target.progress.wait(0, DEADLINE_S)
    progress.fail("its own source burnt down")
    error = ended.wait()
    assert isinstance(error, SourceLost)
    assert "its own source burnt down" in str(error)
    assert target.order == [0]


def test_a_corrupt_chunk_ends_the_read(make: Make) -> None:
    right = content(50 * CHUNK)
    wrong = kit.copy_of(right)
    wrong[20 * CHUNK + 7] ^= 1
    source, reader = make(), make()
    source.export(full("k", wrong, CHUNK))
    target = Target(right, CHUNK)
    error = read_all(reader, source.endpoint, "k", target)
    assert isinstance(error, CorruptTransfer)
    assert "chunk 20" in str(error)
    assert 20 not in target.order
    assert target.stream.inside == 0


def test_the_very_error_of_the_sink_is_reported(make: Make) -> None:
    right = content(5 * CHUNK)
    source, reader = make(), make()
    source.export(full("k", right, CHUNK))
    fault = CorruptTransfer("as the sink said it")
    assert read_all(reader, source.endpoint, "k", Target(right, CHUNK, accept_error=(2, fault))) is fault


def test_a_bug_in_the_sink_ends_the_read_and_is_named(make: Make) -> None:
    right = content(5 * CHUNK)
    source, reader = make(), make()
    source.export(full("k", right, CHUNK))
    bug = OSError("a bug")  # an OSError, because it must not be taken for the network's
    error = read_all(reader, source.endpoint, "k", Target(right, CHUNK, accept_error=(2, bug)))
    assert error is not None
    assert not error.retryable
    assert error.__cause__ is bug


def test_an_unexpected_manifest_ends_the_read_before_any_chunk(make: Make) -> None:
    right = content(5 * CHUNK)
    source, reader = make(), make()
    source.export(full("k", right, CHUNK))
    fault = LayoutMismatch("not what was expected")
    read, ended = start_read(reader, source.endpoint, "k", Target(right, CHUNK, begin_error=fault))
    assert ended.wait() is fault
    assert read.received_bytes == 0
    assert source.statistics()["sent_bytes"] == 0


def test_another_size_is_refused(make: Make) -> None:
    right = content(5 * CHUNK)
    source, reader = make(), make()
    source.export(full("k", right, CHUNK))
    target = Target(right[:-1], CHUNK)
    assert isinstance(read_all(reader, source.endpoint, "k", target), SourceLost)
    assert not any(target.buffer)


def test_unknown_key(make: Make) -> None:
    source, reader = make(), make()
    error = read_all(reader, source.endpoint, "k", Target(content(CHUNK), CHUNK))
    assert isinstance(error, SourceLost)
    assert "'k'" in str(error)
    assert source.endpoint in str(error)


def test_several_reads_of_one_export_at_once(make: Make) -> None:
    right = content(3 * MIB + 1)
    source = make()
    source.export(full("k", right, 64 * 1024))
    readers = [make() for _ in range(3)]
    targets = [Target(right, 64 * 1024) for _ in range(6)]
    ends = [start_read(readers[i % 3], source.endpoint, "k", target)[1] for i, target in enumerate(targets)]
    assert [ended.wait() for ended in ends] == [None] * 6
    assert all(target.buffer == right for target in targets)


def test_a_slow_reader_disturbs_nobody(make: Make) -> None:
    right = content(8 * MIB)
    source, slow, quick = make(), make(), make()
    source.export(full("k", right, 256 * 1024))
    gate = Gate()
    slow_target = Target(right, 256 * 1024, gates={1: gate})
    _, slow_ended = start_read(slow, source.endpoint, "k", slow_target)
    assert gate.reached.wait(DEADLINE_S)
    for _ in range(3):
        target = Target(right, 256 * 1024)
        assert read_all(quick, source.endpoint, "k", target) is None
        assert target.buffer == right
    assert not slow_ended.event.is_set()
    gate.release.set()
    assert slow_ended.wait() is None
    assert slow_target.buffer == right


def test_stop_ends_a_read_without_error(make: Make) -> None:
    right = content(8 * MIB)
    source, reader = make(), make()
    source.export(full("k", right, 64 * 1024))
    gate = Gate()
    target = Target(right, 64 * 1024, gates={5: gate})
    read, ended = start_read(reader, source.endpoint, "k", target)
    assert gate.reached.wait(DEADLINE_S)
    read.stop()
    read.stop()
    assert not ended.event.is_set(), "a thread is still inside the sink"
    gate.release.set()
    assert ended.wait() is None
    assert ended.thread is not threading.current_thread()
    assert target.stream.inside == 0
    assert not target.progress.is_complete


def test_stop_while_the_source_waits(make: Make) -> None:
    right = content(2 * CHUNK)
    source, reader = make(60.0), make(60.0)  # nothing but the stop can end it within this test
    progress = Progress(2)
    progress.mark(0)
    source.export(Export("k", b"manifest", CHUNK, kit.Pieces(right), progress))
    target = Target(right, CHUNK)
    read, ended = start_read(reader, source.endpoint, "k", target)
    assert target.progress.wait(0, DEADLINE_S)
    read.stop()
    assert ended.wait() is None


def test_stop_at_once(make: Make) -> None:
    right = content(64 * CHUNK)
    source, reader = make(), make()
    source.export(full("k", right, CHUNK))
    for _ in range(50):
        read, ended = start_read(reader, source.endpoint, "k", Target(right, CHUNK))
        read.stop()
        assert ended.wait() is None


def test_no_write_after_the_end(make: Make) -> None:
    """Whoever is told that a read ended may use the memory for something else at once."""
    right = content(4 * MIB)
    source, reader = make(), make()
    source.export(full("k", right, 16 * 1024))
    targets = []
    for trial in range(20):
        target = Target(right, 16 * 1024)
        ended = Ended(partial(target.buffer.__setitem__, slice(None), b"\xee" * len(right)))
        read = reader.read(source.endpoint, "k", target, ended)
        assert target.progress.wait(trial * 3, DEADLINE_S)
        read.stop()
        ended.wait()
        targets.append(target)
    reader.close()
    source.close()
    assert all(bytes(target.buffer).count(b"\xee") == len(right) for target in targets)


def test_exporting_again_replaces(make: Make) -> None:
    old, new = content(10 * CHUNK, seed=1), content(10 * CHUNK, seed=2)
    source, reader = make(), make()
    source.export(Export("k", b"old", CHUNK, kit.Pieces(old), Progress(10)))  # nothing there: its reader waits
    old_target = Target(old, CHUNK)
    _, old_ended = start_read(reader, source.endpoint, "k", old_target)
    kit.until(lambda: old_target.manifest == b"old", "the old export is being read")
    source.export(full("k", new, CHUNK, manifest=b"new"))
    assert isinstance(old_ended.wait(), SourceLost)
    target = Target(new, CHUNK)
    assert read_all(reader, source.endpoint, "k", target) is None
    assert (target.manifest, target.buffer) == (b"new", new)


def test_close_ends_what_is_open_and_can_be_repeated(make: Make) -> None:
    right = content(CHUNK)
    source, reader = make(), make()
    source.export(Export("k", b"manifest", CHUNK, kit.Pieces(right), Progress(1)))
    target = Target(right, CHUNK)
    _, ended = start_read(reader, source.endpoint, "k", target)
    kit.until(lambda: target.manifest is not None, "the read has begun")
    reader.close()
    assert ended.event.is_set(), "close waits for its threads"
    assert ended.wait() is None
    reader.close()
    source.close()
    source.close()
    with pytest.raises(Closed):
        source.export(full("k", right, CHUNK))
    with pytest.raises(Closed):
        reader.read(source.endpoint, "k", target, Ended())


def test_an_export_that_contradicts_itself_is_refused(make: Make) -> None:
    right = content(3 * CHUNK)
    source = make()
    with pytest.raises(UsageError, match="progress"):
        source.export(Export("k", b"", CHUNK, kit.Pieces(right), Progress(4)))
    with pytest.raises(UsageError, match="chunk_bytes"):
        source.export(Export("k", b"", 0, kit.Pieces(right), Progress(3)))


def test_nothing_grows_over_many_reads(make: Make) -> None:
    right = content(5 * CHUNK)
    source, reader = make(), make()
    source.export(full("k", right, CHUNK))
    assert read_all(reader, source.endpoint, "k", Target(right, CHUNK)) is None
    kit.until(lambda: source.statistics()["connections_open"] == 0, "the first read's connections are closed")
    threads, files = threading.active_count(), kit.open_files()
    for _ in range(100):
        assert read_all(reader, source.endpoint, "k", Target(right, CHUNK)) is None
    kit.until(lambda: threading.active_count() <= threads, "threads are as many as before")
    kit.until(lambda: kit.open_files() <= files, "file descriptors are as many as before")


class Failing(Target):
    """A sink that ends its read by an error of its own; nobody but the read gets to know it."""

    def __init__(self, right: bytearray, chunk_bytes: int, error: type[Exception]) -> None:
        super().__init__(right, chunk_bytes)
        self.error = error

    def accept(self, chunk: int, views: Sequence[memoryview]) -> None:
        raise self.error("as the sink said it")


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    ("key", "error"), [("k", None), ("nobody's", None), ("k", LayoutMismatch), ("k", CorruptTransfer), ("k", OSError)]
)
def test_a_read_that_has_ended_is_let_go_at_once(make: Make, key: str, error: type[Exception] | None) -> None:
    """Who is told of the end knows the read. If each held the other, only the garbage collector would free them."""
    right = content(5 * CHUNK)
    source, reader = make(), make()
    source.export(full("k", right, CHUNK))

    def read_once() -> "weakref.ref[Target]":
        target = Target(right, CHUNK) if error is None else Failing(right, CHUNK, error)
        ended, known = threading.Event(), list[Read]()

        def on_end(_: object) -> None:
            assert len(known) <= 1
            ended.set()

        known.append(reader.read(source.endpoint, key, target, on_end))
        assert ended.wait(DEADLINE_S)
        return weakref.ref(target)

    left = read_once()
    kit.until(lambda: left() is None, "nobody holds the read and its sink")


@pytest.mark.usefixtures("no_collector")
def test_a_read_that_never_began_is_let_go_at_once(make: Make) -> None:
    right = content(CHUNK)
    source, reader = make(), make()
    reader.close()

    def read_once() -> "weakref.ref[Target]":
        target = Target(right, CHUNK)
        with pytest.raises(Closed):
            reader.read(source.endpoint, "k", target, Ended())
        return weakref.ref(target)

    assert read_once()() is None
