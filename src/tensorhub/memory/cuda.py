"""Registered memory on CUDA devices, staged through pinned host memory: for transports that cannot reach the device.

Rules:
1. Copies run on streams of their own, one for each direction and device: they neither wait for the user's kernels nor
   hold them up. So a reader or writer calls `Registration.settle` first: `build_manifest` and `FillSink` do.
2. Each call waits for an event behind its own copies. Bytes received are in place, for every stream, when it returns.
3. The ring is 64 MiB of pinned memory at most, taken at the first block, not at registration.
4. Many small pieces of a block are gathered on the device, and cross the bus in one copy. The device memory for that is
   as large as the block, and the ring bounds all blocks together.
5. The user's threads may capture CUDA graphs meanwhile: nothing here fails for that or spoils the capture. The whole
   device is never waited for.

Imported only once a tensor on a CUDA device is registered. `cuda_device` launches kernels.
"""

import ctypes
import logging
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from copy import copy as shallow_copy
from functools import cache

import torch

from ..protocol.errors import TransferError, TransportMissing, UsageError
from ..protocol.manifest import DIGEST_BYTES
from ..transport.on_device import Landing, Opened, RingMemory, Shared
from ..transport.ranges import Addresses, Batches, Scatter
from ..transport.threads import beside_captures
from . import cuda_device, cuda_sharing
from . import streams as guarded
from .cuda_device import recorded, stream_of, wait_for
from .digests import digest
from .host_copies import CudaRegistrar
from .streams import Copy, Freed, Piece, StagedStream, StagingRing, host_view
from .xxh3 import Chunks, NoRoom, Spans

MANY_PIECES = 16  # of a block: from here on two copies and a few kernels cost less than a copy for each
GRANULE_BITS = 21  # 2 MiB: what a device maps at once
INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE: the driver knows no such address
MAPPED = 13  # CU_POINTER_ATTRIBUTE_MAPPED: is there memory behind this address

_log = logging.getLogger(__name__)

# --- what the user's streams have in hand -----------------------------------------------------------------------------

_Launched = tuple[torch.cuda.Stream, torch.cuda.Event | None]  # no event: a graph was being captured on the stream

_launched: dict[torch.device, list[_Launched]] = {}  # what callers had in hand, but for what is known to be done
_launched_lock = threading.RLock()  # a finaliser may call while its own thread has it


def note_call(devices: Sequence[str]) -> None:
    """The calling thread is about to call: `synchronize`, perhaps in another thread, will wait for its current streams.

    Costs two questions to torch for each device where that is the default stream, and an event where it is not.
    """
    for name in devices:
        if name == "cpu":
            continue
        device = torch.device(name)
        stream = torch.cuda.current_stream(device)
        if stream == torch.cuda.default_stream(device):
            continue
        with _launched_lock, beside_captures():
            open_still = [it for it in _launched.get(device, ()) if not _is_over(*it)]
            _launched[device] = [*open_still, (stream, None if _is_capturing(stream) else recorded(stream))]


def synchronize(device: str) -> None:
    """Wait for what is on the device's default stream and on the caller's current one, and was on those of `note_call`.

    Whoever has work on further streams joins them first, as before any operation of torch:
    `torch.cuda.current_stream().wait_stream(side)`. Raises `UsageError` while a CUDA graph is captured on one of them.
    """
    here = torch.device(device)
    with _launched_lock:
        known = list(_launched.get(here, ()))
    streams = {torch.cuda.current_stream(here), torch.cuda.default_stream(here)}
    try:
        with beside_captures():
            events = []
            for stream, event in [*known, *((stream, None) for stream in streams)]:
                if event is None and _is_capturing(stream):
                    raise RuntimeError("the stream is capturing")
                events.append(event or recorded(stream))
            for event in events:
                event.synchronize()
    except RuntimeError as error:
        if "captur" not in str(error):
            raise
        raise UsageError(
            f"a CUDA graph is being captured on a stream of {device} that this call has to wait for",
            hint="make such calls before the capture or after it",
        ) from error


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def _is_over(stream: torch.cuda.Stream, event: torch.cuda.Event | None) -> bool:
    if event is None:
        return not _is_capturing(stream)
    return bool(event.query())  # type: ignore[no-untyped-call]


