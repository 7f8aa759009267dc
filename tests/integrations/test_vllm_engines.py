"""Engines of vLLM in processes of their own: they answer what the published version answers.

The trainer is a model of transformers, random and small. After each version an engine's log-probabilities are as near
to those of transformers in float32 as transformers' own in bfloat16, and far from those of the version before. Engines
load versions by vLLM's reload, or read them in place: then vLLM's packing for CPUs is turned off, as there is none on
GPUs.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM, in an environment of its own: make test-engines")

import msgspec
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import tensorhub
from bench.demo.orchestrate import Options, run_demo
from bench.demo.report import Report
from tensorhub.integrations import vllm

from .engine import SETTINGS, UNPACKED
from .engines import is_reading, started, stopped
from .kit import ROOT, Job, eventually, free_port
from .llama import KINDS, LONG, PROMPTS, Judge, Trainer

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]


@pytest.fixture
def server():
    with tensorhub.serve(lease_s=5.0, report_s=0.25) as found:
        yield found.address


@pytest.fixture
def start(tmp_path, server):
    """`start("rollout-0", path, ranks=2)` starts an engine, without a version yet."""
    with started(tmp_path) as begin:

        def engine(name, path, **options):
            found = begin(name, **{UNPACKED: "all" if options.get("in_place") else ""})
            found.call("start", path=path, replica=name, server=server, **options)
            return found

        yield engine


@pytest.fixture
def trainer(tmp_path, server, request):
    found = Trainer(tmp_path, server, getattr(request, "param", "llama"))
    yield found
    found.publisher.close(timeout=10)


@pytest.fixture
def jobs(tmp_path, server):
    """`jobs(judge)` starts ranks of a trainer with FSDP2, which have published or filled themselves: (job, version)."""
    made = []

    def begin(judge, ranks=2, seed=0):
        made.append(Job(ranks, server, tmp_path))
        made[-1].call("build", kind="language", path=judge.path, seed=seed)
        return made[-1], made[-1].call("attach", model="policy", dtype="bfloat16")

    yield begin
    for job in made:
        job.end()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("trainer", KINDS, indirect=True)
def test_after_each_version_the_engine_answers_what_transformers_answers(trainer, start, ranks):
    engine = start("rollout-0", trainer.path, ranks=ranks)
    assert engine.call("attach") == 0
    trainer.check(engine)
    for version in range(1, 6):
        trainer.step(version)
        assert engine.call("update") == version
        trainer.check(engine)
        trainer.check_exactly(engine)
        assert engine.call("held") == [version, str(version)], "vLLM was told which version it is"
    assert engine.call("update") == 5, "nothing is newer"
    trainer.step(6)
    engine.call("spoil_fetch", rank=0)
    failed = engine.ask("update")
    assert failed["kind"] == "VersionUnavailable"
    assert "goes on with 5" in failed["message"]
    assert "a fetch that fails" in engine.log.read_text()
    trainer.check(engine, is_behind=True)  # on all ranks, though only one has failed
    assert engine.call("held") == [5, "5"]
    assert engine.call("update") == 6
    trainer.check(engine)
    engine.call("spoil", after=5)  # between gate_proj and up_proj, which vLLM fuses
    trainer.step(7)
    failed = engine.ask("update")
    assert failed["kind"] == "VersionUnavailable"
    assert "loaded in part" in failed["message"]
    assert engine.call("held")[0] is None, "it says that it has no version"
    assert engine.call("update") == 7
    trainer.check(engine)
    engine.call("spoil", after=7)
    trainer.step(8)
    assert engine.ask("update")["kind"] == "VersionUnavailable"
    refused = engine.ask("answer", prompts=PROMPTS)
    assert refused is None or "kind" in refused, "never a mixture"
    assert "the weights are no version" in engine.log.read_text()


def test_a_new_engine_fills_itself_from_others_and_a_trainer_that_is_gone_is_not_missed(trainer, server, start):
    first = start("rollout-0", trainer.path)
    trainer.step(1)
    assert first.call("attach") == 1
    trainer.publisher.close()
    late = start("rollout-1", trainer.path, early=True)
    trainer.check(late)  # it was loaded before vLLM would serve: no driver has attached yet
    assert late.call("attach") == 1
    assert late.call("held")[1] == "1"
    assert late.call("sources") == ["rollout-0"]
    assert first.call("update", timeout=3) == 1, "the newest version that there is"
    first.call("leave")
    assert {each.name for each in tensorhub.connect(server).replicas("policy")} == {"rollout-1"}
    trainer.check(first)  # it goes on with what it has


@pytest.mark.parametrize("in_place", [False, True])
def test_engine_and_source_are_killed_in_mid_update(server, start, jobs, tmp_path, in_place):
    """An engine dies in mid-update, then the only source."""
    judge = Judge(tmp_path)
    job, _ = jobs(judge)
    names = ("rollout-0", "rollout-1", "rollout-2")
    killed, engine, spare = (start(each, judge.path, transports="tcp", in_place=in_place) for each in names)
    assert [each.call("attach") for each in (killed, engine, spare)] == [0, 0, 0]
    judge.follow(job, 0)
    judge.check(engine)
    job.call("step", version=1)
    with stopped(job):
        asked = killed.begin("update")
        eventually(lambda: is_reading(server, "rollout-0"), "the engine is in mid-update")
        killed.end()
        asked.join(20)
    assert asked.answer is None
    assert engine.call("update") == spare.call("update") == 1
    judge.follow(job, 1)
    judge.check(engine)

    job.call("step", version=2)
    with stopped(job):
        asked = engine.begin("update", timeout=60)
        eventually(lambda: is_reading(server, "rollout-1"), "the engine is in mid-update")
        job.end()
        asked.join(90)
    assert asked.answer == {"value": 1}, "version 2 is lost, and the newest that there is then is the one before"
    judge.check(engine)
    assert engine.call("held") == [1, "1"]

    again, version = jobs(judge, seed=1)
    assert version == 1, "filled by an engine"
    version = again.call("step")
    assert version == 3, "2 was taken, and lost"
    assert engine.call("update") == spare.call("update") == 3
    judge.follow(again, version)
    judge.check(engine)
    judge.check(spare)


@pytest.mark.parametrize(
    ("kind", "ranks", "others", "tied"),
    [("llama", 1, 2, False), ("llama", 2, 1, True), ("qwen3", 1, 2, False), ("qwen3_moe", 2, 1, False)],
)
def test_in_place_from_the_trainers_shards_and_from_an_engine_of_other_ranks(
    start, jobs, tmp_path, kind, ranks, others, tied
):
    judge = Judge(tmp_path, kind, tie_word_embeddings=tied)
    job, version = jobs(judge)
    engine = start("rollout-0", judge.path, in_place=True, ranks=ranks)
    padding = engine.call("padding")
    assert {len(rows) for rows in padding[-1]} == {2 * 128}, "two rows of the last rank's embedding, and of its head"
    assert engine.call("attach") == version
    for version in range(5):
        if version:
            job.call("step", version=version)
            assert engine.call("update") == version
        judge.follow(job, version)
        judge.check(engine)
        assert engine.call("held") == [version, str(version)]
    assert engine.call("sources") == ["trainer"]
    assert engine.call("padding") == padding, "rows that are no words were touched"
    job.end()
    late = start("rollout-1", judge.path, in_place=True, ranks=others)
    assert late.call("attach", timeout=90) == 4, "the trainer has gone"
    judge.check(late)
    assert late.call("sources") == ["rollout-0"]
    again, version = jobs(judge, ranks=3, seed=1)
    assert version == 4, "filled by engines"
    version = again.call("step")
    judge.follow(again, version)
    for each in (engine, late):
        assert each.call("update") == version
        judge.check(each)
        judge.check_exactly(each)


@pytest.mark.parametrize(
    ("kind", "unpacked", "named", "why"),
    [
        # packed and emptied, or not even packed where the processor is too old for it, which nobody can tell by looking
        ("llama", "", r"(proj|lm_head)\.weight", "computes with a processed copy|processing after a load reads it"),
        ("qwen3_moe", "linear", r"experts\.w13_weight", "processing after a load reads it"),
    ],
)
def test_weights_that_vllm_packs_are_not_read_in_place(tmp_path, server, jobs, kind, unpacked, named, why):
    """And the hint can be followed: the same engine then loads them by vLLM's reload."""
    judge = Judge(tmp_path, kind)
    job, version = jobs(judge)
    with started(tmp_path) as begin:
        engine = begin("rollout-0", **{UNPACKED: unpacked})
        engine.call("start", path=judge.path, replica="rollout-0", server=server, in_place=True)
        refused = engine.ask("attach")
        assert refused["kind"] == "TensorHubError"
        assert re.search(why, refused["message"])
        assert re.search(named, refused["message"]), refused["message"]
        assert "leave in_place out" in refused["message"]
        assert engine.call("attach", in_place=False) == version
        judge.follow(job, version)
        judge.check(engine)


