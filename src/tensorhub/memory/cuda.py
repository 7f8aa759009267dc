"""Registered memory on CUDA devices, staged through pinned host memory: for transports that cannot reach the device.

Rules:
1. Copies run on streams of their own, one for each direction and device: they neither wait for the user's kernels nor
   hold them up. So whoever reads or overwrites calls `Registration.settle` first: `build_manifest` and `FillSink` do.
2. Each call waits for an event behind its own copies. Bytes received are in place, for every stream, when it returns.
3. The ring is 64 MiB of pinned memory at most, taken at the first block, not at registration.
4. The user's threads may capture CUDA graphs meanwhile: these copies neither fail for that nor spoil the capture. Only
   `synchronize` would, so it is for calls of the user's, never for what others or this library itself begin.

Imported only once a tensor on a CUDA device is registered. `cuda_device` launches kernels.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from ..core.errors import TransferError, UsageError
from ..transport.captures import beside_captures
from ..transport.on_device import Opened, Shared
from .digests import digest
from .guarded import Freed
from .host import Piece, host_view
from .staging import Copy, StagedStream, StagingRing
from .xxh3 import Chunks, NoRoom, Spans

_log = logging.getLogger(__name__)


def synchronize(device: str) -> None:
    """Wait until the device has finished everything launched so far.

    Raises `UsageError` while any thread captures a CUDA graph: no mode allows that wait, and the capture is spoiled.
    """
    try:
        torch.cuda.synchronize(torch.device(device))
    except RuntimeError as error:
        if "captur" not in str(error):
            raise
        raise UsageError(
            f"a CUDA graph is being captured in this process, and nobody may wait for {device} meanwhile",
            hint="make such calls before the capture or after it, and capture again what this one has spoiled",
        ) from error


class CudaStream(StagedStream):
    """A `ByteStream` over memory of CUDA devices, and of the host among it."""

    def __init__(self, pieces: Sequence[Piece], ring: StagingRing | None = None) -> None:
        self._cuda = CudaCopier(pieces)
        super().__init__(pieces, self._cuda, ring)

    def device_digests(self, chunk_bytes: int) -> dict[int, bytes]:
        """By chunk, of those that lie on one CUDA device that hashes. Waits for it. Raises `Freed`."""
        found: dict[int, bytes] = {}
        for name, spans in self._cuda.spans():
            start = -(-spans.starts[0] // chunk_bytes) * chunk_bytes
            stop = spans.stop if spans.stop == self.size_bytes else spans.stop // chunk_bytes * chunk_bytes
            if start < stop:
                made = _hashed(name, spans, Chunks(start, stop, chunk_bytes))
                found.update((chunk, it) for chunk, it in enumerate(made, start // chunk_bytes) if it)
        return found

    # -- for readers of this host (transport/on_device.py) -------------------------------------------------------------

    @property
    def is_on_device(self) -> bool:
        """All of it lies on one device, whose kernels work."""
        from .cuda_device import why_not

        devices = {piece.device for piece in self._pieces}
        return len(devices) == 1 and "cpu" not in devices and why_not(_index(*devices)) is None

    def share(self) -> Shared:
        from .cuda_sharing import share

        memory = [self._cuda.memory_of(index) for index in range(len(self._pieces))]
        return share(self._pieces, [tensor for tensor in memory if tensor is not None])

    def open(self, body: bytes) -> Opened:
        from .cuda_sharing import OpenedCuda

        return OpenedCuda(body, _index(self._pieces[0].device))

    def copy_from(self, source: Opened, start: int, stop: int, chunk_bytes: int, *, digests: bool) -> list[bytes]:
        from .cuda_device import device_digests
        from .cuda_sharing import OpenedCuda

        assert isinstance(source, OpenedCuda)
        ((name, mine),) = self._cuda.spans()
        try:
            made = device_digests(_index(name), source.spans, Chunks(start, stop, chunk_bytes), mine)
        except (NoRoom, RuntimeError) as error:
            raise TransferError(f"copying on {name} failed: {error}") from error
        if not digests:
            return []
        for at, found in enumerate(made):
            if not found:
                with self.reading(start + at * chunk_bytes, min(start + (at + 1) * chunk_bytes, stop)) as views:
                    made[at] = digest(views)
        return made


def _index(name: str) -> int:
    return torch.device(name).index or 0


def _hashed(name: str, spans: Spans, chunks: Chunks) -> list[bytes]:
    """The digests of these chunks; none where the device can not."""
    from .cuda_device import device_digests, why_not  # with numpy and the compiler's package

    reason = why_not(_index(name))
    if reason is None:
        try:
            return device_digests(_index(name), spans, chunks)
        except (NoRoom, RuntimeError) as error:
            reason = f"{type(error).__name__}: {error}"
    if reason not in _said:
        _said.add(reason)
        _log.warning("%s hashes nothing, so the host does, at a hundredth of the rate: %s", name, reason)
    return []


_said: set[str] = set()  # why a device hashes nothing: each reason once


class CudaCopier:
    """Copies between pieces of device memory and pinned staging memory."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self._bytes = [_as_bytes(piece) if piece.device != "cpu" else None for piece in pieces]
        self._devices = [torch.device(piece.device) for piece in pieces]
        self._streams: dict[tuple[torch.device, bool], torch.cuda.Stream] = {}
        with beside_captures():
            for device in self._devices:
                if device.type != "cpu":
                    for is_to_host in (True, False):
                        if (device, is_to_host) not in self._streams:
                            self._streams[device, is_to_host] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._staging: torch.Tensor | None = None

    def staging(self, size_bytes: int) -> memoryview:
        """Pinned host memory."""
        try:
            with beside_captures():
                self._staging = torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            raise TransferError(f"{size_bytes} B of pinned host memory could not be had: {error}") from error
        return host_view(self._staging.data_ptr(), size_bytes, self._staging)

    def memory_of(self, piece: int) -> torch.Tensor | None:
        """A piece's bytes on its device; None for one on the host. Raises `Freed` if its storage is not there any more.

        A device that is told to copy from there would fail in all that it does afterwards. What is freed once the copy
        is launched waits for it.
        """
        memory, known = self._bytes[piece], self._pieces[piece]
        if memory is not None and memory.data_ptr() != known.address:
            raise Freed(known.start)
        return memory

    def spans(self) -> list[tuple[str, Spans]]:
        """Where the bytes lie, a device at a time: neighbours in the stream that are on one device. Raises `Freed`."""
        runs: list[tuple[str, list[int]]] = []
        for index, piece in enumerate(self._pieces):
            if self.memory_of(index) is None:
                continue
            if runs and runs[-1][0] == piece.device and self._pieces[runs[-1][1][-1]].stop == piece.start:
                runs[-1][1].append(index)
            else:
                runs.append((piece.device, [index]))
        return [
            (
                name,
                Spans(
                    [self._pieces[i].start for i in its],
                    [self._pieces[i].address for i in its],
                    self._pieces[its[-1]].stop,
                ),
            )
            for name, its in runs
        ]

    def to_host(self, copies: Sequence[Copy]) -> None:
        """Device to pinned memory; returns when the bytes are there."""
        self._run(copies, True, lambda device, host: host.copy_(device, non_blocking=True))

    def to_device(self, copies: Sequence[Copy]) -> None:
        """Pinned memory to device; returns when the bytes are there."""
        self._run(copies, False, lambda device, host: device.copy_(host, non_blocking=True))

    def _run(
        self,
        copies: Sequence[Copy],
        is_to_host: bool,
        copy: Callable[[torch.Tensor, torch.Tensor], object],
    ) -> None:
        staging = self._staging
        assert staging is not None, "copies before staging memory"
        by_device: dict[torch.device, list[Copy]] = {}
        for one in copies:
            by_device.setdefault(self._devices[one.piece], []).append(one)
        try:
            with torch.no_grad(), beside_captures(), ExitStack() as in_flight:
                for device, its in by_device.items():
                    stream = self._streams[device, is_to_host]
                    with torch.cuda.stream(stream):
                        in_flight.callback(_wait_for_all, stream)  # also on the way out of an error
                        for one in its:
                            memory = self.memory_of(one.piece)
                            assert memory is not None, "a host piece is handed out, never copied"
                            copy(
                                memory[one.inside : one.inside + one.size_bytes],
                                staging[one.at : one.at + one.size_bytes],
                            )
        except RuntimeError as error:
            raise TransferError(f"copying between host and {', '.join(map(str, by_device))} failed: {error}") from error


def _wait_for_all(stream: torch.cuda.Stream) -> None:
    """Wait for what is on the stream now: an event, so that copies of later calls are not waited for."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # sleeps instead of spinning
    event.record(stream)
    event.synchronize()


def _as_bytes(piece: Piece) -> torch.Tensor:
    """The piece as a uint8 tensor over the same memory."""
    for owner in piece.owners:
        assert isinstance(owner, torch.Tensor), "device memory is owned by tensors"
        storage = owner.untyped_storage()
        inside = piece.address - storage.data_ptr()
        if inside >= 0 and inside + piece.size_bytes <= storage.nbytes():
            with torch.no_grad():
                empty = torch.empty(0, dtype=torch.uint8, device=piece.device)
                return empty.set_(storage, inside, (piece.size_bytes,), (1,))
    raise UsageError(
        f"tensors on {piece.device} overlap in memory but belong to different storages",
        hint="register one tensor over the whole memory, and its views",
    )


def random_memory(size_bytes: int) -> CudaStream:
    """Random bytes on the current device, for measurements."""
    memory = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, device="cuda")
    return CudaStream([Piece(0, size_bytes, memory.data_ptr(), str(memory.device), memory.data_ptr(), (memory,))])
