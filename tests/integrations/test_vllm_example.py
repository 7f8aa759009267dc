"""The example: FSDP2 teaches a sentence, and an engine of vLLM says it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM, in an environment of its own: make test-engines")

import tensorhub

from .kit import eventually

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]
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
