"""Layouts: boxes of global tensors, and the boxes that device meshes and placements give a rank."""

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod

import msgspec

from .errors import LayoutMismatch, UsageError, shortened
from .manifest import MAX_DIMENSIONS, MAX_ELEMENTS, Layout, TensorSpec, contiguous_strides, item_bytes
from .names import MAX_TEXT, plain, plain_number

# --- boxes ------------------------------------------------------------------------------------------------------------
#
#     global tensor "layers.0.o_proj", shape (4096, 4096)      registered tensor "o", shape (4096, 512)
#     ┌───────┬───┬─────────────┐                               ┌───┐
#     │       │ B │             │   at=(0, 1024)                │ B │   offset=0, strides=(512, 1)
#     │       │   │             │   size=(4096, 512)            │   │
#     └───────┴───┴─────────────┘                               └───┘
#
# All numbers count elements. `offset` and `strides` count in the memory of the registered tensor, as `torch.as_strided`
# does. Memory in no box is neither read nor written. The same part may lie in several places, with the same content. A
# tensor without boxes is one box: the whole global tensor of its name. A box never casts.


MAX_EXTENT = 1 << 40  # of one dimension: a name, a dimension and a place in it are sorted as one number of 64 bits


class Box(msgspec.Struct, frozen=True, array_like=True):
    """One part of one global tensor in one registered tensor. All numbers are counts of elements.

    `strides` may be left out for a part that lies there contiguously, `dtype` where it is the registered tensor's.
    """

    name: str  # of the global tensor; anything, also with slashes
    global_shape: tuple[int, ...]
    at: tuple[int, ...]  # where the part begins in the global tensor
    size: tuple[int, ...]  # the part's own shape
    offset: int = 0  # of the part's first element, from the registered tensor's first element on
    strides: tuple[int, ...] | None = None  # one for each dimension of the global tensor
    dtype: str = ""  # torch's name without the prefix: "bfloat16"

    def __str__(self) -> str:
        return f"{self.name!r}{part_text(self.at, self.size)}"


