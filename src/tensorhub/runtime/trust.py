"""Sinks that stop counting chunks when their reader's lease ends or its read is stopped."""

import threading
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import inf

from ..memory.fill import FillSink
from ..protocol.errors import InvariantViolation, SessionLost, TensorHubError
from ..protocol.manifest import Manifest
from ..protocol.messages import Grant
from ..reshard.read import Leg, Offer
from ..transport.base import ByteStream, StopFlag, Terms, Until
from ..transport.ranges import Batches
from ..transport.sealed import Shared

# --- A read counts only while its reader may trust it: inside its own lease, and until it was told to stop.
#
# `TrustedSink` stands between a transport and a fill and asks the stop flag before and after a chunk is judged, and
# again before it is counted. It must never: prolong anything by itself.


class Lease:
    """Until when this worker trusts what it reads (`time.monotonic()`); written by the loop, read by any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.end = Until(-inf)
        self.clock = clock
        self.is_touched = False  # a byte may have been written, of which the machine has not heard yet

    @property
    def until(self) -> float:
        return self.end.value

    @until.setter
    def until(self, moment: float) -> None:
        self.end.value = moment

    @property
    def is_over(self) -> bool:
        return self.clock() >= self.until


class TrustedSink:
    """A `Sink` for one read: the fill behind it, as long as the read is trusted."""

    def __init__(
        self,
        fill: FillSink,
        lease: Lease,
        *,
        is_cross_site: bool = False,
        is_only_opened: bool = False,
        shares: bool = False,
        on_touch: Callable[[], None] = lambda: None,
    ) -> None:
        """`is_cross_site`: the source is in another site, which a transport may like to know. `is_only_opened`: the
        manifest is wanted, and no chunk. `shares`: the manifest, and the source's memory if that can be had. `on_touch`
        is called once, in a transport's thread, before the first byte is written.
        """
        self.is_cross_site = is_cross_site
        self.is_only_opened = is_only_opened or shares
        self.shares = shares
        self.shared: tuple[Shared, int] | None = None  # the memory, and where in it the bytes begin
        self.stop_flag = StopFlag()
        self.is_touched = False
        self._fill = fill
        self._lease = lease
        self._on_touch = on_touch
        self._lock = threading.Lock()

    @property
    def is_stopped(self) -> bool:
        """Nothing counts any more."""
        return self.stop_flag.is_set

    @property
    def stream(self) -> ByteStream:
        return self._fill.stream

    @property
    def is_checking(self) -> bool:
        return self._fill.is_checking

    @property
    def chunk_bytes(self) -> int:
        return self._fill.chunk_bytes

    def begin(self, manifest: bytes) -> Sequence[int]:
        self._check()
        missing = self._fill.begin(manifest)
        return () if self.is_only_opened else missing

    @property
    def manifest(self) -> Manifest:
        """The source's, once it has come and is the right one."""
        return self._fill.manifest

    def share(self, memory: object, address: int) -> None:
        assert isinstance(memory, Shared), "memory that cannot be kept"
        self.shared = (memory, address)

    def touch(self) -> None:
        self._check()
        if not self.is_touched:
            with self._lock:
                self._check()
                is_first, self.is_touched = not self.is_touched, True
                self._lease.is_touched |= is_first
            if is_first:
                self._on_touch()
        self._fill.touch()

    def bar(self) -> bool:
        """Let nothing be written any more unless something was before. Returns whether it was; final either way."""
        with self._lock:
            self.stop_flag.set()
            return self.is_touched

    def terms(self) -> Terms | None:
        """The fill's, for as long as this read is trusted."""
        terms = self._fill.terms()
        if terms is None or self._lease.clock is not time.monotonic:
            return None
        return replace(terms, stop_flags=(*terms.stop_flags, self.stop_flag), until=self._lease.end)

    def told(self, size_bytes: int) -> None:
        self._fill.told(size_bytes)

    def check(self) -> None:
        self._check()
        self._fill.check()

    def accept(self, chunk: int, views: Sequence[memoryview]) -> None:
        self._check()
        self._fill.accept(chunk, views)
        self._check()

    def stored(self, chunk: int) -> None:
        self._check()
        self._fill.judge_in_place(chunk)  # it takes a while
        self._check()
        self._fill.stored(chunk)

    def take(self, chunks: range, digests: Sequence[bytes] | None) -> None:
        self._check()
        self._fill.take(chunks, digests)
        self._check()

    def _check(self) -> None:
        """`SessionLost` is raised by nothing else on the way of a read: it says that no source is to blame."""
        if self.is_stopped:
            raise SessionLost("this read was told to stop")
        if self._lease.is_over:
            raise SessionLost("the lease under which this read was granted has ended")


# --- The sinks of a read of tiles: one that only looks at what a source is, and one for each leg that brings bytes.
#
# A read of several sources writes the memory as one: `Touch` knows whether any of them may have written, and lets all
# of them write nothing more. Each part has a stop flag of its own besides. It must never: prolong anything by itself.


NOTHING = Batches.of(array("q"), [], 0)


