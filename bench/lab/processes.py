"""The director's hands: workers forked by the nursery, signalled, killed, and none of them left behind."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from tensorhub.runtime.config import ACCESS_VARIABLES

from ..demo.processes import LAST_LINES, ProcessFailed
from .ettr.plan import Task
from .job import Job
from .network import Place
from .nursery import News, Start

LEAVE_S = 10.0


class Nursery:
    """The workers by name. Leaving the `with` block ends them all."""

    def __init__(self, logs: Path, *, with_torch: bool = False, settings: Sequence[str] = ()) -> None:
        self._logs = logs
        self._pids: dict[str, int] = {}  # of those that live
        self._awaited: set[str] = set()  # may end, or were killed
        self._rest = b""
        self._decoder = msgspec.json.Decoder(News)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.lab.nursery", *(["torch"] if with_torch else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(logs / "nursery.log").open("ab"),
            start_new_session=True,
            env={
                **_environment(),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "eth0",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
                **dict(each.split("=", 1) for each in settings),
            },
        )

    def __enter__(self) -> "Nursery":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def start(self, job: Job | Task, place: Place | None = None) -> None:
        """Fork a worker, into a namespace, and wait until it is there. Raises `ProcessFailed`.

        One of that name may have lived before, and is gone.
        """
        assert self._process.stdin is not None, "no pipe"
        self._awaited.discard(job.name)
        start = Start(job, place.path if place else "", str(self._logs / f"{job.name}.log"))
        self._process.stdin.write(msgspec.json.encode(start) + b"\n")
        self._process.stdin.flush()
        deadline = time.monotonic() + LEAVE_S
        while job.name not in self._pids:
            self._listen(max(0.0, deadline - time.monotonic()))
            if time.monotonic() > deadline:
                raise ProcessFailed(f"{job.name} did not start within {LEAVE_S:.0f} s")

    def pid(self, name: str) -> int | None:
        """Of one that lives."""
        return self._pids.get(name)

    @property
    def living(self) -> list[str]:
        """Names of those that have not been seen to end."""
        return list(self._pids)

    def go(self) -> None:
        """Tell everybody to begin."""
        self._signal_all(signal.SIGUSR1)

    def finish(self, name: str) -> None:
        """Tell the trainer to make one version more, and no others."""
        os.kill(self._pids[name], signal.SIGUSR2)

    def leave(self, name: str) -> None:
        """Tell one to leave."""
        self._awaited.add(name)
        os.kill(self._pids[name], signal.SIGTERM)

    def kill(self, name: str) -> None:
        """SIGKILL."""
        self._awaited.add(name)
        os.kill(self._pids[name], signal.SIGKILL)

    def wait_gone(self, *names: str) -> None:
        """Until those have ended, who were killed or told to leave. Raises `ProcessFailed`."""
        deadline = time.monotonic() + LEAVE_S
        while left := [name for name in names if name in self._pids]:
            self._listen(max(0.0, deadline - time.monotonic()))
            if time.monotonic() > deadline:
                raise ProcessFailed(f"{', '.join(left)} did not end within {LEAVE_S:.0f} s")

    def check(self) -> None:
        """Hear who has ended. Raises `ProcessFailed` if one has that nobody had told to."""
        self._listen(0.0)

    def end(self) -> None:
        """Tell everybody to leave, wait for it, and end who does not. Idempotent."""
        if self._process.poll() is None:
            self._awaited.update(self._pids)
            self._signal_all(signal.SIGTERM)
            deadline = time.monotonic() + LEAVE_S
            while self._pids and (left := deadline - time.monotonic()) > 0:
                self._listen(left)
            self._signal_all(signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()

    def _signal_all(self, number: int) -> None:
        for pid in self._pids.values():
            os.kill(pid, number)  # its parent reaps it only when this process has been told

    def _listen(self, wait_s: float) -> None:
        assert self._process.stdout is not None, "no pipe"
        descriptor = self._process.stdout.fileno()
        failed: list[str] = []
        while select.select([descriptor], [], [], wait_s)[0]:
            wait_s = 0.0
            text = os.read(descriptor, 65536)
            if not text:
                raise ProcessFailed(f"the nursery has ended\n{self._last_words('nursery')}")
            *lines, self._rest = (self._rest + text).split(b"\n")
            for line in lines:
                news = self._decoder.decode(line)
                if news.status is None:
                    self._pids[news.name] = news.pid
                    continue
                del self._pids[news.name]
                if news.name not in self._awaited and news.status != 0:
                    failed.append(news.name)
        if failed:
            raise ProcessFailed("\n".join(f"{name} ended\n{self._last_words(name)}" for name in failed))

    def _last_words(self, name: str) -> str:
        path = self._logs / f"{name}.log"
        lines = path.read_text(errors="replace").splitlines()[-LAST_LINES:] if path.exists() else []
        return "\n".join([f"(from {path})", *lines])


def _environment() -> dict[str, str]:
    """Ours, without what a user has set for TensorHub but the token: the laboratory says everything else itself."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TENSORHUB_") or name in ACCESS_VARIABLES
    }
