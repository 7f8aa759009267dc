"""The way that suits every model: whole tensors are fetched to the host, and vLLM loads them.

Each of vLLM's ranks is a replica of its own, which serves what it has on the host, also while vLLM computes. vLLM's
layerwise reload fuses, cuts and processes for the rank, and keeps every address. It is given a copy of each tensor, one
after the other: loaders may change what they are given, and others read what is on the host.

Before a version is fetched, `vllm_plan` follows the model's `load_weights` into the parameters as they were before vLLM
processed them, without memory. What of the engine comes from nowhere, or of the version goes nowhere, is refused by
name. vLLM itself notes only a layer into which nothing came; and what `load_weights` copies into a parameter past its
own `weight_loader`, vLLM's reload loses.

It must never: let an engine compute with parameters to which the version has brought nothing, random ones
(`load_format="dummy"`) or those of a version before, or let a loader write what is published.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS, SKIP_MODULES, SKIP_TENSORS, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

import tensorhub

from . import vllm_plan
from .vllm_plan import Published, Taken, planned
from .whole import Whole

LEAVE_S = 1.0  # for what has never held anything
VLLMS = "online_process_loader"  # the name of what vLLM puts in place of a `weight_loader` while it reloads


class Reload:
    """One rank of an engine."""

    published: "Published | None" = None  # what it was planned for
    taken: Taken

    def __init__(
        self,
        model: torch.nn.Module,
        config: VllmConfig,
        device: torch.device,
        whole: Whole,
        chosen: "Callable[[Any], Published]",
    ) -> None:
        """`chosen`: what is to be loaded of a layout."""
        self._model, self._model_config, self._device = model, config.model_config, device
        self.whole, self._chosen = whole, chosen
        self._is_loaded = False  # what is on the host, as it lies there

    @property
    def weights(self) -> "tensorhub.Weights | None":
        """What serves them."""
        return self.whole.weights

    def join(self, timeout: float | None) -> None:
        """Become a replica, without a version as yet. Raises `UsageError` if the engine cannot load what there is."""
        was_here = self.weights is not None
        self.whole.join(timeout=timeout)
        published = self._chosen(self.whole.layout)
        if published == self.published:
            return
        try:
            with self._device, before_processing(self._model) as reload:
                self.taken = planned(self._model, published.tensors, published.tied, reload).taken
        except BaseException:  # else the next one would be expected to be made of these tensors
            if not was_here:
                self.whole.close(timeout=LEAVE_S)
            raise
        self.published = published

    def fetch(self, version: int, timeout: float | None) -> None:
        """To the host. vLLM computes with the version before. What is made of other tensors is refused by name."""
        self.join(timeout)
        if self.whole.version != version:  # the number alone does not tell: another job may have begun with it anew
            self._is_loaded = False
        found = self.whole.update(version, timeout=timeout)
        if found != version:
            raise tensorhub.UsageError(f"{version} was asked for, and {self.whole.replica} holds {found} already")

    def load(self, version: int) -> None:
        """Over the version before. A load that fails leaves a mixture, which the next one mends."""
        assert self.published is not None, "fetched before"
        self._is_loaded = False
        if self._device.type == "cpu":
            _forget_kernels_of_experts(self._model)
        names = {tensor.name for tensor in self.published.tensors}
        layers, tied = _Layers(self._model), _tied(self._model)
        try:
            with self._device, torch.no_grad():
                initialize_layerwise_reload(self._model)
                self._model.load_weights(each for each in self.whole.copies() if each[0] in names)  # type: ignore[operator]
                again = [layer for layer in tied if _is_passed_by(layer)]
                finalize_layerwise_reload(self._model, self._model_config)
                for layer in again:
                    method = getattr(layer, "quant_method", None)
                    if isinstance(method, QuantizeMethodBase):
                        method.process_weights_after_loading(layer)
        except BaseException:  # else vLLM would go on with this load when the next one begins
            layers.put_back()
            for layer in self._model.modules():
                get_layerwise_info(layer).reset()
            raise
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


class _Layers:
    """What the layers of a model are, to be put back: parameters, buffers and other values, not what is in them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._were = []
        for layer in model.modules():
            values = {name: each for name, each in vars(layer).items() if not callable(each)}
            tensors = {"_parameters": {**layer._parameters}, "_buffers": {**layer._buffers}}
            values.update(tensors, _non_persistent_buffers_set={*layer._non_persistent_buffers_set})
            self._were.append((layer, values))

    def put_back(self) -> None:
        for layer, values in self._were:
            vars(layer).update(values)


