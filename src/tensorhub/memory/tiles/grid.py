"""The cuts that all layouts of a version share: for each global tensor and dimension a sorted list of places.

Rules:
1. Every boundary of every box of every layout is a cut. So a box consists of whole tiles, and a tile lies in a box
   wholly or not at all.
2. A box whose memory is longer than 4 MiB is cut further, along the dimension that is outermost *in its memory*, at
   multiples of a power of two counted from the tensor's beginning. So each layout can be gone through in runs of whole
   tiles of at most 4 MiB, also one that stores transposed; and the cuts of layouts that are cut differently fall
   together.
3. Tensors that are tied in any layout have the same cuts, so that their tiles can be compared.
4. Where the cuts of all layouts together would make more than 1,024 tiles of a tensor, and these smaller than 16 KiB on
   average, only the publisher's own cuts are taken. Readers of other layouts then read tiles that cover their boxes.
5. A grid follows from the set of layouts, in whatever order they come.

A grid is fixed when a version is published. A layout that comes later may have boundaries that are no cuts.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...core.boxes import MAX_EXTENT, GlobalTensor, refuse_difference
from ...core.errors import UsageError
from .arrays import EMPTY, Ints, ints, ranks_of, sorted_once, starts_of, volumes
from .table import BoxTable, items_of

BAND_BYTES = 4 << 20  # of a layout's own memory in one run of whole tiles: one chunk
FEWEST_TILES = 1024  # of one tensor, before rule 4
SMALLEST_TILE_BYTES = 16 << 10  # on average: below that, digests and rows cost more than the bytes
MOST_BANDS = 1 << 23  # cuts of one shard of a reader by rule 2: 8 times those of 2 TB in runs of 2 MiB
RECENT = 8  # tables of tensors that are known by identity
BITS_OF_PLACE = MAX_EXTENT.bit_length()  # 41; the other 22 bits say which tensor and dimension
MAX_SEGMENTS = 1 << (63 - BITS_OF_PLACE)  # dimensions of all tensors together


@dataclass(frozen=True, eq=False, repr=False)
class Grid:
    """Cuts of all tensors of a version. Tensors with the same shape and cuts are of one kind, which is kept once."""

    tensors: tuple[GlobalTensor, ...]  # sorted by name
    kind: Ints  # [tensors]
    cuts: Ints  # of one kind after the other, and of one dimension after the other
    starts: Ints  # [kinds, dimensions] where its cuts begin in `cuts`
    cells: Ints  # [kinds, dimensions] intervals between cuts

    def __repr__(self) -> str:
        return f"<Grid of {self.tile_count} tiles of {len(self.tensors)} tensors>"

    @property
    def dimensions(self) -> int:
        return int(self.cells.shape[1])

    @cached_property
    def index(self) -> dict[str, int]:
        """Each name's place in `tensors`."""
        return {tensor.name: at for at, tensor in enumerate(self.tensors)}

    @cached_property
    def recent(self) -> deque[tuple[tuple[GlobalTensor, ...], Ints]]:
        """Tensors of tables that were looked up, and their numbers: most shards of a layout have the same ones."""
        return deque(maxlen=RECENT)

    @cached_property
    def first_tile(self) -> Ints:
        """[tensors + 1] of each tensor's first tile: tiles are numbered through, row-major in each tensor."""
        return starts_of(volumes(self.cells)[self.kind]) if len(self.tensors) else np.zeros(1, np.int64)

    @property
    def size_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors)

    @property
    def tile_count(self) -> int:
        return int(self.first_tile[-1])

    @cached_property
    def item(self) -> Ints:
        """[tensors] bytes of one element."""
        return items_of(self.tensors)

    @cached_property
    def _keys(self) -> Ints:
        """Each cut behind the number of its kind and dimension, so that one binary search serves for all."""
        counts = self.cells.ravel() + 1
        return (np.repeat(np.arange(len(counts)), counts) << BITS_OF_PLACE) | self.cuts

    def find(self, kind: Ints, d: int, places: Ints, *, after: bool) -> Ints:
        """The last cut at or before each place, or with `after` the first one at or after it, counted from 0."""
        segment = kind * self.dimensions + d
        key = (segment << BITS_OF_PLACE) | places
        found = np.searchsorted(self._keys, key, "left" if after else "right")
        number: Ints = (found if after else found - 1) - self.starts[kind, d]
        return number

    def cut(self, kind: Ints, d: int, number: Ints) -> Ints:
        """Where the cuts with these numbers are."""
        found: Ints = self.cuts[self.starts[kind, d] + number]
        return found


