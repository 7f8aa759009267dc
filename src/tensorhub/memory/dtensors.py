"""DTensors as what they are: a local tensor, and the boxes of a global one that lie in it.

Mesh, coordinate and placements become plain values, and `core.placements` does the arithmetic. A rank outside of the
mesh, and one whose part is empty, has no boxes. A DTensor that waits for a reduction (`Partial`) is no part of a
tensor.

FSDP over tensor parallelism that cuts one dimension unevenly twice leaves local tensors of other sizes than their
placements say. Such a DTensor is refused by name, rather than taken for what it is not.

Never imported before the user passes a torch tensor.
"""

from math import prod
from typing import TYPE_CHECKING

from ..core.boxes import Box
from ..core.errors import UsageError
from ..core.placements import Placement, Replicated, Sharded, StridedSharded, boxes_of_placements

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement as TorchPlacement


def is_dtensor(tensor: object) -> bool:
    """Whether `boxes_of_dtensor` can say what it is."""
    import torch

    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def boxes_of_dtensor(name: str, tensor: "DTensor") -> "tuple[torch.Tensor, list[Box]]":
    """The local tensor, which shares the DTensor's memory, and its boxes in the global tensor `name`."""
    import torch

    with torch.no_grad():
        local = tensor.to_local()
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return local, []
    shape = tuple(tensor.shape)
    placements = [_plain(name, placement, len(shape)) for placement in tensor.placements]
    dtype = str(local.dtype).removeprefix("torch.")
    boxes = boxes_of_placements(name, shape, tuple(mesh.shape), coordinate, placements, tuple(local.stride()), dtype)
    elements = sum(prod(box.size) for box in boxes)
    if elements != local.numel() or (elements and any(_reach(box) > elements for box in boxes)):
        raise UsageError(
            f"tensor {name!r} is a DTensor of global shape {list(shape)} whose local shape {list(local.shape)} is not"
            f" what its placements {tensor.placements} mean at {coordinate} of a mesh of shape {list(mesh.shape)}",
            hint="cut this dimension evenly, or register the local tensor with boxes of your own",
        )
    return local, boxes


def _plain(name: str, placement: "TorchPlacement", dimensions: int) -> Placement:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if isinstance(placement, _StridedShard):  # asked first: in older releases it is a kind of Shard
        return StridedSharded(placement.dim % dimensions, int(placement.split_factor))
    if isinstance(placement, Shard):
        return Sharded(placement.dim % dimensions)
    if isinstance(placement, Replicate):
        return Replicated()
    raise UsageError(
        f"tensor {name!r} is a DTensor with placement {placement}, which names no part of it",
        hint="redistribute it to Shard or Replicate first",
    )


def _reach(box: Box) -> int:
    assert box.strides is not None, "said above"
    return box.offset + 1 + sum((count - 1) * stride for count, stride in zip(box.size, box.strides, strict=True))
