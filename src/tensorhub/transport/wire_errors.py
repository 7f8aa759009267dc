"""What ends a connection between two workers, and which of them an error of the kernel's stands for.

It must never: leave the transport. The reader turns each of these into an error of the caller's tree.
"""

import errno


class WireError(Exception):
    """This connection is over. Never leaves the transport: the reader turns it into `SourceLost`."""


class Vanished(WireError):
    """The peer closed the connection, or the network broke it."""


class Silent(WireError):
    """Not a byte moved for the whole limit."""


class Unreadable(WireError):
    """Memory on this side is not there any more: it was freed while it was exported, or filled."""


class Garbled(WireError):
    """The peer does not speak this protocol; `code` is what to refuse it with."""

    def __init__(self, message: str, code: str = "malformed") -> None:
        super().__init__(message)
        self.code = code


def lost(error: OSError) -> WireError:
    """Why bytes could not be sent or received: the peer, the network, or our own memory."""
    if error.errno == errno.EFAULT:
        return Unreadable("the memory of its tensors can no longer be read or written: it was freed")
    return Vanished(f"connection lost: {error}")
