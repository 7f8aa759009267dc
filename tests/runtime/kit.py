"""What tests of running parts share: waiting for a condition, a server in a process, a raw worker's line."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType

import aiohttp

import tensorhub
from tensorhub.protocol.messages import PROTOCOL, Hello
from tensorhub.protocol.names import ModelName, ReplicaName, Shard
from tensorhub.runtime.config import access_of
from tensorhub.runtime.connection import encode

UPGRADE = (  # a client's request for a WebSocket
    b"GET /v1/session HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
STANDSTILL_S = 4.0  # of a busy machine, while something is timed
PATIENCE_S = 30.0  # what must happen happens by then, beside busy processes too


def eventually(condition: Callable[[], object], what: str = "the condition", *, within_s: float = PATIENCE_S) -> None:
    """Wait until it holds; fail when it does not in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {within_s} s"
        time.sleep(0.01)


def own_token() -> str:
    """What servers of these tests ask for that were given no token."""
    return access_of(create=True).token


def hello(*, model: str = "m", replica: str = "r", shard: int = 0, shards: int = 1, token: str | None = None) -> Hello:
    """A worker's first message; it shows our own token unless told otherwise."""
    life, token = f"life-{replica}-{shard}", own_token() if token is None else token
    return Hello(PROTOCOL, ModelName(model), ReplicaName(replica), Shard(shard), shards, life, token=token)


@contextlib.asynccontextmanager
async def line_to(address: str, *first: object):
    """A WebSocket to the server, and these messages sent on it."""
    async with (
        aiohttp.ClientSession() as http,
        http.ws_connect(f"http://{address}/v1/session", max_msg_size=1 << 24) as socket,
    ):
        for message in first:
            await socket.send_bytes(encode(message))
        yield socket


SERVER = """
import logging, sys
from tensorhub.runtime.config import server_settings
from tensorhub.runtime.serving import run_server
logging.basicConfig(level=logging.INFO)
host, port, lease_s, report_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
fresh = sys.argv[5] == "fresh"
settings = server_settings(lease_s=lease_s, report_s=report_s)
run_server(host, port, settings=settings, fresh=fresh, on_ready=lambda address: print(address, flush=True))
"""


class ServerProcess:
    """A reference server in a process of its own, to be stopped, continued, killed and started again."""

    def __init__(self, *, lease_s: float = 2.0, report_s: float = 0.2) -> None:
        self.lease_s, self.report_s = lease_s, report_s
        self.address = "127.0.0.1:0"
        self._start("fresh")

    def _start(self, fresh: str) -> None:
        host, port = self.address.split(":")
        arguments = [host, port, str(self.lease_s), str(self.report_s), fresh]
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        self._errors: list[str] = []
        self._reader = threading.Thread(target=self._read, args=(self.process.stderr,), daemon=True)
        self._reader.start()
        assert self.address, "".join(self._errors)

    def _read(self, stream) -> None:
        self._errors.extend(stream)

    @property
    def log(self) -> str:
        return "".join(self._errors)

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.process.wait(10)

    def restart(self) -> None:
        """Another life at the same address, with nothing in its memory."""
        self._start("not fresh")

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.send(signal.SIGCONT)
            self.kill()
        self._reader.join(5)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """The block ends in time: a call that outlives its deadline is a broken promise.

    A shared machine may stand still for a moment; a call that hangs does so for much longer.
    """
    began = time.monotonic()
    yield
    took_s = time.monotonic() - began
    assert took_s < seconds + STANDSTILL_S, f"took {took_s:.2f} s, at most {seconds} s were promised"


def is_free(weights: "tensorhub.Weights | tensorhub.Group", version: int) -> bool:
    """Nobody has taken that number: it is published by this."""
    try:
        weights.publish(version)
    except tensorhub.VersionConflict:
        return False
    return True


def in_threads(*bodies: Callable[[], object]) -> list[object]:
    """Run them at the same time; return what each returned or raised."""
    results: list[object] = [None] * len(bodies)

    def run(index: int) -> None:
        try:
            results[index] = bodies[index]()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a call did not end"
    return results
