"""Models cut at random: boxes in registered arrays, and what plain indexing says belongs there.

A part is put into memory by numpy alone: an array is made, with padding, neighbours or another order of dimensions,
and a view of it is what the box describes. So the expected content needs no arithmetic of ours.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import msgspec
import numpy as np

from tensorhub.memory.registration import Registration, register
from tensorhub.protocol.layout import Box
from tensorhub.protocol.manifest import TileManifest
from tensorhub.reshard.grid import BoxTable, Tiles, table_of
from tensorhub.reshard.plan import Source
from tensorhub.reshard.read import Across
from tensorhub.reshard.wire import TiledShard
from tensorhub.transport.ranges import gather

DTYPES = ("uint8", "int16", "float32", "int64")
Model = dict[str, np.ndarray]
Part = tuple[tuple[int, ...], tuple[int, ...]]  # at, size


@dataclass
class Shard:
    """One shard of a layout: its arrays, its boxes, and the view of each box."""

    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    boxes: dict[str, list[Box]] = field(default_factory=dict)
    views: list[tuple[Box, np.ndarray]] = field(default_factory=list)
    registration: Registration | None = None
    table: BoxTable | None = None

    def finish(self) -> "Shard":
        """Register, and make the table."""
        if not self.arrays:
            self.add_array("nothing", np.zeros(3, np.uint8), [])
        self.registration = register(self.arrays)
        self.table = table_of(self.registration.layout, self.boxes)
        return self

    def add_array(
        self, name: str, array: np.ndarray, placed: list[tuple[str, tuple[int, ...], Part, np.ndarray]]
    ) -> None:
        """An array, and (global name, global shape, part, view of the array in the global order) for each box."""
        self.arrays[name] = array
        self.boxes[name] = []
        for global_name, global_shape, (at, size), view in placed:
            assert view.shape == size
            offset = (view.__array_interface__["data"][0] - array.__array_interface__["data"][0]) // array.itemsize
            strides = tuple(stride // array.itemsize for stride in view.strides)
            box = Box(global_name, global_shape, at, size, offset if view.size else 0, strides)
            self.boxes[name].append(box)
            self.views.append((box, view))

    def tie(self, name: str, other: str) -> None:
        """Say of each box of one tensor that it is the same part of another one too."""
        for its in self.boxes.values():
            its += [msgspec.structs.replace(box, name=other) for box in its if box.name == name]
        self.views += [(msgspec.structs.replace(box, name=other), view) for box, view in self.views if box.name == name]

    def has(self, name: str) -> bool:
        """Whether it has a part of that global tensor."""
        return any(box.name == name for box, _ in self.views)

    def fill(self, model: Model) -> None:
        """What plain indexing says belongs in each box."""
        for box, view in self.views:
            view[...] = part_of(model[box.name], (box.at, box.size))

    def spoil(self, chance: Random) -> None:
        """Other bytes everywhere."""
        for array in self.arrays.values():
            whole = array.reshape(-1).view(np.uint8)
            whole[...] = np.frombuffer(chance.randbytes(whole.size), np.uint8)

    def outside(self) -> list[np.ndarray]:
        """The bytes of each array that are in no box."""
        found = []
        for name, array in self.arrays.items():
            is_inside = np.zeros(array.size * array.itemsize, np.bool_).view(f"V{array.itemsize}")
            for box in self.boxes[name]:
                steps = tuple(stride * array.itemsize for stride in box.strides)
                ones = np.frombuffer(b"\1" * array.itemsize, is_inside.dtype)[0]
                np.lib.stride_tricks.as_strided(is_inside[box.offset :], box.size, steps)[...] = ones
            found.append(array.reshape(-1).view(np.uint8)[~is_inside.view(np.bool_)].copy())
        return found

    def wrong(self, model: Model) -> list[str]:
        """Boxes whose content is not what plain indexing says."""
        return [str(box) for box, view in self.views if not same(view, part_of(model[box.name], (box.at, box.size)))]


def part_of(array: np.ndarray, part: Part) -> np.ndarray:
    """Plain indexing."""
    return array[tuple(slice(start, start + count) for start, count in zip(*part, strict=True))]


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Bit for bit: no two NaN are equal otherwise."""
    return one.shape == other.shape and np.ascontiguousarray(one).tobytes() == np.ascontiguousarray(other).tobytes()


TIED = "head.weight"  # the same content as the first tensor, under another name


def draw_model(chance: Random, *, has_tie: bool = False) -> Model:
    """A few tensors of up to three dimensions."""
    model: Model = {}
    for index in range(chance.randint(1, 4)):
        shape = tuple(chance.choice((1, 2, 3, 5, 8, 11)) for _ in range(chance.choice((0, 1, 2, 2, 2, 3))))
        dtype = np.dtype(chance.choice(DTYPES))
        count = int(np.prod(shape, dtype=int))
        data = np.frombuffer(chance.randbytes(count * dtype.itemsize), dtype)
        model[f"layer/{index}.weight"] = data.reshape(shape)
    if has_tie:
        model[TIED] = model["layer/0.weight"]
    return model


