"""Fills registered tensors with one version, chunk by chunk, from one source after another, and judges each chunk.

Rules:
1. The server named the content by its root digest. A manifest with another root is refused before a byte is written;
   after that every chunk must have the digest that the manifest announces.
2. A chunk counts only after `accept` and then `stored`; a rejected chunk is not marked, and is wanted again. What lies
   on a device that hashes is judged in `stored`, where it lies: so whatever has become of it on its way is seen.
3. The first good manifest stays. Another source's `begin` returns the chunks that are still missing.
4. After `revoke` has returned, nothing more is accepted or marked: a late write never counts.
5. What is malformed, or does not fit the root, is the source's fault: `CorruptTransfer`, try another one. What fits the
   root and not these tensors, or not what the caller asked for, is the caller's: `UsageError`, from every source.

Called from several transport threads at once.
"""

import threading
from collections.abc import Callable, Sequence

from ..protocol.errors import CorruptTransfer, InvariantViolation, LayoutMismatch, TensorHubError, UsageError
from ..protocol.manifest import Manifest, decode_manifest
from ..protocol.names import Digest
from ..transport.base import ByteStream, Progress, StopFlag, Terms
from .digests import (
    ALGORITHM,
    NO_ALGORITHM,
    InPlaceDigests,
    Verify,
    check_verify,
    digest,
    tensors_of,
)
from .registration import Registration

REJECTED, ACCEPTED, DUE = range(3)  # of a chunk. Due: its length is right, and its digest comes once it is in place
NAMES_SHOWN = 3  # of the tensors in a bad chunk; a chunk of 4 MiB can hold thousands


