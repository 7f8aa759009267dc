"""Moves the calling thread into a network namespace. What it starts or opens afterwards is there."""

import ctypes
import os

_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def enter(path: str) -> None:
    """Go into the network namespace that a file stands for. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.setns(descriptor, _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)
    finally:
        os.close(descriptor)


def die_with_parent(signal_number: int) -> None:
    """Let the kernel send this process a signal when the thread that started it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal_number)
