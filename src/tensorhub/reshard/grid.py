"""The grid of tiles that all layouts of a version share, and the tiles of one shard."""

from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..protocol.errors import LayoutMismatch, UsageError
from ..protocol.layout import MAX_EXTENT, Box, GlobalTensor, boxes_of, part_text, refuse_difference
from ..protocol.manifest import Layout, TensorSpec, item_bytes, names_difference

# --- Small operations on integer arrays.


Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
EMPTY: Ints = np.zeros(0, np.int64)


def ints(values: Sequence[int]) -> Ints:
    """Joins the numbers into one array."""
    return np.array(values, np.int64)


def sorted_once(*parts: Ints) -> Ints:
    """All numbers, sorted, each once. numpy's own `unique` hashes, which takes twenty times as long."""
    found = np.concatenate(parts) if parts else EMPTY.copy()
    found.sort()
    is_new = np.ones(len(found), np.bool_)
    np.not_equal(found[1:], found[:-1], out=is_new[1:])
    return found[is_new]


def starts_of(counts: Ints) -> Ints:
    """Where each of several runs begins, and behind the last one where it ends: [2, 3] is [0, 2, 5]."""
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def ranks_of(counts: Ints) -> Ints:
    """The position of each element in its run: [2, 3] is [0, 1, 0, 1, 2]."""
    starts = starts_of(counts)
    return np.arange(starts[-1], dtype=np.int64) - np.repeat(starts[:-1], counts)


def ranges_of(first: Ints, last: Ints, picked: Ints | None = None) -> Ints:
    """The numbers of each range [first, last), or of those that are picked, one after another."""
    if picked is not None:
        first, last = first[picked], last[picked]
    lengths = last - first
    found: Ints = np.repeat(first, lengths) + ranks_of(lengths)
    return found


def volumes(sizes: Ints) -> Ints:
    """The number of elements of each row's shape."""
    found: Ints = np.prod(sizes, axis=1, dtype=np.int64)
    return found


def spans(size: Ints, strides: Ints, item: Ints) -> Ints:
    """For each block of elements the bytes from its first to behind its last."""
    found: Ints = ((size - 1) * strides).sum(axis=1) + item
    return found


def row_major(extents: Ints) -> Ints:
    """For each row's shape, the steps with which an index is counted, the last dimension fastest."""
    steps = np.ones_like(extents)
    for d in range(extents.shape[1] - 2, -1, -1):
        steps[:, d] = steps[:, d + 1] * extents[:, d + 1]
    return steps


def words(numbers: Ints | Iterable[int]) -> "array[int]":
    """The numbers as the array of 64-bit integers that a transport takes."""
    return array("Q", numbers.astype(np.int64).tobytes() if isinstance(numbers, np.ndarray) else numbers)


