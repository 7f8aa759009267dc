"""The director's processes: started, killed, watched, and none of them left behind.

Each writes its output to a file of its own. Its standard input is a pipe that ends when the director does (`parent`).
"""

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from random import SystemRandom
from types import TracebackType

LAST_LINES = 15  # of a failed process's output, for the error
LEAVE_S = 5.0
PORTS = range(18000, 30000)  # below those that Linux gives to outgoing connections: nobody takes ours while it is free


class ProcessFailed(Exception):
    """A process of the demo ended that should not have; says which, how, and its last words."""


class Processes:
    """The child processes by name. Leaving the `with` block ends them all."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Processes":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._running.values():
            process.terminate()
        for name in list(self._running):
            self._reap(name)

    def start(self, name: str, command: Sequence[str]) -> None:
        """Start one. Ctrl-C in the terminal reaches the director only, who then ends everybody in order."""
        with (self._logs / f"{name}.log").open("ab") as output:
            self._running[name] = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            )

    def kill(self, *names: str) -> None:
        """SIGKILL, to all of them at once: they have no chance to say goodbye to anybody."""
        killed = {name: self._running.pop(name) for name in names}
        for process in killed.values():
            process.kill()
        for name, process in killed.items():
            status = process.wait()
            _close_input(process)
            if status != -signal.SIGKILL:
                text = f"{name} had ended with status {status} before it was killed"
                raise ProcessFailed(f"{text}\n{self._last_words(name)}")

    def let_go_on(self, name: str) -> None:
        """Tell it that what it may wait for has happened."""
        process = self._running[name]
        assert process.stdin is not None, "start gives everybody a pipe"
        with contextlib.suppress(BrokenPipeError):  # it has ended: `check` says how
            process.stdin.write(b"\n")
            process.stdin.flush()

    def release(self, name: str) -> None:
        """Tell it to leave."""
        _close_input(self._running[name])

    def check(self) -> None:
        """Look who has ended. Raises `ProcessFailed` if one did not end well."""
        for name, process in list(self._running.items()):
            status = process.poll()
            if status is not None:
                del self._running[name]
                _close_input(process)
                if status != 0:
                    raise ProcessFailed(f"{name} ended with status {status}\n{self._last_words(name)}")

    def pid(self, name: str) -> int:
        """Of one that runs."""
        return self._running[name].pid

    @property
    def running(self) -> set[str]:
        """Names of those that have not been seen to end."""
        return set(self._running)

    def _reap(self, name: str) -> None:
        process = self._running.pop(name)
        _close_input(process)
        try:
            process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _last_words(self, name: str) -> str:
        path = self._logs / f"{name}.log"
        lines = path.read_text(errors="replace").splitlines()[-LAST_LINES:]
        return "\n".join([f"(from {path})", *lines])


def free_address() -> str:
    """An address of this machine on which nobody listens."""
    random = SystemRandom()
    while True:
        port = random.choice(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return f"127.0.0.1:{port}"


def _close_input(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
