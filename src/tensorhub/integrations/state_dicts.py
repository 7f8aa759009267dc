"""State dicts as named tensors, and tensors that are published one by one."""

import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import tensorhub

from .. import UsageError
from .whole import of_view

# State dicts as tensors and JSON: nothing that came over a network is unpickled. What cannot be written is refused.


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


class StagedPublisher:
    """Publishes tensors that come one after another and do not last, as trainers give them that gather a model.

    Each is copied into host memory that stays: the trainer may change its parameters while others read. That costs the
    model's size. The tensors are those of the first `publish`; `options` are those of `tensorhub.open`.

    `dtype` is what tensors of floating-point numbers are published in. All others, such as ids, stay what they are.
    """

    def __init__(self, model: str, *, replica: str, dtype: torch.dtype | None = None, **options: Any) -> None:
        self._dtype = dtype
        self._view = tensorhub.connect(**of_view(options))
        self._model = model
        self._weights = tensorhub.open(model, replica=replica, **options)
        self._tensors: dict[str, torch.Tensor] = {}
        self._dtypes: dict[str, torch.dtype] = {}  # what they came in

    @property
    def version(self) -> int | None:
        """The version that is published."""
        return self._weights.version

    def next_version(self) -> int:
        """The lowest number above all that were ever taken, also before this process began."""
        return self._view.next_version(self._model)

    def publish(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        metadata: Mapping[str, object] | None = None,
        *,
        version: int | None = None,
    ) -> int:
        """Copy these tensors, and let everybody read them as `version`, or as the next one. Returns the version.

        All are taken, whatever happens, since the other ranks gather each of them together with this one. Raises what
        `tensorhub.Weights.publish` raises, and `UsageError` if the tensors are not those of the first time.
        """
        coming = iter(tensors)
        try:
            number = self.next_version() if version is None else version
            if self._tensors:
                with self._weights.mutating(version=number, metadata=metadata):
                    self._copy(coming)
            else:
                dtypes: dict[str, torch.dtype] = {}
                made: dict[str, torch.Tensor] = {}
                for name, tensor in coming:
                    made[name], dtypes[name] = self._staged(tensor), tensor.dtype
                self._weights.register(dict(sorted(made.items())), boxes={})  # the order in which others have them
                self._tensors, self._dtypes = made, dtypes
                self._weights.publish(number, metadata=metadata)
            return number
        finally:
            for _ in coming:
                pass

    def close(self) -> None:
        """Leave. The last version stays where others hold it."""
        self._weights.close()

    def _staged(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
        made: torch.Tensor = torch.as_tensor(tensorhub.empty(tuple(tensor.shape), dtype=dtype))
        return made.copy_(tensor.detach())

    def _copy(self, coming: Iterable[tuple[str, torch.Tensor]]) -> None:
        missing = set(self._tensors)
        for name, tensor in coming:
            if name not in self._tensors or tensor.shape != self._tensors[name].shape:
                raise tensorhub.UsageError(f"the model has another tensor {name!r} than before, {tuple(tensor.shape)}")
            if tensor.dtype != self._dtypes[name]:  # copy_() would round it without a word
                raise tensorhub.UsageError(f"tensor {name!r} is {tensor.dtype} now, and was {self._dtypes[name]}")
            self._tensors[name].copy_(tensor.detach())
            missing.discard(name)
        if missing:
            raise tensorhub.UsageError(f"the model has lost tensors: {sorted(missing)[:5]}")
