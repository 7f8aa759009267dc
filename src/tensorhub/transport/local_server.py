"""The source's side of the local transport: says where the bytes lie and which chunks are there; sends none.

It is the tcp transport's server over an abstract unix socket: the same greetings, requests, keepalives and farewells
(`tcp_wire`), the same threads and the same ways for an export to end. In place of chunks a reader gets, once

    source  MEMORY  the seal's address, the seal, and where every piece of the stream lies (`vectors.Addresses`)
    source  READY   chunks [`number`, number + n) are there; n is the body

and its requests carry as their `number` how many bytes it has read so far on this connection: that is what is counted.
Where all of an export lies in memory that can be mapped, a reader that takes it gets that too (`local_mapping`).
It must never: serve another user, or let an export's seal stand when the export has ended.
"""

import contextlib
import logging
import mmap
import os
import socket
import struct
from collections.abc import Sequence

from ..core.errors import TransportMissing, UsageError
from .announcing import MAX_MEMORY_BYTES, MEMORY, AnnouncingServer
from .base import Export
from .local_host import Place, format_endpoint, new_name, socket_address
from .local_mapping import offer
from .local_memory import Seal
from .located import Located, bare_addresses
from .sealed import Region, Sealed, Unmappable, regions_of
from .tcp_served import Served
from .tcp_settings import TcpSettings
from .tcp_wire import Hello, Refusal, Wire

_log = logging.getLogger(__name__)

SEAL = struct.Struct("=Q16s")  # both ends are one machine: its own byte order
CREDENTIALS = struct.Struct("@iII")  # struct ucred: process, user, group
_BACKLOG = 1024


class LocalServed(Served):
    """An export with a seal; with two, once a reader maps it. Guarded by the server's lock as the rest is."""

    def __init__(self, export: Export) -> None:
        super().__init__(export)
        self.seal = Seal()
        self.shared_seal: Seal | None = None

    def share_seal(self) -> Seal | None:
        """One in memory of its own, which can be mapped; None where there can be none, or no more."""
        if self.shared_seal is None and self.ended is None:
            with contextlib.suppress(Unmappable):
                self.shared_seal = Seal(Sealed(mmap.PAGESIZE))
        return self.shared_seal

    def end(self, reason: str) -> None:
        self.seal.break_()
        if self.shared_seal is not None:
            self.shared_seal.break_()
        super().end(reason)


class LocalServer(AnnouncingServer):
    """Tells whoever of this user connects where the exports are."""

    kind = "local"

    def __init__(self, settings: TcpSettings, place: Place) -> None:
        self._place = place
        self._name = new_name()
        super().__init__(settings)

    def listen(self) -> list[socket.socket]:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(socket_address(self._name))
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
        return [listener]

    def advertised(self, listening: Sequence[socket.socket]) -> str:
        return format_endpoint(self._place, self._name)

    def make_served(self, export: Export) -> Served:
        return LocalServed(export)

    def why_refused(self, wire: Wire, hello: Hello) -> Refusal | None:
        _, user, _ = credentials_of(wire.sock)
        if user != os.geteuid():
            return Refusal("user", f"this worker runs as user {os.geteuid()}, its reader as user {user}")
        return super().why_refused(wire, hello)

    def why_not(self, served: Served) -> Refusal | None:
        if isinstance(served.export.stream, Located):
            return None
        return Refusal("memory", "its tensors are in a device's memory, which only that device's driver can read")

    def introduce(self, wire: Wire, served: Served, hello: Hello) -> None:
        assert isinstance(served, LocalServed)
        super().introduce(wire, served, hello)
        stream = served.export.stream
        if not isinstance(stream, Located):
            raise UsageError(f"{served.export.key!r} has no addresses")
        addresses = stream.addresses()
        body = addresses.encode()
        if len(body) > MAX_MEMORY_BYTES - SEAL.size:
            raise UsageError(f"{served.export.key!r} lies in too many pieces")
        if hello.can_map and bare_addresses(stream) is not None:
            self._share(wire, served, regions_of(addresses), is_kept=hello.shares)
        wire.send_frame(MEMORY, payload=[SEAL.pack(served.seal.address, served.seal.value), body])

    def _share(self, wire: Wire, served: LocalServed, regions: tuple[Region, ...], *, is_kept: bool) -> None:
        """Hand over the memory itself, if it is such memory; for good where it is whole and not withdrawn.

        Whoever has withdrawn it may write to it again, and comes by this lock before.
        """
        if regions:
            with self._changed:
                seal = served.share_seal()
                if is_kept and served.ended is None and served.export.progress.is_complete:
                    for region in regions:
                        region.freeze()
            if seal is not None:
                offer(wire, seal, regions)


def credentials_of(sock: socket.socket) -> tuple[int, int, int]:
    """Process (0: not of our PID namespace), user and group of the other end, as the kernel knows them."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    process, user, group = CREDENTIALS.unpack(found)
    return process, user, group


def check_listener(wire: Wire, endpoint: str) -> None:
    """That our own user listens there, before a word is said: the first one has the token. Raises `TransportMissing`.

    Once a source is gone, anybody of this host may listen under its name.
    """
    _, user, _ = credentials_of(wire.sock)
    if user != os.geteuid():
        raise TransportMissing(f"{endpoint} is listened to by user {user}, this worker runs as user {os.geteuid()}")
