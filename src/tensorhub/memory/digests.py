"""What a shard's bytes are, in numbers: a digest for each chunk, and the manifest that they make up.

Rules:
1. The algorithm is xxh3-128 over the chunk's bytes in stream order, 16 bytes, big-endian as xxHash prints it. A CUDA
   device makes the same digests where it can (`xxh3`). How the bytes lie in memory, or on which device, changes none.
2. On the host, threads hash. xxhash releases the GIL only inside one `update` of more than 64 KiB (its one-shot
   functions only since version 4), so a streaming hasher gets pieces whole and one at a time; smaller pieces hold the
   GIL for their microseconds.
3. It detects faults and mistakes, not malice: xxh3 is no cryptographic hash.

4. Memory that is freed meanwhile is an error of the call, never the end of the process (`guarded`).

Never: change a byte, hash what a device may still be writing (`Registration.settle` comes first).
"""

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Literal, Protocol, runtime_checkable

import xxhash

from ..protocol.errors import LayoutMismatch, UsageError
from ..protocol.manifest import DIGEST_BYTES, Layout, Manifest, chunk_count
from ..transport.base import MAX_MANIFEST_BYTES, ByteStream
from .describe import some
from .registration import Registration
from .streams import Freed, addresses_of, core_count, in_parallel, parts, room_for

Verify = Literal["full", "none"]

ALGORITHM = "xxh3-128"
NO_ALGORITHM = "none"
MANIFEST_HEAD_BYTES = 1024  # all of a manifest but its digests
MAX_THREADS = 8  # 8 cores at 20-30 GiB/s read more than the memory bus of one socket gives


def digest(views: Iterable[memoryview]) -> bytes:
    """The digest of the views' bytes, one after another (16 bytes)."""
    hasher = xxhash.xxh3_128()
    deque(map(hasher.update, views), 0)  # a loop without Python's: 0.15 us for a view of 4 KiB, not 0.25
    found: bytes = hasher.digest()
    return found


def check_verify(verify: str) -> None:
    """Raises `UsageError` unless `verify` is "full" or "none"."""
    if verify not in ("full", "none"):
        raise UsageError(f'verify={verify!r} is unknown: it is "full" or "none"')


def build_manifest(
    registration: Registration,
    chunk_bytes: int,
    *,
    verify: Verify = "full",
    salt: str = "",
    threads: int = MAX_THREADS,
) -> Manifest:
    """The manifest of the bytes as they are now, read in parallel. Blocks. The tensors must not be written meanwhile.

    With verify="none" nothing is read, and `salt` must be unique to this content; with "full" it is left out, so that
    equal bytes have equal roots. Chunks that lie on a CUDA device are hashed there, where it can. Raises `UsageError`
    that names the tensors whose memory was freed, and `HostMemoryFull`.
    """
    check_verify(verify)
    if chunk_bytes < 1:
        raise UsageError(f"chunks of {chunk_bytes} B: a chunk has at least one byte")
    check_length(registration, chunk_bytes, verify)
    layout, size_bytes = registration.layout_digest, registration.size_bytes
    registration.settle()
    if verify == "none":
        if not salt:
            raise UsageError('verify="none" needs a salt, so that this content is never taken for other content')
        return Manifest(layout, size_bytes, chunk_bytes, NO_ALGORITHM, b"", salt)
    gone: list[int] = []
    digests = _each_digest(registration.stream, chunk_bytes, gone, threads)
    if gone:
        raise UsageError(
            f"the memory of these tensors was freed while they were hashed: {some(freed(registration, gone))}",
            hint="register() again what was given other memory, and free it only after unpublish()",
        )
    return Manifest(layout, size_bytes, chunk_bytes, ALGORITHM, digests)


