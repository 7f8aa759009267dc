"""Strided copies as rows of integers, with checks for overlapping boxes and for holes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ..protocol.errors import LayoutMismatch
from ..protocol.layout import GlobalTensor, refuse_difference
from ..protocol.manifest import names_difference
from .grid import (
    EMPTY,
    Bools,
    BoxTable,
    Cutting,
    Grid,
    Ints,
    ints,
    ranks_of,
    row_major,
    spans_of,
    tensor_of,
    tiles_of,
    volumes,
)

# --- Strided copies as rows of integers, which native code goes through without knowing what a tensor is.
#
#     for i in range(COUNTS):  for j in range(COUNT):
#         copy RUN bytes from SOURCE + i * SOURCE_STRIDES + j * SOURCE_STRIDE
#                          to TARGET + i * TARGET_STRIDES + j * TARGET_STRIDE
#
# The rows of one tile, in their order, visit its elements in row-major order of the global tensor: the order of its
# digest.


SOURCE, TARGET, RUN, COUNT, SOURCE_STRIDE, TARGET_STRIDE, COUNTS, SOURCE_STRIDES, TARGET_STRIDES = range(9)
COLUMNS = 9
INNER, OUTER = SOURCE_STRIDE - SOURCE, SOURCE_STRIDES - SOURCE  # from a place's column to those of its strides
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False, repr=False)
class Copies:
    """Rows of the nine columns above, in bytes, and what each belongs to."""

    rows: Ints  # [copies, 9], contiguous
    of: Ints  # [copies] never falls

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def size_bytes(self) -> Ints:
        """[copies]"""
        return self.rows[:, RUN] * self.rows[:, COUNT] * self.rows[:, COUNTS]

    def extent(self, side: int) -> tuple[int, int]:
        """The first byte on that side, SOURCE or TARGET, and the one behind the last."""
        rows = self.rows
        if not len(rows):
            return 0, 0
        ends = rows[:, side] + (rows[:, COUNT] - 1) * rows[:, side + INNER]
        ends += (rows[:, COUNTS] - 1) * rows[:, side + OUTER] + rows[:, RUN]
        return int(np.min(rows[:, side])), int(np.max(ends))


def copies_of(
    size: Ints, item: Ints, source: Ints, source_strides: Ints, target: Ints, target_strides: Ints, of: Ints
) -> Copies:
    """One copy, or a few, for each row of `size`: a block of elements in two places. All but `size` in bytes."""
    count, dimensions = size.shape
    levels = dimensions + 1
    loops = np.zeros((levels, 3, count), np.int64)  # from the inside: count, stride in the source, in the target
    loops[:, 0] = 1
    run, top = item.copy(), np.zeros(count, np.int64)
    every = np.arange(count)
    for d in range(dimensions - 1, -1, -1):
        n, s, t = size[:, d], source_strides[:, d], target_strides[:, d]
        is_loop = n > 1
        joins_run = is_loop & (top == 0) & (s == run) & (t == run)
        run = np.where(joins_run, run * n, run)
        below = loops[top, :, every].T  # the innermost loop so far of each row
        joins_loop = is_loop & (top > 0) & (s == below[0] * below[1]) & (t == below[0] * below[2])
        loops[top[joins_loop], 0, every[joins_loop]] *= n[joins_loop]
        opens = is_loop & ~joins_run & ~joins_loop
        top = top + opens
        for column, values in enumerate((n, s, t)):
            loops[top[opens], column, every[opens]] = values[opens]
    zero = np.zeros(count, np.int64)
    two = [loops[level] if level < levels else np.stack([zero + 1, zero, zero]) for level in (1, 2)]
    rows = np.stack([source, target, run, *two[0], *two[1]], axis=1)
    if levels > 3 and (top > 2).any():
        return _unrolled(rows, loops[3:], of)
    return Copies(np.ascontiguousarray(rows), of)


def _unrolled(rows: Ints, outer: Ints, of: Ints) -> Copies:
    """Rows for each step of the loops that are too many."""
    counts = outer[::-1, 0].T  # the outermost first
    repeats = volumes(counts)
    pick, rank = np.repeat(np.arange(len(rows)), repeats), ranks_of(repeats)
    steps = row_major(np.ascontiguousarray(counts))
    rows = rows[pick]
    for level in range(counts.shape[1]):
        step = rank // steps[pick, level] % counts[pick, level]
        loop = outer[len(outer) - 1 - level]
        rows[:, SOURCE] += step * loop[1, pick]
        rows[:, TARGET] += step * loop[2, pick]
    return Copies(np.ascontiguousarray(rows), of[pick])


def no_copies() -> Copies:
    """None at all."""
    return Copies(np.zeros((0, COLUMNS), np.int64), EMPTY)


# --- Memory that two boxes share in part: such a layout can be published, and not filled.
#
# Aliases (the same part, the same memory) are fine, since the digests of their tiles can be compared. Boxes are told
# apart by first and last byte, columns of one row by their place in it, and the rest by their runs of bytes.


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
    """Calls `check_disjoint`. Returns the error's text and hint; None if there is no error."""
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


