"""The contract of `transport/base.py`, for every transport: what a read brings, how it ends, and what may go wrong."""

import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from tensorhub.protocol.errors import Closed, CorruptTransfer, LayoutMismatch, SourceLost, TensorHubError, UsageError
from tensorhub.transport.base import Export, Progress, Read

from . import kit
from .conftest import Make, Spawn, line, offered
from .kit import DEADLINE_S, MIB, Ended, Gate, Target, content, full, read_all, start_read

CHUNK = 4096
LARGE = 24 * MIB  # more than the kernel keeps in its buffers: the source is in the middle of sending


# -- what a read brings ------------------------------------------------------------------------------------------------


def test_everything_arrives(make: Make) -> None:
    source, reader, received = make(), make(), 0
    for size in (0, 1, CHUNK - 1, CHUNK, 40 * CHUNK + 1234):
        right = content(size)
        source.export(full("k", right, CHUNK, manifest=b"what it is"))
        target = Target(right, CHUNK)
        assert read_all(reader, source.endpoint, "k", target) is None
        assert (target.buffer, target.manifest) == (right, b"what it is")
        assert sorted(target.order) == list(range(target.progress.chunk_count))
        assert target.touches or not size, "the sink is told before the first byte is written"
        received += size
        assert reader.statistics()["received_bytes"] == received
    kit.until(lambda: source.statistics()["sent_bytes"] == received, "the source has counted what it sent")


def test_small_pieces_on_both_sides_and_a_large_manifest(make: Make) -> None:
    right, manifest = content(MIB + 5), bytes(content(3 * MIB, seed=5))
    source, reader = make(DEADLINE_S), make(DEADLINE_S)  # beside busy processes a chunk of them takes seconds
    source.export(full("k", right, MIB, piece_bytes=37, manifest=manifest))  # far more views than one call may take
    target = Target(right, MIB, piece_bytes=101)
    assert read_all(reader, source.endpoint, "k", target) is None
    assert target.buffer == right
    assert target.manifest == manifest


def test_only_what_is_wanted_is_sent(make: Make) -> None:
    right, source, reader = offered(make, 20 * CHUNK + 10, CHUNK)
    nothing = Target(right, CHUNK, wanted=[])
    assert read_all(reader, source.endpoint, "k", nothing) is None
    assert nothing.manifest is not None
    assert (nothing.touches, source.statistics()["sent_bytes"]) == (0, 0)
    target = Target(right, CHUNK, wanted=[*range(15, 21), 3])
    read, ended = start_read(reader, source.endpoint, "k", target)
    assert ended.wait() is None
    assert sorted(target.order) == [3, *range(15, 21)]
    assert read.received_bytes == 6 * CHUNK + 10
    assert read.arrived_bytes >= read.received_bytes
    kit.until(lambda: source.statistics()["sent_bytes"] == 6 * CHUNK + 10, "the source has counted what it sent")
    assert target.buffer[15 * CHUNK :] == right[15 * CHUNK :]
    assert not any(target.buffer[4 * CHUNK : 15 * CHUNK])


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
        assert last.progress.prefix == chunk
        progress.mark(chunk)
        assert last.progress.wait(chunk, DEADLINE_S), f"chunk {chunk} must come through the chain by itself"
    assert [middle_ended.wait(), last_ended.wait()] == [None, None]
    assert last.buffer == right


def test_a_waiting_source_is_not_a_silent_one_and_chunks_become_complete_in_any_order(make: Make) -> None:
    right = content(30 * CHUNK)
    source, reader = make(0.4), make(0.4)
    progress = Progress(30)
    source.export(Export("k", b"manifest", CHUNK, kit.Pieces(right), progress))
    target = Target(right, CHUNK)
    _, ended = start_read(reader, source.endpoint, "k", target)
    assert not ended.event.wait(1.2), "three times the silence limit, but the source said that it waits"
    for chunk in [*range(29, 0, -2), *range(0, 30, 2)]:
        progress.mark(chunk)
    assert ended.wait() is None
    assert target.buffer == right


