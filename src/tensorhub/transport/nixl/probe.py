"""Whether NIXL works here: found out in a child process first, because loading a native library can hang or abort.

The child (`python -m tensorhub.transport.nixl.probe`) loads each of NIXL's modules that is installed, makes two
agents, and moves a megabyte from one to the other. Its answer is one line of JSON. It is killed at its deadline, ends
by its own alarm if its parent forgot it, and by the kernel if its parent died. The answer is kept for the life of
this process.
"""

import ctypes
import importlib.metadata
import importlib.util
import mmap
import os
import signal
import subprocess
import sys
import threading

import msgspec

from ...protocol.errors import TransportMissing
from ..threads import is_shortage
from . import agent as nixl_path
from .agent import HOST, MODULES, Agent, Broken, Page, Place, Stuck, load

DEADLINE_S = 30.0  # it takes 1 s on an idle machine; 6 s were seen on one with ten times more to do than it could
INSTALL = "pip install 'tensorhub[nixl]'"
_MARK = b"tensorhub-nixl-probe "
_PR_SET_PDEATHSIG = 1
_TEST_BYTES = 1 << 20


class Probe(msgspec.Struct, frozen=True):
    """What was found. `module` is empty where NIXL does not work, and `why_not` says why."""

    module: str = ""
    version: str = ""
    rdma: tuple[str, ...] = ()
    tls: str = ""
    is_immediate: bool = False  # two agents of one host: UCX copies by itself
    why_not: str = ""
    hint: str = ""

    def lines(self) -> list[str]:
        """For `doctor`: what works, by which way, and what would be better."""
        if not self.module:
            return [f"nixl: does not work here: {self.why_not}", f"  {self.hint}"] if self.hint else [self.why_not]
        chosen = f", UCX_TLS={self.tls}" if self.tls else ""
        one_host = "shared memory (cma)" if self.is_immediate else "TCP: take local or tcp instead"
        others = f"RDMA ({', '.join(self.rdma)})" if self.rdma else "TCP, no RDMA device is here: take tcp instead"
        return [
            f"nixl: NIXL {self.version} ({self.module}){chosen}",
            f"  workers of this host: {one_host}",
            f"  workers of other hosts: {others}",
        ]


_found: dict[str, Probe] = {}
_lock = threading.Lock()


def probe(deadline_s: float = DEADLINE_S) -> Probe:
    """Whether and how NIXL works in a process like this one. Never hangs, never raises for what NIXL does.

    Raises `OSError` while no child process can be started at a limit of this one: that is not remembered.
    """
    tls = os.environ.get("UCX_TLS", "")
    with _lock:
        if tls not in _found:
            _found[tls] = _ask_a_child(deadline_s)
        return _found[tls]


def require(deadline_s: float = DEADLINE_S) -> Probe:
    """The same, where NIXL works. Raises `TransportMissing` with the reason otherwise."""
    found = probe(deadline_s)
    if not found.module:
        raise TransportMissing(f"the nixl transport is not available: {found.why_not}", hint=found.hint or None)
    return found


def _ask_a_child(deadline_s: float) -> Probe:
    if not any(importlib.util.find_spec(name) for name in MODULES):
        return Probe(why_not=f"none of {', '.join(MODULES)} is installed", hint=INSTALL)
    path = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, "-m", __name__, f"{deadline_s:g}", str(os.getpid())]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            timeout=deadline_s,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        return Probe(why_not=f"trying it in a child process did not end within {deadline_s:g} s")
    except OSError as error:
        if is_shortage(error):
            raise
        return Probe(why_not=f"no child process can be started to try it in: {error}")
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            try:
                return msgspec.json.decode(line.removeprefix(_MARK), type=Probe)
            except msgspec.MsgspecError:
                break
    how = f"signal {signal.Signals(-done.returncode).name}" if done.returncode < 0 else f"exit code {done.returncode}"
    words = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
    return Probe(why_not=f"trying it in a child process ended with {how}: {words[0][:200]}")


# -- the child -----------------------------------------------------------------------------------------------------


def _main(deadline_s: float, parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.setitimer(signal.ITIMER_REAL, deadline_s)  # SIGALRM's default ends the process, whatever it is doing
    if os.getppid() != parent:
        return
    answer = _try_all()
    sys.stdout.flush()
    os.write(1, b"\n" + _MARK + msgspec.json.encode(answer) + b"\n")
    os._exit(0)  # whatever native threads or destructors would do now


def _try_all() -> Probe:
    reasons = []
    for module in MODULES:
        if importlib.util.find_spec(module) is not None:
            try:
                return _try(module)
            except (TransportMissing, ImportError, Broken, Stuck, AttributeError, TypeError) as error:
                reasons.append(f"{module}: {type(error).__name__}: {error}")
    return Probe(why_not="; ".join(reasons), hint="run `tensorhub doctor`; tcp works without NIXL")


def _try(module: str) -> Probe:
    bindings = load(module)
    here = nixl_path.facts()
    source, target = (Agent(bindings, Page(), Page(), workers=1, emulates=True) for _ in range(2))
    right = bytes(range(256)) * (_TEST_BYTES // 256)
    memory = [mmap.mmap(-1, _TEST_BYTES) for _ in range(2)]
    memory[0][:] = right
    regions = [
        agent.know(each, [Place(HOST, ctypes.addressof(ctypes.c_char.from_buffer(each)), _TEST_BYTES)])
        for agent, each in zip((source, target), memory, strict=True)
    ]
    target.meet(source.name, source.introduction(regions[0]))
    ours, theirs = target.prepare(None, regions[1].places), target.prepare(source.name, regions[0].places)
    is_immediate = False
    for _ in range(3):
        is_immediate = target.read(ours, theirs, range(len(regions[0].places)), DEADLINE_S)
    if memory[1][:] != right:
        raise Broken("other bytes arrived than were sent")
    version = importlib.metadata.version(module.replace("_", "-"))
    return Probe(module, version, here.rdma, here.tls, is_immediate)


if __name__ == "__main__":
    _main(float(sys.argv[1]), int(sys.argv[2]))
