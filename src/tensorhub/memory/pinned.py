"""Host memory that is registered with CUDA: devices copy to and from it at the bus' rate.

Rules:
1. Memory is registered in steps. Each step is touched first, so the driver's own lock is held for milliseconds only.
2. One limit holds for the whole process. A host copy that does not fit is pageable: it works, at a seventh of the rate.
3. A copy between device and host memory stays within one step: CUDA refuses to cross from one registration to the next.
4. Memory stays registered as long as its `PinnedMemory` is known, and every copy under way knows it. It is unregistered
   before it is given back.

Never: register memory that other workers have mapped for good, or keep tensors alive.
"""

import ctypes
import logging
import os
import threading
import weakref
from collections.abc import Iterator
from functools import cache
from typing import Any, Protocol, runtime_checkable

from ..transport.captures import beside_captures
from ..transport.sealed import Sealed
from .room import size_text

_log = logging.getLogger(__name__)

PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of this process
POPULATE_WRITE = 23  # for madvise, since Linux 5.14: touch without a change of the content
STEP_BYTES = 32 << 20  # 0.6 ms of a bus of 51 GiB/s, 3 ms of hashing, 2 ms of registering
# A process with one of eight devices and two copies of 80 GiB on a host of 2 TiB needs a twelfth. The rest of the
# host's memory stays movable. What is pinned belongs to host copies, so `host_bytes` and `room` limit it too.
SHARE_OF_HOST = 4


class Registrar(Protocol):
    """Registers host memory with a device's driver. Knows no tensors."""

    def register(self, address: int, size_bytes: int) -> None:
        """Raises `RuntimeError`."""
        ...

    def unregister(self, address: int) -> None:
        """What was registered there. Raises `RuntimeError`."""
        ...


@runtime_checkable
class Direct(Protocol):
    """A stream on devices that copy directly to and from registered host memory."""

    @property
    def size_bytes(self) -> int: ...

    def registrar(self) -> Registrar: ...

    def copy_to_host(self, start: int, stop: int, address: int) -> None:
        """Bytes [start, stop) of the stream to that address. Returns when they are there.

        Raises `Freed`, and `TransferError`.
        """
        ...

    def copy_to_device(self, start: int, stop: int, address: int) -> None:
        """The other way round."""
        ...


class CudaRegistrar:
    """Registers with CUDA, by torch."""

    def __init__(self, device: str) -> None:
        self._device = device

    def register(self, address: int, size_bytes: int) -> None:
        import torch

        with beside_captures(), torch.cuda.device(self._device):
            _check(_cudart().cudaHostRegister(address, size_bytes, PORTABLE))

    def unregister(self, address: int) -> None:
        import torch

        with beside_captures(), torch.cuda.device(self._device):
            _check(_cudart().cudaHostUnregister(address))


class PinnedMemory:
    """The memory of one host copy, as far as it is registered."""

    def __init__(self, memory: Sealed, registrar: Registrar) -> None:
        self.address, self.size_bytes = memory.address, memory.size_bytes
        self.why_not = ""  # why no more of it can be registered
        self._registrar = registrar
        self._registered = dict[int, int]()  # sizes by address
        _pinned[memory.address] = memory.size_bytes, self._registered
        self._lock = threading.Lock()
        ending = weakref.finalize(self, _unregister, registrar, self._registered, memory, os.getpid())
        ending.atexit = False  # threads that copy may outlive the interpreter

    def missing(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The steps with these bytes that are not registered yet."""
        for at in range(start - start % STEP_BYTES, stop, STEP_BYTES):
            if self.address + at not in self._registered:
                yield at, min(at + STEP_BYTES, self.size_bytes)

    def register(self, start: int, stop: int) -> bool:
        """Touch and register one step. Returns whether it is registered now."""
        address, size_bytes = self.address + start, stop - start
        _populate(address, size_bytes)
        with self._lock:
            if address not in self._registered and not self.why_not:
                try:
                    self._registrar.register(address, size_bytes)
                except RuntimeError as error:
                    self.why_not = f"{size_text(size_bytes)} of host memory could not be registered: {error}"
                else:
                    self._registered[address] = size_bytes
        return address in self._registered


_pinned: dict[int, tuple[int, dict[int, int]]] = {}  # by address: what counts, and what is registered of it
_reserving = threading.Lock()


def reserve(memory: Sealed, registrar: Registrar, limit_bytes: int | None) -> PinnedMemory | str:
    """Memory that may be registered; or the reason why it may not."""
    if memory.is_frozen:
        return "other workers have mapped this memory for good"
    limit_bytes = default_limit() if limit_bytes is None else limit_bytes
    with _reserving:
        taken_bytes = sum(size_bytes for size_bytes, _ in _pinned.copy().values())
        if taken_bytes + memory.size_bytes > limit_bytes:
            text = f"{size_text(memory.size_bytes)} more than {size_text(taken_bytes)} would be beyond the limit"
            return f"{text} of {size_text(limit_bytes)} on pinned memory (TENSORHUB_PINNED_BYTES)"
        return PinnedMemory(memory, registrar)


def pinned_bytes() -> int:
    """What this process has registered now."""
    return sum(sum(registered.copy().values()) for _, registered in _pinned.copy().values())


def default_limit() -> int:
    """A quarter of the host's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // SHARE_OF_HOST


def within_steps(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """These bytes in parts, none of which crosses the end of a step."""
    while start < stop:
        end = min(stop, start - start % STEP_BYTES + STEP_BYTES)
        yield start, end
        start = end


def _unregister(registrar: Registrar, registered: dict[int, int], memory: Sealed, owner: int) -> None:
    """`memory` is known here, so it is given back afterwards. Takes no lock: any thread may run this at any point."""
    if os.getpid() != owner:
        return  # a forked child has no such registration
    for address in registered:
        try:
            registrar.unregister(address)
        except RuntimeError as error:
            _log.warning("host memory could not be unregistered: %s", error)
    _pinned.pop(memory.address, None)


def _populate(address: int, size_bytes: int) -> None:
    """Have the pages now. Where the kernel does not know how, the registration has them."""
    _libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), ctypes.c_int(POPULATE_WRITE))


def _check(result: Any) -> None:
    """Raises `RuntimeError` unless it is cudaSuccess."""
    if int(result):
        raise RuntimeError(f"{_cudart().cudaGetErrorString(result)} (CUDA error {int(result)})")


def _cudart() -> Any:
    import torch

    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)  # it lets go of the interpreter
