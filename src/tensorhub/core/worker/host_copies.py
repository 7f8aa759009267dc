"""A worker's host copies: versions beside the buffer, offloaded from it or fetched ahead, which others may read.

The server orders what to offload, to fetch and to release; the limit on host memory is the worker's own, and no copy is
begun that does not fit. A copy that is to go is served until nothing here writes it or reads it any more.

A release takes two steps, because an order may come late and from a server that is dead by now: the worker reports the
copy as about to go, and drops it when orders that answer such a report still release it. Whoever sent those lets nobody
begin to read it. Orders that answer such a report and do not release it know nothing of the release: the copy stays.

What the worker itself has no use for any more goes the same way, but that it does not stay: only the server knows who
still reads it. A copy is one of a version, whatever is registered now: other tensors make it unfit to fill them, and no
worse for anybody else.
"""

from dataclasses import dataclass, field
from typing import Literal

from msgspec.structs import replace

from ..errors import CorruptTransfer, InvariantViolation
from ..messages import MOST_COPIES, Failure, Holding, HostCopy, Orders, Reading, Spec, Withdrawing
from ..names import Digest, Version
from .events import CopyIn, CopyOut, DropCopy, Effect

Copying = tuple[Literal["in", "out"], Version]

MOST_TRIES = 3  # of copying in, in one call: it is memory to memory, what fails thrice is not mended by waiting


@dataclass
class Leaving:
    """A host copy that is about to go."""

    released_in: int  # the first report that said so
    is_final: bool = False  # of no use here any more, whatever the server says
    is_agreed: bool = False  # the server that knows of it still wants it to go; or nobody was ever able to read it
    is_dropping: bool = False

    def is_answered(self, acknowledged: int) -> bool:
        """Whoever sent orders with that acknowledgement has heard of it, and can still say what becomes of it."""
        return not self.is_dropping and acknowledged >= self.released_in


@dataclass
class Shelf:
    """Host copies by version, and the one local copy that may be under way."""

    most: int = 0  # copies of the present tensors that the limit allows
    size_bytes: int = 0  # of one of those
    layout: Digest = Digest("")  # of the present tensors
    copies: dict[Version, HostCopy] = field(default_factory=dict)
    sizes: dict[Version, int] = field(default_factory=dict)  # of the copies, in bytes
    failed: dict[Version, int] = field(default_factory=dict)  # how often copying it in has failed, in this call
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
        """How many more of the present tensors would fit. What is kept of former ones comes before what may come."""
        if not self.size_bytes:
            return max(0, self.most - len(self.copies))
        room_bytes = self.most * self.size_bytes - sum(self.sizes.values())
        return max(0, min(MOST_COPIES - len(self.copies), room_bytes // self.size_bytes))

    def whole(self, version: Version | None) -> HostCopy | None:
        """The copy of that version, if all of it is there to stay, and the buffer can be filled from it."""
        found = self.copies.get(version) if version is not None else None
        is_there = found is not None and found.whole and found.version not in self.leaving
        return found if found is not None and is_there and not self._is_unfit(found) else None

    def _is_unfit(self, copy: HostCopy) -> bool:
        """It cannot fill the buffer: that is made of other tensors, or trying has failed again and again."""
        return copy.layout != self.layout or self.failed.get(copy.version, 0) >= MOST_TRIES

    def has_newer(self, held: Version) -> bool:
        """Some copy is whole, and newer than what the buffer holds."""
        return any(version > held and self.whole(version) is not None for version in self.copies)

    def register(self, layout: Digest, size_bytes: int, most: int, *, next_report: int) -> None:
        """Other tensors. What is whole stays, as others may need it; what is not can become so no more."""
        self.layout, self.size_bytes, self.most, self.failed = layout, size_bytes, min(most, MOST_COPIES), {}
        for copy in self.copies.values():
            if copy.layout != layout and not copy.whole:
                self.leave(copy.version, next_report=next_report)

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
            elif not leaving.is_final:
                del self.leaving[copy.version]

    def leave(self, version: Version, *, next_report: int) -> None:
        """The copy is of no use here any more: it goes as soon as the server says that nobody reads it."""
        self.leaving.setdefault(version, Leaving(next_report)).is_final = True

    def leave_all(self, *, next_report: int) -> None:
        for version in self.copies:
            self.leave(version, next_report=next_report)

    def told(self) -> tuple[HostCopy, ...]:
        """As a report tells it."""
        return tuple(
            replace(
                each,
                leaving=each.version in self.leaving,
                layout=each.layout if each.layout != self.layout else Digest(""),
                unfit=each.whole and self._is_unfit(each),
            )
            for each in self.copies.values()
        )

    # --- filled from a peer -------------------------------------------------------------------------------------------

    def may_fetch(self, version: Version, resolved: Version | None) -> bool:
        """A read into the copy of that version is wanted and fits."""
        found = self.copies.get(version)
        if version in self.leaving or (found is not None and found.whole) or version not in (self.fetch, resolved):
            return False  # what was begun of other tensors is leaving
        return found is not None or self.left > 0

    def begun(self, version: Version, root: Digest) -> None:
        if version not in self.copies:
            self._make(version, root)

    def _make(self, version: Version, root: Digest, *, published: bool = False) -> None:
        self._made += 1
        self.copies[version] = HostCopy(self._made, version, root, published=published, layout=self.layout)
        self.sizes[version] = self.size_bytes

    def advanced(self, version: Version, done: int, chunks: int) -> None:
        found = self.copies[version]
        self.copies[version] = replace(found, done=max(found.done, done), chunks=chunks)

    def filled(self, version: Version) -> None:
        found, leaving = self.copies[version], self.leaving.get(version)
        self.copies[version] = replace(found, done=found.chunks, whole=True)
        if leaving is not None and leaving.is_final and not leaving.is_agreed:
            del self.leaving[version]  # its last chunk came just before it was given up

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
            self.leaving[version] = Leaving(0, is_final=True, is_agreed=True)  # nobody was ever able to read it

    def copy_in(self, version: Version) -> CopyIn | None:
        """Begin to fill the buffer from the copy, if it is whole."""
        if self.whole(version) is None or self.copying is not None:
            return None
        self.copying = ("in", version)
        return CopyIn(version)

    def copied_in(self, version: Version, failure: Failure | None, *, next_report: int) -> Digest | None:
        """The content's identity, or None: the copy was no good, and goes; or copying failed, and it may be good."""
        self._copied("in", version)
        found = self.copies[version]
        if failure is None:
            return found.root
        if failure.code == CorruptTransfer.code:
            self.copies[version] = replace(found, done=0, whole=False)
            self.leave(version, next_report=next_report)
        else:
            self.failed[version] = self.failed.get(version, 0) + 1
        return None

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
            if leaving.is_agreed and not leaving.is_dropping and version not in busy:
                leaving.is_dropping = True
                found.append(DropCopy(version))
        return found

    def dropped(self, version: Version) -> None:
        leaving = self.leaving.get(version)
        if leaving is None or not leaving.is_dropping:
            raise InvariantViolation(f"the copy of version {version} was dropped, which nobody had asked for")
        del self.leaving[version], self.copies[version], self.sizes[version]
