"""Fills tensors with tiles from sources of other layouts, and the tiled version that results."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np
import xxhash
from numpy.lib.stride_tricks import as_strided

from ..memory.digests import names_at
from ..memory.fill import Fill
from ..memory.registration import Registration
from ..protocol.errors import (
    CorruptTransfer,
    InvariantViolation,
    LayoutMismatch,
    TransferError,
    UsageError,
)
from ..protocol.layout import GlobalTensor
from ..protocol.manifest import (
    DIGEST_BYTES,
    MAX_SIZE,
    Layout,
    TensorSpec,
    TileManifest,
    chunk_count,
    contiguous_strides,
    names_difference,
)
from ..protocol.names import Digest
from ..transport.base import Progress, Terms
from ..transport.ranges import ROW_WORDS, Batches, Rows
from ..transport.ranges import scatter as put_into
from .copies import COLUMNS, COUNT, COUNTS, OURS, RUN, THEIRS, check_coverage
from .grid import (
    BAND_BYTES,
    BoxTable,
    Cutting,
    Grid,
    Ints,
    Spans,
    Tiles,
    grid_of,
    ints,
    ranges_of,
    ranks_of,
    spans,
    spans_of,
    starts_of,
    tiles_of,
    words,
)
from .plan import BATCH_BYTES, Order, Plan, Source, derive_manifest, orders_of, plan_reads, tile_digests
from .wire import (
    FEW_TILES,
    TiledShard,
    check_tiled_shard,
    decode_table,
    decode_tiled_shard,
    grid_digest,
    layout_digest,
    publish_tiled_shard,
)

# --- One read from one source of a fill across layouts: a `Sink` that wants batches of tiles.
#
# Where the mover is in use it checks and scatters by itself (`terms`). Elsewhere batches come to `accept`.


class TileSink:
    """One read from one source. Its chunks are batches of tiles."""

    is_cross_site = False
    is_checking = True

    def __init__(self, fill: "Across", source: Source, number: int, plan: Plan, order: Order, mine: Ints) -> None:
        """`mine` says which of all tiles of the reader those of the plan are."""
        self.number = number  # of its source, among those that were given
        self.source = source
        self._fill = fill
        self._root = source.manifest.root()
        self._plan = plan
        self._order = order
        self._progress = Progress(len(order.batches))
        self._accepted: dict[int, memoryview] = {}  # batches that are right, on their way to their places
        slots = plan.tiles.slot[plan.tile[order.fetches]]
        self._digests = np.frombuffer(fill.manifest.digests, f"V{DIGEST_BYTES}")[slots].tobytes()
        by_fetch = np.argsort(plan.fetch_of, kind="stable")
        self._filled = mine[by_fetch]  # by each fetch
        self._ends = np.searchsorted(plan.fetch_of[by_fetch], np.stack([order.fetches, order.fetches + 1]))
        self._first_tile = np.array(order.scatter.first_tile, np.int64)
        self._open = list(range(len(order.batches)))  # not noted yet
        self._noting = threading.Lock()

    # -- what the fill asks --------------------------------------------------------------------------------------------

    def note(self) -> None:
        """Tell the fill of what has come since it was told last."""
        with self._noting:
            done: list[int] = []
            came, self._open = self._open, []
            for batch in came:  # each is looked at once: more may be marked meanwhile
                (done if self._progress.has(batch) else self._open).append(batch)
            if not done:
                return
            self._fill.filled(self._tiles(done))

    def take_rest(self) -> Ints:
        """The tiles that it has not brought, and will not."""
        with self._noting:
            rest, self._open = self._open, []
            return self._tiles(rest)

    def _tiles(self, batches: Sequence[int]) -> Ints:
        first, last = self._ends[:, ranges_of(self._first_tile[:-1], self._first_tile[1:], ints(batches))]
        found: Ints = self._filled[ranges_of(first, last)]
        return found

    # -- what a transport asks -----------------------------------------------------------------------------------------

    @property
    def batches(self) -> Batches:
        return self._order.batches

    @property
    def stream(self) -> "TileSink":
        return self

    @property
    def size_bytes(self) -> int:
        return self.batches.size_bytes

    @property
    def chunk_bytes(self) -> int:
        return max(1, self.batches.largest_bytes)

    def begin(self, manifest: bytes) -> Sequence[int]:
        """All batches. `CorruptTransfer` if this is another content than the plan was made for."""
        self._fill.check()
        check_tiled_shard(manifest, self._root)  # its layout is known: nothing is unpacked
        return self._open

    def terms(self) -> Terms | None:
        return Terms(self._digests, self._progress, (self._fill.stop_flag,), scatter=self._order.scatter)

    def told(self, size_bytes: int) -> None:
        self.note()
        self._fill.registration.took(size_bytes)

    def check(self) -> None:
        self._fill.check()

    def touch(self) -> None:
        self._fill.check()
        self._fill.touch()

    @contextmanager
    def views_to_read(self, start: int, stop: int) -> Iterator[Sequence[memoryview]]:
        raise InvariantViolation("a fill across layouts is read from")
        yield ()

    @contextmanager
    def views_to_write(self, start: int, stop: int) -> Iterator[Sequence[memoryview]]:
        """Memory of its own: `stored` puts a batch where it belongs."""
        yield [memoryview(bytearray(stop - start))]

    def accept(self, chunk: int, views: Sequence[memoryview]) -> None:
        scatter, start = self._order.scatter, self.batches.bounds[chunk]
        data = memoryview(b"".join(views))
        if len(data) != self.batches.bounds[chunk + 1] - start:
            raise CorruptTransfer(f"a batch from {self.source.name} came with {len(data)} B")
        for tile in range(*scatter.first_tile[chunk : chunk + 2]):
            rows = range(*scatter.first_reorder_row[tile : tile + 2])
            own = b"".join(
                _rows_in(data, *scatter.reorder_rows[ROW_WORDS * row : ROW_WORDS * (row + 1)]) for row in rows
            )
            found = xxhash.xxh3_128_digest(own or data[scatter.tiles[tile] - start : scatter.tiles[tile + 1] - start])
            if found != self._announced(tile):
                raise self.wrong_tile(tile)
        self._fill.check()
        self._accepted[chunk] = data

    def stored(self, chunk: int) -> None:
        data, scatter = self._accepted.pop(chunk, None), self._order.scatter
        if data is None:
            raise InvariantViolation(f"batch {chunk} was called stored but had not been accepted")
        if scatter.is_kept[chunk]:
            first, last = (COLUMNS * scatter.first_keep[at] for at in (chunk, chunk + 1))
            for at in range(first, last, COLUMNS):
                row = scatter.keeps[at : at + COLUMNS]
                ours = Rows.at(words(row[column] for column in OURS), words((0, row[RUN] * row[COUNT] * row[COUNTS])))
                found = _rows_in(data, *(row[column] for column in THEIRS))
                put_into(scatter.stream, ours.ranges(0, ours.stop), memoryview(found))
        else:
            put_into(scatter.stream, scatter.ours.ranges(*self.batches.span(chunk)), data)
        self._fill.mark(self._progress, (chunk,))
        self.note()

    def count(self, batches: range) -> None:
        self._fill.mark(self._progress, batches)

    def wrong_tile(self, tile: int) -> CorruptTransfer:
        name = self._plan.tiles.text(int(self._plan.tile[self._order.fetches[tile]]))
        return CorruptTransfer(
            f"{name} from {self.source.name} is not what was published: its digest is not {self._announced(tile).hex()}"
        )

    def _announced(self, tile: int) -> bytes:
        return self._digests[DIGEST_BYTES * tile : DIGEST_BYTES * (tile + 1)]


def _rows_in(data: memoryview, place: int, run: int, count: int, stride: int, counts: int, strides: int) -> bytes:
    """What one row has of a batch."""
    return as_strided(np.frombuffer(data, np.uint8)[place:], (counts, count, run), (strides, stride, 1)).tobytes()


# --- Fills registered tensors with one version from sources with other layouts, tile by tile.
#
#     across = Across(registration, tiles, manifest)      the reader's tiles, and its derived manifest
#     for sink in across.tile_sinks(sources): ...         what is missing, planned over these sources
#         transport.read(endpoint, key, sink, on_end)     each sink fails by itself
#     on_end: across.ended(sink)                          what it has not brought is missing yet
#
# 1. The caller has compared the manifest's root with the one that the server named. A tile counts only with the digest
#    that this manifest has for it.
# 2. A source that shows another manifest than the plan was made from is refused before a byte comes.
# 3. `progress` is by the reader's own chunks. A chunk counts once all its tiles do.
# 4. After `revoke` has returned, nothing more counts. What is in no box is never written.
# 5. The last plan for all tiles of a registration is kept, about 0.5 KB for each tile: the next version often needs it.
#
# Called from several transport threads at once.


_Planned = tuple[Plan, list[tuple[int, Order]]]  # and each order with the number of its source
_plans: "WeakKeyDictionary[Registration, tuple[object, _Planned]]" = WeakKeyDictionary()
_planning = threading.Lock()  # guards it


class Across(Fill):
    """One fill of one registration, from as many sources as it takes. Thread-safe."""

    def __init__(
        self,
        registration: Registration,
        tiles: Tiles,
        manifest: TileManifest,
        *,
        on_stored: Callable[[int], None] | None = None,
        batch_bytes: int = BATCH_BYTES,
        chunk_bytes: int = BAND_BYTES,
    ) -> None:
        """Progress is by chunks of so many bytes of the stream, as that of every export."""
        super().__init__(registration, "full", on_stored)
        self.check_algorithm(manifest.algorithm)
        self.tiles = tiles
        self.manifest = manifest
        self._batch_bytes = batch_bytes
        count, self._first_chunk, self._chunk = _by_stream(tiles, chunk_bytes)
        self.progress = Progress(count)
        self._left = np.bincount(self._chunk, minlength=count)  # tiles of each chunk
        for empty in np.flatnonzero(self._left == 0).tolist():  # what is in no box is there
            self.progress.mark(empty)
        self._is_missing = np.ones(len(tiles), np.bool_)
        self._missing = len(tiles)

    @property
    def missing(self) -> int:
        """The tiles that are not in place yet."""
        return self._missing

    def tile_sinks(self, sources: Sequence[Source]) -> list[TileSink]:
        """Reads that bring all that is missing. No other thread waits for the plan.

        Raises `UsageError` (`LayoutMismatch`, `VersionConflict`) if the sources do not have it.
        """
        with self._lock:
            self.check()
            mine = np.flatnonzero(self._is_missing)
        if not len(mine):
            return []
        plan, orders = self._planned(mine, sources)
        return [TileSink(self, sources[number], number, plan, order, mine) for number, order in orders]

    def _planned(self, mine: Ints, sources: Sequence[Source]) -> _Planned:
        """Plans these tiles: from which source each comes, and the request to each source."""
        layouts = tuple(source.manifest.layout for source in sources)
        key = (self.manifest.layout, self.manifest.grid, layouts, self._batch_bytes)
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
                for order in orders_of(plan, number, source.table.size_bytes, stream, batch_bytes=self._batch_bytes)
            ],
        )
        if is_whole:
            with _planning:
                _plans[self.registration] = key, found
        return found

    def ended(self, tile_sink: TileSink) -> int:
        """The transport has done with it. Returns how many tiles it leaves missing."""
        tile_sink.note()
        return len(tile_sink.take_rest())

    def filled(self, tiles: Ints) -> None:
        """Note that these tiles are in place."""
        with self._telling:
            with self._lock:
                self.check()
                tiles = tiles[self._is_missing[tiles]]
                self._is_missing[tiles] = False
                self._missing -= len(tiles)
                chunks = self._chunk[ranges_of(self._first_chunk[:-1], self._first_chunk[1:], tiles)]
                touched = np.unique(chunks)
                np.subtract.at(self._left, chunks, 1)
                done = touched[self._left[touched] == 0].tolist()
                self.progress.mark_all(done)
            if done and self._on_stored is not None:
                self._on_stored(self.progress.prefix)

    def mark(self, progress: Progress, batches: Sequence[int]) -> None:
        """These batches of a tile sink count, unless the fill was revoked."""
        with self._lock:
            self.check()
            progress.mark_all(batches)


def _by_stream(tiles: Tiles, chunk_bytes: int) -> tuple[int, Ints, Ints]:
    """Chunks of equal length: how many, and in which each tile lies, behind the first of it. An alias lies in none."""
    start = tiles.offset
    stop = start + spans(tiles.size, tiles.strides, tiles.item)
    is_own = tiles.table.alias_of[tiles.box] == tiles.box
    low = start // chunk_bytes
    lengths = np.where(is_own & (stop > start), (stop - 1) // chunk_bytes - low + 1, 0)
    count = -(-tiles.table.size_bytes // chunk_bytes)
    return count, starts_of(lengths), np.repeat(low, lengths) + ranks_of(lengths)


# --- A version of one shard, cut into tiles, as a worker holds, serves, copies or fills it.
#
#     publish     boxes of all layouts ──▶ grid_for ──▶ tiled_version: digests of what is registered now
#     read        manifests of sources ──▶ version_from: the reader's own manifest, before a byte moves
#
# It answers the same questions as a plain `Manifest`. What is served is counted by chunks of equal length.


_log = logging.getLogger(__name__)
NO_NAMES: Mapping[bytes, str] = {}
MAX_CUTS = 1 << 23  # of a grid: half of what may travel, `wire.MAX_PLAIN_BYTES`; names take the rest
COPIES = 4  # of one tile at a reader, on average: tied weights, and what it keeps twice


_found: "WeakKeyDictionary[Registration, tuple[Digest, Ints]]" = WeakKeyDictionary()  # by `there_already`
_looking = threading.Lock()  # guards it: a reader that is moved meanwhile waits for what was begun


@dataclass(frozen=True, eq=False, repr=False)
class TiledVersion:
    """A shard's boxes, the grid, a digest for each tile; and where the tiles lie in the registered stream."""

    shard: TiledShard
    tiles: Tiles
    size_bytes: int
    chunk_bytes: int  # in which what is there is counted
    parts: list[bytes] = field(
        default_factory=list
    )  # one, once it is known: digests of the tiles that lie here in part

    @property
    def chunk_count(self) -> int:
        return chunk_count(self.size_bytes, self.chunk_bytes)

    @property
    def digests(self) -> bytes:
        return self.shard.manifest.digests

    @property
    def metadata(self) -> bytes:
        return self.shard.manifest.metadata

    @cached_property
    def _root(self) -> Digest:
        return self.shard.manifest.root()

    def root(self) -> Digest:
        """The content's identity, in this layout."""
        return self._root

    @cached_property
    def _encoded(self) -> bytes:
        return self.shard.encode()

    def encode(self) -> bytes:
        """Encodes it for the wire. It is sent before the bytes."""
        return self._encoded

    def changed(self, registration: Registration) -> list[int]:
        """The tiles whose bytes now differ. Blocks.

        Of a tile that lies here in part what was noted tells; where nothing was, it is left out.
        """
        digest = f"V{DIGEST_BYTES}"
        known = np.frombuffer(self.digests, digest)[self.tiles.slot]  # a copy
        looked_at = np.arange(len(self.tiles)) if self.parts else np.flatnonzero(self.tiles.is_whole)
        if self.parts:
            known[~self.tiles.is_whole] = np.frombuffer(self.parts[0], digest)
        found = np.frombuffer(tile_digests(registration, self.tiles.only(looked_at)), digest)
        return [int(tile) for tile in looked_at[found != known[looked_at]]]

    def there_already(self, registration: Registration) -> Ints:
        """The tiles that are in the registered memory before anything is read. Blocks; the last answer is kept."""
        with _looking:
            known = _found.get(registration)
            if known is None or known[0] != self.root():
                whole, changed = np.flatnonzero(self.tiles.is_whole), ints(self.changed(registration))
                known = _found[registration] = self.root(), np.setdiff1d(whole, changed)
            return known[1]

    def note_parts(self, registration: Registration) -> None:
        """Notes digests of verified parts that no manifest lists. Blocks.

        Those are for this worker alone: its layout was not known when the version was published, so that some tiles
        reach out of its boxes.
        """
        if not self.is_whole and not self.parts:
            partly = np.flatnonzero(~self.tiles.is_whole)
            self.parts.append(tile_digests(registration, self.tiles.only(partly)))

    @property
    def is_whole(self) -> bool:
        """Every tile can be hashed, and shown to others: it is cut as was known when the version was published."""
        return bool(self.tiles.is_whole.all())

    def names(self, tiles: Sequence[int], registration: Registration) -> list[str]:
        """The registered tensors in which these tiles lie."""
        return names_at(registration.layout, self.tiles.offset[np.asarray(tiles, np.int64)].tolist())

    def check(self, registration: Registration, what: str) -> None:
        """Raises `CorruptTransfer` unless all of it is there. Blocks."""
        wrong = self.changed(registration)
        if wrong:
            more = f" and {len(wrong) - 1} other tiles" if len(wrong) > 1 else ""
            raise CorruptTransfer(f"{what} is not what was published: {self.tiles.text(wrong[0])}{more}")


