"""In place: the trainer's shards are read over the parameters that vLLM computes with.

Which part of what goes where the model's own `load_weights` tells (`vllm_plan`). So nothing is staged, gathered or
loaded, and all ranks of an engine are the shards of one replica, which engines with any number of ranks read from.

That is only right where parameters are what vLLM computes with. Packed, quantized and absorbed ones are told by vLLM
itself: its processing after a load is begun once more, and whatever it would touch is refused by name, untouched.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

import tensorhub

from .vllm_plan import PROCESSED, Published, Taken, planned, refuse

LEAVE_S = 1.0  # for what has never held anything
ONCE = "_already_called_process_weights_after_loading"  # vLLM's mark for layers that it must not process twice


class InPlace:
    """One rank of an engine: a shard of a replica, over the model's own parameters."""

    weights: "tensorhub.Weights | None" = None
    published: "Published | None" = None  # what it was planned for
    taken: Taken

    def __init__(
        self,
        model: torch.nn.Module,
        dtype: torch.dtype,
        layout: "Callable[[float | None, int | str], Published]",
        name: str,
        **where: Any,
    ) -> None:
        """`layout` tells within a time what a version is made of: `View.layout`.

        Raises `UsageError` naming a parameter that cannot be read in place.
        """
        if wrong := processed(model, dtype):
            refuse(wrong)
        self._model, self._layout, self._name, self._where = model, layout, name, where
        self._timeout: float | None = None

    def join(self, timeout: float | None) -> None:
        """Become a shard of the replica, without a version as yet. What goes where, what is published now tells."""
        if self.weights is not None:
            return
        published = self._layout(timeout, "latest")
        plan = planned(self._model, published.tensors, published.tied)
        mine = {box.name for boxes in plan.boxes.values() for box in boxes}
        others = any(tensor.name not in mine for tensor in published.tensors)  # which other ranks have
        is_reliable = bool(self._where.get("reliable"))  # only then it keeps copies, which others may rely on
        options = {"reliable": is_reliable, **({} if is_reliable else {"host_bytes": 0}), **self._where}
        weights = tensorhub.open(self._name, **options)
        try:
            weights.register(plan.tensors, boxes=plan.boxes, partial=published.is_partial or others)
        except BaseException:  # else the next fetch could not join, and would say only that
            weights.close(timeout=LEAVE_S)
            raise
        self.weights, self.published, self.taken = weights, published, plan.taken

    def fetch(self, version: int, timeout: float | None) -> None:
        """Nothing moves yet: what is there is what vLLM computes with. Raises if it never comes, or is unfit."""
        self.join(timeout)
        assert self.weights is not None
        self.weights.wait_for(version, timeout=timeout)
        published = self._layout(timeout, version)
        if published != self.published:
            self.taken = planned(self._model, published.tensors, published.tied).taken
            self.published = published
        self._timeout = timeout

    def load(self, version: int) -> None:
        """Read it, verified, over the one before."""
        assert self.weights is not None, "fetched before"
        found = self.weights.update(version, timeout=self._timeout)
        if found != version:
            raise tensorhub.UsageError(f"version {version} was asked for, and {found} is held already")

    def holds(self, version: int | None) -> bool:
        """Whether that is what the parameters are, whole."""
        return version is not None and self.weights is not None and self.weights.version == version

    def close(self, timeout: float) -> None:
        """Stop being a shard of the replica. The parameters stay as they are, and the next `fetch` joins again."""
        weights, self.weights = self.weights, None
        if weights is not None:
            weights.close(timeout=timeout)


def processed(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, str]:
    """The parameters that vLLM makes something else of after it has loaded them, and how that shows."""
    found = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in found.items()}
    wrong = {name: PROCESSED for name, parameter in found.items() if not parameter.numel()}
    for at, layer in model.named_modules():
        prefix = f"{at}." if at else ""
        before, _ = get_layerwise_info(layer).restore_metadata
        for name, meta in before.items():
            now = getattr(layer, name, None)
            if now is None or (now.shape, now.dtype, now.stride()) != (meta.shape, meta.dtype, meta.stride()):
                wrong[names.get(id(now), prefix + name)] = PROCESSED
        if hasattr(layer, ONCE):
            wrong |= {prefix + name: PROCESSED for name, _ in layer.named_parameters(recurse=False)}
    if wrong:
        return wrong
    for _, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        watched = _Watching(found)
        with watched.until_touched():
            if isinstance(method, QuantizeMethodBase):
                method.process_weights_after_loading(layer)
                if (kernel := getattr(method, "moe_kernel", None)) is not None:  # not called again by the method
                    kernel.fused_experts.process_weights_after_loading(layer)
            elif is_deferred_attention_layer(layer):
                layer.process_weights_after_loading(dtype)
            elif layer is model and hasattr(model, "process_weights_after_loading"):
                model.process_weights_after_loading()
        wrong |= {name: f"vLLM's processing after a load reads it ({how})" for name, how in watched.touched.items()}
    moved = [name for name, parameter in model.named_parameters() if parameter is not found.get(name)]
    return wrong | dict.fromkeys(moved, PROCESSED)


class _Touched(BaseException):
    """Ends what vLLM has begun, before it has done anything; no `except Exception` of its may keep it."""


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stops the first operation on the memory of a parameter that is not a mere view of it."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {each.untyped_storage().data_ptr(): name for name, each in parameters.items()}
        self.touched: dict[str, str] = {}

    @contextmanager
    def until_touched(self) -> Iterator[None]:
        """A block that ends where a parameter is touched."""
        try:
            with self, _WatchingCalls(self), torch.no_grad():
                yield
        except _Touched:
            pass

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: "Mapping[str, Any] | None" = None
    ) -> Any:
        if func.overloadpacket.__name__ == "copy_" and _is_same(args[0], args[1]):
            return args[0]
        if not func.is_view:
            self.look(func.overloadpacket.__name__, (args, kwargs))
        return func(*args, **(kwargs or {}))

    def look(self, operation: str, given: object) -> None:
        """Raises `_Touched` if what an operation is given is memory of a parameter."""
        for each in torch.utils._pytree.tree_leaves(given):
            if isinstance(each, torch.Tensor) and not each.is_meta and each.numel():
                name = self._names.get(each.untyped_storage().data_ptr())
                if name is not None:
                    self.touched[name] = operation
                    raise _Touched(name)


class _WatchingCalls(TorchFunctionMode):
    """Sees operations of other libraries when they are called: the dispatcher hides those that are "composite".

    26 of the 50 in vLLM 0.32's library for CPUs are, among them the one that packs a linear layer.
    """

    def __init__(self, watching: _Watching) -> None:
        super().__init__()
        self._watching = watching

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: "Mapping[str, Any] | None" = None
    ) -> Any:
        if isinstance(func, OpOverload | OpOverloadPacket) and not str(func).startswith(("aten.", "prims.")):
            self._watching.look(str(func), (args, kwargs))
        return func(*args, **(kwargs or {}))


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a copy of one into the other changes nothing."""
    places = [(each.data_ptr(), each.shape, each.stride(), each.dtype) for each in (one, other) if not each.is_meta]
    return len(places) == 2 and places[0] == places[1]
