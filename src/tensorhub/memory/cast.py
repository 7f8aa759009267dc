"""Tensors that are published in another dtype: their masters, the cast buffer, and the casts."""

import ctypes
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ..protocol.errors import Closed, HostMemoryFull, UsageError
from ..transport.ranges import Addresses
from ..transport.sealed import Sealed
from ..transport.threads import beside_captures, scope
from .describe import INSTALL, Described, InPlace, dtype_name, loaded_torch, seen_torch, what_helps
from .host_memory import STEP_BYTES, Footing, size_text, untouched
from .streams import Freed, copy, core_count, host_view, in_parallel

if TYPE_CHECKING:
    import torch


# --- Casts of elements as torch does them, and which casts lose nothing.
#
# Without torch, numpy does the casts that it rounds as torch does. (It rounds float64 to float16 once, torch twice, and
# it has no bfloat16.) NaN stays NaN, with any payload.


Move = Callable[[memoryview, memoryview], None]  # all elements of the first, cast, into the second


class Form(NamedTuple):
    """What a dtype of floating-point numbers can say."""

    size_bytes: int
    bits: int  # of the significand
    lowest: int  # 2 to this is the least number above zero
    highest: int  # every number is below 2 to this
    is_finite: bool = False  # it has no infinity


FORMS = {
    "float64": Form(8, 53, -1074, 1024),
    "float32": Form(4, 24, -149, 128),
    "bfloat16": Form(2, 8, -133, 128),
    "float16": Form(2, 11, -24, 16),
    "float8_e4m3fn": Form(1, 4, -9, 9, is_finite=True),
    "float8_e5m2": Form(1, 3, -16, 16),
}
AS_TORCH = {  # what numpy casts as torch does
    ("float64", "float32"),
    ("float32", "float16"),
    ("float16", "float32"),
    ("float16", "float64"),
    ("float32", "float64"),
}


def keeps_all(source: str, target: str) -> bool:
    """True if `target` represents every number of `source`."""
    old, new = FORMS[source], FORMS[target]
    fits = old.bits <= new.bits and old.lowest >= new.lowest and old.highest <= new.highest
    return source == target or (fits and (old.is_finite or not new.is_finite))


def targets_of(described: list[Described], wanted: object) -> list[str]:
    """The dtype in which each tensor is to be published: its own, unless `wanted` names another.

    `wanted` is a dtype for all tensors of floating-point numbers, or a mapping from names to dtypes. Raises
    `UsageError` that names what is wrong.
    """
    if not isinstance(wanted, Mapping):
        name = _dtype_name(wanted)
        return [name if facts.dtype in FORMS else facts.dtype for facts in described]
    known = {facts.name: facts.dtype for facts in described}
    named: dict[str, str] = {}
    for tensor, dtype in wanted.items():
        if tensor not in known:
            text = f"dtype names tensor {tensor!r}, which is not among those to register; nothing was registered"
            raise UsageError(text, hint="use the names under which the tensors are registered")
        named[tensor] = _dtype_name(dtype)
        if known[tensor] not in FORMS and named[tensor] != known[tensor]:
            text = f"tensor {tensor!r} of {known[tensor]} cannot be cast to {named[tensor]}; nothing was registered"
            raise UsageError(text, hint="only floating-point numbers are cast")
    return [named.get(facts.name, facts.dtype) for facts in described]


def _dtype_name(dtype: object) -> str:
    name = dtype_name(dtype)
    if name not in FORMS:
        raise UsageError(f"dtype={dtype!r} is none that can be cast to", hint=f"one of {', '.join(FORMS)}")
    return name


def mover(source: str, target: str) -> Move:
    """Casts all elements of one piece of memory into another. Raises `UsageError` if nothing here can."""
    is_plain = (source, target) in AS_TORCH
    if is_plain and seen_torch() is None:
        return _by_numpy(source, target)
    if loaded_torch() is None:
        if is_plain:
            return _by_numpy(source, target)
        why = "is not installed" if what_helps() == INSTALL else "cannot be loaded"
        text = f"casting {source} to {target} needs torch, which {why}"
        plain = ", ".join(f"{old} to {new}" for old, new in sorted(AS_TORCH))
        raise UsageError(text, hint=f"{what_helps()}; numpy alone casts {plain} as torch does")
    return _by_torch(source, target)


