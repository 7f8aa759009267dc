"""Streams in device memory, as the transport `cuda` sees them: what a device can do for two processes of one host.

The memory layer implements these for CUDA. Tests implement them on shared host memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from .base import ByteStream


@dataclass(frozen=True)
class Shared:
    """What one reader needs to open a stream's memory."""

    body: bytes
    give_up: Callable[[], object]  # to be called where the reader has not opened it


class Opened(Protocol):
    """Another process's stream, open for reading. It is closed when nothing knows it any more."""

    @property
    def size_bytes(self) -> int: ...


@runtime_checkable
class OnDevice(Protocol):
    """A stream whose bytes may lie on a device."""

    @property
    def is_on_device(self) -> bool:
        """All of them do, and the device can copy and digest them."""
        ...

    def share(self) -> Shared:
        """For one reader. Raises `TransportMissing` where this memory cannot be shared."""
        ...

    def open(self, body: bytes) -> Opened:
        """What another process has shared. Raises `TransportMissing`, or `ValueError` where it is malformed."""
        ...

    def copy_from(self, source: Opened, start: int, stop: int, chunk_bytes: int, *, digests: bool) -> list[bytes]:
        """Copy bytes [start, stop), which begin with a chunk. Returns when they are here, with each chunk's digest.

        Without `digests` the list is empty. Raises `TransferError`.
        """
        ...


def on_device(stream: ByteStream) -> OnDevice | None:
    """The stream, if all of it lies on a device."""
    return stream if isinstance(stream, OnDevice) and stream.is_on_device else None