W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


class Case:
    """One engine, of Llama in place; versions are published by a trainer of their own each."""

    def __init__(self, folder, start, server, kind):
        self.server, self.is_quantized = server, kind == "w8a8"
        self.judge = Judge(folder, "llama" if self.is_quantized else kind)
        if self.is_quantized:
            self.quantize()
        self.engine = start("rollout-0", self.judge.path, in_place=kind == "llama")
        self.next = 0
        first = min(self.good())
        with self.published({name: each for name, each in self.good().items() if name != first}):
            found = self.engine.ask("attach")
            assert found["kind"] == "TensorHubError", found
            assert "cannot be" in found["message"], "a first version that lacks something is refused too"
        with self.published(self.good()):
            assert self.engine.call("attach") == self.next - 1
        self.check()

    def good(self):
        """The tensors of the model as it is, as its file has them."""
        self.judge.module.save_pretrained(f"{self.judge.path}-file")
        found = load_file(f"{self.judge.path}-file/model.safetensors")
        return quantized(found) if self.is_quantized else found

    def quantize(self):
        """From now on the engine computes with linear layers in integers."""
        path = f"{self.judge.path}/config.json"
        with open(path) as file:
            config = json.load(file)
        with open(path, "w") as file:
            json.dump({**config, "quantization_config": W8A8}, file)

    @contextlib.contextmanager
    def published(self, tensors):
        """A block in which they are the newest version."""
        with tensorhub.open("policy", replica=f"trainer-{self.next}", server=self.server) as trainer:
            trainer.register(tensors, boxes={})
            trainer.publish(self.next)
            self.next += 1
            yield

    def answers(self):
        return [self.engine.call("answer", prompts=[prompt]) for prompt in PROMPTS]

    def check(self):
        if not self.is_quantized:
            self.judge.check(self.engine)


