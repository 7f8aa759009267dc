"""A worker's host copies: versions beside the buffer, offloaded from it or fetched ahead, which others may read.

The server orders what to offload, to fetch and to release; the limit on host memory is the worker's own, and no copy is
begun that does not fit. A copy that is to go is served until nothing here writes it or reads it any more.

A release takes two steps, because an order may come late and from a server that is dead by now: the worker reports the
copy as about to go, and drops it when orders that answer such a report still release it. Whoever sent those lets nobody
begin to read it. Orders that answer such a report and do not release it know nothing of the release: the copy stays.
"""

from dataclasses import dataclass, field
from typing import Literal

from msgspec.structs import replace

from .errors import InvariantViolation
from .events import CopyIn, CopyOut, DropCopy, Effect
from .messages import MOST_COPIES, Failure, Holding, HostCopy, Orders, Reading, Spec, Withdrawing
from .names import Digest, Version

Copying = tuple[Literal["in", "out"], Version]


@dataclass
class Leaving:
    """A host copy that is about to go."""

    released_in: int | None  # the first report that said so; None: no server has to agree, it is of no use any more
    is_agreed: bool = False  # the server that knows of it still wants it to go
    is_dropping: bool = False

    def is_answered(self, acknowledged: int) -> bool:
        """Whoever sent orders with that acknowledgement has heard of it, and can still say what becomes of it."""
        return self.released_in is not None and not self.is_dropping and acknowledged >= self.released_in


@dataclass
class Shelf:
    """Host copies by version, and the one local copy that may be under way."""

    most: int = 0  # copies that the limit allows
    copies: dict[Version, HostCopy] = field(default_factory=dict)
    copying: Copying | None = None
    offload: Version | None = None  # as last ordered
    fetch: Version | None = None
    error: Failure | None = None  # why the last offload failed
    prefetch: Spec | None = None  # what the caller wants ahead
    pins: tuple[Version, ...] = ()
    leaving: dict[Version, Leaving] = field(default_factory=dict)
    _made: int = 0

    @property
    def left(self) -> int:
        """How many more would fit."""
        return max(0, self.most - len(self.copies))

    def whole(self, version: Version | None) -> HostCopy | None:
        """The copy of that version, if all of it is there to stay."""
        found = self.copies.get(version) if version is not None else None
        return found if found is not None and found.whole and found.version not in self.leaving else None

    def has_newer(self, held: Version) -> bool:
        """Some copy is whole, and newer than what the buffer holds."""
        return any(version > held and self.whole(version) is not None for version in self.copies)

    def resize(self, most: int) -> None:
        """Other tensors were registered: the copies of the former ones go."""
        self.most = min(most, MOST_COPIES)
        self.leave_all()

    def take(self, orders: Orders, *, next_report: int) -> None:
        """The latest orders. What they make of the copies will be said in the next report, with that number."""
        self.offload, self.fetch = orders.offload, orders.fetch
        for copy in self.copies.values():
            is_released, leaving = copy.number in orders.release, self.leaving.get(copy.version)
            if leaving is None and is_released:
                self.leaving[copy.version] = Leaving(next_report)
            elif leaving is None or not leaving.is_answered(orders.acknowledged):
                continue
            elif is_released:
                leaving.is_agreed = True
            else:
                del self.leaving[copy.version]

    def leave(self, version: Version) -> None:
        """The copy goes, whatever the server says."""
        if version in self.copies:
            self.leaving.setdefault(version, Leaving(None)).released_in = None

    def leave_all(self) -> None:
        for version in self.copies:
            self.leave(version)

    def told(self) -> tuple[HostCopy, ...]:
        """As a report tells it."""
        return tuple(replace(each, leaving=each.version in self.leaving) for each in self.copies.values())

    # --- filled from a peer -------------------------------------------------------------------------------------------

    def may_fetch(self, version: Version, resolved: Version | None) -> bool:
        """A read into the copy of that version is wanted and fits."""
        found = self.copies.get(version)
        if version in self.leaving or (found is not None and found.whole) or version not in (self.fetch, resolved):
            return False
        return found is not None or self.left > 0

    def begun(self, version: Version, root: Digest) -> None:
        if version not in self.copies:
            self._make(version, root)

    def _make(self, version: Version, root: Digest, *, published: bool = False) -> None:
        self._made += 1
        self.copies[version] = HostCopy(self._made, version, root, published=published)

    def advanced(self, version: Version, done: int, chunks: int) -> None:
        found = self.copies[version]
        self.copies[version] = replace(found, done=max(found.done, done), chunks=chunks)

    def filled(self, version: Version) -> None:
        found = self.copies[version]
        self.copies[version] = replace(found, done=found.chunks, whole=True)

    # --- copied here --------------------------------------------------------------------------------------------------

    def copy_out(self, buffer: Holding | Withdrawing) -> CopyOut | None:
        """Begin to offload, if that is ordered and fits."""
        is_busy = self.copying is not None or buffer.version in self.copies or not self.left
        if is_busy or self.offload != buffer.version or self.error is not None:
            return None
        self.copying, self.error = ("out", buffer.version), None
        self._make(buffer.version, buffer.root, published=buffer.published)
        return CopyOut(buffer.version)

    def copied_out(self, version: Version, failure: Failure | None) -> None:
        self._copied("out", version)
        if failure is None:
            self.copies[version] = replace(self.copies[version], whole=True)
        else:
            self.error = failure.bounded()
            self.leave(version)

    def copy_in(self, version: Version) -> CopyIn | None:
        """Begin to fill the buffer from the copy, if it is whole."""
        if self.whole(version) is None or self.copying is not None:
            return None
        self.copying = ("in", version)
        return CopyIn(version)

    def copied_in(self, version: Version, failure: Failure | None) -> Digest | None:
        """The content's identity, or None if the copy was no good: it goes."""
        self._copied("in", version)
        if failure is not None:
            self.leave(version)
            return None
        return self.copies[version].root

    def _copied(self, way: Literal["in", "out"], version: Version) -> None:
        if self.copying != (way, version):
            raise InvariantViolation(f"version {version} was copied {way}, under way was {self.copying}")
        self.copying = None

    # --- dropped ------------------------------------------------------------------------------------------------------

    def drops(self, reading: Reading | None) -> list[Effect]:
        """What of those that were told to go can go now."""
        busy = [self.copying[1]] if self.copying is not None else []
        if reading is not None and reading.to_host:
            busy.append(reading.version)
        found: list[Effect] = []
        for version, leaving in self.leaving.items():
            may_go = leaving.is_agreed or leaving.released_in is None
            if may_go and not leaving.is_dropping and version not in busy:
                leaving.is_dropping = True
                found.append(DropCopy(version))
        return found

    def dropped(self, version: Version) -> None:
        leaving = self.leaving.get(version)
        if leaving is None or not leaving.is_dropping:
            raise InvariantViolation(f"the copy of version {version} was dropped, which nobody had asked for")
        del self.leaving[version], self.copies[version]
