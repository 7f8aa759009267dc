"""A server may open as many connections as the system lets it, and says so where that is too few."""

import contextlib
import re
import resource
import socket
import subprocess
import sys
from math import inf
from pathlib import Path

import pytest

import tensorhub
from tensorhub.runtime import admission
from tensorhub.runtime.admission import RESERVE, SAY_EVERY_S, Descriptors, check_limit

from .kit import PATIENCE_S, eventually

FEW = 128


def test_next_to_none_left_is_said_once(monkeypatch, caplog):
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    looks = Descriptors()
    for now, lowest, said in (
        (0.0, limit - RESERVE - 1, 0),
        (1.0, limit - RESERVE, 1),
        (2.0, inf, 1),
        (3.0, 20, 1),
        (4.0, inf, 1),  # again, but it was said a moment ago
        (5.0, 20, 1),
        (1.0 + SAY_EVERY_S, inf, 2),
    ):
        monkeypatch.setattr(admission, "_lowest_free", lambda lowest=lowest: lowest)
        looks.look(now)
        assert len(caplog.records) == said


def test_a_limit_below_what_workers_need_is_said(caplog):
    check_limit(1000 + RESERVE, 1000)
    check_limit(resource.RLIM_INFINITY, 1000)
    assert not caplog.records
    check_limit(999 + RESERVE, 1000)
    assert "raise `ulimit -n`" in caplog.text


@contextlib.contextmanager
def serving(tmp_path: Path, soft: int, hard: int):
    """A server whose process may open so many: its address, its process and its log so far."""
    path = tmp_path / "log"
    command = [sys.executable, "-m", "tensorhub.cli", "serve", "--port", "0", "--fresh"]
    script = f'ulimit -Sn {soft} && ulimit -Hn {hard} && exec "$@"'
    with (
        path.open("w") as log,
        subprocess.Popen(["bash", "-c", script, "bash", *command], stdout=subprocess.PIPE, stderr=log, text=True) as it,
    ):
        try:
            yield it.stdout.readline().split()[3].rstrip(";"), it, path.read_text
        finally:
            it.terminate()
            assert it.wait(PATIENCE_S) == 0


@pytest.mark.processes
def test_a_server_takes_all_that_it_may_have_and_says_when_that_is_too_little(tmp_path):
    with serving(tmp_path, FEW, 2 * FEW) as (_, process, log):
        found = re.search(r"Max open files +(\d+) +(\d+)", Path(f"/proc/{process.pid}/limits").read_text())
        assert found is not None
        assert found.groups() == (str(2 * FEW), str(2 * FEW))
        eventually(lambda: f"this process may open {2 * FEW} files and connections" in log(), "it says so")


@pytest.mark.processes
def test_strangers_that_take_every_connection_are_named_and_do_not_last(tmp_path):
    with serving(tmp_path, FEW, FEW) as (address, _, log), contextlib.ExitStack() as stack:
        host, port = address.split(":")
        for _ in range(FEW + 20):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE_S))
        eventually(lambda: "workers are turned away" in log(), "it is said")
        with tensorhub.open("m", replica="r", server=address, timeout=PATIENCE_S):
            assert log().count("workers are turned away") == 1
