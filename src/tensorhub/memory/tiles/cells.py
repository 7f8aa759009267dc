"""The tiles of one shard: which cells of the grid its boxes consist of, and where each one lies in its stream.

A shard's tiles have numbers of their own, `slot`: box after box in the order of its table, row-major within a box. That
is the order of digests in its manifest. Where a boundary of a box is no cut (the layout came after the version was
published), the tiles at that boundary lie in the box in part only: `is_whole` is false for them.
"""

from dataclasses import dataclass

import numpy as np

from ...core.boxes import refuse_difference
from ...core.errors import LayoutMismatch
from ...core.manifest import names_difference
from .arrays import Bools, Ints, ints, ranks_of, row_major, starts_of, volumes
from .grid import Grid
from .table import BoxTable

NAMES_SHOWN = 3


@dataclass(frozen=True, eq=False, repr=False)
class Spans:
    """For each box of a table the range of cells that covers it, in each dimension."""

    tensor: Ints  # [boxes] the tensor's number in the grid
    kind: Ints
    low: Ints  # [boxes, dimensions of the grid] the first cell
    count: Ints  # how many cells
    first_slot: Ints  # [boxes + 1]
    pad: int  # dimensions that the grid has more than the table

    @property
    def tile_count(self) -> int:
        return int(self.first_slot[-1])


@dataclass(frozen=True, eq=False, repr=False)
class Tiles:
    """Tiles of a table, or those that were asked for. Places and strides in bytes, counts in elements."""

    table: BoxTable
    grid: Grid
    number: Ints  # [tiles] in the grid: equal for the same tile in all layouts
    slot: Ints  # in the shard's own manifest
    box: Ints  # row of the table
    start: Ints  # [tiles, dimensions] in the global tensor: of what lies in the box
    size: Ints
    offset: Ints  # [tiles] of its first byte in the shard's stream
    is_whole: Bools

    def __len__(self) -> int:
        return len(self.number)

    @property
    def pad(self) -> int:
        return self.grid.dimensions - self.table.dimensions

    @property
    def strides(self) -> Ints:
        """[tiles, dimensions]"""
        return padded(self.table.strides, self.pad, 0)[self.box]

    @property
    def item(self) -> Ints:
        """[tiles] bytes of one element."""
        return self.table.item[self.table.tensor[self.box]]

    @property
    def size_bytes(self) -> Ints:
        """[tiles] of what lies in the box."""
        return volumes(self.size) * self.item

    def only(self, picked: Ints) -> "Tiles":
        """Those at these positions."""
        number, slot, box, start, size, offset = (
            column[picked] for column in (self.number, self.slot, self.box, self.start, self.size, self.offset)
        )
        return Tiles(self.table, self.grid, number, slot, box, start, size, offset, self.is_whole[picked])

    def cell(self) -> tuple[Ints, Ints]:
        """Start and size of each whole tile in the global tensor."""
        return cell_of(self.grid, self.number)

    def text(self, tile: int) -> str:
        """A tile in words: name and part."""
        tensor = self.grid.tensors[tensor_of(self.grid, self.number[tile : tile + 1])[0]]
        return f"{tensor.name!r}{BoxTable.part(tensor, self.start[tile], self.size[tile])}"


def padded(columns: Ints, pad: int, value: int) -> Ints:
    """Dimensions filled up on the left."""
    return np.pad(columns, ((0, 0), (pad, 0)), constant_values=value) if pad else columns


def tensor_of(grid: Grid, number: Ints) -> Ints:
    """The tensor that each tile belongs to."""
    return np.searchsorted(grid.first_tile, number, "right") - 1


def cell_of(grid: Grid, number: Ints) -> tuple[Ints, Ints]:
    """Start and size of tiles in their global tensors."""
    tensor = tensor_of(grid, number)
    kind = grid.kind[tensor]
    rank = number - grid.first_tile[tensor]
    steps = row_major(grid.cells)[kind]
    start = np.empty((len(number), grid.dimensions), np.int64)
    size = np.empty_like(start)
    for d in range(grid.dimensions):
        cell = rank // steps[:, d] % np.maximum(grid.cells[kind, d], 1)
        start[:, d] = grid.cut(kind, d, cell)
        size[:, d] = grid.cut(kind, d, cell + 1) - start[:, d]
    return start, size


