"""A *block* is a range of masters and of the buffer of their casts; a *piece* of it is cast at once.

It must never: read or write masters on the host but by way of `guarded`, which says so where they were freed.
"""

import ctypes
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..core.errors import UsageError
from ..transport.vectors import Addresses
from .casting import FORMS
from .describe import Described
from .guarded import Freed, copy
from .room import size_text

if TYPE_CHECKING:
    import torch


class Block(NamedTuple):
    """Masters that share memory, or one: a range of theirs, and one of the buffer."""

    masters: tuple[Described, ...]
    address: int  # of the first byte of the masters
    elements: int
    dtype: str
    target: str
    at: int  # where it begins in the buffer, on the host

    @property
    def device(self) -> str:
        return self.masters[0].device

    @property
    def names(self) -> str:
        """As errors show them."""
        shown = ", ".join(repr(master.name) for master in self.masters[:3])
        return shown + (f" and {len(self.masters) - 3} more" if len(self.masters) > 3 else "")

    @property
    def buffer_bytes(self) -> int:
        return self.elements * FORMS[self.target].size_bytes

    def parts_in(self, ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[str, int, int]]:
        """What of each master is in these ranges of elements: its name, from where, to where."""
        size = FORMS[self.dtype].size_bytes
        for master in self.masters:
            begin = (master.address - self.address) // size
            end = begin + master.size_bytes // size
            for first, last in ranges:
                if max(first, begin) < min(last, end):
                    yield master.name, max(first, begin), min(last, end)


class Piece:
    """Elements [first, last) of a block on the host, by way of a room in which nothing is freed."""

    def __init__(
        self,
        block: Block,
        first: int,
        last: int,
        kept_to: list[tuple[int, int]],
        room: bytearray,
        buffer: memoryview,
    ) -> None:
        self.block, self.first, self.last = block, first, last
        self.kept_to = kept_to  # what takes part
        self.buffer = buffer
        self._size = FORMS[block.dtype].size_bytes
        self.masters = memoryview(room)[: (last - first) * self._size]
        here = ctypes.addressof(ctypes.c_char.from_buffer(room))
        self._ours = Addresses.of_ranges([(here, (last - first) * self._size)], first * self._size)
        self._theirs = Addresses.of_ranges([(block.address, block.elements * self._size)])

    def read(self) -> None:
        """The masters into the room."""
        self._copy(self._theirs, self._ours, [(self.first, self.last)])

    def write(self) -> None:
        """The room into the masters."""
        self._copy(self._ours, self._theirs, self.kept_to)

    def _copy(self, source: Addresses, target: Addresses, ranges: Sequence[tuple[int, int]]) -> None:
        try:
            for start, stop in ranges:
                copy(source, target, start * self._size, stop * self._size)
        except Freed as error:
            text = f"the memory of these tensors was freed while they were cast: {self.block.names}"
            raise UsageError(text, hint="register() again what was given other memory") from error


def clipped(ranges: Sequence[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """What of these sorted ranges is in [first, last)."""
    found = []
    for at in range(max(0, bisect_right(ranges, (first, first)) - 1), len(ranges)):
        start, stop = ranges[at]
        if start >= last:
            break
        if max(start, first) < min(stop, last):
            found.append((max(start, first), min(stop, last)))
    return found


# --- on a device ------------------------------------------------------------------------------------------------------


def on_device(block: Block) -> "torch.Tensor":
    """Its part of the buffer, beside its masters. Raises `UsageError` where there is no room."""
    import torch

    try:
        return torch.empty(block.elements, dtype=getattr(torch, block.target), device=block.device)
    except torch.OutOfMemoryError as error:
        text = f"{block.device} has no {size_text(block.buffer_bytes)} for tensor {block.names} in {block.target}"
        raise UsageError(text, hint="name fewer tensors in dtype=, or register tensors of that dtype") from error


def cast_on_device(
    block: Block, memory: "torch.Tensor", kept_to: Sequence[tuple[int, int]] | None, *, to_buffer: bool
) -> None:
    """All of the block, or what is in these ranges of elements; it goes on when this has returned."""
    import torch

    with torch.no_grad():
        masters = flat_of(block)
        target, source = (memory, masters) if to_buffer else (masters, memory)
        for start, stop in [(0, block.elements)] if kept_to is None else kept_to:
            target[start:stop].copy_(source[start:stop], non_blocking=True)


def flat_of(block: Block) -> "torch.Tensor":
    """The block's memory as one tensor. Raises `UsageError` if its storage was freed."""
    import torch

    size_bytes = block.elements * FORMS[block.dtype].size_bytes
    for master in block.masters:
        assert isinstance(master.owner, torch.Tensor), "device memory is owned by tensors"
        storage = master.owner.untyped_storage()
        inside = block.address - storage.data_ptr()
        if inside >= 0 and inside + size_bytes <= storage.nbytes():
            empty = torch.empty(0, dtype=getattr(torch, block.dtype), device=block.device)
            at = inside // FORMS[block.dtype].size_bytes
            return empty.set_(storage, at, (block.elements,), (1,))
    text = f"the memory of these tensors on {block.device} was freed before they were cast: {block.names}"
    raise UsageError(text, hint="register() again what was given other memory")


def settle(devices: Sequence[str]) -> None:
    """Wait until all that was launched so far is done."""
    for device in devices:
        from .cuda import synchronize

        synchronize(device)
