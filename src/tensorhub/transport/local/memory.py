"""Memory of other processes of this host: who may read it, `process_vm_readv`, and mappings."""

import contextlib
import ctypes
import errno
import logging
import os
import re
import secrets
import signal
import socket
import struct
import sys
from array import array
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from ...protocol.errors import TransportMissing
from .. import threads
from ..base import Sharing, Sink
from ..ranges import Addresses
from ..sealed import MAX_REGIONS, Foreign, Region, Sealed, Shared, Unmappable, moved_to
from ..tcp.wire import HEADER, Silent, Vanished, Wire, lost
from ..threads import opening, track

# --- Which worker may read which memory on this host, as far as an endpoint says it:
#
#     local://<boot id>.<pid namespace>.<network namespace>.<user>/<name of an abstract unix socket>
#
# All four must be equal. `cuda://` endpoints have the same form. A ptrace scope or a seccomp filter is found by a read.


SCHEME = "local"
_ENDPOINT = re.compile(
    r"(?:local|cuda)://([0-9a-f-]{1,40})\.(\d{1,20})\.(\d{1,20})\.(\d{1,20})/([A-Za-z0-9_-]{1,80})\Z"
)

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)
YAMA = "/proc/sys/kernel/yama/ptrace_scope"
SCOPES = {
    0: "classic: any process of the same user",
    1: "restricted: only descendants, and whom a process names",
    2: "administrators only (CAP_SYS_PTRACE)",
    3: "nobody",
}


@dataclass(frozen=True)
class Place:
    """Where a worker is, as far as reading its memory goes."""

    boot: str
    pid_namespace: int
    network_namespace: int
    user: int

    def difference(self, other: "Place") -> str | None:
        """Why a worker here cannot read one there, or None if nothing speaks against it."""
        if self.boot != other.boot:
            return "it is on another host"
        if self.pid_namespace != other.pid_namespace:
            return "it is in another PID namespace (a container?): share it, e.g. `docker run --pid=host`"
        if self.network_namespace != other.network_namespace:
            return "it is in another network namespace (a container?): share it, e.g. `docker run --network=host`"
        if self.user != other.user:
            return f"it runs as user {other.user}, this worker as user {self.user}"
        return None


@lru_cache(maxsize=8)
def _here(user: int) -> Place:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Place(boot, _namespace("pid"), _namespace("net"), user)


def _namespace(kind: str) -> int:
    return os.stat(f"/proc/self/ns/{kind}").st_ino


def here() -> Place:
    """This process's place. Raises `TransportMissing` where it cannot be known, `Unavailable` while it cannot."""
    if sys.platform != "linux":
        raise TransportMissing(f"the local transport needs Linux, this is {sys.platform}", hint="use tcp")
    try:
        return _here(os.geteuid())
    except OSError as error:
        if threads.is_shortage(error):
            raise threads.unavailable(error, "it looked where it is") from error
        raise TransportMissing(f"the local transport needs /proc: {error}", hint="use tcp") from error


def new_name() -> str:
    """A name for an abstract socket that is new, and cannot be guessed."""
    return f"tensorhub-{os.getpid()}-{secrets.token_hex(8)}"


def format_endpoint(place: Place, name: str, scheme: str = SCHEME) -> str:
    """Formats the endpoint as peers receive it."""
    return f"{scheme}://{format_place(place)}/{name}"


def format_place(place: Place) -> str:
    """Formats a place. Two workers have the same text only if each can read the other's memory."""
    return f"{place.boot}.{place.pid_namespace}.{place.network_namespace}.{place.user}"


def parse_endpoint(endpoint: str) -> tuple[Place, str]:
    """The place and the socket's name. Raises `ValueError` for anything else."""
    match = _ENDPOINT.match(endpoint)
    if match is None:
        raise ValueError(f"{endpoint!r} is not of the form {SCHEME}://place/name")
    boot, pids, network, user, name = match.groups()
    return Place(boot, int(pids), int(network), int(user)), name


def socket_address(name: str) -> bytes:
    """Of the abstract socket: it needs no file, and is gone with the last process that has it open."""
    return b"\0" + name.encode()


def yama_scope() -> int | None:
    """How far Yama restricts reading other processes' memory; None where there is no Yama."""
    try:
        return int(Path(YAMA).read_text())
    except (OSError, ValueError):
        return None


def allow_readers() -> bool:
    """Under Yama's scope 1: let other processes of this user read this one's memory. Returns whether that was done."""
    if yama_scope() != 1:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    return int(libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, zero, zero, zero)) == 0


def remedy() -> str:
    """What would let a refused read succeed, as far as this host shows it."""
    scope = yama_scope()
    if scope == 1:
        return "set TENSORHUB_PTRACE=yes at the source, or `sysctl kernel.yama.ptrace_scope=0`"
    if scope:
        return f"`sysctl kernel.yama.ptrace_scope=1`: it is {scope}, {SCOPES.get(scope, 'unknown')}"
    return (
        "run both as one user; in a container `--cap-add=SYS_PTRACE`, and let its seccomp filter pass process_vm_readv"
    )


# --- Bytes of another process, read by the kernel straight into ours (`process_vm_readv`), without the GIL.
#
# A seal is 16 random bytes in the source's memory, zeroed when the export ends. A reader reads it after the bytes. If
# it is there, these were the right process and memory. A process that has got a dead source's PID is never believed.


CALL_BYTES = 32 << 20  # of one call: 2-4 ms, so that a stopped read ends soon; larger ones gain nothing
SEAL_BYTES = 16


REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS)


