"""The boxes of one shard as columns, in an order that follows from what they are: one row for each box.

A row says where its elements lie in the shard's stream, in bytes: element (i, j, …) of the box is at
`offset + i * strides[0] + j * strides[1] + …`. Shapes are filled up on the left to one number of dimensions.

Rules:
1. Rows are sorted by place; those at one place by shape, strides, part and name. Boxes without elements are left out;
   their tensor stays.
2. Boxes with the same memory that are the same part of tensors of one shape and dtype are *aliases* (tied weights):
   each names the first of them in `alias_of`, and all have the same content. Other memory in common: see
   `overlaps.py`.
3. Two shards have equal layouts exactly if their tables are equal; `wire.py` makes one digest of one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...core.boxes import Box, GlobalTensor, boxes_of, part_text
from ...core.manifest import Layout, TensorSpec, item_bytes
from .arrays import Ints, group_starts, ints, spans, volumes


@dataclass(frozen=True, eq=False, repr=False)
class BoxTable:
    """All boxes of one shard. `at` and `size` are counted in elements, `offset` and `strides` in bytes."""

    tensors: tuple[GlobalTensor, ...]  # sorted by name
    size_bytes: int  # of the shard's stream
    tensor: Ints  # [boxes] index into `tensors`
    offset: Ints  # [boxes]
    at: Ints  # [boxes, dimensions]
    size: Ints
    strides: Ints  # 0 where the size is 1
    item: Ints  # [tensors] bytes of one element
    alias_of: Ints  # [boxes] the first row with the same memory; its own where there is none

    def __repr__(self) -> str:
        return f"<BoxTable of {len(self)} boxes of {len(self.tensors)} tensors>"

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def dimensions(self) -> int:
        return int(self.at.shape[1])

    @property
    def bytes_of_boxes(self) -> Ints:
        """[boxes]"""
        return volumes(self.size) * self.item[self.tensor]

    @property
    def spans(self) -> Ints:
        """[boxes] from the first byte of each to behind its last."""
        return spans(self.size, self.strides, self.item[self.tensor])

    def text(self, row: int) -> str:
        """A box in words: name and part."""
        tensor = self.tensors[self.tensor[row]]
        return f"{tensor.name!r}{self.part(tensor, self.at[row], self.size[row])}"

    @staticmethod
    def part(tensor: GlobalTensor, at: Ints, size: Ints) -> str:
        """Part of a tensor, without the dimensions that were filled up."""
        count = len(tensor.shape)
        return part_text(at[len(at) - count :].tolist(), size[len(size) - count :].tolist())


def filled_shapes(tensors: Sequence[GlobalTensor], dimensions: int) -> Ints:
    """[tensors, dimensions] their shapes, filled up with 1 on the left."""
    shapes = [(1,) * (dimensions - len(tensor.shape)) + tensor.shape for tensor in tensors]
    return np.array(shapes, np.int64).reshape(len(tensors), dimensions)


def table_of(layout: Layout, boxes: Mapping[str, Sequence[Box]] | None = None) -> BoxTable:
    """The boxes of registered tensors. Raises `UsageError`, naming tensor and part, for boxes that cannot be."""
    return table_of_boxes(boxes_of(layout, boxes), layout.size_bytes)


def table_of_boxes(placed: Sequence[tuple[TensorSpec, Box]], size_bytes: int) -> BoxTable:
    """From complete boxes beside the tensors that they lie in."""
    known = {box.name: GlobalTensor(box.name, box.dtype, box.global_shape) for _, box in placed}
    tensors = tuple(known[name] for name in sorted(known))
    index = {tensor.name: at for at, tensor in enumerate(tensors)}
    dimensions = max((len(tensor.shape) for tensor in tensors), default=1) or 1
    rows: list[tuple[int, ...]] = []
    for spec, box in placed:
        assert box.strides is not None, "boxes are complete"
        if 0 in box.size:
            continue
        item = item_bytes(box.dtype)
        missing = dimensions - len(box.at)
        steps = (stride * item if count > 1 else 0 for stride, count in zip(box.strides, box.size, strict=True))
        zeros, ones = (0,) * missing, (1,) * missing
        rows.append(
            (index[box.name], spec.offset_bytes + box.offset * item, *zeros, *box.at, *ones, *box.size, *zeros, *steps)
        )
    columns = np.array(rows, np.int64).reshape(len(rows), 2 + 3 * dimensions)
    return table_of_columns(tensors, size_bytes, columns)


def items_of(tensors: Sequence[GlobalTensor]) -> Ints:
    """[tensors] bytes of one element."""
    known: dict[str, int] = {}
    return ints([known.get(one.dtype) or known.setdefault(one.dtype, item_bytes(one.dtype)) for one in tensors])


def table_of_columns(
    tensors: tuple[GlobalTensor, ...], size_bytes: int, columns: Ints, item: Ints | None = None
) -> BoxTable:
    """From rows of tensor, offset, `at`, `size` and `strides`, in any order."""
    dimensions = (columns.shape[1] - 2) // 3
    tensor, offset, rest = columns[:, 0], columns[:, 1], columns[:, 2:]
    at, size, strides = (rest[:, n * dimensions : (n + 1) * dimensions] for n in range(3))
    order = alias_of = np.arange(len(columns))
    if not (offset[1:] > offset[:-1]).all():  # as of a table that travels, nearly always
        order, alias_of = _order_and_aliases(tensors, tensor, offset, at, size, strides)
    sorted_columns = (np.ascontiguousarray(column[order]) for column in (tensor, offset, at, size, strides))
    tensor, offset, at, size, strides = sorted_columns
    if item is None:
        item = items_of(tensors)
    return BoxTable(tensors, size_bytes, tensor, offset, at, size, strides, item, alias_of)


def _order_and_aliases(
    tensors: tuple[GlobalTensor, ...], tensor: Ints, offset: Ints, at: Ints, size: Ints, strides: Ints
) -> tuple[Ints, Ints]:
    """Rules 1 and 2."""
    kinds: dict[tuple[str, tuple[int, ...]], int] = {}
    kind = ints([kinds.setdefault((one.dtype, one.shape), len(kinds)) for one in tensors])[tensor]
    same = [offset, *(column[:, d] for d in range(at.shape[1]) for column in (size, strides, at)), kind]
    order = np.lexsort([tensor, *reversed(same)])
    alias_of = np.zeros(len(order), np.int64)
    firsts = group_starts(*(column[order] for column in same))
    alias_of[firsts] = firsts
    return order, np.maximum.accumulate(alias_of)