# --- Publishing.


def grid_for(publisher: Sequence[bytes], others: Sequence[bytes], names: Mapping[bytes, str] = NO_NAMES) -> Grid:
    """The grid of a version, from the boxes of all shards of its publisher and of all that are to read it.

    Raises `LayoutMismatch` if the publisher's shards do not cover every tensor, or mean different ones by one name, and
    `UsageError` if what one of them has said is no table of boxes. `names` has a worker that said each, for messages.
    What a reader has said that is no table of boxes makes no cuts, so that no other worker suffers.
    """
    tables = [decoded(each, names.get(each, "the replica that publishes")) for each in publisher]
    cutting = Cutting()
    for table in tables:
        cutting.add_publisher(table)
    check_coverage(tables, who="the replica that publishes")
    for each in sorted(set(others) - set(publisher)):
        try:
            cutting.add_other(decode_table(each))
        except UsageError as error:
            _log.warning("the boxes of %s are left out of account: %s", names.get(each, "a reader"), error)
    grid = cutting.grid()
    if len(grid.cuts) > MAX_CUTS:
        _log.warning("all readers are left out of account: of %d cuts, %d are the limit", len(grid.cuts), MAX_CUTS)
        return grid_of(tables)
    return grid


def decoded(boxes: bytes, who: str) -> BoxTable:
    """Calls `decode_table`, and adds the worker's name to an error."""
    try:
        return decode_table(boxes)
    except UsageError as error:
        raise UsageError(f"the boxes of {who}: {error}") from error


