"""The contract of `transport/base.py` when something goes wrong: withdrawal, killed and stopped peers, nobody there."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tensorhub.protocol.errors import SourceLost
from tensorhub.transport.base import Export, Progress

from . import kit
from .conftest import Make, Spawn, line
from .kit import DEADLINE_S, MIB, Gate, Target, content, full, read_all, start_read

CHUNK = 64 * 1024
LARGE = 64 * MIB  # more than the kernel keeps in its buffers: the source is in the middle of sending


def test_withdraw_cuts_a_reader_that_takes_nothing(make: Make) -> None:
    right = content(LARGE)
    memory = kit.copy_of(right)
    source, reader = make(60.0), make(60.0)
    source.export(full("k", memory, 4 * MIB))
    gates = {chunk: Gate() for chunk in range(16)}
    target = Target(right, 4 * MIB, gates=gates)
    _, ended = start_read(reader, source.endpoint, "k", target)
    assert gates[0].reached.wait(DEADLINE_S)
    assert source.withdraw("k", timeout_s=DEADLINE_S)
    memory[:] = b"\xee" * len(memory)  # allowed from now on: no reader may take this for the content
    for gate in gates.values():
        gate.release.set()
    assert isinstance(ended.wait(), SourceLost), "not a corrupt chunk: no byte was read after the withdrawal"
    for chunk in target.order:
        assert target.buffer[chunk * 4 * MIB : (chunk + 1) * 4 * MIB] == right[chunk * 4 * MIB : (chunk + 1) * 4 * MIB]


def test_withdraw_under_load_again_and_again(make: Make) -> None:
    right = content(4 * MIB)
    source, reader = make(), make()
    ends = []
    for trial in range(15):
        memory = kit.copy_of(right)
        source.export(full("k", memory, CHUNK))
        target = Target(right, CHUNK)
        _, ended = start_read(reader, source.endpoint, "k", target)
        assert target.progress.wait(trial, DEADLINE_S)
        assert source.withdraw("k", timeout_s=DEADLINE_S)
        memory[:] = b"\xee" * len(memory)
        error = ended.wait()
        assert error is None or isinstance(error, SourceLost), "what was taken too late is not judged: never corrupt"
        # What counts is right, and all of it counts exactly if the read ended well. Bytes that do not count may lie
        # there: a one-sided read cannot be called back, so its last chunks may have come, or what was written after.
        assert (len(target.order) == 64) == (error is None)
        for chunk in target.order:
            assert target.buffer[chunk * CHUNK : (chunk + 1) * CHUNK] == right[chunk * CHUNK : (chunk + 1) * CHUNK]
        ends.append((target, bytes(target.buffer)))
    # Nobody is let in again, which takes the source 2 s to say; and so long after, nothing has come to those who were.
    assert isinstance(read_all(reader, source.endpoint, "k", Target(right, CHUNK)), SourceLost)
    assert all(target.buffer == at_its_end for target, at_its_end in ends)


def test_withdraw_wakes_a_source_that_waits(make: Make) -> None:
    right = content(4 * CHUNK)
    source, reader = make(60.0), make(60.0)  # its next keepalive is 15 s away: only being woken ends this in time
    progress = Progress(4)
    progress.mark(0)
    source.export(Export("k", b"manifest", CHUNK, kit.Pieces(right), progress))
    target = Target(right, CHUNK)
    _, ended = start_read(reader, source.endpoint, "k", target)
    assert target.progress.wait(0, DEADLINE_S)
    began = time.monotonic()
    assert source.withdraw("k", timeout_s=DEADLINE_S)
    error = ended.wait()
    assert time.monotonic() - began < 14
    assert isinstance(error, SourceLost)
    assert "withdrawn" in str(error)


def test_withdraw_says_when_memory_is_still_in_use(make: Make) -> None:
    right = content(CHUNK)
    source, reader = make(), make()
    stream = kit.BlockedPieces(right)
    source.export(Export("k", b"manifest", CHUNK, stream, Progress(1, complete=True)))
    _, ended = start_read(reader, source.endpoint, "k", Target(right, CHUNK))
    assert stream.entered.wait(DEADLINE_S)
    assert not source.withdraw("k", timeout_s=0.2)
    assert not source.withdraw("k", timeout_s=0.0)
    stream.release.set()
    assert source.withdraw("k", timeout_s=DEADLINE_S)
    assert stream.inside == 0
    ended.wait()


def test_withdraw_of_what_nobody_reads_or_knows(make: Make) -> None:
    source = make()
    assert source.withdraw("k", timeout_s=0.0)
    source.export(full("k", content(1), CHUNK))
    assert source.withdraw("k", timeout_s=0.0)


def test_withdraw_also_waits_for_readers_of_what_was_replaced(make: Make) -> None:
    right = content(CHUNK)
    source, reader = make(), make()
    stream = kit.BlockedPieces(right)
    source.export(Export("k", b"manifest", CHUNK, stream, Progress(1, complete=True)))
    _, ended = start_read(reader, source.endpoint, "k", Target(right, CHUNK))
    assert stream.entered.wait(DEADLINE_S)
    source.export(full("k", right, CHUNK))
    assert not source.withdraw("k", timeout_s=0.2)
    stream.release.set()
    assert source.withdraw("k", timeout_s=DEADLINE_S)
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


@pytest.mark.processes
def test_source_killed_in_mid_read(make: Make, spawn: Spawn) -> None:
    source = spawn("source", LARGE, 4 * MIB, 16)
    endpoint, right, reader = line(source), content(LARGE), make()
    gate = Gate()
    target = Target(right, 4 * MIB, gates={4: gate})
    _, ended = start_read(reader, endpoint, "k", target)
    assert gate.reached.wait(DEADLINE_S)
    source.kill()
    source.wait()
    gate.release.set()
    error = ended.wait()
    if error is None:  # all of it was under way already
        assert target.buffer == right
    else:
        assert isinstance(error, SourceLost)
        assert endpoint in str(error)
    frozen = bytes(target.buffer)
    assert isinstance(read_all(reader, endpoint, "k", Target(right, 4 * MIB)), SourceLost)
    assert target.buffer == frozen


@pytest.mark.processes
def test_source_killed_while_it_waits(make: Make, spawn: Spawn) -> None:
    source = spawn("source", 8 * CHUNK, CHUNK, 5)
    endpoint, reader = line(source), make(60.0)
    target = Target(content(8 * CHUNK), CHUNK)
    _, ended = start_read(reader, endpoint, "k", target)
    for chunk in range(5):
        assert target.progress.wait(chunk, DEADLINE_S)
    source.kill()
    assert isinstance(ended.wait(), SourceLost)


@pytest.mark.processes
def test_stopped_source_is_lost_after_the_silence_limit(make: Make, spawn: Spawn) -> None:
    source = spawn("source", 8 * CHUNK, CHUNK, 5, 2.0)
    endpoint, reader = line(source), make(2.0)
    target = Target(content(8 * CHUNK), CHUNK)
    os.kill(source.pid, signal.SIGSTOP)  # before it has said a word
    assert isinstance(read_all(reader, endpoint, "k", target), SourceLost)
    os.kill(source.pid, signal.SIGCONT)
    _, ended = start_read(reader, endpoint, "k", target)
    for chunk in range(5):
        assert target.progress.wait(chunk, DEADLINE_S)
    os.kill(source.pid, signal.SIGSTOP)  # with five chunks sent, and more asked for
    error = ended.wait()
    assert isinstance(error, SourceLost)
    assert endpoint in str(error)
    assert "'k'" in str(error)
    assert f"{5 * CHUNK} B" in str(error)


@pytest.mark.processes
def test_stopped_reader_does_not_hold_a_withdrawal(make: Make, spawn: Spawn) -> None:
    source, right = make(60.0), content(LARGE)
    source.export(full("k", right, CHUNK))
    reader = spawn("reader", LARGE, CHUNK, source.endpoint)
    assert line(reader).startswith("stored")
    os.kill(reader.pid, signal.SIGSTOP)
    assert source.withdraw("k", timeout_s=DEADLINE_S)


@pytest.mark.processes
def test_killed_reader_leaves_nothing_behind(make: Make, spawn: Spawn) -> None:
    source, right = make(), content(LARGE)
    source.export(full("k", right, CHUNK))
    reader = spawn("reader", LARGE, CHUNK, source.endpoint)
    assert line(reader).startswith("stored")
    reader.kill()
    kit.until(lambda: source.statistics()["connections_open"] == 0, "the source has noticed")
    assert source.withdraw("k", timeout_s=0.0)


@pytest.mark.processes
def test_forgotten_close_does_not_hang_the_interpreter(kind: kit.Kind) -> None:
    peer = str(Path(__file__).with_name("peer.py"))
    done = subprocess.run(
        [sys.executable, peer, "forgetful", kind.name, str(8 * CHUNK), str(CHUNK), "5"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaving\n", "")


def test_nobody_at_the_endpoint(kind: kit.Kind, make: Make) -> None:
    with kind.mute() as endpoint:
        pass
    error = read_all(make(), endpoint, "k", Target(content(1), CHUNK))
    assert isinstance(error, SourceLost)
    assert error.retryable
    assert endpoint in str(error)


@pytest.mark.parametrize(
    "endpoint", ["", "nonsense", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:99999", "http://a:1", "local://a.1.2.3/"]
)
def test_an_endpoint_that_is_none(make: Make, endpoint: str) -> None:
    assert isinstance(read_all(make(), endpoint, "k", Target(content(1), CHUNK)), SourceLost)


def test_somebody_who_never_answers(kind: kit.Kind, make: Make) -> None:
    with kind.mute() as endpoint:
        error = read_all(make(0.3), endpoint, "k", Target(content(1), CHUNK))
        assert isinstance(error, SourceLost)
        assert "0.3 s" in str(error)
        read, ended = start_read(make(60.0), endpoint, "k", Target(content(1), CHUNK))
        read.stop()
        assert ended.wait() is None


def test_close_in_the_callback_of_a_read(make: Make) -> None:
    right = content(4 * CHUNK)
    source, reader = make(), make()
    source.export(full("k", right, CHUNK))
    closed = threading.Event()

    def close(_: object) -> None:
        reader.close()
        closed.set()

    reader.read(source.endpoint, "k", Target(right, CHUNK), close)
    assert closed.wait(DEADLINE_S)
