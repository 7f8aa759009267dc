"""What every transport offers: some memory is exported under a key, and a peer reads it chunk by chunk.

A transport moves bytes and knows nothing else: a *key* is an opaque string, a *manifest* opaque bytes that travel ahead
of the chunks, and whether a chunk is good is for the `Sink` to say. The rules that all of them keep, and that the one
contract suite checks for each:

1. A chunk is sent only when the export's `Progress` has it; a source that is itself filling serves what it has and the
   rest as it comes, in whatever order its reader asked.
2. When `Read.on_end` is called, or `Transport.withdraw` has returned, no thread of this transport touches that memory
   again. Until then the memory may not be reused. Where the reader fetches the bytes itself, it cannot be called back:
   there nothing that it reads once `withdraw` has begun to return counts, not even to be judged by the sink.
3. No wait is unbounded: a peer that says nothing for `silence_s` is lost. A source that has nothing to send says so at
   least every `silence_s / 4`.
4. Whatever a peer sends, nothing but its own connection suffers.

A sink that is `Piecewise` (`parcels`) reads parts of what is exported: what is said of chunks holds for its parcels.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ..core.errors import TensorHubError
from .gates import Gate, Until
from .progress import Progress

if TYPE_CHECKING:
    from .parcels import Scatter

MOST_MANIFEST_BYTES = 64 << 20  # 4 million chunks of 16 B: 16 TiB in chunks of 4 MiB

OnEnd = Callable[[TensorHubError | None], None]
Look = Callable[[memoryview], object]  # sees bytes that have just come


class ByteStream(Protocol):
    """The logical stream of one shard: `size_bytes` bytes that may lie in many pieces, on the host or on a device."""

    @property
    def size_bytes(self) -> int: ...

    def reading(self, start: int, stop: int) -> AbstractContextManager[Sequence[memoryview]]:
        """Host views of bytes [start, stop) to send from; valid inside the block."""
        ...

    def writing(self, start: int, stop: int) -> AbstractContextManager[Sequence[memoryview]]:
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
    """Where a read puts its bytes, and who judges them. Called from the transport's threads, several at once."""

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

    def observe(self, chunk: int) -> Look | None:
        """What wants to see the bytes of a chunk that begins to come, view by view, while a cache has them; or None.

        A courtesy, which a transport may leave out. It shows all views in order, each once its bytes are there, and
        what it has shown does not change any more before `accept`.
        """
        ...

    def accept(self, chunk: int, views: Sequence[memoryview]) -> None:
        """Judge a chunk that has just been received into `views`. Raises `CorruptTransfer` if it is not right."""
        ...

    def stored(self, chunk: int) -> None:
        """The accepted chunk is in place (its `writing` block has ended): it counts from now on.

        Raises `CorruptTransfer` if it is not right where it lies.
        """
        ...


@dataclass(frozen=True)
class Terms:
    """What a transport must know to judge chunks by itself, without asking the sink for each."""

    digests: bytes | None  # xxh3-128 of every chunk, one after another; None: bytes are taken unchecked
    progress: Progress  # marked with every chunk that counts
    gates: tuple[Gate, ...]  # while all are open, chunks count
    until: Until | None = None  # and not from this moment on
    scatter: "Scatter | None" = None  # of a read of pieces: `digests` are of its tiles, `progress` of its parcels


@runtime_checkable
class Trusting(Protocol):
    """A sink that lets the transport judge, where the bytes move without the interpreter.

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
    """A sink of chunks that are in place when they are judged, because a device or the hardware has put them there."""

    def take(self, chunks: range, digests: Sequence[bytes] | None) -> None:
        """Judge them, and count those that are right. Raises `CorruptTransfer` for the first that is not.

        `digests`: by the device that copied them; empty where the sink is not checking; None where nobody has looked.
        """
        ...


@runtime_checkable
class Sharing(Protocol):
    """A sink that would rather keep the source's memory than have a copy of its bytes, where that is possible."""

    @property
    def shares(self) -> bool: ...

    def share(self, memory: object, address: int) -> None:
        """All bytes of the export lie there, and nobody can change them any more. Called before `begin`, if at all.

        They stay there as long as `memory` is known to somebody.
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
        """The same with what has come of chunks under way, where that can be seen: it tells a slow source from none."""
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

    def export(self, export: Export) -> None:
        """Let peers read it from now on. Exporting a key again replaces the former export."""
        ...

    def withdraw(self, key: str, *, timeout_s: float) -> bool:
        """Let nobody read it any more, cut those who do, and wait until no thread touches it. False: time ran out."""
        ...

    def why_not(self, endpoint: str) -> str | None:
        """Why nothing can be read from there by this transport, where that is known without trying."""
        ...

    def read(self, endpoint: str, key: str, sink: Sink, on_end: OnEnd) -> Read:
        """Start reading. Never raises for what the network does: that comes with `on_end`, exactly once.

        `on_end` gets None when all wanted chunks were accepted or the read was stopped, `SourceLost` when the source
        vanished, fell silent, refused or withdrew, `TransportMissing` when this transport cannot work between these two
        workers (another may: the source is not to blame), `HostMemoryFull` when this process has no memory for what is
        on its way, and otherwise what `sink.begin` or `sink.accept` raised. Once called it is let go, for it usually
        knows the read.
        """
        ...

    def statistics(self) -> dict[str, int]:
        """Counters since the start: bytes sent and received, reads and connections open now."""
        ...

    def close(self) -> None:
        """Stop serving and reading, end every thread. Idempotent."""
        ...
