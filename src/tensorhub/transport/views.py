"""Memory as a list of views: made flat, handed to the kernel in batches, advanced by what it moved, cut into blocks.

It must never: copy a byte.
"""

import os
from collections.abc import Iterator, Sequence

IOV_MAX = min(1024, os.sysconf("SC_IOV_MAX"))
BATCH_BYTES = 1 << 20


def flat(buffer: bytes | memoryview) -> memoryview:
    """The same memory as bytes in one dimension."""
    view = buffer if isinstance(buffer, memoryview) else memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def batch(pending: list[memoryview], first: int) -> list[memoryview]:
    """As many as one call takes, but no more than it is likely to move: each costs 50 ns to hand over."""
    most = min(IOV_MAX, max(64, BATCH_BYTES // (len(pending[first]) or 1)))
    return pending[first : first + most]


def size_of(buffer: bytes | memoryview) -> int:
    """In bytes."""
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)


def advance(pending: list[memoryview], first: int, moved: int) -> int:
    """Where to go on after `moved` bytes: the index of the first view with something left, cut to what is left."""
    while moved > 0:
        size = len(pending[first])
        if moved < size:
            pending[first] = pending[first][moved:]
            return first
        moved -= size
        first += 1
    return first


def blocks_of(
    views: Sequence[memoryview], size_bytes: int, block_bytes: int
) -> Iterator[tuple[int, Sequence[memoryview]]]:
    """The views, of `size_bytes`, in runs of about `block_bytes`, with the size of each; large views are cut."""
    if size_bytes <= block_bytes:  # nearly always; and then nobody looks at each of a thousand small views
        yield size_bytes, views
        return
    run: list[memoryview] = []
    run_bytes = 0
    for view in views:
        for first in range(0, view.nbytes, block_bytes):
            part = view if view.nbytes <= block_bytes else view[first : first + block_bytes]
            run.append(part)
            run_bytes += part.nbytes
            if run_bytes >= block_bytes:
                yield run_bytes, run
                run, run_bytes = [], 0
    if run:
        yield run_bytes, run
