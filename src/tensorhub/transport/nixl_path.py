"""Which of UCX's ways a pair of workers really has, as far as that can be known: a rule, and the facts that it takes.

NIXL does not tell which transports UCX has selected. What can be known is whether reads were over when the call that
posted them returned: on one host UCX then copied by itself, out of memory that both processes can reach (cma, xpmem).
A small read over TCP may happen to be as quick, so one is no proof, and where UCX may not use shared memory it is none
at all. A read that was not is done by hardware, or by the source's own process over TCP, which costs ten times the CPU
of plain sockets and cannot be called back. Hardware needs a device at both ends; where there is none, it is TCP.
"""

import os
import resource
from collections.abc import Sequence
from pathlib import Path

import msgspec

from .shortages import tolerated

HOST = 0  # a device's code: 0 is the host's memory, n + 1 the memory of CUDA device n

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_RDMA = Path("/sys/class/infiniband")
_SHARED = ("cma", "xpmem", "posix", "sysv", "knem")  # UCX's ways through memory that both processes can reach
_DESCRIPTORS = 32  # UCX takes up to two for each thread of a peer; others of this process go on opening theirs
_GPUS = Path("/proc/driver/nvidia/gpus")
USE_TCP = "take tcp for this pair: its own sockets are several times faster than UCX over TCP, at a tenth of the CPU"


class Facts(msgspec.Struct, frozen=True, array_like=True):
    """What one end knows of itself."""

    boot: str  # of the kernel that runs: equal for two workers exactly when they share a host; "" where unknown
    rdma: tuple[str, ...]  # names of RDMA devices
    tls: str  # UCX_TLS as it is set, "" where UCX chooses


class Lane(msgspec.Struct, frozen=True):
    """A way, in words for people, and whether it is one that nobody should take."""

    name: str
    is_tcp: bool


def lacks_descriptors() -> str:
    """Why UCX should not be let connect now: too few files can be opened. Empty where there are enough.

    A reader whose source can take in no connection may be aborted by its own UCX ("Assertion `0' failed", one in two
    with NIXL 1.5.1 and three threads). A new descriptor has the lowest number that is free.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        lowest = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return f"no file can be opened: {error.strerror}"
    os.close(lowest)
    if limit == resource.RLIM_INFINITY or lowest + _DESCRIPTORS <= limit:
        return ""
    return f"next to all of the {limit} files that this process may open are open"


def facts(tls: str = "") -> Facts:
    """This process's."""
    boot, rdma = "", tuple[str, ...]()
    with tolerated("it looked for RDMA devices"):
        boot = _BOOT.read_text().strip()
    with tolerated("it looked for RDMA devices"):
        rdma = tuple(sorted(entry.name for entry in _RDMA.iterdir()))
    return Facts(boot, rdma, tls or os.environ.get("UCX_TLS", ""))


def has_gpu(gpus: Path = _GPUS) -> bool:
    """This machine has an NVIDIA device."""
    with tolerated("it looked for GPUs"):
        return any(gpus.iterdir())
    return False


def advantage(rdma: Path = _RDMA, gpus: Path = _GPUS) -> tuple[bool, str]:
    """Whether anything is here that NIXL moves bytes with better than the other transports, and what, or what lacks.

    Reads names of the kernel's, in microseconds: this is asked at every `open`.
    """
    active, idle = list[str](), list[str]()
    with tolerated("it looked for RDMA devices"):
        for device in sorted(rdma.iterdir()):
            states = [state.read_text() for state in sorted((device / "ports").glob("*/state"))]
            (active if any("ACTIVE" in state for state in states) else idle).append(device.name)
    found = [f"RDMA ({', '.join(active)})"] if active else []
    with tolerated("it looked for RDMA devices"):
        found += ["a GPU (CUDA IPC, NVLink)"] if any(gpus.iterdir()) else []
    if found:
        return True, " and ".join(found)
    ports = f"no port of {', '.join(idle)} is active" if idle else "no RDMA device"
    return False, f"{ports} and no GPU is here, so local and tcp are faster"


def lane(here: Facts, there: Facts, *, is_immediate: bool, devices: Sequence[int]) -> Lane:
    """What carries bytes between the two; `devices` are the codes of all memory involved, on both sides."""
    chosen = f", UCX_TLS={here.tls}" if here.tls else ""
    is_one_host = bool(here.boot) and here.boot == there.boot
    is_immediate = is_immediate and is_one_host and _permits(here.tls, *_SHARED)
    has_cuda = any(device != HOST for device in devices)
    is_all_cuda = bool(devices) and all(device != HOST for device in devices)
    if is_one_host and is_all_cuda and _permits(here.tls, "cuda"):  # what was read at once lay on the host
        return Lane(f"NIXL/UCX: CUDA IPC{chosen}", False)
    if is_immediate and not has_cuda:
        return Lane(f"NIXL/UCX: shared memory (cma){chosen}", False)
    if is_immediate and _permits(here.tls, "cuda"):
        return Lane(f"NIXL/UCX: CUDA IPC and shared memory (cma){chosen}", False)
    if here.rdma and there.rdma and _permits(here.tls, "rc", "ud", "dc", "ib", "srd") and here.tls != "tcp":
        return Lane(f"NIXL/UCX: RDMA ({', '.join(here.rdma)}){chosen}", False)
    return Lane(f"NIXL/UCX: TCP{chosen}", True)


def why_tcp(here: Facts, there: Facts) -> str:
    """Why a pair would end up on TCP."""
    if here.tls and not _permits(here.tls, "rc", "ud", "dc", "ib", "srd", "cma", "cuda"):
        return f"UCX_TLS={here.tls} permits nothing else"
    if here.boot and here.boot == there.boot:
        return "they share a host, but UCX cannot read the source's memory from here (another container?)"
    lacking = " and ".join(name for name, found in (("here", here.rdma), ("there", there.rdma)) if not found)
    return f"there is no RDMA device {lacking}" if lacking else "UCX takes none of the RDMA devices"


def _permits(tls: str, *names: str) -> bool:
    """UCX_TLS may name transports or, with ^, those that must not be used."""
    if not tls or tls == "all":
        return True
    if tls.startswith("^"):
        forbidden = tls[1:].split(",")
        return any(name not in forbidden for name in names)
    wanted = tls.split(",")
    return any(
        one == "all" or one.startswith(name) or (one in ("shm", "sm") and name in _SHARED)
        for one in wanted
        for name in names
    )
