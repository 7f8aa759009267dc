"""Whole runs with vLLM: an engine that comes back, the demo, and the example."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM, in an environment of its own: make test-engines")

import msgspec

import tensorhub
from bench.demo.orchestrate import Options, run_demo
from bench.demo.report import Report

from .engine import UNPACKED
from .engines import started
from .kit import eventually, free_port
from .llama import Trainer

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_number_that_is_used_again_is_loaded_again(tmp_path, in_place):
    port = free_port()
    with started(tmp_path) as start:
        with tensorhub.serve(port=port, lease_s=5.0, report_s=0.25) as hub:
            trainer = Trainer(tmp_path, hub.address)
            engine = start("rollout-0", **({UNPACKED: "all"} if in_place else {}))
            engine.call("start", path=trainer.path, replica="rollout-0", server=hub.address, in_place=in_place)
            assert engine.call("attach") == 0
            trainer.check(engine)
            engine.call("leave")
            assert engine.call("attach") == 0, "the same version once more"
            trainer.check(engine)
            engine.call("leave")
            trainer.publisher.close(timeout=10)
        with tensorhub.serve(port=port, lease_s=5.0, report_s=0.25) as hub:
            trainer.publish_anew(hub.address)
            assert engine.call("update") == 0
            trainer.check(engine)
            trainer.step(1)
            assert engine.call("update") == 1
            trainer.check(engine)
            trainer.publisher.close(timeout=10)


@pytest.mark.parametrize(
    ("updates", "steps"), [(True, 80), (False, 30)], ids=["it learns", "without updates it does not"]
)
def test_whatever_is_killed_the_run_ends_and_proves_itself(tmp_path, updates, steps):
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


FOLDER = Path(__file__).parents[2] / "examples" / "fsdp2_vllm"


def test_the_engine_says_what_the_trainer_has_learned(tmp_path):
    with tensorhub.serve(lease_s=5.0, report_s=0.25) as server:
        environ = {**os.environ, "TENSORHUB_SERVER": server.address, "PYTHONUNBUFFERED": "1"}
        ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        train = [*ranks, str(FOLDER / "trainer.py"), "150"]
        trainer = subprocess.Popen(train, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True)
        try:
            assert trainer.stdout is not None
            config = tmp_path / "out" / "tiny-llama" / "config.json"
            eventually(config.exists, "the trainer has said what the model is like", within_s=120)
            speak = [sys.executable, str(FOLDER / "engine.py"), "rollout-7"]
            engine = subprocess.run(
                speak, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=400, check=False
            )
            said = re.findall(r"version (\d+) says: '(.*)'", engine.stdout)
            assert engine.returncode == 0, engine.stdout + engine.stderr
            assert said[-1][1] == "the new weights are in every engine. "
            assert [int(version) for version, _ in said] == sorted(int(version) for version, _ in said)
            assert len({text for _, text in said}) > 1, "it had to learn it"
            assert "rollout-7" not in {each.name for each in tensorhub.connect(server.address).replicas("policy")}
            published, _ = trainer.communicate(timeout=300)
            assert "published version 150" in published
            assert trainer.returncode == 0
        finally:
            trainer.terminate()  # and with it both ranks
            trainer.wait(60)
