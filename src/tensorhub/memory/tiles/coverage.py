"""What a replica has of the tensors that it should have: holes, and tensors that nobody has.

A version exists only if the boxes of the replica that publishes it cover every global tensor; and a replica that left
out a layer would be ready sooner than the others, and wrong. So both are errors before a byte moves, and name the
part.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from ...core.boxes import GlobalTensor, refuse_difference
from ...core.errors import LayoutMismatch
from ...core.manifest import names_difference
from .arrays import Bools, Ints
from .cells import spans_of, tensor_of, tiles_of
from .grid import Cutting, Grid
from .table import BoxTable

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
    part = f"{grid.tensors[first].name!r}{BoxTable.part(grid.tensors[first], at, end - at)}"
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
