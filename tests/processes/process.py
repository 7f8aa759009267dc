"""Starts, asks, stops and kills one real process.

Every call is held to its deadline here, whatever a scenario is about, by the clock of the process that made it (all
processes of a machine share the monotonic clock). A worker process that has closed its weights is used again by the
next scenario, and must then be as slim as before.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import tensorhub
from tensorhub.protocol.errors import error_from_code

from .memory import Memory

WORKER = Path(__file__).with_name("worker.py")
LATE_S = 4.0  # no call outlives its deadline by more than that; a machine that stands still may be the reason for less
SLACK_S = 15.0  # until a machine under load has carried an answer through two pipes
PATIENCE_S = 60.0  # what a call gets that must succeed; no promise is measured by it
COOKIE = "TENSORHUB_TEST_COOKIE"
UNMOVED_S = 1000.0  # what a scenario holds at a valve stays where it is; None: as patient as a user's server
# What a scenario holds or counts goes through sockets, unless it opens otherwise: only there both ends have valves.
SOCKETS = {"TENSORHUB_TRANSPORTS": "tcp"}


def eventually(condition, what, *, within_s=30.0):
    """Wait until it holds and return what it gave; fail when it does not in time."""
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {within_s} s"
        time.sleep(0.01)
    return found


class Died(Exception):
    """The process ended before it answered."""


class Pending:
    """A command under way."""

    def __init__(self, worker, what, timeout):
        self.worker, self.what, self.timeout = worker, what, timeout
        self.asked = time.monotonic()
        self.ended = 0.0  # by the monotonic clock
        self._stops = worker.stops
        self._answer = None
        self._answered = threading.Event()

    def __repr__(self):
        return f"{self.what} of {self.worker.name}"

    def settle(self, answer):
        """The worker has answered, or (None) will not any more."""
        self._answer = answer
        self.ended = answer["ended"] if answer else time.monotonic()
        self._answered.set()

    @property
    def is_over(self):
        return self._answered.is_set()

    def result(self):
        """The value, or the error that the worker was given. Holds the call to its deadline."""
        if not self._answered.wait(max(0.0, self.asked + self.timeout + LATE_S + SLACK_S - time.monotonic())):
            raise AssertionError(f"{self} has not ended, {self.timeout} s were given\n{self.worker.stacks()}")
        answer = self._answer
        if answer is None:
            raise Died(f"{self}: the process has ended\n{self.worker.log[-2000:]}")
        took_s = answer["ended"] - answer["began"]
        if self._stops == self.worker.stops and not self.worker.is_stopped:
            assert took_s <= self.timeout + LATE_S, f"{self} took {took_s:.2f} s, {self.timeout} s were given"
        if "code" not in answer:
            return answer["value"]
        assert answer["code"], f"{self} raised {answer['message']}\n{self.worker.log[-4000:]}"
        raise error_from_code(answer["code"], f"{self}: {answer['message']}", hint=answer["hint"])

    def outcome(self):
        """The value, or the error itself."""
        try:
            return self.result()
        except (tensorhub.TensorHubError, Died) as error:
            return error


class Process:
    """A child, its log, and the signals that it gets."""

    def __init__(self, name, command, folder, *, env=None, **options):
        self.name = name
        self.is_stopped = False
        self.stops = 0
        self._log = folder / f"{name.replace('/', '-')}-{time.monotonic_ns()}.log"
        self._log_begins = 0
        environ = {**os.environ, COOKIE: str(os.getpid()), **SOCKETS, **(env or {})}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=environ, **options
            )

    @property
    def log(self):
        """What it said in this scenario."""
        return self._log.read_bytes()[self._log_begins :].decode(errors="replace")

    @property
    def is_alive(self):
        return self.process.poll() is None

    def kill(self):
        """SIGKILL. Returns when it happened."""
        self.process.kill()
        killed = time.monotonic()
        self.process.wait(10)
        return killed

    def stop(self):
        """SIGSTOP, and wait until it has stopped. Returns when that was."""
        self._signal(signal.SIGSTOP)
        self.stops, self.is_stopped = self.stops + 1, True
        stat = Path(f"/proc/{self.process.pid}/stat")
        eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", f"{self.name} has stopped")
        return time.monotonic()

    def _signal(self, number):
        if not self.is_alive:  # its number may be another's by now
            raise ProcessLookupError(f"{self.name} has ended")
        os.kill(self.process.pid, number)

    def close_pipes(self):
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def go_on(self):
        """SIGCONT."""
        self._signal(signal.SIGCONT)
        self.is_stopped = False
        return time.monotonic()


class ServerProcess(Process):
    """`tensorhub serve`."""

    def __init__(
        self,
        folder,
        *,
        lease_s,
        report_s=0.25,
        port=0,
        fresh=True,
        retain=0,
        keep_established=False,
        patience_s=UNMOVED_S,
        state="",
        standby=False,
        standby_of="",
    ):
        options = ["--port", str(port), "--lease", str(lease_s), *(["--fresh"] if fresh else [])]
        options += [*(["--state", str(state)] if state else []), *(["--standby"] if standby else [])]
        options += ["--standby-of", standby_of] if standby_of else []
        command = [sys.executable, "-m", "tensorhub", "serve", *options]
        environ = {
            "TENSORHUB_REPORT_S": str(report_s),
            "TENSORHUB_DEFAULT_RETAIN": str(retain),
            "TENSORHUB_KEEP_ESTABLISHED": "yes" if keep_established else "no",
        }
        if patience_s is not None:
            environ |= {"TENSORHUB_STALLED_S": str(patience_s), "TENSORHUB_SLOW_S": str(patience_s)}
        super().__init__("server", command, folder, env=environ)
        if not standby and not standby_of:
            self.wait_until_it_listens()

    def wait_until_it_listens(self):
        line = self.process.stdout.readline()
        assert line.startswith("reference server at "), f"{line}\n{self.log}"
        self.address = line.split()[3].rstrip(";")


class Worker(Process):
    """One worker; it is asked over its stdin and answers over its stdout."""

    def __init__(self, name, memory, folder):
        self.memory = memory
        self._pending = {}
        self._next = 0
        self._slim = None  # how it was after its first life
        self._lock = threading.Lock()
        given = [str(memory.descriptor), str(len(memory.map))]
        command = [sys.executable, str(WORKER), *given]
        super().__init__(name, command, folder, stdin=subprocess.PIPE, pass_fds=[memory.descriptor])
        self.ready = self._pending[0] = Pending(self, "start", PATIENCE_S)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            answer = json.loads(line)
            with self._lock:
                pending = self._pending.pop(answer["id"])
            pending.settle(answer)
        with self._lock:
            over, self._pending = self._pending, None
        for pending in over.values():
            pending.settle(None)

    def ask(self, do, *, patience_s=PATIENCE_S, **arguments):
        """Send a command; returns at once."""
        pending = Pending(self, arguments.get("verb", do), patience_s)
        with self._lock:
            is_over = self._pending is None
            if not is_over:
                self._next += 1
                self._pending[self._next] = pending
                line = json.dumps({"id": self._next, "do": do, **arguments}) + "\n"
        if is_over:
            pending.settle(None)
            return pending
        with contextlib.suppress(OSError):  # it has just died: its end settles what is pending
            self.process.stdin.write(line)
            self.process.stdin.flush()
        return pending

    def start(self, verb, *, timeout=PATIENCE_S, **arguments):
        """Begin a call of `Weights`."""
        return self.ask("call", patience_s=timeout, verb=verb, timeout=timeout, **arguments)

    def call(self, verb, *, timeout=PATIENCE_S, **arguments):
        """A call of `Weights`, from its beginning to its end."""
        return self.start(verb, timeout=timeout, **arguments).result()

    def look(self):
        """What the worker knows of itself."""
        return self.ask("look").result()

    def hold(self, which="writing", *, after):
        """Let so many more blocks of its memory be read or written, then none."""
        self.ask("valve", which=which, allow=after).result()

    def slow_down(self, which="writing", *, pace_s):
        """Let each block of its memory take so long at least."""
        self.ask("valve", which=which, pace_s=pace_s).result()

    def release(self, which="writing"):
        """Let everything pass."""
        self.ask("release", which=which).result()

    def wait_until_held(self, which="writing"):
        """Until its transfer stands still at the valve. Returns how many blocks have passed."""

        def is_held():
            valve = self.look()[which]
            return valve["waiting"] > 0 and valve["inside"] == 0 and valve

        return eventually(is_held, f"{self.name} is held")["passed"]

    def take_leave(self):
        """Close its weights and forget them, to be another worker in the next scenario. Nothing may be left of it."""
        self.release("writing")
        self.release("reading")
        if self.look()["is_open"]:
            self.call("close", timeout=5)
        left = self.ask("reset").result()
        if self._slim is None or left["has_driver"] > self._slim["has_driver"]:  # what a driver opens, it keeps
            self._slim = left
        most = {"threads": self._slim["threads"] + 1, "descriptors": self._slim["descriptors"] + 2}

        def is_slim():
            now = self.look()
            return all(now[what] <= most[what] for what in most)

        eventually(is_slim, f"{self.name} is as it was, once its threads are out: {left} at first, {self._slim} once")

    def begin_again(self, name):
        """Another life of the same process."""
        self.name = name
        self._log_begins = self._log.stat().st_size

    def end(self):
        """Let it end by itself."""
        self.process.stdin.close()
        assert self.process.wait(15) == 0, f"{self.name} ended with {self.process.returncode}\n{self.log[-4000:]}"

    def stacks(self):
        """Of all its threads, for a test that failed."""
        with contextlib.suppress(ProcessLookupError, OSError, AssertionError):
            os.kill(self.process.pid, signal.SIGUSR1)
            eventually(lambda: "Current thread" in self.log or not self.is_alive, "the stacks", within_s=3)
        return self.log[-6000:]


class WorkerPool:
    """Worker processes between two scenarios, and the memory of those that were killed: touched, so quick to use."""

    def __init__(self, folder):
        self._folder = folder
        self._idle = {}
        self._free = {}

    def take(self, name, size_bytes):
        """A worker process with so much memory, in which nothing is open."""
        idle, free = self._idle.setdefault(size_bytes, []), self._free.setdefault(size_bytes, [])
        if idle:
            worker = idle.pop()
            worker.begin_again(name)
            return worker
        return Worker(name, free.pop() if free else Memory(size_bytes), self._folder)

    def give_back(self, worker, *, is_clean):
        """Whoever has taken leave may be used again; of others only the memory."""
        if is_clean and worker.is_alive:
            self._idle[worker.memory.size_bytes].append(worker)
            return
        if worker.is_alive:
            worker.kill()
        worker.close_pipes()
        self._free[worker.memory.size_bytes].append(worker.memory)

    @property
    def idle_pids(self):
        return {worker.process.pid for workers in self._idle.values() for worker in workers}

    def close(self):
        """Every idle process ends by itself."""
        for workers in self._idle.values():
            for worker in workers:
                worker.end()
                worker.close_pipes()
