"""Tiles whose runs are a few bytes long: they come in the order of the source's memory, and are turned at the reader.

A tensor that is stored transposed at one end has runs of one element, and the kernel takes as long over one as over a
kilobyte. So such a tile is asked for in an order in which it is long runs at its source, into scratch memory; is gone
through there in row-major order for its digest; and is then put element by element where it belongs.
"""

import numpy as np
import numpy.typing as npt

from .arrays import Ints, ints
from .copies import (
    COLUMNS,
    COUNT,
    COUNTS,
    RUN,
    SOURCE,
    SOURCE_STRIDE,
    SOURCE_STRIDES,
    TARGET,
    TARGET_STRIDE,
    TARGET_STRIDES,
)

SHORT_BYTES = 64  # runs below this are elements, or nearly; to hand one to the kernel takes as long as to copy 256 B
THEIRS = (SOURCE, RUN, COUNT, SOURCE_STRIDE, COUNTS, SOURCE_STRIDES)
OURS = (TARGET, RUN, COUNT, TARGET_STRIDE, COUNTS, TARGET_STRIDES)
_RUN, _COUNT, _STRIDE, _COUNTS, _STRIDES = 1, 2, 3, 4, 5  # of the six


def joined(rows: Ints) -> Ints:
    """The same rows of six, where runs follow each other as longer runs."""
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
