"""Launches the kernels of `xxh3.cu` on a CUDA device, through NVIDIA's `cuda-core`.

The kernels are compiled once for each architecture (0.4 s) and kept in the user's cache directory. Before a device is
trusted, it hashes a few lengths that the host hashes too. Where anything of this fails, `why_not` says it, and the
host hashes as before.

Rules:
1. Everything runs on streams of this library, of the lowest priority. Nothing is on the default stream.
2. It may run while the user's threads capture a CUDA graph (`captures`).
3. Waits are for events of these streams. The whole device is never waited for.
4. Scratch memory is what `xxh3` states: at most 65 MiB a device, for one call at a time. Torch's allocator keeps it for
   the next call, rounded up to its segments. It gives it back when this process runs short, or on `empty_cache()`.
"""

import ctypes
import hashlib
import os
import tempfile
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from ..protocol.errors import TransferError
from ..transport.ranges import Batches, Scatter
from ..transport.threads import beside_captures, scope
from .landing import Landing, row_table
from .xxh3 import LANES, MIN_BYTES, THREADS, Chunks, NoRoom, Spans, digests

KERNELS = ("sum_only", "sum_and_copy", "chain", "move")
SELF_TEST_BYTES = (MIN_BYTES, 1024, 1025, 5000, 1 << 20)
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: it has nothing to do with the default stream
LOWEST_PRIORITY = 0  # of a stream; higher ones have numbers below it
FEW_THREADS = 64  # of a block, where few threads are needed: many multiprocessors share them
BLOCKS_PER_SM = 2  # 16 warps: 64 KiB of loads under way on each multiprocessor


class Kernels:
    """The compiled kernels on one device. Raises what `cuda-core` and the driver raise."""

    def __init__(self, index: int) -> None:
        from cuda.core import Device, Stream

        self.device = torch.device("cuda", index)
        self.blocks = BLOCKS_PER_SM * torch.cuda.get_device_properties(self.device).multi_processor_count
        with beside_captures(), torch.cuda.device(self.device):
            driver = Device(index)
            driver.set_current()
            code = _compiled(f"sm_{driver.arch}")
            self.kernels = {name: code.get_kernel(name) for name in KERNELS}
            self.streams = tuple(stream_of(self.device, f"lane {lane}") for lane in range(LANES))
            self.launch_streams = [Stream.from_handle(stream.cuda_stream) for stream in self.streams]
        self.turn = threading.Lock()  # one call at a time: the streams' order is what makes scratch memory safe

    @cache  # noqa: B019 - one object for each device, which is never given up
    def configuration(self, few_blocks: int) -> Any:
        """Of a launch: so many blocks of few threads; 0: as many of `THREADS` as run side by side."""
        from cuda.core import LaunchConfig

        return LaunchConfig(grid=few_blocks or self.blocks, block=FEW_THREADS if few_blocks else THREADS)


