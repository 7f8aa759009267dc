"""One scenario: a server, replicas of one model, and a judge of what they accept.

At the end everybody must be able to leave in order, no process may be left, and none may have said that it contradicts
itself.
"""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import tensorhub

from .memory import SHARD_BYTES, SHARDS, Contents, chunks_of, tensors_of
from .process import COOKIE, PATIENCE_S, ServerProcess, Worker

ALARMS = ("Traceback", "CRITICAL", "contradicts", "InvariantViolation")


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
        """SIGKILL for all of them at once. Returns when the last of them got it."""
        for worker in self.workers:
            worker.process.kill()
        killed = time.monotonic()
        for worker in self.workers:
            worker.kill()
        return killed

    def received(self):
        """Bytes by source replica, all shards together."""
        total = {}
        for look in self.looks():
            for source, size_bytes in look["statistics"]["bytes_by_source"].items():
                total[source] = total.get(source, 0) + size_bytes
        return total


class Cluster:
    """One scenario: a server, replicas of one model, and what its versions are."""

    def __init__(self, name, folder, pool, *, lease_s=2.0, shard_bytes=SHARD_BYTES, shards=SHARDS, **keeps):
        """`retain` newest versions are kept whoever leaves; with 0, a source waits for its readers instead.

        `keep_established`: and the newest that is whole outside its publisher, until a newer one is.
        """
        self._keeps = keeps
        self.lease_s = lease_s
        self.shards = shards
        self.shard_bytes = shard_bytes
        self.contents = Contents(name, shard_bytes)
        self._folder, self._pool = folder, pool
        self._processes = []
        self._clean = []
        self.server = self._add(ServerProcess(folder, lease_s=lease_s, **self._keeps))

    @property
    def address(self):
        return self.server.address

    def _add(self, process):
        self._processes.append(process)
        return process

    def restart_server(self, **options):
        """Another life of the server at the same address."""
        port = int(self.address.rpartition(":")[2])
        self.server = self._add(
            ServerProcess(self._folder, lease_s=self.lease_s, port=port, fresh=False, **options, **self._keeps)
        )

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
        return self._add(self._pool.take(f"{replica}/{shard}", self.shard_bytes))

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

    def view(self):
        return tensorhub.connect(self.address, timeout=10)

    def states(self, name):
        """The states of a replica's workers as the server knows them, by shard."""
        return {worker.shard: worker.state for worker in self.workers(name)}

    def versions(self):
        """What the server says of each version, by number."""
        return {found.version: found for found in self.view().versions("policy")}

    def workers(self, name):
        """What the server says of a replica's workers."""
        return [worker for each in self.view().replicas("policy") if each.name == name for worker in each.workers]

    def sessions(self):
        """Everybody's session, by worker."""
        replicas = self.view().replicas("policy")
        return {(replica.name, each.shard): each.session for replica in replicas for each in replica.workers}

    def is_silent(self, name):
        """Whether this worker, or its host, has said nothing for a while, though its line is open."""
        name, _, shard = name.partition("/")
        workers = [worker for worker in self.workers(name) if worker.shard == int(shard)]
        return all(worker.connected and worker.lease_left_s < 0.6 * self.lease_s for worker in workers)

    def sources(self, target):
        """From whom a replica reads now, by shard."""
        reads = [t for t in self.view().transfers() if t.target == target and not t.is_void]
        return {read.shard: read.source for read in reads}

    def close(self):
        """Everybody leaves in order, nobody is left, nobody has contradicted itself."""
        workers = [process for process in self._processes if isinstance(process, Worker) and process.is_alive]
        leaving = [threading.Thread(target=self._bid_farewell, args=(worker,)) for worker in workers]
        for thread in leaving:
            thread.start()
        for thread in leaving:
            thread.join()
        os.kill(self.server.process.pid, signal.SIGTERM)
        assert self.server.process.wait(10) == 0
        for process in self._processes:
            said = [line for line in process.log.splitlines() if any(alarm in line for alarm in ALARMS)]
            assert not said, f"{process.name}: {said}\n{process.log[-4000:]}"
        assert all(worker in self._clean for worker in workers), "a worker could not leave in order"
        self.end()
        assert leftovers(self._pool.idle_pids) == []

    def _bid_farewell(self, worker):
        worker.take_leave()
        self._clean.append(worker)

    def end(self):
        """Whatever happened: no process is left but those that can be used again."""
        for process in self._processes:
            if isinstance(process, Worker):
                self._pool.give_back(process, is_clean=process in self._clean)
                continue
            if process.is_alive:
                process.kill()
            process.close_pipes()
        self._processes = []


def leftovers(known):
    """Processes of this test run that still live, and should not."""
    mark = f"{COOKIE}={os.getpid()}\0".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) not in {os.getpid(), *known}:
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes():
                    found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found
