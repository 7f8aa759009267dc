"""The way that suits every model: whole tensors are fetched to the host, and vLLM loads them.

Each of vLLM's ranks is a replica of its own, which serves what it has on the host, also while vLLM computes. vLLM's
layerwise reload fuses, cuts and processes for the rank, and keeps every address.
"""

from typing import Any

import torch
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

import tensorhub

from .whole import Whole


class Reload:
    """One rank of an engine."""

    def __init__(self, model: torch.nn.Module, model_config: Any, device: torch.device, whole: Whole) -> None:
        self._model, self._model_config, self._device = model, model_config, device
        self.whole = whole

    @property
    def weights(self) -> "tensorhub.Weights | None":
        """What serves them."""
        return self.whole.weights

    def fetch(self, version: int, timeout: float | None) -> None:
        """To the host. vLLM computes with the version before."""
        found = self.whole.update(version, timeout=timeout)
        if found != version:
            raise tensorhub.UsageError(f"{version} was asked for, and {self.whole.replica} holds {found} already")

    def load(self, version: int) -> None:
        """Over the version before."""
        if self._device.type == "cpu":
            _forget_kernels_of_experts(self._model)
        with self._device, torch.no_grad():
            initialize_layerwise_reload(self._model)
            self._model.load_weights(iter(self.whole))  # type: ignore[operator]
            finalize_layerwise_reload(self._model, self._model_config)

    def holds(self, version: int | None) -> bool:
        """After a load that has failed: nothing that could be used."""
        return False

    def close(self, timeout: float) -> None:
        """Leave, until the next `fetch`."""
        self.whole.close(timeout=timeout)


def _forget_kernels_of_experts(model: torch.nn.Module) -> None:
    """So that vLLM makes them anew while it loads.

    vLLM 0.32 packs experts for CPUs only when it makes their kernels: after a load that keeps them it computes with
    unpacked weights as if they were packed. On GPUs captured graphs hold the kernels, which stay.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # type: ignore[union-attr]