def _by_numpy(source: str, target: str) -> Move:
    import numpy as np

    old, new = np.dtype(source), np.dtype(target)

    def move(theirs: memoryview, ours: memoryview) -> None:
        with np.errstate(all="ignore"):  # too large is infinite, as in torch
            np.copyto(np.frombuffer(ours, new), np.frombuffer(theirs, old), casting="unsafe")

    return move


def _by_torch(source: str, target: str) -> Move:
    import torch

    old, new = _torch_dtype(source), _torch_dtype(target)

    def move(theirs: memoryview, ours: memoryview) -> None:
        with torch.no_grad():
            torch.frombuffer(ours, dtype=new).copy_(torch.frombuffer(theirs, dtype=old))

    return move


def are_same(dtype: str, ours: memoryview, theirs: memoryview) -> bool:
    """True if all elements of that dtype are equal. NaN equals NaN, with any payload."""
    if ours == theirs:
        return True
    if seen_torch() is None:
        import numpy as np

        mine, yours = np.frombuffer(ours, np.dtype(dtype)), np.frombuffer(theirs, np.dtype(dtype))
        return bool(((mine == yours) | (np.isnan(mine) & np.isnan(yours))).all())
    import torch

    there = _torch_dtype(dtype)
    return is_same_tensor(torch.frombuffer(ours, dtype=there), torch.frombuffer(theirs, dtype=there))


def is_same_tensor(ours: "torch.Tensor", theirs: "torch.Tensor") -> bool:
    """Whether two tensors are equal. Both have one dtype, no wider than float64."""
    import torch

    with torch.no_grad():
        wide = torch.float64 if ours.dtype == torch.float64 else torch.float32  # not all devices compare all dtypes
        mine, yours = ours.to(wide), theirs.to(wide)
        return bool(((mine == yours) | (mine.isnan() & yours.isnan())).all())


def _torch_dtype(name: str) -> "torch.dtype":
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"this torch does not know {name}", hint="install a newer torch")
    return found


# --- A *block* is a range of masters and of the buffer of their casts. A *piece* of it is cast at once.


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
        """The names as errors show them."""
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


class Piece(NamedTuple):
    """Elements [first, last) of a block on the host, by way of a room in which nothing is freed."""

    block: Block
    first: int
    last: int
    kept_to: list[tuple[int, int]]  # what takes part
    masters: memoryview  # the room
    buffer: memoryview

    def copy(self, *, to_room: bool) -> None:
        """The masters into the room, or back."""
        size, block = FORMS[self.block.dtype].size_bytes, self.block
        here = ctypes.addressof(ctypes.c_char.from_buffer(self.masters))
        room = Addresses.of_ranges([(here, (self.last - self.first) * size)], self.first * size)
        theirs = Addresses.of_ranges([(block.address, block.elements * size)])
        source, target = (theirs, room) if to_room else (room, theirs)
        try:
            for start, stop in [(self.first, self.last)] if to_room else self.kept_to:
                copy(source, target, start * size, stop * size)
        except Freed as error:
            text = f"the memory of these tensors was freed while they were cast: {block.names}"
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
    """All of the block, or what is in these ranges of elements."""
    with on_its_stream(block.device):
        masters = flat_of(block)
        target, source = (memory, masters) if to_buffer else (masters, memory)
        for start, stop in [(0, block.elements)] if kept_to is None else kept_to:
            target[start:stop].copy_(source[start:stop], non_blocking=True)


@scope
def on_its_stream(device: str) -> Iterator[None]:
    """What the block launches runs on a stream of this library, beside captures. It is done when the block ends."""
    import torch

    from .cuda_device import stream_of, wait_for

    stream = stream_of(torch.device(device), "cast")
    with torch.no_grad(), beside_captures(), torch.cuda.stream(stream):
        try:
            yield
        finally:
            wait_for(stream)


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


