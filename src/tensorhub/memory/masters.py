"""Tensors that are published in another dtype: the caller's *masters*, and the buffer in which they are published.

    registration = register(tensors, dtype="bfloat16")
    registration.casts.fill()        masters, rounded as torch does it, into the buffer: at every publish
    registration.casts.give_back()   what was read into the buffer, back into the masters: exactly, or not at all

Rules:
1. What is registered, hashed, served, filled and copied is the buffer; nobody but these two calls touches the masters.
2. The buffer has the layout that the tensors would have in that dtype: masters that share memory share it there too. So
   whoever registers tensors of that dtype reads it.
3. On the host it is memory that readers of this host can map, and all of it is taken at registration, step by step,
   while there is room: to cast never ends the process. Beside masters on a device it lies on that device.
4. Where boxes say what takes part, all else of the masters stays as it is: to give back is to write what is in boxes.
5. Masters are read and written on the host by way of `guarded`: what is freed meanwhile is an error that names it.

Never: cast while somebody may read the buffer. Whoever calls `fill` sees to that.
"""

import ctypes
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ..core.errors import Closed, HostMemoryFull, UsageError
from ..transport.sealed import Sealed, Unmappable
from ..transport.vectors import Addresses
from .casting import FORMS, keeps_all, mover, targets_of
from .describe import Described
from .guarded import Freed, copy
from .host import host_view
from .in_place import InPlace
from .parallel import in_parallel
from .room import STEP_BYTES, Footing, size_text

if TYPE_CHECKING:
    import torch

ALIGNED = 16  # B: no element is wider
PART_ELEMENTS = 1 << 18  # copied at once: 1 MiB of float32, which a cache has when it is cast
RUN_ELEMENTS = 1 << 22  # for a thread, from one answer to the next
MOST_THREADS = 4  # more only fight for the memory bus
HINT = "name only some tensors in dtype=, give this process more memory, or register tensors of that dtype"


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


