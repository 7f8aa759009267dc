"""A process that offers whole versions to whoever asks: the trainer of a star, and the store of an object store.

A reader connects, is told the newest version and where its bytes are, reads them over the product's own tcp transport,
and hangs up. A version stays as long as somebody reads it, however many newer ones there are: no reader is ever cut
off, so none has to begin again. This makes them the strongest of their kind that we know how to write.
"""

import socket
import threading
import time
from collections.abc import Callable

import msgspec

from tensorhub.memory.digests import build_manifest
from tensorhub.memory.fill import FillSink
from tensorhub.memory.registration import Registration, register
from tensorhub.protocol.names import Digest
from tensorhub.runtime.config import worker_options
from tensorhub.runtime.opening import make_transport
from tensorhub.transport.base import Export, Progress, Transport

from ..content import Tensors
from .base import NotNow

READ_S = 120.0
ANSWER_S = 30.0
_LINE = 4096


class Offer(msgspec.Struct, frozen=True):
    """The newest version, and where it is. `version` -1: none yet."""

    version: int
    key: str = ""
    root: str = ""
    endpoint: str = ""


class Depot:
    """Offers versions, each in memory of its own."""

    def __init__(self, address: str, port: int, chunk_bytes: int) -> None:
        self.transport = make_transport("tcp", address, worker_options())
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        self._newest = Offer(-1)
        self._readers: dict[int, int] = {}  # by version offered
        self._kept: dict[int, Tensors] = {}
        self._spare: list[Tensors] = []
        self._listener = socket.create_server((address, port), backlog=128)
        threading.Thread(target=self._listen, daemon=True).start()

    def space(self, like: Tensors) -> Tensors:
        """Memory for one more version."""
        with self._lock:
            if self._spare:
                return self._spare.pop()
        return {name: tensor.copy() for name, tensor in like.items()}

    def offer(self, version: int, tensors: Tensors) -> None:
        """From now on this is the newest; `tensors` do not change until the depot gives them up."""
        registration = register(tensors)
        manifest = build_manifest(registration, self._chunk_bytes)
        progress = Progress(manifest.chunk_count, complete=True)
        key = f"v{version}"
        export = Export(key, manifest.encode(), self._chunk_bytes, registration.stream, progress)
        self.transport.export(export)
        with self._lock:
            self._newest = Offer(version, key, manifest.root(), self.transport.endpoint)
            self._kept[version] = tensors
        self._tidy()

    def _tidy(self) -> None:
        """Give up what is neither the newest nor read."""
        with self._lock:
            gone = [v for v in self._kept if v != self._newest.version and not self._readers.get(v)]
            found = {version: self._kept.pop(version) for version in gone}
        for version, tensors in found.items():
            if self.transport.withdraw(f"v{version}", timeout_s=5.0):
                with self._lock:
                    self._spare.append(tensors)

    def _listen(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(line,), daemon=True).start()

    def _serve(self, line: socket.socket) -> None:
        """Until the reader hangs up, or dies."""
        with self._lock:
            offer = self._newest
            self._readers[offer.version] = self._readers.get(offer.version, 0) + 1
        try:
            line.sendall(msgspec.json.encode(offer) + b"\n")
            while line.recv(_LINE):
                pass
        except OSError:
            pass
        finally:
            line.close()
            with self._lock:
                self._readers[offer.version] -= 1
            self._tidy()

    def statistics(self) -> dict[str, int]:
        """The transport's counters."""
        return self.transport.statistics()

    def close(self) -> None:
        self._listener.close()
        self.transport.close()


class Customer:
    """Reads the newest version of a depot into its tensors."""

    def __init__(self, address: str, origin: str, tensors: Tensors) -> None:
        self.transport: Transport = make_transport("tcp", address, worker_options())
        host, _, port = origin.rpartition(":")
        self._origin = (host, int(port))
        self._registration: Registration = register(tensors)

    def get(self, held: int) -> int:
        """Returns the version that the tensors hold now. Raises `NotNow`; then they hold none."""
        try:
            with socket.create_connection(self._origin, ANSWER_S) as line:
                offer = _answer(line)
                if offer.version > held:
                    self._read(offer)
                return max(offer.version, held)
        except (OSError, msgspec.DecodeError) as error:
            raise NotNow(f"no answer from {self._origin}: {error}") from error

    def _read(self, offer: Offer) -> None:
        sink = FillSink(self._registration, Digest(offer.root))
        ended, errors = threading.Event(), []

        def on_end(error: Exception | None) -> None:
            errors.append(error)
            ended.set()

        read = self.transport.read(offer.endpoint, offer.key, sink, on_end)
        if not ended.wait(READ_S):
            read.stop()
            ended.wait()
        if errors[0] is not None or not sink.progress.is_complete:
            raise NotNow(f"reading {offer.key} from {offer.endpoint}: {errors[0]}")

    def close(self) -> None:
        self.transport.close()


def _answer(line: socket.socket) -> Offer:
    text = b""
    while not text.endswith(b"\n"):
        part = line.recv(_LINE)
        if not part:
            raise ConnectionError("hung up")
        text += part
    return msgspec.json.decode(text, type=Offer)


def copy(source: Tensors, target: Tensors) -> None:
    """All bytes."""
    for name, tensor in source.items():
        target[name][:] = tensor


def timed(work: Callable[[], None]) -> float:
    """Seconds that it took."""
    began = time.monotonic()
    work()
    return time.monotonic() - began
