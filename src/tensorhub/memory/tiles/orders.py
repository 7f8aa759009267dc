"""Part of a plan as a transport wants to hear it: what one source is asked for, in parcels, and where that belongs.

Rules:
1. A parcel is some fetches that follow each other in the plan, whole tiles, as many as fit `parcel_bytes`. A tile that
   is longer is a parcel of its own. Tiles that are kept in part are not put together with others.
2. What a source is asked for are runs of its stream, joined where they follow each other there; where they belong is
   said apart from it, in runs of the reader's stream. Both go through a tile in its row-major order.
3. Elements of a tensor that is stored transposed at one end come in the order of the source's memory (`turning`).
4. An order has at most `MAX_ROWS` rows; what needs more is several orders.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...core.errors import UsageError
from ...transport.base import ByteStream
from ...transport.parcels import MAX_ROWS, Parcels, Scatter
from ...transport.rows import Rows
from .arrays import Ints, ranks_of, starts_of
from .copies import (
    COUNT,
    COUNTS,
    RUN,
    SOURCE,
    Copies,
)
from .plan import Plan
from .turning import OURS, THEIRS, joined, kept_from, turned, turned_tiles

PARCEL_BYTES = 1 << 20  # what is read again when a source dies, of each stream; its header and seal cost 5 us


@dataclass(frozen=True, eq=False, repr=False)
class Order:
    """What one source is asked for by one read."""

    parcels: Parcels
    scatter: Scatter
    fetches: Ints  # of the plan, in order: fetch n is tile n of the read

    def tiles_of(self, parcel: int) -> range:
        """Which of `fetches` it has."""
        return range(self.scatter.first_tile[parcel], self.scatter.first_tile[parcel + 1])


def orders_of(
    plan: Plan, source: int, source_bytes: int, stream: ByteStream, *, parcel_bytes: int = PARCEL_BYTES
) -> Iterator[Order]:
    """All that a plan wants of one source, whose stream has so many bytes; `stream` is the reader's."""
    mine = np.flatnonzero(plan.source == source)
    rows = _counts(plan.copies, len(plan))[mine]
    _check_rows(plan, mine, rows)
    at = 0
    ends = np.cumsum(rows)
    while at < len(mine):
        before = int(ends[at - 1]) if at else 0
        stop = max(at + 1, int(np.searchsorted(ends, before + MAX_ROWS, "right")))
        yield _order(plan, mine[at:stop], source_bytes, stream, parcel_bytes)
        at = stop


def _check_rows(plan: Plan, fetches: Ints, rows: Ints) -> None:
    """Raises `UsageError`, naming the tile, for one that no order has room for: another source would not help."""
    if len(rows) and int(np.max(rows)) > MAX_ROWS:
        text = plan.tiles.text(int(plan.tile[fetches[int(np.argmax(rows))]]))
        raise UsageError(
            f"{text} lies in {int(np.max(rows))} series of runs at its source and here, where {MAX_ROWS} are the limit:"
            " its dimensions are stored in too different an order",
            hint="store it in the same order of dimensions on both sides, or in one that keeps some of them together",
        )


def _order(plan: Plan, fetches: Ints, source_bytes: int, stream: ByteStream, parcel_bytes: int) -> Order:
    sizes = plan.size_bytes[fetches]
    rows, of = _rows_of(plan.copies, fetches)
    is_turned = turned_tiles(rows, of, plan.is_direct[fetches])
    is_near = plan.is_direct[fetches] & ~is_turned  # straight to where it belongs
    first_tile = _parcels(sizes, is_near, parcel_bytes)
    tiles = starts_of(sizes)
    starts = starts_of(rows[:, RUN] * rows[:, COUNT] * rows[:, COUNTS])
    theirs, turn = turned(rows, is_turned[of])
    counts = np.add.reduceat(np.bincount(of, minlength=len(fetches)), first_tile[:-1])
    parcels = Parcels.of(words(joined(theirs)), counts.tolist(), source_bytes)
    near = np.flatnonzero(is_near[of])
    ours = Rows.at(words(joined(rows[near][:, OURS])), words(np.append(starts[near], starts[-1])))
    begins = tiles[first_tile[np.searchsorted(first_tile, np.arange(len(fetches)), "right") - 1]]  # each tile's parcel
    turn[:, 0] = starts[:-1] - begins[of]
    keeps, kept = _rows_of(plan.keeps, fetches)
    keeps[:, SOURCE] += (tiles[:-1] - begins)[kept]
    far = np.flatnonzero(is_turned[of])
    keeps, kept = np.concatenate([keeps, kept_from(turn[far], rows[far])]), np.concatenate([kept, of[far]])
    order = np.argsort(kept, kind="stable")
    is_reordered = np.zeros(len(fetches), np.bool_)
    is_reordered[of[(theirs[:, 1:] != rows[:, THEIRS][:, 1:]).any(axis=1)]] = True
    seen = np.flatnonzero(is_reordered[of])
    scatter = Scatter(
        stream=stream,
        ours=ours,
        first_tile=words(first_tile),
        tiles=words(tiles),
        is_kept=(~is_near[first_tile[:-1]]).astype(np.uint8).tobytes(),
        keeps=words(keeps[order]),
        first_keep=words(np.searchsorted(kept[order], first_tile)),
        turns=words(joined(turn[seen])),
        first_turn=words(np.searchsorted(of[seen], np.arange(len(fetches) + 1))),
    )
    return Order(parcels, scatter, fetches)


def words(numbers: Ints) -> "array[int]":
    """As a transport takes them."""
    found = array("Q")
    found.frombytes(np.ascontiguousarray(numbers, np.int64).tobytes())
    return found


def _counts(copies: Copies, fetches: int) -> Ints:
    return np.bincount(copies.of, minlength=fetches)


def _rows_of(copies: Copies, fetches: Ints) -> tuple[Ints, Ints]:
    """The rows of these fetches, in order, and which of `fetches` each belongs to."""
    first, last = np.searchsorted(copies.of, fetches), np.searchsorted(copies.of, fetches, "right")
    counts = last - first
    of = np.repeat(np.arange(len(fetches)), counts)
    return copies.rows[np.repeat(first, counts) + ranks_of(counts)], of


def _parcels(sizes: Ints, is_direct: npt.NDArray[np.bool_], most: int) -> Ints:
    """The first fetch of each parcel, and behind the last one how many there are."""
    ends: list[int] = starts_of(sizes).tolist()  # bisect in lists is ten times as fast as numpy for one number
    changes = np.flatnonzero(is_direct[1:] != is_direct[:-1]) + 1
    limits: list[int] = [*changes.tolist(), len(sizes)]
    first, at = [], 0
    while at < len(sizes):
        first.append(at)
        fitting = bisect_right(ends, ends[at] + most) - 1
        at = min(max(fitting, at + 1), limits[bisect_right(limits, at)])
    return np.array([*first, len(sizes)], np.int64)
