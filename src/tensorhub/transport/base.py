"""What every transport offers: exports, reads, sinks, progress, stop flags, and the choice among transports."""

import ctypes
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ..protocol.errors import TensorHubError, TransferError
from .native import load, shapes

if TYPE_CHECKING:
    from .ranges import Scatter


# --- Stop flags for Python and native threads: a thread looks at its flags before it lets a chunk count.


class StopFlag:
    """Clear at first; set once, for good."""

    def __init__(self) -> None:
        self.state = shapes.StopFlag()

    @property
    def is_set(self) -> bool:
        return bool(self.state.is_set)

    def set(self) -> None:
        """When this returns, no thread of the mover is between looking at the flag and counting a chunk."""
        library = load.library()
        if library is None:
            self.state.is_set = 1
            return
        library.swap(self.address, 0, 1)
        while self.state.inside:  # for less than a microsecond, unless that thread does not get a core
            time.sleep(0)

    @property
    def address(self) -> int:
        """The address, for the native library."""
        return ctypes.addressof(self.state)


class Until:
    """A moment on the monotonic clock from which on nothing counts."""

    def __init__(self, value: float) -> None:
        self._value = ctypes.c_double(value)

    @property
    def value(self) -> float:
        return self._value.value

    @value.setter
    def value(self, moment: float) -> None:
        self._value.value = moment

    @property
    def address(self) -> int:
        """The address, for the native library."""
        return ctypes.addressof(self._value)


# --- Which chunks of a shard are complete: marks that Python and the mover share, or a lock where there is no mover.


class Progress:
    """A growing set of complete chunks. Thread-safe; `mark`, `fail` and `wake` wake a waiter."""

    def __init__(self, chunk_count: int, *, complete: bool = False) -> None:
        self.chunk_count = chunk_count
        self._have = bytearray(b"\x01" * chunk_count if complete else chunk_count)
        self._prefix = chunk_count if complete else 0
        self._failed: str | None = None
        self._changed = threading.Condition()
        self._library = load.library()
        self.marks: shapes.Marks | None = None  # the same for the mover, where it is in use
        if self._library is not None:
            have = (ctypes.c_ubyte * chunk_count).from_buffer(self._have) if chunk_count else None
            self._pinned = have  # while it lives the bytearray stays where it is
            address = ctypes.addressof(have) if have is not None else None
            self.marks = shapes.Marks(have=address, count=chunk_count, prefix=self._prefix)

    @property
    def prefix(self) -> int:
        """How many chunks are complete without a gap from the first on."""
        return self._prefix if self.marks is None else int(self.marks.prefix)

    @property
    def is_complete(self) -> bool:
        return self.prefix == self.chunk_count

    @property
    def failed(self) -> str | None:
        """Why no further chunk will come, or None."""
        return self._failed

    def has(self, chunk: int) -> bool:
        return bool(self._have[chunk])

    def mark(self, chunk: int) -> int:
        """The chunk is complete. Returns the prefix."""
        if self._library is not None:
            if not 0 <= chunk < self.chunk_count:
                raise IndexError(f"chunk {chunk} of {self.chunk_count}")
            return int(self._library.mark(self.marks, chunk))
        with self._changed:
            self._have[chunk] = 1
            while self._prefix < self.chunk_count and self._have[self._prefix]:
                self._prefix += 1
            self._changed.notify_all()
            return self._prefix

    def mark_all(self, chunks: Iterable[int]) -> None:
        """Mark these chunks as complete."""
        if isinstance(chunks, range) and chunks.step == 1 and self._library is not None:
            if chunks:
                self._have[chunks.start : chunks.stop] = b"\x01" * len(chunks)
                self.mark(chunks.start)  # the prefix goes on over the others
            return
        for chunk in chunks:
            self.mark(chunk)

    def missing(self) -> Sequence[int]:
        """The chunks that are not complete."""
        if 1 not in self._have:
            return range(self.chunk_count)
        return [chunk for chunk, has_it in enumerate(self._have) if not has_it]

    def fail(self, reason: str) -> None:
        """No further chunk will come. Wakes all waiters."""
        with self._changed:
            self._failed = self._failed or reason
            if self.marks is not None:
                self.marks.has_failed = 1
            self._changed.notify_all()
        self.wake()

    def wake(self) -> None:
        """Let all waiters look again at whether they still want to wait."""
        if self._library is not None:
            self._library.wake(self.marks)
            return
        with self._changed:
            self._changed.notify_all()

    def wait(self, chunk: int, timeout_s: float, given_up: Callable[[], bool] | None = None) -> bool:
        """Wait until the chunk is complete (True), or progress failed, time ran out or the waiter gave up (False).

        `given_up` is called at each wake-up, perhaps with a lock held, so it may only read a flag. The thread that
        sets the flag calls `wake`.
        """
        deadline = time.monotonic() + timeout_s
        lock: AbstractContextManager[object] = self._changed if self.marks is None else nullcontext()
        with lock:
            while True:
                seen = (
                    self.marks.changed if self.marks is not None else 0
                )  # before looking: a later change ends the wait
                if self._have[chunk]:
                    return True
                remaining = deadline - time.monotonic()
                if self._failed is not None or remaining <= 0 or (given_up is not None and given_up()):
                    return False
                if self._library is not None:
                    self._library.wait(self.marks, seen, remaining)
                else:
                    self._changed.wait(remaining)