class Casts:
    """The masters of one registration, and their buffer."""

    def __init__(self, blocks: Sequence[Block], masters: InPlace) -> None:
        """Takes the memory. Raises `HostMemoryFull`, and `UsageError` for a cast that nothing here can do."""
        self._blocks = blocks
        self._masters = masters
        self._kept_to: dict[int, list[tuple[int, int]]] = {}  # of blocks with padding: elements that take part
        pairs = sorted({(block.dtype, block.target) for block in blocks})
        self._there = {(old, new): mover(old, new) for old, new in pairs}
        self._back = {(old, new): mover(new, old) for old, new in pairs}
        on_host = [block for block in blocks if block.device == "cpu"]
        self.host_bytes = max((block.at + block.buffer_bytes for block in on_host), default=0)
        self._address, self._owner = _memory(self.host_bytes)
        self._casting = threading.Lock()
        self._is_closed = threading.Event()
        self._devices = {index: _on_device(block) for index, block in enumerate(blocks) if block.device != "cpu"}

    def keep_to(self, ranges: Sequence[tuple[int, int]], offsets: Mapping[str, int]) -> None:
        """From now on only these bytes of the registered stream are given back. `offsets` are the tensors' in it."""
        for index, block in enumerate(self._blocks):
            old, new = FORMS[block.dtype].size_bytes, FORMS[block.target].size_bytes
            master = block.masters[0]
            base = offsets[master.name] - (master.address - block.address) // old * new
            near = _clipped(ranges, base, base + block.buffer_bytes)
            inside = [((first - base) // new, (last - base) // new) for first, last in near]
            if inside != [(0, block.elements)]:
                self._kept_to[index] = inside

    @property
    def why_not_back(self) -> str:
        """Which masters cannot take what is published of them without a loss; empty if all can."""
        for block in self._blocks:
            if not keeps_all(block.target, block.dtype):
                return f"tensor {block.names} of {block.dtype} cannot hold every number of {block.target}"
        return ""

    def moved(self) -> list[str]:
        """Names of masters that no longer are where they were registered."""
        return self._masters.moved()

    def published(self, index: int) -> list[Described]:
        """The tensors of a block as they are published."""
        block, memory = self._blocks[index], self._devices.get(index)
        if memory is None:
            address, storage, owner = self._address + block.at, self._address, self._owner
        else:
            address, storage, owner = memory.data_ptr(), memory.untyped_storage().data_ptr(), memory
        old, new = FORMS[block.dtype].size_bytes, FORMS[block.target].size_bytes
        return [
            msgspec.structs.replace(
                master,
                dtype=block.target,
                address=address + (master.address - block.address) // old * new,
                size_bytes=master.size_bytes // old * new,
                storage=storage,
                owner=owner,
            )
            for master in block.masters
        ]

    def fill(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Masters into the buffer. Blocks. Raises `UsageError` naming what was freed, `Closed` once it is over."""
        self._run(is_over, to_buffer=True)

    def give_back(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """The buffer into the masters, exactly. Blocks; raises as `fill` does."""
        assert not self.why_not_back, "a loss that was not refused"
        self._run(is_over, to_buffer=False)

    def close(self) -> None:
        """Blocks until nothing is cast any more. Any thread may call it."""
        self._is_closed.set()
        with self._casting:
            pass

    def _run(self, is_over: Callable[[], bool], *, to_buffer: bool) -> None:
        runs = [
            (index, start, min(start + RUN_ELEMENTS, block.elements))
            for index, block in enumerate(self._blocks)
            if block.device == "cpu"
            for start in range(0, block.elements, RUN_ELEMENTS)
        ]
        rooms = threading.local()

        def one(run: tuple[int, int, int]) -> None:
            if not hasattr(rooms, "mine"):
                rooms.mine = bytearray(PART_ELEMENTS * max(form.size_bytes for form in FORMS.values()))
            index, start, stop = run
            for first in range(start, stop, PART_ELEMENTS):
                if is_over() or self._is_closed.is_set():
                    raise Closed("the cast was given up")
                self._cast(index, first, min(first + PART_ELEMENTS, stop), rooms.mine, to_buffer=to_buffer)

        devices = sorted({block.device for block in self._blocks if block.device != "cpu"})
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        with self._casting:
            _settle(devices)
            for index, memory in self._devices.items():
                kept_to = None if to_buffer else self._kept_to.get(index)
                _cast_on_device(self._blocks[index], memory, kept_to, to_buffer=to_buffer)
            in_parallel(one, runs, threads=max(1, min(cores, MOST_THREADS, len(runs))), name="cast")
            _settle(devices)

    def _cast(self, index: int, first: int, last: int, room: bytearray, *, to_buffer: bool) -> None:
        """Elements [first, last) of a block on the host, by way of a room in which nothing is freed."""
        block = self._blocks[index]
        old, new = FORMS[block.dtype].size_bytes, FORMS[block.target].size_bytes
        there = Addresses.of_ranges([(block.address, block.elements * old)])
        here, view = ctypes.addressof(ctypes.c_char.from_buffer(room)), memoryview(room)
        buffer = host_view(self._address + block.at + first * new, (last - first) * new, self._owner)
        move = (self._there if to_buffer else self._back)[block.dtype, block.target]
        ours = Addresses.of_ranges([(here, (last - first) * old)], first * old)
        masters = view[: (last - first) * old]
        try:
            if to_buffer:
                copy(there, ours, first * old, last * old)
                move(masters, buffer)
            else:
                move(buffer, masters)
                for start, stop in _clipped(self._kept_to.get(index, [(first, last)]), first, last):
                    copy(ours, there, start * old, stop * old)
        except Freed as error:
            text = f"the memory of these tensors was freed while they were cast: {block.names}"
            raise UsageError(text, hint="register() again what was given other memory") from error


def _clipped(ranges: Sequence[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """What of these sorted ranges is in [first, last)."""
    found = []
    for at in range(max(0, bisect_right(ranges, (first, first)) - 1), len(ranges)):
        start, stop = ranges[at]
        if start >= last:
            break
        if max(start, first) < min(stop, last):
            found.append((max(start, first), min(stop, last)))
    return found


# --- making them ------------------------------------------------------------------------------------------------------


def cast(
    described: list[Described], tensors: Sequence[object], wanted: object, groups: Sequence[Sequence[int]]
) -> tuple[list[Described], Casts | None]:
    """The tensors as they are to be published; those that are in other dtypes than the caller's lie in a buffer.

    `groups` are those that share memory. Raises `UsageError` that names the tensor, and `HostMemoryFull`.
    """
    targets = targets_of(described, wanted)
    blocks: list[Block] = []
    members: list[Sequence[int]] = []
    at = 0
    for group in groups:
        changed = [index for index in group if described[index].dtype != targets[index]]
        if not changed:
            continue
        _check_group([described[index] for index in group], [targets[index] for index in group])
        block = _block([described[index] for index in group], targets[changed[0]], at)
        blocks.append(block)
        members.append(group)
        at += -(-block.buffer_bytes // ALIGNED) * ALIGNED if block.device == "cpu" else 0
    published = [
        msgspec.structs.replace(facts, dtype=target) if not facts.size_bytes else facts
        for facts, target in zip(described, targets, strict=True)
    ]
    if not blocks:
        return published, None
    cast_ones = [index for group in members for index in group]
    masters = InPlace([described[index] for index in cast_ones], [tensors[index] for index in cast_ones])
    casts = Casts(blocks, masters)
    for number, group in enumerate(members):
        for index, facts in zip(group, casts.published(number), strict=True):
            published[index] = facts
    return published, casts


def _check_group(masters: Sequence[Described], targets: Sequence[str]) -> None:
    """Raises `UsageError` unless those that share memory are cast alike, element by element."""
    first = masters[0]
    size = FORMS[first.dtype].size_bytes if first.dtype in FORMS else 1
    start = min(master.address for master in masters)
    for master, target in zip(masters, targets, strict=True):
        if (master.dtype, target) != (first.dtype, targets[0]) or (master.address - start) % size:
            one, other = (
                f"{first.name!r} ({first.dtype} to {targets[0]})",
                f"{master.name!r} ({master.dtype} to {target})",
            )
            text = f"tensors {one} and {other} share memory, and cannot be cast apart; nothing was registered"
            raise UsageError(text, hint="give both the same dtype, or register copies")


def _block(masters: Sequence[Described], target: str, at: int) -> Block:
    start = min(master.address for master in masters)
    stop = max(master.address + master.size_bytes for master in masters)
    dtype = masters[0].dtype
    return Block(tuple(masters), start, (stop - start) // FORMS[dtype].size_bytes, dtype, target, at)


def _memory(size_bytes: int) -> tuple[int, object]:
    """All of it touched, while there was room. Raises `HostMemoryFull`."""
    if not size_bytes:
        return 0, None
    what = "the buffer in which tensors are published in another dtype"
    footing = Footing(size_bytes, what=what, hint=HINT)
    try:
        try:
            owner: object = Sealed(size_bytes, is_inherited=True)
            address = owner.address  # type: ignore[attr-defined]
        except Unmappable:
            import numpy as np  # which nothing else here needs

            owner = np.empty(size_bytes, np.uint8)
            address = int(owner.ctypes.data)
    except MemoryError as error:
        raise HostMemoryFull(f"this process may have no {size_text(size_bytes)} for {what}", hint=HINT) from error
    for first in range(0, size_bytes, STEP_BYTES):
        length = min(STEP_BYTES, size_bytes - first)
        footing.step(length)
        ctypes.memset(address + first, 0, length)
    return address, owner


# --- on a device ------------------------------------------------------------------------------------------------------


def _on_device(block: Block) -> "torch.Tensor":
    import torch

    try:
        return torch.empty(block.elements, dtype=getattr(torch, block.target), device=block.device)
    except torch.OutOfMemoryError as error:
        text = f"{block.device} has no {size_text(block.buffer_bytes)} for tensor {block.names} in {block.target}"
        raise UsageError(text, hint="name fewer tensors in dtype=, or register tensors of that dtype") from error


def _cast_on_device(
    block: Block, memory: "torch.Tensor", kept_to: Sequence[tuple[int, int]] | None, *, to_buffer: bool
) -> None:
    import torch

    with torch.no_grad():
        masters = _flat(block)
        target, source = (memory, masters) if to_buffer else (masters, memory)
        for start, stop in [(0, block.elements)] if kept_to is None else kept_to:
            target[start:stop].copy_(source[start:stop], non_blocking=True)


def _flat(block: Block) -> "torch.Tensor":
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


def _settle(devices: Sequence[str]) -> None:
    """Wait until all that was launched so far is done."""
    for device in devices:
        from .cuda import synchronize

        synchronize(device)
