"""Tensors of modules, and DTensors with their boxes."""

import io
import warnings
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tensorhub.memory.modules import boxes_of_dtensor, is_dtensor
from tensorhub.memory.registration import register
from tensorhub.protocol.errors import UsageError
from tensorhub.protocol.layout import Box

# --- A module's state that is no parameter and no persistent buffer: refused by name, or left out on request.


def names(module: object, **options: Any) -> list[str]:
    return [tensor.name for tensor in register(module, **options).layout.tensors]  # type: ignore[arg-type]


def set_in_state(name: str, value: object) -> Any:
    def hook(module: nn.Module, state: dict[str, object], prefix: str, metadata: object) -> None:
        state[prefix + name] = value

    return hook


class Packed(nn.Linear):
    """As bitsandbytes' layers, whose scales no parameter and no buffer holds."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight.absmax"] = torch.ones(3)


class Extra(nn.Linear):
    extra: object = None

    def get_extra_state(self) -> Any:
        return self.extra


class Kept(nn.Linear):
    """Extra state that is a tensor, the same one each time."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.kept = torch.ones(2)

    def get_extra_state(self) -> Any:
        return self.kept


def hooked(value: object, name: str = "scale", *, is_public: bool = True) -> nn.Module:
    module = nn.Linear(2, 2)
    register_hook = module.register_state_dict_post_hook if is_public else module._register_state_dict_hook
    register_hook(set_in_state(name, value))  # type: ignore[no-untyped-call]
    return module


def quantized() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: nn.Module = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(2, 2)))  # type: ignore[no-untyped-call]
        found.state_dict()  # which warns too
    return found


BEYOND = {
    "override": (lambda: Packed(2, 2), r"'0\.weight\.absmax' \(Tensor of '0', class Packed\)"),
    "extra": (Kept, r"'0\._extra_state' \(Tensor of '0', class Kept\)"),
    "post-hook": (lambda: hooked(torch.ones(1)), r"'0\.scale' \(Tensor of '0', class Linear\)"),
    "hook": (lambda: hooked({"absmax": 1}, is_public=False), r"'0\.scale' \(dict of '0', class Linear\)"),
    "other": (
        lambda: hooked(torch.ones(2), "bias"),
        r"'0\.bias' \(Tensor, not the module's own, of '0', class Linear\)",
    ),
    "packed": (quantized, r"'0\.0\._packed_params\._packed_params' \(tuple of '0\.0\._packed_params', class Linear"),
}


@pytest.mark.filterwarnings("ignore:torch")
@pytest.mark.parametrize("kind", BEYOND)
def test_state_that_readers_would_not_get_is_refused_by_name(kind: str) -> None:
    make, said = BEYOND[kind]
    module = nn.Sequential(make(), nn.Linear(2, 2))
    with pytest.raises(UsageError, match=str(said)) as refused:
        register(module)
    left_out = [name for name in module.state_dict() if f"{name!r}" in str(refused.value)]
    assert str(left_out) in (refused.value.hint or "")
    kept = names(module, leave_out=left_out)
    assert {"1.weight", "1.bias"} <= set(kept)
    assert not set(kept) & set(left_out)


@pytest.mark.parametrize("extra", [None, b"", {}, io.BytesIO(), torch.empty(0)], ids=lambda extra: type(extra).__name__)
def test_extra_state_that_says_nothing_is_no_hindrance(extra: object) -> None:
    module = Extra(2, 2)
    module.extra = extra
    assert names(nn.Sequential(module)) == ["0.weight", "0.bias"]


def lazy() -> nn.Module:
    module = nn.Sequential(nn.LazyLinear(2))
    module(torch.ones(1, 3))
    return module


def renaming() -> nn.Module:
    module = nn.Linear(2, 2)

    def rename(module: nn.Module, state: dict[str, object], prefix: str, metadata: object) -> None:
        state[prefix + "w"] = state.pop(prefix + "weight")

    module._register_state_dict_hook(rename)
    return module


