"""Memory for a layout that somebody else has registered: tensors that may be registered, and filled, as they are.

Each block of the layout gets memory of its own; tensors that share memory there share it here, so the layout's digest
is the same. Torch tensors on the host where torch is installed, numpy arrays elsewhere.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..core.errors import Unavailable, UsageError
from ..core.manifest import Layout, TensorSpec, item_bytes
from .describe import NUMPY_KINDS
from .torch_here import loaded_torch, outside_modes, what_helps

if TYPE_CHECKING:
    import numpy as np
    import torch

    from .registration import type_of_tensor

MOST_ALIGNED = 16  # B: no element is wider
QUANTIZED = ("qint8", "qint32", "quint8", "quint4x2", "quint2x4")  # of torch: `register` refuses them


def allocate(layout: Layout) -> "dict[str, type_of_tensor]":
    """Uninitialised tensors of that layout, by name.

    Raises `UsageError` naming a dtype that is unknown here, `Unavailable` where there is no memory for them.
    """
    make = _torch_block if loaded_torch() is not None else _numpy_block
    try:
        with outside_modes():
            found = {name: tensor for block in _blocks(layout.tensors) for name, tensor in make(block)}
    except (MemoryError, RuntimeError, ValueError) as error:  # of torch, and of numpy for more than there are addresses
        text = f"{len(layout.tensors)} tensors of {layout.size_bytes} B could not be allocated: {error}"
        raise Unavailable(text, hint="free memory, or load where there is more") from error
    return {spec.name: found[spec.name] for spec in layout.tensors}


def _blocks(tensors: Sequence[TensorSpec]) -> Iterator[list[TensorSpec]]:
    """Those that share memory, directly or through others, together."""
    block: list[TensorSpec] = []
    end = 0
    for spec in sorted(tensors, key=lambda spec: (spec.offset_bytes, -spec.size_bytes)):
        if not spec.size_bytes:
            yield [spec]
            continue
        if block and spec.offset_bytes >= end:
            yield block
            block = []
        block.append(spec)
        end = max(end, spec.offset_bytes + spec.size_bytes)
    if block:
        yield block


def _place(block: Sequence[TensorSpec], sizes: Sequence[int]) -> tuple[int, list[int]]:
    """(bytes to allocate, where each tensor begins), so that each is aligned to its elements."""
    start = block[0].offset_bytes
    for pad in range(MOST_ALIGNED):
        places = [pad + spec.offset_bytes - start for spec in block]
        if all(place % size == 0 for place, size in zip(places, sizes, strict=True)):
            return max(place + spec.size_bytes for place, spec in zip(places, block, strict=True)), places
    names = ", ".join(repr(spec.name) for spec in block[:4])
    raise UsageError(f"tensors that share memory are aligned to nothing: {names}")


def _torch_block(block: Sequence[TensorSpec]) -> "Iterator[tuple[str, torch.Tensor]]":
    import torch

    dtypes = [_torch_dtype(spec) for spec in block]
    length, places = _place(block, [dtype.itemsize for dtype in dtypes])
    memory = torch.empty(length, dtype=torch.uint8).untyped_storage()
    for spec, dtype, place in zip(block, dtypes, places, strict=True):
        tensor = torch.empty(0, dtype=dtype)
        yield spec.name, tensor.set_(memory, place // dtype.itemsize, spec.shape, spec.strides)


def _torch_dtype(spec: TensorSpec) -> "torch.dtype":
    import torch

    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != item_bytes(spec.dtype) or spec.dtype in QUANTIZED:
        raise UsageError(f"tensor {spec} has a dtype that this torch does not know", hint="install a newer torch")
    return dtype


def _numpy_block(block: Sequence[TensorSpec]) -> "Iterator[tuple[str, type_of_tensor]]":
    import numpy as np

    dtypes = [_numpy_dtype(spec) for spec in block]
    length, places = _place(block, [dtype.itemsize for dtype in dtypes])
    memory = np.empty(length + MOST_ALIGNED, np.uint8)
    skip = -memory.ctypes.data % MOST_ALIGNED
    for spec, dtype, place in zip(block, dtypes, places, strict=True):
        strides = tuple(stride * dtype.itemsize for stride in spec.strides)
        yield spec.name, np.ndarray(spec.shape, dtype, memory.data, skip + place, strides)


def _numpy_dtype(spec: TensorSpec) -> "np.dtype[np.generic]":
    import numpy as np

    try:
        found = np.dtype(spec.dtype)
    except TypeError:
        found = np.dtype(object)
    if found.name != spec.dtype or found.itemsize != item_bytes(spec.dtype) or found.kind not in NUMPY_KINDS:
        raise UsageError(f"tensor {spec} has a dtype that numpy does not know", hint=what_helps())
    return found
