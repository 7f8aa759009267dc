"""What is published in tiles: the grid is fixed from how all living replicas are cut, then every tile is hashed.

All shards of a replica cut the same grid, for it follows from what the server says of all of them: each asks once all
of its siblings have registered. Where another replica registers just then, two shards may have heard different things:
the server says so, and all of them cut anew.

Blocking work is done in threads. It must never: hash before it is known how, or guess what a sibling has.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial

from ..core.errors import GroupIncomplete, GroupMismatch
from ..core.names import WorkerId, worker_id
from ..core.snapshot import CutsView
from ..memory.registration import Registration
from ..memory.tiles.grid import Grid
from ..memory.tiles.tiled import TiledVersion, grid_for, tiled_version
from .config import Options
from .questions import fetch_cuts

AGAIN_S = 0.05  # the first time; a sibling registers soon
MOST_AGAIN_S = 1.0
EVERYBODY = "see that every shard runs, then call again on all of them"


async def cut(
    options: Options, me: WorkerId, shards: int, registration: Registration, metadata: bytes, deadline: float
) -> Callable[[], TiledVersion]:
    """What has to be done, in a thread, to know what is registered now. Asks the server how all others are cut.

    Raises `GroupIncomplete` for siblings that are not there, or have registered nothing with boxes, and `GroupMismatch`
    for those that say another number of shards.
    """
    found = await siblings(options, me, shards, registration, deadline, what="publish")
    mine = {view.shard: found.boxes[view.boxes] for view in found.shards if view.replica == me.replica}
    publisher = [mine[shard] for shard in range(shards)]
    names = {found.boxes[view.boxes]: str(worker_id(me.model, view.replica, view.shard)) for view in found.shards}
    make_grid = partial(grid_for, publisher, found.boxes, names)
    return partial(_hashed, registration, make_grid, options.chunk_bytes, metadata)


def again(known: TiledVersion, registration: Registration) -> TiledVersion:
    """What is registered now, cut as it was. Blocks."""
    return tiled_version(registration, known.cut.grid, known.chunk_bytes, metadata=known.metadata)


def _hashed(
    registration: Registration, make_grid: Callable[[], Grid], chunk_bytes: int, metadata: bytes
) -> TiledVersion:
    return tiled_version(registration, make_grid(), chunk_bytes, metadata=metadata)


async def siblings(
    options: Options, me: WorkerId, shards: int, registration: Registration, deadline: float, *, what: str
) -> CutsView:
    """How all are cut, once the server has heard of every shard of this replica, and of this one as it is now.

    `what` it is asked for is said in errors: they are those of `cut`.
    """
    pause_s, began, absent_since = AGAIN_S, time.monotonic(), time.monotonic()
    while True:
        found = await fetch_cuts(options, me.model, deadline, replica=me.replica)
        mine = {view.shard: view for view in found.shards if view.replica == me.replica}
        is_heard = me.shard in mine and found.boxes[mine[me.shard].boxes] == registration.boxes
        missing = [shard for shard in range(shards) if shard not in mine]
        if is_heard and not missing:
            break
        absent = [shard for shard in missing if shard not in found.here]
        if not absent or found.patience_s is None:
            absent_since = time.monotonic()
        elif found.missed or time.monotonic() >= absent_since + found.patience_s:
            why = found.missed or f"shards {absent} of {me.replica} were not there within {found.patience_s:.3g} s"
            raise GroupIncomplete(f"{what} of {me}: {why}", hint=EVERYBODY)
        if time.monotonic() + pause_s >= deadline:
            why = f"shards {missing} of it have registered no tensors with boxes" if missing else "it was not heard"
            text = f"{what} of {me}: {why} within {time.monotonic() - began:.3g} s"
            raise GroupIncomplete(text, hint="all shards of a replica register, all with boxes or all without")
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, MOST_AGAIN_S)
    others = {view.shards for view in mine.values()}
    if others != {shards}:
        raise GroupMismatch(f"shards of {me.replica} say that there are {sorted(others)} of them")
    return found
