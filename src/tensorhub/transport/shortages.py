"""What this machine refuses this process for now: descriptors, memory, threads. A later try may have it.

An error for want of these is an `Unavailable` wherever it arises, and nothing is remembered for it: no transport is
missing, no source is bad. The last one is said where a call has run out of time.
"""

import errno
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack

from ..core.errors import TensorHubError, Unavailable
from .scopes import scope

RECENT_S = 60.0  # what was refused longer ago explains nothing
_FILES = (errno.EMFILE, errno.ENFILE)
_SCARCE = frozenset((*_FILES, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC, errno.EAGAIN))
_LIBRARY_BYTES = 1 << 30  # of torch for the CPU, with what it loads
_MOST_FILES = 2  # that one look-up of a name, or one import, has open at a time

FILES = "raise `ulimit -n` (LimitNOFILE of systemd), or close what is not needed; then retry"
MEMORY = "is there memory left (`ulimit -v`, or memory.max of the container's cgroup)? Retry when there is"
THREADS = "raise the limit on threads (`ulimit -u`, or pids.max of the container's cgroup), or start fewer; then retry"
REMEDIES = {os.strerror(number): FILES for number in _FILES}  # by the words of the system
REMEDIES |= {os.strerror(number): MEMORY for number in (errno.ENOMEM, errno.ENOBUFS)}

KINDS = (OSError, ImportError, MemoryError, RuntimeError)  # of which an error that is a shortage may be

_last: tuple[float, str, str] | None = None  # when, what and what helps


class NotStarted(RuntimeError):
    """The system had a thread for us, which never took its first step."""


def is_shortage(error: BaseException) -> bool:
    """The reason is something that this machine has too little of now.

    An import, a library and a name that was not found give no number: they count if no file can be opened now, or no
    library be mapped.
    """
    if isinstance(error, OSError) and (error.errno or 0) > 0:
        return error.errno in _SCARCE
    if isinstance(error, OSError | ImportError):
        return lacks_files() or _lacks_memory()
    is_thread = isinstance(error, NotStarted) or (isinstance(error, RuntimeError) and "start new thread" in str(error))
    return isinstance(error, MemoryError) or is_thread


def lacks_files() -> bool:
    """This process can open next to no file now."""
    with ExitStack() as opened:
        try:
            for _ in range(_MOST_FILES):
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            return error.errno in _FILES
    return False


def _lacks_memory() -> bool:
    """This process can map no large library now."""
    try:
        mmap.mmap(-1, _LIBRARY_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ).close()
    except OSError as error:
        return error.errno == errno.ENOMEM
    return False


def note(error: BaseException, *, did: str) -> None:
    """Something failed here. It is remembered if that was for want of something that this machine has too little of."""
    global _last
    if is_shortage(error):
        text = "out of memory" if isinstance(error, MemoryError) else getattr(error, "strerror", None) or error
        _last = (time.monotonic(), f"{did}: {text}", _hint(error))


def unavailable(error: BaseException, did: str) -> Unavailable:
    """The error of a call that met a shortage when `did`. To be raised from the other."""
    is_told = (isinstance(error, OSError) and (error.errno or 0) > 0) or not isinstance(error, OSError | ImportError)
    why = f"{error}" or "out of memory"
    why = why if is_told else f"too few files, or too little memory ({why})"
    return _unavailable(error, f"this process met a limit when {did}: {why}", did)


def _unavailable(error: BaseException, text: str, did: str) -> Unavailable:
    note(error, did=did)
    return Unavailable(text, hint=_hint(error))


def _hint(error: BaseException) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, MemoryError) or number in (errno.ENOMEM, errno.ENOBUFS):
        return MEMORY
    return THREADS if isinstance(error, RuntimeError) or number == errno.EAGAIN else FILES


def as_ours(error: Exception, text: str) -> TensorHubError:
    """What was not foreseen, as an error of ours with its cause: an `Unavailable` if it is a shortage."""
    said = f"{text}: {error!r}"
    ours = _unavailable(error, said, text) if is_shortage(error) else TensorHubError(said)
    ours.__cause__ = error
    return ours


@scope
def named(did: str) -> Iterator[None]:
    """In this block a shortage is an `Unavailable`."""
    try:
        yield
    except KINDS as error:
        if not is_shortage(error):
            raise
        raise unavailable(error, did) from error


@scope
def tolerated(did: str) -> Iterator[None]:
    """In this block an `OSError` is passed over, except a shortage, which is an `Unavailable`."""
    try:
        yield
    except OSError as error:
        if is_shortage(error):
            raise unavailable(error, did) from error


def recent() -> tuple[str, str]:
    """The last of it, in words, and what helps, if that is not long ago; else two empty texts."""
    found = _last
    if found is None or time.monotonic() > found[0] + RECENT_S:
        return "", ""
    return f"this process met a limit {time.monotonic() - found[0]:.3g} s ago, when {found[1]}", found[2]
