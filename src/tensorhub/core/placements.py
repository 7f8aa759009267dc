"""The part of a global tensor that one rank of a device mesh has, from plain values: what DTensor means by placements.

The mesh dimensions are applied from left to right, each to what the ones before have left. A dimension of the tensor
is then a list of runs of indices, for `StridedSharded` leaves every so-many-th piece: what FSDP over tensor parallelism
does when both cut the same dimension. There is a box for each combination of runs.

Cutting follows `torch.chunk`: pieces of ceil(length / count), the last ones shorter or empty.
"""

from collections.abc import Sequence
from itertools import product

import msgspec

from .boxes import Box
from .errors import UsageError
from .manifest import contiguous_strides


class Replicated(msgspec.Struct, frozen=True):
    """Every rank along this mesh dimension has the same."""


class Sharded(msgspec.Struct, frozen=True):
    """The ranks along this mesh dimension cut dimension `dim` among them, as `torch.chunk` does."""

    dim: int


class StridedSharded(msgspec.Struct, frozen=True):
    """Dimension `dim` is first cut into `split_factor` pieces; each rank has its chunk of every piece, in order."""

    dim: int
    split_factor: int


Placement = Replicated | Sharded | StridedSharded
Run = tuple[int, int]  # first global index, and how many follow each other


def boxes_of_placements(
    name: str,
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
    strides: Sequence[int] | None = None,
    dtype: str = "",
) -> list[Box]:
    """The boxes of the local tensor of the rank at `coordinate`; none where its part is empty, and the tensor is not.

    `strides` are the local tensor's, in elements; contiguous ones where they are left out.
    """
    runs = runs_of_placements(name, global_shape, mesh_shape, coordinate, placements)
    local = [sum(count for _, count in its) for its in runs]
    steps = tuple(strides) if strides is not None else contiguous_strides(local)
    if 0 in global_shape:  # there is nothing of it, and whoever names it has all of that
        return [Box(name, tuple(global_shape), (0,) * len(runs), tuple(global_shape), dtype=dtype)]
    if 0 in local:
        return []
    boxes = []
    for picked in product(*(_with_places(its) for its in runs)):
        offset = sum(place * step for (_, _, place), step in zip(picked, steps, strict=True))
        at, size = tuple(start for start, _, _ in picked), tuple(count for _, count, _ in picked)
        boxes.append(Box(name, tuple(global_shape), at, size, offset, steps, dtype))
    return boxes


def runs_of_placements(
    name: str,
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> list[list[Run]]:
    """For each dimension of the tensor the global indices that this rank has, in the order in which they lie there."""
    if not len(mesh_shape) == len(coordinate) == len(placements):
        raise UsageError(
            f"tensor {name!r}: a mesh of {len(mesh_shape)} dimensions, a coordinate of {len(coordinate)},"
            f" and {len(placements)} placements"
        )
    runs: list[list[Run]] = [[(0, extent)] if extent else [] for extent in global_shape]
    for count, rank, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if not 0 <= rank < count:
            raise UsageError(f"tensor {name!r}: rank {rank} of a mesh dimension of {count}")
        match placement:
            case Sharded(dim=dim):
                _check_dimension(name, dim, global_shape)
                length = sum(n for _, n in runs[dim])
                runs[dim] = _taken(runs[dim], *_chunk(length, count, rank))
            case StridedSharded(dim=dim, split_factor=pieces):
                _check_dimension(name, dim, global_shape)
                if pieces < 1:
                    raise UsageError(f"tensor {name!r}: a StridedSharded with split_factor {pieces}")
                length = sum(n for _, n in runs[dim])
                kept: list[Run] = []
                for piece in range(min(pieces, length)):  # pieces beyond the length are empty
                    start, stop = _chunk(length, pieces, piece)
                    first, last = _chunk(stop - start, count, rank)
                    kept += _taken(runs[dim], start + first, start + last)
                runs[dim] = _joined(kept)
            case Replicated():
                pass
    return runs


def _check_dimension(name: str, dim: int, global_shape: Sequence[int]) -> None:
    if not 0 <= dim < len(global_shape):
        raise UsageError(f"tensor {name!r} of shape {list(global_shape)} is cut in dimension {dim}, which it has not")


def _chunk(length: int, count: int, rank: int) -> Run:
    """Where chunk `rank` of `count` begins and ends, as `torch.chunk` has it."""
    each = -(-length // count)
    return min(length, rank * each), min(length, (rank + 1) * each)


def _taken(runs: Sequence[Run], start: int, stop: int) -> list[Run]:
    """What lies at positions [start, stop) of these runs, one after another."""
    found: list[Run] = []
    at = 0
    for first, count in runs:
        begin, end = max(start, at), min(stop, at + count)
        if begin < end:
            found.append((first + begin - at, end - begin))
        at += count
    return found


def _joined(runs: Sequence[Run]) -> list[Run]:
    joined: list[Run] = []
    for first, count in runs:
        if joined and sum(joined[-1]) == first:
            joined[-1] = (joined[-1][0], joined[-1][1] + count)
        else:
            joined.append((first, count))
    return joined


def _with_places(runs: Sequence[Run]) -> list[tuple[int, int, int]]:
    """Each run with its place among the local indices."""
    found, place = [], 0
    for first, count in runs:
        found.append((first, count, place))
        place += count
    return found
