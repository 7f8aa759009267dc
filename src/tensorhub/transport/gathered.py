"""Parts of a stream that must be entered block by block (memory on a device), by way of memory of one's own.

One block at a time: a thread that held a block for each part would wait for room that it holds itself. And what is
written is written part by part: a block over several would write what lies between them too.
"""

from collections.abc import Iterator, Sequence

from .base import ByteStream

SPAN_BYTES = 1 << 20  # parts within that many bytes are read in one block

Range = tuple[int, int]  # place and length, in bytes


def gather(stream: ByteStream, ranges: Sequence[Range]) -> memoryview:
    """The bytes of the ranges, one after another."""
    data, at = memoryview(bytearray(sum(length for _, length in ranges))), 0
    for start, stop, inside in _spans(ranges):
        with stream.reading(start, stop) as views:
            block = views[0] if len(views) == 1 else memoryview(b"".join(views))
            for place, length in inside:
                data[at : at + length] = block[place - start : place - start + length]
                at += length
    return data


def scatter(stream: ByteStream, ranges: Sequence[Range], data: memoryview) -> None:
    """Write the bytes to the ranges, in their order, and nothing beside them."""
    at = 0
    for place, length in ranges:
        with stream.writing(place, place + length) as views:
            for view in views:
                view[:] = data[at : at + len(view)]
                at += len(view)


def _spans(ranges: Sequence[Range]) -> Iterator[tuple[int, int, list[Range]]]:
    """(first byte, the one behind the last, the ranges inside), of ranges that follow each other closely."""
    start = stop = 0
    inside: list[Range] = []
    for place, length in ranges:
        if inside and place >= stop and place + length - start <= SPAN_BYTES:
            stop = place + length
            inside.append((place, length))
            continue
        if inside:
            yield start, stop, inside
        start, stop, inside = place, place + length, [(place, length)]
    if inside:
        yield start, stop, inside