def tiled_version(registration: Registration, grid: Grid, chunk_bytes: int, *, metadata: bytes = b"") -> TiledVersion:
    """The tiled version of the registered tensors. Blocks. The tensors must not be written meanwhile.

    Raises `UsageError` naming tensors whose memory was freed.
    """
    tiles = tiles_of(_table(registration), grid)
    return TiledVersion(
        publish_tiled_shard(registration, tiles, metadata=metadata), tiles, registration.size_bytes, chunk_bytes
    )


def _table(registration: Registration) -> BoxTable:
    if registration.table is None:
        raise UsageError("these tensors were registered without boxes")
    return registration.table


def with_boxes_like(registration: Registration, others: Sequence[bytes], who: str) -> Registration:
    """Registers the same tensors with `boxes={}`. `others`: the boxes of the replicas from which it is to read.

    Raises `LayoutMismatch` naming a tensor that is another one there, or on one side only.
    """
    found = registration.with_boxes()
    theirs = {tensor.name: tensor for each in others for tensor in decoded(each, "another replica").tensors}
    check_coverage([_table(found)], [theirs[name] for name in sorted(theirs)], who=who)
    extra = [tensor for tensor in _table(found).tensors if tensor.name not in theirs]
    if extra:
        said, hint = names_difference([t.name for t in extra], theirs, here=f"in {who}", there="in what was published")
        text = f"tensor {extra[0]} exists in {who}, but not in what was published{said}"
        raise LayoutMismatch(text, hint=hint or "register the same names, dtypes and global shapes on both sides")
    return found


