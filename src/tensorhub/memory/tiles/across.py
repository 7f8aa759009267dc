"""Fills registered tensors with one version out of sources that are cut in other ways, tile by tile.

    across = Across(registration, tiles, manifest)      the reader's tiles, and its manifest, derived from the sources'
    for leg in across.legs(sources): ...                what is missing, planned over these sources
        transport.read(endpoint, key, leg, on_end)      each leg is a sink, reads from one source, and fails by itself
    on_end: across.ended(leg)                           what it has not brought is missing again: `legs` of others

Rules:
1. The reader's manifest is known before the first byte, and its root is what the server named: the caller has compared
   it. A tile counts only with the digest that this manifest has for it, whoever sends it.
2. A source that offers another manifest than the plan was made from is refused (`CorruptTransfer`) before a byte comes.
3. `progress` is by the reader's own chunks: others may read behind it. A chunk counts once all its tiles
   do. What a leg has brought is noted when it is told, at most every 50 ms, and when it ends.
4. After `revoke` has returned, nothing more counts.
5. What is in no box is never written.
6. The next version comes in the same way, if no layout has changed. So a registration's last plan for all its tiles is
   kept as long as it lives: about 0.5 KB for each tile.

Called from several transport threads at once. Never: choose sources, wait for a transport.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from ...core.errors import TensorHubError, UsageError
from ...core.tile_manifest import TileManifest
from ...transport.gates import Gate
from ...transport.progress import Progress
from ..digests import NO_ALGORITHM, Verify, check_verify
from ..registration import Registration
from .arrays import Ints, ranks_of, spans, starts_of
from .cells import Tiles
from .chunks import chunks_of
from .derive import Source
from .legs import Leg
from .orders import PARCEL_BYTES, Order, orders_of
from .plan import Plan, plan_reads

_Planned = tuple[Plan, list[tuple[int, Order]]]  # and each order with the number of its source
_plans: "WeakKeyDictionary[Registration, tuple[object, _Planned]]" = WeakKeyDictionary()
_planning = threading.Lock()  # guards it


class Across:
    """One fill of one registration, from as many sources as it takes. Thread-safe."""

    def __init__(
        self,
        registration: Registration,
        tiles: Tiles,
        manifest: TileManifest,
        *,
        verify: Verify = "full",
        on_stored: Callable[[int], None] | None = None,
        parcel_bytes: int = PARCEL_BYTES,
        chunk_bytes: int | None = None,
    ) -> None:
        """`on_stored` is told the prefix of chunks, one call at a time, in a transport's thread.

        With `chunk_bytes` progress is by chunks of so many bytes of the stream, as that of every export.
        """
        check_verify(verify)
        if verify == "full" and manifest.algorithm == NO_ALGORITHM:
            raise UsageError(
                'this version was published with verify="none": its bytes cannot be verified',
                hint='publish it with verify="full", or say verify="none" here as well',
            )
        self.registration = registration
        self.tiles = tiles
        self.manifest = manifest
        self.is_checking = verify == "full"
        self.gate = Gate()  # shut once it is revoked
        self._parcel_bytes = parcel_bytes
        self._spread = _by_chunks(tiles) if chunk_bytes is None else _by_stream(tiles, chunk_bytes)
        self.progress = Progress(self._spread.count)
        self._left = np.bincount(self._spread.chunk, minlength=self._spread.count)  # tiles of each chunk
        for empty in np.flatnonzero(self._left == 0).tolist():  # what is in no box is there
            self.progress.mark(empty)
        self._is_open = np.ones(len(tiles), np.bool_)  # neither there nor on its way
        self._missing = len(tiles)
        self._on_stored = on_stored
        self._revoked: TensorHubError | None = None
        self._is_settled = False
        self._lock = threading.RLock()
        self._telling = threading.Lock()

    @property
    def missing(self) -> int:
        """Tiles that are not there."""
        return self._missing

    @property
    def open(self) -> int:
        """Tiles that are not there, and that no leg is to bring."""
        with self._lock:
            return int(np.count_nonzero(self._is_open))

    def legs(self, sources: Sequence[Source]) -> list[Leg]:
        """Reads that bring all that is missing and not on its way already. Raises as `plan_reads` does.

        One thread at a time plans, and nobody waits for it: what is open stays so, and more may become open meanwhile.
        """
        with self._lock:
            self.check()
            mine = np.flatnonzero(self._is_open)
        if not len(mine):
            return []
        plan, orders = self._planned(mine, sources)
        found = [Leg(self, sources[number], number, plan, order, mine) for number, order in orders]
        with self._lock:
            self.check()
            self._is_open[mine] = False
        return found

    def _planned(self, mine: Ints, sources: Sequence[Source]) -> _Planned:
        """How these tiles come, and what each source is asked for."""
        layouts = tuple(source.manifest.layout for source in sources if source.manifest is not None)
        key = (self.manifest.layout, self.manifest.grid, layouts, self._parcel_bytes)
        is_whole = len(mine) == len(self.tiles)
        with _planning:
            known = _plans.get(self.registration)
        if is_whole and known is not None and known[0] == key:
            return known[1]
        plan, stream = plan_reads(self.tiles.only(mine), sources), self.registration.stream
        found = (
            plan,
            [
                (number, order)
                for number, source in enumerate(sources)
                for order in orders_of(plan, number, source.table.size_bytes, stream, parcel_bytes=self._parcel_bytes)
            ],
        )
        if is_whole:
            with _planning:
                _plans[self.registration] = key, found
        return found

    def ended(self, leg: Leg) -> int:
        """The transport has done with it. Returns how many tiles it leaves missing."""
        leg.note()
        with self._lock:
            left = leg.take_rest()
            self._is_open[left] = True
            return len(left)

    def filled(self, tiles: Ints) -> None:
        """These are in place."""
        with self._telling:
            with self._lock:
                self.check()
                self._missing -= len(tiles)
                chunks = self._spread.of(tiles)
                touched = np.unique(chunks)
                np.subtract.at(self._left, chunks, 1)
                done = touched[self._left[touched] == 0].tolist()
                self.progress.mark_all(done)
            if done and self._on_stored is not None:
                self._on_stored(self.progress.prefix)

    def mark(self, progress: Progress, parcels: Sequence[int]) -> None:
        """These parcels of a leg count, unless the fill was revoked."""
        with self._lock:
            self.check()
            progress.mark_all(parcels)

    def settle(self) -> None:
        """Before the first byte: nothing that was launched earlier may still read or write these tensors."""
        with self._lock:
            if not self._is_settled:
                self.registration.settle_to_fill()
                self._is_settled = True

    def revoke(self, error: TensorHubError) -> None:
        """From now on nothing is taken: the permission to read has ended."""
        with self._lock:
            self._revoked = self._revoked or error
        self.gate.shut()

    def check(self) -> None:
        """Raises once it is revoked."""
        if self._revoked is not None:  # raised anew: kept with a traceback, it would hold all that ever ran into it
            raise type(self._revoked)(str(self._revoked), hint=self._revoked.hint)


@dataclass(frozen=True, eq=False, repr=False)
class _Spread:
    """In which chunks each tile lies; an alias in none, for it needs no bytes."""

    count: int  # of chunks
    first: Ints  # [tiles + 1]
    chunk: Ints

    def of(self, tiles: Ints) -> Ints:
        """The chunks of these tiles, one after another."""
        lengths = self.first[tiles + 1] - self.first[tiles]
        found: Ints = self.chunk[np.repeat(self.first[tiles], lengths) + ranks_of(lengths)]
        return found


def _by_chunks(tiles: Tiles) -> _Spread:
    """Runs of whole tiles: what readers of one layout may exchange as it is."""
    chunks = chunks_of(tiles)
    chunk = chunks.of_tiles(len(tiles))
    return _Spread(len(chunks), starts_of((chunk >= 0).astype(np.int64)), chunk[chunk >= 0])


def _by_stream(tiles: Tiles, chunk_bytes: int) -> _Spread:
    """Chunks of equal length: a tile lies in all that its memory reaches into."""
    start = tiles.offset
    stop = start + spans(tiles.size, tiles.strides, tiles.item)
    is_own = tiles.table.alias_of[tiles.box] == tiles.box
    low = start // chunk_bytes
    lengths = np.where(is_own & (stop > start), (stop - 1) // chunk_bytes - low + 1, 0)
    count = -(-tiles.table.size_bytes // chunk_bytes)
    return _Spread(count, starts_of(lengths), np.repeat(low, lengths) + ranks_of(lengths))
