"""Boxes of a copy: which part of a published tensor comes to lie where, told by the two views that are copied.

A view's dimensions are those of the published tensor, cut, swapped, merged or split. What several copies bring becomes
as few boxes as can say it. It must never: take a step for a dimension that is none.
"""

from typing import NamedTuple

import tensorhub

MOST_BOXES = 1 << 16  # of one copy: more is no layout that anybody should read by
Dims = list[tuple[int, int, int]]  # (elements, stride in the published tensor, stride in the parameter)


class Region(NamedTuple):
    """Elements of a tensor's memory, by dimension, from `offset` on."""

    offset: int
    size: tuple[int, ...]
    strides: tuple[int, ...]


def boxes_of_copy(name: str, shape: tuple[int, ...], here: Region, there: Region) -> "list[tensorhub.Box]":
    """Of a copy from a region of a contiguous tensor into one of a parameter's memory. [] if boxes cannot say it."""
    dims = [each for each in zip(here.size, here.strides, there.strides, strict=True) if each[0] != 1]
    found: list[tensorhub.Box] = []
    return found if _add_boxes(found, name, shape, _merged(dims), here.offset, there.offset) else []


def _merged(dims: Dims) -> Dims:
    """Without dimensions that go on where the next one ends, in both. The farthest steps come first."""
    done: Dims = []
    for count, here, there in sorted(dims, key=lambda each: -each[1]):
        if done and done[-1][1] == count * here and done[-1][2] == count * there:
            done[-1] = (done[-1][0] * count, here, there)
        else:
            done.append((count, here, there))
    return done


def _add_boxes(
    found: "list[tensorhub.Box]", name: str, shape: tuple[int, ...], dims: Dims, here: int, there: int
) -> bool:
    """One box, or one for each step of the farthest dimension, and so on. False: too many, or not by plain steps."""
    if any(step <= 0 for _, step, _ in dims) or len(found) >= MOST_BOXES:
        return False
    box = _box(name, shape, dims, here, there)
    if box is not None:
        found.append(box)
        return True
    (count, step, into), rest = dims[0], dims[1:]
    return all(_add_boxes(found, name, shape, rest, here + at * step, there + at * into) for at in range(count))


def _box(name: str, shape: tuple[int, ...], dims: Dims, here: int, there: int) -> "tensorhub.Box | None":
    steps: list[int] = []
    following = 1
    for extent in reversed(shape):
        steps.insert(0, following)
        following *= extent
    at, left = [], here
    for step in steps:
        at.append(left // step)
        left %= step
    size, strides = [1] * len(steps), [1] * len(steps)
    for count, step, into in dims:
        while count > 1:
            dim = next((d for d, each in enumerate(steps) if each == step and shape[d] > 1), None)
            if dim is None or size[dim] != 1:
                return None
            here_too = min(count, shape[dim] - at[dim])
            if count % here_too or (here_too < count and here_too != shape[dim]):
                return None
            size[dim], strides[dim] = here_too, into
            count, step, into = count // here_too, step * here_too, into * here_too
    return tensorhub.Box(name, shape, tuple(at), tuple(size), there, tuple(strides))


def fewer(boxes: "list[tensorhub.Box]") -> "list[tensorhub.Box]":
    """The same parts: a box that goes on where another one ends, in both, is one with it. So a stack of experts is."""
    for dim in reversed(range(max((len(box.size) for box in boxes), default=0))):
        rows: dict[object, list[tensorhub.Box]] = {}
        for box in sorted(boxes, key=lambda each: each.at):
            row = rows.setdefault(_without(box, dim), [])
            joined = _joined(row[-1], box, dim) if row else None
            if joined is None:
                row.append(box)
            else:
                row[-1] = joined
        boxes = [box for row in rows.values() for box in row]
    return boxes


def _without(box: "tensorhub.Box", dim: int) -> object:
    """What boxes have in common that can be one along this dimension."""
    if dim >= len(box.size):
        return box
    others = [d for d in range(len(box.size)) if d != dim]
    return (box.name, *((box.at[d], box.size[d], _strides(box)[d]) for d in others))


def _joined(one: "tensorhub.Box", other: "tensorhub.Box", dim: int) -> "tensorhub.Box | None":
    if dim >= len(one.size) or one.at[dim] + one.size[dim] != other.at[dim]:
        return None
    count, more, gap = one.size[dim], other.size[dim], other.offset - one.offset
    strides = list(_strides(one))
    step = strides[dim] if count > 1 else gap
    if gap <= 0 or gap != step * count or (more > 1 and _strides(other)[dim] != step):
        return None
    size = list(one.size)
    size[dim], strides[dim] = count + more, step
    return tensorhub.Box(one.name, one.global_shape, one.at, tuple(size), one.offset, tuple(strides))


def _strides(box: "tensorhub.Box") -> tuple[int, ...]:
    assert box.strides is not None, "made with them"
    return box.strides
