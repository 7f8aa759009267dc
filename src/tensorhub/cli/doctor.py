"""`tensorhub doctor`: which transports work here, how fast bytes move, and what this machine limits.

Transports are measured in child processes with a deadline, because drivers and libraries may hang or crash. The rest is
read from files of the kernel. The doctor changes no setting and needs no reference server.
"""

import json
import os
import platform
import queue
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..memory.digests import build_manifest
from ..memory.fill import FillSink
from ..memory.rates import Way as Measured
from ..memory.rates import bare_copy, best, device_ways, for_device, on_device, on_host, on_host_mapped
from ..memory.streams import core_count
from ..protocol.errors import TensorHubError, UsageError
from ..protocol.names import Digest
from ..runtime.config import options_without_token, parse_addresses, worker_options
from ..runtime.opening import make_transport
from ..runtime.transports import NO_GPU, TRANSPORTS, has_kernels
from ..transport import sealed
from ..transport.base import ByteStream, Export, Progress, Transport, read_to_end
from ..transport.local.memory import SCOPES, yama_scope
from ..transport.native import build, load
from ..transport.nixl.probe import Probe
from .output import count_text, size_text

SIZE_BYTES = 256 << 20  # 15 ms at the rate of memory, half a second at 4 Gbit/s
DEADLINE_S = 20.0  # of one probe; the slowest start of Python with all imports takes 5 s on a machine under load
ENDING_S = 1.0
MARK = "tensorhub-doctor "  # before an answer: native libraries write to stdout as well
MAX_LINE = 1 << 16

QUIET = "measure again when the cores are idle"


class Limit(NamedTuple):
    """What a way is measured beside."""

    text: str
    least: float  # a way below this share is far below its limit
    remedy: str


WAYS = {
    "host digest": Limit("a bare copy", 0.3, f"the line `native mover` says how it hashes; {QUIET}"),
    "local": Limit("a bare copy", 0.2, f"the lines `native mover` and `reading memory`; {QUIET}"),
    "local from mapped memory": Limit("a bare copy", 0.3, f"the lines `native mover` and `mapping memory`; {QUIET}"),
    "tcp": Limit("tcp without digests", 0.4, f"give the worker one core more for digests; {QUIET}"),
    "tcp without digests": Limit("a plain socket", 0.4, f"the line `native mover`; {QUIET}"),
    "cuda": Limit(
        "a copy on the device", 0.1, "its path should be `device to device`; is the device busy (nvidia-smi)?"
    ),
    "digest on the device": Limit("the device's memory", 0.15, "is the device busy or throttled (nvidia-smi -q)?"),
    "copy with digest": Limit("a copy on the device", 0.25, "is the device busy or throttled (nvidia-smi -q)?"),
    "host copy": Limit("the bus, pinned", 0.5, "is the process on the device's NUMA node (nvidia-smi topo -m)?"),
    "pinned ring": Limit("the bus, pinned", 0.2, f"give the worker four cores for copies; {QUIET}"),
}


@dataclass(frozen=True)
class TransportCheck:
    """One transport, tried between two processes of this machine."""

    name: str
    works: bool
    use: str
    rate_bytes_per_s: int = 0  # each chunk's digest checked
    path: str = ""
    reason: str = ""  # why it does not work, or is not taken though it does
    remedy: str = ""
    is_taken: bool = True  # by a worker of this machine, with the settings as they are


@dataclass(frozen=True)
class Check:
    """One thing about this machine."""

    name: str
    state: str  # "good", "note": works, but could be better; "bad"; "absent"
    says: str
    remedy: str = ""


@dataclass(frozen=True)
class Way:
    """A way of moving or hashing bytes, measured beside its limit."""

    name: str  # in `WAYS`
    rate_bytes_per_s: int
    limit_bytes_per_s: int

    @property
    def is_far_below(self) -> bool:
        return self.rate_bytes_per_s < WAYS[self.name].least * self.limit_bytes_per_s

    @property
    def share(self) -> int:
        """The rate as a percentage of the limit."""
        return round(100 * self.rate_bytes_per_s / max(1, self.limit_bytes_per_s))

    @property
    def text(self) -> str:
        """`5.1 GiB/s, 83 % of a bare copy (6.1 GiB/s)`."""
        limit = f"{WAYS[self.name].text} ({size_text(self.limit_bytes_per_s)}/s)"
        return f"{size_text(self.rate_bytes_per_s)}/s, {self.share} % of {limit}"


