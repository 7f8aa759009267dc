"""Tensors that are published in another dtype: the caller's *masters*, and the buffer in which they are published.

    registration = register(tensors, dtype="bfloat16")
    registration.casts.fill()        masters, rounded as torch does it, into the buffer: at every publish
    registration.casts.give_back()   what was read into the buffer, back into the masters: exactly, or not at all
    registration.casts.changed()     which masters are not what is in the buffer: a number is published once

Rules:
1. What is registered, hashed, served, filled and copied is the buffer; nobody but these calls touches the masters.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from ..core.errors import Closed, HostMemoryFull, UsageError
from ..transport.sealed import Sealed, Unmappable
from .blocks import Block, Piece, cast_on_device, clipped, flat_of, on_device, settle
from .casting import FORMS, are_same, is_same_tensor, keeps_all, mover, targets_of
from .describe import Described
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
        self._devices = {index: on_device(block) for index, block in enumerate(blocks) if block.device != "cpu"}

    def keep_to(self, ranges: Sequence[tuple[int, int]], offsets: Mapping[str, int]) -> None:
        """From now on only these bytes of the registered stream are given back. `offsets` are the tensors' in it."""
        for index, block in enumerate(self._blocks):
            old, new = FORMS[block.dtype].size_bytes, FORMS[block.target].size_bytes
            master = block.masters[0]
            base = offsets[master.name] - (master.address - block.address) // old * new
            near = clipped(ranges, base, base + block.buffer_bytes)
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
        self._run(is_over, self._fill, to_buffer=True)

    def give_back(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """The buffer into the masters, exactly. Blocks; raises as `fill` does."""
        assert not self.why_not_back, "a loss that was not refused"
        self._run(is_over, self._give_back, to_buffer=False)

    def changed(self, is_over: Callable[[], bool] = lambda: False) -> list[str]:
        """Names of the masters that would be cast to something else than what is in the buffer. As `fill` otherwise."""
        found: dict[str, None] = {}

        def look(piece: Piece) -> None:
            scratch = memoryview(bytearray(len(piece.buffer)))
            piece.read()
            self._there[piece.block.dtype, piece.block.target](piece.masters, scratch)
            found.update(dict.fromkeys(self._differing(piece, scratch)))

        self._run(is_over, look, to_buffer=None)
        with self._casting:
            for index, memory in self._devices.items():
                if is_over() or self._is_closed.is_set():
                    raise Closed("the cast was given up")
                found.update(dict.fromkeys(self._differing_on_device(index, memory)))
        return [master.name for block in self._blocks for master in block.masters if master.name in found]

    def close(self) -> None:
        """Blocks until nothing is cast any more. Any thread may call it."""
        self._is_closed.set()
        with self._casting:
            pass

    def _run(self, is_over: Callable[[], bool], work: "Callable[[Piece], None]", *, to_buffer: bool | None) -> None:
        """`to_buffer`: which way devices cast; None: not at all."""
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
                work(self._piece(index, first, min(first + PART_ELEMENTS, stop), rooms.mine))

        devices = sorted({block.device for block in self._blocks if block.device != "cpu"})
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        with self._casting:
            settle(devices)
            for index, memory in self._devices.items() if to_buffer is not None else ():
                kept_to = None if to_buffer else self._kept_to.get(index)
                cast_on_device(self._blocks[index], memory, kept_to, to_buffer=bool(to_buffer))
            in_parallel(one, runs, threads=max(1, min(cores, MOST_THREADS, len(runs))), name="cast")
            settle(devices)

    def _piece(self, index: int, first: int, last: int, room: bytearray) -> "Piece":
        block = self._blocks[index]
        new = FORMS[block.target].size_bytes
        buffer = host_view(self._address + block.at + first * new, (last - first) * new, self._owner)
        return Piece(block, first, last, clipped(self._kept_to.get(index, [(first, last)]), first, last), room, buffer)

    def _fill(self, piece: "Piece") -> None:
        piece.read()
        self._there[piece.block.dtype, piece.block.target](piece.masters, piece.buffer)

    def _give_back(self, piece: "Piece") -> None:
        self._back[piece.block.dtype, piece.block.target](piece.buffer, piece.masters)
        piece.write()

    def _differing(self, piece: "Piece", cast: memoryview) -> Iterator[str]:
        new, target = FORMS[piece.block.target].size_bytes, piece.block.target
        for name, start, stop in piece.block.parts_in(piece.kept_to):
            span = slice((start - piece.first) * new, (stop - piece.first) * new)
            if not are_same(target, cast[span], piece.buffer[span]):
                yield name

    def _differing_on_device(self, index: int, memory: "torch.Tensor") -> Iterator[str]:
        block = self._blocks[index]
        flat = flat_of(block)
        for first in range(0, block.elements, RUN_ELEMENTS):
            last = min(first + RUN_ELEMENTS, block.elements)
            kept_to = clipped(self._kept_to.get(index, [(first, last)]), first, last)
            for name, start, stop in block.parts_in(kept_to):
                if not is_same_tensor(flat[start:stop].detach().to(memory.dtype), memory[start:stop]):
                    yield name


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
        if isinstance(owner, Sealed):
            owner.have_large_pages(first, first + length)
        ctypes.memset(address + first, 0, length)
    return address, owner
