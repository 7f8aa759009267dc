"""Memory that two boxes share in part: such a layout can be published, and nothing can be read into it.

Tensors may share memory in any way, as views of one storage do. Aliases (the same part, the same memory) are fine
everywhere, since the digests of their tiles can be compared. Where memory is shared in another way nobody can say
before the bytes move whether both boxes can be satisfied, so `check_disjoint` refuses it and names both.

Boxes whose bytes do not interleave are told apart by their first and last byte; columns of one row by their place in
the row; and only what is left over by its runs of bytes.
"""

from itertools import pairwise

import numpy as np

from ...core.errors import LayoutMismatch
from .arrays import Ints, ranks_of, row_major, volumes
from .table import BoxTable

MAX_RUNS = 1 << 22  # of one cluster of boxes that interleave: 100 MB for a moment


def check_disjoint(table: BoxTable) -> None:
    """Raises `LayoutMismatch`, naming both boxes, if two boxes that are no aliases share a byte."""
    rows = np.flatnonzero(table.alias_of == np.arange(len(table)))
    start, stop = table.offset[rows], table.offset[rows] + table.spans[rows]
    if len(rows) < 2:
        return
    reach = np.maximum.accumulate(stop)
    bounds = [0, *(np.flatnonzero(start[1:] >= reach[:-1]) + 1).tolist(), len(rows)]
    for first, last in pairwise(bounds):
        if last - first > 1 and not _are_columns(table, rows[first:last]):
            _check_runs(table, rows[first:last])


def why_not_filled(table: BoxTable) -> tuple[str, str] | None:
    """The same in words, with a hint; None if all is well."""
    try:
        check_disjoint(table)
    except LayoutMismatch as error:
        return str(error), error.hint or ""
    return None


def memory_order(table: BoxTable, rows: Ints) -> tuple[Ints, Ints]:
    """Sizes and strides with the dimension of the largest stride first, as the elements lie in memory."""
    order = np.argsort(-table.strides[rows], axis=1, kind="stable")
    return np.take_along_axis(table.size[rows], order, 1), np.take_along_axis(table.strides[rows], order, 1)


def _are_columns(table: BoxTable, rows: Ints) -> bool:
    """They have one outer stride, and take different places between two steps of it."""
    size, strides = memory_order(table, rows)
    pitch = int(np.max(strides[:, 0]))
    if pitch == 0 or ((strides[:, 0] != pitch) & (size[:, 0] > 1)).any():
        return False
    widths = ((size[:, 1:] - 1) * strides[:, 1:]).sum(axis=1) + table.item[table.tensor[rows]]
    places = table.offset[rows] % pitch
    order = np.argsort(places, kind="stable")
    ends = (places + widths)[order]
    return bool((ends[:-1] <= places[order][1:]).all() and ends[-1] <= pitch)


def _check_runs(table: BoxTable, rows: Ints) -> None:
    size, strides = memory_order(table, rows)
    run = table.item[table.tensor[rows]].copy()
    is_open = np.ones(len(rows), np.bool_)
    for d in range(size.shape[1] - 1, -1, -1):  # the innermost dimensions join into one run of bytes
        joins = is_open & ((strides[:, d] == run) | (size[:, d] == 1))
        run = np.where(joins, run * size[:, d], run)
        size[joins, d] = 1
        is_open &= joins
    counts = volumes(size)
    if int(counts.sum()) > MAX_RUNS:
        raise LayoutMismatch(
            f"boxes {table.text(int(rows[0]))} and {table.text(int(rows[1]))} interleave in memory in too many pieces",
            hint="give them memory of their own, or an order of dimensions in which their rows are longer",
        )
    of, rank = np.repeat(np.arange(len(rows)), counts), ranks_of(counts)
    place = table.offset[rows][of]
    steps = row_major(size)
    for d in range(size.shape[1]):
        place += (rank // steps[of, d]) % size[of, d] * strides[of, d]
    order = np.argsort(place, kind="stable")
    place, end, of = place[order], (place + run[of])[order], of[order]
    reach = np.maximum.accumulate(end)
    wrong = np.flatnonzero(place[1:] < reach[:-1])
    if len(wrong):
        later = int(wrong[0]) + 1
        earlier = int(np.flatnonzero(end[:later] > place[later])[-1])
        raise LayoutMismatch(
            f"boxes {table.text(int(rows[of[earlier]]))} and {table.text(int(rows[of[later]]))} share a part of their"
            " memory: nothing can be read into them",
            hint="tie whole tensors, part for part, or give each box memory of its own",
        )
