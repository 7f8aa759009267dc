"""What a process of the benchmarks does for part `device`: tensors on a CUDA device, and what copies alone take."""

import os
import time
from collections.abc import Callable

import torch

import tensorhub
from tensorhub.memory.digests import build_manifest
from tensorhub.memory.registration import register

from .child import cpu_s
from .converse import converse
from .section import MIB

TENSOR_BYTES = 64 * MIB
CHUNK_BYTES = 4 * MIB


class Device:
    """One side."""

    def __init__(self) -> None:
        self.device = "cuda:0"
        self.tensors: dict[str, torch.Tensor] = {}
        self.weights: tensorhub.Weights | None = None

    def allocate(self, size_bytes: int) -> None:
        """Tensors of 64 MiB, and one of what is left."""
        sizes = [TENSOR_BYTES] * (size_bytes // TENSOR_BYTES) + [size_bytes % TENSOR_BYTES]
        self.tensors = {
            f"w{index}": torch.zeros(size // 4, dtype=torch.int32, device=self.device)
            for index, size in enumerate(sizes)
            if size
        }
        torch.cuda.synchronize()

    def cpu(self) -> float:
        return cpu_s()

    def name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    def write(self, seed: int) -> None:
        """Other content for each seed."""
        for index, tensor in enumerate(self.tensors.values()):
            tensor.copy_(self._content(tensor, index, seed))
        torch.cuda.synchronize()

    def is_right(self, seed: int) -> bool:
        pairs = enumerate(self.tensors.values())
        return all(bool(torch.equal(tensor, self._content(tensor, index, seed))) for index, tensor in pairs)

    def _content(self, tensor: torch.Tensor, index: int, seed: int) -> torch.Tensor:
        return torch.arange(len(tensor), dtype=torch.int32, device=self.device) * (2 * seed + 1) + index

    # --- one process --------------------------------------------------------------------------------------------------

    def copy(self, kind: str) -> dict[str, float]:
        """All tensors to host memory, from there, or to other memory of the device; both sides were touched before."""
        where = {"device": self.device}.get(kind, "cpu")
        is_pinned = kind in ("to_pinned", "from_pinned")
        others = [torch.ones_like(tensor, device=where, pin_memory=is_pinned) for tensor in self.tensors.values()]
        torch.cuda.synchronize()

        def run() -> None:
            for tensor, other in zip(self.tensors.values(), others, strict=True):
                target, source = (tensor, other) if kind.startswith("from") else (other, tensor)
                target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()

        return self._timed(run)

    def hash(self) -> dict[str, float]:
        """What a publish does before it says so."""
        registration = register(self.tensors)
        build_manifest(registration, CHUNK_BYTES)
        return self._timed(lambda: build_manifest(registration, CHUNK_BYTES))

    # --- two processes ------------------------------------------------------------------------------------------------

    def open(self, transports: str, **options: object) -> None:
        os.environ["TENSORHUB_TRANSPORTS"] = transports
        self.weights = tensorhub.open(**options)  # type: ignore[arg-type]
        self.weights.register(self.tensors)

    def call(self, verb: str, **arguments: object) -> dict[str, float]:
        weights = self.weights
        assert weights is not None
        return self._timed(lambda: getattr(weights, verb)(**arguments))

    def ways(self) -> list[str]:
        """By which transports bytes came."""
        assert self.weights is not None
        found = self.weights.statistics()["bytes_by_transport"]
        assert isinstance(found, dict)
        return sorted(found)

    def close(self) -> None:
        if self.weights is not None:
            self.weights.close(timeout=20)
            self.weights = None

    def _timed(self, work: Callable[[], object]) -> dict[str, float]:
        before, began = cpu_s(), time.monotonic()
        work()
        return {"seconds": time.monotonic() - began, "cpu_s": cpu_s() - before}


if __name__ == "__main__":
    converse(Device())
