"""A vLLM server that takes versions over HTTP while it answers: the request under way lives on, with the new weights.

It loads them, or reads them in place (with vLLM's packing for CPUs turned off). After the swap every token of the
request is what transformers computes with the new version, over all that was said before.
"""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

pytest.importorskip("vllm", reason="needs vLLM, in an environment of its own: make test-engines")

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import tensorhub
from tensorhub.integrations import vllm

from .engine import SETTINGS, UNPACKED
from .kit import ROOT, eventually, free_port
from .llama import LONG, Trainer

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

TOKENS = 110
NEAR = 0.3  # a log-probability in bfloat16, at its worst; versions are several apart


class Server:
    """`vllm serve`, without the command."""

    def __init__(self, folder, path, joined):
        self.url, self.log = f"http://127.0.0.1:{free_port()}", folder / "server.log"
        options = {
            "--model": path,
            "--served-model-name": "policy",
            "--load-format": "dummy",
            "--weight-transfer-config": json.dumps({"backend": "tensorhub"}),
            "--additional-config": json.dumps({"tensorhub": joined}),
            "--port": self.url.rpartition(":")[2],
            "--max-model-len": "256",
            "--max-num-seqs": "4",
            "--dtype": "bfloat16",
            "--worker-extension-cls": "tests.integrations.engine.Spoiled",
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
        command += [word for pair in options.items() for word in pair]
        environ = {**os.environ, **SETTINGS, "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        environ[UNPACKED] = "all" if joined["in_place"] else ""
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environ, stdout=log, stderr=log, start_new_session=True
            )

    def is_up(self):
        assert self.process.poll() is None, self.log.read_text()[-6000:]
        try:
            return self.get("/health") is not None
        except (urllib.error.URLError, ConnectionError):
            return False

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return answer.read().decode()

    def complete(self, prompt, tokens):
        """(token, log-probability), one by one, as the server says them."""
        asked = {"model": "policy", "prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "stream": True}
        asked |= {"logprobs": 1, "ignore_eos": True, "return_tokens_as_token_ids": True}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + "/v1/completions", json.dumps(asked).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    said = choice["logprobs"]
                    for token, logprob in zip(said["tokens"], said["token_logprobs"], strict=True):
                        yield int(token.removeprefix("token_id:")), logprob

    def end(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)


@pytest.fixture
def hub():
    with tensorhub.serve(lease_s=5.0, report_s=0.25) as found:
        yield found.address


@pytest.mark.parametrize("in_place", [False, True])
def test_a_long_request_lives_through_an_update(tmp_path, hub, in_place):
    trainer = Trainer(tmp_path, hub)
    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(128)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0").save_pretrained(trainer.path)
    joined = {"model": "policy", "replica": "rollout-0", "in_place": in_place, "options": {"server": hub}}
    server = Server(tmp_path, trainer.path, joined)
    try:
        eventually(server.is_up, "the server is up", within_s=240)
        prompt = LONG
        first = list(server.complete(prompt, 8))
        assert places(trainer.module, prompt, first) == [True] * 8, "the first version was in before it served"
        weights = vllm.attach(server.url, "policy", replica="rollout-0", server=hub, in_place=in_place)
        assert weights.version == 0
        trainer.step(1)  # before the request, which would end meanwhile where cores are few
        asked = server.complete(prompt, TOKENS)
        said = [next(asked) for _ in range(4)]
        assert weights.update() == 1
        assert json.loads(server.get("/weight_info")) == {"weight_version": "1"}
        said += list(asked)
        assert len(said) == TOKENS, "the request was kept"
        old, new = places(trainer.before, prompt, said), places(trainer.module, prompt, said)
        swapped = old.index(False)
        assert swapped >= 4
        assert all(new[swapped:]), f"a mixture after token {swapped}: {new}"
        assert not any(new[:swapped]) or sum(new[:swapped]) < swapped / 2
        again = list(server.complete(prompt, 8))
        assert places(trainer.module, prompt, again) == [True] * 8, "nothing of the old version was cached"
        trainer.publisher.close(timeout=10)
    finally:
        server.end()


def places(module, prompt, said):
    """For each token: whether that module says the same of it, over all that was said before."""
    tokens = [token for token, _ in said]
    with torch.no_grad():
        exact = module(torch.tensor([prompt + tokens])).logits[0].float().log_softmax(-1)
    found = [exact[len(prompt) - 1 + at, token].item() for at, token in enumerate(tokens)]
    return [abs(here - there) < NEAR for here, (_, there) in zip(found, said, strict=True)]