def test_several_readers_at_once_and_a_slow_one_disturbs_no_other(make: Make) -> None:
    right = content(4 * MIB + 1)
    source, slow = make(), make()
    source.export(full("k", right, 256 * 1024))
    gate = Gate()
    held = Target(right, 256 * 1024, gates={1: gate})
    _, held_ended = start_read(slow, source.endpoint, "k", held)
    assert gate.reached.wait(DEADLINE_S)
    readers, targets = [make() for _ in range(2)], [Target(right, 256 * 1024) for _ in range(4)]
    ends = [start_read(readers[i % 2], source.endpoint, "k", target)[1] for i, target in enumerate(targets)]
    assert [ended.wait() for ended in ends] == [None] * 4
    assert all(target.buffer == right for target in targets)
    assert not held_ended.event.is_set()
    gate.release.set()
    assert held_ended.wait() is None
    assert held.buffer == right


# -- how a read ends ---------------------------------------------------------------------------------------------------


def test_a_source_that_waits_and_fails_or_withdraws_says_why(make: Make) -> None:
    right = content(4 * CHUNK)
    source, reader = make(60.0), make(60.0)  # nothing else ends it within this test
    for says in ("its own source burnt down", "withdrawn"):
        progress, target = Progress(4), Target(right, CHUNK)
        progress.mark(0)
        source.export(Export("k", b"manifest", CHUNK, kit.Pieces(right), progress))
        _, ended = start_read(reader, source.endpoint, "k", target)
        assert target.progress.wait(0, DEADLINE_S)
        if says == "withdrawn":
            assert source.withdraw("k", timeout_s=DEADLINE_S)
        else:
            progress.fail(says)
        error = ended.wait()
        assert isinstance(error, SourceLost)
        assert says in str(error)
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


def test_what_the_sink_raises_is_what_is_reported(make: Make) -> None:
    right, source, reader = offered(make, 5 * CHUNK, CHUNK)
    unexpected = LayoutMismatch("not what was expected")
    read, ended = start_read(reader, source.endpoint, "k", Target(right, CHUNK, begin_error=unexpected))
    assert ended.wait() is unexpected
    assert read.received_bytes == source.statistics()["sent_bytes"] == 0, "no chunk was asked for"
    target = Target(right, CHUNK)
    target.touch_error = untouched = SourceLost("what is there must stay")
    read, ended = start_read(reader, source.endpoint, "k", target)
    assert ended.wait() is untouched
    assert read.received_bytes == 0
    assert not any(target.buffer), "nothing is written before the sink is touched"
    fault = CorruptTransfer("as the sink said it")
    assert read_all(reader, source.endpoint, "k", Target(right, CHUNK, accept_error=(2, fault))) is fault
    bug = OSError("a bug")  # an OSError, because it must not be taken for the network's
    error = read_all(reader, source.endpoint, "k", Target(right, CHUNK, accept_error=(2, bug)))
    assert error is not None
    assert not error.retryable
    assert error.__cause__ is bug


def test_what_cannot_be_read_is_a_source_that_is_lost(kind: kit.Kind, make: Make) -> None:
    right, source, reader = offered(make, 5 * CHUNK, CHUNK)
    smaller = Target(right[:-1], CHUNK)
    assert isinstance(read_all(reader, source.endpoint, "k", smaller), SourceLost)
    assert not any(smaller.buffer)
    error = read_all(reader, source.endpoint, "unknown", Target(right, CHUNK))
    assert isinstance(error, SourceLost)
    assert "'unknown'" in str(error)
    assert source.endpoint in str(error)
    with kind.mute() as nobody:
        pass
    for endpoint in (nobody, "", "nonsense", "tcp://", "tcp://127.0.0.1:99999", "http://a:1", "local://a.1.2.3/"):
        error = read_all(reader, endpoint, "k", Target(right, CHUNK))
        assert isinstance(error, SourceLost), endpoint
        assert error.retryable
        assert endpoint in str(error)


