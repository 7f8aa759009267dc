"""Host memory: how much of it may be taken, tensors that readers can map, and tensors for a known layout."""

import contextlib
import logging
import math
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from numbers import Integral
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from ..protocol.errors import HostMemoryFull, Unavailable, UsageError
from ..protocol.manifest import Layout, TensorSpec, item_bytes
from ..transport.sealed import HUGE_BYTES, Sealed, Unmappable
from .describe import NUMPY_KINDS, dtype_name, loaded_torch, outside_modes, seen_torch, what_helps
from .streams import host_view

_log = logging.getLogger(__name__)

MIB = 1 << 20
STEP_BYTES = (
    64 * MIB
)  # to ask takes 1 ms, to touch so much 20: and by so much each of several that ask at once may be wrong
MAX_COPIES = 2  # the newest version, and the newest that is known to be safe outside its publisher
SPARE_BYTES = 96 * MIB  # for all else that this process and its neighbours do meanwhile
HINT = (
    "give it more memory, let another reliable replica hold the version too, or let versions go: serve with "
    "TENSORHUB_DEFAULT_RETAIN=0 and TENSORHUB_KEEP_ESTABLISHED=no"
)


class Room(NamedTuple):
    """What may still be taken, and what says so."""

    left_bytes: int
    limit: str


def room(proc: Path = Path("/proc")) -> Room | None:
    """The tightest limit of this process; None where nothing can be learnt."""
    found = [*_host(proc), *_cgroups(proc)]
    return min(found) if found else None


def size_text(size_bytes: int) -> str:
    """Formats a size for people."""
    if size_bytes < 10 * MIB:
        return f"{size_bytes / MIB:.1f} MiB" if size_bytes >= MIB else f"{size_bytes} B"
    return f"{size_bytes / (1 << 30):.1f} GiB" if size_bytes >= 1 << 30 else f"{size_bytes / MIB:.0f} MiB"


