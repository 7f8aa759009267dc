"""`tensorhub doctor`: which transports work on this machine, at what rate, and what to do about those that do not.

A transport that works is not always taken: a setting may leave it out, and NIXL has no advantage without its hardware.
Then the doctor says so, and why.

Whatever could hang or crash runs in a child with a deadline: two workers of its own that move 256 MiB over loopback for
each transport, and the question to the reference server. The rest is read from files of the kernel.
It must never: hang, change a setting, or need a reference server.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace

from ..core.errors import UsageError
from ..runtime.config import options_without_token, parse_address
from ..transport import nixl_path
from ..transport.choose import PREFERENCE

SIZE_BYTES = 256 << 20  # 15 ms at the rate of memory, half a second at 4 Gbit/s
DEADLINE_S = 20.0  # of one probe; the slowest start of Python with all imports takes 5 s on a machine under load
ENDING_S = 1.0
MARK = "tensorhub-doctor "  # before an answer: native libraries write to stdout as well
MOST_LINE = 1 << 16

USES = {
    "cuda": "two workers of one host, tensors on a GPU",
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
    elif not named and check.name == "cuda":
        why, way = "it has not run on a device yet", "TENSORHUB_TRANSPORTS=cuda,local,tcp takes it"
    elif not named and check.name == "nixl" and not nixl[0]:
        why, way = nixl[1], "TENSORHUB_TRANSPORTS=nixl,tcp takes it"
    else:
        return replace(check, use=f"{check.use}; {nixl[1]} is here") if check.name == "nixl" and nixl[0] else check
    if check.works:
        return replace(check, reason=f"works, but is not taken: {why}", remedy=way, is_taken=False)
    return replace(check, reason=f"{check.reason}. Not taken anyway: {why}", remedy="", is_taken=False)


def check_server(address: str, token: str = "", *, named_by: str = "", deadline_s: float = DEADLINE_S) -> Check:
    """Ask it how it is. `named_by`: the setting that its address came from."""
    shown = {"TENSORHUB_TOKEN": token, "TENSORHUB_TOKEN_FILE": "", "TENSORHUB_INSECURE": ""} if token else {}
    origin = f" (the address is from {named_by})" if named_by else ""
    try:
        address = parse_address(address, "server")
        with _Child("server", address, environ=shown) as asking:
            found = asking.answer(deadline_s)
    except OSError as error:
        found = {"error": f"no process can be started to ask it from: {error}"}
    except UsageError as error:
        return Check("reference server", "bad", f"{error}{origin}", error.hint or "")
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
    named, nixl = options_without_token().transports, nixl_path.advantage()
    checks = [with_choice(check_transport(name, size_bytes=size_bytes), named, nixl) for name in PREFERENCE]
    return Findings(sorted(checks, key=lambda check: [*named, *PREFERENCE].index(check.name)), machine)


class _Child:
    """A process with a role, ended when the block ends."""

    def __init__(self, *command: str, environ: Mapping[str, str] | None = None) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - no pipe: nobody reads it until the process has ended
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tensorhub.cli.doctor_child", *command],
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
        """A line to its stdin."""
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended: its answer says so
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def answer(self, within_s: float) -> dict[str, object]:
        """What it says; an `error` if it says nothing in time, or ends before."""
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
            while line := stdout.readline(MOST_LINE):
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
