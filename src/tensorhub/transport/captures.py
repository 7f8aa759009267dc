"""CUDA graphs that the user's threads capture, and what threads of this library may do on a device meanwhile.

While a thread captures a graph in the usual mode, "global", the driver refuses copies, events, and registrations of
memory to every other thread, and spoils the capture as well; but not to a thread that has said it knows what it does
(CUDA driver API, cuThreadExchangeStreamCaptureMode). What this library does there is nothing that a graph could miss.
To wait for the whole device is refused in every mode (seen on an H200, driver 580, CUDA 13).
"""

import ctypes
from collections.abc import Callable, Iterator
from functools import cache

from .scopes import scope

RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@scope
def beside_captures() -> Iterator[None]:
    """In this block the calling thread neither fails for another thread's capture nor spoils it."""
    exchange = mode_exchange()
    mode = ctypes.c_int(RELAXED)
    has_changed = exchange is not None and exchange(ctypes.byref(mode)) == 0  # `mode` is now what it was before
    try:
        yield
    finally:
        if exchange is not None and has_changed:
            exchange(ctypes.byref(mode))


@cache
def mode_exchange() -> Callable[[object], int] | None:
    """NVIDIA's function. It is too short to let the interpreter go for it. None where that driver is not."""
    try:
        found: Callable[[object], int] = ctypes.PyDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None
    return found
