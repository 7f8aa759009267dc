"""Fills registered tensors with the chunks of one version, from one source after another. Checks each chunk's digest.

Rules:
1. The server named the content by its root digest. A manifest with another root is refused before a byte is written;
   after that every chunk must have the digest that the manifest announces.
2. A chunk counts only after `accept` and then `stored`; a rejected chunk is not marked, and is wanted again. What lies
   on a device that hashes is checked in `stored`, where it lies: so whatever has become of it on its way is seen.
3. The first good manifest stays. Another source's `begin` returns the chunks that are still missing. Memory that may
   have chunks already (`Registration.may_have`) is hashed first, and what is right there counts.
4. After `revoke` has returned, nothing more is accepted or marked: a late write never counts.
5. What is malformed, or does not fit the root, is the source's fault: `CorruptTransfer`, try another one. What fits the
   root and not these tensors, or not what the caller asked for, is the caller's: `UsageError`, from every source.

Called from several transport threads at once.
"""

import threading
from collections.abc import Callable, Sequence

from ..protocol.errors import CorruptTransfer, InvariantViolation, LayoutMismatch, TensorHubError, UsageError
from ..protocol.manifest import DIGEST_BYTES, Manifest, decode_manifest
from ..protocol.names import Digest
from ..transport.base import ByteStream, Progress, StopFlag, Terms
from .digests import ALGORITHM, NO_ALGORITHM, InPlaceDigests, Verify, changed_chunks, check_verify, digest, tensors_of
from .registration import Registration

REJECTED, ACCEPTED, DUE = range(3)  # of a chunk. Due: its length is right, and its digest comes once it is in place
NAMES_SHOWN = 3  # of the tensors in a bad chunk; a chunk of 4 MiB can hold thousands


class Fill:
    """What fills registered tensors, until it is revoked."""

    is_cross_site = False

    def __init__(self, registration: Registration, verify: Verify, on_stored: Callable[[int], None] | None) -> None:
        """`on_stored` is told the prefix of chunks, one call at a time, in a transport's thread."""
        check_verify(verify)
        self.registration = registration
        self.is_checking = verify == "full"
        self.stop_flag = StopFlag()  # set once it is revoked
        self._on_stored = on_stored
        self._is_settled = False
        self._revoked: TensorHubError | None = None
        self._lock = threading.RLock()
        self._telling = threading.RLock()  # callbacks, one at a time and in order

    def check_algorithm(self, algorithm: str) -> None:
        """Raises `UsageError` for digests that cannot be checked, where they are to be."""
        if self.is_checking and algorithm == NO_ALGORITHM:
            raise UsageError(
                'this version was published with verify="none": its bytes cannot be verified',
                hint='publish it with verify="full", or say verify="none" here as well',
            )
        if self.is_checking and algorithm != ALGORITHM:
            raise UsageError(
                f"this version's digests are {algorithm!r}, which is unknown here",
                hint="use one release of tensorhub on both sides",
            )

    def touch(self) -> None:
        """Before the first byte: nothing that was launched earlier may still read or write these tensors."""
        if self._is_settled:
            return
        with self._telling:
            if not self._is_settled:
                self.registration.settle_to_fill()
                self._is_settled = True

    def check(self) -> None:
        """Raises once it is revoked."""
        if self._revoked is not None:  # raised anew: kept with a traceback, it would hold all that ever ran into it
            raise type(self._revoked)(str(self._revoked), hint=self._revoked.hint)

    def revoke(self, error: TensorHubError) -> None:
        """Refuse all later chunks with `error`: the permission to read has ended."""
        with self._lock:
            self._revoked = self._revoked or error
        self.stop_flag.set()