def check_refused(pid: int, number: int) -> None:
    """Raises `TransportMissing` if the kernel does not permit it, `Unavailable` if it has no room for it now."""
    error = OSError(number, os.strerror(number))
    if threads.is_shortage(error):
        raise threads.unavailable(error, f"it read the memory of process {pid}")
    if number in REFUSED:
        raise TransportMissing(f"reading the memory of process {pid} is refused: {error.strerror}", hint=remedy())


class Seal:
    """A source's word that an export lasts."""

    def __init__(self, page: Sealed | None = None) -> None:
        """`page`: memory for it alone that readers can map."""
        self.value = secrets.token_bytes(SEAL_BYTES)
        self.page = page
        self._memory = ctypes.create_string_buffer(SEAL_BYTES)
        self.address = page.address if page is not None else ctypes.addressof(self._memory)
        ctypes.memmove(self.address, self.value, SEAL_BYTES)

    def break_(self) -> None:
        """Break the seal: no later read of this export counts."""
        ctypes.memset(self.address, 0, SEAL_BYTES)


class Lost(Exception):
    """The other process is gone, or what it had there is."""


class Process:
    """Another process (or this one), to be read from. Thread-safe; close it when no thread reads any more."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._read = _function()
        self.pidfd = -1  # where there is none
        track(self)
        try:
            self.pidfd = os.pidfd_open(pid)
        except ProcessLookupError as error:
            raise Lost(f"process {pid} is gone") from error
        except OSError as error:  # an old kernel, or a filter: its start time must do
            threads.note(error, did="it looked at a source's process")
            try:
                self._started = _start_time(pid)
            except OSError as unknown:  # nothing would tell it from another one later
                if threads.is_shortage(unknown):
                    raise threads.unavailable(unknown, "it looked at a source's process") from unknown
                raise TransportMissing(f"when process {pid} began cannot be found out: {unknown.strerror}") from unknown

    def close(self) -> None:
        pidfd, self.pidfd = self.pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    def descriptors(self) -> tuple[int, ...]:
        """That of the process, if the kernel has such."""
        return (self.pidfd,)

    def check(self) -> None:
        """Raises `Lost` once the process is not the one that we began with."""
        if self.pidfd >= 0:
            try:
                signal.pidfd_send_signal(self.pidfd, 0)
            except ProcessLookupError as error:
                raise Lost(f"process {self.pid} is gone") from error
            except OSError:
                pass  # a filter forbids to ask: the seal tells afterwards
            return
        with suppress(OSError):  # if it cannot be found out now, the seal tells too
            if _start_time(self.pid) != self._started:
                raise Lost(f"process {self.pid} is another one now")

    def read(self, start: int, stop: int, theirs: Addresses, ours: Addresses) -> None:
        """Bytes [start, stop) of the stream from their memory into ours. Raises `Lost`, `TransportMissing`."""
        self.check()
        while start < stop:
            end = min(stop, start + CALL_BYTES)
            start += self._copy(theirs.part(start, end), ours.part(start, end))

    def has(self, address: int, value: bytes) -> bool:
        """These bytes are there now. Raises `Lost`, `TransportMissing`."""
        found = ctypes.create_string_buffer(len(value))
        ours = array("Q", (ctypes.addressof(found), len(value)))
        return self._copy(array("Q", (address, len(value))), ours) == len(value) and found.raw == value

    def _copy(self, theirs: "array[int]", ours: "array[int]") -> int:
        """One call of the kernel. Returns how many bytes it has moved."""
        vectors = []
        for pairs in (ours, theirs):
            vectors += [ctypes.c_void_p(pairs.buffer_info()[0]), ctypes.c_ulong(len(pairs) // 2)]
        moved = int(self._read(ctypes.c_int(self.pid), *vectors, ctypes.c_ulong(0)))
        if moved > 0:
            return moved
        number = ctypes.get_errno()
        if moved < 0:
            check_refused(self.pid, number)
        raise Lost(f"process {self.pid} cannot be read: {os.strerror(number) if moved < 0 else 'no byte came'}")


@cache
def _function() -> "ctypes._NamedFuncPointer":
    """Once for all reads: ctypes makes a class of its own for every library that it opens, and lets it lie about."""
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except AttributeError as error:
        raise TransportMissing("this C library has no process_vm_readv", hint="use tcp") from error
    function.restype = ctypes.c_ssize_t  # no argtypes: its callers bring C objects
    return function


def _start_time(pid: int) -> str:
    """When the process began, in ticks since boot. Raises `Lost` where there is none, `OSError` where none can tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError) as error:
        raise Lost(f"process {pid} is gone") from error


def probe_self() -> None:
    """Raises `TransportMissing` if not even this process can be read: no such call, or a filter."""
    process, seal = Process(os.getpid()), Seal()
    try:
        if not process.has(seal.address, seal.value):
            raise TransportMissing("process_vm_readv gives other bytes than there are", hint="use tcp")
    except Lost as error:
        raise TransportMissing(f"process_vm_readv does not work here: {error}", hint="use tcp") from error
    finally:
        process.close()


# --- A source hands over memory: descriptors over the unix socket, which the reader maps.
#
#     source  MAPPED  a seal, and address and size of each region; with the first bytes come the descriptors of the
#                     seal's page and of each region. `number` FROZEN: it is never written again, so it may be kept
#
# A reader that cannot map them reads without.


_log = logging.getLogger(__name__)

MAPPED = 18
FROZEN = 1
REGION = struct.Struct("=QQ")  # both ends are one machine: its own byte order
MAX_MAPPED_BYTES = SEAL_BYTES + MAX_REGIONS * REGION.size
_ROOM = socket.CMSG_SPACE((MAX_REGIONS + 1) * array("i").itemsize) if hasattr(socket, "CMSG_SPACE") else 0
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
        """The file descriptors that are open now."""
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