@dataclass(frozen=True)
class Findings:
    """All results of one run of `doctor`."""

    transports: list[TransportCheck] = field(default_factory=list)
    machine: list[Check] = field(default_factory=list)
    ways: list[Way] = field(default_factory=list)

    @property
    def is_well(self) -> bool:
        """Workers can work here: a transport works, and the reference server, if one was named, answers."""
        return any(each.works and each.is_taken for each in self.transports) and all(
            each.state != "bad" for each in self.machine
        )

    def as_json(self) -> str:
        """The results as JSON, for programs."""
        slow = [way.name for way in self.ways if way.is_far_below]
        return json.dumps({"is_well": self.is_well, **asdict(self), "far_below": slow}, indent=2)


def check_transport(
    name: str, *, size_bytes: int = SIZE_BYTES, deadline_s: float = DEADLINE_S
) -> tuple[TransportCheck, list[Way]]:
    """Start two workers, let one read from the other, and end both. With the ways that were measured on the way."""
    use = TRANSPORTS[name].use
    if name == "cuda" and not _devices():
        return TransportCheck(name, False, use, reason=NO_GPU), []
    found: Mapping[str, object] = {}
    try:
        with _Child("source", name, str(size_bytes)) as source, _Child("reader", name) as reader:
            found = source.answer(deadline_s)
            if "endpoint" in found:
                reader.tell(found)
                found = reader.answer(deadline_s)
    except OSError as error:
        found = {"error": f"no process can be started to try it in: {error}"}
    if "rate_bytes_per_s" in found:
        check = TransportCheck(name, True, use, int(str(found["rate_bytes_per_s"])), str(found["path"]))
        return check, _ways(found)
    reason = str(found.get("error") or "it gave no answer")
    remedy = str(found.get("hint") or TRANSPORTS[name].remedy)
    return TransportCheck(name, False, use, reason=reason, remedy=remedy), []


def check_device(*, size_bytes: int = SIZE_BYTES, deadline_s: float = DEADLINE_S) -> tuple[list[Check], list[Way]]:
    """Copy and hash on the first GPU. A check says why that cannot be; none where no GPU is here, as `GPU` says."""
    if not _devices():
        return [], []
    found = _asked("device", str(size_bytes), deadline_s=deadline_s)
    if "ways" in found:
        return [], _ways(found)
    return [Check("GPU ways", "note", f"nothing was measured on the device: {found.get('error')}")], []


def _ways(found: Mapping[str, object]) -> list[Way]:
    each = found.get("ways")
    return [Way(name, round(rate), round(limit)) for name, rate, limit in each] if isinstance(each, list) else []


def with_choice(check: TransportCheck, named: tuple[str, ...], default: tuple[bool, str]) -> TransportCheck:
    """Whether workers take it: a rule. `named` is what the setting names, `default` is `Kind.is_default()`."""
    is_default, why = default
    if named and check.name not in named:
        why, way = f"TENSORHUB_TRANSPORTS={','.join(named)} leaves it out", "add it there"
    elif not named and not is_default:
        way = f"TENSORHUB_TRANSPORTS={check.name},tcp takes it"
    else:
        return replace(check, use=f"{check.use}; {why} is here") if is_default and why else check
    if check.works:
        return replace(check, reason=f"works, but is not taken: {why}", remedy=way, is_taken=False)
    reason = check.reason if check.reason == why else f"{check.reason}. Not taken anyway: {why}"
    return replace(check, reason=reason, remedy="", is_taken=False)


def check_server(address: str, token: str = "", *, named_by: str = "", deadline_s: float = DEADLINE_S) -> Check:
    """Ask it how it is. `named_by`: the setting that its address came from."""
    shown = {"TENSORHUB_TOKEN": token, "TENSORHUB_TOKEN_FILE": "", "TENSORHUB_INSECURE": ""} if token else {}
    origin = f" (the address is from {named_by})" if named_by else ""
    try:
        address = parse_addresses(address, "server")
    except UsageError as error:
        return Check("reference server", "bad", f"{error}{origin}", error.hint or "")
    found = _asked("server", address, deadline_s=deadline_s, environ=shown)
    if "protocol" not in found:
        remedy = str(found.get("hint") or "start one with `tensorhub serve`")
        why = str(found.get("error") or f"{address} gave no answer")
        return Check("reference server", "bad", f"{why}{origin}", remedy)
    facts = f"{address} speaks {found['protocol']}, {found['workers']} workers, answers in {found['took_ms']:.0f} ms"
    return Check("reference server", "good", f"{facts}{origin}")


