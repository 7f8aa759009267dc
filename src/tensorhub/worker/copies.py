"""A worker's host copies: versions in host memory beside the buffer, offloaded from it or fetched ahead.

Peers may read them as they read the buffer. The server says what to offload, fetch and release. No copy is begun that
does not fit the worker's own limit.

A release takes two steps, because orders may come late, or from a server that is dead by now. The worker first reports
the copy as `dropping`. It drops the copy when orders that answer that report still release it; otherwise the copy
stays. A copy that is of no use here any more goes the same way, but never stays. Copies of tensors that were registered
before cannot fill the present ones, but peers may go on reading them.
"""

from dataclasses import dataclass, field
from typing import Literal

from msgspec.structs import replace

from ..protocol.errors import CorruptTransfer, InvariantViolation
from ..protocol.messages import MAX_COPIES, Failure, Holding, HostCopy, Orders, Reading, Spec, Withdrawing
from ..protocol.names import Digest, Number, Version
from .events import CopyIn, CopyOut, DropCopy, Effect, Registered

Copying = tuple[Literal["in", "out"], Version]

MAX_TRIES = 3  # of copying in, in one call: from memory to memory, what has failed three times will fail again


@dataclass
class Dropping:
    """A host copy that is about to go."""

    released_in: int  # the first report that said so
    is_final: bool = False  # it is of no use here any more, whatever the server says
    is_agreed: bool = False  # the server knows that it is dropping and still releases it, or it could never be read
    is_freeing: bool = False

    def is_answered(self, acknowledged: int) -> bool:
        """The server that sent orders with that acknowledgement knows of it, and can still decide about it."""
        return not self.is_freeing and acknowledged >= self.released_in


