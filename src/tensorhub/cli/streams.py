"""The standard streams by their descriptors: one that is closed, or that takes nothing more, leads nowhere."""

import os
from contextlib import suppress
from typing import TextIO


def descriptor_of(stream: TextIO | None) -> int | None:
    """None if it is no file, or closed."""
    try:
        return stream.fileno() if stream is not None else None
    except (OSError, ValueError):
        return None


def fill_the_first_three() -> None:
    """A socket that took the place of one of them would be sent what is meant for it."""
    descriptor = 0
    while descriptor <= 2:
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)


def lead_nowhere(descriptor: int | None) -> None:
    """What is written there from now on is gone, and nobody waits for it. None: there is nothing to do."""
    if descriptor is not None:
        with suppress(OSError), open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), descriptor)
