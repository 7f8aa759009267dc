"""What a worker has: its buffer and its host copies, as far as the server believes it."""

from dataclasses import dataclass, field

from ..messages import Buffer, Empty, Filling, Holding, HostCopy, Vacated, Withdrawing
from ..names import Version

WHOLE = (Holding, Withdrawing, Vacated)  # buffers that have all of a version


@dataclass(slots=True)
class Content:
    """What a worker has, as far as the server believes it. What differs from its version counts as poisoned."""

    buffer: Buffer
    copies: tuple[HostCopy, ...] = ()
    held: Version | None = field(init=False)  # the version all of which is in the buffer
    versions: dict[Version, bool] = field(init=False)  # of which it has anything, and whether that is all of it

    def __post_init__(self) -> None:
        self.held = self.buffer.version if isinstance(self.buffer, WHOLE) else None
        self.versions = _versions_in(self.buffer, self.copies)


def _versions_in(buffer: Buffer, copies: tuple[HostCopy, ...]) -> dict[Version, bool]:
    found = {copy.version: copy.whole for copy in copies}
    if isinstance(buffer, WHOLE):
        found[buffer.version] = True
    elif isinstance(buffer, Filling):
        found.setdefault(buffer.version, False)
    return found


NOTHING = Content(Empty())


def version_in(buffer: Buffer | None) -> Version | None:
    """The version that the buffer has, whole or in part."""
    return buffer.version if isinstance(buffer, (Filling, *WHOLE)) else None
