"""torchft heals its replicas over TensorHub: a replica that is behind reads the whole state from those that are not.

    manager = torchft.Manager(..., checkpoint_transport=TensorHubTransport(server="head:7450"))

1. The source publishes its state where it lies: nothing is copied (unless `copies=True`), and nothing is pickled.
2. What several replicas read at a time leaves the source once: they read from each other, verified.
3. Each transport is a model of its own, since two sources may hold different states for one step (random numbers, data
   loaders). Its versions are steps and, for a step that is sent again after a failed commit, tries of that step.

It must never: let a state be changed while a replica reads it. `disallow_checkpoint`, which torchft calls before it
applies a step, returns when none does. What changes before that (the running mean of a BatchNorm) makes a reader's
call fail, and never its state wrong. Such models need `copies=True`.
"""

import contextlib
import json
import secrets
import time
from collections import OrderedDict
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torchft.checkpointing.transport import CheckpointTransport

import tensorhub

TREE = "tree"  # the name of the tensor that says where the others belong
TRIES = 1 << 20  # of one step
# of what `open` takes, what `load` takes too
LOADS = ("server", "site", "token", "insecure", "host", "verify", "transports")


class TensorHubTransport(CheckpointTransport[Any]):
    """A `CheckpointTransport` of torchft. `where` is what `tensorhub.open` takes: server, token, host, call_timeout, …

    `disallow_checkpoint`, which has no timeout, waits for readers and the server as long as `call_timeout` says.

    Raises `ServerUnreachable` without a reference server, and from its methods what `tensorhub.Weights` raises;
    `TimeoutError` for what was not there in time.
    """

    def __init__(self, model: str = "torchft", *, copies: bool = False, **where: Any) -> None:
        self._model = f"{model}-{secrets.token_hex(8)}"
        self._copies = copies
        self._where = where
        self._from_where = {name: value for name, value in where.items() if name in LOADS}
        self._weights = tensorhub.open(self._model, replica="source", reliable=False, **where)  # nothing is kept
        self._sent = -1
        self._is_out = False  # True while a replica may read the state

    def metadata(self) -> str:
        """By what the others find this source: the name of its model."""
        return self._model

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        """Publish the state until `disallow_checkpoint`, for every reader."""
        deadline = time.monotonic() + timeout.total_seconds()
        self._withdraw(timeout.total_seconds())
        tensors, tree = pack(state_dict)
        if self._copies:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        tensors[TREE] = torch.frombuffer(bytearray(tree), dtype=torch.uint8)
        self._weights.register(tensors)
        self._sent = max(step * TRIES, self._sent + 1)  # a call that fails late may have published it
        self._is_out = True
        self._weights.publish(self._sent, metadata={"step": step}, timeout=_left(deadline))

    def disallow_checkpoint(self) -> None:
        """The state may be changed when this returns. Readers that are not done by then are cut off.

        torchft calls it in each step. Where nothing is out, the reference server is not asked, and may be gone.
        """
        self._withdraw(None)

    def _withdraw(self, timeout: float | None) -> None:
        if self._is_out:
            self._weights.unpublish(timeout=timeout)
            self._is_out = False

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """The state of that step, in memory of its own, from its source and from other replicas that read it."""
        deadline = time.monotonic() + timeout.total_seconds()
        try:
            return self._receive(metadata, step, deadline)
        except tensorhub.Unavailable as error:
            if time.monotonic() < deadline and not isinstance(error, tensorhub.DeadlineExceeded):
                raise
            raise TimeoutError(f"timed out: step {step} of {metadata} was not there in {timeout}") from error

    def _receive(self, model: str, step: int, deadline: float) -> Any:
        left = partial(_left, deadline)
        me = f"healing-{secrets.token_hex(4)}"
        with tensorhub.open(model, replica=me, reliable=False, **{**self._where, "timeout": left()}) as waiting:
            version = waiting.wait_for(step * TRIES, timeout=left())
            if version // TRIES != step:
                raise tensorhub.UsageError(f"step {step} was asked for, but {model} is at step {version // TRIES}")
            found = tensorhub.load(f"{model}@{version}", timeout=left(), **self._from_where)
        tensors = {name: torch.as_tensor(tensor) for name, tensor in found.items()}
        return unpack(tensors, tensors.pop(TREE).numpy().tobytes())

    def shutdown(self, wait: bool = True) -> None:
        """Leave; with `wait=False` readers are cut off soon."""
        with contextlib.suppress(tensorhub.DeadlineExceeded):
            self._weights.close(timeout=None if wait else 1.0)


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


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
        raise tensorhub.UsageError("the state dict contains itself, or is too deep to be written down") from error


def unpack(tensors: dict[str, torch.Tensor], text: bytes) -> Any:
    """What `pack` was given, over these tensors. Raises `UsageError` if the text is not one of `pack`'s."""
    try:
        return _unpack(json.loads(text), tensors)
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise tensorhub.UsageError(f"this is no packed state dict: {error!r}") from error


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
    raise tensorhub.UsageError(
        f"state_dict{place} is a {kind.__module__}.{kind.__qualname__}, which cannot be sent", hint=hint
    )


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
            raise tensorhub.UsageError(f"state_dict{place} is placed as {placement}, which cannot be sent")


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