class CudaLauncher:
    """A `Launcher` for one call. Use it with `beside_captures` and the kernels' `turn`."""

    def __init__(self, kernels: Kernels) -> None:
        self._its = kernels
        self._kept: dict[int, torch.Tensor] = {}
        self._host: list[torch.Tensor] = []

    def room(self, size_bytes: int, *, lane: int = 0) -> int:
        try:
            with torch.cuda.stream(self._its.streams[lane]):
                memory = torch.empty(size_bytes, dtype=torch.uint8, device=self._its.device)
        except torch.OutOfMemoryError as error:
            raise NoRoom(str(error)) from error
        self._kept[memory.data_ptr()] = memory
        return memory.data_ptr()

    def upload(self, words: "array[int]", *, lane: int = 0, at: int | None = None) -> int:
        address = self.room(8 * len(words), lane=lane) if at is None else at
        host = torch.from_numpy(np.frombuffer(words, np.uint8).copy())
        with torch.cuda.stream(self._its.streams[lane]):
            self._kept[address][: host.nbytes].copy_(host, non_blocking=True)
        self._host.append(host)
        return address

    def launch(self, kernel: str, threads: int, job: int, *, lane: int) -> None:
        from cuda.core import launch

        config = self._its.configuration(-(-threads // FEW_THREADS) if threads else 0)
        launch(self._its.launch_streams[lane], config, self._its.kernels[kernel], job)

    def mark(self, lane: int) -> object:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._its.streams[lane])
        return event

    def follow(self, lane: int, mark: object) -> None:
        assert isinstance(mark, torch.cuda.Event)
        self._its.streams[lane].wait_event(mark)

    def download(self, address: int, count: int, *, lane: int) -> "array[int]":
        with torch.cuda.stream(self._its.streams[lane]):
            found = self._kept[address][: 8 * count].cpu()  # it waits for the lane
        return array("Q", found.numpy().tobytes())

    def wait(self, lane: int) -> None:
        wait_for(self._its.streams[lane])


def device_digests(
    index: int,
    source: Spans,
    chunks: Chunks,
    target: Spans | None = None,
    *,
    check: Callable[[], object] = lambda: None,
    is_hashing: bool = True,
) -> bytes:
    """`xxh3.digests` on that CUDA device. Raises `NoRoom`, and `RuntimeError` where the device fails.

    `check` raises where memory was freed. It is called last: other calls may have the device for long before.
    """
    kernels = _working(index)
    with kernels.turn, _on(kernels):
        check()
        launcher = CudaLauncher(kernels)
        try:
            return digests(launcher, source, chunks, target, is_hashing=is_hashing)
        except BaseException:
            for stream in kernels.streams:  # scratch memory is given back after this
                with suppress(RuntimeError):
                    wait_for(stream)
            raise


class CudaLanding(Landing):
    """Landing memory on a CUDA device. Its methods raise `TransferError`.

    Several may be in use at a time, and none takes the kernels' turn: each waits for what it has launched before it
    gives memory back.
    """

    def __init__(
        self,
        index: int,
        check: Callable[[], object],
        source: Spans,
        target: Spans,
        batches: Batches,
        scatter: Scatter,
        *,
        is_hashing: bool,
    ) -> None:
        """`check` raises where the target's memory was freed. Raises `NoRoom`, `ValueError` and `RuntimeError`."""
        self._kernels = _working(index)
        self._check = check
        with _on(self._kernels):
            make = partial(CudaLauncher, self._kernels)
            super().__init__(make, source, target, batches, scatter, is_hashing=is_hashing)

    def gather(self, batches: range) -> None:
        with self._running():
            super().gather(batches)

    def digests(self) -> bytes:
        with self._running():
            return super().digests()

    def scatter(self) -> None:
        self._check()
        with self._running():
            super().scatter()

    def close(self) -> None:
        with self._running():
            super().close()

    @scope
    def _running(self) -> Iterator[None]:
        try:
            with _on(self._kernels):
                yield
        except (NoRoom, RuntimeError) as error:
            raise TransferError(f"copying on {self._kernels.device} failed: {error}") from error


def _working(index: int) -> Kernels:
    kernels = _kernels(index)
    if isinstance(kernels, str):
        raise RuntimeError(kernels)
    return kernels


@scope
def _on(kernels: Kernels) -> Iterator[None]:
    """The block runs on that device, beside what the user's threads do with torch."""
    with beside_captures(), torch.no_grad(), torch.cuda.device(kernels.device):
        yield


def why_not(index: int) -> str | None:
    """Why that device does not hash; None if it does. Compiles the kernels and tries them, the first time."""
    kernels = _kernels(index)
    return kernels if isinstance(kernels, str) else None


_streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}
_streams_lock = threading.RLock()  # a finaliser may ask while its own thread has it