def copies_that_fit(size_bytes: int, found: Room | None, most: int = MAX_COPIES) -> int:
    """How many host copies of that size there is room for, where no limit is set."""
    if found is None or not size_bytes:
        return most
    return max(0, min(most, (found.left_bytes - SPARE_BYTES) // size_bytes))


class Footing:
    """Memory that was allocated and is touched part by part: each part only while there is room for it."""

    def __init__(
        self,
        size_bytes: int,
        look: Callable[[], Room | None] = room,
        spare_bytes: int = SPARE_BYTES,
        *,
        what: str = "a host copy",
        hint: str = HINT,
    ) -> None:
        """Raises `HostMemoryFull` if all of it does not fit now, or if less than `spare_bytes` would be left.

        `what` and `hint` are for that error.
        """
        self.is_short = False  # once there was no room, there is none for this
        self._left_bytes = size_bytes  # not touched yet
        self._granted_bytes = 0
        self._look = look
        self._spare_bytes = spare_bytes
        self._what, self._hint = what, hint
        self._lock = Lock()
        self._check(size_bytes)

    def step(self, size_bytes: int) -> None:
        """Call this before bytes are touched. Raises `HostMemoryFull` if other processes have taken the memory."""
        if not self._left_bytes and not self.is_short:
            return
        with self._lock:
            if self.is_short:
                raise HostMemoryFull(f"there was no room for all of {self._what}", hint=self._hint)
            if self._granted_bytes < size_bytes and self._left_bytes:
                wanted = min(self._left_bytes, max(STEP_BYTES, size_bytes))
                self._check(wanted)
                self._granted_bytes += wanted
                self._left_bytes -= wanted
            self._granted_bytes -= min(size_bytes, self._granted_bytes)

    def _check(self, size_bytes: int) -> None:
        found = self._look()
        if found is not None and found.left_bytes < size_bytes + self._spare_bytes:
            self.is_short = True
            needs, leaves = size_text(size_bytes), size_text(found.left_bytes)
            text = f"{self._what} needs {needs} more, and {found.limit} leaves {leaves}"
            raise HostMemoryFull(f"{text} ({size_text(self._spare_bytes)} of that for all else)", hint=self._hint)


def untouched(size_bytes: int, *, is_inherited: bool = False, may_freeze: bool = False) -> tuple[int, object]:
    """Memory that readers can map, where the kernel has such: its address and its owner. Raises `MemoryError`."""
    try:
        found = Sealed(size_bytes, is_inherited=is_inherited, may_freeze=may_freeze)
    except Unmappable:
        import numpy as np  # which nothing else here needs

        memory = np.empty(size_bytes, np.uint8)
        return int(memory.ctypes.data), memory
    return found.address, found


def map_file(path: Path, *, is_writable: bool) -> tuple[int, object]:
    """The bytes of a file as memory: their address and their owner. What is written there is written to the file.

    The kernel may drop or write back its pages, so that a large file takes no more memory than there is. Raises
    `OSError`, and `ValueError` for an empty file.
    """
    import numpy as np  # which nothing else here needs

    with path.open("r+b" if is_writable else "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0))
    array = np.frombuffer(memory, np.uint8)
    return int(array.__array_interface__["data"][0]), array


def _host(proc: Path) -> Iterator[Room]:
    with suppress(OSError, ValueError, IndexError):
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield Room(int(line.split()[1]) << 10, "this host's memory")


def _cgroups(proc: Path) -> Iterator[Room]:
    """Of every cgroup that limits our memory, of whichever version."""
    with suppress(OSError, ValueError, IndexError):
        ours = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
        for line in (proc / "self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            kind, _, options = after.split(" ", 2)
            root, mount = before.split()[3:5]
            for _, controllers, path in ours:
                if kind == "cgroup2" and not controllers:
                    yield from _each(Path(mount), root, path, _version_2)
                elif kind == "cgroup" and "memory" in controllers.split(",") and "memory" in options.split(","):
                    yield from _each(Path(mount), root, path, _version_1)


def _each(mount: Path, root: str, path: str, limits: Callable[[Path], Iterator[Room]]) -> Iterator[Room]:
    """From our cgroup up to the highest that is seen from here. In a container the mount may be our own cgroup."""
    inside = Path(path).relative_to(root) if Path(path).is_relative_to(root) else Path()
    folder = mount / str(inside).lstrip("/")
    if ".." in folder.parts or not folder.is_dir():
        folder = mount
    yield from limits(folder)
    while folder != mount:
        folder = folder.parent
        yield from limits(folder)


def _version_2(folder: Path) -> Iterator[Room]:
    for name in ("memory.max", "memory.high"):
        with suppress(OSError, ValueError):
            limit = int((folder / name).read_text())  # "max" is no number, and no limit
            used = int((folder / "memory.current").read_text()) - _given_back(folder, "")
            yield Room(max(0, limit - used), f"{name} = {size_text(limit)} of cgroup {folder}")


def _version_1(folder: Path) -> Iterator[Room]:
    with suppress(OSError, ValueError):
        limit = int((folder / "memory.limit_in_bytes").read_text())
        used = int((folder / "memory.usage_in_bytes").read_text()) - _given_back(folder, "total_")
        yield Room(max(0, limit - used), f"memory.limit_in_bytes = {size_text(limit)} of cgroup {folder}")


def _given_back(folder: Path, prefix: str) -> int:
    """What the kernel drops before it kills a process."""
    found = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return int(found.get(f"{prefix}inactive_file", 0)) + int(found.get(f"{prefix}active_file", 0)) // 2


if TYPE_CHECKING:
    import numpy as np
    import torch

    type_of_array = torch.Tensor | np.ndarray[Any, np.dtype[Any]]

    from .registration import type_of_tensor


# --- Tensors in memory that readers on the same host can map.
#
# They lie in sealed memfds (`transport.sealed`), each from a page on. Many tensors lie in few *arenas*,
# because a reader maps a few regions only. An arena is twice as large as the one before. What was not given out takes
# no memory.


ARENA_BYTES = 1 << 30  # the first one: eight of them, as many as a reader maps, have 255 GiB
MAX_DIMENSIONS = 64  # as torch
MAX_BYTES = 1 << 46


class Arenas:
    """Memory that is given out from its beginning to its end: the arena in hand. It lasts as long as a tensor in it."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._memory: Callable[[], Sealed | None] = lambda: None
        self._used_bytes = 0
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> tuple[memoryview, Sealed, int]:
        """So many bytes from the beginning of a page on, and where in which memory they begin. Raises `Unmappable`."""
        with self._lock:
            memory, start = self._memory(), -(-self._used_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            if memory is None or start + size_bytes > self.size_bytes:
                wanted = ARENA_BYTES if memory is None else 2 * self.size_bytes
                try:
                    memory = Sealed(max(min(wanted, MAX_BYTES), size_bytes), is_inherited=True)
                except Unmappable:  # there may be a limit on the size of files
                    memory = Sealed(size_bytes, is_inherited=True)
                self._memory, self.size_bytes, start = weakref.ref(memory), memory.size_bytes, 0
            self._used_bytes = start + size_bytes
            return host_view(memory.address + start, size_bytes, memory), memory, start


_arenas = Arenas()


def _begin_anew() -> None:
    """In a forked child: what its parent goes on to give out is not for both of them."""
    global _arenas
    _arenas = Arenas()


os.register_at_fork(after_in_child=_begin_anew)


def empty(shape: "int | Sequence[int]", dtype: object = "float32") -> "type_of_array":
    """A new tensor on the host with undefined content, from which readers of this host copy faster than from others.

    `shape`: the number of elements along each dimension, or one number. `dtype`: a torch or numpy dtype, or its name
    ("bfloat16"). A contiguous torch tensor; a numpy array where torch is not installed, or cannot be loaded. It begins
    at a page. `register` takes it as any other. Memory is given back when none of the tensors that were made with it
    lives any more.

    A forked child has the same memory, not a copy of it. Where the kernel has no sealed memfd the tensor lies in
    ordinary memory, and is read as any other. Raises `UsageError` if the shape or dtype is none, and `HostMemoryFull`
    if there is no memory.
    """
    sizes = _sizes(shape)
    torch = loaded_torch()
    with outside_modes():
        return _array(sizes, dtype) if torch is None else _tensor(sizes, _torch_dtype(dtype))


def empty_like(tensor: "type_of_array") -> "type_of_array":
    """Calls `empty` with the shape and dtype of a torch tensor or numpy array. Returns the same kind.

    The result is contiguous and on the host, whatever the tensor is. Raises `UsageError` if it is no tensor.
    """
    torch, numpy = seen_torch(), sys.modules.get("numpy")
    if torch is not None and isinstance(tensor, torch.Tensor):
        with outside_modes():
            return _tensor(tuple(tensor.shape), tensor.dtype)
    if numpy is not None and isinstance(tensor, numpy.ndarray):
        return _array(tensor.shape, tensor.dtype)
    raise UsageError(f"empty_like takes a torch tensor or a numpy array, not a {type(tensor).__name__}")


def _sizes(shape: object) -> tuple[int, ...]:
    given = (shape,) if isinstance(shape, Integral) else shape
    if not isinstance(given, Sequence) or isinstance(given, str | bytes) or len(given) > MAX_DIMENSIONS:
        raise UsageError(f"shape={shape!r} is no number of elements, nor a sequence of numbers")
    for size in given:
        if not isinstance(size, Integral) or isinstance(size, bool) or size < 0:
            raise UsageError(f"shape={shape!r}: {size!r} is no number of elements")
    return tuple(map(int, given))


def _torch_dtype(dtype: object) -> "torch.dtype":
    import torch

    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype_name(dtype), None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"dtype={dtype!r} is no dtype of torch", hint='for example torch.bfloat16, or "bfloat16"')
    return found


def _tensor(sizes: tuple[int, ...], dtype: "torch.dtype") -> "torch.Tensor":
    import torch

    size_bytes = _size_bytes(sizes, dtype.itemsize)
    if not size_bytes:
        return torch.empty(sizes, dtype=dtype)
    flat = torch.frombuffer(_allocate(size_bytes), dtype=torch.uint8)
    return flat.view(dtype).view(sizes)


def _array(sizes: tuple[int, ...], dtype: object) -> "np.ndarray[Any, np.dtype[Any]]":
    import numpy as np

    try:
        if dtype is None:
            raise TypeError("None")  # numpy takes it for float64
        found: np.dtype[Any] = np.dtype(dtype)  # type: ignore[call-overload]
    except TypeError as error:
        hint = 'for example "float32"' if loaded_torch() is not None else f'for example "float32"; or {what_helps()}'
        raise UsageError(f"dtype={dtype!r} is no dtype of numpy", hint=hint) from error
    if found.hasobject:
        raise UsageError(f"dtype={dtype!r} has references to objects, not numbers")
    size_bytes = _size_bytes(sizes, found.itemsize)
    if not size_bytes:
        return np.empty(sizes, dtype=found)
    return np.frombuffer(_allocate(size_bytes), dtype=found).reshape(sizes)


def _size_bytes(sizes: tuple[int, ...], item_bytes: int) -> int:
    size_bytes = math.prod(sizes) * item_bytes
    if size_bytes > MAX_BYTES:
        raise HostMemoryFull(f"a tensor of shape {list(sizes)} would take {size_bytes} B", hint="use a smaller one")
    return size_bytes


def _allocate(size_bytes: int) -> "memoryview | mmap.mmap":
    """Writable bytes from the beginning of a page on, which last as long as the answer."""
    with contextlib.suppress(Unmappable):
        found, memory, start = _arenas.take(size_bytes)
        _have_large_pages(memory, start, start + size_bytes)
        return found
    try:
        return mmap.mmap(-1, size_bytes)
    except (OSError, MemoryError) as error:
        raise HostMemoryFull(f"this process may have no {size_bytes} B for a tensor", hint=str(error)) from error


def _have_large_pages(memory: Sealed, start: int, stop: int) -> None:
    """For a tensor that lies there, before it is written, as far as there is room beside it."""
    while start < stop:
        end, left = min(stop, start - start % STEP_BYTES + STEP_BYTES), room()
        is_short = left is not None and left.left_bytes < end - start + SPARE_BYTES
        if is_short or (end - start >= 2 * HUGE_BYTES and not memory.have_large_pages(start, end)):
            return
        start = end


# --- Tensors for a layout that another process has registered: what shares memory there shares it here.


MAX_ALIGNED = 16  # B: no element is wider
QUANTIZED = ("qint8", "qint32", "quint8", "quint4x2", "quint2x4")  # of torch: `register` refuses them


def allocate(layout: Layout) -> "dict[str, type_of_tensor]":
    """Uninitialised tensors of that layout, by name.

    Raises `UsageError` naming a dtype that is unknown here, `Unavailable` where there is no memory for them.
    """
    make = _torch_block if loaded_torch() is not None else _numpy_block
    try:
        with outside_modes():
            found = {name: tensor for block in _blocks(layout.tensors) for name, tensor in make(block)}
    except (MemoryError, RuntimeError, ValueError) as error:  # of torch, and of numpy for more than there are addresses
        text = f"{len(layout.tensors)} tensors of {layout.size_bytes} B could not be allocated: {error}"
        raise Unavailable(text, hint="free memory, or load where there is more") from error
    return {spec.name: found[spec.name] for spec in layout.tensors}


def _blocks(tensors: Sequence[TensorSpec]) -> Iterator[list[TensorSpec]]:
    """Those that share memory, directly or through others, together."""
    block: list[TensorSpec] = []
    end = 0
    for spec in sorted(tensors, key=lambda spec: (spec.offset_bytes, -spec.size_bytes)):
        if not spec.size_bytes:
            yield [spec]
            continue
        if block and spec.offset_bytes >= end:
            yield block
            block = []
        block.append(spec)
        end = max(end, spec.offset_bytes + spec.size_bytes)
    if block:
        yield block


def _place(block: Sequence[TensorSpec], sizes: Sequence[int]) -> tuple[int, list[int]]:
    """(bytes to allocate, where each tensor begins), so that each is aligned to its elements."""
    start = block[0].offset_bytes
    for pad in range(MAX_ALIGNED):
        places = [pad + spec.offset_bytes - start for spec in block]
        if all(place % size == 0 for place, size in zip(places, sizes, strict=True)):
            return max(place + spec.size_bytes for place, spec in zip(places, block, strict=True)), places
    names = ", ".join(repr(spec.name) for spec in block[:4])
    raise UsageError(f"tensors that share memory are aligned to nothing: {names}")


def _torch_block(block: Sequence[TensorSpec]) -> "Iterator[tuple[str, torch.Tensor]]":
    import torch

    dtypes = [_dtype_of_layout(spec) for spec in block]
    length, places = _place(block, [dtype.itemsize for dtype in dtypes])
    memory = torch.empty(length, dtype=torch.uint8).untyped_storage()
    for spec, dtype, place in zip(block, dtypes, places, strict=True):
        tensor = torch.empty(0, dtype=dtype)
        yield spec.name, tensor.set_(memory, place // dtype.itemsize, spec.shape, spec.strides)


def _dtype_of_layout(spec: TensorSpec) -> "torch.dtype":
    import torch

    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != item_bytes(spec.dtype) or spec.dtype in QUANTIZED:
        raise UsageError(f"tensor {spec} has a dtype that this torch does not know", hint="install a newer torch")
    return dtype


def _numpy_block(block: Sequence[TensorSpec]) -> "Iterator[tuple[str, type_of_tensor]]":
    import numpy as np

    dtypes = [_numpy_dtype(spec) for spec in block]
    length, places = _place(block, [dtype.itemsize for dtype in dtypes])
    memory = np.empty(length + MAX_ALIGNED, np.uint8)
    skip = -memory.ctypes.data % MAX_ALIGNED
    for spec, dtype, place in zip(block, dtypes, places, strict=True):
        strides = tuple(stride * dtype.itemsize for stride in spec.strides)
        yield spec.name, np.ndarray(spec.shape, dtype, memory.data, skip + place, strides)


def _numpy_dtype(spec: TensorSpec) -> "np.dtype[np.generic]":
    import numpy as np

    try:
        found = np.dtype(spec.dtype)
    except TypeError:
        found = np.dtype(object)
    if found.name != spec.dtype or found.itemsize != item_bytes(spec.dtype) or found.kind not in NUMPY_KINDS:
        raise UsageError(f"tensor {spec} has a dtype that numpy does not know", hint=what_helps())
    return found
