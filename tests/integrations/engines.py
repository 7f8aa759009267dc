"""vLLM engines in processes of their own, driven by one test."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading

import tensorhub

from .kit import ROOT


class Engine:
    """One vLLM in a process."""

    def __init__(self, folder, name, **environ):
        self.name, self.log = name, folder / f"{name}.log"
        command = [sys.executable, "-m", "tests.integrations.engine"]
        environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", **environ}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def ask(self, do, **arguments):
        """What it answered: a mapping; None if it died."""
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def begin(self, do, **arguments):
        """The same, in a thread: `join()` returns the answer."""
        thread = threading.Thread(target=lambda: setattr(thread, "answer", self.ask(do, **arguments)))
        thread.start()
        return thread

    def call(self, do, **arguments):
        found = self.ask(do, **arguments)
        assert "value" in (found or {}), f"{do} of {self.name}: {found}\n{self.log.read_text()[-6000:]}"
        return found["value"]

    def end(self):
        with_it = os.getpgid(self.process.pid) if self.process.poll() is None else None
        if with_it is not None:
            os.killpg(with_it, signal.SIGKILL)
        self.process.wait(20)
        self.process.stdin.close()
        self.process.stdout.close()


@contextlib.contextmanager
def stopped(job):
    """The job's processes stand still."""
    for rank in job.ranks:
        os.kill(rank.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for rank in job.ranks:
            if rank.poll() is None:
                os.kill(rank.pid, signal.SIGCONT)


def is_reading(server, replica):
    """Whether it has a source, and waits for it."""
    return any(each.target == replica and not each.is_void for each in tensorhub.connect(server).transfers())


@contextlib.contextmanager
def started(folder):
    """`begin("rollout-0")` starts the process of an engine, without vLLM yet."""
    engines = []

    def begin(name, **environ):
        engines.append(Engine(folder, name, **environ))
        return engines[-1]

    try:
        yield begin
    finally:
        for engine in engines:
            engine.end()