def test_a_listener_that_never_answers_is_lost_after_the_silence_limit(kind: kit.Kind, make: Make) -> None:
    with kind.mute() as endpoint:
        error = read_all(make(0.3), endpoint, "k", Target(content(1), CHUNK))
        assert isinstance(error, SourceLost)
        assert "0.3 s" in str(error)
        read, ended = start_read(make(60.0), endpoint, "k", Target(content(1), CHUNK))
        read.stop()
        assert ended.wait() is None


def test_stop_ends_a_read_without_error(make: Make) -> None:
    right, source, reader = offered(make, 8 * MIB, 64 * 1024)
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
    source.export(Export("waits", b"manifest", CHUNK, kit.Pieces(content(CHUNK)), Progress(1)))
    target = Target(content(CHUNK), CHUNK)
    read, ended = start_read(make(60.0), source.endpoint, "waits", target)  # the stop alone can end it within this test
    kit.until(lambda: target.manifest is not None, "the read has begun")
    read.stop()
    assert ended.wait() is None
    for _ in range(20):  # at once
        read, ended = start_read(reader, source.endpoint, "k", Target(right, 64 * 1024))
        read.stop()
        assert ended.wait() is None


def test_no_write_after_the_end(make: Make) -> None:
    """When a reader is told that a read ended it may use the memory for something else at once."""
    right = content(2 * MIB)
    source, reader = make(), make()
    source.export(full("k", right, 16 * 1024))
    targets = []
    for trial in range(12):
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
    with pytest.raises(UsageError, match="progress"):
        source.export(Export("k", b"", CHUNK, kit.Pieces(old), Progress(4)))
    with pytest.raises(UsageError, match="chunk_bytes"):
        source.export(Export("k", b"", 0, kit.Pieces(old), Progress(3)))


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
    other, closed = make(), threading.Event()
    source.export(full("k", right, CHUNK))
    other.read(source.endpoint, "k", Target(right, CHUNK), lambda _: (other.close(), closed.set()))  # in its callback
    assert closed.wait(DEADLINE_S)
    for transport in (reader, source, source):
        transport.close()
    with pytest.raises(Closed):
        source.export(full("k", right, CHUNK))
    with pytest.raises(Closed):
        reader.read(source.endpoint, "k", target, Ended())


def test_nothing_grows_over_many_reads(make: Make) -> None:
    right, source, reader = offered(make, 5 * CHUNK, CHUNK)
    assert read_all(reader, source.endpoint, "k", Target(right, CHUNK)) is None
    kit.until(lambda: source.statistics()["connections_open"] == 0, "the first read's connections are closed")
    threads, files = threading.active_count(), kit.open_files()
    for _ in range(50):
        assert read_all(reader, source.endpoint, "k", Target(right, CHUNK)) is None
    kit.until(lambda: threading.active_count() <= threads, "threads are as many as before")
    kit.until(lambda: kit.open_files() <= files, "file descriptors are as many as before")


class Failing(Target):
    """A sink that ends its read by an error of its own, which only the read gets to know."""

    def accept(self, chunk: int, views: Sequence[memoryview]) -> None:
        raise CorruptTransfer("as the sink said it")


@pytest.mark.usefixtures("no_collector")
def test_a_read_that_has_ended_is_let_go_at_once(make: Make) -> None:
    """The callback knows the read. If each held the other, only the garbage collector would free them."""
    right, source, reader = offered(make, 5 * CHUNK, CHUNK)

    def read_once(sink: type[Target], key: str) -> "weakref.ref[Target]":
        target, ended, known = sink(right, CHUNK), threading.Event(), list[Read]()

        def on_end(_: TensorHubError | None) -> None:
            assert len(known) <= 1
            ended.set()

        known.append(reader.read(source.endpoint, key, target, on_end))
        assert ended.wait(DEADLINE_S)
        return weakref.ref(target)

    for sink, key in ((Target, "k"), (Target, "unknown"), (Failing, "k")):
        left = read_once(sink, key)
        kit.until(lambda left=left: left() is None, "nothing holds the read and its sink")  # type: ignore[misc]


