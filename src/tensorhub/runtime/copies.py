"""A worker's host copies: memory, content and export of each, and the copying between them and the registered memory.

Copies run in threads and are checked against the digests that the publisher announced, like everything that arrives. It
must never: make a copy that was not ordered, or keep the memory of one that was dropped.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence

from ..memory.describe import some
from ..memory.digests import freed
from ..memory.fill import FillSink
from ..memory.host_copies import (
    COPY_THREADS,
    Direct,
    HostMemory,
    can_offload,
    check_filled,
    copy_directly,
    copy_stream,
    offload,
    over_shared,
)
from ..memory.host_memory import MAX_COPIES, size_text
from ..memory.registration import Registration
from ..memory.streams import Freed, in_parallel
from ..protocol.errors import (
    Closed,
    CorruptTransfer,
    HostMemoryFull,
    TensorHubError,
    UsageError,
    VersionConflict,
    error_from_code,
)
from ..protocol.manifest import Manifest
from ..protocol.messages import Failure
from ..protocol.names import Digest, Version, WorkerId
from ..reshard.plan import copy_boxes, inside
from ..reshard.read import TiledVersion
from ..transport import sealed
from ..transport.base import ByteStream, Progress, Transport
from ..transport.sealed import Shared
from ..transport.threads import as_ours
from ..worker.events import CopiedIn, CopiedOut, CopyCounted, CopyDropped, Event
from .config import Verify
from .content import Content, Known, TrustedSink, key_of
from .loops import in_thread, report_end
from .metrics import FAILURES, Record

_log = logging.getLogger(__name__)

Look = Callable[[int, Sequence[memoryview], Sequence[memoryview]], None]

COUNT_EVERY_S = 1.0  # a look whether memory that is shared counts here now: as often as reports
MAX_REMEMBERED = 16  # versions that found no room
UNPUBLISH = "unpublish() before tensors are freed or given other memory, or use mutating(version=...)"


class HostCopies:
    """The host copies of one worker. Used in the worker's loop only."""

    def __init__(
        self,
        me: WorkerId,
        transports: Mapping[str, Transport],
        *,
        verify: Verify,
        limit_bytes: int | None,
        tell: Callable[[Event], None],
        withdraw: Callable[[str], None],
    ) -> None:
        """`withdraw` waits, in a thread, until a key has no readers."""
        self.me = me
        self._transports = transports
        self._verify = verify
        self._limit_bytes = limit_bytes
        self.most = MAX_COPIES  # without a limit on host memory
        self.pinned_bytes: int | None = None  # limit of this process; None: a share of the host's memory
        self._tell = tell
        self._withdraw = withdraw
        self._pool: HostMemory | None = None
        self._former: list[HostMemory] = []  # of tensors registered before, while there are copies of those
        self._contents: dict[Version, tuple[HostMemory | None, Content]] = {}  # None: it is another worker's memory
        self._uncounted: dict[Version, Shared] = {}  # which another worker counts
        self._counted_bytes: dict[Version, int] = {}  # of what was another worker's, and counts here now
        self._tasks: set[asyncio.Task[None]] = set()
        self._no_room: dict[Version, int] = {}  # how often there was none to fetch it ahead
        self.errors: dict[str, TensorHubError] = {}  # by code: the newest of this call that is not to be retried
        self.record = Record()
        self.offloaded_bytes = 0  # copied from registered memory, in all
        self.spoiled: Failure | None = None  # why what the tensors held could not be kept: they were freed
        self._is_closed = threading.Event()
        self._copying = threading.Lock()  # held by the thread that copies: one at a time, as the machine has it

    def failure(self, error: TensorHubError) -> Failure:
        """The failure for the machine and the server. If it ends the call, the caller gets the error itself."""
        self.record.add(FAILURES, 1, error.code)
        if not error.retryable:
            self.errors[error.code] = error.with_traceback(None)
        return Failure.of(error)

    def register(self, registration: Registration) -> int:
        """Make copies of these tensors from now on. Returns how many copies the limit allows if there are no others.

        Never fewer than there are already: those are counted on, and cannot go at once.
        """
        if self._pool is not None:
            self._pool.retire()
            self._former = [pool for pool in (*self._former, self._pool) if pool.used_bytes]
            self._pool = None
        digest = registration.layout_digest
        had = sum(
            pool is not None and each.registration.layout_digest == digest for pool, each in self._contents.values()
        )
        self._pool = HostMemory(
            registration,
            self._limit_bytes,
            most=self.most,
            had=had,
            taken_bytes=self.used_bytes,
            pinned_bytes=self.pinned_bytes,
        )
        level = logging.WARNING if self._pool.is_short else logging.INFO
        _log.log(level, "%s: copies of versions that must be kept may take %s", self.me, self._pool.cost)
        if reason := sealed.why_not():
            _log.info("%s: readers of this host cannot map them: %s", self.me, reason)
        return self._pool.most

    def prepare(self, registration: Registration) -> None:
        """What these tensors hold was published: have memory for a copy of it before one is wanted."""
        if self._pool is not None and isinstance(registration.stream, Direct) and not self._is_closed.is_set():
            self._pool.prepare(registration.stream.registrar())

    @property
    def is_short(self) -> bool:
        """There is no memory for a copy, whatever is allowed."""
        return self._pool is not None and self._pool.is_short

    @property
    def allowance(self) -> str:
        """What copies may take, and which setting says so."""
        given = "is not set" if self._limit_bytes is None else f"is {size_text(self._limit_bytes)}"
        return f"host_bytes {given}, and copies may take {self._pool.cost if self._pool is not None else 'nothing'}"

    @property
    def why_pageable(self) -> str:
        """Why the newest copy of tensors on a device is not pinned; empty where it is, or where there is none."""
        return self._pool.why_pageable if self._pool is not None else ""

    @property
    def why_none(self) -> str:
        """Which limit has no room for any copy of the tensors; empty if there is room."""
        return self._pool.why_none if self._pool is not None else ""

    @property
    def limit_bytes(self) -> int:
        """What all copies together may take."""
        return self._pool.limit_bytes if self._pool is not None else 0

    def content(self, version: Version, root: Digest, *, is_ahead: bool = False) -> Content:
        """Returns the copy of that content, or memory for it (ahead: if it can be spared). Raises `HostMemoryFull`.

        And `VersionConflict`, where that number is kept with other content.
        """
        found = self._contents.get(version)
        if found is not None:
            if found[1].root != root:
                raise VersionConflict(f"{self.me} keeps a host copy of version {version} with other content")
            return found[1]
        assert self._pool is not None, "a host copy before register()"
        content = Content(version, root, self.key(version), self._pool.take(is_ahead=is_ahead))
        self._contents[version] = (self._pool, content)
        return content

    def has(self, version: Version) -> bool:
        """There is one of that version, or it is being made."""
        return version in self._contents

    def not_ahead(self, version: Version, error: TensorHubError) -> None:
        """There is no room to fetch it ahead. It is tried again; aloud the second time, and not once more."""
        self._no_room[version] = times = self._no_room.pop(version, 0) + 1
        while len(self._no_room) > MAX_REMEMBERED:
            del self._no_room[next(iter(self._no_room))]
        level = logging.WARNING if times == 2 else logging.INFO  # the first time others may be about to make room
        _log.log(level, "%s: version %d is not fetched ahead: %s", self.me, version, error)

    def key(self, version: Version) -> str:
        """Under which peers read that copy."""
        return key_of(self.me.model, version, self.me.shard, on_host=True)

    @property
    def used_bytes(self) -> int:
        pools = self._former if self._pool is None else [*self._former, self._pool]
        return sum(pool.used_bytes for pool in pools) + sum(self._counted_bytes.values())

    def close(self) -> None:
        """Blocks until no thread copies any more; any thread may call it."""
        self._is_closed.set()
        if (pool := self._pool) is not None:
            pool.close()
        with self._copying:
            pass

    def let_go(self) -> None:
        """It was closed, and has no readers: all memory is given back."""
        self._pool, self._former = None, []
        self._contents, self._uncounted, self._counted_bytes = {}, {}, {}

    # --- what the machine wants ---------------------------------------------------------------------------------------

    def copy_to_host(self, held: Content, *, is_ahead: bool = False) -> None:
        """Offload what the registered memory holds; or ahead of need."""
        manifest = held.manifest
        assert manifest is not None, "offload of what has no manifest"

        gone: list[str] = []  # tensors whose memory is not there any more

        def copy() -> None:  # the device has been waited for when this was published, or filled
            check = self._chunk_check(content.registration, manifest)
            streams = held.registration.stream, content.registration.stream
            try:
                if not self._offload(held, content, pool, manifest, check):
                    self._copy(*streams, manifest, lambda chunk, _, mine: check(chunk, mine))
                self._judge_whole(content.registration, manifest)
            except Freed as error:
                gone.extend(freed(held.registration, [error.at]))
            except CorruptTransfer:  # or freed, and its memory kept by the allocator
                gone.extend(held.registration.moved())
                if not gone:
                    raise
            else:
                gone.extend(held.registration.moved() if not manifest.digests else ())
            if gone:  # to the server as if it had been changed: there is nothing left to keep
                text = f"the memory of these tensors was freed while version {held.version} was published: {some(gone)}"
                raise CorruptTransfer(text, hint=UNPUBLISH)

        async def run() -> None:
            failure = await self._try(copy, is_ahead=is_ahead)
            if failure is None:
                self.offloaded_bytes += manifest.size_bytes
                failure = self._served(content, manifest)
            self.spoiled = failure if gone else None
            self._tell(CopiedOut(held.version, failure))

        try:
            content = self.content(held.version, held.root, is_ahead=is_ahead)
            pool, _ = self._contents[held.version]
        except TensorHubError as error:
            self._say(error, is_ahead=is_ahead)
            failure = self.failure(error)
            asyncio.get_running_loop().call_soon(self._tell, CopiedOut(held.version, failure))
            return
        self._start(run())

    def copy_in(self, version: Version, target: Registration, then: Callable[[Known], None]) -> None:
        """Fill the registered memory. `then` gets the manifest before the machine hears that it is done."""
        pool, content = self._contents[version]
        manifest = content.manifest
        assert manifest is not None, "a whole copy has a manifest"

        def copy() -> None:
            target.settle_to_fill()
            check = self._chunk_check(target, manifest)
            streams = content.registration.stream, target.stream
            try:
                look = lambda chunk, ours, _: check(chunk, ours)  # noqa: E731 - theirs may be freed at any moment
                if not self._load(content, target, pool, manifest):
                    self._copy(*streams, manifest, look)
                self._judge_whole(target, manifest)
            except Freed as error:
                text = (
                    f"the memory of these tensors was freed while they were filled: {some(freed(target, [error.at]))}"
                )
                raise UsageError(
                    text, hint="register() again what was given other memory, and update once more"
                ) from error

        async def run() -> None:
            failure = await self._try(copy)
            if failure is None:
                then(manifest)
            self._tell(CopiedIn(version, failure))

        self._start(run())

    def map_shared(self, version: Version, sink: TrustedSink, registration: Registration) -> Content:
        """Check a mapped copy of another worker, and let peers read it here too. Runs in a thread.

        `registration` is of the tensors whose layout it has. Raises `CorruptTransfer`, or `SessionLost` once the sink
        may trust nothing any more.
        """
        assert sink.shared is not None, "nothing was mapped"
        ours, manifest = over_shared(registration, *sink.shared), sink.manifest
        content = Content(version, manifest.root(), self.key(version), ours)
        fill = FillSink(ours, content.root, verify=self._verify)

        def one(chunk: int) -> None:
            if self._is_closed.is_set():
                raise Closed(f"{self.me} was closed")
            sink.check()
            with ours.stream.views_to_read(*manifest.chunk_range(chunk)) as views:
                fill.accept(chunk, views)
            sink.check()
            fill.stored(chunk)

        missing = fill.begin(manifest.encode())
        in_parallel(one, missing, threads=min(COPY_THREADS, len(missing)), name="share")
        failure = self._served(content, manifest)
        if failure is not None:
            self._withdraw(content.key)  # the transports that have taken it
            raise error_from_code(failure.code, failure.message, hint=failure.hint)
        return content

    def keep_shared(self, content: Content, sink: TrustedSink) -> None:
        """It is a copy of this worker now, and the machine is about to hear of it. Another worker counts it."""
        assert sink.shared is not None, "nothing was mapped"
        memory, _ = sink.shared
        self._contents[content.version] = (None, content)
        self._uncounted[content.version] = memory
        # Not at once: the machine cannot count a copy that it has not heard of.
        asyncio.get_running_loop().call_soon(self._look_who_counts, content.version, memory)

    def _look_who_counts(self, version: Version, memory: Shared) -> None:
        if self._uncounted.get(version) is not memory or self._is_closed.is_set():
            return
        if memory.counts_here:
            del self._uncounted[version]
            self._counted_bytes[version] = memory.size_bytes
            self._tell(CopyCounted(version))
        else:
            asyncio.get_running_loop().call_later(COUNT_EVERY_S, self._look_who_counts, version, memory)

    def drop(self, version: Version) -> None:
        """Cut its readers off, and free its memory."""
        gone = self.let_go_of(version)

        async def run() -> None:
            await gone
            self._tell(CopyDropped(version))

        self._start(run())

    def let_go_of(self, version: Version) -> Coroutine[object, object, None]:
        """It is none of the copies from now on. What is to be awaited cuts its readers off, and frees its memory."""
        found = self._contents.pop(version, None)
        self._uncounted.pop(version, None)

        async def run() -> None:
            if found is None:
                return
            pool, content = found
            content.stop(TensorHubError(f"{self.me} released its host copy of version {version}"))
            await in_thread(lambda: self._withdraw(content.key), name="withdraw", otherwise="wait")
            self._counted_bytes.pop(version, None)
            if pool is not None:
                pool.give(content.registration)

        return run()

    # ------------------------------------------------------------------------------------------------------------------

    def _offload(
        self,
        held: Content,
        content: Content,
        pool: HostMemory | None,
        manifest: Known,
        check: Callable[[int, Sequence[memoryview]], None],
    ) -> bool:
        """Copy with the native library, if possible. Returns whether it has copied. Tiles are checked at the end."""
        source, target, is_over = held.registration.stream, content.registration.stream, self._is_closed.is_set
        if isinstance(manifest, Manifest) and can_offload(source, target, manifest):
            return offload(source, target, manifest, verify=self._verify == "full", check=check, is_over=is_over)

        def look(start: int, stop: int) -> None:
            with target.views_to_read(start, stop) as views:
                check(start // manifest.chunk_bytes, views)

        return _is_dense(manifest, source) and copy_directly(
            source, content.registration, pool, manifest.chunk_bytes, to_host=True, on_chunk=look, is_over=is_over
        )

    def _load(self, content: Content, target: Registration, pool: HostMemory | None, manifest: Known) -> bool:
        """Copies a host copy into the registered tensors."""
        is_done = _is_dense(manifest, target.stream) and copy_directly(
            target.stream,
            content.registration,
            pool,
            manifest.chunk_bytes,
            to_host=False,
            on_chunk=lambda start, stop: None,
            is_over=self._is_closed.is_set,
        )
        if is_done and isinstance(manifest, Manifest) and manifest.digests and self._verify == "full":
            fill = FillSink(target, manifest.root(), verify=self._verify)
            fill.begin(manifest.encode())
            check_filled(fill, target.stream, content.registration.stream)
        return is_done

    def _copy(self, source: ByteStream, target: ByteStream, manifest: Known, look: Look) -> None:
        """Copies all bytes; with boxes, only those that belong to the version."""
        is_over = self._is_closed.is_set
        if isinstance(manifest, TiledVersion):
            copy_boxes(source, target, manifest.tiles.table, chunk_bytes=manifest.chunk_bytes, is_over=is_over)
        else:
            copy_stream(source, target, manifest.chunk_bytes, look, is_over=is_over)

    def _chunk_check(self, target: Registration, manifest: Known) -> Callable[[int, Sequence[memoryview]], None]:
        """Checks each chunk as a fill does, which is the one place that knows how. Tiles are checked in the end."""
        if isinstance(manifest, TiledVersion):
            return lambda chunk, views: None
        verify: Verify = self._verify if manifest.digests else "none"
        fill = FillSink(target, manifest.root(), verify=verify)
        fill.begin(manifest.encode())
        return fill.accept

    def _judge_whole(self, target: Registration, manifest: Known) -> None:
        if isinstance(manifest, TiledVersion) and self._verify == "full":
            manifest.check(target, f"what was copied by {self.me}")

    async def _try(self, work: Callable[[], None], *, is_ahead: bool = False) -> Failure | None:
        def alone() -> None:
            with self._copying:
                work()

        try:
            await in_thread(alone, name="copy")
        except Exception as error:  # noqa: BLE001 - the top of a task: the machine waits for the end of the copy
            if not isinstance(error, TensorHubError):
                _log.exception("%s: copying to or from host memory failed", self.me)
                error = as_ours(error, "copying to or from host memory failed")
            each: BaseException | None = error
            while each is not None:  # a log may keep it, and the frames that it knows: the copy's memory is in them
                each = each.with_traceback(None).__cause__ or each.__context__
            self._say(error, is_ahead=is_ahead)
            failure = self.failure(error)
            if isinstance(error, CorruptTransfer) and not failure.hint:
                hint = "were the published tensors changed in place? weights.check() tells"
                failure = Failure(failure.code, failure.message, hint)
            return failure
        return None

    def _say(self, error: TensorHubError, *, is_ahead: bool) -> None:
        """A copy for which there was no room is tried again when it is needed."""
        is_harmless = is_ahead and isinstance(error, HostMemoryFull)
        _log.log(logging.INFO if is_harmless else logging.WARNING, "%s: %s", self.me, error)

    def _served(self, content: Content, manifest: Known) -> Failure | None:
        """Let peers read a whole copy. Returns why, if no peer can read it."""
        error = content.export(self._transports, manifest, Progress(manifest.chunk_count, complete=True))
        return Failure.of(error) if error is not None else None

    def _start(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(report_end)


def _is_dense(known: Known, device: ByteStream) -> bool:
    """True if all bytes on the device belong to the version."""
    if not isinstance(device, Direct):
        return False
    return isinstance(known, Manifest) or inside(known.tiles.table)[0] == [(0, known.size_bytes)]
