"""The demo itself, shortened: everything but the learning, which needs more steps than a test has time for."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from bench.demo.orchestrate import Options, run_demo
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

WITHOUT_VLLM = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "vllm" else find("json")
from bench.demo.__main__ import app
sys.argv = ["demo", "--engine", sys.argv[1]]
app()
"""


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("updates", [True, pytest.param(False, marks=pytest.mark.long)])
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
@pytest.mark.long
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


@pytest.mark.parametrize("options", [Options(steps=3), Options(rollouts=1)])
def test_what_cannot_show_anything_is_refused(options: Options) -> None:
    with pytest.raises(UsageError, match="at least 20 steps"):
        run_demo(options)


@pytest.mark.parametrize(
    ("engine", "words"),
    [("vllm", ["the demo needs vllm", "make demo-vllm"]), ("sglang", ["no demo with the engine 'sglang'"])],
)
def test_an_engine_that_is_not_there_is_named_with_the_remedy(engine: str, words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_VLLM, engine], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    said = (done.stdout + done.stderr).strip()
    assert "Traceback" not in said
    for each in words:
        assert each in said, said


def children_of(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    """Whether it still runs; one that ended but was not waited for (an orphan in a container) does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
