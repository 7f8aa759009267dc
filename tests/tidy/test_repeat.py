"""`tools/repeat.py` counts what fails, keeps the output of it, and leaves no busy process behind."""

import subprocess
import sys
from pathlib import Path

import pytest

from .sources import ROOT

FLAKY = """
from pathlib import Path

def test_good():
    pass

def test_every_other_time():
    mark = Path(__file__).with_name("mark")
    if mark.exists():
        mark.unlink()
        assert False, "the second time"
    mark.touch()
"""


@pytest.mark.processes
def test_failures_are_counted_by_test(tmp_path: Path) -> None:
    file = tmp_path / "test_flaky.py"
    file.write_text(FLAKY, encoding="utf-8")
    out = tmp_path / "out"
    script = str(ROOT / "tools/repeat.py")
    command = [sys.executable, script, "2", str(file), "--load", "1", "--out", str(out), "-n0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("2 passed in") == 1, done.stdout
    assert "1 failed, 1 passed in" in done.stdout
    assert "failed 1 times: " in done.stdout
    assert "test_every_other_time" in done.stdout
    assert len(list(out.iterdir())) == 1
    assert "the second time" in next(out.iterdir()).read_text(encoding="utf-8")
