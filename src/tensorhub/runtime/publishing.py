"""Hashes what is published, in chunks or in tiles, and checks that it is unchanged."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar
from uuid import uuid4

from msgspec.structs import replace

from ..memory.describe import some
from ..memory.digests import build_manifest
from ..memory.registration import Registration
from ..protocol.errors import DeadlineExceeded, GroupIncomplete, GroupMismatch, NotDrained, VersionConflict
from ..protocol.names import Digest, Version, WorkerId, worker_id
from ..protocol.status import CutsView
from ..reshard.grid import Grid
from ..reshard.read import TiledVersion, grid_for, tiled_version
from .config import Options
from .content import Known, changed_tensors
from .loops import in_thread
from .questions import fetch_cuts

# --- What is published in tiles: the grid is fixed from how all living replicas are cut, then every tile is hashed.
#
# All shards of a replica cut the same grid, for it follows from what the server says of all of them: each asks once all
# of its siblings have registered. Where another replica registers just then, two shards may have heard different
# things: the server says so, and all of them cut anew.
#
# Blocking work is done in threads. It must never: hash before it is known how, or guess what a sibling has.


AGAIN_S = 0.05  # the first time; a sibling registers soon
MAX_AGAIN_S = 1.0
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
        pause_s = min(2 * pause_s, MAX_AGAIN_S)
    others = {view.shards for view in mine.values()}
    if others != {shards}:
        raise GroupMismatch(f"shards of {me.replica} say that there are {sorted(others)} of them")
    return found


# --- What is published, in numbers: plain chunks, or tiles where it is known which parts of which tensors there are.
#
# Hashing happens in threads, until the caller's deadline. It must never: hash anew what cannot be, or cut anew what is
# held.


T = TypeVar("T")

CHUNKS_SHOWN = 3  # of those that several tensors share, in an error
HELD_HINT = "unpublish(), then publish a higher number; mutating(version=...) does both"


async def hashed(
    options: Options,
    me: WorkerId,
    shards: int,
    registration: Registration,
    held: Known | None,
    metadata: bytes,
    deadline: float,
) -> Known:
    """What is registered now. `held` is what is held already, and is to be the same.

    Raises `VersionConflict` naming tensors that are not, where all of it cannot be hashed anew.
    """
    what = f"publish of {me}: hashing its tensors"
    if held is not None and not held.digests:
        return held  # what was never hashed cannot be hashed again: it is taken for what it was
    if isinstance(held, TiledVersion):
        if held.is_whole:
            return await by(deadline, what, partial(again, held, registration))
        changed, _ = await by(deadline, what, partial(changed_tensors, registration, held))  # as far as can be told
        if changed:
            text = f"{me} holds that version, but these tensors were changed since: {some(changed)}"
            raise VersionConflict(text, hint=HELD_HINT)
        return held
    if registration.table is not None:
        return await by(deadline, what, await cut(options, me, shards, registration, metadata, deadline))
    chunk_bytes = options.chunk_bytes if held is None else held.chunk_bytes  # equal bytes have equal roots then
    salt = uuid4().hex
    build = partial(build_manifest, registration, chunk_bytes, verify=options.verify, salt=salt)
    return replace(await by(deadline, what, build), metadata=metadata)


async def check_unchanged(
    me: WorkerId, version: Version, registration: Registration, known: Known, deadline: float
) -> None:
    """Raises `NotDrained` naming the tensors that are not any more what the version held says of them.

    Where small tensors share a chunk and its digest differs, it says that at least one of them was changed.
    """
    what = f"check() of version {version} of {me}"
    names, shared = await by(deadline, what, partial(changed_tensors, registration, known))
    changed = dict.fromkeys([*registration.moved(), *names])
    said = [f"these tensors were changed since: {some(list(changed))}"] if changed else []
    for chunk in sorted(shared)[:CHUNKS_SHOWN]:
        count = len(shared[chunk])
        said.append(f"at least one of the {count} tensors in chunk {chunk} was changed since: {some(shared[chunk])}")
    if len(shared) > CHUNKS_SHOWN:
        said.append(f"and at least one in each of {len(shared) - CHUNKS_SHOWN} more chunks")
    if said:
        text = f"{me} holds version {version}, but {'; '.join(said)}"
        raise NotDrained(text, hint="unpublish() before changing tensors, or use mutating(version=...)")


async def by(deadline: float, what: str, work: Callable[[], T]) -> T:
    """Blocking work in a thread, awaited until the deadline."""
    began = time.monotonic()
    try:
        async with asyncio.timeout_at(deadline):
            return await in_thread(work, name="hash")
    except TimeoutError as error:
        text = f"{what} did not end within {deadline - began:.3g} s"
        raise DeadlineExceeded(text, hint="retry with a longer timeout") from error


def grid_of(known: Known) -> Digest:
    """Of the tiles that were cut: all shards of a publish cut the same."""
    return known.cut.manifest.grid if isinstance(known, TiledVersion) else Digest("")