class GlobalTensor(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a version, whole, however it is cut."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name!r}: {self.dtype}{list(self.shape)}"

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * item_bytes(self.dtype)


def part_text(at: Sequence[int], size: Sequence[int]) -> str:
    """A part as one would index it: "[0:4096, 1024:1536]"."""
    return "[" + ", ".join(f"{start}:{start + count}" for start, count in zip(at, size, strict=True)) + "]"


def whole(tensor: TensorSpec) -> Box:
    """The box that a registered tensor is when nothing else is said of it."""
    return Box(tensor.name, tensor.shape, (0,) * len(tensor.shape), tensor.shape, 0, tensor.strides, tensor.dtype)


def boxes_of(layout: Layout, given: Mapping[str, Sequence[Box]] | None = None) -> list[tuple[TensorSpec, Box]]:
    """Every box of a shard beside the tensor it lies in, complete and checked, in the order of registration.

    Raises `UsageError` naming tensor and part: a box that cannot be, boxes for a tensor that is not registered, or two
    boxes that disagree about one global tensor. An empty list of boxes says that nothing of that tensor takes part.
    """
    given = given or {}
    known = {tensor.name for tensor in layout.tensors}
    for name in given:
        if name not in known:
            raise UsageError(
                f"boxes are given for tensor {name!r}, which is not registered", hint="register it as well"
            )
        if isinstance(given[name], Box):
            raise UsageError(f"boxes of tensor {name!r} are one Box, not a list", hint="put it into a list: [Box(...)]")
    found: list[tuple[TensorSpec, Box]] = []
    seen: dict[str, tuple[str, GlobalTensor]] = {}
    for tensor in layout.tensors:
        mine = given.get(tensor.name)
        boxes = [whole(tensor)] if mine is None else [checked(box, tensor) for box in mine]
        for box in boxes:
            one = GlobalTensor(box.name, box.dtype, box.global_shape)
            where, before = seen.setdefault(box.name, (tensor.name, one))
            if before != one:
                raise UsageError(
                    f"tensor {where!r} is said to have a part of {before}, and tensor {tensor.name!r} of {one}",
                    hint="all boxes of one name say the same dtype and global_shape",
                )
            found.append((tensor, box))
    return found


def checked(box: Box, tensor: TensorSpec) -> Box:
    """The box with nothing left out. Raises `UsageError`, naming tensor and part, if it cannot lie in this tensor."""
    box = _plain_box(box)
    numbers = (*box.global_shape, *box.at, *box.size, *(box.strides or ()), box.offset)
    is_named = all(isinstance(text, str) and text.isprintable() for text in (box.name, box.dtype))
    is_named = is_named and len(box.name) <= MAX_TEXT
    if not is_named or not all(type(number) is int for number in numbers):
        raise UsageError(
            f"tensor {tensor.name!r}: a box is made of a name and integers, but this one is {shortened(repr(box), 500)}"
        )
    dimensions = len(box.global_shape)
    lengths = (len(box.at), len(box.size), dimensions if box.strides is None else len(box.strides))
    if lengths != (dimensions,) * 3 or dimensions > MAX_DIMENSIONS:
        raise UsageError(
            f"tensor {tensor.name!r}: the box of {box.name!r} has a global shape of {dimensions} dimensions, but"
            f" {lengths[0]} in `at`, {lengths[1]} in `size` and {lengths[2]} in `strides`"
        )
    complete = msgspec.structs.replace(
        box,
        name=plain(box.name),
        strides=contiguous_strides(box.size) if box.strides is None else box.strides,
        dtype=plain(box.dtype) or tensor.dtype,
    )
    wrong = _wrong_in_global(complete, tensor) or _wrong_in_memory(complete, tensor)
    if wrong:
        what, hint = wrong
        raise UsageError(f"tensor {tensor.name!r}: box {box} {what}", hint=hint)
    return complete


def _plain_box(box: Box) -> Box:
    """Converts the numbers of a box from numpy's integers to Python's."""
    shape, at, size, strides = (
        tuple(map(plain_number, each)) for each in (box.global_shape, box.at, box.size, box.strides or ())
    )
    told = msgspec.structs.replace(box, global_shape=shape, at=at, size=size, offset=plain_number(box.offset))
    return told if box.strides is None else msgspec.structs.replace(told, strides=strides)


def _wrong_in_global(box: Box, tensor: TensorSpec) -> tuple[str, str] | None:
    if box.dtype != tensor.dtype:
        return f"is of {box.dtype}, and lies in a tensor of {tensor.dtype}", "a box never casts"
    if any(not 0 <= extent <= MAX_EXTENT for extent in box.global_shape) or prod(box.global_shape) > MAX_ELEMENTS:
        return f"has the global shape {list(box.global_shape)}, which is out of range", "say the shape in elements"
    for start, count, extent in zip(box.at, box.size, box.global_shape, strict=True):
        if start < 0 or count < 0 or start + count > extent:
            return (
                f"is not inside of the global shape {list(box.global_shape)}",
                "padding belongs to no box: say the size without it",
            )
    return None


def _wrong_in_memory(box: Box, tensor: TensorSpec) -> tuple[str, str] | None:
    assert box.strides is not None, "completed before"
    if 0 in box.size:
        return None  # nothing lies anywhere
    span = 1
    for stride, count in sorted((s, n) for s, n in zip(box.strides, box.size, strict=True) if n > 1):
        if stride < span:
            return (
                f"has strides {list(box.strides)}, with which several of its elements share memory",
                "each element of a box lies in a place of its own",
            )
        span += stride * (count - 1)
    elements = prod(tensor.shape)
    if box.offset < 0 or box.offset + span > elements:
        return (
            f"takes elements {box.offset} to {box.offset + span}, and the tensor has {elements}",
            "offset and strides are counted in elements of the registered tensor",
        )
    return None


def refuse_difference(mine: GlobalTensor, theirs: GlobalTensor, *, here: str, there: str) -> None:
    """Raises `LayoutMismatch`, saying how, where two workers mean different tensors by one name."""
    if mine.dtype != theirs.dtype:
        raise LayoutMismatch(
            f"tensor {mine.name!r} has dtype {mine.dtype} {here} and {theirs.dtype} {there}",
            hint="publish it with the dtype of its readers: register(model, dtype=...) casts at each publish",
        )
    if mine.shape != theirs.shape:
        shorter, longer = sorted((mine.shape, theirs.shape))
        is_padded = len(shorter) == len(longer) and sum(a != b for a, b in zip(shorter, longer, strict=True)) == 1
        raise LayoutMismatch(
            f"tensor {mine.name!r} has global shape {list(mine.shape)} {here} and {list(theirs.shape)} {there}",
            hint="give the whole shape, without padding; at= and size= of a Box say which part is here"
            if is_padded
            else None,
        )


# --- placements on a device mesh --------------------------------------------------------------------------------------
#
# Mesh dimensions are applied from left to right, as DTensor does. Each dimension of the tensor is then a list of runs
# of indices (`StridedSharded` leaves every n-th piece), and there is a box for each combination of runs. Pieces are
# those of `torch.chunk`: of ceil(length / count), the last ones shorter or empty.


class Replicated(msgspec.Struct, frozen=True):
    """Every rank along this mesh dimension has the same."""


class Sharded(msgspec.Struct, frozen=True):
    """The ranks along this mesh dimension cut dimension `dim` among them, as `torch.chunk` does."""

    dim: int


class StridedSharded(msgspec.Struct, frozen=True):
    """Dimension `dim` is first cut into `split_factor` pieces; each rank has its chunk of every piece, in order."""

    dim: int
    split_factor: int


Placement = Replicated | Sharded | StridedSharded
Run = tuple[int, int]  # first global index, and how many follow each other


def boxes_of_placements(
    name: str,
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
    strides: Sequence[int] | None = None,
    dtype: str = "",
) -> list[Box]:
    """The boxes of the local tensor of the rank at `coordinate`; none where its part is empty, and the tensor is not.

    `strides` are the local tensor's, in elements; contiguous ones where they are left out.
    """
    runs = runs_of_placements(name, global_shape, mesh_shape, coordinate, placements)
    local = [sum(count for _, count in its) for its in runs]
    steps = tuple(strides) if strides is not None else contiguous_strides(local)
    if 0 in global_shape:  # there is nothing of it: each rank has all of that
        return [Box(name, tuple(global_shape), (0,) * len(runs), tuple(global_shape), dtype=dtype)]
    if 0 in local:
        return []
    boxes = []
    for picked in product(*(_with_places(its) for its in runs)):
        offset = sum(place * step for (_, _, place), step in zip(picked, steps, strict=True))
        at, size = tuple(start for start, _, _ in picked), tuple(count for _, count, _ in picked)
        boxes.append(Box(name, tuple(global_shape), at, size, offset, steps, dtype))
    return boxes


def runs_of_placements(
    name: str,
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> list[list[Run]]:
    """For each dimension of the tensor the global indices that this rank has, in the order in which they lie there."""
    if not len(mesh_shape) == len(coordinate) == len(placements):
        raise UsageError(
            f"tensor {name!r}: a mesh of {len(mesh_shape)} dimensions, a coordinate of {len(coordinate)},"
            f" and {len(placements)} placements"
        )
    runs: list[list[Run]] = [[(0, extent)] if extent else [] for extent in global_shape]
    for count, rank, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if not 0 <= rank < count:
            raise UsageError(f"tensor {name!r}: rank {rank} of a mesh dimension of {count}")
        match placement:
            case Sharded(dim=dim):
                _check_dimension(name, dim, global_shape)
                length = sum(n for _, n in runs[dim])
                runs[dim] = _taken(runs[dim], *_chunk(length, count, rank))
            case StridedSharded(dim=dim, split_factor=pieces):
                _check_dimension(name, dim, global_shape)
                if pieces < 1:
                    raise UsageError(f"tensor {name!r}: a StridedSharded with split_factor {pieces}")
                length = sum(n for _, n in runs[dim])
                kept: list[Run] = []
                for piece in range(min(pieces, length)):  # pieces beyond the length are empty
                    start, stop = _chunk(length, pieces, piece)
                    first, last = _chunk(stop - start, count, rank)
                    kept += _taken(runs[dim], start + first, start + last)
                runs[dim] = _joined(kept)
            case Replicated():
                pass
    return runs


def _check_dimension(name: str, dim: int, global_shape: Sequence[int]) -> None:
    if not 0 <= dim < len(global_shape):
        raise UsageError(f"tensor {name!r} of shape {list(global_shape)} is cut in dimension {dim}, which it has not")


def _chunk(length: int, count: int, rank: int) -> Run:
    """Where chunk `rank` of `count` begins and ends, as `torch.chunk` has it."""
    each = -(-length // count)
    return min(length, rank * each), min(length, (rank + 1) * each)


def _taken(runs: Sequence[Run], start: int, stop: int) -> list[Run]:
    """What lies at positions [start, stop) of these runs, one after another."""
    found: list[Run] = []
    at = 0
    for first, count in runs:
        begin, end = max(start, at), min(stop, at + count)
        if begin < end:
            found.append((first + begin - at, end - begin))
        at += count
    return found


def _joined(runs: Sequence[Run]) -> list[Run]:
    joined: list[Run] = []
    for first, count in runs:
        if joined and sum(joined[-1]) == first:
            joined[-1] = (joined[-1][0], joined[-1][1] + count)
        else:
            joined.append((first, count))
    return joined


def _with_places(runs: Sequence[Run]) -> list[tuple[int, int, int]]:
    """Each run with its place among the local indices."""
    found, place = [], 0
    for first, count in runs:
        found.append((first, count, place))
        place += count
    return found
