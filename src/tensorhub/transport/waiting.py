"""One read, waited for: for who measures or tries a way, and has nothing else to do meanwhile."""

import threading

from ..core.errors import TensorHubError, TransferError
from .base import Sink, Transport


def read_to_end(transport: Transport, endpoint: str, key: str, sink: Sink, *, within_s: float) -> str:
    """Read all that the sink wants. Returns which way it went.

    Raises `TransferError` if that takes longer, and whatever ended the read otherwise (`Transport.read`).
    """
    ended, errors = threading.Event(), list[TensorHubError | None]()

    def end(error: TensorHubError | None) -> None:
        errors.append(error)
        ended.set()

    read = transport.read(endpoint, key, sink, end)
    if not ended.wait(within_s):
        read.stop()
        raise TransferError(f"only {read.received_bytes} B came in {within_s:.0f} s")
    if errors[0] is not None:
        raise errors[0]
    return read.path
