"""The weights of the laboratory: tensors whose every byte changes with each version, and the laboratory's own hash."""

import hashlib

import numpy as np
from numpy.typing import NDArray

TENSORS = 4
MARK_BYTES = 64 * 1024
FUSED = "layers"

Tensors = dict[str, NDArray[np.uint8]]


def sizes_of(size_bytes: int) -> dict[str, int]:
    """The tensors, in bytes."""
    part = size_bytes // TENSORS
    sizes = [part] * (TENSORS - 1) + [size_bytes - part * (TENSORS - 1)]
    return {f"layer.{index}": size for index, size in enumerate(sizes)}


def make_tensors(size_bytes: int, *, is_fused: bool = False) -> Tensors:
    """Touched memory, all zero. `is_fused`: all tensors in one, one after the other."""
    sizes = {FUSED: size_bytes} if is_fused else sizes_of(size_bytes)
    tensors = {name: np.empty(size, dtype=np.uint8) for name, size in sizes.items()}
    for tensor in tensors.values():
        tensor[:] = 0
    return tensors


class Training:
    """What the trainer does to its tensors, from a seed."""

    def __init__(self, size_bytes: int, seed: int) -> None:
        self._noise = np.random.default_rng(seed).integers(0, 256, size=size_bytes, dtype=np.uint8)

    def step(self, tensors: Tensors, version: int) -> None:
        """Make the content of that version: noise, shifted, and in every 64 KiB the version itself."""
        start, mark = 0, np.frombuffer(version.to_bytes(8, "little"), dtype=np.uint8)
        for tensor in tensors.values():
            np.add(self._noise[start : start + len(tensor)], np.uint8(version * 37 % 256), out=tensor)
            for at in range(0, len(tensor) - 8, MARK_BYTES):
                tensor[at : at + 8] = mark
            start += len(tensor)


def fingerprint(tensors: Tensors) -> str:
    """SHA-256 over all bytes, computed outside the library."""
    hasher = hashlib.sha256()
    for tensor in tensors.values():
        hasher.update(tensor.data)
    return hasher.hexdigest()
