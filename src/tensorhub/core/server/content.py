"""What a worker has: its buffer and its host copies, as far as the server believes it."""

from dataclasses import dataclass, field

from ..messages import Buffer, Empty, Filling, Holding, HostCopy, Vacated, Withdrawing
from ..names import Digest, Shard, Version, WorkerId
from .lines import Line, Place

WHOLE = (Holding, Withdrawing, Vacated)  # buffers that have all of a version


@dataclass(slots=True)
class Content:
    """What a worker has, as far as the server believes it. What differs from its version counts as poisoned."""

    buffer: Buffer
    copies: tuple[HostCopy, ...]
    line: Line  # of the tensors that are registered now
    held: Version | None = field(init=False)  # the version all of which is in the buffer
    staying: Place | None = field(init=False)  # the same, by line, unless it wants to take that back
    kept: tuple[Version, ...] = field(init=False)  # whole, in the buffer or in a copy, and not to be taken back
    versions: dict[Version, bool] = field(init=False)  # of which it has anything, and whether that is all of it
    places: dict[Place, bool] = field(init=False)  # the same by line: a copy may be of tensors registered before

    def __post_init__(self) -> None:
        self.held = self.buffer.version if isinstance(self.buffer, WHOLE) else None
        self.staying = (self.buffer.version, self.line) if isinstance(self.buffer, Holding) else None
        copied = tuple(copy.version for copy in self.copies if copy.whole and not copy.leaving)
        self.kept = copied if self.staying is None else (self.staying[0], *copied)
        self.places = _places_in(self.buffer, self.copies, self.line)
        self.versions = {}
        for (version, _), is_whole in self.places.items():
            self.versions[version] = is_whole or self.versions.get(version, False)

    def line_of(self, version: Version, *, is_copy: bool) -> Line:
        """The line of what it has of that version in its buffer, or beside it."""
        layout = next((copy.layout for copy in self.copies if copy.version == version), NO_LAYOUT) if is_copy else ""
        return self.line.of(Digest(layout)) if layout else self.line


@dataclass
class Staying:
    """Who has what in its buffer and does not want to take it back: while all leave a version, few of its holders."""

    by_place: dict[Place, dict[WorkerId, None]] = field(default_factory=dict)

    def at(self, version: Version, line: Line) -> dict[WorkerId, None]:
        """All of them."""
        return self.by_place.get((version, line), {})

    def has_other(self, worker: WorkerId, place: Place) -> bool:
        """Somebody else stays with that, whatever this one does."""
        those = self.by_place.get(place, {})
        return len(those) > (worker in those)

    def move(self, worker: WorkerId, old: Content, new: Content) -> None:
        """The worker has something else than before."""
        before, after = old.staying, new.staying
        if before == after:
            return
        if before is not None:
            those = self.by_place[before]
            del those[worker]
            if not those:
                del self.by_place[before]
        if after is not None:
            self.by_place.setdefault(after, {})[worker] = None


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
