"""The host memory of one simulated worker: copies that are filled by reads, copied out of the buffer or into it.

Copying goes chunk by chunk and takes what is in the memory at that very moment, so a buffer that changes too early is
found out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.events import CopiedIn, CopiedOut, CopyDropped
from ..core.names import Version

if TYPE_CHECKING:
    from .process import Process


@dataclass
class Place:
    """Memory for one version: the registered buffer, or a host copy."""

    memory: list[int]
    version: Version | None = None  # that is served from here, or filled in
    done: int = 0  # chunks accepted of the fill in hand
    is_filled: bool = False  # its content came by a fill, complete or not: `done` counts

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
        self.given_up: dict[Version, None] = {}  # that were whole

    def place(self, version: Version) -> Place:
        """The copy that a read fills; made if need be."""
        found = self.places.get(version)
        if found is None:
            found = self.places[version] = Place([0] * len(self.process.memory), version, is_filled=True)
        return found

    def copy_out(self, version: Version) -> None:
        place = Place(list(self.process.memory), None, is_filled=True)
        self.places[version] = place
        self._copy(self.process.buffer, place, 0, lambda: self._copied_out(version, place))

    def _copied_out(self, version: Version, place: Place) -> None:
        place.version, place.done = version, len(place.memory)
        self.process.cluster.oracles.copy_is_whole(self.process, version)
        self.process.tell(CopiedOut(version))

    def copy_in(self, version: Version) -> None:
        process = self.process
        process.cluster.oracles.begins_to_change(process, version)
        process.buffer.version, process.buffer.is_filled, process.buffer.done = None, True, 0
        self._copy(self.places[version], process.buffer, 0, lambda: process.tell(CopiedIn(version)))

    def _copy(self, source: Place, target: Place, chunk: int, then: Callable[[], None]) -> None:
        if chunk == len(source.memory):
            then()
            return
        target.memory[chunk] = source.memory[chunk]
        world = self.process.cluster.world
        delay_s = world.chance.uniform(0.1, 0.5) * self.process.cluster.data.pace()
        world.after(delay_s, lambda: self._copy(source, target, chunk + 1, then) if self.process.is_alive else None)

    def drop(self, version: Version) -> None:
        process = self.process
        place = self.places.pop(version)
        self.given_up.pop(version, None)
        if place.done == len(place.memory):
            self.given_up[version] = None
        process.cluster.oracles.serving_stops(process, version, from_host=True)

        def free() -> None:
            place.memory[:] = [-7] * len(place.memory)  # it is somebody else's now
            process.tell(CopyDropped(version))

        process.cluster.world.after(process.cluster.data.pace(), free)