class FillSink:
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
        check_verify(verify)
        self._registration = registration
        self._expected = expected
        self._verify = verify
        self._make_progress = progress
        self._on_begin = on_begin
        self._on_stored = on_stored
        self._manifest: Manifest | None = None
        self._manifest_bytes = b""
        self._progress: Progress | None = None
        self._in_place: InPlaceDigests | None = None
        self._accepted = bytearray()
        self._is_settled = False
        self._revoked: TensorHubError | None = None
        self._stop_flag = StopFlag()  # set once it is revoked
        self._bytes_verified = self._bytes_unverified = self._bytes_rejected = 0
        self._lock = threading.Lock()
        self._telling = threading.Lock()  # callbacks, one at a time and in order

    @property
    def stream(self) -> ByteStream:
        return self._registration.stream

    @property
    def is_cross_site(self) -> bool:
        return False

    @property
    def is_checking(self) -> bool:
        return self._verify == "full"

    @property
    def chunk_bytes(self) -> int:
        return self.manifest.chunk_bytes

    @property
    def has_begun(self) -> bool:
        """A good manifest has come: `manifest`, `manifest_bytes`, `progress` and `chunk_bytes` are known."""
        return self._progress is not None

    @property
    def manifest(self) -> Manifest:
        if self._manifest is None:
            raise InvariantViolation("a fill was asked for its manifest before one had come")
        return self._manifest

    @property
    def manifest_bytes(self) -> bytes:
        """The manifest as this worker passes it on."""
        self.manifest  # noqa: B018 - raises before one has come
        return self._manifest_bytes

    @property
    def progress(self) -> Progress:
        if self._progress is None:
            raise InvariantViolation("a fill was asked for its progress before it had begun")
        return self._progress

    def statistics(self) -> dict[str, int]:
        """Bytes that had the announced digest, that were taken without one (verify="none"), that were rejected."""
        with self._lock:
            return {
                "bytes_verified": self._bytes_verified,
                "bytes_unverified": self._bytes_unverified,
                "bytes_rejected": self._bytes_rejected,
            }

    def begin(self, manifest: bytes) -> Sequence[int]:
        """The chunks that are missing. `CorruptTransfer`, `LayoutMismatch` or `UsageError` as the rules above say."""
        candidate = self._judge(manifest)
        with self._telling:
            with self._lock:
                self._check_live()
                is_first = self._progress is None
                if is_first:
                    self._start(candidate)
            if is_first and self._on_begin is not None:
                self._on_begin(self)
        self._is_settled = False  # since when the tensors may have been freed
        progress = self.progress
        return [chunk for chunk in range(progress.chunk_count) if not progress.has(chunk)]

    def touch(self) -> None:
        """Before the first byte: nothing that was launched earlier may still read or write these tensors."""
        if self._is_settled:
            return
        with self._telling:
            if not self._is_settled:
                self._registration.settle_to_fill()
                self._is_settled = True

    def terms(self) -> Terms | None:
        """What the manifest says of each chunk."""
        manifest = self.manifest
        digests = manifest.digests if self._verify == "full" else None
        return Terms(digests, self.progress, (self._stop_flag,))

    def told(self, size_bytes: int) -> None:
        """More has come, was judged as the terms say, and is marked. Raises `HostMemoryFull` if that was the last."""
        self._registration.took(size_bytes)
        with self._telling:
            with self._lock:
                if self._verify == "full":
                    self._bytes_verified += size_bytes
                else:
                    self._bytes_unverified += size_bytes
            if self._on_stored is not None:
                self._on_stored(self.progress.prefix)

    def check(self) -> None:
        """Raises once it is revoked."""
        with self._lock:
            self._check_live()

    def accept(self, chunk: int, views: Sequence[memoryview]) -> None:
        """Judge received bytes. `CorruptTransfer` names the chunk, its bytes and its tensors."""
        manifest = self.manifest
        if not 0 <= chunk < manifest.chunk_count:
            raise CorruptTransfer(f"chunk {chunk} was received, of content that has {manifest.chunk_count}")
        start, stop = manifest.chunk_range(chunk)
        size_bytes, found = sum(view.nbytes for view in views), b""
        is_good = size_bytes == stop - start
        is_due = is_good and self._is_judged_in_place(chunk)
        if self._verify == "full" and is_good and not is_due:
            found = digest(views)
            is_good = found == manifest.digest_of(chunk)
        with self._lock:
            self._check_live()
            if is_due:
                self._accepted[chunk] = DUE
                return
            self._note(chunk, size_bytes, is_good=is_good)
        if not is_good:
            raise self._corrupt(manifest, chunk, size_bytes, found)

    def judge_in_place(self, chunk: int) -> None:
        """Judge an accepted chunk where it lies, if that is due. Raises as `accept`. Otherwise `stored` does it.

        Waits for the device.
        """
        if self._accepted[chunk] != DUE:
            return
        manifest, found = self.manifest, self._found_in_place(chunk)
        start, stop = manifest.chunk_range(chunk)
        is_good = found == manifest.digest_of(chunk)
        with self._lock:
            self._check_live()
            self._note(chunk, stop - start, is_good=is_good)
        if not is_good:
            raise self._corrupt(manifest, chunk, stop - start, found)

    def stored(self, chunk: int) -> None:
        """The accepted chunk is in place, and counts from now on. Raises `CorruptTransfer` if it is not right there."""
        self.judge_in_place(chunk)
        with self._telling:
            with self._lock:
                self._check_live()
                if self._accepted[chunk] != ACCEPTED:
                    raise InvariantViolation(f"chunk {chunk} was called stored but had not been accepted")
                prefix = self.progress.mark(chunk)
            if self._on_stored is not None:
                self._on_stored(prefix)

    def take(self, chunks: range, digests: Sequence[bytes] | None) -> None:
        """Chunks that were put in place, with the digests that a device made of them meanwhile. Raises as `accept`.

        Without digests they are judged where they lie.
        """
        manifest = self.manifest
        is_checked = self._verify == "full"
        if digests is None:
            digests = [self._found_in_place(chunk) for chunk in chunks] if is_checked else ()
        bad = None
        if is_checked:
            announced = map(manifest.digest_of, chunks)
            bad = next((c for c, it, found in zip(chunks, announced, digests, strict=True) if it != found), None)
        good = chunks if bad is None else range(chunks.start, bad)
        with self._telling:
            with self._lock:
                self._check_live()
                size_bytes = manifest.chunk_range(good[-1])[1] - manifest.chunk_range(good[0])[0] if good else 0
                if is_checked:
                    self._bytes_verified += size_bytes
                else:
                    self._bytes_unverified += size_bytes
                if bad is not None:
                    start, stop = manifest.chunk_range(bad)
                    self._bytes_rejected += stop - start
                for chunk in good:
                    self.progress.mark(chunk)
            if good and self._on_stored is not None:
                self._on_stored(self.progress.prefix)
        if bad is not None:
            raise self._corrupt(manifest, bad, stop - start, digests[bad - chunks.start])

    def revoke(self, error: TensorHubError) -> None:
        """From now on `begin`, `accept` and `stored` raise `error`: the permission to read has ended."""
        with self._lock:
            self._revoked = self._revoked or error
        self._stop_flag.set()

    def _is_judged_in_place(self, chunk: int) -> bool:
        if self._in_place is None or self._verify != "full" or not 0 <= chunk < self.manifest.chunk_count:
            return False
        return self._in_place.are_due(*self.manifest.chunk_range(chunk))

    def _found_in_place(self, chunk: int) -> bytes:
        assert self._in_place is not None, "a chunk is judged before a manifest has come"
        return self._in_place.of(chunk)

    def _note(self, chunk: int, size_bytes: int, *, is_good: bool) -> None:
        """With the lock held: it was judged."""
        if not is_good:
            self._bytes_rejected += size_bytes
        elif self._verify == "full":
            self._bytes_verified += size_bytes
        else:
            self._bytes_unverified += size_bytes
        self._accepted[chunk] = ACCEPTED if is_good else REJECTED

    def _check_live(self) -> None:
        if self._revoked is not None:  # raised anew: kept with a traceback, it would hold all that ever ran into it
            raise type(self._revoked)(str(self._revoked), hint=self._revoked.hint)

    def _judge(self, data: bytes) -> Manifest:
        try:
            manifest = decode_manifest(data)
        except UsageError as error:
            raise CorruptTransfer(f"the source sent a {error}") from error
        root = manifest.root()
        if root != self._expected:
            raise CorruptTransfer(
                f"the source's content has root digest {root}, the server named {self._expected}: not this version"
            )
        mine = self._registration.layout_digest
        if manifest.layout != mine:
            raise LayoutMismatch(
                f"the published tensors have layout {manifest.layout}, the tensors registered here {mine}",
                hint="register the same names, dtypes, shapes, strides and order, with the same sharing of memory",
            )
        if manifest.size_bytes != self._registration.size_bytes:
            raise CorruptTransfer(
                f"the manifest says {manifest.size_bytes} B for a layout of {self._registration.size_bytes} B"
            )
        if self._verify == "full" and manifest.algorithm == NO_ALGORITHM:
            raise UsageError(
                'this version was published with verify="none": its bytes cannot be verified',
                hint='publish it with verify="full", or say verify="none" here as well',
            )
        if self._verify == "full" and manifest.algorithm != ALGORITHM:
            raise UsageError(
                f"this version's digests are {manifest.algorithm!r}, which is unknown here",
                hint="use one release of tensorhub on both sides",
            )
        return manifest

    def _start(self, manifest: Manifest) -> None:
        progress = self._make_progress(manifest.chunk_count)
        if progress.chunk_count != manifest.chunk_count:
            raise InvariantViolation(
                f"progress of {progress.chunk_count} chunks for content of {manifest.chunk_count} chunks"
            )
        self._manifest, self._manifest_bytes = manifest, manifest.encode()
        self._accepted = bytearray(manifest.chunk_count)
        self._in_place = InPlaceDigests(self._registration.stream, manifest.chunk_bytes)
        self._progress = progress

    def _corrupt(self, manifest: Manifest, chunk: int, size_bytes: int, found: bytes) -> CorruptTransfer:
        start, stop = manifest.chunk_range(chunk)
        names = tensors_of(self._registration.layout, manifest, [chunk])
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        where = f"chunk {chunk} (bytes {start} to {stop}: {', '.join(map(repr, names[:NAMES_SHOWN]))}{more})"
        if size_bytes != stop - start:
            return CorruptTransfer(f"{where} came with {size_bytes} B instead of {stop - start} B")
        text = f"digest {found.hex()}, announced was {manifest.digest_of(chunk).hex()}"
        return CorruptTransfer(f"{where} is not what was published, but changed in place or on the way: {text}")