class FillSink(Fill):
    """A `Sink` that fills a registration's tensors with the content that has the root `expected`."""

    def __init__(
        self,
        registration: Registration,
        expected: Digest,
        *,
        verify: Verify = "full",
        progress: Callable[[int], Progress] = Progress,
        on_begin: Callable[["FillSink"], None] | None = None,
        on_stored: Callable[[int], None] | None = None,
    ) -> None:
        """`progress` makes one from the number of chunks, or returns that of an earlier fill of the same content.

        `on_begin` is called once, when manifest and progress are known and before the first chunk is asked for;
        `on_stored` after every chunk, with a prefix that never falls. Both run in a transport's thread, one call at a
        time, and must not call back into the sink.
        """
        super().__init__(registration, verify, on_stored)
        self._expected = expected
        self._make_progress = progress
        self._on_begin = on_begin
        self._begun: tuple[Manifest, Progress, InPlaceDigests] | None = None
        self._accepted = bytearray()

    @property
    def stream(self) -> ByteStream:
        return self.registration.stream

    @property
    def chunk_bytes(self) -> int:
        return self.manifest.chunk_bytes

    @property
    def manifest(self) -> Manifest:
        """Known once a good one has come."""
        return self._known[0]

    @property
    def progress(self) -> Progress:
        return self._known[1]

    @property
    def _known(self) -> tuple[Manifest, Progress, InPlaceDigests]:
        if self._begun is None:
            raise InvariantViolation("a fill was asked for its manifest before one had come")
        return self._begun

    def begin(self, manifest: bytes) -> Sequence[int]:
        """The chunks that are missing. `CorruptTransfer`, `LayoutMismatch` or `UsageError` as the rules above say."""
        candidate = self._checked_manifest(manifest)
        with self._telling:
            with self._lock:
                self.check()
                is_first = self._begun is None
                if is_first:
                    count = candidate.chunk_count
                    progress = self._make_progress(count)
                    if progress.chunk_count != count:
                        text = f"progress of {progress.chunk_count} chunks for content of {count} chunks"
                        raise InvariantViolation(text)
                    self._accepted = bytearray(count)
                    self._begun = candidate, progress, InPlaceDigests(self.stream, candidate.chunk_bytes)
            if is_first and self.registration.may_have and self.is_checking:
                changed = set(changed_chunks(self.registration, candidate))
                self.progress.mark_all([each for each in range(candidate.chunk_count) if each not in changed])
            if is_first and self._on_begin is not None:
                self._on_begin(self)
        self._is_settled = False  # since when the tensors may have been freed
        return self.progress.missing()

    def terms(self) -> Terms | None:
        """The sizes and digests by which a transport checks chunks."""
        return Terms(self.manifest.digests if self.is_checking else None, self.progress, (self.stop_flag,))

    def told(self, size_bytes: int) -> None:
        """More has come, was checked as the terms say, and is marked. Raises `HostMemoryFull` if that was the last."""
        self.registration.took(size_bytes)
        self._tell()

    def accept(self, chunk: int, views: Sequence[memoryview]) -> None:
        """Judge received bytes. `CorruptTransfer` names the chunk, its bytes and its tensors."""
        manifest, _, in_place = self._known
        if not 0 <= chunk < manifest.chunk_count:
            raise CorruptTransfer(f"chunk {chunk} was received, of content that has {manifest.chunk_count}")
        start, stop = manifest.chunk_range(chunk)
        size_bytes = sum(view.nbytes for view in views)
        if size_bytes != stop - start:
            self._note(chunk, REJECTED)
            raise CorruptTransfer(f"{self._text(chunk)} came with {size_bytes} B instead of {stop - start} B")
        if self.is_checking and in_place.are_due(start, stop):
            self._note(chunk, DUE)
        else:
            self._check_chunk(chunk, digest(views) if self.is_checking else b"")

    def check_in_place(self, chunk: int) -> None:
        """Judge an accepted chunk where it lies, if that is due. Raises `CorruptTransfer`. Otherwise `stored` does it.

        Waits for the device.
        """
        if self._accepted[chunk] == DUE:
            self._check_chunk(chunk, self._known[2].of(chunk))

    def stored(self, chunk: int) -> None:
        """The accepted chunk is in place, and counts from now on. Raises `CorruptTransfer` if it is not right there."""
        self.check_in_place(chunk)
        self._count(range(chunk, chunk + 1))

    def take(self, chunks: range, digests: bytes | None) -> None:
        """Count chunks that are in place. A device made the digests. Raises `CorruptTransfer` for a wrong one.

        Without digests they are checked where they lie.
        """
        if digests is None:
            digests = b"".join(map(self._known[2].of, chunks)) if self.is_checking else b""
        announced = self.manifest.digests[DIGEST_BYTES * chunks.start : DIGEST_BYTES * chunks.stop]
        if not self.is_checking or digests == announced:
            with self._lock:
                self.check()
                self._accepted[chunks.start : chunks.stop] = bytes([ACCEPTED]) * len(chunks)
            return self._count(chunks)
        good = 0
        try:
            for at, chunk in enumerate(chunks):
                self._check_chunk(chunk, digests[DIGEST_BYTES * at : DIGEST_BYTES * (at + 1)])
                good += 1
        finally:
            self._count(chunks[:good])

    def _check_chunk(self, chunk: int, found: bytes) -> None:
        """Compares the digest of the chunk, if digests are checked."""
        announced = self.manifest.digest_of(chunk) if self.is_checking else b""
        self._note(chunk, ACCEPTED if found == announced else REJECTED)
        if found != announced:
            text = f"digest {found.hex()}, announced was {announced.hex()}"
            raise CorruptTransfer(
                f"{self._text(chunk)} is not what was published, but changed in place or on the way: {text}"
            )

    def _note(self, chunk: int, verdict: int) -> None:
        with self._lock:
            self.check()
            self._accepted[chunk] = verdict

    def _count(self, chunks: range) -> None:
        """These are accepted, and in place."""
        with self._telling:
            with self._lock:
                self.check()
                for chunk in chunks:
                    if self._accepted[chunk] != ACCEPTED:
                        raise InvariantViolation(f"chunk {chunk} was called stored but had not been accepted")
                self.progress.mark_all(chunks)
            if chunks:
                self._tell()

    def _tell(self) -> None:
        with self._telling:
            if self._on_stored is not None:
                self._on_stored(self.progress.prefix)

    def _checked_manifest(self, data: bytes) -> Manifest:
        try:
            manifest = decode_manifest(data)
        except UsageError as error:
            raise CorruptTransfer(f"the source sent a {error}") from error
        root, mine = manifest.root(), self.registration
        if root != self._expected:
            raise CorruptTransfer(
                f"the source's content has root digest {root}, the server named {self._expected}: not this version"
            )
        if manifest.layout != mine.layout_digest:
            raise LayoutMismatch(
                f"the published tensors have layout {manifest.layout}, the tensors registered here"
                f" {mine.layout_digest}",
                hint="register the same names, dtypes, shapes, strides and order, with the same sharing of memory",
            )
        if manifest.size_bytes != mine.size_bytes:
            raise CorruptTransfer(f"the manifest says {manifest.size_bytes} B for a layout of {mine.size_bytes} B")
        self.check_algorithm(manifest.algorithm)
        return manifest

    def _text(self, chunk: int) -> str:
        start, stop = self.manifest.chunk_range(chunk)
        names = tensors_of(self.registration.layout, self.manifest, [chunk])
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        return f"chunk {chunk} (bytes {start} to {stop}: {', '.join(map(repr, names[:NAMES_SHOWN]))}{more})"
