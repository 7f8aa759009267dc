"""Tensors under the names of the model's checkpoint: wrappers, adapters, ties, and a conversion that is followed."""

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import tensorhub
from tensorhub.integrations import fsdp
from tensorhub.integrations.checkpoint_names import Names, as_checkpoint
from tensorhub.integrations.whole import Whole
from tensorhub.steps import state_of_module

from .llama import tiny


def published(module, **options):
    """Every tensor of the checkpoint, whole, put together as the boxes say; NaN where nothing is."""
    names = Names(module)
    names.check_merged()
    return put_together(*as_checkpoint(names, state_of_module(module, named=names), **options))


def put_together(tensors, boxes, found=None):
    found = {} if found is None else found
    for name, tensor in tensors.items():
        local = tensor.to_local() if hasattr(tensor, "device_mesh") else tensor.detach()
        for box in boxes.get(
            name, [tensorhub.Box(name, local.shape, (0,) * local.ndim, local.shape, 0, local.stride())]
        ):
            whole = found.setdefault(box.name, torch.full(box.global_shape, float("nan")))
            place = tuple(slice(start, start + count) for start, count in zip(box.at, box.size, strict=True))
            whole[place] = local.as_strided(box.size, box.strides, local.storage_offset() + box.offset)
    return found


def linears(count=2):
    return nn.Sequential(*[nn.Linear(2, 2) for _ in range(count)])


NAMES = {"0.weight", "0.bias", "1.weight", "1.bias"}


class Lora(nn.Module):
    """As peft's layers are."""

    def __init__(self, base_layer, *, merged):
        super().__init__()
        self.base_layer, self.merged = base_layer, merged
        self.lora_A = nn.ModuleDict({"default": nn.Linear(2, 1)})


