"""A state dict as tensors with names, and a text that says where each of them belongs.

A trainer's checkpoint is more than tensors: an optimizer's numbers, lists and keys lie between them. `pack` takes the
tensors out, in place, and writes what remains as JSON. `unpack` puts both together again, so nothing that came over a
network is unpickled. It must never: drop or guess what it cannot write down. That is refused, with its place.
"""

import json
from collections import OrderedDict
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from .. import UsageError

MAPPINGS: dict[str, type] = {"dict": dict, "odict": OrderedDict}
SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple}
NAMES = {kind: name for name, kind in {**MAPPINGS, **SEQUENCES}.items()}
PLAIN = (type(None), bool, int, float, str)


def pack(state: object) -> tuple[dict[str, torch.Tensor], bytes]:
    """(its tensors by name, of a `DTensor` the local shard; all else as JSON). Raises `UsageError` naming a place."""
    tensors: dict[str, torch.Tensor] = {}
    try:
        return tensors, json.dumps(_pack(state, "", tensors)).encode()
    except RecursionError as error:
        raise UsageError("the state dict contains itself, or is too deep to be written down") from error


def unpack(tensors: dict[str, torch.Tensor], text: bytes) -> Any:
    """What `pack` was given, over these tensors. Raises `UsageError` if the text is not one of `pack`'s."""
    try:
        return _unpack(json.loads(text), tensors)
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise UsageError(f"this is no packed state dict: {error!r}") from error


def _pack(value: object, place: str, tensors: dict[str, torch.Tensor]) -> object:
    kind = type(value)
    if kind in PLAIN:
        return value
    if isinstance(value, dict) and kind in NAMES:
        where = {key: f"{place}/{key}" for key in value}
        return [NAMES[kind], *([_pack(k, where[k], tensors), _pack(v, where[k], tensors)] for k, v in value.items())]
    if isinstance(value, list | tuple) and kind in NAMES:
        return [NAMES[kind], *(_pack(each, f"{place}/{index}", tensors) for index, each in enumerate(value))]
    if isinstance(value, DTensor):
        spec, mesh = value._spec, value.device_mesh
        about = {
            "device": mesh.device_type,
            "mesh": mesh.mesh.tolist(),
            "names": mesh.mesh_dim_names,
            "placements": [_pack_placement(each, place) for each in value.placements],
            "shape": list(value.shape),
            "stride": list(spec.tensor_meta.stride) if spec.tensor_meta else list(value.stride()),
        }
        return ["dtensor", _take(value._local_tensor, place, tensors), about]
    if isinstance(value, torch.Tensor):
        return ["tensor", _take(value, place, tensors)]
    if kind is bytes:
        return ["bytes", value.hex()]  # type: ignore[attr-defined]
    hint = "tensors, dicts, lists, tuples, numbers, strings, bytes and None travel; nothing is pickled"
    raise UsageError(f"state_dict{place} is a {kind.__module__}.{kind.__qualname__}, which cannot be sent", hint=hint)


def _take(tensor: torch.Tensor, place: str, tensors: dict[str, torch.Tensor]) -> str:
    """Keep the tensor as it is, in place; one with gaps between its elements as a copy."""
    name = f"{len(tensors)} {place}"  # a number first: places may be equal, where keys contain slashes
    plain = tensor.detach()
    dense = plain.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(plain)
    tensors[name] = plain if dense else plain.contiguous()
    return name


def _pack_placement(placement: object, place: str) -> list[object]:
    match placement:
        case Shard() if type(placement) is Shard:
            return ["shard", placement.dim]
        case Replicate():
            return ["replicate"]
        case Partial() if type(placement) is Partial:
            return ["partial", placement.reduce_op]
        case _:
            raise UsageError(f"state_dict{place} is placed as {placement}, which cannot be sent")


def _unpack(node: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if not isinstance(node, list):
        return node
    kind, *parts = node
    if kind in MAPPINGS:
        return MAPPINGS[kind]((_unpack(key, tensors), _unpack(value, tensors)) for key, value in parts)
    if kind in SEQUENCES:
        return SEQUENCES[kind](_unpack(each, tensors) for each in parts)
    if kind == "tensor":
        return tensors[parts[0]]
    if kind == "dtensor":
        return _dtensor(tensors[parts[0]], parts[1])
    if kind == "bytes":
        return bytes.fromhex(parts[0])
    raise ValueError(f"{kind!r} is unknown")


def _dtensor(local: torch.Tensor, about: dict[str, Any]) -> DTensor:
    """As it was, on a mesh without process groups, which is what unpickling would give too."""
    kinds = {"shard": Shard, "replicate": Replicate, "partial": Partial}
    names = tuple(about["names"]) if about["names"] else None
    mesh = DeviceMesh(about["device"], about["mesh"], mesh_dim_names=names, _init_backend=False)
    meta = TensorMeta(torch.Size(about["shape"]), tuple(about["stride"]), local.dtype)
    placements = tuple(kinds[name](*arguments) for name, *arguments in about["placements"])
    return DTensor(local, DTensorSpec(mesh, placements, tensor_meta=meta), requires_grad=False)  # type: ignore[no-untyped-call]