def grid_of(publisher: Iterable[BoxTable], others: Iterable[BoxTable] = ()) -> Grid:
    """The grid of a version that is published as `publisher` says and read as `others` say: all shards of each layout.

    Raises `LayoutMismatch` if two shards of the publisher mean different tensors by one name. What the publisher has
    not, or has in another shape or dtype, makes no cuts: its reader is told so, and not the publisher.
    """
    cutting = Cutting()
    for table in publisher:
        cutting.add_publisher(table)
    for table in others:
        cutting.add_other(table)
    return cutting.grid()


class Cutting:
    """A grid that is being made: tables go in one after another, the publisher's first, and none is kept."""

    def __init__(self, band_bytes: int = BAND_BYTES, fewest_tiles: int = FEWEST_TILES) -> None:
        self._band_bytes = band_bytes
        self._fewest_tiles = fewest_tiles
        self._tensors: list[GlobalTensor] = []
        self._index: dict[str, int] = {}
        self._bases: list[int] = [0]  # the number of each tensor's first segment: one for each of its dimensions
        self._published = _Keys()
        self._all = _Keys()
        self._ties: dict[tuple[int, int], None] = {}
        self._latest: tuple[GlobalTensor, ...] = ()
        self._latest_numbers = EMPTY

    def add_publisher(self, table: BoxTable) -> None:
        """One shard of the layout that is published."""
        if self._latest is not table.tensors:
            self._learn(table.tensors)
        keys = self._keys_of(table)
        self._published.add(keys)
        self._all.add(keys)

    def add_other(self, table: BoxTable) -> None:
        """One shard of a layout that is to be read into.

        Raises `UsageError`, and takes nothing from it, if it asks for more cuts than any memory has chunks: its strides
        are what it says they are, and nobody knows its memory.
        """
        self._all.add(self._keys_of(table, MOST_BANDS))

    def grid(self) -> Grid:
        """The grid of all that has been added."""
        bases = ints(self._bases)
        root = self._roots()
        every, published = (self._folded(keys.merged(), root, bases) for keys in (self._all, self._published))
        in_root = np.arange(bases[-1]) + np.repeat(bases[root] - bases[:-1], np.diff(bases))  # of each segment
        counts, own_counts = (
            np.bincount(keys >> BITS_OF_PLACE, minlength=bases[-1])[in_root] - 1 for keys in (every, published)
        )
        item = items_of(self._tensors)
        has_own = np.zeros(len(root), np.bool_)
        if len(root):
            shapes = ints([extent for tensor in self._tensors for extent in (tensor.shape or (1,))])
            sizes = np.multiply.reduceat(shapes, bases[:-1]) * item
            cells = np.multiply.reduceat(counts.astype(np.float64), bases[:-1])  # whose product may pass 64 bits
            has_own = cells > np.maximum(self._fewest_tiles, sizes / SMALLEST_TILE_BYTES)
        takes_own = np.repeat(has_own, np.diff(bases))
        # Not before it is known who takes which: a group that ties many tensors has all its cuts in each of them.
        keys = np.concatenate(
            [
                _spread(every, root, bases, np.flatnonzero(~has_own)),
                _spread(published, root, bases, np.flatnonzero(has_own)),
            ]
        )
        keys.sort()
        return _grid_of_keys(self._tensors, bases, root, keys, np.where(takes_own, own_counts, counts))

    def _learn(self, tensors: Iterable[GlobalTensor]) -> None:
        for tensor in tensors:
            known = self._index.setdefault(tensor.name, len(self._tensors))
            if known < len(self._tensors):
                refuse_difference(self._tensors[known], tensor, here="in one shard", there="in another")
                continue
            self._tensors.append(tensor)
            self._bases.append(self._bases[-1] + max(1, len(tensor.shape)))
        self._latest = ()
        if self._bases[-1] >= MAX_SEGMENTS:
            raise UsageError(f"{len(self._tensors)} tensors have {self._bases[-1]} dimensions together: too many")

    def _keys_of(self, table: BoxTable, most_bands: int = MAX_EXTENT) -> Ints:
        """Boundaries and bands of a table, as keys of segment and place."""
        known = self._known(table)
        rows = np.flatnonzero(known[table.tensor] >= 0) if len(table) else EMPTY
        if not len(rows):
            return EMPTY
        tensor = known[table.tensor[rows]]
        at, stop = table.at[rows], table.at[rows] + table.size[rows]
        bases = ints(self._bases)
        first, dimensions = bases[tensor], bases[tensor + 1] - bases[tensor]
        keys = []
        steps = self._steps(table, rows)
        for d in range(table.dimensions):
            own = d - (table.dimensions - dimensions)  # the tensor's own dimension; below 0 where it was filled up
            segment = (first + own) << BITS_OF_PLACE
            is_own = own >= 0
            keys += [segment[is_own] | at[is_own, d], segment[is_own] | stop[is_own, d]]
            cut = np.flatnonzero(is_own & (steps[:, d] > 0))
            step = steps[cut, d]
            earliest = at[cut, d] // step + 1
            count = np.maximum(0, -(-stop[cut, d] // step) - earliest)
            most_bands -= min(MAX_EXTENT, int(count.sum(dtype=np.float64)))
            if most_bands < 0:
                raise UsageError(f"{len(rows)} boxes are to be cut {MOST_BANDS} times and more: that is the limit")
            places = (np.repeat(earliest, count) + ranks_of(count)) * np.repeat(step, count)
            keys.append(np.repeat(segment[cut], count) | places)
        for row in np.flatnonzero(table.alias_of != np.arange(len(table))).tolist():
            one, other = int(known[table.tensor[row]]), int(known[table.tensor[table.alias_of[row]]])
            if one >= 0 and other >= 0:
                self._ties[one, other] = None
        return sorted_once(*keys)

    def _known(self, table: BoxTable) -> Ints:
        """The number of each of a table's tensors here; -1 where it is not just that tensor."""
        if self._latest is not table.tensors:
            found = [self._index.get(tensor.name, -1) for tensor in table.tensors]
            pairs = zip(found, table.tensors, strict=True)
            self._latest_numbers = ints([n if n >= 0 and self._tensors[n] == one else -1 for n, one in pairs])
            self._latest = table.tensors
        return self._latest_numbers

    def _steps(self, table: BoxTable, rows: Ints) -> Ints:
        """The steps at which each box is cut further; 0 for dimensions in which it is not. Rule 2."""
        steps = np.zeros((len(rows), table.dimensions), np.int64)
        every = np.arange(len(rows))
        is_open = table.spans[rows] > self._band_bytes
        order = np.argsort(-table.strides[rows], axis=1, kind="stable")
        for outer in range(table.dimensions):
            d = order[:, outer]
            stride = table.strides[rows, d]
            fitting = self._band_bytes // np.maximum(stride, 1)
            is_cut = is_open & (stride > 0)
            steps[every[is_cut], d[is_cut]] = _power_below(np.maximum(fitting[is_cut], 1))
            is_open &= fitting < 1  # one step of this dimension is too long by itself: the next one is cut as well
        return steps

    def _roots(self) -> Ints:
        """For each tensor the first one that it is tied to."""
        root = list(range(len(self._tensors)))

        def find(n: int) -> int:
            while root[n] != n:
                root[n] = n = root[root[n]]
            return n

        for one, other in self._ties:
            a, b = find(one), find(other)
            root[max(a, b)] = min(a, b)
        return ints([find(n) for n in range(len(root))])

    def _folded(self, keys: Ints, root: Ints, bases: Ints) -> Ints:
        """The keys of the first tensors of all groups: their own, those of whoever is tied to them, and both ends."""
        shapes = ints([extent for tensor in self._tensors for extent in (tensor.shape or (1,))])
        segments = np.arange(bases[-1]) << BITS_OF_PLACE
        keys = np.concatenate([keys, segments, segments | shapes])
        if (root != np.arange(len(root))).any():
            first = np.repeat(bases[root] - bases[:-1], np.diff(bases))  # tied tensors have one shape
            keys += first[keys >> BITS_OF_PLACE] << BITS_OF_PLACE
        return sorted_once(keys)


class _Keys:
    """A growing set of keys, merged when there are twice as many as after the last time."""

    def __init__(self) -> None:
        self._parts: list[Ints] = []
        self._pending = self._merged = 0

    def add(self, keys: Ints) -> None:
        self._parts.append(keys)
        self._pending += len(keys)
        if self._pending > max(1 << 20, self._merged):
            self.merged()

    def merged(self) -> Ints:
        found = sorted_once(*self._parts)
        self._parts, self._merged, self._pending = [found], len(found), 0
        return found


def _spread(folded: Ints, root: Ints, bases: Ints, tensors: Ints) -> Ints:
    """Those keys for each of the tensors, as its first one has them."""
    order = tensors[np.argsort(root[tensors], kind="stable")]
    firsts = np.searchsorted(root[order], np.arange(len(root) + 1))
    copies = np.repeat(np.diff(firsts), np.diff(bases))[folded >> BITS_OF_PLACE]
    if (root == np.arange(len(root))).all():
        once: Ints = folded[copies > 0]
        return once
    group = np.repeat(np.arange(len(root)), np.diff(bases))[folded >> BITS_OF_PLACE]
    member = order[np.repeat(firsts[group], copies) + ranks_of(copies)]
    shift = (bases[member] - np.repeat(bases[group], copies)) << BITS_OF_PLACE
    found: Ints = np.repeat(folded, copies) + shift
    return found


def _power_below(numbers: Ints) -> Ints:
    """The largest power of two that is not above each number."""
    return np.int64(1) << (np.frexp(numbers.astype(np.float64))[1].astype(np.int64) - 1)


def _grid_of_keys(tensors: Sequence[GlobalTensor], bases: Ints, root: Ints, keys: Ints, counts: Ints) -> Grid:
    """Sort by name, fill up dimensions, and keep what is the same for several tensors once."""
    dimensions = int(np.diff(bases).max()) if len(tensors) else 1
    places = keys & ((1 << BITS_OF_PLACE) - 1)
    ends = starts_of(counts + 1)
    kinds: dict[tuple[bytes, ...], int] = {}
    filling = [ints([0, 1])] * dimensions
    kind: list[int] = []
    cuts: list[Ints] = []
    order = sorted(range(len(tensors)), key=lambda n: tensors[n].name)
    for n in order:
        segments = range(int(bases[n]), int(bases[n + 1]))
        mine = [places[ends[segment] : ends[segment + 1]] for segment in segments]
        mine = filling[: dimensions - len(mine)] + mine
        number = kinds.setdefault(tuple(part.tobytes() for part in mine), len(kinds))
        kind.append(number)
        if number * dimensions == len(cuts):
            cuts += mine
    lengths = ints([len(part) for part in cuts])
    starts = starts_of(lengths)[:-1].reshape(-1, dimensions)
    flat = np.concatenate(cuts) if cuts else EMPTY
    return Grid(tuple(tensors[n] for n in order), ints(kind), flat, starts, (lengths - 1).reshape(-1, dimensions))
