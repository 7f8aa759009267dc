"""Copies a registration's bytes to a host copy in the mover's threads, which do not need the interpreter.

Python looks at what room there is before each 64 MiB, and is asked nothing else: a trainer that computes in Python goes
on meanwhile, and a copy that it does not wait for is not slowed down by that. Where the mover is missing, or the bytes
do not lie on the host, or their digests are of another kind, `hostmemory.copy_stream` does the same in Python.

It must never: read registered memory itself, or take a chunk for good that has another digest.
"""

import ctypes
import os
from collections.abc import Callable, Sequence

from ..core.errors import Closed, InvariantViolation
from ..core.manifest import Manifest
from ..transport.base import ByteStream
from ..transport.located import bare_addresses
from ..transport.native import load, shapes
from ..transport.rows import table_of
from ..transport.sealed import large_of
from .digests import ALGORITHM
from .guarded import Freed
from .host import HostStream
from .hostmemory import MOST_THREADS
from .room import STEP_BYTES

TILE_BYTES = 256 << 10  # copied, then hashed in the near cache


def can_offload(source: ByteStream, target: ByteStream, manifest: Manifest) -> bool:
    """The mover can do it."""
    is_known = not manifest.digests or manifest.algorithm == ALGORITHM
    is_placed = bare_addresses(source) is not None and isinstance(target, HostStream)
    return load.library() is not None and is_known and is_placed and source.size_bytes == manifest.size_bytes > 0


def offload(
    source: ByteStream,
    target: ByteStream,
    manifest: Manifest,
    *,
    verify: bool,
    judge: Callable[[int, Sequence[memoryview]], None],
    is_over: Callable[[], bool],
) -> bool:
    """Copy and check everything. Blocks. False: this machine refuses, and Python has to do it.

    `judge` says what is wrong with a chunk whose digest differs. Raises what it raises, `Freed`, and `Closed`.
    """
    library, theirs = load.library(), bare_addresses(source)
    assert library is not None, "no library"
    assert theirs is not None, "bytes that lie nowhere"
    assert isinstance(target, HostStream), "a host copy that lies elsewhere"
    ours = target.addresses()
    digests = ctypes.c_char_p(manifest.digests) if verify and manifest.digests else None
    state = shapes.OffloadState(
        source=table_of(theirs),
        into=table_of(ours),
        chunk_bytes=manifest.chunk_bytes,
        tile_bytes=TILE_BYTES,
        digests=ctypes.cast(digests, ctypes.c_void_p) if digests is not None else None,
        large=large_of(ours),
        threads=min(len(os.sched_getaffinity(0)), MOST_THREADS),
    )
    step = max(1, STEP_BYTES // manifest.chunk_bytes)
    for first in range(0, manifest.chunk_count, step):
        if is_over():
            raise Closed("the copy was given up")
        state.next, state.stop = first, min(first + step, manifest.chunk_count)
        start, (_, stop) = manifest.chunk_range(first)[0], manifest.chunk_range(int(state.stop) - 1)
        target.took(stop - start)
        status = library.offload(state)
        if status == shapes.LOST:
            return False
        if status == shapes.UNREADABLE:
            raise Freed(int(state.at))
        if status == shapes.CORRUPT:
            chunk = int(state.chunk)
            with target.reading(*manifest.chunk_range(chunk)) as views:
                judge(chunk, views)
            raise InvariantViolation(f"chunk {chunk} has two digests")
    return True
