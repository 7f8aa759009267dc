"""Strided copies as flat rows of integers, which native code can go through without knowing what a tensor is.

Each row is two loops around a run of bytes:

    for i in range(COUNTS):  for j in range(COUNT):
        copy RUN bytes from SOURCE + i * SOURCE_STRIDES + j * SOURCE_STRIDE
                         to TARGET + i * TARGET_STRIDES + j * TARGET_STRIDE

Going through the rows of one tile in their order, and through the loops as written, visits its elements in row-major
order of the global tensor. So packing a source with them gives the bytes that the tile's digest is taken of, and
unpacking such bytes with them scatters them.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .arrays import EMPTY, Ints, group_starts, ranks_of, row_major, volumes

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

    @property
    def run_count(self) -> int:
        """Runs of bytes in all."""
        return int((self.rows[:, COUNT] * self.rows[:, COUNTS]).sum())

    def only(self, first: int, last: int) -> "Copies":
        """Those that belong to [first, last)."""
        begin, end = np.searchsorted(self.of, [first, last])
        return Copies(self.rows[begin:end], self.of[begin:end])

    def extent(self, side: int) -> tuple[int, int]:
        """The first byte on that side, SOURCE or TARGET, and the one behind the last."""
        rows = self.rows
        if not len(rows):
            return 0, 0
        ends = rows[:, side] + (rows[:, COUNT] - 1) * rows[:, side + INNER]
        ends += (rows[:, COUNTS] - 1) * rows[:, side + OUTER] + rows[:, RUN]
        return int(np.min(rows[:, side])), int(np.max(ends))

    def ranges(self, side: int) -> list[tuple[int, int]]:
        """(place, length) of each run on that side, in order."""
        found = []
        for row in self.rows.tolist():
            for outer in range(row[COUNTS]):
                first = row[side] + outer * row[side + OUTER]
                found += [(first + inner * row[side + INNER], row[RUN]) for inner in range(row[COUNT])]
        return found

    def gathering(self) -> "Copies":
        """The same, into a buffer in which the bytes of each piece of work lie one after another, from 0 on."""
        return self._packing(TARGET)

    def scattering(self) -> "Copies":
        """The same, out of a buffer that `gathering` has filled."""
        return self._packing(SOURCE)

    def _packing(self, side: int) -> "Copies":
        rows = self.rows.copy()
        sizes = self.size_bytes
        before = np.cumsum(sizes) - sizes
        firsts = group_starts(self.of)
        inside = before - np.repeat(before[firsts], np.diff(np.append(firsts, len(rows))))
        rows[:, side] = inside
        rows[:, side + INNER] = rows[:, RUN]
        rows[:, side + OUTER] = rows[:, RUN] * rows[:, COUNT]
        return Copies(rows, self.of)


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


def carry_out(copies: Copies, source: Bytes, target: Bytes) -> None:
    """Copy, with numpy. Raises `IndexError` before the first byte if a row reaches out of source or target."""
    for memory, side in ((source, SOURCE), (target, TARGET)):
        first, last = copies.extent(side)
        if not 0 <= first <= last <= memory.nbytes:
            raise IndexError(f"copies of bytes {first} to {last} in a memory of {memory.nbytes} B")
    for row in copies.rows.tolist():
        _block(target, row, TARGET)[...] = _block(source, row, SOURCE)


def _block(memory: Bytes, row: list[int], side: int) -> Bytes:
    """The bytes of one row on one side, as a block of three dimensions."""
    shape = (row[COUNTS], row[COUNT], row[RUN])
    return np.lib.stride_tricks.as_strided(memory[row[side] :], shape, (row[side + OUTER], row[side + INNER], 1))
