"""Who may read whose memory on this host, as far as that is known before anybody tries; and endpoints that say it.

An endpoint names the kernel that runs now, the PID and network namespaces, the user, and a socket of this worker:

    local://<boot id>.<pid namespace>.<network namespace>.<user>/<name of an abstract unix socket>

`cuda://` endpoints have the same form.
Two workers can use the local transport only if all four are equal: another PID namespace has other numbers for the same
processes, another network namespace has other abstract sockets, another user may not read. What remains (a ptrace
scope, a seccomp filter, a security module) is found by reading a cookie, not by guessing.
"""

import ctypes
import os
import re
import secrets
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..core.errors import TransportMissing
from . import shortages

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
        if shortages.is_shortage(error):
            raise shortages.unavailable(error, "it looked where it is") from error
        raise TransportMissing(f"the local transport needs /proc: {error}", hint="use tcp") from error


def new_name() -> str:
    """A name for an abstract socket that nobody has, and nobody guesses."""
    return f"tensorhub-{os.getpid()}-{secrets.token_hex(8)}"


def format_endpoint(place: Place, name: str) -> str:
    """As peers are told."""
    return f"{SCHEME}://{format_place(place)}/{name}"


def format_place(place: Place) -> str:
    """The same for two workers only if nothing speaks against either reading the other."""
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
