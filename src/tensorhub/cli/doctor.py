"""`tensorhub doctor`: which transports work on this machine, at what rate, and what to do about those that do not.

A transport that works is not always taken: a setting may leave it out, and NIXL has no advantage without its hardware.
Then the doctor says so, and why.

Whatever could hang or crash runs in a child with a deadline: two workers of its own that move 256 MiB over loopback for
each transport, and the question to the reference server. The rest is read from files of the kernel.
It must never: hang, change a setting, or need a reference server.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace

from ..runtime.config import worker_options
from ..transport import nixl_path
from ..transport.choose import PREFERENCE

SIZE_BYTES = 256 << 20  # 15 ms at the rate of memory, half a second at 4 Gbit/s
DEADLINE_S = 20.0  # of one probe; the slowest start of Python with all imports takes 5 s on a machine under load
ENDING_S = 1.0

USES = {
    "local": "two workers of one host",
    "nixl": "RDMA, NVLink, CUDA IPC",
    "tcp": "any two hosts",
}
OTHERWISE = {"nixl": "TENSORHUB_TRANSPORTS=local,tcp goes without it"}  # where it hangs or aborts and says nothing


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
class Findings:
    """All of it."""

    transports: list[TransportCheck] = field(default_factory=list)
    machine: list[Check] = field(default_factory=list)

    @property
    def is_well(self) -> bool:
        """Workers can work here: a transport works, and the reference server, if one was named, answers."""
        return any(each.works and each.is_taken for each in self.transports) and all(
            each.state != "bad" for each in self.machine
        )

    def as_json(self) -> str:
        """For programs."""
        return json.dumps({"is_well": self.is_well, **asdict(self)}, indent=2)


def check_transport(name: str, *, size_bytes: int = SIZE_BYTES, deadline_s: float = DEADLINE_S) -> TransportCheck:
    """Start two workers, let one read from the other, and end both."""
    use = USES.get(name, "")
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
        return TransportCheck(name, True, use, int(str(found["rate_bytes_per_s"])), str(found["path"]))
    reason = str(found.get("error") or "it gave no answer")
    remedy = str(found.get("hint") or OTHERWISE.get(name, ""))
    return TransportCheck(name, False, use, reason=reason, remedy=remedy)


def with_choice(check: TransportCheck, named: tuple[str, ...], nixl: tuple[bool, str]) -> TransportCheck:
    """Whether workers take it: a rule. `named` is what the setting names, `nixl` is `nixl_path.advantage()`."""
    if named and check.name not in named:
        why, way = f"TENSORHUB_TRANSPORTS={','.join(named)} leaves it out", "add it there"
    elif not named and check.name == "nixl" and not nixl[0]:
        why, way = nixl[1], "TENSORHUB_TRANSPORTS=nixl,tcp takes it"
    else:
        return replace(check, use=f"{check.use}; {nixl[1]} is here") if check.name == "nixl" and nixl[0] else check
    if check.works:
        return replace(check, reason=f"works, but is not taken: {why}", remedy=way, is_taken=False)
    return replace(check, reason=f"{check.reason}. Not taken anyway: {why}", remedy="", is_taken=False)


def check_server(address: str, token: str = "", *, named_by: str = "", deadline_s: float = DEADLINE_S) -> Check:
    """Ask it how it is. `named_by`: the setting that its address came from."""
    with _Child("server", address, environ={"TENSORHUB_TOKEN": token}) as asking:
        found = asking.answer(deadline_s)
    origin = f" (the address is from {named_by})" if named_by else ""
    if "protocol" not in found:
        remedy = str(found.get("hint") or "start one with `tensorhub serve`")
        why = str(found.get("error") or f"{address} gave no answer")
        return Check("reference server", "bad", f"{why}{origin}", remedy)
    facts = f"{address} speaks {found['protocol']}, {found['workers']} workers, answers in {found['took_ms']:.0f} ms"
    return Check("reference server", "good", f"{facts}{origin}")


def examine(server: str | None, token: str = "", *, named_by: str = "", size_bytes: int = SIZE_BYTES) -> Findings:
    """Everything, one after the other, so that no measurement disturbs another. `named_by` as in `check_server`."""
    from .machine import machine_checks

    machine = machine_checks()
    if server is not None:
        machine.append(check_server(server, token, named_by=named_by))
    named, nixl = worker_options().transports, nixl_path.advantage()
    checks = [with_choice(check_transport(name, size_bytes=size_bytes), named, nixl) for name in PREFERENCE]
    return Findings(sorted(checks, key=lambda check: [*named, *PREFERENCE].index(check.name)), machine)


class _Child:
    """A process with a role, ended when the block ends."""

    def __init__(self, *command: str, environ: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tensorhub.cli.doctor_child", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environ or {})},
            start_new_session=True,  # Ctrl-C ends us, and we end it
        )

    def __enter__(self) -> "_Child":
        return self

    def __exit__(self, *error: object) -> None:
        self._end()
        with suppress(OSError):  # a line that it never took
            self._process.__exit__(None, None, None)

    def _end(self) -> int:
        """End it and whatever it has started, which might hold its pipes open."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def tell(self, message: Mapping[str, object]) -> None:
        """A line to its stdin."""
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended: its answer says so
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def answer(self, within_s: float) -> dict[str, object]:
        """The line that it says; an `error` if it says none in time."""
        stdout, stderr = self._process.stdout, self._process.stderr
        assert stdout is not None
        assert stderr is not None
        lines: list[str] = []
        reading = threading.Thread(target=lambda: lines.append(stdout.readline()), daemon=True)
        reading.start()
        reading.join(within_s)  # a thread that waits longer ends with the process
        if reading.is_alive():
            return {"error": f"nothing within {within_s:.0f} s"}
        with suppress(ValueError):
            found = json.loads(lines[0])
            if isinstance(found, dict):
                return found
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING_S)  # by itself, so that its status tells how
        status = self._end()
        words = [line for line in stderr.read()[-4000:].splitlines() if line.strip()]
        return {"error": f"its process ended with {status}" + (f": {words[-1]}" if words else "")}
