"""Copies what lies in boxes from one stream into another of the same layout, and nothing of what lies between them.

Boxes that fill their memory together are copied as they lie, however they interleave. Only where padding lies between
the rows of one does each run of bytes count; many of them are one question to the kernel.

It must never: read or write a byte that is in no box.
"""

import os
from array import array
from collections.abc import Callable, Iterator

import numpy as np

from ...core.errors import Closed
from ...transport.base import ByteStream
from ...transport.located import bare_addresses
from ...transport.vectors import IOV_MAX, Addresses
from .. import guarded
from ..hostmemory import MOST_THREADS
from ..parallel import in_parallel
from .arrays import Ints
from .copies import COUNT, COUNTS, OUTER, RUN, SOURCE, SOURCE_STRIDE, Copies, copies_of, no_copies
from .overlaps import memory_order
from .table import BoxTable

Range = tuple[int, int]  # the first byte of the stream, and the one behind the last


def copy_boxes(
    source: ByteStream, target: ByteStream, table: BoxTable, *, chunk_bytes: int, is_over: Callable[[], bool]
) -> None:
    """Copy all boxes, in parallel. Blocks; raises `Closed` once `is_over`, and `Freed` if memory is not there."""
    ranges, loose = inside(table)
    work: list[Range | int] = [part for each in ranges for part in _parts(each, chunk_bytes)]
    work += range(len(loose))
    tables = bare_addresses(source), bare_addresses(target)

    def one(item: Range | int) -> None:
        for part in [[item]] if isinstance(item, tuple) else _runs(loose, item):
            if is_over():
                raise Closed("the copy was given up")
            first, last = part[0][0], part[-1][1]
            taken, given = (_pairs(each, part) if each is not None else None for each in tables)
            if taken is not None and given is not None:
                with target.writing(first, last):
                    guarded.copy_pieces(taken, given, first)
                continue
            for start, stop in part:
                with source.reading(start, stop) as theirs, target.writing(start, stop) as mine:
                    there = guarded.addresses_of(source, theirs, start)
                    guarded.copy(there, guarded.addresses_of(target, mine, start), start, stop)

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    in_parallel(one, work, threads=max(1, min(cores, MOST_THREADS, len(work))), name="copy")


def inside(table: BoxTable) -> tuple[list[Range], Copies]:
    """The bytes that are in boxes: ranges without a hole; and rows of boxes with something else between them."""
    rows = np.flatnonzero(table.alias_of == np.arange(len(table)))
    if not len(rows):
        return [], no_copies()
    start = table.offset[rows]
    reach = np.maximum.accumulate(start + table.spans[rows])
    firsts = np.concatenate(([0], np.flatnonzero(start[1:] >= reach[:-1]) + 1))
    counts = np.diff(np.append(firsts, len(rows)))
    begin, end = start[firsts], reach[firsts + counts - 1]
    is_full = np.add.reduceat(table.bytes_of_boxes[rows], firsts) == end - begin
    ranges: list[Range] = []
    for first, last in zip(begin[is_full].tolist(), end[is_full].tolist(), strict=True):
        if ranges and ranges[-1][1] == first:
            ranges[-1] = (ranges[-1][0], last)
        else:
            ranges.append((first, last))
    loose = rows[~np.repeat(is_full, counts)]
    size, strides = memory_order(table, loose)
    place, item = table.offset[loose], table.item[table.tensor[loose]]
    return ranges, copies_of(size, item, place, strides, place, strides, np.arange(len(loose)))


def ranges_inside(table: BoxTable) -> list[Range]:
    """All bytes that are in boxes, in order, neighbours joined."""
    ranges, loose = inside(table)
    found: list[Range] = []
    for first, last in sorted(
        [*ranges, *(run for row in range(len(loose)) for part in _runs(loose, row) for run in part)]
    ):
        if found and found[-1][1] >= first:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return found


def _parts(whole: Range, most_bytes: int) -> Iterator[Range]:
    start, stop = whole
    for first in range(start, stop, most_bytes):
        yield first, min(first + most_bytes, stop)


def _runs(copies: Copies, row: int) -> Iterator[list[Range]]:
    """The runs of one row, as many at a time as the kernel takes at once."""
    numbers = copies.rows[row].tolist()
    count, length = numbers[COUNT] * numbers[COUNTS], numbers[RUN]
    for first in range(0, count, IOV_MAX):
        rank: Ints = np.arange(first, min(first + IOV_MAX, count))
        steps = rank % numbers[COUNT] * numbers[SOURCE_STRIDE] + rank // numbers[COUNT] * numbers[SOURCE + OUTER]
        places = np.sort(numbers[SOURCE] + steps)
        yield list(zip(places.tolist(), (places + length).tolist(), strict=True))


def _pairs(addresses: Addresses, parts: list[Range]) -> "array[int] | None":
    """Where they lie, for the kernel; None if they lie in several pieces of memory."""
    first, last = parts[0][0], parts[-1][1]
    base = addresses.whole(first, last)
    if not base:
        return None
    return array("Q", [number for start, stop in parts for number in (base + start - first, stop - start)])
