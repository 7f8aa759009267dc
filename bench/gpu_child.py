"""A process of `make gpu`: tensors on a device or, in a rehearsal, on the host, and what it is told to do with them."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

import tensorhub
from tensorhub.memory.digests import build_manifest
from tensorhub.memory.fill import FillSink
from tensorhub.memory.registration import register
from tensorhub.runtime.config import worker_options
from tensorhub.runtime.opening import make_transport
from tensorhub.transport.base import Export, Progress

from .converse import converse

MIB = 1 << 20
CHUNK_BYTES = 4 * MIB
KEY = "benchmark"
PATIENCE_S = 60.0


class Device:
    """One side."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.tensors: dict[str, torch.Tensor] = {}
        self.wholes: list[tuple[tuple[int, ...], int, int]] = []  # shape, dim and index of each shard
        self.shards: list[tuple[tensorhub.Weights, dict[str, torch.Tensor]]] = []
        self.transport: object = None
        self.steps: list[tuple[float, float]] = []
        self.is_training = False
        self.trainer: threading.Thread | None = None

    # --- memory -------------------------------------------------------------------------------------------------------

    def allocate(self, device: str, size_bytes: int, tensor_bytes: int = 64 * MIB) -> None:
        """Tensors of that size, and one of what is left."""
        self.device = torch.device(device)
        self.tensors = {}
        if self.is_on_device:
            torch.cuda.empty_cache()
        for index, start in enumerate(range(0, size_bytes, tensor_bytes)):
            size = min(tensor_bytes, size_bytes - start)
            self.tensors[f"w{index}"] = torch.zeros(size // 4, dtype=torch.int32, device=self.device)
        self.wait()

    @property
    def is_on_device(self) -> bool:
        return self.device.type == "cuda"

    def wait(self) -> None:
        if self.is_on_device:
            torch.cuda.synchronize(self.device)

    def free_bytes(self) -> int:
        """Of the device; of a rehearsal, what is small."""
        return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 4096 * MIB

    def write(self, seed: int) -> None:
        """Other content for each seed; 0: nothing but zeros."""
        for index, tensor in enumerate(self.tensors.values()):
            if seed:
                tensor.copy_(self._content(tensor, index, seed))
            else:
                tensor.zero_()
        self.wait()

    def is_right(self, seed: int) -> bool:
        pairs = enumerate(self.tensors.values())
        return all(bool(torch.equal(tensor, self._content(tensor, index, seed))) for index, tensor in pairs)

    def _content(self, tensor: torch.Tensor, index: int, seed: int) -> torch.Tensor:
        return torch.arange(len(tensor), dtype=torch.int32, device=self.device) * (2 * seed + 1) + index

    # --- limits: one process, nothing of TensorHub --------------------------------------------------------------------

    def copy(self, kind: str, rounds: int) -> list[float]:
        """Seconds of a copy of all tensors: on the `device`, `to_pinned` host memory, or `from_pinned`."""
        where = self.device if kind == "device" else torch.device("cpu")
        is_pinned = kind != "device" and self.is_on_device
        memory = list(self.tensors.values()) if kind == "device" else list(self.tensors.values())[:16]
        others = [torch.ones(len(each), dtype=each.dtype, device=where, pin_memory=is_pinned) for each in memory]
        size_bytes = sum(each.nbytes for each in memory)
        self.wait()

        def run() -> None:
            sources, targets = (others, memory) if kind == "from_pinned" else (memory, others)
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            self.wait()

        run()
        whole = sum(each.nbytes for each in self.tensors.values())
        return [self._seconds(run) * whole / size_bytes for _ in range(rounds)]

    def copy_many(self, rounds: int) -> list[float]:
        """Seconds of one call for all tensors."""
        memory = list(self.tensors.values())
        others = [torch.empty_like(tensor) for tensor in memory]

        def run() -> None:
            torch._foreach_copy_(others, memory)
            self.wait()

        run()
        return [self._seconds(run) for _ in range(rounds)]

    def hash(self, rounds: int) -> list[float]:
        """Seconds of what a publish does before it says so."""
        registration = register(self.tensors)
        build_manifest(registration, CHUNK_BYTES)
        return [self._seconds(lambda: build_manifest(registration, CHUNK_BYTES)) for _ in range(rounds)]

    # --- a transport alone --------------------------------------------------------------------------------------------

    def export(self, kind: str) -> dict[str, str]:
        registration = register(self.tensors)
        manifest = build_manifest(registration, CHUNK_BYTES)
        transport = self._transport(kind)
        progress = Progress(manifest.chunk_count, complete=True)
        transport.export(Export(KEY, manifest.encode(), CHUNK_BYTES, registration.stream, progress))  # type: ignore[attr-defined]
        return {"endpoint": transport.endpoint, "root": str(manifest.root())}  # type: ignore[attr-defined]

    def read(self, kind: str, endpoint: str, root: str, rounds: int) -> list[float]:
        """Seconds of each read; the first one opens the memory, and is not counted."""
        registration = register(self.tensors)
        transport = self._transport(kind)

        def once() -> None:
            sink = FillSink(registration, root)  # type: ignore[arg-type]
            ended, errors = threading.Event(), []

            def on_end(error: Exception | None) -> None:
                errors.append(error)
                ended.set()

            transport.read(endpoint, KEY, sink, on_end)  # type: ignore[attr-defined]
            if not ended.wait(PATIENCE_S):
                raise TimeoutError("the read has not ended")
            if errors[0] is not None:
                raise errors[0]

        return [self._seconds(once) for _ in range(rounds + 1)][1:]

    def _transport(self, kind: str) -> object:
        if self.transport is None:
            self.transport = make_transport(kind, "127.0.0.1", worker_options())
        return self.transport

    # --- the public API -----------------------------------------------------------------------------------------------

    def open(self, **options: object) -> None:
        weights = tensorhub.open(**options)  # type: ignore[arg-type]
        self.shards.append((weights, self.tensors))
        weights.register(self.tensors)

    def open_shards(self, device: str, shape: list[int], count: int, dim: int, shards: int, **options: object) -> None:
        """`count` bfloat16 tensors, each cut in `shards` parts along `dim`, of which this process holds all."""
        self.device = torch.device(device)
        size, at = list(shape), [0] * len(shape)
        size[dim] //= shards
        for shard in range(shards):
            at[dim] = shard * size[dim]
            tensors = {f"w{i}": torch.zeros(size, dtype=torch.bfloat16, device=self.device) for i in range(count)}
            boxes = {name: [tensorhub.Box(name, tuple(shape), tuple(at), tuple(size))] for name in tensors}
            weights = tensorhub.open(shard=shard, shards=shards, **options)  # type: ignore[arg-type]
            self.shards.append((weights, tensors))
            self.wholes.append((tuple(shape), dim, shard))
            weights.register(tensors, boxes=boxes)

    def write_shards(self, seed: int) -> None:
        self._each_part(seed, lambda mine, right: mine.copy_(right))
        self.wait()

    def are_shards_right(self, seed: int) -> bool:
        return all(self._each_part(seed, lambda mine, right: bool(torch.equal(mine, right))))

    def _each_part(self, seed: int, work: Callable[[torch.Tensor, torch.Tensor], object]) -> list[object]:
        found: list[object] = []
        for (_, tensors), (shape, dim, shard) in zip(self.shards, self.wholes, strict=True):
            for index, mine in enumerate(tensors.values()):
                numbers = torch.arange(shape[0] * shape[1], dtype=torch.int32, device=self.device)
                whole = ((numbers * (2 * seed + 1) + index) % 8191).to(torch.bfloat16).reshape(shape)
                found.append(work(mine, whole.narrow(dim, shard * mine.shape[dim], mine.shape[dim])))
        return found

    def call(self, verb: str, **arguments: object) -> dict[str, float]:
        """The same call of all shards at once, timed."""

        def run() -> None:
            calls = [getattr(weights, verb) for weights, _ in self.shards]
            if len(calls) == 1:
                calls[0](**arguments)
                return
            with ThreadPoolExecutor(len(calls)) as threads:
                for made in [threads.submit(call, **arguments) for call in calls]:
                    made.result()

        began = time.monotonic()
        seconds = self._seconds(run)
        return {"seconds": seconds, "began": began, "ended": began + seconds}

    def refuse(self, ways: list[str]) -> None:
        """From now on these ways to share memory on a device fail, as where the memory or the device cannot."""
        from tensorhub.memory.cuda import CudaStream

        def refused(*_: object) -> object:
            raise tensorhub.errors.TransportMissing("refused, for a measurement")

        for way in ways:
            if not hasattr(CudaStream, way):
                raise AttributeError(f"there is no such way: {way}")
            setattr(CudaStream, way, refused)

    def statistics(self) -> dict[str, object]:
        return self.shards[0][0].statistics()

    def await_host_copy(self, within_s: float) -> bool:
        """Whether a host copy of all of it was made, in the background, within that time."""
        ends_at = time.monotonic() + within_s
        size_bytes = sum(each.nbytes for each in self.tensors.values())
        while time.monotonic() < ends_at:
            if int(self.statistics()["offloaded_bytes"]) >= size_bytes:  # type: ignore[call-overload]
                return True
            time.sleep(0.02)
        return False

    def close(self) -> None:
        while self.shards:
            self.shards.pop()[0].close(timeout=10)
        self.wholes.clear()

    def allocated(self) -> int:
        """Bytes of the device that this process's tensors take now; the peak is counted anew from here."""
        if not self.is_on_device:
            return 0
        torch.cuda.reset_peak_memory_stats(self.device)
        return int(torch.cuda.memory_allocated(self.device))

    def peak(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.device)) if self.is_on_device else 0

    # --- a training loop ----------------------------------------------------------------------------------------------

    def train(self, is_on: bool, size: int, products: int) -> list[tuple[float, float]]:
        """Steps of some products and a pass over 1 GiB, in a thread; its end gives when each began and ended."""
        if is_on:
            self.steps, self.is_training = [], True
            self.trainer = threading.Thread(target=self._train, args=(size, products), daemon=True)
            self.trainer.start()
            return []
        self.is_training = False
        assert self.trainer is not None
        self.trainer.join(PATIENCE_S)
        return self.steps

    def _train(self, size: int, products: int) -> None:
        a, b = (torch.randn(size, size, device=self.device).bfloat16() for _ in range(2))
        optimizer = torch.randn(max(1, size * size * 4), device=self.device)  # 1 GiB of the usual size
        stream = torch.cuda.Stream(self.device) if self.is_on_device else None  # type: ignore[no-untyped-call]
        self.wait()
        while self.is_training:
            began = time.monotonic()
            with torch.cuda.stream(stream):  # type: ignore[arg-type]
                for _ in range(products):
                    c = a @ b
                optimizer.mul_(0.999)
            if stream is not None:
                stream.synchronize()
            self.steps.append((began, time.monotonic()))
        del a, b, c, optimizer

    @staticmethod
    def _seconds(work: Callable[[], object]) -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began


if __name__ == "__main__":
    os.environ.setdefault("TENSORHUB_RETAIN", "0")  # copies to host memory only where a row asks for them
    converse(Device())