# --- What every transport offers: memory is exported under a key, and a peer reads it chunk by chunk.
#
# A *key* is an opaque string, a *manifest* opaque bytes that travel ahead of the chunks. The `Sink` checks each chunk.
# Rules, which one contract suite checks for every transport:
# 1. A chunk is sent only when the export's `Progress` has it. A source that is itself filling serves what it has, and
#    the rest as it comes, in the order its reader asked for.
# 2. When `Read.on_end` is called, or `Transport.withdraw` has returned, no thread of this transport touches that memory
#    again. A reader that fetches the bytes itself cannot be called back: nothing that it reads once `withdraw` has
#    begun to return counts, and the sink does not check it.
# 3. No wait is unbounded: a peer that says nothing for `silence_s` is lost. A source that has nothing to send says so
#    at least every `silence_s / 4`.
# 4. Whatever a peer sends, only its own connection suffers.
#
# A `Piecewise` sink (`ranges.py`) reads parts of what is exported: what is said of chunks holds for its batches. A
# transport that cannot read parts ends such a read with `TransportMissing`, and the reader takes its next transport.
#
# Every socket goes through `threads.tracked`, so that no forked child keeps it open.


MAX_MANIFEST_BYTES = 64 << 20  # 4 million chunks of 16 B: 16 TiB in chunks of 4 MiB

OnEnd = Callable[[TensorHubError | None], None]


class ByteStream(Protocol):
    """The logical stream of one shard: `size_bytes` bytes that may lie in many pieces, on the host or on a device."""

    @property
    def size_bytes(self) -> int: ...

    def views_to_read(self, start: int, stop: int) -> AbstractContextManager[Sequence[memoryview]]:
        """Host views of bytes [start, stop) to send from; valid inside the block."""
        ...

    def views_to_write(self, start: int, stop: int) -> AbstractContextManager[Sequence[memoryview]]:
        """Host views of bytes [start, stop) to receive into; what was written is in place when the block ends."""
        ...


@dataclass(frozen=True)
class Export:
    """One readable thing. The bytes of chunks that `progress` has do not change until the key is withdrawn."""

    key: str
    manifest: bytes
    chunk_bytes: int
    stream: ByteStream
    progress: Progress


@runtime_checkable
class Scarce(Protocol):
    """A stream whose blocks take room that others wait for: no peer's patience may keep one open."""

    hold_s: float  # how long a block may wait for a peer


