"""Streams in device memory, as the transport `cuda` sees them: what a device can do for two processes of one host.

The memory layer implements these for CUDA. Tests implement them on shared host memory.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from .base import ByteStream
from .ranges import Batches, Scatter

WINDOWS = 2  # of a landing that are under way at a time: the device gathers one while the host judges the other


@dataclass(frozen=True)
class Shared:
    """A stream's memory, shared: as long as this is known, other processes can open it, and may have it open."""

    body: bytes  # what they need for that
    memory: object = None  # is given up when nothing knows it any more


class Opened(Protocol):
    """Another process's stream, or a part of it, open here. It is closed when nothing knows it any more."""

    @property
    def size_bytes(self) -> int: ...


class RingMemory(Protocol):
    """Memory that a source and one reader have open, and that the devices of both can reach."""

    @property
    def handle(self) -> bytes:
        """What the reader's device opens it by."""
        ...

    def part(self, at: int, start: int, stop: int) -> Opened:
        """The memory from its byte `at` on, seen as bytes [start, stop) of a stream."""
        ...

    def close(self) -> None:
        """Nothing is copied there any more. Idempotent."""
        ...


class Landing(Protocol):
    """Device memory of bounded size, where batches of another layout land before they go to their places.

    At most `WINDOWS` windows of batches are under way. One thread uses it. All methods raise `TransferError`.
    """

    def reach(self, first: int) -> int:
        """The batch behind the last one of the largest window that begins with this one."""
        ...

    def gather(self, batches: range) -> None:
        """Begin to bring these batches from the source. Returns at once."""
        ...

    def digests(self) -> bytes:
        """Wait for the earliest window under way: the digest of each of its tiles, 16 bytes each, if they are made."""
        ...

    def scatter(self) -> None:
        """Put the earliest window under way in place. Returns when it is."""
        ...

    def close(self) -> None:
        """Wait for what is under way, put none of it in place, and give the memory back."""
        ...


@runtime_checkable
class OnDevice(Protocol):
    """A stream whose bytes may lie on a device."""

    @property
    def device(self) -> str:
        """Its name in this process, where all of it is on one."""
        ...

    @property
    def is_on_device(self) -> bool:
        """All of them do, and the device can copy and digest them."""
        ...

    def share(self) -> Shared:
        """For all readers. Raises `TransportMissing` where this memory cannot be shared."""
        ...

    def open(self, body: bytes) -> Opened:
        """What another process has shared. Raises `TransportMissing`, or `ValueError` where it is malformed."""
        ...

    def make_ring(self, size_bytes: int) -> RingMemory:
        """New memory of this device that another process can open. Raises `TransportMissing`."""
        ...

    def open_ring(self, handle: bytes, size_bytes: int) -> RingMemory:
        """What another process has made. Raises `TransportMissing`, or `ValueError` where it is malformed."""
        ...

    def pin_ring(self, address: int, size_bytes: int) -> RingMemory:
        """Memory of the host, which stays mapped there until this is closed. Raises `TransportMissing`."""
        ...

    def copy_to(self, target: Opened, start: int, stop: int, chunk_bytes: int) -> None:
        """Copy bytes [start, stop) there, which begin with a chunk. Returns when they are there.

        Raises `TransferError`.
        """
        ...

    def copy_from(self, source: Opened, start: int, stop: int, chunk_bytes: int, *, digests: bool) -> list[bytes]:
        """Copy bytes [start, stop), which begin with a chunk. Returns when they are here, with each chunk's digest.

        Without `digests` the list is empty. Raises `TransferError`.
        """
        ...

    def land(self, source: Opened, batches: Batches, scatter: Scatter, *, digests: bool) -> Landing:
        """For batches that belong here. Raises `TransportMissing` where they cannot come this way, `TransferError`."""
        ...


def on_device(stream: ByteStream) -> OnDevice | None:
    """The stream, if all of it lies on a device."""
    return stream if isinstance(stream, OnDevice) and stream.is_on_device else None