# --- Tensors that are published in another dtype: the caller's *masters*, and the buffer in which they are published.
#
# 1. The buffer is registered, hashed, served and filled. Only `fill`, `give_back` and `changed` touch the masters, and
#    no reader may have the buffer during `fill`.
# 2. The buffer has the layout that the tensors would have in that dtype: masters that share memory share it there too.
# 3. On the host the buffer is memory that readers map. All of it is taken at registration, while there is room. Beside
#    masters on a device it lies on that device.
# 4. Where boxes say what takes part, the rest of the masters stays as it is.
# 5. Masters on the host are read and written by `streams.copy`: memory that was freed is an error that names it.


ALIGNMENT_BYTES = 16  # B: no element is wider
PART_ELEMENTS = 1 << 18  # copied at once: 1 MiB of float32, which a cache has when it is cast
RUN_ELEMENTS = 1 << 22  # for a thread, from one answer to the next
MAX_THREADS = 4  # more only fight for the memory bus
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
        """Give back only these bytes of the registered stream from now on. `offsets` are the tensors' in it."""
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
        """The buffer into the masters, exactly. Blocks. Raises `UsageError` and `Closed`, as `fill` does."""
        assert not self.why_not_back, "a loss that was not refused"
        self._run(is_over, self._give_back, to_buffer=False)

    def changed(self, is_over: Callable[[], bool] = lambda: False) -> list[str]:
        """Names of the masters that would be cast to something else than what is in the buffer. As `fill` otherwise."""
        found: dict[str, None] = {}

        def look(piece: Piece) -> None:
            scratch = memoryview(bytearray(len(piece.buffer)))
            piece.copy(to_room=True)
            self._there[piece.block.dtype, piece.block.target](piece.masters, scratch)
            found.update(dict.fromkeys(self._differing(piece, scratch)))

        self._run(is_over, look, to_buffer=None)
        with self._casting:
            for index, memory in self._devices.items():
                if is_over() or self._is_closed.is_set():
                    raise Closed("the cast was given up")
                with on_its_stream(self._blocks[index].device):
                    found.update(dict.fromkeys(self._differing_on_device(index, memory)))
        return [master.name for block in self._blocks for master in block.masters if master.name in found]

    def close(self) -> None:
        """Blocks until nothing is cast any more. Any thread may call it."""
        self._is_closed.set()
        with self._casting:
            pass

    def _run(self, is_over: Callable[[], bool], work: Callable[[Piece], None], *, to_buffer: bool | None) -> None:
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
        with self._casting:
            for device in devices:
                from .cuda import synchronize

                synchronize(device)
            for index, memory in self._devices.items() if to_buffer is not None else ():
                kept_to = None if to_buffer else self._kept_to.get(index)
                cast_on_device(self._blocks[index], memory, kept_to, to_buffer=bool(to_buffer))
            in_parallel(one, runs, threads=max(1, min(core_count(), MAX_THREADS, len(runs))), name="cast")

    def _piece(self, index: int, first: int, last: int, room: bytearray) -> Piece:
        block = self._blocks[index]
        old, new = FORMS[block.dtype].size_bytes, FORMS[block.target].size_bytes
        buffer = host_view(self._address + block.at + first * new, (last - first) * new, self._owner)
        kept_to = clipped(self._kept_to.get(index, [(first, last)]), first, last)
        return Piece(block, first, last, kept_to, memoryview(room)[: (last - first) * old], buffer)

    def _fill(self, piece: Piece) -> None:
        piece.copy(to_room=True)
        self._there[piece.block.dtype, piece.block.target](piece.masters, piece.buffer)

    def _give_back(self, piece: Piece) -> None:
        self._back[piece.block.dtype, piece.block.target](piece.buffer, piece.masters)
        piece.copy(to_room=False)

    def _differing(self, piece: Piece, cast: memoryview) -> Iterator[str]:
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
        at += -(-block.buffer_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES if block.device == "cpu" else 0
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
        address, owner = untouched(size_bytes, is_inherited=True)
    except MemoryError as error:
        raise HostMemoryFull(f"this process may have no {size_text(size_bytes)} for {what}", hint=HINT) from error
    for first in range(0, size_bytes, STEP_BYTES):
        length = min(STEP_BYTES, size_bytes - first)
        footing.step(length)
        if isinstance(owner, Sealed):
            owner.have_large_pages(first, first + length)
        ctypes.memset(address + first, 0, length)
    return address, owner