def unmapped(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces whose first byte has no memory. A sleeping engine keeps its addresses, and gives the memory back.

    A device that touches such an address fails in all that it does afterwards. One question for each 2 MiB that pieces
    begin in: 1 us. Empty where the driver cannot tell.
    """
    first: dict[int, Piece] = {}
    for piece in pieces:
        if piece.device != "cpu":
            first.setdefault(piece.address >> GRANULE_BITS, piece)
    if all(_is_mapped(piece) for piece in first.values()):
        return []
    return [piece for piece in pieces if piece.device != "cpu" and not _is_mapped(piece)]


def _is_mapped(piece: Piece) -> bool:
    return not _can_tell(piece.device) or _has_memory(piece.address)


def is_mapped(tensor: torch.Tensor) -> bool:
    """False where the driver says that no memory is behind the tensor's address: an engine that sleeps took it back."""
    return tensor.device.type != "cuda" or not _can_tell(str(tensor.device)) or _has_memory(tensor.data_ptr())


@cache
def _can_tell(device: str) -> bool:
    """The driver says of memory that is there that it is there."""
    if _pointer_question() is None:
        return False
    with beside_captures(), torch.cuda.stream(stream_of(torch.device(device), "to host")):
        return _has_memory(torch.empty(1, dtype=torch.uint8, device=device).data_ptr())


def _has_memory(address: int) -> bool:
    ask, answer = _pointer_question(), ctypes.c_uint64(1)
    status = ask(ctypes.byref(answer), MAPPED, ctypes.c_uint64(address)) if ask is not None else 0
    return status != INVALID_VALUE and answer.value != 0


@cache
def _pointer_question() -> Callable[..., int] | None:
    try:
        found: Callable[..., int] = ctypes.PyDLL("libcuda.so.1").cuPointerGetAttribute
    except (OSError, AttributeError):
        return None
    return found


# ----------------------------------------------------------------------------------------------------------------------


class CudaStream(StagedStream):
    """A `ByteStream` over memory of CUDA devices, and of the host among it."""

    def __init__(self, pieces: Sequence[Piece], ring: StagingRing | None = None) -> None:
        self._cuda = CudaCopier(pieces)
        self._shared: Shared | None = None
        super().__init__(pieces, self._cuda, ring)

    def hashes(self, start: int, stop: int) -> bool:
        """Some of bytes [start, stop) lie on a CUDA device that hashes."""
        return any(
            spans.starts[0] < stop and start < spans.stop and cuda_device.why_not(_index(name)) is None
            for name, spans in self._cuda.runs
        )

    def device_digests(self, chunk_bytes: int) -> list[tuple[range, bytes]]:
        found = []
        for name, spans in self._cuda.spans():
            first, last = self._chunks_in(spans, chunk_bytes)
            if first < last:
                chunks = Chunks(first * chunk_bytes, min(last * chunk_bytes, spans.stop), chunk_bytes)
                made = _hashed(name, spans, chunks, self._cuda.spans)
                found.append((range(first, first + len(made) // DIGEST_BYTES), made))
        return found

    def device_digests_of(self, chunk_bytes: int, chunks: Sequence[int]) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        for name, spans in self._cuda.spans():
            first, last = self._chunks_in(spans, chunk_bytes)
            its = sorted(chunk for chunk in chunks if first <= chunk < last)
            if its:
                beside = _side_by_side(spans, its, chunk_bytes)
                made = _hashed(name, beside, Chunks(0, beside.stop, chunk_bytes), self._cuda.spans)
                ends = range(DIGEST_BYTES, len(made) + 1, DIGEST_BYTES)
                found.update((chunk, made[end - DIGEST_BYTES : end]) for chunk, end in zip(its, ends, strict=False))
        return found

    def _chunks_in(self, spans: Spans, chunk_bytes: int) -> tuple[int, int]:
        """The first and the one behind the last chunk that lie there as a whole."""
        last = -(-spans.stop // chunk_bytes) if spans.stop == self.size_bytes else spans.stop // chunk_bytes
        return -(-spans.starts[0] // chunk_bytes), last

    # -- for readers of this host (transport/on_device.py) -------------------------------------------------------------

    @property
    def device(self) -> str:
        return self._pieces[0].device

    @property
    def is_on_device(self) -> bool:
        """All of it lies on one device, whose kernels work."""
        devices = {piece.device for piece in self._pieces}
        return len(devices) == 1 and "cpu" not in devices and cuda_device.why_not(_index(*devices)) is None

    def share(self) -> Shared:
        self._cuda.spans()
        if self._shared is None:
            memory = [self._cuda.memory_of(index) for index in range(len(self._pieces))]
            self._shared = cuda_sharing.share(self._pieces, [tensor for tensor in memory if tensor is not None])
        return self._shared

    def open(self, body: bytes) -> Opened:
        return cuda_sharing.OpenedCuda(body, _index(self._pieces[0].device))

    def make_ring(self, size_bytes: int) -> RingMemory:
        return cuda_sharing.make_ring(_index(self._pieces[0].device), size_bytes)

    def open_ring(self, handle: bytes, size_bytes: int) -> RingMemory:
        return cuda_sharing.open_ring(_index(self._pieces[0].device), handle, size_bytes)

    def pin_ring(self, address: int, size_bytes: int) -> RingMemory:
        return cuda_sharing.pin_ring(_index(self._pieces[0].device), address, size_bytes)

    def copy_to(self, target: Opened, start: int, stop: int, chunk_bytes: int) -> None:
        assert isinstance(target, cuda_sharing.Part)
        if target.host_address is not None:
            return self.copy_to_host(start, stop, target.host_address)
        ((_, mine),) = self._cuda.runs
        self._copied(mine, Chunks(start, stop, chunk_bytes), target.spans, digests=False)
        return None

    def copy_from(self, source: Opened, start: int, stop: int, chunk_bytes: int, *, digests: bool) -> bytes:
        assert isinstance(source, cuda_sharing.OpenedCuda | cuda_sharing.Part)
        if isinstance(source, cuda_sharing.Part) and source.host_address is not None:
            self.copy_to_device(start, stop, source.host_address)
            return self.digests_of(start, stop, chunk_bytes) if digests else b""
        ((_, mine),) = self._cuda.runs
        return self._copied(source.spans, Chunks(start, stop, chunk_bytes), mine, digests=digests)

    def digests_of(self, start: int, stop: int, chunk_bytes: int) -> bytes:
        ((_, mine),) = self._cuda.runs
        return self._copied(mine, Chunks(start, stop, chunk_bytes), None, digests=True)

    def _copied(self, source: Spans, chunks: Chunks, target: Spans | None, *, digests: bool) -> bytes:
        """The digests of these chunks, if they are wanted. They are copied where there is a target."""
        index, check = _index(self.device), self._cuda.spans
        try:
            found = cuda_device.device_digests(index, source, chunks, target, check=check, is_hashing=digests)
        except (NoRoom, RuntimeError) as error:
            raise TransferError(f"copying on {self.device} failed: {error}") from error
        made = bytearray(found)
        for first in chunks.short if digests else ():
            at = (first - chunks.start) // chunks.chunk_bytes * DIGEST_BYTES
            with self.views_to_read(first, min(first + chunks.chunk_bytes, chunks.stop)) as views:
                made[at : at + DIGEST_BYTES] = digest(views)
        return bytes(made)

    def land(self, source: Opened, batches: Batches, scatter: Scatter, *, digests: bool) -> Landing:
        assert isinstance(source, cuda_sharing.OpenedCuda)
        ((name, mine),) = self._cuda.spans()
        try:
            return cuda_device.CudaLanding(
                *(_index(name), self._cuda.spans, source.spans, mine, batches, scatter), is_hashing=digests
            )
        except (NoRoom, ValueError) as error:
            raise TransportMissing(f"tiles of another layout cannot land on {name}: {error}", hint="use tcp") from error
        except RuntimeError as error:
            raise TransferError(f"copying on {name} failed: {error}") from error

    # -- for host copies (pinned.py) -----------------------------------------------------------------------------------

    def registrar(self) -> CudaRegistrar:
        return CudaRegistrar(next(piece.device for piece in self._pieces if piece.device != "cpu"))

    def copy_to_host(self, start: int, stop: int, address: int) -> None:
        self._cuda.copy_directly(self._portions(start, stop), address, to_host=True)

    def copy_to_device(self, start: int, stop: int, address: int) -> None:
        self._cuda.copy_directly(self._portions(start, stop), address, to_host=False)


def _index(name: str) -> int:
    return torch.device(name).index or 0


def _side_by_side(spans: Spans, chunks: Sequence[int], chunk_bytes: int) -> Spans:
    """Where a stream of these chunks alone would lie: the device hashes them in one go, wherever they are."""
    starts, addresses, at = array("Q"), array("Q"), 0
    for chunk in chunks:
        start, stop = chunk * chunk_bytes, min((chunk + 1) * chunk_bytes, spans.stop)
        first, last = bisect_right(spans.starts, start) - 1, bisect_left(spans.starts, stop)
        starts.append(at)
        starts.extend(at + it - start for it in spans.starts[first + 1 : last])
        addresses.append(spans.addresses[first] + start - spans.starts[first])
        addresses.extend(spans.addresses[first + 1 : last])
        at += stop - start
    return Spans(starts, addresses, at)


def _hashed(name: str, spans: Spans, chunks: Chunks, check: Callable[[], object]) -> bytes:
    """The digests of these chunks, but for short ones at the end; none where the device can not."""
    reason = cuda_device.why_not(_index(name))
    if reason is None:
        try:
            made = cuda_device.device_digests(_index(name), spans, chunks, check=check)
            return made[: DIGEST_BYTES * (chunks.count - len(chunks.short))]
        except (NoRoom, RuntimeError) as error:
            reason = f"{type(error).__name__}: {error}"
    if reason not in _said:
        _said.add(reason)
        _log.warning("%s hashes nothing, so the host does, at a hundredth of the rate: %s", name, reason)
    return b""


_said: set[str] = set()  # why a device hashes nothing: each reason once


class CudaCopier:
    """Copies between pieces of device memory and pinned staging memory."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self._bytes = [_as_bytes(piece) if piece.device != "cpu" else None for piece in pieces]
        self._devices = [torch.device(piece.device) for piece in pieces]
        self._on_devices = [index for index, memory in enumerate(self._bytes) if memory is not None]
        self._memory = [memory for memory in self._bytes if memory is not None]
        self._addresses = [pieces[index].address for index in self._on_devices]
        self.runs = self._runs()  # neighbours in the stream that are on one device, and which
        self._streams = {
            (device, is_to_host): stream_of(device, "to host" if is_to_host else "to device")
            for device in dict.fromkeys(self._devices)
            if device.type != "cpu"
            for is_to_host in (True, False)
        }
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
        if list(map(torch._C.TensorBase.data_ptr, self._memory)) != self._addresses:  # a loop of C's: 0.07 us each
            for index in self._on_devices:
                self.memory_of(index)
        return self.runs

    def _runs(self) -> list[tuple[str, Spans]]:
        runs: list[tuple[str, list[int]]] = []
        for index in self._on_devices:
            piece = self._pieces[index]
            if runs and runs[-1][0] == piece.device and self._pieces[runs[-1][1][-1]].stop == piece.start:
                runs[-1][1].append(index)
            else:
                runs.append((piece.device, [index]))
        return [
            (
                name,
                Spans(
                    array("Q", [self._pieces[i].start for i in its]),
                    array("Q", [self._pieces[i].address for i in its]),
                    self._pieces[its[-1]].stop,
                ),
            )
            for name, its in runs
        ]

    def to_host(self, copies: Sequence[Copy]) -> None:
        """Device to pinned memory; returns when the bytes are there."""
        self._run(copies, is_to_host=True)

    def to_device(self, copies: Sequence[Copy]) -> None:
        """Pinned memory to device; returns when the bytes are there."""
        self._run(copies, is_to_host=False)

    def _run(self, copies: Sequence[Copy], *, is_to_host: bool) -> None:
        by_device: dict[torch.device, list[Copy]] = {}
        for one in copies:
            by_device.setdefault(self._devices[one.piece], []).append(one)
        try:
            with torch.no_grad(), beside_captures(), ExitStack() as in_flight:
                for device, its in by_device.items():
                    stream = self._streams[device, is_to_host]
                    with torch.cuda.stream(stream):
                        in_flight.callback(wait_for, stream)  # also on the way out of an error
                        self._launch(device, its, is_to_host=is_to_host)
        except RuntimeError as error:
            raise TransferError(f"copying between host and {', '.join(map(str, by_device))} failed: {error}") from error

    def copy_directly(self, portions: Sequence[tuple[int, int, int]], address: int, *, to_host: bool) -> None:
        """Between (piece, begin, end) and one range of host memory, which is registered. Raises `Freed`."""
        copies, size_bytes = list[Copy](), 0
        for index, begin, end in portions:
            piece, at = self._pieces[index], address + size_bytes
            if self._bytes[index] is not None:
                copies.append(Copy(index, begin, size_bytes, end - begin))
            else:
                first, last = piece.start + begin, piece.start + end
                theirs = Addresses.of_ranges([(piece.address + begin, end - begin)], first)
                ours = Addresses.of_ranges([(at, end - begin)], first)
                guarded.copy(*((theirs, ours) if to_host else (ours, theirs)), first, last)
            size_bytes += end - begin
        with_memory = shallow_copy(self)  # the same streams, and this memory in place of the ring's
        with_memory._staging = torch.frombuffer(host_view(address, size_bytes, None), dtype=torch.uint8)
        (with_memory.to_host if to_host else with_memory.to_device)(copies)

    def _launch(self, device: torch.device, copies: Sequence[Copy], *, is_to_host: bool) -> None:
        """Many go by way of one buffer on the device, if it has room for that.

        There `_foreach_copy_` takes a launch for some fifty pieces. Between host and device it copies one by one.
        """
        memory, buffer = self._parts(copies), None
        sizes = [one.size_bytes for one in copies]
        if len(copies) >= MANY_PIECES:
            with suppress(torch.OutOfMemoryError):
                buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        if buffer is None:
            for there, one in zip(memory, copies, strict=True):
                self._copy(there, one.at, one.size_bytes, is_to_host=is_to_host)
            return
        parts = buffer.split(sizes)  # type: ignore[no-untyped-call]
        if is_to_host:
            torch._foreach_copy_(parts, memory)
        done = 0
        for at, size_bytes in _joined(copies):
            self._copy(buffer[done : done + size_bytes], at, size_bytes, is_to_host=is_to_host)
            done += size_bytes
        if not is_to_host:
            torch._foreach_copy_(memory, parts)

    def _parts(self, copies: Sequence[Copy]) -> list[torch.Tensor]:
        """What is copied, on its device. Raises `Freed`."""
        wholes, known = [self._bytes[one.piece] for one in copies], [self._pieces[one.piece] for one in copies]
        if list(map(torch._C.TensorBase.data_ptr, wholes)) != [piece.address for piece in known]:  # type: ignore[arg-type]
            for one in copies:
                self.memory_of(one.piece)
        return [
            whole if one.size_bytes == piece.stop - piece.start else whole[one.inside : one.inside + one.size_bytes]  # type: ignore[index,misc]
            for one, piece, whole in zip(copies, known, wholes, strict=True)
        ]

    def _copy(self, there: torch.Tensor, at: int, size_bytes: int, *, is_to_host: bool) -> None:
        assert self._staging is not None, "copies before staging memory"
        here = self._staging[at : at + size_bytes]
        if is_to_host:
            here.copy_(there, non_blocking=True)
        else:
            there.copy_(here, non_blocking=True)


def _joined(copies: Sequence[Copy]) -> list[tuple[int, int]]:
    """Where in staging memory they begin, and how long they are: neighbours as one."""
    found: list[tuple[int, int]] = []
    for one in copies:
        at, size_bytes = found[-1] if found else (-1, 0)
        if at + size_bytes == one.at and found:
            found[-1] = at, size_bytes + one.size_bytes
        else:
            found.append((one.at, one.size_bytes))
    return found


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
