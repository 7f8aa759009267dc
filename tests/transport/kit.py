"""Parts for the transport tests: content that can be told right from wrong, sinks with gates, ends that can be awaited.

Also run by the helper processes (`peer.py`), so it imports nothing of the test package.
"""

import ctypes
import gc
import importlib.util
import os
import random
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, cast

import msgspec
import xxhash

from tensorhub.memory.streams import host_view
from tensorhub.protocol.errors import CorruptTransfer, SessionLost, TensorHubError
from tensorhub.protocol.manifest import chunk_count
from tensorhub.transport import sealed
from tensorhub.transport.base import Export, Progress, Read, StopFlag, Terms, Transport
from tensorhub.transport.cuda import CudaSettings, CudaTransport
from tensorhub.transport.local import memory as local_host
from tensorhub.transport.local.transport import LocalSettings, LocalTransport
from tensorhub.transport.native import load
from tensorhub.transport.nixl import probe
from tensorhub.transport.nixl.transport import NixlSettings, NixlTransport
from tensorhub.transport.on_device import Shared
from tensorhub.transport.ranges import Addresses
from tensorhub.transport.tcp import wire
from tensorhub.transport.tcp.settings import TcpSettings
from tensorhub.transport.tcp.transport import TcpTransport
from tensorhub.transport.tcp.wire import GREETING, HEADER, MAGIC, VERSION

sys.path.append(str(Path(__file__).parent))  # the helper processes import this file by itself
import stand_in

DEADLINE_S = 30.0  # how long a test waits for what must happen; never how long it should take
MIB = 1 << 20
Local = Callable[..., LocalTransport]  # makes one, with these settings


@dataclass(frozen=True)
class Kind:
    """A transport under test. `silence_s` is its silence limit."""

    name: str
    make: Callable[[float], Transport]
    mute: Callable[[], AbstractContextManager[str]]  # an endpoint where somebody listens and never says a word
    why_not: Callable[[], str] = str  # why this machine does not have it; empty where it does
    is_mapped: bool = False  # all content lies in memory that readers map
    is_on_device: bool = False  # all content lies on a stand-in for a device
    cannot: frozenset[str] = frozenset()  # what that device cannot
    is_settled: bool = True  # after the first read from a peer no more sockets are opened for it
    is_python: bool = False  # without the native mover
    in_contract: bool = True  # every test of `test_contract.py` runs on it; the others serve single tests
    in_tiles: bool = True  # and of `test_tiles.py`


def _tcp(streams: int) -> Callable[[float], Transport]:
    # stream_bytes is small and no rate needed, so that small contents too are read through all streams
    return lambda silence_s: TcpTransport(
        TcpSettings(silence_s=silence_s, streams=streams, stream_bytes=1024, stream_rate_bytes_per_s=0)
    )


def _lending(streams: int) -> Callable[[float], Transport]:
    hosts = "127.0.0.1,127.0.0.2" if sys.platform == "linux" else "127.0.0.1"  # each of its streams another way
    settings = TcpSettings(host=hosts, streams=streams, stream_bytes=1024, stream_rate_bytes_per_s=0)
    lending = replace(settings, lend_rate_bytes_per_s=0, lend_piece_bytes=1)
    return lambda silence_s: TcpTransport(replace(lending, silence_s=silence_s))


def _local(threads: int) -> Callable[[float], Transport]:
    return lambda silence_s: LocalTransport(LocalSettings(silence_s=silence_s, threads=threads, thread_bytes=1024))


def _cuda(silence_s: float) -> Transport:
    return CudaTransport(CudaSettings(silence_s=silence_s, window_bytes=1 << 16, ring_bytes=1 << 24))


def _nixl(threads: int) -> Callable[[float], Transport]:
    return lambda silence_s: NixlTransport(NixlSettings(silence_s=silence_s, threads=threads, thread_bytes=1024))


def _pretended_nixl() -> Any:
    """A NIXL of our own (`nixl_fake.py`), so that our side of it is tested on machines without it."""
    name = "tensorhub_pretended_nixl"
    if name not in sys.modules:
        path = Path(__file__).parents[1] / "memory" / "nixl_fake.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _pretended(silence_s: float) -> Transport:
    settings = NixlSettings(silence_s=silence_s, threads=2, thread_bytes=1024)
    return NixlTransport(settings, bindings=_pretended_nixl())


def _no_nixl() -> str:
    return probe.probe().why_not


@contextmanager
def _mute_tcp(scheme: str = "tcp") -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        yield f"{scheme}://127.0.0.1:{mute.getsockname()[1]}"


@contextmanager
def _mute_local(scheme: str = "local") -> Iterator[str]:
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(local_host.socket_address(name := local_host.new_name()))
        mute.listen()
        yield local_host.format_endpoint(local_host.here(), name, scheme)