def numbers_in(table: BoxTable, grid: Grid, here: str, there: str) -> Ints:
    """The number in the grid of each of a table's tensors. Raises `LayoutMismatch` for one that is not there."""
    for tensors, numbers in grid.recent:
        if tensors is table.tensors:
            return numbers
    found = [grid.index.get(tensor.name, -1) for tensor in table.tensors]
    missing = [tensor for tensor, n in zip(table.tensors, found, strict=True) if n < 0]
    if missing:
        more = f", nor {len(missing) - 1} others" if len(missing) > 1 else ""
        names = [tensor.name for tensor in table.tensors]
        said, hint = names_difference(names, grid.index, here=here, there=there)
        raise LayoutMismatch(
            f"tensor {missing[0]} exists {here}, and {there} neither whole nor in part{more}{said}",
            hint=hint or "the boxes of all shards of a replica cover the same tensors on both sides",
        )
    for tensor, n in zip(table.tensors, found, strict=True):
        if grid.tensors[n] != tensor:
            refuse_difference(tensor, grid.tensors[n], here=here, there=there)
    grid.recent.append((table.tensors, ints(found)))
    return grid.recent[-1][1]


def spans_of(table: BoxTable, grid: Grid, *, here: str = "here", there: str = "in what was published") -> Spans:
    """Where the boxes of a table are in the grid. Raises `LayoutMismatch`, naming a tensor that is nowhere."""
    tensor = numbers_in(table, grid, here, there)[table.tensor] if len(table.tensors) else table.tensor
    pad = grid.dimensions - table.dimensions
    if pad < 0:  # dimensions that only tensors without elements have
        raise LayoutMismatch(f"{here} are tensors of {table.dimensions} dimensions, {there} of {grid.dimensions}")
    kind = grid.kind[tensor]
    at, size = padded(table.at, pad, 0), padded(table.size, pad, 1)
    low, high = np.empty_like(at), np.empty_like(at)
    for d in range(grid.dimensions):
        low[:, d] = grid.find(kind, d, at[:, d], after=False)
        high[:, d] = grid.find(kind, d, at[:, d] + size[:, d], after=True)
    return Spans(tensor, kind, low, high - low, starts_of(volumes(high - low)), pad)


def tiles_of(table: BoxTable, grid: Grid, spans: Spans | None = None, within: "Window | None" = None) -> Tiles:
    """The tiles of a table, in the order of their slots; with `within` only those in that window."""
    spans = spans or spans_of(table, grid)
    low, count, rows = spans.low, spans.count, np.arange(len(table))
    if within is not None:
        first = np.maximum(low, within.low[spans.tensor])
        count = np.maximum(0, np.minimum(low + count, within.high[spans.tensor]) - first)
        rows = np.flatnonzero((count > 0).all(axis=1))
        low, count = first[rows], count[rows]
    counts = volumes(count)
    pick, rank = np.repeat(np.arange(len(rows)), counts), ranks_of(counts)
    box = rows[pick]
    kind, tensor = spans.kind[box], spans.tensor[box]
    inner, outer, whole = row_major(count), row_major(spans.count), row_major(grid.cells)
    number, slot = grid.first_tile[tensor], spans.first_slot[box]
    offset, is_whole = table.offset[box], np.ones(len(box), np.bool_)
    start, size = (np.empty((len(box), grid.dimensions), np.int64) for _ in range(2))
    for d in range(grid.dimensions):
        cell = low[pick, d] + rank // inner[pick, d] % count[pick, d]
        number += cell * whole[kind, d]
        slot += (cell - spans.low[box, d]) * outer[box, d]
        begin, end = grid.cut(kind, d, cell), grid.cut(kind, d, cell + 1)
        if d < spans.pad:
            start[:, d], size[:, d] = begin, end - begin
            continue
        at = table.at[box, d - spans.pad]
        start[:, d] = np.maximum(begin, at)
        size[:, d] = np.minimum(end, at + table.size[box, d - spans.pad]) - start[:, d]
        offset += (start[:, d] - at) * table.strides[box, d - spans.pad]
        is_whole &= size[:, d] == end - begin
    return Tiles(table, grid, number, slot, box, start, size, offset, is_whole)


@dataclass(frozen=True, eq=False)
class Window:
    """For each tensor of a grid a range of cells in each dimension: what somebody wants of it. Empty where nothing."""

    low: Ints  # [tensors, dimensions]
    high: Ints


def window_of(grid: Grid, spans: Spans) -> Window:
    """The smallest window that has all cells of these boxes."""
    shape = (len(grid.tensors), grid.dimensions)
    low, high = np.full(shape, np.iinfo(np.int64).max), np.zeros(shape, np.int64)
    np.minimum.at(low, spans.tensor, spans.low)
    np.maximum.at(high, spans.tensor, spans.low + spans.count)
    return Window(low, high)
