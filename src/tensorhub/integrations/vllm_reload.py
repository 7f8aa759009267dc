"""The way that suits every model: whole tensors are fetched to the host, and vLLM loads them.

Each of vLLM's ranks is a replica of its own, which serves what it has on the host, also while vLLM computes. vLLM's
layerwise reload fuses, cuts and processes for the rank, and keeps every address. It is given a copy of each tensor, one
after the other: loaders may change what they are given, and others read what is on the host.

Meanwhile parameters have no memory, and vLLM notes what their own `weight_loader`s are called with. What a model's
`load_weights` copies into a parameter past those is lost, without an error: that is seen here, and refused by name.

It must never: let an engine compute with parameters to which the version has brought nothing, random ones
(`load_format="dummy"`) or those of a version before, or let a loader write what is published.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

import tensorhub

from .vllm_writes import written
from .whole import Whole

VLLMS = "online_process_loader"  # the name of what vLLM puts in place of a `weight_loader`, and knows it by


class Reload:
    """One rank of an engine."""

    def __init__(self, model: torch.nn.Module, config: VllmConfig, device: torch.device, whole: Whole) -> None:
        self._model, self._model_config, self._device = model, config.model_config, device
        self.whole = whole
        self._is_loaded = False  # what is on the host, as it lies there

    @property
    def weights(self) -> "tensorhub.Weights | None":
        """What serves them."""
        return self.whole.weights

    def join(self, timeout: float | None) -> None:
        """Become a replica, without a version as yet."""
        self.whole.join(timeout=timeout)

    def fetch(self, version: int, timeout: float | None) -> None:
        """To the host. vLLM computes with the version before."""
        if self.whole.version != version:  # the number alone does not tell: another job may have begun with it anew
            self._is_loaded = False
        found = self.whole.update(version, timeout=timeout)
        if found != version:
            raise tensorhub.UsageError(f"{version} was asked for, and {self.whole.replica} holds {found} already")

    def load(self, version: int) -> None:
        """Over the version before."""
        self._is_loaded = False
        if self._device.type == "cpu":
            _forget_kernels_of_experts(self._model)
        names = {name for name, _ in self._model.named_parameters()}  # of tied ones one
        with self._device, torch.no_grad():
            initialize_layerwise_reload(self._model)
            direct = _Direct(self._model)
            with direct:
                self._model.load_weights(self.whole.copies())  # type: ignore[operator]
            missing = (names & _nothing_came(self._model)) - direct.kept
            finalize_layerwise_reload(self._model, self._model_config)
        if direct.lost:
            others = f", and {len(direct.lost) - 1} others" if len(direct.lost) > 1 else ""
            text = f"this model's load_weights copies {min(direct.lost)!r}{others} past vLLM's reload, which loses them"
            raise tensorhub.UsageError(text, hint="attach(..., in_place=True) may do")
        if missing:
            others = f", nor as {len(missing) - 1} other parameters" if len(missing) > 1 else ""
            raise tensorhub.UsageError(f"nothing that is published is loaded as {min(missing)!r}{others}")
        self._is_loaded = True

    def holds(self, version: int | None) -> bool:
        """Whether that is on the host, and loaded from there. After a load that has failed nothing is."""
        return self._is_loaded and version is not None and self.whole.version == version

    def close(self, timeout: float) -> None:
        """Stop being a replica, and free its host memory. The next `fetch` joins again.

        What that brings counts as new, also under the number that is loaded now: it may be another job's.
        """
        self._is_loaded = False
        self.whole.close(timeout=timeout)


class _Direct(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What a model's loader writes by itself, and not through a `weight_loader`. Entered after the reload has begun."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lost: set[str] = set()  # had no memory
        self.kept: set[str] = set()  # had memory: vLLM leaves it to some, such as biases
        self._names: dict[int, tuple[str, Any]] = {}  # of parameters and buffers, by their storage, which is kept
        for at, layer in model.named_modules():
            for name, tensor in {**layer._parameters, **layer._buffers}.items():
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    self._names[storage._cdata] = f"{at}.{name}" if at else name, storage
                    loader = getattr(tensor, "weight_loader", None)
                    if loader is not None and loader.__name__ == VLLMS:
                        tensor.weight_loader = _unwatched(loader)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: "Mapping[str, Any] | None" = None
    ) -> Any:
        for each in written(func, args, kwargs):
            found = self._names.get(each.untyped_storage()._cdata)
            if found is not None and each.numel():
                (self.lost if each.is_meta else self.kept).add(found[0])
        return func(*args, **(kwargs or {}))


def _unwatched(loader: Callable[..., Any]) -> Callable[..., Any]:
    """It writes where it should, and may begin vLLM's processing of the layer. Keeps the name that vLLM looks for."""

    @wraps(loader)
    def load(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return loader(*args, **kwargs)

    return load


def _nothing_came(model: torch.nn.Module) -> set[str]:
    """The parameters of layers to which the load has brought nothing. vLLM gives them back what they were."""
    found: set[str] = set()
    for at, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if info.can_load() and not info.load_numel and not is_deferred_attention_layer(layer):
            found |= {f"{at}.{name}" if at else name for name, _ in layer.named_parameters(recurse=False)}
    return found


def _forget_kernels_of_experts(model: torch.nn.Module) -> None:
    """So that vLLM makes them anew while it loads.

    vLLM 0.32 packs experts for CPUs only when it makes their kernels: after a load that keeps them it computes with
    unpacked weights as if they were packed. On GPUs captured graphs hold the kernels, which stay.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # type: ignore[union-attr]
