"""Workers on the stand-in device, each a process of its own, beside a real server; and what every story promises."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

import forked
import tensorhub
from api.conftest import server
from processes.process import eventually

from . import device, worker

__all__ = ["server"]

DEADLINE_S = worker.PATIENCE_S + 10


class Refused(Exception):
    """What a worker was asked to do raised an error: `kind` is its name."""

    def __init__(self, kind, text):
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Asked:
    """Something that a worker is doing."""

    def __init__(self, peer, text):
        self._peer, self._text = peer, text
        self._answer = None
        self._is_over = threading.Event()

    def settle(self, answer):
        """It has answered, or (None) will not any more."""
        self._answer = answer
        self._is_over.set()

    def value(self):
        """What it gave. Raises `Refused`, and `EOFError` where the process has ended."""
        assert self._is_over.wait(DEADLINE_S), f"{self._peer.name} has not ended {self._text!r}"
        if self._answer is None:
            raise EOFError(f"{self._peer.name} ended before it answered {self._text!r}\n{self._peer.log}")
        if "kind" in self._answer:
            raise Refused(self._answer["kind"], f"{self._answer['text']} (of {self._text!r})")
        return self._answer["value"]


class Peer:
    """A worker process. Its `name` is that of its replica in the present story."""

    def __init__(self):
        self.name = ""
        self.is_killed = False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = forked.Forked(forked.module("devices.worker"), stderr=self._log)
        self.pid = self._process.pid
        self._asked = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def begin(self, text):
        """It does that, and this returns at once."""
        number = len(self._asked) + 1
        asked = self._asked[number] = Asked(self, text)
        self._process.stdin.write(json.dumps({"id": number, "text": text}) + "\n")
        self._process.stdin.flush()
        return asked

    def do(self, text):
        return self.begin(text).value()

    def _listen(self):
        for line in self._process.stdout:
            answer = json.loads(line)
            if answer["id"]:
                self._asked[answer.pop("id")].settle(answer)
        for asked in list(self._asked.values()):
            if not asked._is_over.is_set():
                asked.settle(None)

    @property
    def log(self):
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), 4000, max(0, size - 4000)).decode(errors="replace")

    def kill(self):
        self.is_killed = True
        self._process.kill()
        self._process.wait(DEADLINE_S)

    def stop(self):
        """SIGSTOP, and wait until it has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        stat = Path(f"/proc/{self.pid}/stat")
        eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", f"{self.name} has stopped")

    def go_on(self):
        os.kill(self.pid, signal.SIGCONT)

    def check(self, version):
        """It has this version, byte for byte."""
        right = worker.digest_of(worker.content(version))
        assert self.do("found()") == {"version": version, "digest": right}, self.name

    def leave(self):
        """It leaves in order, and nothing of the device stays with it. A killed one is dead of that."""
        if self.is_killed:
            assert self._process.returncode == -signal.SIGKILL
            return
        assert self._process.poll() is None, f"{self.name} has died\n{self.log}"
        self.do("leave()")
        eventually(lambda: self.do("used()") == [], f"{self.name} keeps nothing of the device")

    def end(self):
        """Its input ends, and so does it."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        assert self._process.wait(DEADLINE_S) == 0, self.log

    def close(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.close()
        self._log.close()


TENSORS_BYTES = sum(map(device.pages, worker.SIZES.values()))  # what those of one worker take


@dataclass(frozen=True)
class Way:
    """By which bytes come from device to device: what workers may use, and what their devices refuse."""

    transports: str
    opens: str = ""  # as in `device.opened`: what a reader opens
    cannot: tuple[str, ...] = ()  # as in `stand_in.cannot`


class Fleet:
    """The workers of one story, over one way."""

    def __init__(self, server, way, idle):
        self.way = way
        self._server = server
        self._idle = idle
        self.peers = {}

    def join(self, *names):
        """Workers that have registered their tensors on the device."""
        for name in names:
            peer = self.peers[name] = self._idle.pop() if self._idle else Peer()
            peer.name = name
            given = (name, self._server.address, self.way.transports, self.way.cannot)
            peer.joined = peer.begin(f"join{given!r}")
        for name in names:
            self.peers[name].joined.value()
        found = [self.peers[name] for name in names]
        return found if len(found) > 1 else found[0]

    def used_bytes(self):
        """Memory of the device that is in use, whoever has it."""
        alive = [peer for peer in self.peers.values() if not peer.is_killed]
        return sum({inode: size for peer in alive for inode, size in peer.do("used()")}.values())

    def source_of(self, name):
        """Whom it reads from now."""
        view = tensorhub.connect(self._server.address, timeout=10)
        (source,) = {read.source for read in view.transfers() if read.target == name and not read.is_void}
        return self.peers[source]


@pytest.fixture(scope="session")
def idle():
    """Worker processes that have left one story and wait for the next."""
    found = []
    try:
        yield found
        for peer in found:
            peer.end()
    finally:
        for peer in found:
            peer.close()


@pytest.fixture
def fleet(server, way, idle):
    """At the end each worker but the killed ones leaves in order, and all memory of the device is free again."""
    found = Fleet(server, way, idle)
    left = []
    try:
        yield found
        for peer in reversed(found.peers.values()):
            peer.leave()
            left += [peer] if not peer.is_killed else []
        idle += left
    finally:
        for peer in found.peers.values():
            if peer not in idle:
                peer.close()