@contextmanager
def before_processing(model: torch.nn.Module) -> "Iterator[vllm_plan.Reload]":
    """A block in which parameters and buffers are what vLLM's reload loads into, and nothing can be written."""
    layers, inside = _Layers(model), [0]
    same, optional = _names(model)
    try:
        if hasattr(model, "_do_torchao_reload"):  # else its load_weights would begin a reload by itself
            model._do_torchao_reload = False  # type: ignore[assignment]
        for layer in model.modules():
            if type(layer).__name__ not in SKIP_MODULES:
                _put_before(layer, inside)
        yield vllm_plan.Reload(lambda: inside[0] > 0, same, optional)
    finally:
        layers.put_back()


def _put_before(layer: torch.nn.Module, inside: list[int]) -> None:
    """The layer's tensors as they were before vLLM processed them; those that its reload leaves alone stay."""
    before = get_layerwise_info(layer).restore_metadata
    for kind, metas in zip(("_parameters", "_buffers"), before, strict=True):
        made = {name: each for name, each in vars(layer)[kind].items() if each is None or name in SKIP_TENSORS}
        for name, meta in metas.items():
            if name not in SKIP_TENSORS:
                made[name] = restore_layer_refs(to_meta_tensor(meta), layer)
                loader = getattr(made[name], "weight_loader", default_weight_loader)
                while loader.__name__ == VLLMS:
                    loader = loader.__wrapped__
                made[name].weight_loader = _noted(loader, inside)
                vars(layer).pop(name, None)
        vars(layer)[kind] = made


def _noted(loader: Callable[..., Any], inside: list[int]) -> Callable[..., Any]:
    """The loader, and that it runs: what it copies vLLM's reload copies as well."""

    @wraps(loader)
    def load(*args: Any, **kwargs: Any) -> Any:
        inside[0] += 1
        try:
            return loader(*args, **kwargs)
        finally:
            inside[0] -= 1

    return load


def _names(model: torch.nn.Module) -> tuple[dict[str, str], frozenset[str]]:
    """The first name of each parameter that has several; and parameters that vLLM does without."""
    first: dict[int, str] = {}
    same: dict[str, str] = {}
    optional: set[str] = set()
    for at, layer in model.named_modules():
        before, _ = get_layerwise_info(layer).restore_metadata  # vLLM drops some of them when it has used them
        for name in {**before, **layer._parameters}:
            full, parameter = f"{at}.{name}" if at else name, layer._parameters.get(name)
            if parameter is not None:
                same[full] = first.setdefault(id(parameter), full)
            if name in SKIP_LOAD_TENSORS or is_deferred_attention_layer(layer):
                optional.add(full)
    return same, frozenset(optional)


def _tied(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Layers whose parameters are all of other layers, such as a tied head."""
    seen: set[int] = set()
    found = []
    for layer in model.modules():
        mine = {id(each) for each in layer.parameters(recurse=False)}
        if mine and mine <= seen:
            found.append(layer)
        seen |= mine
    return found


def _is_passed_by(layer: torch.nn.Module) -> bool:
    """True while a reload has brought nothing to it: vLLM then does not process it.

    Where it computes with a processed copy, as on CPUs, that would stay the one of the version before.
    """
    info = get_layerwise_info(layer)
    return info.can_load() and not info.load_numel


def _forget_kernels_of_experts(model: torch.nn.Module) -> None:
    """So that vLLM makes them anew while it loads.

    vLLM 0.32 packs experts for CPUs only when it makes their kernels: after a load that keeps them it computes with
    unpacked weights as if they were packed. On GPUs captured graphs hold the kernels, which stay.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # type: ignore[union-attr]
