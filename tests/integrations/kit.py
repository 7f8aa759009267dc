"""A training job of several processes, driven by one test."""

import hashlib
import json
import os
import socket
import tempfile
import time
from pathlib import Path

from forked import Forked, module

ROOT = Path(__file__).parents[2]


def free_port():
    """A port that was free a moment ago."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Job:
    """The ranks of one job. A command goes to all of them, and is answered by all that live."""

    def __init__(self, ranks, server, folder):
        self.folder, self.log = folder, Path(tempfile.mkdtemp(dir=folder, prefix="job-")) / "log"
        place = {"WORLD_SIZE": str(ranks), "JOB_STORE": str(self.log.with_name("store"))}
        environ = {**os.environ, **place, "TENSORHUB_SERVER": server, "GLOO_SOCKET_IFNAME": "lo"}
        with self.log.open("wb") as log:
            self.ranks = [
                Forked(module("integrations.rank"), env={**environ, "RANK": str(rank)}, stderr=log)
                for rank in range(ranks)
            ]

    def answers(self, do, **arguments):
        """What each rank gave: a mapping with `value`, or with `code` and `message`; None of one that died."""
        ranks = range(len(self.ranks))
        for rank in ranks:
            self.tell(rank, do, **arguments)
        return [self.heard(rank) for rank in ranks]

    def tell(self, rank, do, **arguments):
        """One of them, and wait for nothing."""
        self.ranks[rank].stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.ranks[rank].stdin.flush()

    def heard(self, rank):
        """What one of them answers next."""
        line = self.ranks[rank].stdout.readline()
        return json.loads(line) if line else None

    def call(self, do, **arguments):
        """A command that goes well on all ranks, with the same result."""
        found = self.answers(do, **arguments)
        assert all(each is not None and "value" in each for each in found), f"{do}: {found}\n{self.log.read_text()}"
        assert all(each == found[0] for each in found), f"{do}: {found}"
        return found[0]["value"]

    def end(self):
        """Whatever they do."""
        for rank in self.ranks:
            rank.close()


def digest_of(tensors):
    """SHA-256 of all of them, by name."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}".encode())
        found.update(tensors[name].numpy().tobytes())
    return found.hexdigest()


def eventually(condition, what, *, within_s=30.0):
    """Wait until it holds; fail when it does not in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {within_s} s"
        time.sleep(0.01)


TRIES = 3


def start_ray(cpus):
    """A cluster of this process. Ray gives its processes 30 s, which beside busy ones may not do: it is tried again."""
    import ray

    for left in reversed(range(TRIES)):
        try:
            ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False)
            return
        except Exception as error:
            ray.shutdown()
            if not left or "timed out during startup" not in str(error):
                raise