class Sink(Protocol):
    """Stores the bytes of a read, and checks them. Called from the transport's threads, several at once."""

    @property
    def is_cross_site(self) -> bool:
        """The source is at the end of a long path."""
        ...

    @property
    def is_checking(self) -> bool:
        """`accept` takes no chunk without the announced digest, so that memory may be read that is about to change."""
        ...

    @property
    def stream(self) -> ByteStream: ...

    @property
    def chunk_bytes(self) -> int:
        """Known once `begin` has returned."""
        ...

    def begin(self, manifest: bytes) -> Sequence[int]:
        """Take the source's manifest; return the chunks wanted, in order. Raises if the content is not the expected."""
        ...

    def touch(self) -> None:
        """Called before each chunk whose bytes are about to be written. Raises if nothing may be written any more."""
        ...

    def accept(self, chunk: int, views: Sequence[memoryview]) -> None:
        """Judge a chunk that has just been received into `views`. Raises `CorruptTransfer` if it is not right."""
        ...

    def stored(self, chunk: int) -> None:
        """The accepted chunk is in place (its `views_to_write` block has ended): it counts from now on.

        Raises `CorruptTransfer` if it is not right where it lies.
        """
        ...


@dataclass(frozen=True)
class Terms:
    """What a transport must know to check chunks by itself, without asking the sink for each."""

    digests: bytes | None  # xxh3-128 of every chunk, one after another; None: bytes are taken unchecked
    progress: Progress  # marked with every chunk that counts
    stop_flags: tuple[StopFlag, ...]  # while none is set, chunks count
    until: Until | None = None  # and not from this moment on
    scatter: "Scatter | None" = None  # of a read of pieces: `digests` are of its tiles, `progress` of its batches


@runtime_checkable
class Trusting(Protocol):
    """A sink that lets the transport check, where the bytes move without the interpreter.

    Such a transport calls `begin`, `touch` once before the first byte is written, and then only `told`; and when a
    chunk is wrong or nothing counts any more, `accept` or `check`, which say it in the sink's words.
    """

    def terms(self) -> Terms | None:
        """Asked after `begin`. None: it wants to see every chunk itself."""
        ...

    def told(self, size_bytes: int) -> None:
        """So many more bytes have come and count, as `progress` says: now and then, in one thread, and at the end."""
        ...

    def check(self) -> None:
        """Raises if nothing counts any more."""
        ...


@runtime_checkable
class Taking(Protocol):
    """A sink of chunks that are in place when they are checked, because a device or the hardware has put them there."""

    def take(self, chunks: range, digests: bytes | None) -> None:
        """Judge them, and count those that are right. Raises `CorruptTransfer` for the first that is not.

        `digests`: 16 bytes each, by the device that copied them; empty where the sink is not checking; None where
        none were made.
        """
        ...


@runtime_checkable
class Sharing(Protocol):
    """A sink that would rather keep the source's memory than have a copy of its bytes, where that is possible."""

    @property
    def shares(self) -> bool: ...

    def share(self, memory: object, address: int) -> None:
        """All bytes of the export lie there, and can never change. Called before `begin`, if at all.

        They stay there as long as `memory` lives.
        """
        ...


class Read(Protocol):
    """One read from one source, running in threads of its own."""

    def stop(self) -> None:
        """Ask it to end; returns at once. `on_end` follows, at the latest after the transport's silence limit."""
        ...

    @property
    def received_bytes(self) -> int:
        """Payload bytes received so far, good or bad, of chunks that came to their end."""
        ...

    @property
    def arrived_bytes(self) -> int:
        """Bytes received, including parts of chunks if known. They tell a slow source from a silent one."""
        ...

    @property
    def path(self) -> str:
        """How the bytes travel, in a few words for people; more exact once they do."""
        ...


