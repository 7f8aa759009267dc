"""TRL's asynchronous trainer and a real vLLM server in one run: after training the server answers as the trained model.

It needs TRL beside vLLM, which no environment of `tools/env` has: install trl, accelerate and datasets into .envs/vllm.
"""

import json

import pytest

pytest.importorskip("vllm", reason="needs vLLM, in an environment of its own: make test-engines")
pytest.importorskip("trl", reason="needs TRL beside vLLM: pip install --no-deps trl accelerate datasets … there")

import torch

import tensorhub
from tensorhub.integrations.trl import WeightTransfer

from .kit import eventually
from .test_trl import STEPS, Rollouts, async_trainer
from .test_vllm_server import Server, places
from .tiny import save_tiny_llama

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


def test_a_real_server_ends_with_what_was_trained(tmp_path, monkeypatch):
    path = save_tiny_llama(tmp_path / "llama")
    with tensorhub.serve(lease_s=5.0, report_s=0.25) as hub:
        server = Server(tmp_path, path, None)
        try:
            eventually(server.is_up, "the server is up", within_s=400)
            prompt = [5, 9, 12, 30, 17, 3]
            random = list(server.complete(prompt, 8))  # of dummy weights
            rollouts = Rollouts(hub.address)
            transfer = WeightTransfer("policy", engines=[server.url], dtype=torch.bfloat16, server=hub.address)
            trainer = async_trainer(path, tmp_path, monkeypatch, rollouts, transfer)
            trainer.train()
            model = trainer.accelerator.unwrap_model(trainer.model)
            assert json.loads(server.get("/weight_info")) == {"weight_version": str(STEPS)}
            model.set_attn_implementation("sdpa")
            assert places(model, prompt, list(server.complete(prompt, 8))) == [True] * 8
            assert places(model, prompt, random) != [True] * 8
        finally:
            server.end()