def examine(server: str | None, token: str = "", *, named_by: str = "", size_bytes: int = SIZE_BYTES) -> Findings:
    """Everything, one after the other, so that no measurement disturbs another. `named_by` as in `check_server`."""

    machine = machine_checks()
    if server is not None:
        machine.append(check_server(server, token, named_by=named_by))
    named, checks, ways = options_without_token().transports, [], []
    for name, kind in TRANSPORTS.items():
        check, its = check_transport(name, size_bytes=size_bytes)
        checks.append(with_choice(check, named, kind.is_default()))
        ways += its
    device, its = check_device(size_bytes=size_bytes)
    checks.sort(key=lambda check: [*named, *TRANSPORTS].index(check.name))
    return Findings(checks, machine + device, ways + its)


def _asked(*command: str, deadline_s: float, environ: Mapping[str, str] | None = None) -> Mapping[str, object]:
    """Returns the answer of a child process."""
    try:
        with _Child(*command, environ=environ) as child:
            return child.answer(deadline_s)
    except OSError as error:
        return {"error": f"no process can be started for it: {error}"}


class _Child:
    """A process with a role, ended when the block ends."""

    def __init__(self, *command: str, environ: Mapping[str, str] | None = None) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - no pipe: it is read when the process has ended
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tensorhub.cli.doctor", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                errors="replace",
                env={**os.environ, **(environ or {})},
                start_new_session=True,  # Ctrl-C ends us, and we end it
            )
        except OSError:
            self._stderr.close()
            raise
        self._answers: queue.SimpleQueue[dict[str, object] | None] = queue.SimpleQueue()
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    def __enter__(self) -> "_Child":
        return self

    def __exit__(self, *error: object) -> None:
        self._end()
        self._listening.join(ENDING_S)  # longer only where something that it has started holds its stdout open
        self._stderr.close()
        assert self._process.stdin is not None
        with suppress(OSError):  # a line that it never took
            self._process.stdin.close()

    def _end(self) -> int:
        """End it and whatever it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def tell(self, message: Mapping[str, object]) -> None:
        """Send it one line through its stdin."""
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended: its answer says so
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def answer(self, within_s: float) -> dict[str, object]:
        """Returns its answer; an `error` if it does not answer in time, or ends first."""
        deadline = time.monotonic() + within_s
        with suppress(queue.Empty, subprocess.TimeoutExpired):
            found = self._answers.get(timeout=within_s)
            if found is not None:
                return found
            status = self._process.wait(max(0.0, deadline - time.monotonic()))  # by itself: its status tells how
            words = self._last_words()
            return {"error": f"its process ended with {status}" + (f": {words}" if words else "")}
        self._end()
        return {"error": f"its process gave no answer within {within_s:g} s"}

    def _listen(self) -> None:
        """In a thread, until its stdout ends: keep its answers, and let pass what libraries have to say."""
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            while line := stdout.readline(MAX_LINE):
                _, _, said = line.partition(MARK)
                with suppress(ValueError):
                    found = json.loads(said)
                    if isinstance(found, dict):
                        self._answers.put(found)
        self._answers.put(None)

    def _last_words(self) -> str:
        """The last line on its stderr that says something."""
        size_bytes = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size_bytes - 4000))
        lines = self._stderr.read().decode(errors="replace").splitlines()
        return next((line for line in reversed(lines) if line.strip()), "")


ENOUGH_FILES = 4096  # 64 readers and 64 sources, 2 descriptors each, and as much again for the engine
ENOUGH_SHARED = 1 << 30
CAP_SYS_PTRACE = 19


def machine_checks() -> list[Check]:
    """One line for each."""
    found = []
    for check in (_host, _mover, _reading, _mapping, _gpu, _rdma, _congestion, _files, _locked, _shared):
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
    memory_kib = next((line.split()[1] for line in _text("/proc/meminfo").splitlines() if "MemTotal" in line), "0")
    memory = size_text(int(memory_kib) * 1024)
    facts = f"{platform.system()} {platform.release()}, Python {platform.python_version()}, "
    return Check("host", "good", facts + f"{count_text(core_count(), 'core')}, {memory}")


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
    """Checks which processes may read this one's memory. The local transport needs this."""
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


def _devices() -> list[str]:
    return _names("/proc/driver/nvidia/gpus")


def _gpu() -> Check:
    devices = _devices()
    if not devices:
        return Check("GPU", "absent", "no NVIDIA device: weights stay in host memory, and no way to one is measured")
    words = next(iter(_text("/proc/driver/nvidia/version").splitlines()), "").split()
    driver = next((word for word in words if word[:1].isdigit()), "unknown")
    text = f"{count_text(len(devices), 'NVIDIA device')}, driver {driver}"
    if has_kernels():
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
        wanted = ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(ENOUGH_FILES, hard)
        return Check("open files", "note", says, f"ulimit -n {wanted}")
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


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


