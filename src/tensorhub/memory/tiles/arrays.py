"""Small operations on integer arrays that the arithmetic of tiles is made of."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
EMPTY: Ints = np.zeros(0, np.int64)


def ints(values: Sequence[int]) -> Ints:
    """As one array."""
    return np.array(values, np.int64)


def sorted_once(*parts: Ints) -> Ints:
    """All numbers, sorted, each once. numpy's own `unique` hashes, which takes twenty times as long."""
    found = np.concatenate(parts) if parts else EMPTY.copy()
    found.sort()
    is_new = np.ones(len(found), np.bool_)
    np.not_equal(found[1:], found[:-1], out=is_new[1:])
    return found[is_new]


def starts_of(counts: Ints) -> Ints:
    """Where each of several runs begins, and behind the last one where it ends: [2, 3] is [0, 2, 5]."""
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def ranks_of(counts: Ints) -> Ints:
    """The position of each element in its run: [2, 3] is [0, 1, 0, 1, 2]."""
    starts = starts_of(counts)
    return np.arange(starts[-1], dtype=np.int64) - np.repeat(starts[:-1], counts)


def ranges_of(first: Ints, last: Ints, picked: Ints | None = None) -> Ints:
    """The numbers of each range [first, last), or of those that are picked, one after another."""
    if picked is not None:
        first, last = first[picked], last[picked]
    lengths = last - first
    found: Ints = np.repeat(first, lengths) + ranks_of(lengths)
    return found


def volumes(sizes: Ints) -> Ints:
    """The number of elements of each row's shape."""
    found: Ints = np.prod(sizes, axis=1, dtype=np.int64)
    return found


def spans(size: Ints, strides: Ints, item: Ints) -> Ints:
    """For each block of elements the bytes from its first to behind its last."""
    found: Ints = ((size - 1) * strides).sum(axis=1) + item
    return found


def row_major(extents: Ints) -> Ints:
    """For each row's shape, the steps with which an index is counted, the last dimension fastest."""
    steps = np.ones_like(extents)
    for d in range(extents.shape[1] - 2, -1, -1):
        steps[:, d] = steps[:, d + 1] * extents[:, d + 1]
    return steps


def group_starts(*columns: Ints) -> Ints:
    """In sorted rows, where each run of equal rows begins."""
    count = len(columns[0])
    if count == 0:
        return EMPTY
    is_first = np.zeros(count, np.bool_)
    is_first[0] = True
    for column in columns:
        is_first[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(is_first)
