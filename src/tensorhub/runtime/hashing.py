"""What is published, in numbers: plain chunks, or tiles where it is known which parts of which tensors there are.

Hashing happens in threads, until the caller's deadline. It must never: hash anew what cannot be, or cut anew what is
held.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar
from uuid import uuid4

from msgspec.structs import replace

from ..core.errors import DeadlineExceeded, NotDrained, VersionConflict
from ..core.names import Digest, Version, WorkerId
from ..memory.digests import build_manifest
from ..memory.in_place import some
from ..memory.registration import Registration
from ..memory.tiles.tiled import TiledVersion
from .config import Options
from .content import Known, changed_tensors
from .cutting import again, cut
from .loops import in_thread

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
