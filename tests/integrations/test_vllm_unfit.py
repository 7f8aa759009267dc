"""Versions that do not fit an engine of vLLM are refused by name, and the engine goes on with what it has.

Each row is one version, with one thing wrong: it is refused as an update, and when the engine joins. The engine answers
afterwards what it answered before, to the bit, and the next good version loads, beside transformers. Tensors are named
as in files of the family.
"""

import contextlib
import json

import pytest

pytest.importorskip("vllm", reason="needs vLLM, in an environment of its own: make test-engines")

import torch
from safetensors.torch import load_file

import tensorhub

from .engine import UNPACKED
from .engines import started
from .llama import PROMPTS, Judge

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

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
    """One engine, and one server; versions are published by a trainer of their own each."""

    def __init__(self, folder, start, server, kind, ranks=1, in_place=False, config=None):
        self.server, self.is_quantized = server, kind == "w8a8"
        self.judge = Judge(folder, "llama" if self.is_quantized else kind, **(config or {}))
        if self.is_quantized:
            self.quantize()
        self.engine = start("rollout-0", **({UNPACKED: "all"} if in_place else {}))
        place = {"path": self.judge.path, "replica": "rollout-0", "server": server}
        self.engine.call("start", ranks=ranks, in_place=in_place, **place)
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


def twice(dim, *ends):
    """Those are twice as long along that dimension."""
    return lambda tensors: {
        name: torch.cat([each, each], dim) if name.endswith(ends) else each for name, each in tensors.items()
    }


def together(*changes):
    def change(tensors):
        for each in changes:
            tensors = each(tensors)
        return tensors

    return change


def more(name, *shape):
    return lambda tensors: {**tensors, name: torch.ones(shape, dtype=torch.bfloat16)}


def of(dtype):
    return lambda tensors: {name: each.to(dtype) for name, each in tensors.items()}


def rows(kind, changes, ranks=1, in_place=False, **config):
    case = {"kind": kind, "ranks": ranks, "in_place": in_place, "config": config}
    at = f"{kind}-TP{ranks}{'-in-place' if in_place else ''}"
    return [pytest.param(case, change, said, id=f"{at}-{what}") for what, (change, said) in changes.items()]


MLP = together(twice(0, "gate_proj.weight", "up_proj.weight"), twice(1, "down_proj.weight"))
KV = twice(0, "k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias")
DENSE = {
    "k_proj": (without("layers.0.self_attn.k_proj.weight"), "has no 'model.layers.0.self_attn.k_proj.weight'"),
    "up_proj": (without("layers.0.mlp.up_proj.weight"), "has no 'model.layers.0.mlp.up_proj.weight'"),
    "wider": (MLP, "mlp.down_proj.weight' "),
    "heads": (KV, "self_attn.k_proj"),
}
TABLE = [
    *rows(
        "qwen2",
        {
            **DENSE,
            "biases": (without(".bias"), "has no 'model.layers.0.self_attn.q_proj.bias'"),
            "vocabulary": (twice(0, "embed_tokens.weight", "lm_head.weight"), "'lm_head.weight' of shape [252, 128]"),
            "integers": (lambda tensors: {n: t.to(torch.int8) for n, t in tensors.items()}, "int8"),
            "more": (more("value_head.weight", 1, 128), "'value_head.weight'"),
        },
    ),
    *rows("qwen2", DENSE, ranks=2),
    *rows(
        "gemma3_text",
        {
            "q_norm": (without("layers.0.self_attn.q_norm.weight"), "no 'model.layers.0.self_attn.q_norm.weight'"),
            "untied": (more("lm_head.weight", 126, 128), "'lm_head.weight'"),
        },
    ),
    *rows(
        "mixtral",
        {
            "expert": (without("layers.1.block_sparse_moe.experts.3.w3.weight"), "experts.routed_experts.w13_weight'"),
            "experts": (
                lambda tensors: {
                    **tensors,
                    **{n.replace(".3.w", ".4.w"): t.clone() for n, t in tensors.items() if ".3.w" in n},
                },
                "experts.4.",
            ),
        },
    ),
    *rows(
        "gpt_neox",
        {"fused": (without("layers.1.attention.query_key_value.weight"), "layers.1.attention.query_key_value.weight'")},
    ),
    *rows(
        "w8a8",
        {
            "bfloat16": (lambda _: None, "is published as bfloat16"),
            "scale": (without("0.mlp.down_proj.weight_scale"), "no 'model.layers.0.mlp.down_proj.weight_scale'"),
        },
    ),
    *rows(
        "llama",
        {
            "k_proj": DENSE["k_proj"],
            "untied": (more("lm_head.weight", 126, 128), "'lm_head.weight'"),
            "float32": (of(torch.float32), 'dtype="bfloat16"'),
        },
        in_place=True,
        tie_word_embeddings=True,
    ),
]


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """`cases(kind="llama")`: the one engine of that kind. Only the last one runs."""
    ends, made = contextlib.ExitStack(), {}

    def one(**given):
        key = str(given)
        if key not in made:
            ends.close()
            made.clear()
            folder = tmp_path_factory.mktemp(given["kind"])
            hub = ends.enter_context(tensorhub.serve(lease_s=5.0, report_s=0.25))
            made[key] = Case(folder, ends.enter_context(started(folder)), hub.address, **given)
        return made[key]

    with ends:
        yield one


@pytest.mark.parametrize(("case", "change", "said"), TABLE)
def test_a_version_that_does_not_fit_is_refused_by_name_and_a_good_one_loads(cases, case, change, said):
    it = cases(**case)
    before, version = it.answers(), it.engine.call("held")[0]
    tensors = change(it.good())
    if tensors is None:  # what is not quantized
        tensors = load_file(f"{it.judge.path}-file/model.safetensors")
    with it.published(tensors):
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
