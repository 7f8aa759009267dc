"""The demo with vLLM, shortened: real engines and a real trainer, killed and refilled, and all of its proofs."""

import msgspec
import pytest

pytest.importorskip("vllm", reason="needs vLLM, in an environment of its own: make test-engines")

from bench.demo.orchestrate import Options, run_demo
from bench.demo.report import Report

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("updates", "steps"), [(True, 80), (False, 30)], ids=["it learns", "without updates it does not"]
)
def test_whatever_is_killed_the_run_ends_and_proves_itself(tmp_path, figures, updates, steps):
    status = run_demo(Options(engine="vllm", rollouts=2, steps=steps, updates=updates, out=tmp_path))
    report = msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=Report)
    assert [f"{check.sentence}: {check.detail}" for check in report.checks if not check.holds] == []
    assert status == 0
    assert len(report.checks) == 9
    summary = report.summary
    assert summary.last_version == steps
    assert summary.refills[0].version > 0
    whats = [(fault.process, fault.what) for fault in summary.faults]
    assert whats == [
        ("rollout-1", "killed"),
        ("rollout-2", "started late"),
        ("trainer", "killed"),
        ("trainer", "restarted"),
        ("server", "killed"),
        ("server", "restarted"),
    ]
    figures(
        f"demo with vLLM, {steps} steps{'' if updates else ' without updates'}: {summary.seconds:.0f} s, reward "
        f"{summary.reward_start:.3f} → {summary.reward_end:.3f}, refilled after {summary.refills[0].seconds:.1f} s"
    )
