"""Finds the mover and takes it in use, once for the process; or says why Python moves the bytes here.

`TENSORHUB_NATIVE=no` leaves it alone. What is found must have been made of the C files that lie beside it, and must
know the same structures; otherwise it is not used, and the reason is told.

It must never: raise because the library is missing, or build it.
"""

import ctypes
import logging
import os
from ctypes import POINTER, c_char_p, c_double, c_int, c_int64, c_uint32, c_uint64, c_void_p
from functools import cache

from ..threads import lacks_files
from . import build, shapes

_log = logging.getLogger(__name__)

ABI = 6
VARIABLE = "TENSORHUB_NATIVE"
OFF = ("no", "false", "off", "0")
COST = "beside a busy Python thread of the same process bytes then move many times more slowly"


class Unusable(Exception):
    """Why the library is not used."""


class Library:
    """The functions. Quick ones keep the interpreter's lock, for to let go of it would cost more than they take."""

    def __init__(self, path: str) -> None:
        """Raises `Unusable`, or `OSError` if it cannot be loaded."""
        quick, slow = ctypes.PyDLL(path), ctypes.CDLL(path)
        try:
            self._quick(quick)
            self._slow(slow)
            self.abi = int(quick.th_abi())
            sizes = [int(_typed(quick.th_size_of, c_uint64, c_uint32)(at)) for at in range(len(shapes.ALL))]
            self.digest_way = bytes(_typed(quick.th_digest_way, c_char_p)()).decode()
        except AttributeError as error:
            raise Unusable(f"it is another one: {error}") from error
        if self.abi != ABI or sizes != [ctypes.sizeof(shape) for shape in shapes.ALL]:
            raise Unusable("it was built for another release")

    def _quick(self, lib: ctypes.PyDLL) -> None:
        marks, read, stream = POINTER(shapes.Marks), POINTER(shapes.ReadState), POINTER(shapes.StreamState)
        self.mark = _typed(lib.th_mark, c_uint64, marks, c_uint64)
        self.wake = _typed(lib.th_wake, None, marks)
        self.swap = _typed(lib.th_swap, c_uint32, c_void_p, c_uint32, c_uint32)
        self.read_tell = _typed(lib.th_read_tell, None, read, c_uint32)
        self.read_answer = _typed(lib.th_read_answer, None, read, c_uint32)
        self.read_stop = _typed(lib.th_read_stop, None, read)
        self.stream_start = _typed(lib.th_stream_start, c_int, stream)
        self.decode_want = _typed(lib.th_decode_want, c_int64, c_char_p, c_uint64, c_uint64, c_void_p)

    def _slow(self, lib: ctypes.CDLL) -> None:
        marks, read, stream = POINTER(shapes.Marks), POINTER(shapes.ReadState), POINTER(shapes.StreamState)
        self.wait = _typed(lib.th_wait, None, marks, c_uint32, c_double)
        self.read_wait = _typed(lib.th_read_wait, c_uint32, read, c_double)
        self.stream_run = _typed(lib.th_stream_run, None, stream)
        self.stream_join = _typed(lib.th_stream_join, None, stream)
        self.offload = _typed(lib.th_offload, c_int, POINTER(shapes.OffloadState))
        self.have_large = _typed(lib.th_have_large, c_int, POINTER(shapes.Large), c_uint64, c_uint64)
        self.serve = _typed(lib.th_serve, None, POINTER(shapes.ServeState))
        state = POINTER(shapes.DigestState)
        self.digest_begin = _typed(lib.th_digest_begin, None, state, c_uint64)
        self.digest_update = _typed(lib.th_digest_update, None, state, c_void_p, c_uint64)
        self.digest_copy = _typed(lib.th_digest_copy, None, state, c_void_p, c_void_p, c_uint64)
        self.digest_end = _typed(lib.th_digest_end, c_int, state, c_char_p)
        self.digest_take_plain = _typed(lib.th_digest_take_plain, None, c_void_p, c_void_p, c_uint64, c_uint32)
        self.digest_take_best = _typed(lib.th_digest_take_best, None, c_void_p, c_void_p, c_uint64, c_uint32)
        store = (c_uint32, c_void_p, c_void_p, c_void_p, c_uint64, c_uint32)
        self.digest_store = _typed(lib.th_digest_store, c_int, *store)
        table = POINTER(shapes.Table)
        rows = (c_void_p, c_uint64)
        self.check_rows = _typed(lib.th_check_rows, c_uint64, *rows, c_uint64, c_uint64, c_void_p, c_void_p)
        self.place_rows = _typed(lib.th_place_rows, c_uint64, *rows, table, c_void_p, c_void_p)
        self.digest_tiles = _typed(lib.th_digest_tiles, c_int, table, c_void_p, c_uint64, c_char_p)


def _typed(function: "ctypes._NamedFuncPointer", result: object, *arguments: object) -> "ctypes._NamedFuncPointer":
    function.restype = result  # type: ignore[assignment]
    function.argtypes = arguments  # type: ignore[assignment]
    return function


def is_left_out() -> bool:
    """True if the environment variable turns the library off."""
    return os.environ.get(VARIABLE, "").strip().lower() in OFF


def _found() -> Library:
    if is_left_out():
        raise Unusable(f"{VARIABLE}={os.environ[VARIABLE]} leaves it out")
    made_of = build.stamp()
    if not made_of:
        raise Unusable(f"it was not built: {build.why_not_made() or 'it was not tried'}")
    if made_of != build.fingerprint():
        raise Unusable("it was built from other sources: build it again")
    try:
        return Library(str(build.LIBRARY))
    except OSError as error:
        raise Unusable(f"it cannot be loaded: {error}") from error


@cache
def _loaded() -> tuple[Library | None, str]:
    """Raises `Unusable` while no file can be opened: that is not remembered."""
    try:
        return _found(), ""
    except Unusable as error:
        if lacks_files():
            raise
        _log.info("Python moves the bytes, the native mover is not used: %s (%s)", error, COST)
        return None, str(error)


def library() -> Library | None:
    """The mover, or None where Python moves the bytes."""
    try:
        return _loaded()[0]
    except Unusable:
        return None


def why_not() -> str:
    """Why Python moves the bytes; empty where it does not."""
    try:
        return _loaded()[1]
    except Unusable as error:
        return str(error)


def reset() -> None:
    """Drop the loaded library. The next question looks for it again. Tests use this to try both ways."""
    _loaded.cache_clear()
