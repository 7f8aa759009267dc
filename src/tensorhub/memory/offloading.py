"""Copies between registered memory and host copies at the machine's rate.

1. Of tensors on the host: the mover's threads copy, which do not need the interpreter. Python looks at what room there
   is before each 64 MiB, and is asked nothing else. So a trainer that computes in Python goes on meanwhile.
2. Of tensors on devices: the device copies to and from registered memory (`pinned`). Several threads wait for it, each
   for a run of its own, and hash on the host what has arrived there while the device copies further runs.

Where neither is possible, `hostmemory.copy_stream` does the same in Python.

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
from . import pinned
from .digests import ALGORITHM, MAX_THREADS, OnDevice
from .fill import FillSink
from .guarded import Freed
from .host import HostStream
from .hostmemory import MOST_THREADS, CopyStream, HostMemory
from .parallel import in_parallel
from .pinned import Direct, within_steps
from .registration import Registration
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


# --- tensors on devices -----------------------------------------------------------------------------------------------


def copy_directly(
    device: ByteStream,
    copy: Registration,
    pool: HostMemory | None,
    chunk_bytes: int,
    *,
    to_host: bool,
    on_chunk: Callable[[int, int], None],
    is_over: Callable[[], bool],
) -> bool:
    """Copy all of it between devices and a host copy of this pool. Blocks. False: the host copy is pageable.

    `on_chunk` gets the first byte of each chunk and its end once it is copied, in several threads. Raises what it
    raises, `Freed`, `Closed`, and `HostMemoryFull`.
    """
    if pool is None or not isinstance(device, Direct) or not device.size_bytes:
        return False
    if not pool.pin(copy, device.registrar()):
        return False
    host, size_bytes = copy.stream, device.size_bytes
    assert isinstance(host, CopyStream), "a host copy that lies elsewhere"
    move, address = device.copy_to_host if to_host else device.copy_to_device, host.pieces[0].address
    run_bytes = max(1, pinned.STEP_BYTES // chunk_bytes) * chunk_bytes  # for which one thread waits

    def one(start: int) -> None:
        if is_over():
            raise Closed("the copy was given up")
        stop = min(start + run_bytes, size_bytes)
        if host.why_pageable or not host.register(start, stop):
            return
        for first, last in within_steps(start, stop):
            move(first, last, address + first)
        for at in range(start, stop, chunk_bytes):
            on_chunk(at, min(at + chunk_bytes, stop))

    in_parallel(one, range(0, size_bytes, run_bytes), threads=_thread_count(), name="copy")
    pool.note_pageable(host.why_pageable)
    return not host.why_pageable


def check_filled(fill: FillSink, target: ByteStream, source: ByteStream) -> None:
    """Judge what was copied directly: on the device, where it hashes. What it does not hash as it lies in the copy.

    Raises `Freed`, and `CorruptTransfer`.
    """
    manifest = fill.manifest
    found = target.device_digests(manifest.chunk_bytes) if isinstance(target, OnDevice) else {}
    every = range(manifest.chunk_count)
    for run in [every] if len(found) == len(every) else [range(chunk, chunk + 1) for chunk in found]:
        fill.take(run, [found[chunk] for chunk in run])

    def one(chunk: int) -> None:
        with source.reading(*manifest.chunk_range(chunk)) as views:
            fill.accept(chunk, views)

    in_parallel(one, [chunk for chunk in every if chunk not in found], threads=_thread_count(), name="digest")


def _thread_count() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_THREADS)
