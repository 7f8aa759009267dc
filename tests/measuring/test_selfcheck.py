"""The benchmarks still run: every part once and tiny. What they measure is no test's business."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = {
    "one_reader",
    "addresses",
    "busy",
    "sizes",
    "chunks",
    "many_tensors",
    "masters",
    "fan_out",
    "faults",
    "faults_across",
    "memory",
    "growth",
    "pieces",
    "pieces_beside",
    "plans",
    "server",
    "taking_back",
    "decisions",
    "lateness",
}

NOT_EVERYWHERE = ("addresses", "fan_out", "faults", "faults_across", "masters", "taking_back")  # root


@pytest.mark.processes
@pytest.mark.timeout(900)  # two minutes on a quiet machine; only a hang may end it on one that is three times slower
def test_every_part_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "--selfcheck", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=840, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert set(found["parts"]) == PARTS
    for name, part in found["parts"].items():
        assert "skipped" not in part or name in NOT_EVERYWHERE, f"{name} was skipped: {part['skipped']}"
    assert (tmp_path / "bench.md").read_text(encoding="utf-8").startswith("Measured with")