class Touch:
    """Whether a read may have written anything yet; and its end."""

    def __init__(self, lease: Lease, on_touch: Callable[[], None]) -> None:
        """`on_touch` is called once, in a transport's thread, before the first byte is written."""
        self.stop_flag = StopFlag()
        self.lease = lease
        self.is_touched = False
        self._on_touch = on_touch
        self._lock = threading.Lock()

    def touch(self, check: Callable[[], None]) -> None:
        """Something is about to be written, unless `check` raises."""
        if self.is_touched:
            return
        with self._lock:
            check()
            is_first, self.is_touched = not self.is_touched, True
            self.lease.is_touched |= is_first
        if is_first:
            self._on_touch()

    def bar(self) -> bool:
        """Let nothing count any more. Returns whether anything may have been written; if not, it never will be."""
        with self._lock:
            self.stop_flag.set()
            return self.is_touched

    def let_go(self) -> None:
        """Nothing of it runs any more. Held from both sides, read and content would wait for the garbage collector."""
        self._on_touch = _nobody


def _nobody() -> None:
    raise InvariantViolation("a read that was over has touched something")


class Trusted:
    """What both kinds of sinks ask before and after anything counts."""

    def __init__(self, touch: Touch, *, is_cross_site: bool) -> None:
        self.is_cross_site = is_cross_site
        self.stop_flag = StopFlag()
        self._touch = touch

    @property
    def is_stopped(self) -> bool:
        """Nothing of it counts any more."""
        return self.stop_flag.is_set or self._touch.stop_flag.is_set

    def stop(self) -> None:
        """This part only."""
        self.stop_flag.set()

    def check(self) -> None:
        """`SessionLost` says that no source is to blame."""
        if self.is_stopped:
            raise SessionLost("this read was told to stop")
        if self._touch.lease.is_over:
            raise SessionLost("the lease under which this read was granted has ended")


class Looking(Trusted):
    """Takes what a source shows of itself, and wants no piece of it. It is a stream of nothing at the same time."""

    is_checking = True
    size_bytes = 0
    chunk_bytes = 1

    def __init__(self, grant: Grant, touch: Touch) -> None:
        super().__init__(touch, is_cross_site=grant.is_cross_site)
        self.offer: Offer | None = None
        self._grant = grant
        self._batches = NOTHING

    @property
    def stream(self) -> ByteStream:
        return self

    @property
    def batches(self) -> Batches:
        return self._batches

    def begin(self, manifest: bytes) -> Sequence[int]:
        self.check()
        offer = Offer(str(self._grant.source), self._grant.root, bytes(manifest))
        self._batches = replace(NOTHING, source_bytes=offer.cut.table.size_bytes)
        self.offer = offer
        return ()

    def wrong_tile(self, tile: int) -> TensorHubError:
        raise InvariantViolation("a look was given bytes")

    def reading(self, start: int, stop: int) -> AbstractContextManager[Sequence[memoryview]]:
        return nullcontext(())

    def writing(self, start: int, stop: int) -> AbstractContextManager[Sequence[memoryview]]:
        raise InvariantViolation("a look wrote something")

    def touch(self) -> None:
        raise InvariantViolation("a look touched something")

    def accept(self, chunk: int, views: Sequence[memoryview]) -> None:
        raise InvariantViolation("a look was given bytes")

    def stored(self, chunk: int) -> None:
        raise InvariantViolation("a look was given bytes")


class TrustedLeg(Trusted):
    """One leg of a fill, for as long as its read is trusted and its part was not told to stop."""

    def __init__(self, leg: Leg, touch: Touch, *, is_cross_site: bool) -> None:
        super().__init__(touch, is_cross_site=is_cross_site)
        self.leg = leg

    @property
    def batches(self) -> Batches:
        return self.leg.batches

    @property
    def is_checking(self) -> bool:
        return self.leg.is_checking

    @property
    def stream(self) -> ByteStream:
        return self.leg.stream

    @property
    def chunk_bytes(self) -> int:
        return self.leg.chunk_bytes

    def begin(self, manifest: bytes) -> Sequence[int]:
        self.check()
        return self.leg.begin(manifest)

    def touch(self) -> None:
        self.check()
        self._touch.touch(self.check)
        self.leg.touch()

    def terms(self) -> Terms | None:
        """The leg's, for as long as this read is trusted."""
        terms = self.leg.terms()
        if terms is None or self._touch.lease.clock is not time.monotonic:
            return None
        stop_flags = (*terms.stop_flags, self._touch.stop_flag, self.stop_flag)
        return replace(terms, stop_flags=stop_flags, until=self._touch.lease.end)

    def told(self, size_bytes: int) -> None:
        self.leg.told(size_bytes)

    def check(self) -> None:
        super().check()
        self.leg.check()

    def accept(self, chunk: int, views: Sequence[memoryview]) -> None:
        self.check()
        self.leg.accept(chunk, views)
        self.check()

    def stored(self, chunk: int) -> None:
        self.check()
        self.leg.stored(chunk)

    def count(self, batches: range) -> None:
        self.check()
        self.leg.count(batches)

    def wrong_tile(self, tile: int) -> TensorHubError:
        return self.leg.wrong_tile(tile)