def stream_of(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """This library's stream for that purpose, one in a process, of the lowest priority. It is never destroyed.

    Torch's own would not do: it has 32, and gives the first of them out again after the last. A user's graph may be
    captured on one of those, and what is launched there meanwhile is captured with it.
    """
    with _streams_lock:
        if (device, purpose) not in _streams:
            with beside_captures():
                _streams[device, purpose] = _made(device)
        return _streams[device, purpose]


def _made(device: torch.device) -> torch.cuda.Stream:
    handle = ctypes.c_void_p()
    try:
        create = ctypes.CDLL("libcuda.so.1").cuStreamCreateWithPriority
    except (OSError, AttributeError):
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        torch.cuda.mem_get_info(device)  # makes the device's context the thread's, where it is the first call of one
        is_made = create(ctypes.byref(handle), NON_BLOCKING, LOWEST_PRIORITY) == 0
    if not is_made:
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return torch.cuda.ExternalStream(handle.value, device=device)  # type: ignore[no-untyped-call]


def recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event behind what is on the stream now: later work of others is not waited for."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # sleeps instead of spinning
    event.record(stream)
    return event


def wait_for(stream: torch.cuda.Stream) -> None:
    """Wait for what is on the stream now."""
    recorded(stream).synchronize()


_loading = threading.Lock()


def _kernels(index: int) -> Kernels | str:
    with _loading:
        return _loaded(index)


@cache
def _loaded(index: int) -> Kernels | str:
    try:
        kernels = Kernels(index)
        _try(kernels)
        return kernels
    except ImportError as error:
        return f"the package cuda-core is not there ({error}): pip install 'tensorhub[cuda]'"
    except Exception as error:  # noqa: BLE001 - whatever a driver or compiler raises, the host can hash instead
        return f"the kernels do not work on cuda:{index}: {type(error).__name__}: {error}"


def _try(kernels: Kernels) -> None:
    """Raises `RuntimeError` unless the device makes the host's digests, and its copies are right."""
    with beside_captures(), torch.no_grad(), torch.cuda.device(kernels.device):
        for size_bytes in SELF_TEST_BYTES:
            host = torch.from_numpy(np.random.default_rng(size_bytes).integers(0, 256, size_bytes, np.uint8))
            with torch.cuda.stream(kernels.streams[0]):
                there, copy = host.to(kernels.device), torch.zeros(size_bytes, dtype=torch.uint8, device=kernels.device)
            spans, target = (Spans([0], [memory.data_ptr()], size_bytes) for memory in (there, copy))
            found = digests(CudaLauncher(kernels), spans, Chunks(0, size_bytes, size_bytes), target)
            with torch.cuda.stream(kernels.streams[0]):
                is_copied = torch.equal(copy.cpu(), host)
            if found != xxhash.xxh3_128_digest(host.numpy().tobytes()) or not is_copied:
                raise RuntimeError(f"it gave a wrong digest or a wrong copy of {size_bytes} B")
        _try_rows(kernels)


def _try_rows(kernels: Kernels) -> None:
    """Raises `RuntimeError` unless a matrix is transposed, and copied as it is."""
    rows, columns = 64, 48
    host = torch.arange(rows * columns, dtype=torch.int16)
    size_bytes = 2 * rows * columns
    with torch.cuda.stream(kernels.streams[0]):
        there, copy = host.to(kernels.device), torch.zeros(2 * rows * columns, dtype=torch.int16, device=kernels.device)
    source, target = there.data_ptr(), copy.data_ptr()
    table = row_table(
        np.array(
            [
                (source, target, 2, rows, 2 * columns, 2, columns, 2, 2 * rows),
                (source, target + size_bytes, size_bytes, 1, 0, 0, 1, 0, 0),
            ],
            np.int64,
        )
    )
    launcher = CudaLauncher(kernels)
    launcher.launch("move", 0, launcher.upload(array("Q", (launcher.upload(table), 2, 0, 0))), lane=0)
    launcher.wait(0)
    with torch.cuda.stream(kernels.streams[0]):
        found = copy.cpu()
    if not torch.equal(found, torch.cat([host.view(rows, columns).t().reshape(-1), host])):
        raise RuntimeError("it copied rows wrongly")


def _compiled(architecture: str) -> Any:
    """The kernels for one architecture, from the cache directory or compiled now."""
    from cuda.core import ObjectCode, Program, ProgramOptions

    source = Path(__file__).with_name("xxh3.cu").read_text()
    options = ProgramOptions(std="c++17", arch=architecture)
    kept = _cache_directory() / f"xxh3-{hashlib.sha256(source.encode()).hexdigest()[:16]}-{architecture}.cubin"
    with suppress(OSError):
        if kept.stat().st_uid == os.geteuid():
            return ObjectCode.from_cubin(kept.read_bytes())
    code = Program(source, "c++", options).compile("cubin")
    with suppress(OSError):  # a cache that cannot be written costs 0.4 s at the next start
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as new:
            new.write(bytes(code.code))
        os.replace(new.name, kept)
    return code


def _cache_directory() -> Path:
    """$XDG_CACHE_HOME/tensorhub, or ~/.cache/tensorhub (XDG Base Directory Specification)."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "tensorhub"