# --- Reading.


class Offer:
    """What one source has shown of itself. Looked at once, in a thread."""

    def __init__(self, name: str, root: Digest, shown: bytes) -> None:
        self.name = name
        self.root = root
        self._shown = shown

    @cached_property
    def shard(self) -> TiledShard:
        """Raises `CorruptTransfer` if it is not what the server named."""
        try:
            return decode_tiled_shard(self._shown, self.root)
        except CorruptTransfer as error:
            raise CorruptTransfer(f"{self.name}: {error}") from error

    @cached_property
    def source(self) -> Source:
        return Source(self.name, self.shard.table, self.shard.manifest)

    @cached_property
    def is_whole(self) -> bool:
        """Others can read all that it has: it is cut as was known when the version was published."""
        return bool(tiles_of(self.shard.table, self.shard.grid).is_whole.all())


def version_from(registration: Registration, offers: Sequence[Offer], chunk_bytes: int) -> TiledVersion:
    """What the registered tensors will be once they are filled from these sources. Blocks; nothing is written.

    Raises `LayoutMismatch` that names a tensor and what is wrong with it: a part that no source has, another shape or
    dtype, memory that two of its boxes share; `VersionConflict` for a part that two sources have with different
    content; `TransferError` where others may have what these cannot show.
    """
    registration.check_fillable()
    table, shards = _table(registration), [offer.shard for offer in offers]
    grid, digest = shards[0].grid, shards[0].manifest.grid
    for offer, shard in zip(offers, shards, strict=True):
        if shard.manifest.grid != digest:
            raise CorruptTransfer(f"{offer.name} has another grid than {offers[0].name}: they are not of one version")
    spans = spans_of(table, grid)
    try:
        tiles = _wanted(table, grid, spans, offers)
        manifest = derive_manifest(
            tiles, [offer.source for offer in offers], layout=layout_digest(table), grid=grid_digest(grid)
        )
    except LayoutMismatch as error:
        partly = [offer.name for offer in offers if not offer.is_whole]
        if not partly:
            raise
        text = f"{', '.join(partly)} registered after that version was published, and can show only parts of some tiles"
        raise TransferError(f"{text}: {error}", hint="others who hold it can; or publish the next version") from error
    return TiledVersion(TiledShard(table, grid, manifest), tiles, registration.size_bytes, chunk_bytes)