@dataclass
class HostCopyRecords:
    """Host copies by version, and the one that may be being copied from or to the buffer."""

    max_copies: int = 0  # of the present tensors: so many the limit on host memory allows
    size_bytes: int = 0  # of one of those
    layout: Digest = Digest("")  # of the present tensors
    by_version: dict[Version, HostCopy] = field(default_factory=dict)
    sizes: dict[Version, int] = field(default_factory=dict)  # of the copies, in bytes, as far as they count here
    mapped: dict[Version, int] = field(default_factory=dict)  # sizes of those that another worker of this host made
    failed: dict[Version, int] = field(default_factory=dict)  # how often copying it in has failed, in this call
    copying: Copying | None = None
    offload: Version | None = None  # as the latest orders say
    fetch: Version | None = None  # the same
    error: Failure | None = None  # why the last offload failed
    prefetch: Spec | None = None  # what the caller wants fetched ahead
    pins: tuple[Version, ...] = ()
    dropping: dict[Version, Dropping] = field(default_factory=dict)
    _made: int = 0
    _to_share: tuple[Digest, int] = (Digest(""), 0)  # layout and size of what the open read maps

    @property
    def count(self) -> int:
        """How many are of the present tensors, begun or whole, but for those that another worker made."""
        made = (copy for copy in self.by_version.values() if copy.version not in self.mapped)
        return sum(copy.layout == self.layout for copy in made)

    @property
    def room(self) -> int:
        """How many more copies of the present tensors fit beside all copies that are here, of former tensors too."""
        if not self.size_bytes:
            return max(0, self.max_copies - len(self.by_version))
        room_bytes = self.max_copies * self.size_bytes - sum(self.sizes.values())
        return max(0, min(MAX_COPIES - len(self.by_version), room_bytes // self.size_bytes))

    def whole(self, version: Version | None) -> HostCopy | None:
        """The copy of that version, if it is whole, stays, and can fill the buffer."""
        found = self.by_version.get(version) if version is not None else None
        is_there = found is not None and found.whole and found.version not in self.dropping
        return found if found is not None and is_there and not self._is_unfit(found) else None

    def _is_unfit(self, copy: HostCopy) -> bool:
        """It cannot fill the buffer: it is of other tensors, or copying it in has failed too often."""
        return copy.layout != self.layout or self.failed.get(copy.version, 0) >= MAX_TRIES

    @property
    def newest_whole(self) -> Version | None:
        """The newest version that is whole here, and can fill the buffer."""
        return max((version for version in self.by_version if self.whole(version) is not None), default=None)

    def register(self, event: Registered, *, next_report: int) -> None:
        """Other tensors. Whole copies stay, as others may need them; unfinished ones can no longer be finished.

        Copies of the same tensors, registered again, stay allowed where memory has become short: also one that is
        begun here, and for which there is no memory yet.
        """
        layout = event.digest
        self.layout, self.size_bytes, self.failed = layout, event.size_bytes, {}
        self.max_copies = max(min(event.max_copies, MAX_COPIES), self.count)
        for copy in self.by_version.values():
            if copy.layout != layout and not copy.whole:
                self.leave(copy.version, next_report=next_report)

    def new_call(self) -> None:
        """A call begins: what has failed before may be tried again."""
        self.error, self.failed = None, {}

    def take_orders(self, orders: Orders, *, next_report: int) -> None:
        """The latest orders. The next report, with that number, is the first that says what they change here."""
        self.offload, self.fetch = orders.offload, orders.fetch
        for copy in self.by_version.values():
            is_released, dropping = copy.number in orders.release, self.dropping.get(copy.version)
            if dropping is None and is_released:
                self.dropping[copy.version] = Dropping(next_report)
            elif dropping is None or not dropping.is_answered(orders.acknowledged):
                continue
            elif is_released:
                dropping.is_agreed = True
            elif not dropping.is_final:
                del self.dropping[copy.version]

    def leave(self, version: Version, *, next_report: int) -> None:
        """The copy is of no use here any more: it goes as soon as the server has moved its readers."""
        self.dropping.setdefault(version, Dropping(next_report)).is_final = True

    def leave_all(self, *, next_report: int) -> None:
        """The worker leaves, and needs none of them."""
        for version in self.by_version:
            self.leave(version, next_report=next_report)

    def for_report(self) -> tuple[HostCopy, ...]:
        """The host copies as the worker reports them."""
        return tuple(
            replace(
                each,
                dropping=each.version in self.dropping,
                layout=each.layout if each.layout != self.layout else Digest(""),
                unfit=each.whole and self._is_unfit(each),
            )
            for each in self.by_version.values()
        )

    # --- filled from a peer -------------------------------------------------------------------------------------------

    def may_fetch(self, version: Version, resolved: Version | None) -> bool:
        """A read into a host copy of that version is wanted, and there is room."""
        found = self.by_version.get(version)
        if version in self.dropping or (found is not None and found.whole) or version not in (self.fetch, resolved):
            return False  # what was begun of other tensors is dropping
        return self.may_begin(version)

    def begun(self, version: Version, root: Digest, epoch: Number) -> None:
        """A read into the copy has begun."""
        if version not in self.by_version:
            self._make(version, root, epoch)

    def begun_to_share(self) -> None:
        """A read is begun that maps another worker's copy: it will be of the present tensors, whatever comes."""
        self._to_share = (self.layout, self.size_bytes)

    def may_begin(self, version: Version) -> bool:
        """A read may be into the copy of that version, or into one that there is room for."""
        return version in self.by_version or self.room > 0

    def shared(self, version: Version, root: Digest, epoch: Number) -> None:
        """The copy of another worker of this host is mapped here: all of it at once, and it counts there."""
        layout, size_bytes = self._to_share
        self._make(version, root, epoch)
        self.by_version[version] = replace(self.by_version[version], whole=True, shared=True, layout=layout)
        self.mapped[version], self.sizes[version] = size_bytes, 0

    def counted(self, version: Version) -> None:
        """Its memory counts here now. There may be more than the limit allows, until some may go."""
        found = self.by_version.get(version)
        if found is None or not found.shared:
            raise InvariantViolation(f"the memory of version {version} counts here now, and none of it is shared")
        self.by_version[version] = replace(found, shared=False)
        self.sizes[version] = self.mapped[version]

    def _make(self, version: Version, root: Digest, epoch: Number, *, published: bool = False) -> None:
        self._made += 1
        found = HostCopy(self._made, version, root, published=published, layout=self.layout, epoch=epoch)
        self.by_version[version] = found
        self.sizes[version] = self.size_bytes

    def advanced(self, version: Version, done: int, chunks: int) -> None:
        """Notes how many of its chunks are in place."""
        found = self.by_version[version]
        self.by_version[version] = replace(found, done=max(found.done, done), chunks=chunks)

    def filled(self, version: Version) -> None:
        """Its last chunk is in place."""
        found, dropping = self.by_version[version], self.dropping.get(version)
        self.by_version[version] = replace(found, done=found.chunks, whole=True)
        if dropping is not None and dropping.is_final and not dropping.is_agreed:
            del self.dropping[version]  # its last chunk came just before it was given up

    # --- copied here --------------------------------------------------------------------------------------------------

    def copy_to_host(self, buffer: Holding | Withdrawing) -> CopyOut | None:
        """Begin to offload, if that is ordered and fits."""
        is_busy = self.copying is not None or buffer.version in self.by_version or not self.room
        if is_busy or self.offload != buffer.version or self.error is not None:
            return None
        self.copying, self.error = ("out", buffer.version), None
        self._make(buffer.version, buffer.root, buffer.epoch, published=buffer.published)
        return CopyOut(buffer.version, is_ahead=isinstance(buffer, Holding))

    def copied_out(self, version: Version, failure: Failure | None) -> None:
        """Called when the offload has ended."""
        self._copied("out", version)
        if failure is None:
            self.by_version[version] = replace(self.by_version[version], whole=True)
        else:
            self.error = failure.bounded()
            self.dropping[version] = Dropping(0, is_final=True, is_agreed=True)  # it was never readable

    def copy_in(self, version: Version) -> CopyIn | None:
        """Begin to fill the buffer from the copy, if it is whole."""
        if self.whole(version) is None or self.copying is not None:
            return None
        self.copying = ("in", version)
        return CopyIn(version)

    def copied_in(self, version: Version, failure: Failure | None, *, next_report: int) -> HostCopy | None:
        """Returns the copy that is in the buffer now. None: the copy was no good and goes, or copying has failed."""
        self._copied("in", version)
        found = self.by_version[version]
        if failure is None:
            return found
        if failure.code == CorruptTransfer.code:
            self.by_version[version] = replace(found, done=0, whole=False)
            self.leave(version, next_report=next_report)
        else:
            self.failed[version] = self.failed.get(version, 0) + 1
        return None

    def _copied(self, way: Literal["in", "out"], version: Version) -> None:
        if self.copying != (way, version):
            raise InvariantViolation(f"version {version} was copied {way}, under way was {self.copying}")
        self.copying = None

    # --- dropped ------------------------------------------------------------------------------------------------------

    def drop_what_may_go(self, reading: Reading | None) -> list[Effect]:
        """Drop those that are agreed to go, unless the open read or a copy in or out needs them now."""
        busy = [self.copying[1]] if self.copying is not None else []
        if reading is not None and reading.to_host:
            busy.append(reading.version)
        found: list[Effect] = []
        for version, dropping in self.dropping.items():
            if dropping.is_agreed and not dropping.is_freeing and version not in busy:
                dropping.is_freeing = True
                found.append(DropCopy(version))
        return found

    def dropped(self, version: Version) -> None:
        """Called when its memory is free."""
        dropping = self.dropping.get(version)
        if dropping is None or not dropping.is_freeing:
            raise InvariantViolation(f"the copy of version {version} was dropped, which was not asked for")
        del self.dropping[version], self.by_version[version], self.sizes[version]
        self.mapped.pop(version, None)
