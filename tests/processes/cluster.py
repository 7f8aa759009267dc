"""Starts, asks, stops and kills real processes, and judges what they did.

Every call is held to its deadline here, whatever a scenario is about, by the clock of the process that made it (all
processes of a machine share the monotonic clock). At the end every process must have gone, and none may have said that
it contradicts itself.
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
from tensorhub.core.errors import error_from_code

from .memory import SHARD_BYTES, SHARDS, Contents, chunks_of, tensors_of

WORKER = Path(__file__).with_name("worker.py")
LATE_S = 1.0  # no call outlives its deadline by more than that
SLACK_S = 15.0  # until a machine under load has carried an answer through two pipes
PATIENCE_S = 60.0  # what a call gets that must succeed; no promise is measured by it
COOKIE = "TENSORHUB_TEST_COOKIE"
SOCKETS = {
    "TENSORHUB_TRANSPORTS": "tcp"
}  # what a scenario holds or counts goes through sockets, whatever else there is
ALARMS = ("Traceback", "CRITICAL", "contradicts", "InvariantViolation")


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
        environ = {**os.environ, COOKIE: str(os.getpid()), **SOCKETS, **(env or {})}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=environ, **options
            )

    @property
    def log(self):
        return self._log.read_text(errors="replace")

    @property
    def is_alive(self):
        return self.process.poll() is None

    def kill(self):
        """SIGKILL. Returns when it happened."""
        os.kill(self.process.pid, signal.SIGKILL)
        killed = time.monotonic()
        self.process.wait(10)
        return killed

    def stop(self):
        """SIGSTOP, and wait until it has stopped. Returns when that was."""
        self.stops, self.is_stopped = self.stops + 1, True
        os.kill(self.process.pid, signal.SIGSTOP)
        stat = Path(f"/proc/{self.process.pid}/stat")
        eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", f"{self.name} has stopped")
        return time.monotonic()

    def go_on(self):
        """SIGCONT."""
        os.kill(self.process.pid, signal.SIGCONT)
        self.is_stopped = False
        return time.monotonic()


class ServerProcess(Process):
    """`tensorhub serve`."""

    def __init__(self, folder, *, lease_s, report_s=0.25, port=0, fresh=True):
        options = ["--port", str(port), "--lease", str(lease_s), *(["--fresh"] if fresh else [])]
        command = [sys.executable, "-m", "tensorhub.cli", "serve", *options]
        super().__init__("server", command, folder, env={"TENSORHUB_REPORT_S": str(report_s)})
        line = self.process.stdout.readline()
        assert line.startswith("reference server at "), f"{line}\n{self.log}"
        self.address = line.split()[3].rstrip(";")


class Worker(Process):
    """One worker; it is asked over its stdin and answers over its stdout."""

    def __init__(self, name, memory, folder):
        self.memory = memory
        self._pending = {}
        self._next = 0
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


class Replica:
    """The workers of one replica, by shard."""

    def __init__(self, name, workers):
        self.name = name
        self.workers = workers

    def __iter__(self):
        return iter(self.workers)

    def __getitem__(self, shard):
        return self.workers[shard]

    def start(self, verb, *, timeout=PATIENCE_S, **arguments):
        """Begin a call on all shards."""
        return [worker.start(verb, timeout=timeout, **arguments) for worker in self.workers]

    def call(self, verb, *, timeout=PATIENCE_S, **arguments):
        """A call on all shards; what each gave must be the same."""
        values = [pending.result() for pending in self.start(verb, timeout=timeout, **arguments)]
        assert values.count(values[0]) == len(values), f"{verb} of {self.name} gave {values}"
        return values[0]

    def looks(self):
        return [worker.look() for worker in self.workers]

    def kill(self):
        return max([worker.kill() for worker in self.workers])

    def received(self):
        """Bytes by source replica, all shards together."""
        total = {}
        for look in self.looks():
            for source, size_bytes in look["statistics"]["bytes_by_source"].items():
                total[source] = total.get(source, 0) + size_bytes
        return total


class Cluster:
    """One scenario: a server, replicas of one model, and what its versions are."""

    def __init__(self, name, folder, pool, *, lease_s=2.0, shard_bytes=SHARD_BYTES, shards=SHARDS):
        self.lease_s = lease_s
        self.shards = shards
        self.shard_bytes = shard_bytes
        self.contents = Contents(name, shard_bytes)
        self._folder, self._pool = folder, pool
        self._processes = []
        self.server = self._add(ServerProcess(folder, lease_s=lease_s))

    @property
    def address(self):
        return self.server.address

    def _add(self, process):
        self._processes.append(process)
        return process

    # --- processes ----------------------------------------------------------------------------------------------------

    def restart_server(self):
        """Another life of the server at the same address, which remembers nothing."""
        port = int(self.address.rpartition(":")[2])
        self.server = self._add(ServerProcess(self._folder, lease_s=self.lease_s, port=port, fresh=False))

    def replica(self, name, **options):
        return self.replicas(name, **options)[0]

    def replicas(self, *names, **options):
        """Start replicas of all shards, all at once, open and registered."""
        found = [Replica(name, [self.begin(name, shard) for shard in range(self.shards)]) for name in names]
        self._join(
            [(worker, replica.name, shard) for replica in found for shard, worker in enumerate(replica)], options
        )
        return found

    def worker(self, replica, shard, **options):
        """Start one shard of a replica, open and registered."""
        worker = self.begin(replica, shard)
        self._join([(worker, replica, shard)], options)
        return worker

    def begin(self, replica, shard):
        """Start the process of one shard; nothing is open yet."""
        return self._add(Worker(f"{replica}/{shard}", self._pool.take(self.shard_bytes), self._folder))

    def _join(self, placed, options):
        for worker, _, _ in placed:
            worker.ready.result()
        given = {"model": "policy", "server": self.address, "shards": self.shards, **options}
        opened = [w.ask("open", **{**given, "replica": name, "shard": shard}) for w, name, shard in placed]
        for pending in opened:
            pending.result()
        tensors = tensors_of(self.shard_bytes)
        taken = [worker.ask("register", tensors=tensors, timeout=PATIENCE_S) for worker, _, _ in placed]
        for pending in taken:
            pending.result()

    # --- weights ------------------------------------------------------------------------------------------------------

    @property
    def size_bytes(self):
        """Of the whole model."""
        return self.shards * self.shard_bytes

    @property
    def chunks(self):
        """Of the whole model."""
        return self.shards * chunks_of(self.shard_bytes)

    def write(self, replica, version):
        """What a trainer does in a step."""
        for shard, worker in enumerate(replica):
            self.contents.write(worker.memory, version, shard)

    def publish(self, replica, version):
        """Write a version and publish it, as `mutating` does."""
        replica.call("unpublish")
        self.write(replica, version)
        assert replica.call("publish", version=version) == version

    def judge(self, replica, version):
        """Every byte of the replica is that version's."""
        for shard, worker in enumerate(replica):
            assert self.has(worker, shard, version), f"{worker.name} accepted bytes that are not version {version}"

    def has(self, worker, shard, version):
        """Whether this worker's bytes are that version's, all of them."""
        return self.contents.are(worker.memory, version, shard)

    # --- what the server says -----------------------------------------------------------------------------------------

    def view(self):
        return tensorhub.connect(self.address, timeout=10)

    def states(self, name):
        """The states of a replica's workers as the server knows them, by shard."""
        found = {replica.name: replica for replica in self.view().replicas("policy")}
        return {worker.shard: worker.state for worker in found[name].workers} if name in found else {}

    def is_known(self, name):
        """Whether the server believes that this worker lives."""
        replica, _, shard = name.partition("/")
        return int(shard) in self.states(replica)

    def sources(self, target):
        """From whom a replica reads now, by shard."""
        reads = [t for t in self.view().transfers() if t.target == target and not t.is_void]
        return {read.shard: read.source for read in reads}

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self):
        """Everybody leaves in order, nobody is left, nobody has contradicted itself."""
        workers = [p for p in self._processes if isinstance(p, Worker) and p.is_alive]
        for worker in workers:
            worker.release("writing")
            worker.release("reading")
        for pending in [worker.start("close", timeout=5) for worker in workers if worker.look()["statistics"]]:
            pending.result()
        for worker in workers:
            worker.end()
        os.kill(self.server.process.pid, signal.SIGTERM)
        assert self.server.process.wait(10) == 0
        for process in self._processes:
            said = [line for line in process.log.splitlines() if any(alarm in line for alarm in ALARMS)]
            assert not said, f"{process.name}: {said}\n{process.log[-4000:]}"
        self.end()
        assert leftovers() == []

    def end(self):
        """Whatever happened: no process is left, and the memory can be used again."""
        for process in self._processes:
            if process.is_alive:
                process.kill()
            for pipe in (process.process.stdin, process.process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            if isinstance(process, Worker):
                self._pool.give_back(process.memory)
        self._processes = []


def leftovers():
    """Processes of this test run that still live."""
    mark = f"{COOKIE}={os.getpid()}\0".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes() and int(folder.name) != os.getpid():
                    found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found
