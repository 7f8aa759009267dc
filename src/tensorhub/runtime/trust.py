"""A read counts only while its reader may trust it: inside its own lease, and until it was told to stop.

`TrustedSink` stands between a transport and a fill and asks the gate before and after a chunk is judged, and again
before it is counted. It must never: prolong anything by itself.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from ..core.errors import SessionLost
from ..core.manifest import Manifest
from ..memory.fill import FillSink
from ..transport.base import ByteStream, Look, Terms
from ..transport.gates import Gate, Until
from ..transport.sealed import Shared


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
        self.stop_gate = Gate()
        self.is_touched = False
        self._fill = fill
        self._lease = lease
        self._on_touch = on_touch
        self._gate = threading.Lock()

    @property
    def is_stopped(self) -> bool:
        """Nothing counts any more."""
        return self.stop_gate.is_shut

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
            with self._gate:
                self._check()
                is_first, self.is_touched = not self.is_touched, True
                self._lease.is_touched |= is_first
            if is_first:
                self._on_touch()
        self._fill.touch()

    def bar(self) -> bool:
        """Let nothing be written any more unless something was before. Returns whether it was; final either way."""
        with self._gate:
            self.stop_gate.shut()
            return self.is_touched

    def terms(self) -> Terms | None:
        """The fill's, for as long as this read is trusted."""
        terms = self._fill.terms()
        if terms is None or self._lease.clock is not time.monotonic:
            return None
        return replace(terms, gates=(*terms.gates, self.stop_gate), until=self._lease.end)

    def told(self, size_bytes: int) -> None:
        self._fill.told(size_bytes)

    def check(self) -> None:
        self._check()
        self._fill.check()

    def observe(self, chunk: int) -> Look | None:
        return self._fill.observe(chunk)

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