MARKS = {
    "good": ("ok", "green"),
    "note": ("note", "yellow"),
    "slow": ("slow", "yellow"),
    "bad": ("bad", "red"),
    "absent": ("absent", "dim"),
    "measured": ("ok", "green"),  # good, and worth a line all the same
}
OFF, NO, NOT_NEEDED = ("off", "dim"), ("no", "yellow"), ("no", "dim")


def draw_findings(found: Findings, *, is_long: bool = False) -> RenderableType:
    """`is_long`: a line also for each thing that is well."""
    gap = Text("")
    machine = _machine([*_way_checks(found.ways, is_long), *found.machine], is_long)
    return Group(_transports(found.transports), gap, machine, gap, _verdict(found))


def _way_checks(ways: list[Way], is_long: bool) -> list[Check]:
    """One line for each way that is far below its limit, and for the others together."""
    slow = [each for each in ways if each.is_far_below]
    checks = [Check(each.name, "slow", f"far below its limit: {each.text}", WAYS[each.name].remedy) for each in slow]
    rest = [each for each in ways if each not in slow]
    if is_long:
        return checks + [Check(each.name, "good", each.text) for each in rest]
    shares = ", ".join(f"{each.name} {each.share} %" for each in rest)
    return [*checks, Check("of the limit", "measured", shares)] if rest else checks


def _transports(checks: list[TransportCheck]) -> Table:
    table = _table("transport", "for what, and how", rate="rate")
    for check in checks:
        mark, style = _mark(check)
        rate = f"{size_text(check.rate_bytes_per_s)}/s" if check.works else ""
        about = "; ".join(part for part in (check.path, check.reason) if part)
        table.add_row(check.name, Text(mark, style=style), rate, _with_remedy(f"{check.use}: {about}", check.remedy))
    return table


def _mark(check: TransportCheck) -> tuple[str, str]:
    if check.works:
        return MARKS["good"] if check.is_taken else OFF
    if not check.is_taken:
        return NOT_NEEDED
    return NO if check.name != "tcp" else MARKS["bad"]  # what remains where nothing else can be


def _machine(checks: list[Check], is_long: bool) -> Table:
    """What is well needs no line of its own; what is not has one, with its remedy."""
    table = _table("machine", "what it has")
    well = [] if is_long else [check for check in checks if check.state == "good"]
    for check in checks:
        if check not in well:
            mark, style = MARKS[check.state]
            table.add_row(check.name, Text(mark, style=style), _with_remedy(check.says, check.remedy))
    if well:
        table.add_row("the rest", Text(*MARKS["good"]), Text(", ".join(check.name for check in well)))
    return table


def _table(name: str, rest: str, *, rate: str = "") -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, expand=True)
    table.add_column(name, min_width=9, no_wrap=True)
    table.add_column("", min_width=6, no_wrap=True)
    if rate:
        table.add_column(rate, min_width=9, no_wrap=True, justify="right")
    table.add_column(rest, ratio=1, overflow="fold")
    return table


def _with_remedy(says: str, remedy: str) -> Text:
    text = Text(says)
    if remedy:
        text.append("\n  → ", style="bold").append(remedy, style="cyan")
    return text


def _verdict(found: Findings) -> Text:
    best = next((check for check in found.transports if check.works and check.is_taken), None)  # in the order of choice
    if best is None:
        return Text("No transport works that may be taken: workers here cannot move weights.", style="bold red")
    text = Text(f"Two workers of this machine take {best.name}", style="bold")
    text.append(f", {size_text(best.rate_bytes_per_s)}/s with every chunk verified. ", style="not bold")
    if not found.is_well:
        text.append("Mend what is marked bad first.", style="red")
    return text


# The measuring processes. Each may hang or die without harm, and prints one line of JSON behind a mark. Where something
# does not work, the answer has `error`, and perhaps `hint`. `ways` are a name in `WAYS`, its rate, and its limit's.
#
#     python -m tensorhub.cli.doctor source SCHEME SIZE    exports bytes, and says where; lives as long as stdin
#     python -m tensorhub.cli.doctor reader SCHEME         reads what stdin names; says at what rates
#     python -m tensorhub.cli.doctor device SIZE           copies and hashes on the first GPU
#     python -m tensorhub.cli.doctor server ADDRESS        asks a reference server how it is


KEY, MAPPED_KEY = "doctor", "doctor-mapped"
READ_S = 10.0
PROBE_S = 12.0  # of NIXL: shorter than the doctor's deadline, so that the doctor learns why
ASK_S = 3.0


def _made(scheme: str) -> Transport:
    return make_transport(scheme, "127.0.0.1", worker_options(), probe_s=PROBE_S)


