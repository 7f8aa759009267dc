"""The demo itself, shortened: everything but the learning, which needs more steps than a test has time for."""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from bench.demo import orchestrate
from bench.demo.director import RESTART_AT
from bench.demo.orchestrate import Options, run_demo
from bench.demo.processes import Processes, ProcessFailed
from bench.demo.report import Report
from tensorhub.protocol.errors import UsageError

STEPS = 24
DEADLINE_S = 60.0

RUN = """
import sys
from pathlib import Path
from bench.demo.orchestrate import Options, run_demo
sys.exit(run_demo(Options(out=Path(sys.argv[1]))))
"""


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("updates", [True, False])
def test_whatever_breaks_the_run_ends_and_proves_itself(tmp_path: Path, updates: bool) -> None:
    status = run_demo(Options(steps=STEPS, updates=updates, out=tmp_path))
    report = msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=Report)
    failed = [check.sentence for check in report.checks if not check.holds]
    if updates:
        assert failed == ["the reward rises from below 0.2 to above 0.8"]
    else:
        assert failed == []
    assert status == len(failed)
    assert report.summary.last_version == STEPS
    assert (tmp_path / "report.html").exists()


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_the_training_waits_for_a_late_rollout_that_is_slow_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts once the version before the held step exists, which without the wait is soon the last one."""
    held = f'"version":{int(RESTART_AT * STEPS)},'
    wait = f'until grep -q \'"published".*{held}\' {tmp_path}/events/trainer.jsonl; do sleep 0.1; done; exec "$@"'
    start = Processes.start

    def start_slowly(self: Processes, name: str, command: Sequence[str]) -> None:
        start(self, name, ["sh", "-c", wait, "sh", *command] if name == "rollout-3" else command)

    monkeypatch.setattr(Processes, "start", start_slowly)
    assert run_demo(Options(steps=STEPS, updates=False, out=tmp_path)) == 0


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ended_by_others_it_leaves_nobody_behind(tmp_path: Path, number: signal.Signals) -> None:
    demo = subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path)], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + DEADLINE_S
    while not (tmp_path / "events" / "rollout-0.jsonl").exists():
        assert time.monotonic() < deadline
        assert demo.poll() is None
        time.sleep(0.05)
    children = children_of(demo.pid)
    assert len(children) == 5, "server, trainer, three rollouts"
    demo.send_signal(number)
    assert demo.wait(DEADLINE_S) == (130 if number == signal.SIGTERM else -signal.SIGKILL)
    while [pid for pid in children if is_alive(pid)]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_last_words_of_who_failed_are_told_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "trainer ended with status 1\n[rank0]: ValueError: [/] and " + 40 * "long "

    def fail(*_: object) -> float:
        raise ProcessFailed(words)

    monkeypatch.setattr(orchestrate, "_run", fail)
    assert run_demo(Options(out=tmp_path)) == 1
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("options", [Options(steps=3), Options(rollouts=1)])
def test_what_cannot_show_anything_is_refused(options: Options) -> None:
    with pytest.raises(UsageError, match="at least 20 steps"):
        run_demo(options)


def children_of(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    """Whether it still runs; one that ended but was not waited for (an orphan in a container) does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