def check_length(registration: Registration, chunk_bytes: int, verify: Verify) -> None:
    """Raises `UsageError` if so many chunks have too long a manifest: before they are hashed, not after."""
    count = chunk_count(registration.size_bytes, chunk_bytes)
    most = (MAX_MANIFEST_BYTES - MANIFEST_HEAD_BYTES) // DIGEST_BYTES
    if verify == "full" and count > most:
        least = -(-registration.size_bytes // most)
        raise UsageError(
            f"the manifest of {count} chunks of {chunk_bytes} B would be longer than the limit of 64 MiB",
            hint=f"use a chunk_bytes of at least {least}",
        )


def changed_chunks(registration: Registration, manifest: Manifest) -> list[int]:
    """The chunks whose bytes now differ from the manifest's. Raises `UsageError` if the manifest has no digests."""
    if manifest.algorithm != ALGORITHM:
        raise UsageError(
            f"content published with algorithm {manifest.algorithm!r} cannot be checked",
            hint='publish with verify="full"',
        )
    mine = registration.layout_digest
    if mine != manifest.layout or registration.size_bytes != manifest.size_bytes:
        raise LayoutMismatch(f"the manifest is of layout {manifest.layout}, the registered tensors are of {mine}")
    registration.settle()
    found = _each_digest(registration.stream, manifest.chunk_bytes, [])
    if found == manifest.digests:
        return []
    ends = range(DIGEST_BYTES, len(found) + 1, DIGEST_BYTES)
    return [chunk for chunk, end in enumerate(ends) if found[end - DIGEST_BYTES : end] != manifest.digest_of(chunk)]


def tensors_of(layout: Layout, manifest: Manifest, chunks: Iterable[int]) -> list[str]:
    """Names of the tensors that have a byte in one of these chunks, in the layout's order."""
    touched = bytearray(manifest.chunk_count)
    for chunk in chunks:
        touched[chunk] = 1
    before = [0, *accumulate(touched)]  # how many of the first n chunks are touched
    size = manifest.chunk_bytes
    return [
        spec.name
        for spec in layout.tensors
        if spec.size_bytes
        and before[(spec.offset_bytes + spec.size_bytes - 1) // size + 1] > before[spec.offset_bytes // size]
    ]


SMALL = 8  # a part of at most an eighth of a chunk has a digest of its own: fewer than 8 parts of a chunk have none

Parts = dict[tuple[str, int], bytes]  # by tensor and chunk


def small_parts(registration: Registration, chunk_bytes: int, chunks: Collection[int] | None = None) -> Parts:
    """Digests of what small tensors, and small ends of tensors, have in chunks that they share. Blocks.

    With them `changed_of` names the tensor. `chunks`: only of these. Bytes on a device, and freed ones, have none.
    """
    stream, found = registration.stream, Parts()
    if isinstance(stream, OnDevice):
        return found
    most = chunk_bytes // SMALL
    for spec in registration.layout.tensors:
        first, stop = spec.offset_bytes, spec.offset_bytes + spec.size_bytes
        ends = (first // chunk_bytes, (stop - 1) // chunk_bytes) if spec.size_bytes else ()
        for chunk in dict.fromkeys(ends):
            start, end = max(first, chunk * chunk_bytes), min(stop, (chunk + 1) * chunk_bytes)
            is_shared = end - start < min(chunk_bytes, registration.size_bytes - chunk * chunk_bytes)
            if is_shared and end - start <= most and (chunks is None or chunk in chunks):
                with suppress(Freed), stream.views_to_read(start, end) as views:
                    found[spec.name, chunk] = digest(views)
    return found


def changed_of(
    layout: Layout, manifest: Manifest, chunks: Iterable[int], before: Parts, now: Parts
) -> tuple[list[str], dict[int, list[str]]]:
    """Names of tensors that changed for certain if these chunks did, and the names in each other chunk.

    A tensor that takes all of a chunk has changed with it, and so has one whose part has another digest `now`. Of the
    others that share a chunk, and whose part has no digest, at least one has.
    """
    inside: dict[int, list[str]] = {chunk: [] for chunk in chunks}
    unknown: dict[int, list[str]] = {chunk: [] for chunk in inside}
    certain: dict[str, None] = {}
    for spec in layout.tensors:
        first, stop = spec.offset_bytes, spec.offset_bytes + spec.size_bytes
        for chunk in range(first // manifest.chunk_bytes, -(-stop // manifest.chunk_bytes) if stop > first else 0):
            if chunk in inside:
                start, end = manifest.chunk_range(chunk)
                part, is_whole = (spec.name, chunk), first <= start and end <= stop
                inside[chunk].append(spec.name)
                if is_whole or (part in before and part in now and before[part] != now[part]):
                    certain[spec.name] = None
                elif part not in before or part not in now:
                    unknown[chunk].append(spec.name)
    for chunk, names in unknown.items():
        if len(names) == 1 and certain.keys().isdisjoint(inside[chunk]):
            certain[names[0]] = None
    shared = {chunk: unknown[chunk] or names for chunk, names in inside.items()}
    return list(certain), {chunk: names for chunk, names in shared.items() if certain.keys().isdisjoint(inside[chunk])}


def freed(registration: Registration, offsets: Sequence[int]) -> list[str]:
    """Names of the tensors that have no memory any more, of which these bytes could not be copied."""
    return list(dict.fromkeys([*registration.moved(), *names_at(registration.layout, offsets)]))


def names_at(layout: Layout, offsets: Iterable[int]) -> list[str]:
    """Names of the tensors in which one of these bytes lies."""
    places = sorted(offsets)
    ranges = ((spec.name, spec.offset_bytes, spec.offset_bytes + spec.size_bytes) for spec in layout.tensors)
    return [name for name, start, stop in ranges if bisect_left(places, start) < bisect_left(places, stop)]


@runtime_checkable
class OnDevice(Protocol):
    """A stream with bytes on devices that hash them where they lie."""

    def hashes(self, start: int, stop: int) -> bool:
        """Some of these bytes lie on a device that hashes: what arrives there is checked once it is in place."""
        ...

    def device_digests(self, chunk_bytes: int) -> list[tuple[range, bytes]]:
        """Of all chunks that a device has hashed: runs of them, each with its digests. Raises `Freed`."""
        ...

    def device_digests_of(self, chunk_bytes: int, chunks: Sequence[int]) -> dict[int, bytes]:
        """By chunk, of those of these that a device has hashed. Raises `Freed`."""
        ...


class InPlaceDigests:
    """Digests of chunks that lie in a stream's memory, asked for by several threads, each for its own.

    A device makes them where it can. What threads ask for while it makes some, it makes next, together. The host makes
    the others, of bytes that it reads back: of chunks that are short, or lie on a device in part.
    """

    def __init__(self, stream: ByteStream, chunk_bytes: int) -> None:
        self._stream = stream
        self._chunk_bytes = chunk_bytes
        self._asked: list[int] = []
        self._found: dict[int, bytes] = {}  # for other threads; empty where the device could not
        self._is_busy = False
        self._changed = threading.Condition()

    def are_due(self, start: int, stop: int) -> bool:
        """Bytes [start, stop) are checked where they lie, and not on their way there."""
        return isinstance(self._stream, OnDevice) and self._stream.hashes(start, stop)

    def of(self, chunk: int) -> bytes:
        """Of one chunk as it is now. Raises `Freed`."""
        start = chunk * self._chunk_bytes
        stop = min(start + self._chunk_bytes, self._stream.size_bytes)
        found = self._of_device(chunk) if self.are_due(start, stop) else b""
        if found:
            return found
        with self._stream.views_to_read(start, stop) as views:
            return digest(views)

    def _of_device(self, chunk: int) -> bytes:
        """Empty where the device could not."""
        with self._changed:
            self._asked.append(chunk)
            self._changed.wait_for(lambda: chunk in self._found or not self._is_busy)
            if chunk in self._found:
                return self._found.pop(chunk)
            its, self._asked, self._is_busy = self._asked, [], True
        found: dict[int, bytes] = {}
        try:
            assert isinstance(self._stream, OnDevice), "a device's digest of memory that is on none"
            with suppress(Freed):  # each thread finds out whether its own chunk was
                found = self._stream.device_digests_of(self._chunk_bytes, its)
        finally:
            with self._changed:
                self._found.update({one: found.get(one, b"") for one in its if one != chunk})
                self._is_busy = False
                self._changed.notify_all()
        return found.get(chunk, b"")


def _each_digest(stream: ByteStream, chunk_bytes: int, gone: list[int], threads: int = MAX_THREADS) -> bytes:
    """Of each chunk; zeros for one whose memory is not all there any more, of which `gone` gets the first byte."""
    count = chunk_count(stream.size_bytes, chunk_bytes)
    found, rest = bytearray(DIGEST_BYTES * count), set(range(count))
    if isinstance(stream, OnDevice):
        with suppress(Freed):  # chunk by chunk then, to find out which
            for run, digests in stream.device_digests(chunk_bytes):
                found[DIGEST_BYTES * run.start : DIGEST_BYTES * run.stop] = digests
                rest.difference_update(run)
    rooms = threading.local()

    def one(chunk: int) -> None:
        start = chunk * chunk_bytes
        stop = min(start + chunk_bytes, stream.size_bytes)
        if not hasattr(rooms, "mine"):
            rooms.mine = room_for(chunk_bytes)
        try:
            with stream.views_to_read(start, stop) as views:
                made = digest(parts(addresses_of(stream, views, start), start, stop, rooms.mine))
        except Freed as error:
            gone.append(error.at)
        else:
            found[DIGEST_BYTES * chunk : DIGEST_BYTES * (chunk + 1)] = made

    in_parallel(one, sorted(rest), threads=min(core_count(), threads), name="digest")
    return bytes(found)
