"""What a worker has: its buffer and its host copies, as far as the server believes it."""

from dataclasses import dataclass, field

from ..messages import Buffer, Empty, Filling, Holding, HostCopy, Vacated, Withdrawing
from ..names import Digest, Shard, Version
from .lines import Line, Place

WHOLE = (Holding, Withdrawing, Vacated)  # buffers that have all of a version


@dataclass(slots=True)
class Content:
    """What a worker has, as far as the server believes it. What differs from its version counts as poisoned."""

    buffer: Buffer
    copies: tuple[HostCopy, ...]
    line: Line  # of the tensors that are registered now
    held: Version | None = field(init=False)  # the version all of which is in the buffer
    versions: dict[Version, bool] = field(init=False)  # of which it has anything, and whether that is all of it
    places: dict[Place, bool] = field(init=False)  # the same by line: a copy may be of tensors registered before

    def __post_init__(self) -> None:
        self.held = self.buffer.version if isinstance(self.buffer, WHOLE) else None
        self.places = _places_in(self.buffer, self.copies, self.line)
        self.versions = {}
        for (version, _), is_whole in self.places.items():
            self.versions[version] = is_whole or self.versions.get(version, False)

    def line_of(self, version: Version, *, is_copy: bool) -> Line:
        """The line of what it has of that version in its buffer, or beside it."""
        layout = next((copy.layout for copy in self.copies if copy.version == version), NO_LAYOUT) if is_copy else ""
        return self.line.of(Digest(layout)) if layout else self.line


def _places_in(buffer: Buffer, copies: tuple[HostCopy, ...], line: Line) -> dict[Place, bool]:
    found = {(copy.version, line.of(copy.layout) if copy.layout else line): copy.whole for copy in copies}
    if isinstance(buffer, WHOLE):
        found[buffer.version, line] = True
    elif isinstance(buffer, Filling):
        found.setdefault((buffer.version, line), False)
    return found


def are_other_copies(former: tuple[HostCopy, ...], copies: tuple[HostCopy, ...]) -> bool:
    """They differ in something that is of concern to others."""
    return former != copies and [_kind(copy) for copy in former] != [_kind(copy) for copy in copies]


def _kind(copy: HostCopy) -> tuple[object, ...]:
    return copy.number, copy.version, copy.whole, copy.leaving


NO_LAYOUT = Digest("")
NOTHING = Content(Empty(), (), Line(1, Shard(0)))


def version_in(buffer: Buffer | None) -> Version | None:
    """The version that the buffer has, whole or in part."""
    return buffer.version if isinstance(buffer, (Filling, *WHOLE)) else None
