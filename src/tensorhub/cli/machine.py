"""What of this machine decides how fast weights move, read from the kernel's files. Starts nothing, changes nothing."""

import os
import platform
import resource
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from ..core.errors import TensorHubError
from ..transport import sealed
from ..transport.local_host import SCOPES, yama_scope
from ..transport.native import build, load
from .doctor import Check
from .words import count_text, size_text

ENOUGH_FILES = 4096  # 64 readers and 64 sources, 2 descriptors each, and as much again for the engine
ENOUGH_SHARED = 1 << 30
CAP_SYS_PTRACE = 19


def machine_checks() -> list[Check]:
    """One line for each."""
    checks: tuple[Callable[[], Check], ...] = (
        _host,
        _mover,
        _reading,
        _mapping,
        _gpu,
        _rdma,
        _congestion,
        _files,
        _locked,
        _shared,
    )
    found = []
    for check in checks:
        try:
            found.append(check())
        except (OSError, ValueError, TensorHubError) as error:
            found.append(Check(check.__name__.strip("_"), "note", f"cannot be found out: {error}"))
    return found


def _text(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text().strip()
    return ""


def _names(path: str) -> list[str]:
    with suppress(OSError):
        return sorted(entry.name for entry in Path(path).iterdir())
    return []


def _status(name: str) -> str:
    """A line of /proc/self/status."""
    for line in _text("/proc/self/status").splitlines():
        if line.startswith(f"{name}:"):
            return line.partition(":")[2].strip()
    return ""


def _host() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory_kib = next((line.split()[1] for line in _text("/proc/meminfo").splitlines() if "MemTotal" in line), "0")
    memory = size_text(int(memory_kib) * 1024)
    facts = f"{platform.system()} {platform.release()}, Python {platform.python_version()}, "
    return Check("host", "good", facts + f"{count_text(cores, 'core')}, {memory}")


def _mover() -> Check:
    """Whether bytes move without the interpreter."""
    found = load.library()
    if found is not None:
        return Check(
            "native mover", "good", f"in use: bytes move without the interpreter, digests by {found.digest_way}"
        )
    remedy = f"{load.COST}; install a C compiler, then `python {build.HERE / 'build.py'}`, or install again"
    if load.is_left_out():
        remedy = f"{load.COST}; unset {load.VARIABLE}"
    return Check("native mover", "note", f"Python moves the bytes: {load.why_not()}", remedy)


def _reading() -> Check:
    """Who may read this process's memory: what the local transport needs."""
    scope, user = yama_scope(), os.geteuid() if hasattr(os, "geteuid") else -1
    may_trace = bool(int(_status("CapEff") or "0", 16) >> CAP_SYS_PTRACE & 1)
    parts = [f"user {user}", "may trace others" if may_trace else "may trace its own"]
    parts.append("no Yama" if scope is None else f"Yama {scope} ({SCOPES.get(scope, 'unknown')})")
    parts.append({"0": "no seccomp filter", "2": "a seccomp filter"}.get(_status("Seccomp"), "seccomp unknown"))
    if scope == 1 and not may_trace:
        remedy = "TENSORHUB_PTRACE=yes (the default) lets a worker permit it for itself"
        return Check("reading memory", "note", ", ".join(parts), remedy)
    if scope in (2, 3) and not may_trace:
        remedy = "sysctl kernel.yama.ptrace_scope=1, or go on with tcp"
        return Check("reading memory", "note", ", ".join(parts), remedy)
    return Check("reading memory", "good", ", ".join(parts))


def _mapping() -> Check:
    """Whether readers of this host can map host copies."""
    reason = sealed.why_not()
    if not reason:
        text = "host copies lie in sealed memfds, which local readers map"
        if sealed.has_large_pages():
            return Check("mapping memory", "good", f"{text}, in large pages")
        remedy = "Linux 6.1 or later, the native mover, and no shmem_enabled=deny"
        return Check("mapping memory", "note", f"{text}, in small pages, which cost its readers more", remedy)
    text = f"host copies lie in ordinary memory, which local readers fetch with process_vm_readv: {reason}"
    return Check("mapping memory", "note", text, "let the seccomp filter pass memfd_create; Linux 5.1 or later")


def _gpu() -> Check:
    devices = _names("/proc/driver/nvidia/gpus")
    if not devices:
        return Check("GPU", "absent", "no NVIDIA device: weights stay in host memory")
    words = next(iter(_text("/proc/driver/nvidia/version").splitlines()), "").split()
    driver = next((word for word in words if word[:1].isdigit()), "unknown")
    text = f"{count_text(len(devices), 'NVIDIA device')}, driver {driver}"
    if find_spec("cuda") is not None and find_spec("cuda.core") is not None:
        return Check("GPU", "good", f"{text}; it hashes what lies on it, and copies from workers of this host, by cuda")
    remedy = "pip install 'tensorhub[cuda]': then devices hash and copy at the rate of their memory"
    return Check("GPU", "note", f"{text}; CUDA tensors are hashed and copied through host memory", remedy)


def _rdma() -> Check:
    devices = _names("/sys/class/infiniband")
    if not devices:
        return Check("RDMA", "absent", "no device in /sys/class/infiniband; between hosts it is tcp")
    ports = [
        f"{device}:{port} {_text(f'/sys/class/infiniband/{device}/ports/{port}/state').partition(': ')[2].lower()}"
        for device in devices
        for port in _names(f"/sys/class/infiniband/{device}/ports")
    ]
    is_active = any(port.endswith("active") for port in ports)
    says = ", ".join(ports) or f"{', '.join(devices)}, without a port"
    return Check("RDMA", "good" if is_active else "note", says, "" if is_active else "no port is active: see `ibstat`")


def _congestion() -> Check:
    default = _text("/proc/sys/net/ipv4/tcp_congestion_control")
    available = _text("/proc/sys/net/ipv4/tcp_available_congestion_control").split()
    if not default:
        return Check("congestion control", "note", "unknown: no /proc/sys/net/ipv4")
    says = f"the kernel's is {default}; available: {', '.join(available)}"
    if "cubic" not in available:
        remedy = "modprobe tcp_cubic: BBR paces a LAN down by a third"
        return Check("congestion control", "note", says, remedy if default == "bbr" else "")
    return Check("congestion control", "good", says + "; tcp asks for cubic")


def _files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    says = f"{_limit(soft)} (at most {_limit(hard)})"
    if soft != resource.RLIM_INFINITY and soft < ENOUGH_FILES:
        return Check("open files", "note", says, f"ulimit -n {_limit(_least((ENOUGH_FILES, hard)))}")
    return Check("open files", "good", says)


def _locked() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    says = "unlimited" if soft == resource.RLIM_INFINITY else size_text(soft)
    if soft == resource.RLIM_INFINITY or not _names("/sys/class/infiniband"):
        return Check("locked memory", "good", says + ("" if soft == resource.RLIM_INFINITY else "; matters for RDMA"))
    return Check("locked memory", "note", says, "ulimit -l unlimited: RDMA pins what it registers")


def _shared() -> Check:
    try:
        found = os.statvfs("/dev/shm")
    except OSError as error:
        return Check("shared memory", "note", f"no /dev/shm: {error.strerror}", "mount a tmpfs there: engines need it")
    free = found.f_bavail * found.f_frsize
    says = f"{size_text(free)} free of {size_text(found.f_blocks * found.f_frsize)}; not used by tensorhub itself"
    return Check("shared memory", "good" if free >= ENOUGH_SHARED else "note", says)


def _least(values: Iterable[int]) -> int:
    return min(value for value in values if value != resource.RLIM_INFINITY)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
