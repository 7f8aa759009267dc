"""Child processes: killed, told to leave, missed when they fail, never left behind."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.demo.processes import Processes, ProcessFailed, free_address

DEADLINE_S = 30.0
LASTING = [sys.executable, "-c", "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"]
STUBBORN = [
    sys.executable,
    "-c",
    "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid(), flush=True)\n"
    "while True: time.sleep(1)",
]
FAILING = [sys.executable, "-c", "print('some last words'); raise SystemExit(3)"]


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def pid_of(logs: Path, name: str) -> int:
    log = logs / f"{name}.log"
    wait_until(lambda: log.exists() and log.read_text().endswith("\n"))
    return int(log.read_text().split()[0])


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path) as processes:
        yield processes


def test_told_to_leave_it_leaves(processes: Processes, tmp_path: Path) -> None:
    processes.start("one", LASTING)
    pid_of(tmp_path, "one")
    processes.check()
    assert processes.running == {"one"}
    processes.release("one")

    def has_left() -> bool:
        processes.check()
        return not processes.running

    wait_until(has_left)


def test_killed_is_killed(processes: Processes, tmp_path: Path) -> None:
    processes.start("one", STUBBORN)
    pid = pid_of(tmp_path, "one")
    processes.kill("one")
    assert not is_alive(pid)
    processes.check()


def test_a_failure_is_told_with_its_last_words(processes: Processes) -> None:
    processes.start("one", FAILING)
    with pytest.raises(ProcessFailed, match=r"one ended with status 3\n(?s:.*)some last words"):
        wait_until(processes.check)


def test_several_are_killed_before_any_hears_of_the_others(processes: Processes, tmp_path: Path) -> None:
    for name in ("one", "two"):
        processes.start(name, STUBBORN)
    pids = [pid_of(tmp_path, name) for name in ("one", "two")]
    processes.kill("one", "two")
    assert not any(is_alive(pid) for pid in pids)
    processes.check()


def test_who_died_before_being_killed_is_told(processes: Processes, tmp_path: Path) -> None:
    processes.start("one", LASTING)
    os.kill(pid_of(tmp_path, "one"), signal.SIGTERM)
    processes._running["one"].wait(DEADLINE_S)
    with pytest.raises(ProcessFailed, match="had ended with status -15 before it was killed"):
        processes.kill("one")


def test_nobody_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.demo.processes.LEAVE_S", 0.5)
    with Processes(tmp_path) as processes:
        processes.start("gentle", LASTING)
        processes.start("stubborn", STUBBORN)
        pids = [pid_of(tmp_path, name) for name in ("gentle", "stubborn")]
    assert not any(is_alive(pid) for pid in pids)


def test_addresses_are_outside_the_range_of_outgoing_connections() -> None:
    assert all(18000 <= int(free_address().rpartition(":")[2]) < 30000 for _ in range(50))
