"""Copies many short runs out of memory that may be freed at any moment, one after another, in row-major order.

To hand one run to the kernel takes as long as to copy a kilobyte. So where runs lie close to each other, memory is
copied as it lies, slab by slab, and picked from here; where they do not, the kernel gets as many at once as it takes.

It must never: touch registered memory itself, or copy far more than is wanted of it.
"""

from array import array

import numpy as np
import numpy.typing as npt

from ...transport.base import ByteStream
from ...transport.located import is_bare
from ...transport.vectors import IOV_MAX, Addresses
from ..guarded import addresses_of, copy, copy_pieces
from .arrays import Ints
from .copies import Bytes, Copies
from .turning import THEIRS, joined

SLAB_BYTES = 32 << 20  # half of the ring through which a device's memory passes
RUN_BYTES = 1024  # to hand a run to the kernel takes as long as to copy so many
WORDS = (1, 2, 4, 8)  # bytes of a run that is one number to numpy


def copy_runs(stream: ByteStream, copies: Copies, room: Bytes) -> None:
    """The runs of these rows into `room`, which is as long as all of them. Raises `Freed` near what is not there."""
    at = 0
    for row in joined(copies.rows[:, THEIRS]).tolist():
        size = row[1] * row[2] * row[4]
        if not _by_slabs(stream, row, room[at : at + size]):
            _by_runs(stream, row, room[at : at + size])
        at += size


def _by_slabs(stream: ByteStream, row: list[int], room: Bytes) -> bool:
    """Of the row's two loops, that with the longer stride slab by slab. False: it would copy too much."""
    place, run, *inner, counts, outer = row
    shape, steps = [counts, inner[0]], [outer, inner[1]]
    long = int(steps[1] > steps[0])
    lines, step = shape[long], steps[long]
    line = (shape[1 - long] - 1) * steps[1 - long] + run
    step = step if lines > 1 else line
    if line > SLAB_BYTES or lines * min(step, line) > RUN_BYTES * counts * inner[0]:
        return False
    most = 1 + (SLAB_BYTES - line) // step if step <= line * 2 else 1  # what lies far apart is copied line by line
    kind, tail = (np.dtype(f"u{run}"), []) if run in WORDS else (np.dtype(np.uint8), [run])
    target: npt.NDArray[np.unsignedinteger] = np.ndarray((*shape, *tail), kind, room.data)
    slab = np.empty((min(most, lines) - 1) * step + line, np.uint8)
    for first in range(0, lines, most):
        number = min(most, lines - first)
        start, size = place + first * step, (number - 1) * step + line
        with stream.reading(start, start + size) as views:
            here = Addresses.of_ranges([(slab.ctypes.data, size)], start)
            copy(addresses_of(stream, views, start), here, start, start + size)
        shape[long] = number
        found: npt.NDArray[np.unsignedinteger] = np.ndarray(
            (*shape, *tail), kind, slab.data, strides=(*steps, *(1 for _ in tail))
        )
        target[(slice(None),) * long + (slice(first, first + number),)] = found
    return True


def _by_runs(stream: ByteStream, row: list[int], room: Bytes) -> None:
    place, run, count, stride, counts, strides = row
    for first in range(0, count * counts, IOV_MAX):
        rank: Ints = np.arange(first, min(first + IOV_MAX, count * counts))
        places = place + rank % count * stride + rank // count * strides
        targets = room.ctypes.data + rank * run
        start, stop = int(np.min(places)), int(np.max(places)) + run
        if is_bare(stream) or stop - start <= SLAB_BYTES:
            with stream.reading(start, stop) as views:
                base = addresses_of(stream, views, start).whole(start, stop)
                if base:
                    copy_pieces(_pairs(base + places - start, run), _pairs(targets, run), start)
                    continue
        for at, target in zip(places.tolist(), targets.tolist(), strict=True):
            with stream.reading(at, at + run) as views:
                copy(addresses_of(stream, views, at), Addresses.of_ranges([(target, run)], at), at, at + run)


def _pairs(addresses: Ints, length: int) -> "array[int]":
    """For the kernel: address and length, again and again."""
    found = np.empty((len(addresses), 2), np.uint64)
    found[:, 0], found[:, 1] = addresses, length
    return array("Q", found.tobytes())