# --- What a replica has of the tensors that it should have. Holes are errors before a byte moves, and name the part.


NO_BANDS = 1 << 62


def check_coverage(
    tables: Sequence[BoxTable], wanted: Iterable[GlobalTensor] = (), *, who: str = "the replica"
) -> None:
    """Raises `LayoutMismatch` unless these shards together have every element of every tensor that any of them names.

    With `wanted` (the tensors of a version) they must name all of those too. `who` is said in the message.
    """
    cutting = Cutting(NO_BANDS)
    for table in tables:
        cutting.add_publisher(table)
    grid = cutting.grid()
    _check_named(grid, wanted, who)
    has = np.zeros(grid.tile_count, np.bool_)
    for table in tables:
        has[tiles_of(table, grid, spans_of(table, grid)).number] = True
    if not has.all():
        missing = np.flatnonzero(~has)
        part, others = hole_text(grid, missing)
        raise LayoutMismatch(
            f"no shard of {who} has {part}{others}", hint="each element of a global tensor is in a box of some shard"
        )


def _check_named(grid: Grid, wanted: Iterable[GlobalTensor], who: str) -> None:
    missing, wanted = [], tuple(wanted)
    for tensor in wanted:
        known = grid.index.get(tensor.name)
        if known is None:
            missing.append(tensor)
        else:
            refuse_difference(grid.tensors[known], tensor, here=f"in {who}", there="in what was published")
    if missing:
        more = f", nor {len(missing) - 1} other tensors of it" if len(missing) > 1 else ""
        names = [tensor.name for tensor in wanted]
        said, hint = names_difference(grid.index, names, here=f"in {who}", there="in what was published")
        raise LayoutMismatch(
            f"tensor {missing[0]} of the version is in no box of {who}{more}{said}",
            hint=hint
            or "register all tensors of the model, for what is left out keeps old weights; or say partial=True",
        )


def hole_text(grid: Grid, missing: Ints) -> tuple[str, str]:
    """The first of the missing tiles, with as many others as make one part; and how much more is missing."""
    tensor = tensor_of(grid, missing)
    first = int(tensor[0])
    mine = missing[tensor == first] - grid.first_tile[first]
    extents = grid.cells[grid.kind[first]].tolist()
    mask = np.zeros(int(grid.first_tile[first + 1] - grid.first_tile[first]), np.bool_)
    mask[mine] = True
    corner = [int(place) for place in np.unravel_index(int(mine[0]), extents)]
    stop = _extended(mask.reshape(extents), corner)
    kind = grid.kind[first : first + 1]
    places = [[int(grid.cut(kind, d, np.array([cell]))[0]) for d, cell in enumerate(cells)] for cells in (corner, stop)]
    at, end = (np.array(place) for place in places)
    part = f"{grid.tensors[first].name!r}{BoxTable.text_of_part(grid.tensors[first], at, end - at)}"
    others = len(np.unique(tensor)) - 1
    return part, f", nor parts of {others} other tensors" if others else ""


def _extended(mask: Bools, corner: list[int]) -> list[int]:
    """The far corner of a block of true cells that begins at `corner`."""
    stop = [place + 1 for place in corner]
    for d in range(mask.ndim - 1, -1, -1):
        while stop[d] < mask.shape[d]:
            slab = tuple(slice(stop[d], stop[d] + 1) if e == d else slice(corner[e], stop[e]) for e in range(mask.ndim))
            if not mask[slab].all():
                break
            stop[d] += 1
    return stop