_mute_cuda = partial(_mute_local, "cuda")
KINDS = {
    kind.name: kind
    for kind in (
        Kind("tcp-1", _tcp(1), _mute_tcp, in_contract=False),
        Kind("tcp-3", _tcp(3), _mute_tcp),
        Kind(
            "tcp-lending-2",
            _lending(2),
            _mute_tcp,
            lambda: "" if wire.IS_THERE else "vmsplice is a call of Linux",
            in_tiles=False,
        ),
        Kind("tcp-python", _tcp(3), _mute_tcp, is_python=True, in_tiles=False),
        Kind("local-1", _local(1), _mute_local, in_contract=False),
        Kind("local-3", _local(3), _mute_local),
        Kind("local-mapped-3", _local(3), _mute_local, sealed.why_not, is_mapped=True),
        Kind("cuda-stand-in", _cuda, _mute_cuda, is_on_device=True),
        Kind(
            "cuda-stand-in-ring", _cuda, _mute_cuda, is_on_device=True, cannot=frozenset({"share"}), in_contract=False
        ),
        Kind(
            "cuda-stand-in-pinned", _cuda, _mute_cuda, is_on_device=True, cannot=frozenset({"open"}), in_contract=False
        ),
        Kind("pretended-nixl-2", _pretended, partial(_mute_tcp, "nixl")),
        Kind("nixl-1", _nixl(1), partial(_mute_tcp, "nixl"), _no_nixl, in_contract=False),
        Kind("nixl-3", _nixl(3), partial(_mute_tcp, "nixl"), _no_nixl, is_settled=False),
    )
}
CONTRACT = [name for name, kind in KINDS.items() if kind.in_contract]
TILES = [name for name in CONTRACT if KINDS[name].in_tiles]


_has_sealed_memory = False
_is_on_device = False
_is_python = False


def use(kind: Kind | None) -> None:
    """From now on content lies in the memory that this kind needs."""
    global _has_sealed_memory, _is_on_device, _is_python
    _has_sealed_memory = kind is not None and kind.is_mapped
    _is_on_device = kind is not None and kind.is_on_device
    is_python = kind is not None and kind.is_python
    if is_python != _is_python:
        _is_python = is_python
        os.environ[load.VARIABLE] = "no" if is_python else "yes"
        load.reset()
    stand_in.cannot.clear()
    stand_in.cannot.update(kind.cannot if kind is not None else ())


def forget() -> None:
    """An error that a test has made knows the test, and so its content, which may have a descriptor."""
    if _has_sealed_memory or _is_on_device:
        gc.collect()
    use(None)


def maps() -> bool:
    """Content lies in memory that readers map."""
    return _has_sealed_memory


def is_on_device() -> bool:
    """Content lies on a stand-in for a device."""
    return _is_on_device


def memory(size_bytes: int) -> bytearray:
    """Zeros. What can be mapped is not a bytearray, and does for one in all that is done here."""
    if _is_on_device and size_bytes:
        return cast(bytearray, stand_in.allocate(size_bytes))
    if not _has_sealed_memory or not size_bytes:
        return bytearray(size_bytes)
    found = sealed.Sealed(size_bytes)
    return cast(bytearray, host_view(found.address, size_bytes, found))


def content(size_bytes: int, seed: int = 1) -> bytearray:
    found = memory(size_bytes)
    found[:] = _content(size_bytes, seed)
    return found


def copy_of(buffer: bytearray) -> bytearray:
    """Memory of its own with the same bytes."""
    found = memory(len(buffer)) if _is_on_device else bytearray(len(buffer))
    found[:] = buffer
    return found