# -- withdrawal --------------------------------------------------------------------------------------------------------


def test_withdraw_cuts_a_reader_that_takes_nothing(make: Make) -> None:
    right = content(LARGE)
    memory = kit.copy_of(right)
    source, reader = make(60.0), make(60.0)
    source.export(full("k", memory, MIB))
    gates = {chunk: Gate() for chunk in range(LARGE // MIB)}
    target = Target(right, MIB, gates=gates)
    _, ended = start_read(reader, source.endpoint, "k", target)
    assert gates[0].reached.wait(DEADLINE_S)
    assert source.withdraw("k", timeout_s=DEADLINE_S)
    memory[:] = b"\xee" * len(memory)  # allowed from now on: no reader may take this for the content
    for gate in gates.values():
        gate.release.set()
    assert isinstance(ended.wait(), SourceLost), "not a corrupt chunk: no byte was read after the withdrawal"
    for chunk in target.order:
        assert target.buffer[chunk * MIB : (chunk + 1) * MIB] == right[chunk * MIB : (chunk + 1) * MIB]


def test_withdraw_under_load_again_and_again(make: Make) -> None:
    right, size = content(2 * MIB), 64 * 1024
    source, reader = make(), make()
    ends = []
    for trial in range(10):
        memory = kit.copy_of(right)
        source.export(full("k", memory, size))
        target = Target(right, size)
        _, ended = start_read(reader, source.endpoint, "k", target)
        assert target.progress.wait(2 * trial, DEADLINE_S)
        assert source.withdraw("k", timeout_s=DEADLINE_S)
        memory[:] = b"\xee" * len(memory)
        error = ended.wait()
        assert error is None or isinstance(error, SourceLost), "what was taken too late is not judged: never corrupt"
        # What counts is right, and all of it counts exactly if the read ended well. Bytes that do not count may lie
        # there: a one-sided read cannot be called back, so its last chunks may have come, or what was written after.
        assert (len(target.order) == 32) == (error is None)
        for chunk in target.order:
            assert target.buffer[chunk * size : (chunk + 1) * size] == right[chunk * size : (chunk + 1) * size]
        ends.append((target, bytes(target.buffer)))
    # No reader is let in again, which takes the source 2 s to say; and nothing has come to the earlier ones meanwhile.
    assert isinstance(read_all(reader, source.endpoint, "k", Target(right, size)), SourceLost)
    assert all(target.buffer == at_its_end for target, at_its_end in ends)


def test_withdraw_says_when_memory_is_still_in_use(make: Make) -> None:
    right = content(CHUNK)
    source, reader = make(), make()
    assert source.withdraw("k", timeout_s=0.0), "it was never exported"
    for is_replaced in (False, True):
        stream = kit.BlockedPieces(right)
        source.export(Export("k", b"manifest", CHUNK, stream, Progress(1, complete=True)))
        _, ended = start_read(reader, source.endpoint, "k", Target(right, CHUNK))
        assert stream.entered.wait(DEADLINE_S)
        if is_replaced:
            source.export(full("k", right, CHUNK))
        assert not source.withdraw("k", timeout_s=0.2)
        assert not source.withdraw("k", timeout_s=0.0)
        stream.release.set()
        assert source.withdraw("k", timeout_s=DEADLINE_S)
        assert stream.inside == 0
        ended.wait()


def test_memory_that_cannot_be_read_is_the_sources_fault_and_only_this_reads(make: Make) -> None:
    class Broken(kit.Pieces):
        def _cut(self, start: int, stop: int) -> list[memoryview]:
            raise RuntimeError("the device fell off the bus")

    right = content(CHUNK)
    source, reader = make(), make()
    source.export(Export("broken", b"manifest", CHUNK, Broken(right), Progress(1, complete=True)))
    source.export(full("k", right, CHUNK))
    error = read_all(reader, source.endpoint, "broken", Target(right, CHUNK))
    assert isinstance(error, SourceLost)
    assert "the device fell off the bus" in str(error)
    assert read_all(reader, source.endpoint, "k", Target(right, CHUNK)) is None


# -- processes that are killed or stopped ------------------------------------------------------------------------------


SOME = ("tcp-3", "local-3")  # the others with --long
killed = pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind in SOME else pytest.mark.long) for kind in kit.CONTRACT],
    indirect=True,
)


