"""What `tensorhub doctor` lets others do: each a process of its own, which may hang or die without harm.

    python -m tensorhub.cli.doctor_child source SCHEME SIZE    exports bytes; prints where they are, lives as stdin
    python -m tensorhub.cli.doctor_child reader SCHEME         reads them, as stdin says, and prints at what rate
    python -m tensorhub.cli.doctor_child server ADDRESS        asks a reference server how it is

Each prints one line of JSON behind a mark, for libraries print too. What does not work is an answer as well: `error`,
and `hint` if there is one.
"""

import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char

from ..memory.digests import Hashing, digest
from ..memory.streams import HostStream, Piece
from ..protocol.errors import CorruptTransfer, TensorHubError
from ..protocol.manifest import DIGEST_BYTES, chunk_count
from ..runtime.config import options_without_token, worker_options
from ..runtime.opening import make_transport
from ..transport.base import ByteStream, Export, Progress, Terms, Transport, read_to_end
from ..transport.nixl.probe import Probe
from .doctor import MARK

KEY = "doctor"
ROUNDS = 4  # the first one also touches the memory
READ_S = 10.0
PROBE_S = 12.0  # of NIXL: well before the doctor loses patience, so that it hears why
ASK_S = 3.0


def memory(size_bytes: int, scheme: str) -> ByteStream:
    """Fresh memory that is really there: on a device for `cuda`."""
    if scheme == "cuda":
        from ..memory.cuda import random_memory

        return random_memory(size_bytes)
    room = mmap.mmap(-1, size_bytes)
    for page in range(0, size_bytes, mmap.PAGESIZE):
        room[page] = page >> 12 & 255
    address = addressof(c_char.from_buffer(room))
    return HostStream([Piece(0, size_bytes, address, "cpu", address, (room,))])


class Measure:
    """A sink that checks every chunk, and nothing else."""

    is_cross_site = False
    is_checking = True

    def __init__(self, stream: ByteStream, chunk_bytes: int) -> None:
        self.stream = stream
        self.chunk_bytes = chunk_bytes
        self._digests = b""
        self._hashing: dict[int, Hashing] = {}

    def begin(self, manifest: bytes) -> Sequence[int]:
        self._digests = manifest
        return range(chunk_count(self.stream.size_bytes, self.chunk_bytes))

    def terms(self) -> Terms:
        return Terms(self._digests, Progress(chunk_count(self.stream.size_bytes, self.chunk_bytes)), ())

    def told(self, size_bytes: int) -> None:
        """Nobody wants to know."""

    def check(self) -> None:
        """Everything counts."""

    def observe(self, chunk: int) -> Callable[[memoryview], object]:
        self._hashing[chunk] = Hashing()
        return self._hashing[chunk].see

    def touch(self) -> None:
        pass

    def accept(self, chunk: int, views: Sequence[memoryview]) -> None:
        hashing = self._hashing.pop(chunk, None)
        found = hashing.digest() if hashing is not None else digest(views)
        if found != self._digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]:
            raise CorruptTransfer(f"chunk {chunk} came with other bytes than were sent")

    def stored(self, chunk: int) -> None:
        """Nobody reads behind this one."""

    def take(self, chunks: range, digests: Sequence[bytes]) -> None:
        if b"".join(digests) != self._digests[chunks.start * DIGEST_BYTES : chunks.stop * DIGEST_BYTES]:
            raise CorruptTransfer(f"chunks {chunks.start} to {chunks.stop} came with other bytes than were sent")


def _made(scheme: str) -> Transport:
    return make_transport(scheme, "127.0.0.1", worker_options(), probe_s=PROBE_S)


def source(scheme: str, size: str) -> None:
    """Export until stdin ends."""
    size_bytes, chunk_bytes = int(size), options_without_token().chunk_bytes
    transport = _made(scheme)
    stream, digests = memory(size_bytes, scheme), b""
    for start in range(0, size_bytes, chunk_bytes):
        with stream.reading(start, min(start + chunk_bytes, size_bytes)) as views:
            digests += digest(views)
    progress = Progress(chunk_count(size_bytes, chunk_bytes), complete=True)
    transport.export(Export(KEY, digests, chunk_bytes, stream, progress))
    say(endpoint=transport.endpoint, size_bytes=size_bytes, chunk_bytes=chunk_bytes)
    sys.stdin.read()


def reader(scheme: str) -> None:
    """Read what stdin names, a few times; the best counts."""
    told = json.loads(sys.stdin.readline())
    transport = _made(scheme)
    stream = memory(told["size_bytes"], scheme)
    why_not = transport.why_not(told["endpoint"])
    if why_not is not None:
        return say(error=why_not)
    rates = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        path = read_to_end(transport, told["endpoint"], KEY, Measure(stream, told["chunk_bytes"]), within_s=READ_S)
        rates.append(told["size_bytes"] / (time.perf_counter() - began))
    if isinstance(probed := getattr(transport, "probed", None), Probe):
        path += f"; NIXL {probed.version}"
    say(rate_bytes_per_s=round(max(rates[1:])), path=path)


def server(address: str) -> None:
    """Is it there, and does it talk to us?"""
    from .. import connect

    began = time.perf_counter()
    status = connect(address, timeout=ASK_S).status()
    took_ms = (time.perf_counter() - began) * 1e3
    workers = sum(len(replica.workers) for model in status.models for replica in model.replicas)
    say(protocol=status.protocol, uptime_s=status.uptime_s, workers=workers, took_ms=took_ms)


def say(**answer: object) -> None:
    """The one line, by itself also where a library has left one unfinished."""
    sys.stdout.flush()
    os.write(1, f"\n{MARK}{json.dumps(answer)}\n".encode())


def main(role: str, *arguments: str) -> None:
    """Do it, or say why not; leave at once, whatever threads are about."""
    roles: dict[str, Callable[..., None]] = {"source": source, "reader": reader, "server": server}
    try:
        roles[role](*arguments)
    except TensorHubError as error:
        say(error=str(error), hint=error.hint or "")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
