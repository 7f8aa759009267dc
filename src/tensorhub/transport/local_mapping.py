"""How a source gives a reader its memory itself: descriptors over the unix socket, which the reader maps to read.

If the reader has said that it takes them, and all of an export lies in memory that can be mapped (`sealed`), the source
says, after the manifest and before MEMORY,

    source  MAPPED  a seal, and address and size of each region; with the frame's first bytes come the descriptors: of
                    the page that begins with the seal, and of each region. `number` FROZEN: the export is whole,
                    and nobody can write to its memory any more. So the reader may keep it, if it wanted to

It is said to whoever would be told the addresses: the same user, with the token, of an export that lasts. A reader that
cannot map what it was given (no descriptor to spare, memory that is not sealed, too little of it) does without.

It must never: keep a descriptor that came, or map what `sealed` would not.
"""

import contextlib
import errno
import logging
import os
import socket
import struct
from array import array
from collections.abc import Sequence
from contextlib import ExitStack

from .base import Sharing, Sink
from .forks import opening, track
from .local_memory import SEAL_BYTES, Seal
from .sealed import MOST_REGIONS, Foreign, Region, Shared, Unmappable, moved_to
from .tcp_wire import HEADER, Silent, Vanished, Wire
from .vectors import Addresses
from .wire_errors import lost

_log = logging.getLogger(__name__)

MAPPED = 18
FROZEN = 1
REGION = struct.Struct("=QQ")  # both ends are one machine: its own byte order
MAX_MAPPED_BYTES = SEAL_BYTES + MOST_REGIONS * REGION.size
_ROOM = socket.CMSG_SPACE((MOST_REGIONS + 1) * array("i").itemsize) if hasattr(socket, "CMSG_SPACE") else 0
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS)


def offer(wire: Wire, seal: Seal, regions: Sequence[Region]) -> None:
    """Hand them over, unless too many descriptors are on their way already: then the reader does without."""
    assert seal.page is not None, "a seal that cannot be mapped"
    body = seal.value + b"".join(REGION.pack(region.address, region.size_bytes) for region in regions)
    descriptors = array("i", [seal.page.descriptor, *(region.descriptor for region in regions)])
    is_frozen = all(region.is_frozen for region in regions)  # only what is whole ever is
    send_with_descriptors(wire, MAPPED, FROZEN if is_frozen else 0, body, descriptors)


def send_with_descriptors(wire: Wire, kind: int, number: int, body: bytes, descriptors: Sequence[int]) -> bool:
    """A frame, with whose first bytes the descriptors come. False: too many are on their way, and nothing was sent."""
    frame = HEADER.pack(kind, len(body), number) + body
    try:
        sent = wire.sock.sendmsg([frame], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))])
    except BlockingIOError as error:
        raise Silent("the peer takes no byte") from error
    except OSError as error:
        if error.errno in _NO_ROOM:
            return False
        raise lost(error) from error
    wire.send([frame[sent:]])
    return True


class Received:
    """The descriptors that came with the last frame. To be closed; no forked child keeps them."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        track(self)

    def descriptors(self) -> list[int]:
        """Those that are open now."""
        return self._numbers

    def receive(self, sock: socket.socket) -> tuple[bytes, int]:
        """The first bytes of a frame's header, and the flags of the message; raises `OSError`."""
        sock.recv(1, socket.MSG_PEEK)  # waits for it, which may not be done while a fork waits
        with opening():
            how = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
            data, control, flags, _ = sock.recvmsg(HEADER.size, _ROOM, how)
            for level, kind, payload in control:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    found = array("i", payload[: len(payload) - len(payload) % array("i").itemsize])
                    self._numbers += found
        return data, flags

    def close(self) -> None:
        """They are needed no more."""
        with opening():
            for number in self._numbers:
                with contextlib.suppress(OSError):
                    os.close(number)
            self._numbers = []


def receive_header(wire: Wire, received: Received) -> tuple[int, int, int]:
    """The header of a frame, whose descriptors `received` then has; none where this process has no room for all."""
    received.close()
    try:
        data, flags = received.receive(wire.sock)
    except BlockingIOError as error:
        raise Silent("the peer sends no byte") from error
    except OSError as error:
        raise lost(error) from error
    if not data:
        raise Vanished("the peer closed the connection")
    wire.heard_bytes += len(data)
    header = bytearray(HEADER.size)
    header[: len(data)] = data
    wire.receive_into([memoryview(header)[len(data) :]])
    if flags & socket.MSG_CTRUNC:
        received.close()
    kind, length, number = HEADER.unpack(header)
    return kind, length, number


def hand_over(sink: Sink, theirs: Addresses, there: int, memory: Shared) -> None:
    """Let the sink keep the memory, if it wants to and all is in one piece."""
    at = moved_to(theirs, [(there, memory.size_bytes, memory.address)]).whole(0, theirs.stop)
    if at and isinstance(sink, Sharing) and sink.shares:
        sink.share(memory, at)


class Mapped:
    """A source's memory, mapped here for as long as a read lasts."""

    def __init__(self, body: bytes, descriptors: Sequence[int]) -> None:
        """The descriptors stay the caller's. Raises `Unmappable`."""
        self.seal, words = body[:SEAL_BYTES], body[SEAL_BYTES:]
        count = len(words) // REGION.size
        if not count or len(words) % REGION.size or len(descriptors) != 1 + count:
            raise Unmappable(f"{len(descriptors)} descriptors came with {len(body)} B about {count} regions")
        with ExitStack() as stack:

            def mapped(descriptor: int, size_bytes: int) -> int:
                found = Foreign(descriptor, size_bytes)
                stack.callback(found.close)
                return found.address

            self.seal_address = mapped(descriptors[0], SEAL_BYTES)
            self.regions = tuple(
                (there, size_bytes, mapped(descriptor, size_bytes))
                for (there, size_bytes), descriptor in zip(REGION.iter_unpack(words), descriptors[1:], strict=True)
            )
            self._stack = stack.pop_all()

    def keep(self, descriptors: Sequence[int]) -> tuple[int, Shared] | None:
        """The memory for good, and its address there; None if it is in several parts, or cannot be had."""
        if len(self.regions) != 1:
            return None
        ((there, size_bytes, _),) = self.regions
        try:
            return there, Shared(descriptors[1], size_bytes)
        except Unmappable as error:
            _log.info("memory that was handed over cannot be kept: %s", error)
            return None

    def close(self) -> None:
        """When no thread looks there any more."""
        self._stack.close()