def draw_layout(chance: Random, model: Model, shards: int) -> list[Shard]:
    """Every tensor cut into boxes, each given to one shard or more, and put into memory in some way."""
    made = [Shard() for _ in range(shards)]
    parts: list[list[tuple[str, tuple[int, ...], Part, np.dtype]]] = [[] for _ in made]
    is_tied = TIED in model and chance.random() < 0.5
    for name, array in model.items():
        if name == TIED and is_tied:
            continue  # lies in the other one's memory
        for part in draw_parts(chance, array.shape):
            holders = chance.sample(range(shards), chance.choice((1, 1, 1, min(2, shards))))
            holders += holders[: chance.choice((0, 0, 1))]  # twice on one shard
            for shard in holders:
                parts[shard].append((name, array.shape, part, array.dtype))
    for shard, mine in zip(made, parts, strict=True):
        chance.shuffle(mine)
        while mine:
            dtype = mine[0][3]
            group = [one for one in mine if one[3] == dtype][: chance.choice((1, 1, 2, 3))]
            mine = [one for one in mine if one not in group]
            place(chance, shard, f"local{len(shard.arrays)}", [one[:3] for one in group], dtype)
        if is_tied:
            shard.tie("layer/0.weight", TIED)
        shard.finish()
    return made


def draw_parts(chance: Random, shape: tuple[int, ...]) -> list[Part]:
    """The tensor cut into boxes, by cutting one of them again and again."""
    parts = [((0,) * len(shape), shape)]
    for _ in range(chance.randint(0, 5) if shape else 0):
        at, size = parts.pop(chance.randrange(len(parts)))
        d = chance.randrange(len(shape))
        cut = chance.randint(0, size[d])
        for start, count in ((0, cut), (cut, size[d] - cut)):
            if count:
                parts.append(((*at[:d], at[d] + start, *at[d + 1 :]), (*size[:d], count, *size[d + 1 :])))
    return parts


def place(
    chance: Random, shard: Shard, name: str, group: list[tuple[str, tuple[int, ...], Part]], dtype: np.dtype
) -> None:
    """Several parts in one array: one after another, or as columns of one matrix, padded and transposed at random."""
    way: Callable = chance.choice((_after_another, _as_columns))
    way(chance, shard, name, group, dtype)


def _after_another(chance, shard, name, group, dtype) -> None:  # type: ignore[no-untyped-def]
    blocks = [_block(chance, part[1]) for _, _, part in group]
    gaps = [chance.choice((0, 0, 3)) for _ in range(len(group) + 1)]
    array = np.zeros(sum(gaps) + sum(int(np.prod(outer, dtype=int)) for outer, _, _ in blocks), dtype)
    placed, start = [], gaps[0]
    for (global_name, shape, part), (outer, inner, order), gap in zip(group, blocks, gaps[1:], strict=True):
        count = int(np.prod(outer, dtype=int))
        view = array[start : start + count].reshape(outer)[(*inner, ...)].transpose(np.argsort(order))
        placed.append((global_name, shape, part, view))
        start += count + gap
    shard.add_array(name, array, placed)


def _block(chance: Random, size: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[slice, ...], list[int]]:
    """A padded shape in another order of dimensions, where in it the part lies, and that order."""
    order = list(range(len(size)))
    if chance.random() < 0.4:
        chance.shuffle(order)
    pads = [(chance.choice((0, 0, 1)), chance.choice((0, 0, 2))) for _ in order]
    outer = tuple(before + size[d] + after for d, (before, after) in zip(order, pads, strict=True))
    inner = tuple(slice(before, before + size[d]) for d, (before, _) in zip(order, pads, strict=True))
    return outer, inner, order


def _as_columns(chance, shard, name, group, dtype) -> None:  # type: ignore[no-untyped-def]
    matrices = [(part[1][0] if part[1] else 1, int(np.prod(part[1][1:], dtype=int))) for _, _, part in group]
    rows = max(rows for rows, _ in matrices) + chance.choice((0, 0, 1))
    array = np.zeros((rows, sum(columns for _, columns in matrices) + chance.choice((0, 1))), dtype)
    placed, column = [], 0
    for (global_name, shape, part), (count, width) in zip(group, matrices, strict=True):
        cut = array[:count, column : column + width]
        steps = [cut.strides[0]] if part[1] else []
        inner = [dtype.itemsize * int(np.prod(part[1][d + 1 :], dtype=int)) for d in range(1, len(part[1]))]
        view = np.lib.stride_tricks.as_strided(cut, part[1], steps + inner)
        placed.append((global_name, shape, part, view))
        column += width
    shard.add_array(name, array, placed)


def fill_across(
    reader: Registration, tiles: Tiles, manifest: TileManifest, sources: Sequence[Source], shards: Sequence[Shard]
) -> Across:
    """Fetch every tile, batch by batch. Raises `CorruptTransfer` at the first one that is not what was announced."""
    across = Across(reader, tiles, manifest)
    for tile_sink in across.tile_sinks(sources):
        shown = TiledShard(tile_sink.source.table, tiles.grid, tile_sink.source.manifest)
        for batch in tile_sink.begin(shown.encode()):
            ranges = tile_sink.batches.rows.ranges(*tile_sink.batches.span(batch))
            with tile_sink.stream.views_to_write(*tile_sink.batches.span(batch)) as (view,):
                view[:] = gather(shards[tile_sink.number].registration.stream, ranges)
                tile_sink.accept(batch, [view])
            tile_sink.stored(batch)
    assert across.missing == 0