def copying() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_state_dict_post_hook(set_in_state("weight", module.weight.detach().clone()))  # type: ignore[no-untyped-call]
    return module


ORDINARY = {
    "norm": (lambda: nn.BatchNorm1d(2), 5),
    "lazy, run": (lazy, 2),
    "parametrized": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)), 4),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), 3),
    "shared": (lambda: nn.Sequential(*[nn.Linear(2, 2)] * 2), 4),
    "a hook that renames": (renaming, 2),
    "a hook that copies": (copying, 2),
}


@pytest.mark.parametrize("kind", ORDINARY)
def test_ordinary_modules_are_registered_whole(kind: str) -> None:
    make, count = ORDINARY[kind]
    module = make()
    registration = register(module)
    assert len(registration.layout.tensors) == count
    assert registration.replaced() == []


def test_a_module_has_the_layout_of_its_state_dict() -> None:
    """Tied weights under both names, a module that occurs twice, and none of what is not kept."""
    module = nn.ModuleDict(
        {"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False), "norm": nn.BatchNorm1d(4)}
    )
    module["head"].weight = module["embed"].weight
    module["again"] = module["norm"]
    module.register_buffer("passing", torch.ones(3), persistent=False)
    found = register(module).layout
    assert found == register(module.state_dict()).layout
    assert {"head.weight", "again.weight"} <= {tensor.name for tensor in found.tensors}
    with pytest.raises(UsageError, match="ReLU"):
        register(nn.ReLU())


@pytest.mark.parametrize(("depth", "said"), [(0, r"'me' is the whole module again"), (1, r"'0\.me' is '0' again")])
def test_a_module_that_holds_its_parent_is_refused(depth: int, said: str) -> None:
    inside = nn.Linear(2, 2)
    inside.me = inside
    module = nn.Sequential(inside) if depth else inside
    with pytest.raises(UsageError, match=said):
        register(module)


def test_what_is_left_out_is_neither_registered_nor_watched() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    registration = register(module, leave_out=["1.*"])
    assert [tensor.name for tensor in registration.layout.tensors] == ["0.weight", "0.bias"]
    module[1].weight = nn.Parameter(torch.ones(2, 2))
    assert registration.replaced() == []
    module[0].weight = nn.Parameter(torch.ones(2, 2))
    assert registration.replaced() == ["'0.weight' lies in other memory"]
    assert names({"a": torch.ones(1), "b": torch.ones(1)}, leave_out="a") == ["b"]


@pytest.mark.parametrize(
    ("leave_out", "said"), [("2.*", "nothing of that name"), ("*", "not left out"), (3, "no list of names")]
)
def test_a_leave_out_that_fits_nothing_is_refused(leave_out: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        register(nn.Sequential(nn.Linear(2, 2)), leave_out=leave_out)


@pytest.mark.parametrize("attribute", ["ds_id", "_fsdp_flattened"])
def test_flat_parameters_are_refused_by_name(attribute: str) -> None:
    module = nn.Linear(2, 2)
    setattr(module.bias, attribute, True)
    with pytest.raises(UsageError, match=r"parameter 'bias' of '0', class Linear, is (cut by DeepSpeed|flattened)"):
        register(nn.Sequential(module))
    with pytest.raises(UsageError, match=r"tensor 'bias' is (cut by DeepSpeed|flattened)"):
        register(dict(module.named_parameters()))


# --- DTensors: what the boxes say is what torch itself puts on each rank. Meshes of many ranks in one process.


@pytest.fixture(autouse=True)
def no_group() -> Iterator[None]:
    """Process groups that send nothing end with the test."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def on_each_rank(full: torch.Tensor, mesh_shape: tuple[int, ...], placements: list[Placement]) -> Iterator[DTensor]:
    """The DTensor as each rank has it. torch cuts it by itself: every rank has the full tensor, and nothing is sent."""
    ranks = torch.Size(mesh_shape).numel()
    for rank in range(ranks):
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        mesh = init_device_mesh("cpu", mesh_shape)
        yield distribute_tensor(full, mesh, placements, src_data_rank=None)
        dist.destroy_process_group()


def part(full: torch.Tensor, box: Box) -> torch.Tensor:
    return full[tuple(slice(start, start + count) for start, count in zip(box.at, box.size, strict=True))]


def view(local: torch.Tensor, box: Box) -> torch.Tensor:
    return local.as_strided(box.size, box.strides, local.storage_offset() + box.offset)


def check(shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: list[Placement]) -> list[int]:
    """Every element of every rank is where its boxes say. Returns the number of boxes of each rank."""
    full = torch.arange(torch.Size(shape).numel(), dtype=torch.int64).reshape(shape)
    counts = []
    for tensor in on_each_rank(full, mesh_shape, placements):
        assert is_dtensor(tensor)
        local, boxes = boxes_of_dtensor("w", tensor)
        assert local.data_ptr() == tensor.to_local().data_ptr()
        seen = torch.zeros_like(local)
        for box in boxes:
            assert torch.equal(view(local, box), part(full, box)), (placements, box)
            view(seen, box).add_(1)
        assert bool((seen == 1).all()), "each element of the local tensor is in one box"
        counts.append(len(boxes))
    return counts


SHAPES = ((7, 5), (2, 3))


KINDS = (Shard(0), Shard(1), Replicate())
CUTS = [
    *((shape, (4,), [Shard(dim)]) for shape in SHAPES for dim in (0, 1, -1)),
    *((shape, (2, 3), list(placements)) for shape in SHAPES for placements in product(KINDS, KINDS)),
    *(((rows, 2), (3,), [_StridedShard(0, split_factor=n)]) for rows in (12, 9, 5, 1) for n in (2, 3)),
    *(((2, rows), (2, 2), [_StridedShard(1, split_factor=2), Shard(1)]) for rows in (12, 9, 5, 1)),
]


def test_every_element_of_every_rank_is_where_its_boxes_say() -> None:
    """Of uneven and empty shards, in two dimensions of a mesh, and of every so manyth piece."""
    for shape, mesh_shape, placements in CUTS:
        check(shape, mesh_shape, placements)


def test_fsdp_over_tensor_parallelism_is_one_box_for_each_rank() -> None:
    assert check((16, 3), (2, 4), [_StridedShard(0, split_factor=4), Shard(0)]) == [1] * 8


def test_a_transposed_local_tensor_keeps_its_strides() -> None:
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    mesh = init_device_mesh("cpu", (2,))
    stored = torch.arange(12).reshape(3, 4)
    tensor = DTensor.from_local(stored.t(), mesh, [Shard(0)])
    local, boxes = boxes_of_dtensor("w", tensor)
    (box,) = boxes
    assert (box.at, box.size, box.global_shape, box.strides) == ((4, 0), (4, 3), (8, 3), (1, 4))
    assert torch.equal(view(local, box), stored.t())


def test_what_waits_for_a_reduction_is_refused() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh = init_device_mesh("cpu", (2,))
    tensor = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    with pytest.raises(UsageError, match=r"'grad' is a DTensor with placement .*names no part"):
        boxes_of_dtensor("grad", tensor)


def test_a_local_tensor_of_another_size_than_its_placements_say_is_refused() -> None:
    dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
    mesh = init_device_mesh("cpu", (4, 2))
    local = torch.zeros(0, 2)
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    tensor = DTensor.from_local(local, mesh, placements, shape=torch.Size((9, 2)), stride=(2, 1))
    with pytest.raises(UsageError, match="'w' is a DTensor of global shape"):
        boxes_of_dtensor("w", tensor)
    assert not is_dtensor(local)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (3, 0, 5), (0,)])
@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_of_a_tensor_without_elements_every_rank_has_all(shape: tuple[int, ...], placement: Placement) -> None:
    for tensor in on_each_rank(torch.zeros(shape), (2,), [placement]):
        _, boxes = boxes_of_dtensor("w", tensor)
        assert [(box.global_shape, box.size, box.at) for box in boxes] == [(shape, shape, (0,) * len(shape))]