def quantized(tensors):
    """Linear layers as integers, with a scale for each row."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            scale = tensor.float().abs().amax(dim=1, keepdim=True) / 127
            found[name] = (tensor.float() / scale).round().to(torch.int8)
            found[f"{name}_scale"] = scale.to(tensor.dtype)
        else:
            found[name] = tensor
    return found


def without(*ends):
    return lambda tensors: {name: each for name, each in tensors.items() if not name.endswith(ends)}


def more(name, *shape):
    return lambda tensors: {**tensors, name: torch.ones(shape, dtype=torch.bfloat16)}


TABLE = {
    "qwen2": (without("layers.0.self_attn.k_proj.weight"), "has no 'model.layers.0.self_attn.k_proj.weight'"),
    "gemma3_text": (more("lm_head.weight", 126, 128), "'lm_head.weight'"),
    "mixtral": (without("layers.1.block_sparse_moe.experts.3.w3.weight"), "experts.routed_experts.w13_weight'"),
    "gpt_neox": (without("layers.1.attention.query_key_value.weight"), "layers.1.attention.query_key_value.weight'"),
    "w8a8": (without("0.mlp.down_proj.weight_scale"), "no 'model.layers.0.mlp.down_proj.weight_scale'"),
    "llama": (lambda tensors: {name: each.float() for name, each in tensors.items()}, 'dtype="bfloat16"'),
}


@pytest.mark.parametrize("kind", TABLE)
def test_a_version_that_does_not_fit_is_refused_by_name_and_a_good_one_loads(start, server, tmp_path, kind):
    """As an update, and when the engine joins. It answers afterwards what it answered before, to the bit."""
    change, said = TABLE[kind]
    it = Case(tmp_path, start, server, kind)
    before, version = it.answers(), it.engine.call("held")[0]
    with it.published(change(it.good())):
        found = it.engine.ask("update")
        assert found.get("kind") == "VersionUnavailable", found
        assert f"goes on with {version}" in found["message"]
        assert it.answers() == before
        it.engine.call("leave")
        found = it.engine.ask("attach")
        assert found.get("kind") == "TensorHubError", found
        assert said in found["message"], found["message"]
        assert it.answers() == before
    if not it.is_quantized:
        it.judge.change()
    with it.published(it.good()):
        assert it.engine.call("attach") == it.next - 1
        it.check()
    assert (it.answers() == before) == it.is_quantized


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


@pytest.mark.parametrize("in_place", [False, True])
def test_a_long_request_lives_through_an_update(tmp_path, server, in_place):
    """After the swap each token is what transformers computes with the new version, over all that was said before."""
    trainer = Trainer(tmp_path, server)
    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(128)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0").save_pretrained(trainer.path)
    joined = {"model": "policy", "replica": "rollout-0", "in_place": in_place, "options": {"server": server}}
    served = Server(tmp_path, trainer.path, joined)
    try:
        eventually(served.is_up, "the server is up", within_s=240)
        prompt = LONG
        first = list(served.complete(prompt, 8))
        assert places(trainer.module, prompt, first) == [True] * 8, "the first version was in before it served"
        weights = vllm.attach(served.url, "policy", replica="rollout-0", server=server, in_place=in_place)
        assert weights.version == 0
        trainer.step(1)  # before the request, which would end meanwhile where cores are few
        asked = served.complete(prompt, TOKENS)
        said = [next(asked) for _ in range(4)]
        assert weights.update() == 1
        assert json.loads(served.get("/weight_info")) == {"weight_version": "1"}
        said += list(asked)
        assert len(said) == TOKENS, "the request was kept"
        old, new = places(trainer.before, prompt, said), places(trainer.module, prompt, said)
        swapped = old.index(False)
        assert swapped >= 4
        assert all(new[swapped:]), f"a mixture after token {swapped}: {new}"
        assert not any(new[:swapped]) or sum(new[:swapped]) < swapped / 2
        again = list(served.complete(prompt, 8))
        assert places(trainer.module, prompt, again) == [True] * 8, "nothing of the old version was cached"
        trainer.publisher.close(timeout=10)
    finally:
        served.end()


def places(module, prompt, said):
    """For each token: whether that module says the same of it, over all that was said before."""
    tokens = [token for token, _ in said]
    with torch.no_grad():
        exact = module(torch.tensor([prompt + tokens])).logits[0].float().log_softmax(-1)
    found = [exact[len(prompt) - 1 + at, token].item() for at, token in enumerate(tokens)]
    return [abs(here - there) < NEAR for here, (_, there) in zip(found, said, strict=True)]


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
