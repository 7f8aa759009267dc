"""Memory for all of a model, whole: the global tensors that the boxes of a replica are parts of."""

from collections.abc import Sequence

from ...core.boxes import GlobalTensor, contiguous_strides
from ...core.errors import UsageError
from ...core.manifest import Layout, TensorSpec
from .wire import decode_table


def whole_layout(tables: Sequence[bytes]) -> Layout:
    """One tensor for each global one, sorted by name, contiguous. `tables`: the encoded boxes of each shard.

    Raises `UsageError` naming a tensor that two shards take for two different ones.
    """
    found: dict[str, GlobalTensor] = {}
    for table in tables:
        for tensor in decode_table(table).tensors:
            known = found.setdefault(tensor.name, tensor)
            if known != tensor:
                raise UsageError(f"the shards of this version do not agree: {known} and {tensor}")
    specs, at = [], 0
    for _, tensor in sorted(found.items()):
        specs.append(
            TensorSpec(tensor.name, tensor.dtype, tensor.shape, contiguous_strides(tensor.shape), at, tensor.size_bytes)
        )
        at += tensor.size_bytes
    return Layout(tuple(specs), at)