# --- Tiles whose runs are a few bytes long, because one end stores the tensor transposed.
#
# The kernel takes as long over one element as over a kilobyte. So such a tile is asked for in long runs of its source,
# into scratch memory. There it is hashed in row-major order, and then put element by element where it belongs.


SHORT_BYTES = 64  # runs below this are elements, or nearly; to hand one to the kernel takes as long as to copy 256 B
THEIRS = (SOURCE, RUN, COUNT, SOURCE_STRIDE, COUNTS, SOURCE_STRIDES)
OURS = (TARGET, RUN, COUNT, TARGET_STRIDE, COUNTS, TARGET_STRIDES)
_RUN, _COUNT, _STRIDE, _COUNTS, _STRIDES = 1, 2, 3, 4, 5  # of the six


def joined(rows: Ints) -> Ints:
    """Joins neighbouring runs into longer ones. Rows have six columns, before and after."""
    rows = rows.copy()
    for _ in range(2):
        is_one = (rows[:, _COUNT] == 1) | (rows[:, _STRIDE] == rows[:, _RUN])
        rows[is_one, _RUN] *= rows[is_one, _COUNT]
        rows[is_one, _COUNT], rows[is_one, _STRIDE] = rows[is_one, _COUNTS], rows[is_one, _STRIDES]
        rows[is_one, _COUNTS], rows[is_one, _STRIDES] = 1, 0
    return rows


def turned_tiles(rows: Ints, of: Ints, is_direct: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """For each tile, whether it is to be turned: of copies (nine columns) that belong to tiles `of`."""
    found = np.zeros(len(is_direct), np.bool_)
    for side in (THEIRS, OURS):
        one = joined(rows[:, side])
        found[of[(one[:, _RUN] < SHORT_BYTES) & (one[:, _COUNT] * one[:, _COUNTS] > 1)]] = True
    return found & is_direct


def turned(rows: Ints, is_turned: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """What the source is asked for, and how what comes is gone through in the order of the copies (place 0)."""
    theirs = rows[:, THEIRS]
    turn = theirs.copy()
    turn[:, 0] = 0
    turn[:, _STRIDE] = rows[:, RUN]
    turn[:, _STRIDES] = rows[:, RUN] * rows[:, COUNT]
    swap = np.flatnonzero(
        is_turned & (rows[:, COUNT] > 1) & (rows[:, COUNTS] > 1) & (rows[:, SOURCE_STRIDES] < rows[:, SOURCE_STRIDE])
    )
    theirs[swap] = theirs[swap][:, (0, _RUN, _COUNTS, _STRIDES, _COUNT, _STRIDE)]
    turn[swap, _STRIDE] = rows[swap, RUN] * rows[swap, COUNTS]
    turn[swap, _STRIDES] = rows[swap, RUN]
    return theirs, turn


def kept_from(turn: Ints, rows: Ints) -> Ints:
    """Copies out of what has come, to where the copies `rows` go; in the order of memory there."""
    found = np.zeros((len(rows), COLUMNS), np.int64)
    found[:, (SOURCE, RUN, COUNT, SOURCE_STRIDE, COUNTS, SOURCE_STRIDES)] = turn
    found[:, OURS] = rows[:, OURS]
    swap = np.flatnonzero((rows[:, COUNTS] > 1) & (rows[:, TARGET_STRIDES] < rows[:, TARGET_STRIDE]))
    inner, outer = ints((COUNT, SOURCE_STRIDE, TARGET_STRIDE)), ints((COUNTS, SOURCE_STRIDES, TARGET_STRIDES))
    swapped = found[swap[:, None], inner]
    found[swap[:, None], inner], found[swap[:, None], outer] = found[swap[:, None], outer], swapped
    whole = np.flatnonzero((found[:, SOURCE_STRIDE] == found[:, RUN]) & (found[:, TARGET_STRIDE] == found[:, RUN]))
    found[whole, RUN] *= found[whole, COUNT]
    found[whole[:, None], inner] = found[whole[:, None], outer]
    found[whole[:, None], outer] = ints((1, 0, 0))
    return found
