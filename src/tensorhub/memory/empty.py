"""Tensors in memory that readers on the same host can map, so that what is published from them is copied from there.

They are ordinary writable tensors, whose memory lies in sealed memfds (`transport.sealed`), each from the beginning of
a page on. Many tensors lie in few such *arenas*, because a reader maps a few regions only. An arena is twice as large
as the one before it; what was not given out yet takes no memory. A tensor has its large pages at once, where the kernel
has such and there is room; the rest of its pages are there when they are written.

The promise of a publisher is as ever: it writes to them only after `unpublish()`. Whatever it does, a reader takes no
byte that has not the digest which was announced.

Never: hand out the same bytes twice, or memory that may be frozen.
"""

import contextlib
import math
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

from ..core.errors import HostMemoryFull, UsageError
from ..transport.sealed import HUGE_BYTES, Sealed, Unmappable
from .host import host_view
from .room import SPARE_BYTES, STEP_BYTES, room
from .torch_here import loaded_torch, outside_modes, seen_torch, what_helps

if TYPE_CHECKING:
    import numpy as np
    import torch

    type_of_array = torch.Tensor | np.ndarray[Any, np.dtype[Any]]

ARENA_BYTES = 1 << 30  # the first one: eight of them, as many as a reader maps, have 255 GiB
MOST_DIMENSIONS = 64  # as torch
MOST_BYTES = 1 << 46


class Arena:
    """One piece of such memory, given out from its beginning to its end. It lasts as long as a tensor lies in it."""

    def __init__(self, memory: Sealed) -> None:
        self.size_bytes = memory.size_bytes
        self._memory = weakref.ref(memory)
        self._used_bytes = 0

    @property
    def is_there(self) -> bool:
        """Some tensor lies in it."""
        return self._memory() is not None

    def take(self, size_bytes: int) -> tuple[memoryview, Sealed, int] | None:
        """So many bytes from the beginning of a page on, and where in which memory they begin.

        None if they do not fit, or nobody has a tensor of it.
        """
        memory, start = self._memory(), -(-self._used_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if memory is None or start + size_bytes > self.size_bytes:
            return None
        self._used_bytes = start + size_bytes
        return host_view(memory.address + start, size_bytes, memory), memory, start


class Arenas:
    """The one in hand."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: Arena | None = None

    def take(self, size_bytes: int) -> tuple[memoryview, Sealed, int]:
        """So many bytes of the arena in hand, or of a new one. Raises `Unmappable`."""
        with self._lock:
            found = self._current.take(size_bytes) if self._current is not None else None
            if found is not None:
                return found
            is_full = self._current is not None and self._current.is_there
            wanted = 2 * self._current.size_bytes if self._current is not None and is_full else ARENA_BYTES
            try:
                memory = Sealed(max(min(wanted, MOST_BYTES), size_bytes), is_inherited=True)
            except Unmappable:  # there may be a limit on the size of files
                memory = Sealed(size_bytes, is_inherited=True)
            self._current = Arena(memory)
            found = self._current.take(size_bytes)
            assert found is not None, "a new arena is large enough"
            return found


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
    """The same as `empty` with the shape and dtype of a torch tensor or numpy array, and of its kind.

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
    if not isinstance(given, Sequence) or isinstance(given, str | bytes) or len(given) > MOST_DIMENSIONS:
        raise UsageError(f"shape={shape!r} is no number of elements, nor a sequence of such")
    for size in given:
        if not isinstance(size, Integral) or isinstance(size, bool) or size < 0:
            raise UsageError(f"shape={shape!r}: {size!r} is no number of elements")
    return tuple(map(int, given))


def _torch_dtype(dtype: object) -> "torch.dtype":
    import torch

    found = dtype
    if not isinstance(dtype, torch.dtype):
        found = getattr(torch, dtype if isinstance(dtype, str) else _numpy_name(dtype), None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"dtype={dtype!r} is no dtype of torch", hint='for example torch.bfloat16, or "bfloat16"')
    return found


def _numpy_name(dtype: object) -> str:
    numpy = sys.modules.get("numpy")
    try:
        return str(numpy.dtype(dtype).name) if numpy is not None and dtype is not None else ""
    except TypeError:
        return ""


def _tensor(sizes: tuple[int, ...], dtype: "torch.dtype") -> "torch.Tensor":
    import torch

    size_bytes = _size_bytes(sizes, dtype.itemsize)
    if not size_bytes:
        return torch.empty(sizes, dtype=dtype)
    flat = torch.frombuffer(_memory(size_bytes), dtype=torch.uint8)
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
    return np.frombuffer(_memory(size_bytes), dtype=found).reshape(sizes)


def _size_bytes(sizes: tuple[int, ...], item_bytes: int) -> int:
    size_bytes = math.prod(sizes) * item_bytes
    if size_bytes > MOST_BYTES:
        raise HostMemoryFull(f"a tensor of shape {list(sizes)} would take {size_bytes} B", hint="use a smaller one")
    return size_bytes


def _memory(size_bytes: int) -> "memoryview | mmap.mmap":
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
