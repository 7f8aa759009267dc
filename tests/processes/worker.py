"""A worker in a process of its own: commands are JSON lines on stdin, each answered by a JSON line on stdout.

    {"id": 1, "do": "open", "model": "policy", "replica": "trainer", "server": "127.0.0.1:7450"}
    {"id": 2, "do": "publish", "version": 7, "timeout": 20}

Each command runs in a thread of its own, so that a call under way can be looked at. The weights are shared memory that
came as a file descriptor. A `Valve` on each side of the registered memory lets a test hold a transfer at a chunk, or
slow it down. That, and sockets whose buffers have a size, are the only differences from a user's worker.

It ends when stdin does; SIGUSR1 writes the stacks of all threads to stderr.
"""

import contextlib
import dataclasses
import faulthandler
import functools
import gc
import json
import logging
import mmap
import os
import signal
import sys
import threading
import time
from collections import Counter

import numpy as np

import tensorhub
from tensorhub.memory.registration import register
from tensorhub.runtime import transports

ENOUGH = 1 << 40
BUFFER_BYTES = 1 << 20  # of a socket: what a killed source has sent is still read; the kernel may tune one to 32 MiB


class Valve:
    """Lets so many blocks of registered memory be read or written, each at its pace; keeps count of every one."""

    def __init__(self):
        self._changed = threading.Condition()
        self._allowed = ENOUGH
        self._pace_s = 0.0
        self.entered = Counter()  # by the block's first byte
        self.waiting = self.inside = self.passed = 0

    def set(self, *, allow=None, pace_s=0.0):
        """`allow` more blocks, or any number; from now on each takes `pace_s` at least."""
        with self._changed:
            self._allowed = ENOUGH if allow is None else allow
            self._pace_s = pace_s
            self.entered.clear()
            self.passed = 0
            self._changed.notify_all()

    def open(self):
        """Let everybody pass who waits, and keep counting."""
        with self._changed:
            self._allowed, self._pace_s = ENOUGH, 0.0
            self._changed.notify_all()

    @contextlib.contextmanager
    def passing(self, start, block):
        """One block through the valve."""
        with self._changed:
            self.waiting += 1
            self._changed.wait_for(lambda: self._allowed > 0)
            self.waiting -= 1
            self._allowed -= 1
            self.entered[start] += 1
            self.inside += 1
            if self._pace_s:
                until = time.monotonic() + self._pace_s
                self._changed.wait_for(lambda: not self._pace_s or time.monotonic() >= until, self._pace_s)
        try:
            with block as views:
                yield views
        finally:
            with self._changed:
                self.inside -= 1
                self.passed += 1

    def look(self):
        """What a test may know of it."""
        with self._changed:
            again = sum(self.entered.values()) - len(self.entered)
            return {"waiting": self.waiting, "inside": self.inside, "passed": self.passed, "again": again}


class ValvedStream:
    """The registered memory, behind a valve for each direction."""

    def __init__(self, stream, reading, writing):
        self._stream, self._reading, self._writing = stream, reading, writing
        self.size_bytes = stream.size_bytes

    def views_to_read(self, start, stop):
        return self._reading.passing(start, self._stream.views_to_read(start, stop))

    def ranges(self, start, stop):
        """Where it is, for transports that read by address: those pass no valve of the source's, only the reader's."""
        return self._stream.ranges(start, stop)

    @property
    def addresses(self):
        return self._stream.addresses

    def views_to_write(self, start, stop):
        return self._writing.passing(start, self._stream.views_to_write(start, stop))


class WorkerProcess:
    """Carries out commands. A method is a command."""

    def __init__(self, memory):
        self._memory = memory
        self.valves = {"reading": Valve(), "writing": Valve()}
        self.weights = None

    def open(self, model, **options):
        self.weights = tensorhub.open(model, **options)

    def register(self, tensors, timeout):
        """`tensors`: name, dtype, shape and first byte of each."""
        arrays = {}
        for name, dtype, shape, offset in tensors:
            count = int(np.prod(shape, dtype=np.int64))
            arrays[name] = np.frombuffer(self._memory, dtype=dtype, count=count, offset=offset).reshape(shape)
        found = register(arrays)
        valved = ValvedStream(found.stream, self.valves["reading"], self.valves["writing"])
        taken = self.weights._aio.take(dataclasses.replace(found, stream=valved))
        self.weights._wait(taken, timeout, "register()")

    def fork(self):
        """A child that only lives on, as a DataLoader's does between two epochs. Returns its process number."""
        child = os.fork()
        if child == 0:
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):  # the pipes of this test are nobody's business
                os.dup2(null, descriptor)
            while True:
                signal.pause()
        return child

    def prefetch(self, spec):
        self.weights.prefetch(spec)

    def call(self, verb, timeout, **arguments):
        """Any method of `Weights`."""
        return getattr(self.weights, verb)(timeout=timeout, **arguments)

    def valve(self, which, allow=None, pace_s=0.0):
        self.valves[which].set(allow=allow, pace_s=pace_s)

    def release(self, which):
        self.valves[which].open()

    def reset(self):
        """Forget the weights that were closed; tells what is left of them."""
        self.weights = None
        for valve in self.valves.values():
            valve.set()
        gc.collect()
        return self.look()

    def look(self):
        """How things are here, without asking anybody."""
        weights = self.weights
        return {
            "is_open": weights is not None,
            "version": weights.version if weights else None,
            "metadata": weights.metadata if weights else None,
            "statistics": weights.statistics() if weights else {},
            "lease_is_over": weights._aio._client.driver.data.lease.is_over if weights else True,
            "reading": self.valves["reading"].look(),
            "writing": self.valves["writing"].look(),
            "threads": threading.active_count(),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "has_driver": _has_driver(),
            "private_bytes": _private_bytes(),
        }


def _has_driver():
    """Whether a device's driver was loaded: it keeps what it opens until the process ends."""
    with open("/proc/self/maps") as lines:
        return any("libcuda.so" in line for line in lines)


def _private_bytes():
    """Memory of this process alone; the shared weights do not count."""
    with open("/proc/self/smaps_rollup") as lines:
        sizes = [line.split() for line in lines]
    return sum(int(words[1]) * 1024 for words in sizes if words[0] == "Private_Dirty:")


def _carry_out(process, command, out):
    began = time.monotonic()
    answer = {"id": command.pop("id")}
    try:
        answer["value"] = getattr(process, command.pop("do"))(**command)
    except tensorhub.TensorHubError as error:
        answer |= {"code": error.code, "message": str(error), "hint": error.hint}
    except BaseException as error:  # whatever it is, the test is told, where it is a failure
        answer |= {"code": "", "message": repr(error), "hint": None}
        logging.exception("a command failed")
    answer |= {"began": began, "ended": time.monotonic()}
    out(json.dumps(answer))


def main():
    """Until stdin ends."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d %(levelname)-8s %(message)s")
    descriptor, size = int(sys.argv[1]), int(sys.argv[2])
    transports.TcpSettings = functools.partial(
        transports.TcpSettings, send_buffer_bytes=BUFFER_BYTES, receive_buffer_bytes=BUFFER_BYTES
    )
    process = WorkerProcess(mmap.mmap(descriptor, size) if size else mmap.mmap(-1, 1))
    writing = threading.Lock()

    def out(line):
        with writing:
            print(line, flush=True)

    out(json.dumps({"id": 0, "value": os.getpid(), "began": time.monotonic(), "ended": time.monotonic()}))
    for line in sys.stdin:
        threading.Thread(target=_carry_out, args=(process, json.loads(line), out), daemon=True).start()


if __name__ == "__main__":
    main()
