"""What `serve` prints keeps nobody waiting: not its workers, and not its end, whoever reads it or does not."""

import contextlib
import fcntl
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import tensorhub
from tensorhub.cli import output as log
from tensorhub.cli.output import WaitingLog

from .test_commands import run

END_S = 20.0  # of a process that ends
SMALL_BYTES = 4096  # the smallest pipe there is


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("a", logging.INFO, __file__, 0, text, None, None)


class Reader:
    """Reads a pipe to its end, once it is told to."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._found = descriptor, b""
        self._thread = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        while data := os.read(self._descriptor, 1 << 16):
            self._found += data

    def begin(self) -> None:
        self._thread.start()

    def lines(self) -> list[str]:
        self._thread.join(END_S)
        assert not self._thread.is_alive()
        os.close(self._descriptor)
        return self._found.decode().splitlines()


@pytest.fixture
def pipe() -> Iterator[tuple[Reader, int]]:
    """A reader that has not begun, and where to write for it."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, SMALL_BYTES)
    yield Reader(reading), writing
    with contextlib.suppress(OSError):
        os.close(writing)


def test_what_nobody_reads_is_dropped_and_counted(pipe: tuple[Reader, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "MAX_WAITING_BYTES", 10_000)
    monkeypatch.setattr(log, "END_S", END_S)
    reader, writing = pipe
    handler = WaitingLog(writing)
    for number in range(1000):
        handler.emit(record(f"line {number}"))
    reader.begin()
    handler.close()
    os.close(writing)
    *kept, last = reader.lines()
    found = re.search(r"(\d+) lines of this log were dropped", last)
    assert found is not None
    assert len(kept) + int(found[1]) == 1000
    assert [line.split("line ")[1] for line in kept] == [str(number) for number in range(len(kept))]


def test_what_could_not_be_written_is_counted_once_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that was full: there is no other try until there is another line."""
    written: list[bytes] = []
    is_full, tried = True, threading.Semaphore(0)

    def write(_: int, data: bytes) -> bool:
        if not is_full:
            written.append(data)
        tried.release()
        return not is_full

    monkeypatch.setattr(log, "_write_all", write)
    handler = WaitingLog(-1)
    for number in range(3):
        handler.emit(record(f"line {number}"))
        assert tried.acquire(timeout=END_S)
    is_full = False
    handler.emit(record("line 3"))
    handler.close()
    said = b"".join(written).decode()
    assert "3 lines of this log were dropped" in said
    assert said.endswith("line 3\n")


def test_a_line_that_cannot_be_made_ends_nobody(pipe: tuple[Reader, int]) -> None:
    reader, writing = pipe
    reader.begin()
    handler = WaitingLog(writing)
    handler.emit(logging.LogRecord("a", logging.INFO, __file__, 0, "%d is no number", ("x",), None))
    handler.emit(record("a surrogate: \udcff"))
    handler.close()
    os.close(writing)
    first, second = reader.lines()
    assert "'%d is no number'" in first
    assert second.endswith(r"a surrogate: \udcff")


# --- a server ---------------------------------------------------------------------------------------------------------

SERVE = [sys.executable, "-m", "tensorhub", "serve", "--port", "0", "--fresh"]


def ended(program: subprocess.Popen[str]) -> int:
    program.send_signal(signal.SIGTERM)
    return program.wait(END_S)


@pytest.mark.long
@pytest.mark.processes
def test_a_log_that_nobody_reads_stops_no_worker_and_no_end(pipe: tuple[Reader, int]) -> None:
    reader, writing = pipe
    with subprocess.Popen(SERVE, stdout=subprocess.PIPE, stderr=writing, text=True) as program:
        assert program.stdout is not None
        address = program.stdout.readline().split()[3].rstrip(";")
        with (
            tensorhub.open("m", replica="t", server=address) as trainer,
            tensorhub.open("m", replica="r" * 100, server=address) as rollout,
        ):
            array = np.zeros(10)
            trainer.register({"w": array})
            rollout.register({"w": np.zeros(10)})
            for version in range(3 * SMALL_BYTES // 200):
                with trainer.mutating(version=version, timeout=10):
                    array += 1
                assert rollout.update("latest", timeout=10) == version
        assert ended(program) == 0
    os.close(writing)
    reader.begin()
    assert len(reader.lines()) > SMALL_BYTES // 300


@pytest.mark.processes
def test_a_server_goes_on_where_stdout_takes_nothing() -> None:
    with (
        open("/dev/full", "w", encoding="utf-8") as full,
        subprocess.Popen(SERVE, stdout=full, stderr=subprocess.PIPE, text=True) as program,
    ):
        assert program.stderr is not None
        for line in program.stderr:
            if "stdout takes nothing more (No space left on device)" in line:
                break
        found = re.search(r"reference server at (\S+);", line)
        assert found is not None
        assert run("status", "--server", found[1])[0] == 0
        assert ended(program) == 0


@pytest.mark.processes
def test_a_server_whose_streams_are_closed_puts_no_socket_in_their_place() -> None:
    with tensorhub.serve() as other:
        port = other.address.rpartition(":")[2]
    script = f'exec "$@" --port {port} <&- >&- 2>&-'
    with subprocess.Popen(["sh", "-c", script, "sh", *SERVE], text=True) as program:
        try:
            with tensorhub.open("m", replica="r", server=f"127.0.0.1:{port}", timeout=60):
                links = [os.readlink(f"/proc/{program.pid}/fd/{number}") for number in range(2)]
            assert links == ["/dev/null", "/dev/null"]
            assert ended(program) == 0
        finally:
            program.kill()
