"""Memory for all of a model, whole: the global tensors that the boxes of a replica are parts of."""

from collections.abc import Sequence

import numpy as np

from ...core.boxes import GlobalTensor
from ...core.errors import UsageError
from ...core.manifest import MAX_SIZE, Layout, TensorSpec, contiguous_strides
from .table import BoxTable
from .wire import decode_table

Place = tuple[int, int]  # of a part that is an alias: its shard, and the first row of the table with the same memory


def whole_layout(tables: Sequence[bytes]) -> Layout:
    """One tensor for each global one, sorted by name, contiguous. `tables`: the encoded boxes of each shard.

    Those that are the same memory on every shard (tied weights) are so here too. Raises `UsageError` naming a tensor
    that two shards take for two different ones.
    """
    found: dict[str, GlobalTensor] = {}
    shared: dict[str, set[Place]] = {}
    alone: set[str] = set()
    for shard, encoded in enumerate(tables):
        table = decode_table(encoded)
        for tensor in table.tensors:
            known = found.setdefault(tensor.name, tensor)
            if known != tensor:
                raise UsageError(f"the shards of this version do not agree: {known} and {tensor}")
        _note_aliases(table, shard, shared, alone)
    specs, at = [], 0
    places: dict[tuple[frozenset[Place], GlobalTensor], int] = {}
    for name, tensor in sorted(found.items()):
        here = at
        if name in shared and name not in alone:
            here = places.setdefault((frozenset(shared[name]), GlobalTensor("", tensor.dtype, tensor.shape)), at)
        strides = contiguous_strides(tensor.shape)
        specs.append(TensorSpec(name, tensor.dtype, tensor.shape, strides, here, tensor.size_bytes))
        at += tensor.size_bytes if here == at else 0
    if at > MAX_SIZE:
        raise UsageError(f"the tensors of this version have {at} B")
    return Layout(tuple(specs), at)


def tied(layout: Layout) -> tuple[tuple[str, ...], ...]:
    """Names of tensors that are the same memory."""
    groups: dict[tuple[int, str, tuple[int, ...]], list[str]] = {}
    for spec in layout.tensors:
        if spec.size_bytes:
            groups.setdefault((spec.offset_bytes, spec.dtype, spec.shape), []).append(spec.name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def _note_aliases(table: BoxTable, shard: int, shared: dict[str, set[Place]], alone: set[str]) -> None:
    """Where those parts of each tensor lie that share memory with others, and which tensors have parts that do not."""
    if not len(table):
        return
    has_others = np.bincount(table.alias_of, minlength=len(table))[table.alias_of] > 1
    for tensor, first in zip(table.tensor[has_others].tolist(), table.alias_of[has_others].tolist(), strict=True):
        shared.setdefault(table.tensors[tensor].name, set()).add((shard, first))
    alone.update(table.tensors[tensor].name for tensor in np.unique(table.tensor[~has_others]).tolist())
