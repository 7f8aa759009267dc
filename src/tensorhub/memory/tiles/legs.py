"""One read from one source of a fill across layouts (`across`): a `Sink` that wants pieces.

Where the mover is in use it judges and scatters by itself (`terms`). Elsewhere parcels come to `accept` as views of the
tensors, or of scratch memory where only parts of their tiles are kept.
It must never: count a parcel of which a tile is not as the reader's manifest has it.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import xxhash
from numpy.lib.stride_tricks import as_strided

from ...core.errors import CorruptTransfer, InvariantViolation
from ...core.manifest import DIGEST_BYTES
from ...core.tile_manifest import TileManifest
from ...transport import gathered
from ...transport.base import Look, Terms
from ...transport.gates import Gate
from ...transport.located import is_bare
from ...transport.parcels import Parcels
from ...transport.progress import Progress
from ...transport.rows import ROW_WORDS, RowStream
from ..registration import Registration
from .arrays import EMPTY, Ints, ints, ranges_of
from .copies import COLUMNS, TARGET, Bytes, Copies, carry_out
from .derive import Source
from .exported import check_cut
from .orders import Order
from .plan import Plan


class Fill(Protocol):
    """What a leg needs of the fill that it belongs to."""

    registration: Registration
    manifest: TileManifest
    is_checking: bool
    gate: Gate

    def check(self) -> None: ...

    def settle(self) -> None: ...

    def mark(self, progress: Progress, parcels: Sequence[int]) -> None: ...

    def filled(self, tiles: Ints) -> None: ...


class Leg:
    """One read from one source. Its chunks are parcels of tiles."""

    is_cross_site = False

    def __init__(self, fill: Fill, source: Source, number: int, plan: Plan, order: Order, mine: Ints) -> None:
        """`mine` says which of all tiles of the reader those of the plan are."""
        if source.manifest is None:
            raise InvariantViolation("a source without its manifest")
        self.number = number  # of its source, among those that were given
        self.source = source
        self._fill = fill
        self._root = source.manifest.root()
        self._plan = plan
        self._order = order
        self._progress = Progress(len(order.parcels))
        self._accepted = bytearray(len(order.parcels))
        slots = plan.tiles.slot[plan.tile[order.fetches]]
        known = np.frombuffer(fill.manifest.digests, f"V{DIGEST_BYTES}") if fill.is_checking else None
        self._digests = known[slots].tobytes() if known is not None else None
        self._rows = RowStream(order.scatter.stream, order.scatter.ours)
        self._scratch: dict[int, bytearray] = {}  # of parcels on their way that are kept in part
        by_fetch = np.argsort(plan.fetch_of, kind="stable")
        self._filled = mine[by_fetch]  # by each fetch
        self._ends = np.searchsorted(plan.fetch_of[by_fetch], np.stack([order.fetches, order.fetches + 1]))
        self._first_tile = np.array(order.scatter.first_tile, np.int64)
        self._open = list(range(len(order.parcels)))  # not noted yet
        self._noting = threading.Lock()

    # -- what the fill asks --------------------------------------------------------------------------------------------

    def note(self) -> None:
        """Tell the fill of what has come since it was told last."""
        with self._noting:
            done: list[int] = []
            came, self._open = self._open, []
            for parcel in came:  # each is looked at once: more may be marked meanwhile
                (done if self._progress.has(parcel) else self._open).append(parcel)
            if not done:
                return
            self._fill.filled(self._tiles(done))

    def take_rest(self) -> Ints:
        """The tiles that it has not brought, and will not."""
        with self._noting:
            rest, self._open = self._open, []
            return self._tiles(rest)

    def _tiles(self, parcels: Sequence[int]) -> Ints:
        first, last = self._ends[:, ranges_of(self._first_tile[:-1], self._first_tile[1:], ints(parcels))]
        found: Ints = self._filled[ranges_of(first, last)]
        return found

    # -- what a transport asks -----------------------------------------------------------------------------------------

    @property
    def parcels(self) -> Parcels:
        return self._order.parcels

    @property
    def is_checking(self) -> bool:
        return self._fill.is_checking

    @property
    def stream(self) -> "Leg":
        return self

    @property
    def size_bytes(self) -> int:
        return self.parcels.size_bytes

    @property
    def chunk_bytes(self) -> int:
        return max(1, self.parcels.most_bytes)

    def begin(self, manifest: bytes) -> Sequence[int]:
        """All parcels. `CorruptTransfer` if this is another content than the plan was made for."""
        self._fill.check()
        check_cut(manifest, self._root)  # its layout is known: nothing is unpacked
        return self._open

    def terms(self) -> Terms | None:
        return Terms(self._digests, self._progress, (self._fill.gate,), scatter=self._order.scatter)

    def told(self, size_bytes: int) -> None:
        self.note()
        self._fill.registration.took(size_bytes)

    def check(self) -> None:
        self._fill.check()

    def touch(self) -> None:
        self._fill.check()
        self._fill.settle()

    def observe(self, chunk: int) -> Look | None:
        return None

    @contextmanager
    def reading(self, start: int, stop: int) -> Iterator[Sequence[memoryview]]:
        raise InvariantViolation("a fill across layouts is read from")
        yield ()

    @contextmanager
    def writing(self, start: int, stop: int) -> Iterator[Sequence[memoryview]]:
        """Where a parcel belongs; or scratch memory."""
        parcel = int(np.searchsorted(self.parcels.bounds, start, "right")) - 1
        if self._order.scatter.is_kept[parcel]:
            self._scratch[parcel] = bytearray(stop - start)
            yield [memoryview(self._scratch[parcel])]
            return
        with self._rows.writing(start, stop) as views:
            yield views

    def accept(self, chunk: int, views: Sequence[memoryview]) -> None:
        tiles, start = self._order.scatter.tiles, self.parcels.bounds[chunk]
        data = memoryview(b"".join(views))
        if len(data) != self.parcels.bounds[chunk + 1] - start:
            raise CorruptTransfer(f"a parcel from {self.source.name} came with {len(data)} B")
        for tile in self._order.tiles_of(chunk) if self._digests is not None else ():
            found = xxhash.xxh3_128_digest(
                self._turned(tile, data) or data[tiles[tile] - start : tiles[tile + 1] - start]
            )
            if found != self._announced(tile):
                raise self.wrong_tile(tile)
        self._fill.check()
        self._accepted[chunk] = True

    def stored(self, chunk: int) -> None:
        if not self._accepted[chunk]:
            raise InvariantViolation(f"parcel {chunk} was called stored but had not been accepted")
        if self._order.scatter.is_kept[chunk]:
            self._keep(chunk, np.frombuffer(self._scratch.pop(chunk), np.uint8))
        self._fill.mark(self._progress, (chunk,))
        self.note()

    def count(self, parcels: range) -> None:
        self._fill.mark(self._progress, parcels)

    def wrong_tile(self, tile: int) -> CorruptTransfer:
        name = self._plan.tiles.text(int(self._plan.tile[self._order.fetches[tile]]))
        return CorruptTransfer(
            f"{name} from {self.source.name} is not what was published: its digest is not {self._announced(tile).hex()}"
        )

    def _turned(self, tile: int, data: memoryview) -> bytes:
        """A tile that came in another order, in its own; nothing if it did not."""
        turns, memory = self._order.scatter.turns, np.frombuffer(data, np.uint8)
        found = []
        for row in range(*self._order.scatter.first_turn[tile : tile + 2]):
            place, run, count, stride, counts, strides = turns[ROW_WORDS * row : ROW_WORDS * (row + 1)]
            found.append(as_strided(memory[place:], (counts, count, run), (strides, stride, 1)).tobytes())
        return b"".join(found)

    def _announced(self, tile: int) -> bytes:
        assert self._digests is not None, "nothing is checked"
        return self._digests[DIGEST_BYTES * tile : DIGEST_BYTES * (tile + 1)]

    def _keep(self, parcel: int, data: Bytes) -> None:
        """Put parts of it where they belong: row by row, for each lies in one tensor."""
        scatter = self._order.scatter
        first, last = scatter.first_keep[parcel], scatter.first_keep[parcel + 1]
        keeps = np.array(scatter.keeps[COLUMNS * first : COLUMNS * last], np.int64).reshape(-1, COLUMNS)
        for row in keeps:
            copies = Copies(row[None].copy(), EMPTY)
            if not is_bare(scatter.stream):
                packed = np.empty(int(copies.size_bytes[0]), np.uint8)
                carry_out(Copies(copies.rows, np.zeros(1, np.int64)).gathering(), data, packed)
                gathered.scatter(scatter.stream, copies.ranges(TARGET), packed.data)
                continue
            start, stop = copies.extent(TARGET)
            copies.rows[:, TARGET] -= start
            with scatter.stream.writing(start, stop) as (view,):
                carry_out(copies, data, np.frombuffer(view, np.uint8))
