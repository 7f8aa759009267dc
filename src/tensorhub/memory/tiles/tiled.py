"""A version of one shard, cut into tiles, as whoever holds it, serves it, copies it or fills it needs to have it.

    publish     boxes of all layouts ──▶ grid_for ──▶ tiled_version: digests of what is registered now
    read        manifests of sources ──▶ version_from: the reader's own manifest, before a byte moves

It has the same questions as a plain `Manifest`, so that exports, host copies and the machine need not know which it is.
Readers of it get tiles (`parcels`), readers of the same layout too; what is served is counted by chunks of equal length
of the stream, as of every export.

Never: take digests from a source whose root is not the one that the server named.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ...core.errors import CorruptTransfer, LayoutMismatch, SourceLost, UsageError
from ...core.manifest import DIGEST_BYTES, chunk_count
from ...core.names import Digest
from ..registration import Registration
from .cells import Spans, Tiles, spans_of, tiles_of
from .coverage import check_coverage
from .derive import Source, derive_manifest
from .exported import FEW_TILES, Cut, decode_cut, publish_cut, tile_digests
from .grid import Cutting, Grid, grid_of
from .table import BoxTable
from .wire import decode_table, grid_digest, layout_digest

_log = logging.getLogger(__name__)
NOBODY: Mapping[bytes, str] = {}
MOST_CUTS = 1 << 23  # of a grid: half of what may travel, `wire.MAX_PLAIN_BYTES`; names take the rest
COPIES = 4  # of one tile at a reader, on average: tied weights, and what it keeps twice


@dataclass(frozen=True, eq=False, repr=False)
class TiledVersion:
    """A shard's boxes, the grid, a digest for each tile; and where the tiles lie in the registered stream."""

    cut: Cut
    tiles: Tiles
    size_bytes: int
    chunk_bytes: int  # in which what is there is counted
    parts: list[bytes] = field(
        default_factory=list
    )  # one, once it is known: digests of the tiles that lie here in part

    def __repr__(self) -> str:
        return f"<{len(self.tiles)} tiles of {self.size_bytes} B>"

    @property
    def chunk_count(self) -> int:
        return chunk_count(self.size_bytes, self.chunk_bytes)

    @property
    def digests(self) -> bytes:
        return self.cut.manifest.digests

    @property
    def metadata(self) -> bytes:
        return self.cut.manifest.metadata

    @cached_property
    def _root(self) -> Digest:
        return self.cut.manifest.root()

    def root(self) -> Digest:
        """The content's identity, in this layout."""
        return self._root

    @cached_property
    def _encoded(self) -> bytes:
        return self.cut.encode()

    def encode(self) -> bytes:
        """As it travels ahead of the bytes."""
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

    def note_parts(self, registration: Registration) -> None:
        """What lies here has just been verified: note what nobody's manifest has a digest of. Blocks.

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
        at = np.sort(self.tiles.offset[np.asarray(tiles, np.int64)])
        specs = registration.layout.tensors
        start = np.array([spec.offset_bytes for spec in specs], np.int64)
        stop = start + np.array([spec.size_bytes for spec in specs], np.int64)
        has_some = np.searchsorted(at, start) < np.searchsorted(at, stop)
        return [specs[index].name for index in np.flatnonzero(has_some).tolist()]

    def check(self, registration: Registration, what: str) -> None:
        """Raises `CorruptTransfer` unless all of it is there. Blocks."""
        wrong = self.changed(registration)
        if wrong:
            more = f" and {len(wrong) - 1} other tiles" if len(wrong) > 1 else ""
            raise CorruptTransfer(f"{what} is not what was published: {self.tiles.text(wrong[0])}{more}")


# --- publishing -------------------------------------------------------------------------------------------------------


def grid_for(publisher: Sequence[bytes], others: Sequence[bytes], names: Mapping[bytes, str] = NOBODY) -> Grid:
    """The grid of a version, from the boxes of all shards of its publisher and of all that are to read it.

    Raises `LayoutMismatch` if the publisher's shards do not cover every tensor, or mean different ones by one name, and
    `UsageError` if what one of them has said is no table of boxes. `names` has a worker that said each, for messages.
    What a reader has said that is no table of boxes makes no cuts: nobody else is to suffer for that.
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
    if len(grid.cuts) > MOST_CUTS:
        _log.warning("all readers are left out of account: of %d cuts, %d are the limit", len(grid.cuts), MOST_CUTS)
        return grid_of(tables)
    return grid


def decoded(boxes: bytes, who: str) -> BoxTable:
    """As `decode_table`, with who said them in the error."""
    try:
        return decode_table(boxes)
    except UsageError as error:
        raise UsageError(f"the boxes of {who}: {error}") from error


def tiled_version(registration: Registration, grid: Grid, chunk_bytes: int, *, metadata: bytes = b"") -> TiledVersion:
    """What is registered now. Blocks; nobody may write to the tensors meanwhile.

    Raises `UsageError` naming tensors whose memory was freed.
    """
    tiles = tiles_of(_table(registration), grid)
    return TiledVersion(
        publish_cut(registration, tiles, metadata=metadata), tiles, registration.size_bytes, chunk_bytes
    )


def _table(registration: Registration) -> BoxTable:
    if registration.table is None:
        raise UsageError("these tensors were registered without boxes")
    return registration.table


# --- reading ----------------------------------------------------------------------------------------------------------


class Offer:
    """What one source has shown of itself. Looked at once, in a thread."""

    def __init__(self, name: str, root: Digest, shown: bytes) -> None:
        self.name = name
        self._root = root
        self._shown = shown

    @cached_property
    def cut(self) -> Cut:
        """Raises `CorruptTransfer` if it is not what the server named."""
        try:
            return decode_cut(self._shown, self._root)
        except CorruptTransfer as error:
            raise CorruptTransfer(f"{self.name}: {error}") from error

    @cached_property
    def source(self) -> Source:
        return Source(self.name, self.cut.table, self.cut.manifest)

    @cached_property
    def is_whole(self) -> bool:
        """Others can read all that it has: it is cut as was known when the version was published."""
        return bool(tiles_of(self.cut.table, self.cut.grid).is_whole.all())


def version_from(registration: Registration, offers: Sequence[Offer], chunk_bytes: int) -> TiledVersion:
    """What the registered tensors will be once they are filled from these sources. Blocks; nothing is written.

    Raises `LayoutMismatch` that names a tensor and what is wrong with it: a part that nobody has, another shape or
    dtype, memory that two of its boxes share; `VersionConflict` for a part that two sources have with different
    content; `SourceLost` where others may have what these cannot show.
    """
    registration.check_fillable()
    table, cuts = _table(registration), [offer.cut for offer in offers]
    grid, digest = cuts[0].grid, cuts[0].manifest.grid
    for offer, cut in zip(offers, cuts, strict=True):
        if cut.manifest.grid != digest:
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
        raise SourceLost(f"{text}: {error}", hint="others who hold it can; or publish the next version") from error
    return TiledVersion(Cut(table, grid, manifest), tiles, registration.size_bytes, chunk_bytes)


def _wanted(table: BoxTable, grid: Grid, spans: Spans, offers: Sequence[Offer]) -> Tiles:
    """The tiles of a reader. Not made where the grid has far more of them than the sources have digests for."""
    shown = sum(offer.cut.manifest.tile_count for offer in offers)
    if spans.tile_count > max(FEW_TILES, COPIES * shown):
        names = ", ".join(offer.name for offer in offers)
        raise LayoutMismatch(f"{spans.tile_count} tiles are wanted, and {names} have {shown} of that version")
    return tiles_of(table, grid, spans)
