"""Whether this worker's replica has boxes for all of a version that it is about to read out of another cut.

A replica that forgot a layer would be filled sooner than the others, and compute with old weights. So it is refused
before a byte is written, with the tensor's name. Who leaves something out on purpose says so at `register`.

A shard knows its own boxes; what its siblings have registered the server says. Asked once for each set of boxes. It
must never: wait longer than `ASK_S` for the server, or take what a sibling had registered before for what it has now.
"""

import time
from collections.abc import Iterable, Sequence

from ..core.boxes import GlobalTensor
from ..core.names import WorkerId
from ..memory.registration import Registration
from ..memory.tiles.coverage import check_coverage
from ..memory.tiles.tiled import Offer, decoded
from .config import Options
from .cutting import siblings
from .loops import in_thread

ASK_S = 10.0


class Covering:
    """Of one worker."""

    def __init__(self, options: Options, me: WorkerId, shards: int) -> None:
        self._options, self._me, self._shards = options, me, shards
        self._passed: tuple[tuple[bytes, ...], tuple[GlobalTensor, ...]] | None = None

    async def check(self, registration: Registration, offers: Sequence[Offer]) -> None:
        """Raises `LayoutMismatch` that names a tensor, or a part of one, that this replica lacks.

        Raises `GroupIncomplete` and `GroupMismatch` as `cutting.siblings` does, and `ServerUnreachable`.
        """
        boxes: tuple[bytes, ...] = (registration.boxes,)
        if self._shards > 1:
            deadline = time.monotonic() + ASK_S
            found = await siblings(self._options, self._me, self._shards, registration, deadline, what="a read")
            mine = {view.shard: found.boxes[view.boxes] for view in found.shards if view.replica == self._me.replica}
            boxes = tuple(mine[shard] for shard in range(self._shards))
        await in_thread(lambda: self._check(boxes, _tensors(offers)), name="tiles")

    def _check(self, boxes: tuple[bytes, ...], wanted: tuple[GlobalTensor, ...]) -> None:
        if self._passed != (boxes, wanted):
            who = f"{self._me.model}/{self._me.replica}"
            tables = [decoded(each, f"{who}[{shard}]") for shard, each in enumerate(boxes)]
            check_coverage(tables, wanted, who=who)
            self._passed = boxes, wanted


def _tensors(offers: Iterable[Offer]) -> tuple[GlobalTensor, ...]:
    """What the sources have together, by name."""
    found = {tensor.name: tensor for offer in offers for tensor in offer.cut.table.tensors}
    return tuple(found[name] for name in sorted(found))
