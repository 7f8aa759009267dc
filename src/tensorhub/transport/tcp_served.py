"""What a source exports, as its readers see it, and the count of what they were sent.

It must never: be changed without its server's lock.
"""

import secrets

from ..core.manifest import chunk_count
from .base import Export
from .gates import Gate
from .located import Scattered
from .tcp_wire import Wire


class Served:
    """One export as its readers see it. Its fields are guarded by the server's lock; `ended` may be read without."""

    def __init__(self, export: Export) -> None:
        self.export = export
        self.scattered = Scattered(export.stream)
        self.generation = secrets.randbits(62) + 1  # no other export has it, not even in another life of this worker
        self.chunk_count = chunk_count(export.stream.size_bytes, export.chunk_bytes)
        self.inside: dict[Wire, int] = {}  # and the bytes that this reader says it has read
        self.ended: str | None = None
        self.gate = Gate()  # shut once it has ended
        self.sent_bytes = 0

    def has_ended(self) -> bool:
        return self.ended is not None

    def end(self, reason: str) -> None:
        self.ended = reason
        self.gate.shut()
