"""A process of the benchmarks: does what it is told over stdin, line by line in JSON, and answers over stdout.

Every command runs in a thread of its own, so that a transfer under way can be watched. What is timed is timed here, by
the monotonic clock, which all processes of a machine share. It ends when its stdin does, or with its parent.
"""

import contextlib
import ctypes
import os
import re
import resource
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash

import tensorhub
from tensorhub.memory.digests import build_manifest
from tensorhub.memory.fill import FillSink
from tensorhub.memory.host_copies import copy_stream, on_host
from tensorhub.memory.registration import Registration, register
from tensorhub.runtime.config import worker_options
from tensorhub.runtime.opening import make_transport
from tensorhub.transport.base import Export, Progress, Transport

from .converse import converse
from .plain import MIB, RawReader, RawSource, read_and_hash, read_memory

PATIENCE_S = 120.0
KEY = "benchmark"
LAP = 20_000  # about 0.3 ms of counting
LINE_BYTES = 64  # of the processor's cache


def cpu_s() -> float:
    """Seconds of CPU of all threads of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def aligned(size_bytes: int) -> np.ndarray:
    """Memory that begins at a line of the cache, as torch's tensors do and numpy's large arrays do not."""
    array = np.empty(size_bytes + LINE_BYTES, dtype=np.uint8)
    begin = -array.ctypes.data % LINE_BYTES
    return array[begin : begin + size_bytes]


def filled(size_bytes: int, seed: int) -> np.ndarray:
    """Content in which no two chunks are alike; touched. Seed 0: zeros."""
    array = aligned(size_bytes)
    if seed == 0:
        array[:] = 0
        return array
    noise = np.random.default_rng(seed).integers(0, 256, size=8 * MIB + 4099, dtype=np.uint8)
    for start in range(0, size_bytes, len(noise)):
        part = array[start : start + len(noise)]
        part[:] = noise[: len(part)]
        part[:8] = np.frombuffer((start + seed).to_bytes(8, "little"), dtype=np.uint8)[: len(part)]
    return array


class Actor:
    """What a process has, and the commands that it knows."""

    def __init__(self) -> None:
        self.tensors: dict[str, object] = {}
        self._registration: Registration | None = None
        self.arrays: dict[str, np.ndarray] = {}  # the same memory
        self.weights: dict[str, tensorhub.Weights] = {}
        self.transports: dict[str, Transport] = {}
        self.raw_source: RawSource | None = None
        self.raw_readers: dict[int, RawReader] = {}
        self._other: np.ndarray | None = None
        self._is_busy = False
        self._laps: list[float] = []

    # --- memory -------------------------------------------------------------------------------------------------------

    def allocate(self, size_bytes: int, seed: int = 0, tensors: int = 1, is_torch: bool = False) -> int:
        """Tensors of equal size, each an allocation of its own. Returns the first one's address."""
        if tensors == 1:
            self.arrays = {"w": filled(size_bytes, seed)}
        else:
            content = filled(size_bytes, seed).reshape(tensors, -1)
            self.arrays = {f"w{index}": content[index].copy() for index in range(tensors)}
        self.tensors, self._registration = dict(self.arrays), None
        if is_torch:
            import torch

            self.tensors = {name: torch.from_numpy(array).clone() for name, array in self.arrays.items()}
            self.arrays = {name: tensor.numpy() for name, tensor in self.tensors.items()}  # type: ignore[attr-defined]
        return int(next(iter(self.arrays.values())).ctypes.data)

    def allocate_numbers(self, elements: int, dtype: str) -> None:
        """One torch tensor of zeros."""
        import torch

        tensor = torch.zeros(elements, dtype=getattr(torch, dtype))
        self.tensors, self._registration = {"w": tensor}, None
        self.arrays = {"w": tensor.view(torch.uint8).numpy()}

    def write_numbers(self, factor: int) -> None:
        """Other numbers for each factor."""
        import torch

        tensor = self.tensors["w"]
        assert isinstance(tensor, torch.Tensor)
        tensor.copy_(torch.arange(len(tensor), dtype=torch.float32) * factor)

    def digest_in(self, dtype: str) -> str:
        """Of the tensor as it is in that dtype."""
        import torch

        tensor = self.tensors["w"]
        assert isinstance(tensor, torch.Tensor)
        return xxhash.xxh3_128(tensor.to(getattr(torch, dtype)).view(torch.uint8).numpy()).hexdigest()

    def clear(self) -> None:
        """As if nothing had come."""
        for array in self.arrays.values():
            array[:] = 0

    def change(self, seed: int) -> None:
        """A step of training: a few bytes of each tensor."""
        for array in self.arrays.values():
            array[:8] = np.frombuffer(seed.to_bytes(8, "little"), dtype=np.uint8)

    def step(self) -> None:
        """A step of training that changes every byte."""
        for array in self.arrays.values():
            array += 1

    def digest(self, start: int = 0, stop: int | None = None) -> str:
        """Of each tensor, or of those bytes of each."""
        hasher = xxhash.xxh3_128()
        for array in self.arrays.values():
            hasher.update(memoryview(array)[start:stop])
        return hasher.hexdigest()

    def _whole(self) -> np.ndarray:
        return self.arrays["w"]

    # --- what it costs ------------------------------------------------------------------------------------------------

    def cpu(self) -> float:
        return cpu_s()

    def reset_peak(self) -> None:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")

    def usage(self) -> dict[str, int]:
        """Bytes resident now and at their peak, descriptors, threads, sockets."""
        with open("/proc/self/status") as file:
            sizes = dict(re.findall(r"^(VmHWM|VmRSS|Threads):\s+(\d+)", file.read(), re.MULTILINE))
        links = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                links.append(os.readlink(f"/proc/self/fd/{name}"))
        return {
            "peak_bytes": int(sizes["VmHWM"]) * 1024,
            "resident_bytes": int(sizes["VmRSS"]) * 1024,
            "threads": int(sizes["Threads"]),
            "descriptors": len(links),
            "sockets": sum(link.startswith("socket:") for link in links),
        }

    def arrived_bytes(self) -> int:
        """What the links of this network namespace have carried to us, headers and all."""
        with open("/proc/self/net/dev") as file:
            rows = [line.split() for line in file if "eth0:" in line]
        return sum(int(row[1]) for row in rows)

    # --- a busy interpreter -------------------------------------------------------------------------------------------

    def busy(self, is_on: bool) -> None:
        """One thread that counts in pure Python, and notes the time now and then; or its end."""
        self._laps.clear()
        self._is_busy = is_on
        if is_on:
            threading.Thread(target=self._count, daemon=True).start()

    def _count(self) -> None:
        while self._is_busy:
            for _ in range(LAP):
                pass
            self._laps.append(time.monotonic())

    def laps_per_s(self, began: float, ended: float) -> float:
        """How often it has counted to `LAP` in that time."""
        return sum(began <= lap <= ended for lap in list(self._laps)) / (ended - began)

    def _timed(self, work: Callable[[], object]) -> dict[str, float]:
        before = cpu_s()
        began = time.monotonic()
        work()
        ended = time.monotonic()
        return {"seconds": ended - began, "began": began, "ended": ended, "cpu_s": cpu_s() - before}

    # --- plain ways ---------------------------------------------------------------------------------------------------

    def copy_memory(self) -> dict[str, float]:
        """memcpy inside this process, from memory that was touched."""
        target = self._whole()
        if self._other is None or len(self._other) != len(target):
            self._other = filled(len(target), 1)
        source = self._other
        return self._timed(lambda: ctypes.memmove(target.ctypes.data, source.ctypes.data, len(target)))

    def forget_copy(self) -> None:
        self._other = None

    def read_vm(self, pid: int, address: int, threads: int) -> dict[str, float]:
        array = self._whole()
        return self._timed(lambda: read_memory(pid, address, array.ctypes.data, len(array), threads=threads))

    def read_vm_hashed(self, pid: int, address: int, threads: int) -> dict[str, float]:
        array = self._whole()
        view = memoryview(array)
        return self._timed(lambda: read_and_hash(pid, address, array.ctypes.data, view, threads=threads))

    def serve_raw(self, host: str = "127.0.0.1") -> int:
        self.raw_source = RawSource(memoryview(self._whole()), host)
        return self.raw_source.port

    def read_raw(self, host: str, port: int, streams: int) -> dict[str, float]:
        if streams not in self.raw_readers:
            self.raw_readers[streams] = RawReader(host, port, streams)
        view = memoryview(self._whole())
        return self._timed(lambda: self.raw_readers[streams].read(view))

    # --- a transport alone --------------------------------------------------------------------------------------------

    def _transport(self, kind: str, host: str = "127.0.0.1") -> Transport:
        if kind not in self.transports:
            self.transports[kind] = make_transport(kind, host, worker_options())
        return self.transports[kind]

    def export(
        self,
        kinds: list[str],
        host: str = "127.0.0.1",
        chunk_bytes: int = 4 * MIB,
        key: str = KEY,
        is_copy: bool = False,
    ) -> dict[str, object]:
        """Let everybody read the tensors, or a host copy of them.

        Returns the content's root and the endpoints of the kinds that work here.
        """
        registration = register(self.tensors)
        manifest = build_manifest(registration, chunk_bytes)
        if is_copy:
            tensors, registration = registration, on_host(registration)
            copy_stream(tensors.stream, registration.stream, chunk_bytes, lambda *_: None)
        body, endpoints, errors = manifest.encode(), {}, {}
        for kind in kinds:
            try:
                transport = self._transport(kind, host)
            except (ImportError, tensorhub.TensorHubError) as error:
                errors[kind] = str(error)
                continue
            progress = Progress(manifest.chunk_count, complete=True)
            transport.export(Export(key, body, chunk_bytes, registration.stream, progress))
            endpoints[kind] = transport.endpoint
        return {"root": str(manifest.root()), "endpoints": endpoints, "errors": errors}

    def read_transport(
        self, kind: str, endpoint: str, root: str, verify: str = "full", host: str = "127.0.0.1", key: str = KEY
    ) -> dict[str, float]:
        """Fill the tensors through one transport, judged by the sink that the product uses."""
        transport = self._transport(kind, host)
        registration = self._registered()

        def read() -> None:
            sink = FillSink(registration, root, verify=verify)  # type: ignore[arg-type]
            ended, errors = threading.Event(), []

            def on_end(error: Exception | None) -> None:
                errors.append(error)
                ended.set()

            transport.read(endpoint, key, sink, on_end)
            if not ended.wait(PATIENCE_S):
                raise TimeoutError(f"the read from {endpoint} has not ended")
            if errors[0] is not None:
                raise errors[0]
            if not sink.progress.is_complete:
                raise RuntimeError("the read ended before its last chunk")

        return self._timed(read)

    def _registered(self) -> Registration:
        """As a worker does: once, for all versions that it reads."""
        if self._registration is None:
            self._registration = register(self.tensors)
        return self._registration

    # --- the public API -----------------------------------------------------------------------------------------------

    def open(
        self,
        name: str = "",
        transports: str = "",
        boxes: dict[str, list[dict[str, Any]]] | None = None,
        dtype: str | None = None,
        **options: object,
    ) -> None:
        """Open and register. `name` tells several of one process apart; `boxes`: the arguments of each box.

        `dtype`: that in which the tensors are published.
        """
        if transports:
            os.environ["TENSORHUB_TRANSPORTS"] = transports
        weights = tensorhub.open(**options)  # type: ignore[arg-type]
        self.weights[name] = weights
        made = {
            tensor: [tensorhub.Box(**{k: v if k == "name" else tuple(v) for k, v in box.items()}) for box in each]
            for tensor, each in (boxes or {}).items()
        }
        weights.register(self.tensors, boxes=made or None, dtype=dtype)

    def call(self, verb: str, name: str = "", **arguments: object) -> dict[str, float]:
        """A call of `Weights`, timed."""
        return self._timed(lambda: getattr(self.weights[name], verb)(**arguments))

    def close(self, name: str = "") -> None:
        self.weights.pop(name).close(timeout=20)

    def look(self, name: str = "") -> dict[str, object]:
        """`share`: of a fill under way."""
        weights = self.weights[name]
        found = weights.progress
        share = found.done_bytes / found.total_bytes if found is not None else None
        return {"version": weights.version, "statistics": weights.statistics(), "share": share}

    def follow(self, name: str = "", every_s: float = 0.002, **arguments: object) -> dict[str, object]:
        """Replicate, and note the bytes of each source as they come: when, of which source, how many so far."""
        weights, before, is_over = self.weights[name], _by_source(self.weights[name]), threading.Event()
        samples: list[tuple[float, str, int]] = []

        def watch() -> None:
            counts, is_last = before, False
            while not is_last:
                is_last = is_over.wait(every_s)
                now, found = time.monotonic(), _by_source(weights)
                for source, size_bytes in found.items():
                    if size_bytes > counts.get(source, 0):
                        samples.append((now, source, size_bytes - before.get(source, 0)))
                counts = found

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            timed = self._timed(lambda: weights.replicate(**arguments))  # type: ignore[arg-type]
        finally:
            is_over.set()
            watcher.join()
        return {**timed, "samples": samples}

    def await_progress(self, share: float, name: str = "", within_s: float = 60.0) -> str:
        """Wait until so much of the fill is in place. Returns the source, or nothing between two."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            found = self.weights[name].progress
            if found is not None and found.done_bytes >= share * found.total_bytes:
                return found.source
            time.sleep(0.001)
        raise TimeoutError(f"not {share:.0%} in place within {within_s} s")

    def await_received(self, size_bytes: int, name: str = "", within_s: float = 60.0) -> float:
        """Wait until so much has come. Progress counts chunks without a gap, and a read across has gaps."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if sum(_by_source(self.weights[name]).values()) >= size_bytes:
                return time.monotonic()
            time.sleep(0.001)
        raise TimeoutError(f"not {size_bytes} B received within {within_s} s")


def _by_source(weights: tensorhub.Weights) -> dict[str, int]:
    found = weights.statistics()["bytes_by_source"]
    assert isinstance(found, dict)
    return found


if __name__ == "__main__":
    converse(Actor())
