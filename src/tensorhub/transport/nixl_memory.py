"""Where bytes lie, as NIXL is told: places on the host and on CUDA devices, cut into descriptors; and seals.

A place is (device, address, length). A stream has places if its bytes have addresses in this process: on the host
(`ranges`) or on devices too (`places`). Both ends of a read cut the stream at the same bytes, because NIXL copies
descriptor by descriptor: wherever either end's memory is interrupted, and at every chunk's border.

A `Page` holds the seals of all exports, each 16 random bytes that are zeroed when its export ends. A reader reads the
seal *after* the bytes, by the same way: if it is still there, the bytes were the export's when they were read. So a
source need not call its readers back, which it could not.
"""

import ctypes
import secrets
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from ..core.errors import UsageError
from .base import ByteStream
from .located import Located
from .nixl_path import HOST

DESCRIPTOR_BYTES = 4 << 20  # measured: 4 MiB 12.6 GiB/s, 1 GiB 9.9, 64 KiB 6.9
SEAL_BYTES = 16
_SEALS = 4096  # exports at one time; there are a handful


class Place(NamedTuple):
    """A range of memory."""

    device: int  # HOST, or 1 + the number of the CUDA device
    address: int
    size_bytes: int


@runtime_checkable
class Placed(Protocol):
    """A stream whose bytes have addresses that this process or its devices know."""

    def places(self, start: int, stop: int) -> list[tuple[str, int, int]]:
        """Bytes [start, stop) as (device, address, length), in order; a device is "cpu" or "cuda:0"."""
        ...


def places_of(stream: ByteStream) -> list[Place] | None:
    """All of a stream's memory, neighbours on the host joined; None for a stream without addresses."""
    if isinstance(stream, Placed):
        found = [Place(device_code(name), address, size) for name, address, size in stream.places(0, stream.size_bytes)]
    elif isinstance(stream, Located):
        found = [Place(HOST, address, size) for address, size in stream.ranges(0, stream.size_bytes)]
    else:
        return None
    joined: list[Place] = []
    for place in found:
        last = joined[-1] if joined else None
        if last is not None and place.device == last.device == HOST and last.address + last.size_bytes == place.address:
            joined[-1] = Place(HOST, last.address, last.size_bytes + place.size_bytes)
        elif place.size_bytes:
            joined.append(place)
    return joined


def device_code(name: str) -> int:
    """ "cpu" is 0, "cuda:3" is 4."""
    kind, _, number = name.partition(":")
    if kind == "cpu":
        return HOST
    if kind != "cuda":
        raise ValueError(f"memory on {name!r} is unknown to this transport")
    return 1 + int(number or 0)


def cut(ours: Sequence[Place], theirs: Sequence[Place], chunk_bytes: int) -> Iterator[tuple[int, Place, Place]]:
    """(chunk, our place, their place) of every descriptor, in stream order; the two places are of one length."""
    at = our_index = their_index = our_done = their_done = 0
    while our_index < len(ours) and their_index < len(theirs):
        our, their = ours[our_index], theirs[their_index]
        size = min(
            our.size_bytes - our_done,
            their.size_bytes - their_done,
            chunk_bytes - at % chunk_bytes,
            DESCRIPTOR_BYTES,
        )
        yield (
            at // chunk_bytes,
            Place(our.device, our.address + our_done, size),
            Place(their.device, their.address + their_done, size),
        )
        at, our_done, their_done = at + size, our_done + size, their_done + size
        if our_done == our.size_bytes:
            our_index, our_done = our_index + 1, 0
        if their_done == their.size_bytes:
            their_index, their_done = their_index + 1, 0


def do_overlap(some: Sequence[Place], others: Sequence[Place]) -> bool:
    """Whether any byte is in both. Those of one side may overlap among themselves."""
    before = {False: (-1, 0), True: (-1, 0)}  # of each side, the device and the end of what reaches farthest so far
    every = [(place, False) for place in some] + [(place, True) for place in others]
    for place, is_other in sorted(every):
        device, end = before[not is_other]
        if device == place.device and place.address < end:
            return True
        before[is_other] = max(before[is_other], (place.device, place.address + place.size_bytes))
    return False


class Page:
    """Host memory in slots of 16 bytes, each lent to one owner."""

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(_SEALS * SEAL_BYTES)
        self.place = Place(HOST, ctypes.addressof(self._memory), _SEALS * SEAL_BYTES)
        self._free = list(range(_SEALS))
        self._lock = threading.Lock()

    def take(self) -> int:
        """A slot's address."""
        with self._lock:
            if not self._free:
                raise UsageError(f"all {_SEALS} seals of this worker's nixl transport are in use")
            return self.place.address + self._free.pop() * SEAL_BYTES

    def give(self, address: int) -> None:
        """The slot may be lent again: nobody writes to it any more."""
        with self._lock:
            self._free.append((address - self.place.address) // SEAL_BYTES)


class Seal:
    """An export's word that it lasts."""

    def __init__(self, page: Page) -> None:
        self._is_broken = True
        self._page = page
        self.address = page.take()
        self.value = secrets.token_bytes(SEAL_BYTES)
        ctypes.memmove(self.address, self.value, SEAL_BYTES)
        self._is_broken = False

    def break_(self) -> None:
        """From now on nothing that anybody reads of this export counts. The next seal here will have another value."""
        if not self._is_broken:
            self._is_broken = True
            ctypes.memset(self.address, 0, SEAL_BYTES)
            self._page.give(self.address)

    def __del__(self) -> None:
        self.break_()  # of an export that was refused