def _wanted(table: BoxTable, grid: Grid, spans: Spans, offers: Sequence[Offer]) -> Tiles:
    """The tiles of a reader. Not made where the grid has far more of them than the sources have digests for."""
    shown = sum(offer.shard.manifest.tile_count for offer in offers)
    if spans.tile_count > max(FEW_TILES, COPIES * shown):
        names = ", ".join(offer.name for offer in offers)
        raise LayoutMismatch(f"{spans.tile_count} tiles are wanted, and {names} have {shown} of that version")
    return tiles_of(table, grid, spans)


# --- Memory for all of a model, whole: the global tensors that the boxes of a replica are parts of.


Place = tuple[int, int]  # of a part that is an alias: its shard, and the first row of the table with the same memory


def whole_layout(tables: Sequence[bytes]) -> Layout:
    """One tensor for each global one, sorted by name, contiguous. `tables`: the encoded boxes of each shard.

    Those that are the same memory on every shard (tied weights) are so here too. Raises `UsageError` naming a tensor
    that two shards take for two different ones.
    """
    found: dict[str, GlobalTensor] = {}
    shared: dict[str, set[Place]] = {}
    alone: set[str] = set()
    for shard, encoded in enumerate(tables):
        table = decode_table(encoded)
        for tensor in table.tensors:
            known = found.setdefault(tensor.name, tensor)
            if known != tensor:
                raise UsageError(f"the shards of this version do not agree: {known} and {tensor}")
        _note_aliases(table, shard, shared, alone)
    specs, at = [], 0
    places: dict[tuple[frozenset[Place], GlobalTensor], int] = {}
    for name, tensor in sorted(found.items()):
        here = at
        if name in shared and name not in alone:
            here = places.setdefault((frozenset(shared[name]), GlobalTensor("", tensor.dtype, tensor.shape)), at)
        strides = contiguous_strides(tensor.shape)
        specs.append(TensorSpec(name, tensor.dtype, tensor.shape, strides, here, tensor.size_bytes))
        at += tensor.size_bytes if here == at else 0
    if at > MAX_SIZE:
        raise UsageError(f"the tensors of this version have {at} B")
    return Layout(tuple(specs), at)


def tied(layout: Layout) -> tuple[tuple[str, ...], ...]:
    """Names of tensors that are the same memory."""
    groups: dict[tuple[int, str, tuple[int, ...]], list[str]] = {}
    for spec in layout.tensors:
        if spec.size_bytes:
            groups.setdefault((spec.offset_bytes, spec.dtype, spec.shape), []).append(spec.name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def _note_aliases(table: BoxTable, shard: int, shared: dict[str, set[Place]], alone: set[str]) -> None:
    """Where those parts of each tensor lie that share memory with others, and which tensors have parts that do not."""
    if not len(table):
        return
    has_others = np.bincount(table.alias_of, minlength=len(table))[table.alias_of] > 1
    for tensor, first in zip(table.tensor[has_others].tolist(), table.alias_of[has_others].tolist(), strict=True):
        shared.setdefault(table.tensors[tensor].name, set()).add((shard, first))
    alone.update(table.tensors[tensor].name for tensor in np.unique(table.tensor[~has_others]).tolist())
