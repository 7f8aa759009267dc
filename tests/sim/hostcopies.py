"""The host memory of one simulated worker: copies that are filled by reads, copied out of the buffer or into it.

Copying goes chunk by chunk and takes what is in the memory at that very moment, so a buffer that changes too early is
found out.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tensorhub.protocol.messages import Failure
from tensorhub.protocol.names import Version
from tensorhub.worker.events import CopiedIn, CopiedOut, CopyCounted, CopyDropped

if TYPE_CHECKING:
    from .process import Process

COUNT_S = 1.0  # so often a worker looks whether memory that it shares counts here now
FAILED = Failure("error", "copying to or from host memory failed")


@dataclass
class Mapped:
    """Who has some memory mapped, and who counts it, as the kernel knows both."""

    users: list["Process"] = field(default_factory=list)
    counter: "Process | None" = None  # who has the lock: until it dies or lets the memory go

    def counts_at(self, process: "Process") -> bool:
        """Who asks for the lock has it, unless somebody else does."""
        if self.counter is None or not self.counter.is_alive:
            self.counter = process
        return self.counter is process

    def let_go(self, process: "Process") -> bool:
        """The process maps it no more. Returns whether nobody does."""
        self.users[:] = [user for user in self.users if user is not process and user.is_alive]
        self.counter = self.counter if self.counter is not process else None
        return not self.users


@dataclass
class Place:
    """Memory for one version: the registered buffer, or a host copy."""

    memory: list[int]
    version: Version | None = None  # that is served from here, or filled in
    done: int = 0  # chunks accepted of the fill in hand
    is_filled: bool = False  # its content came by a fill, complete or not: `done` counts
    mapped: Mapped = field(default_factory=Mapped)  # of memory that others have mapped: the same at all of them

    def available(self, version: Version) -> int:
        """Chunks of the version that others may read here now."""
        if self.version != version:
            return 0
        return self.done if self.is_filled else len(self.memory)


class HostCopies:
    """The copies of one process."""

    def __init__(self, process: "Process") -> None:
        self.process = process
        self.places: dict[Version, Place] = {}

    def place(self, version: Version) -> Place:
        """The copy that a read fills; made if need be."""
        found = self.places.get(version)
        if found is None:
            found = self.places[version] = Place([0] * len(self.process.memory), version, is_filled=True)
        return found

    def mapped(self, place: Place, owner: "Process") -> Place:
        """The same memory, which this process has mapped too; nothing that anybody reads here yet."""
        if not place.mapped.users:
            place.mapped.users.append(owner)
            place.mapped.counter = owner
        place.mapped.users.append(self.process)
        return Place(place.memory, is_filled=True, mapped=place.mapped)

    def keep(self, version: Version, place: Place) -> None:
        """What was mapped is a copy of the version, from now on."""
        self.places[version] = place
        place.version, place.done = version, len(place.memory)
        self.process.later(0.0, lambda: self._count(version, place))

    def _count(self, version: Version, place: Place) -> None:
        """Now and then: does anybody else count that memory?"""
        if self.places.get(version) is not place:
            return
        if place.mapped.counts_at(self.process):
            self.process.tell(CopyCounted(version))
        else:
            self.process.later(COUNT_S, lambda: self._count(version, place))

    def copy_to_host(self, version: Version) -> None:
        place = Place([0] * len(self.process.memory), None, is_filled=True)
        self.places[version] = place
        if self._fails():
            self.process.later(self.process.cluster.data.pace(self.process), lambda: self._not_copied_out(version))
            return
        self._copy(self.process.buffer, place, 0, lambda: self._copied_out(version, place))

    def _fails(self) -> bool:
        cluster = self.process.cluster
        return cluster.fates.fails(self.process.name, "copy", cluster.plan.conditions.copy_error)

    def _not_copied_out(self, version: Version) -> None:
        self.process.tell(CopiedOut(version, FAILED))

    def _copied_out(self, version: Version, place: Place) -> None:
        place.version, place.done = version, len(place.memory)
        self.process.tell(CopiedOut(version))

    def copy_in(self, version: Version) -> None:
        process = self.process
        process.buffer.version, process.buffer.is_filled, process.buffer.done = None, True, 0
        failure = FAILED if self._fails() else None

        def then() -> None:
            process.tell(CopiedIn(version, failure))

        source = self.places[version]
        if failure is not None:
            process.write(0, -1)
            process.later(process.cluster.data.pace(process), then)
        else:
            self._copy(source, process.buffer, 0, then)

    def _copy(self, source: Place, target: Place, chunk: int, then: Callable[[], None]) -> None:
        process = self.process
        if chunk == len(source.memory):
            then()
            return
        if target is process.buffer:
            process.write(chunk, source.memory[chunk])
        else:
            target.memory[chunk] = source.memory[chunk]
        delay_s = process.cluster.world.stream(f"copy {process.name}").uniform(0.1, 0.5)
        process.later(delay_s * process.cluster.data.pace(process), lambda: self._copy(source, target, chunk + 1, then))

    def drop(self, version: Version) -> None:
        process = self.process
        place = self.places.pop(version)

        def free() -> None:
            if place.mapped.let_go(process):
                place.memory[:] = [-7] * len(place.memory)  # it is used for something else now
            process.tell(CopyDropped(version))

        process.later(process.cluster.data.pace(process), free)
