"""What transformers writes into a file is what is published, by the same names, of models of several families.

It needs transformers, which .envs/vllm has; with peft installed there too, adapters of its own are tried.
"""

import pytest

pytest.importorskip("transformers", reason="needs transformers, in an environment of its own: make test-engines")

import torch
from safetensors.torch import load_file

import tensorhub
from tensorhub.integrations import fsdp
from tensorhub.integrations.whole import Whole

from .test_checkpoint_names import published
from .tiny import tiny

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 16}
FAMILIES = {
    "llama": {},
    "gemma2": {},  # tied
    "bloom": {"n_head": 4},  # tied
    "qwen2": {"tie_word_embeddings": True},
    "gpt_neox": {},  # renamed
    "granitemoe": {"num_local_experts": 4},  # renamed
    "mixtral": {"num_local_experts": 4},  # renamed, and experts one by one
    "qwen3_moe": EXPERTS,
    "hrm_text": {},  # split in memory, joined in the file
}


def written(model, folder):
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def check(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_a_file_has_is_published(kind, tmp_path):
    model = tiny(kind, **{**SIZES, **FAMILIES[kind]})
    wanted = written(model, tmp_path)
    check(published(model), wanted)
    layers = next(each for each in model.modules() if isinstance(each, torch.nn.ModuleList) and len(each) == 2)
    layers[0] = torch.compile(layers[0])
    check(published(torch.compile(model)), wanted)


def test_a_reader_loads_what_is_published_as_a_checkpoint(server):
    """By names that are not those of the model in memory."""
    model = tiny("mixtral", **SIZES, num_local_experts=4, tie_word_embeddings=True)
    with fsdp.attach(model, "policy", server=server) as trainer:
        with trainer.step(), torch.no_grad():
            model.model.layers[1].mlp.experts.gate_up_proj.mul_(2)
        with Whole("policy", replica="rollout-0", server=server) as whole:
            assert whole.update() == 1
            assert "model.layers.1.block_sparse_moe.experts.3.w3.weight" in dict(whole)
            loaded = type(model).from_pretrained(None, config=model.config, state_dict=dict(whole))
            check(loaded.state_dict(), model.state_dict())


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_ranks_of_fsdp2_publish_experts_one_by_one_where_they_lie(start, server, tmp_path):
    """Three ranks and four experts; a trainer that comes back is filled through the same names."""
    model = tiny("mixtral", **SIZES, num_local_experts=4, tie_word_embeddings=True)
    wanted = written(model, tmp_path / "first")
    job, path = start(3), str(tmp_path / "first")
    job.call("build", kind="language", path=path)
    job.call("attach", model="policy")
    with Whole("policy", replica="rollout-0", server=server) as whole:
        for version in (0, 1):
            if version:
                job.call("step", version=version)
            assert whole.update(version) == version
            job.call("save", path=f"{path}-{version}.safetensors")
            model.load_state_dict(load_file(f"{path}-{version}.safetensors"), strict=False)
            model.tie_weights()
            check(dict(whole), written(model, tmp_path / "again"))
            assert dict(whole).keys() == wanted.keys()
        digest = job.call("digest")
        job.end()
        again = start(2)
        again.call("build", kind="language", path=path, seed=1)
        assert again.call("attach", model="policy") == 1, "filled by the rollout"
        assert again.call("digest") == digest


def test_adapters_of_peft_are_merged_or_refused(tmp_path):
    peft = pytest.importorskip("peft", reason="needs peft: pip install --no-deps peft accelerate")
    wanted = written(tiny("mixtral", **SIZES, num_local_experts=4), tmp_path)
    base = tiny("mixtral", **SIZES, num_local_experts=4)
    config = peft.LoraConfig(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    model = peft.get_peft_model(base, config)
    with pytest.raises(tensorhub.UsageError, match=r"not merged: .*q_proj"):
        published(model)
    model.merge_adapter()
    check(published(model), wanted)
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(tensorhub.UsageError, match="cannot be merged"):
        published(peft.get_peft_model(tiny("llama", **SIZES), prompt))
