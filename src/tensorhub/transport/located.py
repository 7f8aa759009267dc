"""Streams whose bytes have addresses in this process, so that the kernel can be told where to copy from and to."""

from typing import Protocol, runtime_checkable

from . import tcp_vectors
from .base import ByteStream
from .vectors import Addresses

MANY_VIEWS = 16  # of one chunk: from here on a ready table gains more than the second call of the kernel costs


@runtime_checkable
class Located(Protocol):
    """A stream whose bytes have addresses in this process."""

    def ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Bytes [start, stop) as (address, length), in order."""
        ...

    def addresses(self) -> Addresses:
        """All of it. Made once for each stream: ten thousand pieces take milliseconds."""
        ...


@runtime_checkable
class Bare(Protocol):
    """A located stream whose blocks do nothing: its bytes may be read and written without entering one."""

    is_bare: bool


def is_bare(stream: ByteStream) -> bool:
    """Its blocks do nothing but show memory."""
    return isinstance(stream, Bare) and stream.is_bare


def bare_addresses(stream: ByteStream) -> Addresses | None:
    """Where its bytes lie, if they may be moved without entering its blocks."""
    return stream.addresses() if is_bare(stream) and isinstance(stream, Located) else None


class Scattered:
    """Where a stream's small pieces lie, found out once there are so many that Python's calls are too slow for them."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._is_known = False
        self._addresses: Addresses | None = None

    def for_views(self, count: int) -> Addresses | None:
        """The stream's addresses, if this system takes them as they are and so many views are worth it."""
        return self.known() if count >= MANY_VIEWS else None

    def known(self) -> Addresses | None:
        """The stream's addresses, if it has any and this system takes them as they are."""
        if not tcp_vectors.IS_THERE:
            return None
        if not self._is_known:
            self._addresses = self._stream.addresses() if isinstance(self._stream, Located) else None
            self._is_known = True
        return self._addresses
