"""What this machine last refused this process: descriptors, memory, threads. Said where a call has run out of time.

It must never: be what a decision rests on.
"""

import errno
import time

RECENT_S = 60.0  # what was refused longer ago explains nothing
_SCARCE = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC, errno.EAGAIN))

_last: tuple[float, str] | None = None


def note(error: BaseException, *, did: str) -> None:
    """Something failed here. It is remembered if that was for want of something that this machine has too little of."""
    global _last
    if isinstance(error, MemoryError):
        _last = (time.monotonic(), f"{did}: out of memory")
    elif not isinstance(error, OSError) or error.errno in _SCARCE:
        _last = (time.monotonic(), f"{did}: {getattr(error, 'strerror', None) or error}")


def recent() -> str:
    """The last of it, in words, if that is not long ago; else nothing."""
    found = _last
    if found is None or time.monotonic() > found[0] + RECENT_S:
        return ""
    return f"this process met a limit {time.monotonic() - found[0]:.3g} s ago, when {found[1]}"