class BaseTuner(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.shared = model, nn.Linear(2, 2)


class PeftModel(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.base_model = BaseTuner(model)


class ModulesToSaveWrapper(nn.Module):
    active_adapters = ("default",)
    disable_adapters = False

    def __init__(self, module):
        super().__init__()
        self.original_module, self.modules_to_save = module, nn.ModuleDict({"default": nn.Linear(2, 2)})


def test_wrappers_leave_no_trace_in_names():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    module = linears()
    module[0] = torch.compile(checkpoint_wrapper(module[0]))
    assert published(torch.compile(module)).keys() == NAMES
    assert published(PeftModel(torch.compile(module))).keys() == NAMES


def test_adapters_are_in_the_weights_or_refused():
    module = linears()
    module[0] = Lora(module[0], merged=False)
    module[1] = ModulesToSaveWrapper(module[1])
    with pytest.raises(tensorhub.UsageError, match=r"not merged: 'base_model\.model\.0'") as refused:
        published(PeftModel(module))
    assert "merge_adapter()" in refused.value.hint
    module[0].merged = True
    found = published(PeftModel(module))
    assert found.keys() == NAMES
    assert torch.equal(found["0.weight"], module[0].base_layer.weight)
    assert torch.equal(found["1.weight"], module[1].modules_to_save["default"].weight)
    module[1].disable_adapters = True
    assert torch.equal(published(PeftModel(module))["1.weight"], module[1].original_module.weight)


def test_adapters_are_merged_when_a_step_ends(server):
    """Not when it begins: what is published from a buffer may be unmerged between steps."""
    module = linears()
    module[0] = Lora(module[0], merged=True)
    with fsdp.attach(module, "policy", server=server) as trainer:
        module[0].merged = False
        with trainer.step():
            module[0].merged = True
        assert tensorhub.load("policy@1", server=server).keys() == NAMES
        with pytest.raises(tensorhub.UsageError, match="not merged"), trainer.step():
            module[0].merged = False


class Tied(nn.Module):
    _tied_weights_keys: ClassVar = {"lm_head.weight": "embed.weight"}

    def __init__(self, *, is_tied):
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
        if is_tied:
            self.lm_head.weight = self.embed.weight


def test_a_tied_tensor_is_left_out_as_files_leave_it_out():
    assert published(Tied(is_tied=True)).keys() == {"embed.weight"}
    assert published(Tied(is_tied=False)).keys() == {"embed.weight", "lm_head.weight"}
    named = {"lm_head.weight": "lm_head.weight"}
    assert published(Tied(is_tied=True), rename=named).keys() == {"embed.weight", "lm_head.weight"}


def test_names_are_changed_and_left_out_as_the_caller_says(server):
    module = nn.ModuleDict({"inner": torch.compile(linears()), "head": nn.Linear(2, 2)})
    said = {"leave_out": "head.*", "rename": lambda name: name.removeprefix("inner.")}
    with fsdp.attach(module, "policy", server=server, **said) as trainer:
        with trainer.step(), torch.no_grad():
            module["inner"]._orig_mod[0].bias.fill_(7)
        found = tensorhub.load("policy@1", server=server)
        assert found.keys() == NAMES
        assert found["0.bias"].tolist() == [7, 7]


@pytest.mark.parametrize(
    ("rename", "said"),
    [
        ({"2.weight": "w"}, "'2.weight', and there is no tensor of that name"),
        (lambda name: name, "changes no name"),
        (lambda name: None, "changes no name"),
        ({"0.weight": "1.weight"}, "two tensors are called '1.weight'"),
        ({"0.weight": 1}, "makes 1 of '0.weight'"),
        ("0.weight", "neither a mapping nor a function"),
    ],
)
def test_a_rename_that_fits_nothing_is_refused(server, rename, said):
    with pytest.raises(tensorhub.UsageError, match=said):
        fsdp.attach(linears(), "policy", server=server, rename=rename)
    assert tensorhub.connect(server).versions("policy") == ()


class PreTrainedModel(nn.Module):
    """What transformers converts."""

    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            whole = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)
            setattr(self, name, nn.Parameter(whole))


@pytest.fixture
def convert(monkeypatch):
    """`convert(function)` makes it transformers' conversion of a model's state to what its file has."""

    def make(function):
        loading = ModuleType("transformers.core_model_loading")
        loading.revert_weight_conversion = lambda model, state: function(state)
        monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
        monkeypatch.setitem(sys.modules, loading.__name__, loading)
        return function

    return make


def experts(state):
    """One by one, gate and up apart, as transformers takes them apart."""
    parts = [chunk.contiguous() for chunk in torch.chunk(state["gate_up"], 2, dim=1)]
    return {
        f"{number}.{name}": each.squeeze()
        for name, part in zip(("gate", "up"), parts, strict=True)
        for number, each in enumerate(torch.chunk(part, 3, dim=0))
    }


def turned(state):
    return {"down": torch.transpose(state["down"], 0, 1).contiguous(), "other": state["same"]}


def joined(state):
    return {"qkv": torch.cat([torch.cat([state["q"], state["k"]]), torch.transpose(state["v"], 0, 1)])}


def stacked(state):
    return {"both": torch.stack([state["q"], state["k"]], dim=1)}


CONVERSIONS = {
    "experts": (experts, {"gate_up": (3, 4, 5)}),
    "turned": (turned, {"down": (3, 4), "same": (2,)}),
    "joined": (joined, {"q": (3, 4), "k": (2, 4), "v": (4, 2)}),
    "stacked": (stacked, {"q": (3, 4), "k": (3, 4)}),
    "flat": (lambda state: {"flat": state["w"].reshape(12)}, {"w": (3, 4)}),
}


@pytest.mark.parametrize("kind", CONVERSIONS)
def test_transformers_own_conversion_is_followed_and_nothing_is_moved(convert, kind):
    function, shapes = CONVERSIONS[kind]
    module = PreTrainedModel(**shapes)
    wanted = function(dict(module.named_parameters()))
    convert(function)
    names = Names(torch.compile(module))
    tensors, boxes = as_checkpoint(names, state_of_module(module, named=names))
    ours = {parameter.data_ptr() for parameter in module.parameters()}
    assert {tensor.data_ptr() for tensor in tensors.values()} == ours
    found = put_together(tensors, boxes)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("ranks", [3])
@pytest.mark.parametrize("kind", ["experts", "turned", "joined", "stacked"])
@pytest.mark.parametrize("dim", [0, 1])
def test_ranks_publish_the_parts_that_they_have(convert, kind, ranks, dim):
    function, shapes = CONVERSIONS[kind]
    convert(function)
    found = {}
    for rank in range(ranks):
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        try:
            module = PreTrainedModel(**shapes)
            wanted = function({name: each.detach().clone() for name, each in module.named_parameters()})
            mesh, state = init_device_mesh("cpu", (ranks,)), {}
            for name, each in module.named_parameters():
                along = [Shard(dim if each.ndim > 1 else 0)]
                state[name] = distribute_tensor(each.detach(), mesh, along, src_data_rank=None)
            tensors, boxes = as_checkpoint(Names(module), state)
            whole = {name: tensor for name, tensor in tensors.items() if name in boxes}
            put_together(whole, boxes, found)
        finally:
            dist.destroy_process_group()
    for name in found:
        assert torch.equal(found[name], wanted[name]), name
    assert found.keys() >= wanted.keys() - {"other"}


def test_a_conversion_that_is_no_view_is_refused_with_the_cure(convert, server):
    convert(lambda state: {"scaled": state["w"] * 2})
    module = PreTrainedModel(w=(3, 4))
    with pytest.raises(
        tensorhub.UsageError, match=r"'scaled'.*cannot be published in place from 'w': .*(mul). is no view"
    ) as refused:
        fsdp.attach(module, "policy", server=server)
    assert "rename={'w': 'w'}" in refused.value.hint
    with fsdp.attach(module, "policy", server=server, rename={"w": "w"}):
        assert tensorhub.load("policy@0", server=server).keys() == {"w"}


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda state: {"w": state["w"][:2]}, "leaves some of it out"),
        (lambda state: {}, "leaves it out"),
        (lambda state: {"w": state["x"]}, "failed: KeyError"),
    ],
)
def test_a_conversion_that_loses_something_is_refused(convert, function, said):
    convert(function)
    with pytest.raises(tensorhub.UsageError, match=said):
        published(PreTrainedModel(w=(3, 4)))


needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs transformers, in an environment of its own: make test-engines"
)
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


def check_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@needs_transformers
@pytest.mark.parametrize("kind", FAMILIES)
def test_what_a_file_has_is_published(kind, tmp_path):
    model = tiny(kind, **{**SIZES, **FAMILIES[kind]})
    wanted = written(model, tmp_path)
    check_same(published(model), wanted)
    layers = next(each for each in model.modules() if isinstance(each, torch.nn.ModuleList) and len(each) == 2)
    layers[0] = torch.compile(layers[0])
    check_same(published(torch.compile(model)), wanted)


@needs_transformers
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
            check_same(loaded.state_dict(), model.state_dict())


@needs_transformers
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
            check_same(dict(whole), written(model, tmp_path / "again"))
            assert dict(whole).keys() == wanted.keys()
        digest = job.call("digest")
        job.end()
        again = start(2)
        again.call("build", kind="language", path=path, seed=1)
        assert again.call("attach", model="policy") == 1, "filled by the rollout"
        assert again.call("digest") == digest


@needs_transformers
def test_adapters_of_peft_are_merged_or_refused(tmp_path):
    peft = pytest.importorskip("peft", reason="needs peft: pip install --no-deps peft accelerate")
    wanted = written(tiny("mixtral", **SIZES, num_local_experts=4), tmp_path)
    base = tiny("mixtral", **SIZES, num_local_experts=4)
    config = peft.LoraConfig(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    model = peft.get_peft_model(base, config)
    with pytest.raises(tensorhub.UsageError, match=r"not merged: .*q_proj"):
        published(model)
    model.merge_adapter()
    check_same(published(model), wanted)
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(tensorhub.UsageError, match="cannot be merged"):
        published(peft.get_peft_model(tiny("llama", **SIZES), prompt))
