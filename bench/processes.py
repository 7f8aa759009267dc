"""Starts, asks and ends the processes of the benchmarks. Whatever happens, none outlives this one."""

import atexit
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorhub.runtime.config import ACCESS_VARIABLES, worker_options

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 120.0  # for one command; nothing that is measured takes so long
START_S = 60.0  # a machine under load imports slowly

_children: "dict[Process, None]" = {}


class Failed(Exception):
    """A process said that a command failed, did not answer in time, or has ended."""


class Process:
    """A child in a process group of its own. Must be started from the main thread (it dies with that thread)."""

    def __init__(
        self, name: str, command: Sequence[str], *, env: dict[str, str] | None = None, is_session: bool = True
    ) -> None:
        """`is_session`: of a session of its own, to which Linux gives cores as to one, whatever threads it has."""
        self.name = name
        environ = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("TENSORHUB_") or key in ACCESS_VARIABLES
        }
        self.popen = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environ, **(env or {})},
            start_new_session=is_session,
            process_group=None if is_session else 0,
        )
        _children[self] = None
        self._said: list[str] = []
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def complaint(self) -> str:
        """The end of what it wrote to stderr."""
        return "".join(self._said[-30:])[-3000:]

    def _listen(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self._said = [*self._said[-200:], line]

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it and all that it started. Idempotent."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(10)
        for pipe in (self.popen.stdin, self.popen.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        _children.pop(self, None)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Pending:
    """A command under way."""

    def __init__(self, child: "Child", what: str, patience_s: float) -> None:
        self._child, self._what, self._patience_s = child, what, patience_s
        self._event = threading.Event()
        self._answer: dict[str, object] | None = None

    def settle(self, answer: dict[str, object] | None) -> None:
        self._answer = answer
        self._event.set()

    def result(self) -> Any:
        """What the command gave. Raises `Failed`."""
        if not self._event.wait(self._patience_s):
            raise Failed(f"{self._child.name}: {self._what} has not ended within {self._patience_s:.0f} s")
        if self._answer is None:
            raise Failed(f"{self._child.name} ended during {self._what}: {self._child.complaint}")
        if "error" in self._answer:
            raise Failed(f"{self._child.name}: {self._what}: {self._answer['error']}")
        return self._answer["value"]


class Child(Process):
    """A `bench.child`, or another module of its kind; `wrapper` goes before its command (`ip netns exec …`)."""

    def __init__(
        self,
        name: str,
        *,
        module: str = "bench.child",
        wrapper: Sequence[str] = (),
        env: dict[str, str] | None = None,
        is_session: bool = True,
    ) -> None:
        self._pending: dict[int, Pending] = {0: Pending(self, "start", START_S)}
        self._started = self._pending[0]
        self._next = 0
        self._lock = threading.Lock()
        self._is_over = False
        super().__init__(name, [*wrapper, sys.executable, "-m", module], env=env, is_session=is_session)
        threading.Thread(target=self._read, daemon=True).start()

    def wait_started(self) -> "Child":
        self._started.result()
        return self

    def _read(self) -> None:
        assert self.popen.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            for line in self.popen.stdout:
                answer = json.loads(line)
                with self._lock:
                    pending = self._pending.pop(answer["id"])
                pending.settle(answer)
        with self._lock:
            self._is_over = True
            left, self._pending = list(self._pending.values()), {}
        for pending in left:
            pending.settle(None)

    def ask(self, do: str, *, patience_s: float = PATIENCE_S, **arguments: object) -> Pending:
        """Send a command; returns at once."""
        pending = Pending(self, str(arguments.get("verb", do)), patience_s)
        with self._lock:
            self._next += 1
            number = self._next
            is_over = self._is_over
            if not is_over:
                self._pending[number] = pending
        if is_over:
            pending.settle(None)
            return pending
        assert self.popen.stdin is not None
        with contextlib.suppress(OSError):  # it has just died: its end settles what is pending
            self.popen.stdin.write(json.dumps({"id": number, "do": do, **arguments}) + "\n")
            self.popen.stdin.flush()
        return pending

    def do(self, do: str, *, patience_s: float = PATIENCE_S, **arguments: object) -> Any:
        """Send a command and wait for what it gives."""
        return self.ask(do, patience_s=patience_s, **arguments).result()


@functools.cache
def own_token() -> str:
    """What a worker shows to the server below."""
    return worker_options().token


class Server(Process):
    """`tensorhub serve` as a process, or the stand-in that decides nothing; `address` is where."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        wrapper: Sequence[str] = (),
        lease_s: float | None = None,
        is_ideal: bool = False,
        env: dict[str, str] | None = None,
    ) -> None:
        lease = [] if lease_s is None else ["--lease", str(lease_s)]
        serve = [
            "-m",
            "bench.serve",
            "serve",
            "--host",
            host,
            "--port",
            "0",
            "--fresh",
            "--log",
            "warning",
            *lease,
        ]
        command = ["-m", "bench.ideal"] if is_ideal else serve
        super().__init__("server", [*wrapper, sys.executable, *command], env=env)
        line = _first_line(self)
        if not line.startswith("reference server at "):
            self.kill()
            raise Failed(f"the reference server did not start: {line} {self.complaint}")
        self.address = line.split()[3].rstrip(";")

    def resident_bytes(self) -> int:
        """Memory that it has now."""
        words = Path(f"/proc/{self.pid}/statm").read_text().split()
        return int(words[1]) * os.sysconf("SC_PAGE_SIZE")

    def cpu_s(self) -> float:
        """Seconds of CPU so far, to 10 ms."""
        words = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _first_line(process: Process) -> str:
    found: list[str] = []
    assert process.popen.stdout is not None
    reading = threading.Thread(target=lambda: found.append(process.popen.stdout.readline()), daemon=True)  # type: ignore[union-attr]
    reading.start()
    reading.join(START_S)
    return found[0] if found else ""


def kill_all() -> None:
    """End every process that is left."""
    for child in list(_children):
        child.kill()


def left_over() -> list[str]:
    """Names of the processes that nobody has ended."""
    return [f"{child.name} ({child.pid})" for child in _children]


atexit.register(kill_all)
