"""DTensors: what the boxes say is what torch itself puts on each rank. Meshes of many ranks in one process."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import forked
from tensorhub.memory.modules import boxes_of_dtensor, is_dtensor
from tensorhub.protocol.errors import UsageError
from tensorhub.protocol.layout import Box


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


SHAPES = ((7, 5), (8, 4), (2, 3))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_shards_uneven_and_empty(shape: tuple[int, ...], dim: int) -> None:
    check(shape, (4,), [Shard(dim)])


def test_an_empty_shard_has_no_boxes() -> None:
    assert check((2, 3), (4,), [Shard(0)]) == [1, 1, 0, 0]


@pytest.mark.parametrize("shape", SHAPES)
def test_two_dimensions_of_mesh(shape: tuple[int, ...]) -> None:
    kinds = (Shard(0), Shard(1), Replicate())
    for placements in product(kinds, kinds):
        check(shape, (2, 3), list(placements))


def test_hybrid_sharding_has_a_whole_in_each_group() -> None:
    assert check((9, 2), (2, 3), [Replicate(), Shard(0)]) == [1] * 6


@pytest.mark.parametrize("rows", [8, 12, 9, 5, 3, 1])
@pytest.mark.parametrize("factor", [1, 2, 3])
def test_every_so_manyth_piece(rows: int, factor: int) -> None:
    check((rows, 2), (3,), [_StridedShard(0, split_factor=factor)])
    check((2, rows), (2, 2), [_StridedShard(1, split_factor=2), Shard(1)])


def test_fsdp_over_tensor_parallelism_is_one_box_for_each_rank() -> None:
    assert check((16, 3), (2, 4), [_StridedShard(0, split_factor=4), Shard(0)]) == [1] * 8


def test_scalars_and_replicas_are_whole() -> None:
    assert check((), (3,), [Replicate()]) == [1] * 3
    assert check((4,), (3,), [Replicate()]) == [1] * 3


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


FSDP_RANK = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from tensorhub.memory.modules import boxes_of_dtensor

rank, *mesh_shape = map(int, sys.argv[1:])
ranks = torch.Size(mesh_shape).numel()
dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
mesh = init_device_mesh("cpu", tuple(mesh_shape), mesh_dim_names=("outer", "inner")[: len(mesh_shape)])
module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 2))
full = {name: value.detach().clone() for name, value in module.named_parameters()}
fully_shard(module, mesh=mesh)
for name, value in module.named_parameters():
    local, boxes = boxes_of_dtensor(name, value)
    assert len(boxes) == (local.numel() > 0)
    for box in boxes:
        ours = full[name][tuple(slice(at, at + n) for at, n in zip(box.at, box.size))]
        assert torch.equal(local.as_strided(box.size, box.strides, local.storage_offset() + box.offset), ours), box
    print(name, [box.at[0] for box in boxes], [box.size[0] for box in boxes])
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("rank", "mesh_shape", "said"),
    [
        (1, (3,), ["0.weight [3] [3]", "0.bias [3] [3]", "1.weight [1] [1]", "1.bias [1] [1]"]),
        (2, (3,), ["0.weight [6] [1]", "0.bias [6] [1]", "1.weight [] []", "1.bias [] []"]),
        (4, (2, 3), ["0.weight [3] [3]", "0.bias [3] [3]", "1.weight [1] [1]", "1.bias [1] [1]"]),
    ],
)
def test_parameters_that_fsdp_has_cut(rank: int, mesh_shape: tuple[int, ...], said: list[str]) -> None:
    """FSDP2 itself, with uneven and empty shards, and hybrid. A process each, for torch keeps meshes by their shape."""
    done = forked.run(FSDP_RANK, [rank, *mesh_shape], within_s=100)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == said


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (3, 0, 5), (0,)])
@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_of_a_tensor_without_elements_every_rank_has_all(shape: tuple[int, ...], placement: Placement) -> None:
    for tensor in on_each_rank(torch.zeros(shape), (2,), [placement]):
        _, boxes = boxes_of_dtensor("w", tensor)
        assert [(box.global_shape, box.size, box.at) for box in boxes] == [(shape, shape, (0,) * len(shape))]