@lru_cache(maxsize=2)
def _content(size_bytes: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition that nobody announces."""
    deadline = time.monotonic() + DEADLINE_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s in vain until {what}"
        pause.wait(0.005)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


class Pieces:
    """A byte stream over one buffer, cut into pieces of the given length (0: one piece)."""

    is_bare = True
    device = "stand-in"

    def __init__(self, buffer: bytearray, piece_bytes: int = 0) -> None:
        self.view = memoryview(buffer)
        self.piece_bytes = piece_bytes
        self.inside = 0
        self._lock = threading.Lock()
        if _is_on_device:  # it is that, and nothing that has addresses here
            self.is_bare, self.ranges, self.addresses = False, None, None  # type: ignore[assignment]
        else:
            self.share = self.open = self.copy_from = self.copy_to = None  # type: ignore[assignment]

    @property
    def size_bytes(self) -> int:
        return len(self.view)

    @property
    def is_on_device(self) -> bool:
        return not self.is_bare

    def share(self) -> Shared:
        with self.views_to_read(0, self.size_bytes):
            return stand_in.share(self.view)

    def open(self, body: bytes) -> stand_in.Opened:
        return stand_in.Opened(body)

    def make_ring(self, size_bytes: int) -> stand_in.Ring:
        return stand_in.make_ring(size_bytes)

    def open_ring(self, handle: bytes, size_bytes: int) -> stand_in.Ring:
        return stand_in.open_ring(handle, size_bytes)

    def pin_ring(self, address: int, size_bytes: int) -> stand_in.Ring:
        return stand_in.pin_ring(address, size_bytes)

    def copy_to(self, target: stand_in.Part, start: int, stop: int, chunk_bytes: int) -> None:
        with self.views_to_read(start, stop):
            stand_in.fill(target, self.view, start, stop)

    def copy_from(
        self, source: stand_in.Opened | stand_in.Part, start: int, stop: int, chunk_bytes: int, *, digests: bool
    ) -> bytes:
        with self.views_to_write(start, stop):
            return stand_in.copy(source, self.view, start, stop, chunk_bytes, digests=digests)

    def digests_of(self, start: int, stop: int, chunk_bytes: int) -> bytes:
        with self.views_to_read(start, stop):
            return stand_in.digests_of(self.view, start, stop, chunk_bytes)

    def land(self, *what: object, digests: bool) -> None:
        raise NotImplementedError("tensors of another layout belong to a registration (`tiles_kit.Landing`)")

    @contextmanager
    def views_to_read(self, start: int, stop: int) -> Iterator[Sequence[memoryview]]:
        with self._lock:
            self.inside += 1
        try:
            yield self._cut(start, stop)
        finally:
            with self._lock:
                self.inside -= 1

    views_to_write = views_to_read

    def ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The same as (address, length)."""
        with self.views_to_read(start, stop) as views:
            return [(ctypes.addressof(ctypes.c_char.from_buffer(view)), len(view)) for view in views if len(view)]

    def addresses(self) -> Addresses:
        return Addresses.of_ranges(self.ranges(0, self.size_bytes))

    def _cut(self, start: int, stop: int) -> list[memoryview]:
        step = self.piece_bytes or max(1, stop - start)
        pieces = [self.view[first : min(first + step, stop)] for first in range(start, stop, step)]
        return [self.view[0:0], *pieces] if self.piece_bytes else pieces  # an empty piece is allowed too


class BlockedPieces(Pieces):
    """Memory that cannot be read until `release` is set, like a device that hangs."""

    is_bare = False

    def __init__(self, buffer: bytearray) -> None:
        super().__init__(buffer)
        self.entered = threading.Event()
        self.release = threading.Event()

    @contextmanager
    def views_to_read(self, start: int, stop: int) -> Iterator[Sequence[memoryview]]:
        self.entered.set()
        assert self.release.wait(DEADLINE_S)
        with super().views_to_read(start, stop) as views:
            yield views


class Gate:
    """Stops a sink at a chunk until the test lets it go on."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.release = threading.Event()

    def pass_through(self) -> None:
        self.reached.set()
        assert self.release.wait(DEADLINE_S)


class Target:
    """A sink that knows the right content, checks every chunk against it, and can stop, refuse or fail."""

    is_cross_site = False
    is_checking = True

    def __init__(
        self,
        right: bytearray,
        chunk_bytes: int,
        *,
        wanted: Sequence[int] | None = None,
        piece_bytes: int = 0,
        gates: dict[int, Gate] | None = None,
        begin_error: Exception | None = None,
        accept_error: tuple[int, Exception] | None = None,
    ) -> None:
        self.buffer = memory(len(right))
        self.stream = Pieces(self.buffer, piece_bytes)
        self.chunk_bytes = chunk_bytes
        count = chunk_count(len(right), chunk_bytes)
        self.progress = Progress(count)
        self._order: list[int] = []
        self.told_bytes: int | None = None  # by a transport that judged by itself
        self.manifest: bytes | None = None
        self.stop_flag = StopFlag()
        self.touches = 0  # chunks that were about to be written
        self.touch_error: Exception | None = None
        self._wanted = range(count) if wanted is None else wanted
        self.digests = [xxhash.xxh3_128_digest(right[i * chunk_bytes : (i + 1) * chunk_bytes]) for i in range(count)]
        self._gates = gates or {}
        self._begin_error = begin_error
        self._accept_error = accept_error

    def begin(self, manifest: bytes) -> Sequence[int]:
        self.manifest = manifest
        if self._begin_error is not None:
            raise self._begin_error
        return self._wanted

    def touch(self) -> None:
        if self.touch_error is not None:
            raise self.touch_error
        self.touches += 1

    def accept(self, chunk: int, views: Sequence[memoryview]) -> None:
        assert self.stream.inside > 0, "accept is called inside the writing block"
        if chunk in self._gates:
            self._gates[chunk].pass_through()
        if self._accept_error is not None and self._accept_error[0] == chunk:
            raise self._accept_error[1]
        digest = xxhash.xxh3_128()
        for view in views:
            digest.update(view)
        if digest.digest() != self.digests[chunk]:
            raise CorruptTransfer(f"chunk {chunk} is not as announced")

    def stored(self, chunk: int) -> None:
        self._order.append(chunk)
        self.progress.mark(chunk)

    def take(self, chunks: range, digests: bytes | None) -> None:
        for at, chunk in enumerate(chunks):
            start = chunk * self.chunk_bytes
            with self.stream.views_to_read(start, min(start + self.chunk_bytes, self.stream.size_bytes)) as views:
                self.accept(chunk, views)
            found = None if digests is None else digests[16 * at : 16 * (at + 1)]
            assert found in (None, self.digests[chunk]), "the device's digest is that of the bytes that came"
            self.stored(chunk)

    @property
    def order(self) -> list[int]:
        """The chunks that count, in the order in which they came to; in theirs, if nobody was there to see it."""
        if self.told_bytes is None:
            return self._order
        return [chunk for chunk in range(self.progress.chunk_count) if self.progress.has(chunk)]

    def terms(self) -> Terms | None:
        """Transports may judge by themselves, unless the test wants to stop or to spoil a chunk."""
        if type(self).accept is not Target.accept or self._gates or self._accept_error is not None:
            return None
        self.told_bytes = 0
        return Terms(b"".join(self.digests), self.progress, (self.stop_flag,))

    def told(self, size_bytes: int) -> None:
        assert self.told_bytes is not None
        self.told_bytes += size_bytes

    def check(self) -> None:
        if self.stop_flag.is_set:
            raise SessionLost("the stop flag was set")

    def export(self, key: str, manifest: bytes = b"manifest") -> Export:
        """What this target has, for others to read behind it."""
        return Export(key, manifest, self.chunk_bytes, self.stream, self.progress)


class Ended:
    """An `on_end` that can be awaited; a second call is remembered as a fault."""

    def __init__(self, before: Callable[[], object] = lambda: None) -> None:
        self.errors: list[TensorHubError | None] = []
        self.thread: threading.Thread | None = None
        self.event = threading.Event()
        self._before = before

    def __call__(self, error: TensorHubError | None) -> None:
        self._before()
        self.errors.append(error)
        self.thread = threading.current_thread()
        self.event.set()

    def wait(self) -> TensorHubError | None:
        assert self.event.wait(DEADLINE_S), "on_end was not called"
        assert len(self.errors) == 1
        return self.errors[0]


def greeting(body: object, *, magic: bytes = MAGIC, version: int = VERSION, length: int | None = None) -> bytes:
    """As any client may say it on a connection of tcp."""
    data = msgspec.msgpack.encode(body)
    return GREETING.pack(magic, version, 0, len(data) if length is None else length) + data


def nested(*fields: object) -> msgspec.Raw:
    """A message of these, and of lists in lists, deeper than any decoder goes."""
    fewer = msgspec.msgpack.encode(fields)
    return msgspec.Raw(bytes([fewer[0] + 1]) + fewer[1:] + b"\x91" * 12_000 + b"\xc0")


def framed(kind: int, body: object) -> bytes:
    data = msgspec.msgpack.encode(body)
    return HEADER.pack(kind, len(data), 0) + data


def full(
    key: str, buffer: bytearray, chunk_bytes: int, *, piece_bytes: int = 0, manifest: bytes = b"manifest"
) -> Export:
    progress = Progress(chunk_count(len(buffer), chunk_bytes), complete=True)
    return Export(key, manifest, chunk_bytes, Pieces(buffer, piece_bytes), progress)


def start_read(reader: Transport, source: str, key: str, target: Target) -> tuple[Read, Ended]:
    ended = Ended()
    return reader.read(source, key, target, ended), ended


def read_all(reader: Transport, source: str, key: str, target: Target) -> TensorHubError | None:
    return start_read(reader, source, key, target)[1].wait()


@cache
def read_once(kind: str) -> None:
    """What the first read of a process opens for good is no test's: where there is a device, CUDA's descriptors."""
    source, reader, right = KINDS[kind].make(DEADLINE_S), KINDS[kind].make(DEADLINE_S), content(4096)
    source.export(full("first", right, 4096))
    assert read_all(reader, source.endpoint, "first", Target(right, 4096)) is None
    for transport in (source, reader):
        transport.close()


def leave_one_descriptor(process: subprocess.Popen[str]) -> None:
    """From now on the process can open one more file."""
    taken = {int(name) for name in os.listdir(f"/proc/{process.pid}/fd")}
    free = [number for number in range(max(taken) + 3) if number not in taken]
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (free[1], free[1]))