def source(scheme: str, size: str) -> None:
    """Export until stdin ends."""
    size_bytes, chunk_bytes = int(size), options_without_token().chunk_bytes
    transport = _made(scheme)
    exported = {KEY: on_device(for_device(size_bytes)) if scheme == "cuda" else on_host(size_bytes)}
    if scheme == "local":
        with suppress(sealed.Unmappable):  # the line `mapping memory` says why
            exported[MAPPED_KEY] = on_host_mapped(size_bytes)
    for key, mine in exported.items():
        manifest = build_manifest(mine, chunk_bytes)
        progress = Progress(manifest.chunk_count, complete=True)
        transport.export(Export(key, manifest.encode(), chunk_bytes, mine.stream, progress))
    roots = {key: manifest.root() for key in exported}  # all have the same bytes
    plain = _plain_source(exported[KEY].stream) if scheme == "tcp" else 0
    say(endpoint=transport.endpoint, size_bytes=exported[KEY].size_bytes, roots=roots, plain=plain)
    sys.stdin.read()


def _plain_source(stream: ByteStream) -> int:
    """Sends all bytes on each connection to this port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            wire, _ = listener.accept()
            with wire, suppress(OSError), stream.views_to_read(0, stream.size_bytes) as views:
                for view in views:
                    wire.sendall(view)

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])


def _read_plain(port: int, stream: ByteStream) -> None:
    address, size_bytes = ("127.0.0.1", port), stream.size_bytes
    with socket.create_connection(address, READ_S) as wire, stream.views_to_write(0, size_bytes) as views:
        for view in views:
            while view and (got := wire.recv_into(view)):
                view = view[got:]


def reader(scheme: str) -> None:
    """Read what stdin names, beside what limits that."""
    told = json.loads(sys.stdin.readline())
    size_bytes, transport = told["size_bytes"], _made(scheme)
    why_not = transport.why_not(told["endpoint"])
    if why_not is not None:
        return say(error=why_not)
    mine, paths = on_device(size_bytes) if scheme == "cuda" else on_host(size_bytes), []

    def rate(key: str, *, is_verified: bool = True) -> float:
        def once() -> None:
            sink = FillSink(mine, Digest(told["roots"][key]), verify="full" if is_verified else "none")
            paths.append(read_to_end(transport, told["endpoint"], key, sink, within_s=READ_S))

        return best(once, size_bytes)

    found = rate(KEY)
    path = paths[-1]
    if isinstance(probed := getattr(transport, "probed", None), Probe):
        path += f"; NIXL {probed.version}"
    ways: list[Measured] = []
    if scheme == "tcp":
        unverified = rate(KEY, is_verified=False)
        plain = best(partial(_read_plain, told["plain"], mine.stream), size_bytes)
        chunk_bytes = options_without_token().chunk_bytes
        hashed = best(lambda: build_manifest(mine, chunk_bytes, threads=1), size_bytes)
        ways = [("tcp", found, unverified), ("tcp without digests", unverified, plain)]
        ways.append(("host digest", hashed, bare_copy(mine)))
    elif scheme in ("local", "cuda"):
        ways = [(scheme, found, copy := bare_copy(mine))]
        if MAPPED_KEY in told["roots"]:
            ways.append(("local from mapped memory", rate(MAPPED_KEY), copy))
    say(rate_bytes_per_s=round(found), path=path, ways=ways)


def device(size: str) -> None:
    """What the first GPU does, beside bare copies on it and over its bus."""
    reason, ways = device_ways(int(size), options_without_token().chunk_bytes)
    say(error=reason) if reason else say(ways=ways)


def server(address: str) -> None:
    """Is it there, and does it talk to us?"""
    from .. import connect

    began = time.perf_counter()
    status = connect(address, timeout=ASK_S).status()
    took_ms = (time.perf_counter() - began) * 1e3
    workers = sum(len(replica.workers) for model in status.models for replica in model.replicas)
    say(protocol=status.protocol, uptime_s=status.uptime_s, workers=workers, took_ms=took_ms)


def say(**answer: object) -> None:
    """The one line, by itself also where a library has left one unfinished."""
    sys.stdout.flush()
    os.write(1, f"\n{MARK}{json.dumps(answer)}\n".encode())


def main(role: str, *arguments: str) -> None:
    """Do it, or say why not; leave at once, whatever threads are about."""
    roles: dict[str, Callable[..., None]] = {"source": source, "reader": reader, "device": device, "server": server}
    try:
        roles[role](*arguments)
    except TensorHubError as error:
        say(error=str(error), hint=error.hint or "")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