def group_starts(*columns: Ints) -> Ints:
    """In sorted rows, where each run of equal rows begins."""
    count = len(columns[0])
    if count == 0:
        return EMPTY
    is_first = np.zeros(count, np.bool_)
    is_first[0] = True
    for column in columns:
        is_first[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(is_first)


# --- The boxes of one shard as columns, one row for each box.
#
# Element (i, j, …) of a box lies at `offset + i * strides[0] + j * strides[1] + …` of the stream, in bytes. Shapes are
# filled up on the left to one number of dimensions. Rows are sorted by place, then shape, strides, part and name. Boxes
# without elements are left out. Boxes with the same memory that are the same part of tensors of one shape and dtype are
# *aliases* (tied weights): each names the first of them in `alias_of`. Two shards have equal layouts exactly if their
# tables are equal.


@dataclass(frozen=True, eq=False, repr=False)
class BoxTable:
    """All boxes of one shard. `at` and `size` are counted in elements, `offset` and `strides` in bytes."""

    tensors: tuple[GlobalTensor, ...]  # sorted by name
    size_bytes: int  # of the shard's stream
    tensor: Ints  # [boxes] index into `tensors`
    offset: Ints  # [boxes]
    at: Ints  # [boxes, dimensions]
    size: Ints
    strides: Ints  # 0 where the size is 1
    item: Ints  # [tensors] bytes of one element
    alias_of: Ints  # [boxes] the first row with the same memory; its own where there is none

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def dimensions(self) -> int:
        return int(self.at.shape[1])

    @property
    def bytes_of_boxes(self) -> Ints:
        """[boxes]"""
        return volumes(self.size) * self.item[self.tensor]

    @property
    def spans(self) -> Ints:
        """[boxes] from the first byte of each to behind its last."""
        return spans(self.size, self.strides, self.item[self.tensor])

    def text(self, row: int) -> str:
        """A box in words: name and part."""
        tensor = self.tensors[self.tensor[row]]
        return f"{tensor.name!r}{self.text_of_part(tensor, self.at[row], self.size[row])}"

    @staticmethod
    def text_of_part(tensor: GlobalTensor, at: Ints, size: Ints) -> str:
        """Part of a tensor, without the dimensions that were filled up."""
        count = len(tensor.shape)
        return part_text(at[len(at) - count :].tolist(), size[len(size) - count :].tolist())


def padded_shapes(tensors: Sequence[GlobalTensor], dimensions: int) -> Ints:
    """[tensors, dimensions] their shapes, filled up with 1 on the left."""
    shapes = [(1,) * (dimensions - len(tensor.shape)) + tensor.shape for tensor in tensors]
    return np.array(shapes, np.int64).reshape(len(tensors), dimensions)


def table_of(layout: Layout, boxes: Mapping[str, Sequence[Box]] | None = None) -> BoxTable:
    """The boxes of registered tensors. Raises `UsageError`, naming tensor and part, for boxes that cannot be."""
    return table_of_boxes(boxes_of(layout, boxes), layout.size_bytes)


def table_of_boxes(placed: Sequence[tuple[TensorSpec, Box]], size_bytes: int) -> BoxTable:
    """From complete boxes beside the tensors that they lie in."""
    known = {box.name: GlobalTensor(box.name, box.dtype, box.global_shape) for _, box in placed}
    tensors = tuple(known[name] for name in sorted(known))
    index = {tensor.name: at for at, tensor in enumerate(tensors)}
    dimensions = max((len(tensor.shape) for tensor in tensors), default=1) or 1
    rows: list[tuple[int, ...]] = []
    for spec, box in placed:
        assert box.strides is not None, "boxes are complete"
        if 0 in box.size:
            continue
        item = item_bytes(box.dtype)
        missing = dimensions - len(box.at)
        steps = (stride * item if count > 1 else 0 for stride, count in zip(box.strides, box.size, strict=True))
        zeros, ones = (0,) * missing, (1,) * missing
        rows.append(
            (index[box.name], spec.offset_bytes + box.offset * item, *zeros, *box.at, *ones, *box.size, *zeros, *steps)
        )
    columns = np.array(rows, np.int64).reshape(len(rows), 2 + 3 * dimensions)
    return table_of_columns(tensors, size_bytes, columns)


def items_of(tensors: Sequence[GlobalTensor]) -> Ints:
    """[tensors] bytes of one element."""
    known: dict[str, int] = {}
    return ints([known.get(one.dtype) or known.setdefault(one.dtype, item_bytes(one.dtype)) for one in tensors])


def table_of_columns(
    tensors: tuple[GlobalTensor, ...], size_bytes: int, columns: Ints, item: Ints | None = None
) -> BoxTable:
    """From rows of tensor, offset, `at`, `size` and `strides`, in any order."""
    dimensions = (columns.shape[1] - 2) // 3
    tensor, offset, rest = columns[:, 0], columns[:, 1], columns[:, 2:]
    at, size, strides = (rest[:, n * dimensions : (n + 1) * dimensions] for n in range(3))
    order = alias_of = np.arange(len(columns))
    if not (offset[1:] > offset[:-1]).all():  # as of a table that travels, nearly always
        order, alias_of = _order_and_aliases(tensors, tensor, offset, at, size, strides)
    sorted_columns = (np.ascontiguousarray(column[order]) for column in (tensor, offset, at, size, strides))
    tensor, offset, at, size, strides = sorted_columns
    if item is None:
        item = items_of(tensors)
    return BoxTable(tensors, size_bytes, tensor, offset, at, size, strides, item, alias_of)


def _order_and_aliases(
    tensors: tuple[GlobalTensor, ...], tensor: Ints, offset: Ints, at: Ints, size: Ints, strides: Ints
) -> tuple[Ints, Ints]:
    """Rules 1 and 2."""
    kinds: dict[tuple[str, tuple[int, ...]], int] = {}
    kind = ints([kinds.setdefault((one.dtype, one.shape), len(kinds)) for one in tensors])[tensor]
    same = [offset, *(column[:, d] for d in range(at.shape[1]) for column in (size, strides, at)), kind]
    order = np.lexsort([tensor, *reversed(same)])
    alias_of = np.zeros(len(order), np.int64)
    firsts = group_starts(*(column[order] for column in same))
    alias_of[firsts] = firsts
    return order, np.maximum.accumulate(alias_of)


# --- The cuts that all layouts of a version share: for each global tensor and dimension a sorted list of places.
#
# 1. Every boundary of every box of every layout is a cut. So a box consists of whole tiles.
# 2. A box whose memory is longer than 4 MiB is cut further, along the dimension that is outermost *in its memory*, at
#    multiples of a power of two. So each layout can be gone through in runs of whole tiles of at most 4 MiB.
# 3. Tensors that are tied in any layout have the same cuts.
# 4. Where all cuts would make more than 1,024 tiles of a tensor, smaller than 16 KiB on average, only the publisher's
#    cuts are taken. Readers of other layouts then read tiles that cover their boxes.
# 5. A grid follows from the set of layouts, in any order. It is fixed when a version is published.


BAND_BYTES = 4 << 20  # of a layout's own memory in one run of whole tiles: one chunk
FEWEST_TILES = 1024  # of one tensor, before rule 4
SMALLEST_TILE_BYTES = 16 << 10  # on average: below that, digests and rows cost more than the bytes
MAX_BANDS = 1 << 23  # cuts of one shard of a reader by rule 2: 8 times those of 2 TB in runs of 2 MiB
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
        """The size of all tensors together."""
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
        are what it says they are, and its memory is unknown.
        """
        self._all.add(self._keys_of(table, MAX_BANDS))

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
        # Not before it is known which tensors take which: a group of many tied tensors has all its cuts in each.
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

    def _keys_of(self, table: BoxTable, max_bands: int = MAX_EXTENT) -> Ints:
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
            max_bands -= min(MAX_EXTENT, int(count.sum(dtype=np.float64)))
            if max_bands < 0:
                raise UsageError(f"{len(rows)} boxes are to be cut {MAX_BANDS} times and more: that is the limit")
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
        """The keys of the first tensors of all groups: their own, those of tensors tied to them, and both ends."""
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


# --- The tiles of one shard. `slot` numbers them box after box, row-major within a box, as digests are in its manifest.
#
# Where a boundary of a box is no cut, because the layout came later, tiles there lie in the box in part (`is_whole`).


NAMES_SHOWN = 3


@dataclass(frozen=True, eq=False, repr=False)
class Spans:
    """For each box of a table the range of cells that covers it, in each dimension."""

    tensor: Ints  # [boxes] the tensor's number in the grid
    kind: Ints
    low: Ints  # [boxes, dimensions of the grid] the first cell
    count: Ints  # how many cells
    first_slot: Ints  # [boxes + 1]
    pad: int  # dimensions that the grid has more than the table

    @property
    def tile_count(self) -> int:
        return int(self.first_slot[-1])


@dataclass(frozen=True, eq=False, repr=False)
class Tiles:
    """Tiles of a table, or those that were asked for. Places and strides in bytes, counts in elements."""

    table: BoxTable
    grid: Grid
    number: Ints  # [tiles] in the grid: equal for the same tile in all layouts
    slot: Ints  # in the shard's own manifest
    box: Ints  # row of the table
    start: Ints  # [tiles, dimensions] in the global tensor: of what lies in the box
    size: Ints
    offset: Ints  # [tiles] of its first byte in the shard's stream
    is_whole: Bools

    def __len__(self) -> int:
        return len(self.number)

    @property
    def pad(self) -> int:
        return self.grid.dimensions - self.table.dimensions

    @property
    def strides(self) -> Ints:
        """[tiles, dimensions]"""
        return padded(self.table.strides, self.pad, 0)[self.box]

    @property
    def item(self) -> Ints:
        """[tiles] bytes of one element."""
        return self.table.item[self.table.tensor[self.box]]

    @property
    def size_bytes(self) -> Ints:
        """[tiles] of what lies in the box."""
        return volumes(self.size) * self.item

    def only(self, picked: Ints) -> "Tiles":
        """Returns the rows at these positions."""
        number, slot, box, start, size, offset = (
            column[picked] for column in (self.number, self.slot, self.box, self.start, self.size, self.offset)
        )
        return Tiles(self.table, self.grid, number, slot, box, start, size, offset, self.is_whole[picked])

    def cell(self) -> tuple[Ints, Ints]:
        """Start and size of each whole tile in the global tensor."""
        return cell_of(self.grid, self.number)

    def text(self, tile: int) -> str:
        """A tile in words: name and part."""
        tensor = self.grid.tensors[tensor_of(self.grid, self.number[tile : tile + 1])[0]]
        return f"{tensor.name!r}{BoxTable.text_of_part(tensor, self.start[tile], self.size[tile])}"


def padded(columns: Ints, pad: int, value: int) -> Ints:
    """Dimensions filled up on the left."""
    return np.pad(columns, ((0, 0), (pad, 0)), constant_values=value) if pad else columns


def tensor_of(grid: Grid, number: Ints) -> Ints:
    """The tensor that each tile belongs to."""
    return np.searchsorted(grid.first_tile, number, "right") - 1


def cell_of(grid: Grid, number: Ints) -> tuple[Ints, Ints]:
    """Start and size of tiles in their global tensors."""
    tensor = tensor_of(grid, number)
    kind = grid.kind[tensor]
    rank = number - grid.first_tile[tensor]
    steps = row_major(grid.cells)[kind]
    start = np.empty((len(number), grid.dimensions), np.int64)
    size = np.empty_like(start)
    for d in range(grid.dimensions):
        cell = rank // steps[:, d] % np.maximum(grid.cells[kind, d], 1)
        start[:, d] = grid.cut(kind, d, cell)
        size[:, d] = grid.cut(kind, d, cell + 1) - start[:, d]
    return start, size


def numbers_in(table: BoxTable, grid: Grid, here: str, there: str) -> Ints:
    """The number in the grid of each of a table's tensors. Raises `LayoutMismatch` for one that is not there."""
    for tensors, numbers in grid.recent:
        if tensors is table.tensors:
            return numbers
    found = [grid.index.get(tensor.name, -1) for tensor in table.tensors]
    missing = [tensor for tensor, n in zip(table.tensors, found, strict=True) if n < 0]
    if missing:
        more = f", nor {len(missing) - 1} others" if len(missing) > 1 else ""
        names = [tensor.name for tensor in table.tensors]
        said, hint = names_difference(names, grid.index, here=here, there=there)
        raise LayoutMismatch(
            f"tensor {missing[0]} exists {here}, and {there} neither whole nor in part{more}{said}",
            hint=hint or "the boxes of all shards of a replica cover the same tensors on both sides",
        )
    for tensor, n in zip(table.tensors, found, strict=True):
        if grid.tensors[n] != tensor:
            refuse_difference(tensor, grid.tensors[n], here=here, there=there)
    grid.recent.append((table.tensors, ints(found)))
    return grid.recent[-1][1]


def spans_of(table: BoxTable, grid: Grid, *, here: str = "here", there: str = "in what was published") -> Spans:
    """Where the boxes of a table are in the grid. Raises `LayoutMismatch`, naming a tensor that is nowhere."""
    tensor = numbers_in(table, grid, here, there)[table.tensor] if len(table.tensors) else table.tensor
    pad = grid.dimensions - table.dimensions
    if pad < 0:  # dimensions that only tensors without elements have
        raise LayoutMismatch(f"{here} are tensors of {table.dimensions} dimensions, {there} of {grid.dimensions}")
    kind = grid.kind[tensor]
    at, size = padded(table.at, pad, 0), padded(table.size, pad, 1)
    low, high = np.empty_like(at), np.empty_like(at)
    for d in range(grid.dimensions):
        low[:, d] = grid.find(kind, d, at[:, d], after=False)
        high[:, d] = grid.find(kind, d, at[:, d] + size[:, d], after=True)
    return Spans(tensor, kind, low, high - low, starts_of(volumes(high - low)), pad)


def tiles_of(table: BoxTable, grid: Grid, spans: Spans | None = None, within: "Window | None" = None) -> Tiles:
    """The tiles of a table, in the order of their slots; with `within` only those in that window."""
    spans = spans or spans_of(table, grid)
    low, count, rows = spans.low, spans.count, np.arange(len(table))
    if within is not None:
        first = np.maximum(low, within.low[spans.tensor])
        count = np.maximum(0, np.minimum(low + count, within.high[spans.tensor]) - first)
        rows = np.flatnonzero((count > 0).all(axis=1))
        low, count = first[rows], count[rows]
    counts = volumes(count)
    pick, rank = np.repeat(np.arange(len(rows)), counts), ranks_of(counts)
    box = rows[pick]
    kind, tensor = spans.kind[box], spans.tensor[box]
    inner, outer, whole = row_major(count), row_major(spans.count), row_major(grid.cells)
    number, slot = grid.first_tile[tensor], spans.first_slot[box]
    offset, is_whole = table.offset[box], np.ones(len(box), np.bool_)
    start, size = (np.empty((len(box), grid.dimensions), np.int64) for _ in range(2))
    for d in range(grid.dimensions):
        cell = low[pick, d] + rank // inner[pick, d] % count[pick, d]
        number += cell * whole[kind, d]
        slot += (cell - spans.low[box, d]) * outer[box, d]
        begin, end = grid.cut(kind, d, cell), grid.cut(kind, d, cell + 1)
        if d < spans.pad:
            start[:, d], size[:, d] = begin, end - begin
            continue
        at = table.at[box, d - spans.pad]
        start[:, d] = np.maximum(begin, at)
        size[:, d] = np.minimum(end, at + table.size[box, d - spans.pad]) - start[:, d]
        offset += (start[:, d] - at) * table.strides[box, d - spans.pad]
        is_whole &= size[:, d] == end - begin
    return Tiles(table, grid, number, slot, box, start, size, offset, is_whole)


@dataclass(frozen=True, eq=False)
class Window:
    """For each tensor of a grid the range of cells, in each dimension, that a reader wants. It may be empty."""

    low: Ints  # [tensors, dimensions]
    high: Ints


def window_of(grid: Grid, spans: Spans) -> Window:
    """The smallest window that has all cells of these boxes."""
    shape = (len(grid.tensors), grid.dimensions)
    low, high = np.full(shape, np.iinfo(np.int64).max), np.zeros(shape, np.int64)
    np.minimum.at(low, spans.tensor, spans.low)
    np.maximum.at(high, spans.tensor, spans.low + spans.count)
    return Window(low, high)