@pytest.mark.processes
@killed
def test_a_source_that_is_killed(make: Make, spawn: Spawn) -> None:
    source = spawn("source", LARGE, MIB, 16)  # then it waits
    endpoint, right, reader = line(source), content(LARGE), make(60.0)
    gate = Gate()
    held, waiting = Target(right, MIB, gates={4: gate}), Target(right, MIB)
    _, held_ended = start_read(reader, endpoint, "k", held)
    _, ended = start_read(reader, endpoint, "k", waiting)
    assert gate.reached.wait(DEADLINE_S)
    assert all(waiting.progress.wait(chunk, DEADLINE_S) for chunk in range(16))
    source.kill()
    source.wait()
    gate.release.set()
    for error in (held_ended.wait(), ended.wait()):
        assert isinstance(error, SourceLost)
        assert endpoint in str(error)
    assert waiting.buffer[: 16 * MIB] == right[: 16 * MIB]
    frozen = bytes(held.buffer)
    assert isinstance(read_all(reader, endpoint, "k", Target(right, MIB)), SourceLost)
    assert held.buffer == frozen


@pytest.mark.processes
@killed
def test_a_source_that_is_stopped_is_lost_after_the_silence_limit(make: Make, spawn: Spawn) -> None:
    source = spawn("source", 8 * CHUNK, CHUNK, 5, 1.0)
    endpoint, reader = line(source), make(1.0)
    target = Target(content(8 * CHUNK), CHUNK)
    os.kill(source.pid, signal.SIGSTOP)  # before it has said a word
    assert isinstance(read_all(reader, endpoint, "k", target), SourceLost)
    os.kill(source.pid, signal.SIGCONT)
    _, ended = start_read(reader, endpoint, "k", target)
    assert all(target.progress.wait(chunk, DEADLINE_S) for chunk in range(5))
    os.kill(source.pid, signal.SIGSTOP)  # with five chunks sent, and more asked for
    error = ended.wait()
    assert isinstance(error, SourceLost)
    assert endpoint in str(error)
    assert "'k'" in str(error)
    assert f"{5 * CHUNK} B" in str(error)


@pytest.mark.processes
@killed
def test_a_reader_that_is_stopped_and_killed_holds_nothing(make: Make, spawn: Spawn) -> None:
    source, right = make(60.0), content(LARGE)
    source.export(full("k", right, 64 * 1024))
    reader = spawn("reader", LARGE, 64 * 1024, source.endpoint)
    assert line(reader).startswith("stored")
    os.kill(reader.pid, signal.SIGSTOP)
    assert source.withdraw("k", timeout_s=DEADLINE_S)
    reader.kill()
    kit.until(lambda: source.statistics()["connections_open"] == 0, "the source has noticed")
    assert source.withdraw("k", timeout_s=0.0)


@pytest.mark.processes
@killed
def test_a_forgotten_close_does_not_hang_the_interpreter(kind: kit.Kind) -> None:
    peer = str(Path(__file__).with_name("peer.py"))
    command = [sys.executable, peer, "forgetful", kind.name, str(8 * CHUNK), str(CHUNK), "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaving\n", "")