class Transport(Protocol):
    """Moves registered bytes between two workers."""

    is_revocable: bool = False  # once `withdraw` has returned True, nothing that a peer took later ever counts there

    @property
    def endpoint(self) -> str:
        """Where peers reach this worker, e.g. `tcp://10.0.0.7:41234`."""
        ...

    @property
    def addresses(self) -> tuple[str, ...]:
        """The network addresses at which it listens, if any. A worker without a token listens on loopback only."""
        ...

    def export(self, export: Export) -> None:
        """Let peers read it from now on. Exporting a key again replaces the former export.

        Raises `Closed` after `close`.
        """
        ...

    def withdraw(self, key: str, *, timeout_s: float) -> bool:
        """Let no peer read it any more, cut its readers, and wait until no thread touches it. False: time ran out."""
        ...

    def withdraw_unread(self, key: str) -> bool:
        """Withdraw the export only if no peer reads it now. Returns at once; true if it is withdrawn."""
        ...

    def why_not(self, endpoint: str) -> str | None:
        """Why nothing can be read from there by this transport, where that is known without trying."""
        ...

    def read(self, endpoint: str, key: str, sink: Sink, on_end: OnEnd) -> Read:
        """Start reading. Never raises for what the network does: that comes with `on_end`, exactly once.

        Raises `Closed` after `close`, and `Unavailable` where no thread can be had. `on_end` is not called then.

        `on_end` gets None when all wanted chunks were accepted or the read was stopped, `SourceLost` when the source
        vanished, fell silent, refused or withdrew (its text names endpoint and key), `TransportMissing` when this
        transport cannot work between these two workers (another may: the source is not to blame), `HostMemoryFull`
        when this process has no memory for what is on its way, and otherwise what `sink.begin` or `sink.accept`
        raised. Once called it is let go, for it usually knows the read.
        """
        ...

    def statistics(self) -> dict[str, int]:
        """Counters since the start: bytes sent and received, reads and connections open now."""
        ...

    def close(self) -> None:
        """Stop serving and reading, and wait for all threads, the calling one excepted. Idempotent."""
        ...


# --- Which transport two workers take: the reader tries those that both have, in its own order.
#
# It leaves out endpoints that are known not to work. A chosen way carries the reason why each transport before it in
# the reader's order is not used.


@dataclass(frozen=True)
class Way:
    """An endpoint to read from. `why` says what speaks against the transports before it; empty: nothing was before."""

    scheme: str
    endpoint: str
    why: str


def scheme_of(endpoint: str) -> str:
    """The transport that an endpoint belongs to."""
    return endpoint.partition("://")[0]


def choose(
    offered: Sequence[str], here: Sequence[str], excluded: Mapping[str, str]
) -> tuple[tuple[Way, ...], tuple[str, ...]]:
    """The ways to try, best first, and in words why there are no others.

    `offered` are the source's endpoints; `here` the reader's transports, best first; `excluded` says of endpoints why
    they do not work for this reader.
    """
    ways: list[Way] = []
    reasons: list[str] = []
    for scheme in here:
        endpoints = [endpoint for endpoint in offered if scheme_of(endpoint) == scheme]
        if not endpoints:
            reasons.append(f"{scheme}: the source does not offer it")
        for endpoint in endpoints:
            if endpoint in excluded:
                reasons.append(f"{scheme}: {excluded[endpoint]}")
            else:
                ways.append(Way(scheme, endpoint, "; ".join(reasons)))
    unknown = dict.fromkeys(scheme_of(endpoint) for endpoint in offered if scheme_of(endpoint) not in here)
    reasons += [f"{scheme}: this worker does not have it" for scheme in unknown]
    return tuple(ways), tuple(reasons)


# --- One read, waited for: to measure or to try a way.


def read_to_end(transport: Transport, endpoint: str, key: str, sink: Sink, *, within_s: float) -> str:
    """Read all that the sink wants. Returns which way it went.

    Raises `TransferError` if that takes longer, and whatever ended the read otherwise (`Transport.read`).
    """
    ended, errors = threading.Event(), list[TensorHubError | None]()

    def end(error: TensorHubError | None) -> None:
        errors.append(error)
        ended.set()

    read = transport.read(endpoint, key, sink, end)
    if not ended.wait(within_s):
        read.stop()
        raise TransferError(f"only {read.received_bytes} B came in {within_s:.0f} s")
    if errors[0] is not None:
        raise errors[0]
    return read.path
