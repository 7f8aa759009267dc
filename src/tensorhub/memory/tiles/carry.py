"""A plan carried out by one thread with numpy: what native code does faster, and what it is compared with.

One tile at a time: gathered from its source into scratch memory, judged there, and only then written to where it
belongs. So a byte that is not what was published never reaches the reader's memory.
"""

from collections.abc import Sequence

import numpy as np
import xxhash

from ...core.errors import CorruptTransfer
from ...core.tile_manifest import TileManifest
from ..digests import NO_ALGORITHM
from .copies import SOURCE, TARGET, Bytes, Copies, carry_out
from .derive import Memory
from .plan import Plan


def carry_out_plan(plan: Plan, manifest: TileManifest, sources: Sequence[Memory], target: Memory) -> None:
    """Fetch every tile. Raises `CorruptTransfer`, naming the tile, at the first one that is not what was announced."""
    scratch = np.zeros(int(np.max(plan.size_bytes, initial=0)), np.uint8)
    slots = plan.tiles.slot[plan.tile].tolist()
    for fetch, (slot, source) in enumerate(zip(slots, plan.source.tolist(), strict=True)):
        data = scratch[: int(plan.size_bytes[fetch])]
        copies = plan.copies.only(fetch, fetch + 1)
        _move(copies.gathering(), SOURCE, sources[source], data)
        if manifest.algorithm != NO_ALGORITHM:
            found = xxhash.xxh3_128_digest(data.data)
            if found != manifest.digest_of(slot):
                raise CorruptTransfer(
                    f"{plan.tiles.text(int(plan.tile[fetch]))} has digest {found.hex()},"
                    f" announced was {manifest.digest_of(slot).hex()}"
                )
        keeps = copies.scattering() if plan.is_direct[fetch] else plan.keeps.only(fetch, fetch + 1)
        _move(keeps, TARGET, target, data)


def _move(copies: Copies, side: int, memory: Memory, data: Bytes) -> None:
    """Between a shard's stream, on that side, and `data` on the other: row by row, for each lies in one tensor."""
    for index in range(len(copies)):
        row = Copies(copies.rows[index : index + 1].copy(), copies.of[index : index + 1])
        first, last = row.extent(side)
        row.rows[:, side] -= first
        lent = memory(first, last)
        if side == SOURCE:
            carry_out(row, lent, data)
        else:
            carry_out(row, data, lent)
