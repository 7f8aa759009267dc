"""The data plane: reads that take time, fail, corrupt, and take what is in the source's memory at that very moment.

Two kinds, as the seed decides. A two-sided source (sockets) refuses what it no longer serves. A one-sided source
(RDMA) does not notice that it is read, so only the protocol keeps a reader off a buffer that has changed. In both, a
chunk that is under way when its read is stopped still lands; only then has the read ended.
"""

from typing import TYPE_CHECKING

from ..core.messages import Failure, Grant
from ..core.names import Digest
from .weather import Weather
from .world import World

if TYPE_CHECKING:
    from .cluster import Cluster
    from .process import Process

EXPECT_S = 0.5  # a source is asked again for so long for what it does not serve yet


class SimRead:
    """One read, chunk after chunk."""

    def __init__(self, plane: "DataPlane", reader: "Process", grant: Grant, *, is_only_opened: bool = False) -> None:
        self.plane = plane
        self.reader = reader
        self.grant = grant
        source = plane.cluster.living(grant.source)
        is_same_life = source is not None and source.hello.endpoints == grant.endpoints
        self.source = source if is_same_life else None
        self.target = reader.host.place(grant.version) if grant.to_host else reader.buffer
        self.began = plane.world.now
        self.is_stopped = False
        self.is_ended = False
        self.is_only_opened = is_only_opened  # the manifest is fetched, and nothing else
        self.is_touched = grant.to_host  # a chunk is, or was, on its way into the buffer
        self.limit = 0  # chunks that the source has told of
        self.memory: list[int] = []  # of the source, wherever that is
        plane.world.after(plane.pace(), self._begin)

    def stop(self) -> None:
        self.is_stopped = True
        if self.is_only_opened:
            self.plane.world.after(self.plane.pace(), lambda: self._end(None))

    @property
    def done(self) -> int:
        """Chunks in place of the version that is read."""
        return self.target.done if self.target.version == self.grant.version else 0

    def _begin(self) -> None:
        if not self._goes_on():
            return
        source = self.source
        if source is None or not self._is_served(source):
            if source is not None and self.plane.world.now < self.began + EXPECT_S:
                self.plane.world.after(self.plane.pace(), self._begin)  # it was granted, and is about to begin itself
                return
            self._end(Failure("source-lost", f"{self.grant.source} does not serve version {self.grant.version}"))
            return
        if self.is_only_opened:
            self.reader.has_opened(self)
        else:
            self._fetch()

    def _is_served(self, source: "Process") -> bool:
        """The source can be asked for the version, of which it may have nothing yet."""
        grant = self.grant
        is_there = source.place(grant.version, on_host=grant.from_host) is not None
        return is_there or (not grant.from_host and source.is_opened(grant.version))

    def _goes_on(self) -> bool:
        """The read may go on; otherwise it has just been ended."""
        if not self.reader.is_alive:
            return False
        if self.is_stopped:
            self._end(None)
            return False
        source = self.source
        if source is None or not source.is_alive or source.is_data_cut or self.reader.is_data_cut:
            delay = self.plane.world.chance.uniform(0.1, 1.0)
            self.plane.world.after(delay, lambda: self._end(Failure("source-lost", f"{self.grant.source} is gone")))
            return False
        if self.plane.is_stormy and self.plane.world.happens(self.plane.weather.read_error):
            self._end(Failure("source-lost", "connection reset"))
            return False
        return True

    def _fetch(self) -> None:
        if not self._goes_on():
            return
        source, chunk = self.source, self.done
        assert source is not None
        if chunk >= len(self.reader.memory):
            self._end(None)
            return
        place = source.place(self.grant.version, on_host=self.grant.from_host)
        if place is not None:
            self.limit, self.memory = place.available(self.grant.version), place.memory
        elif self._is_served(source):
            self.limit = min(self.limit, chunk)
        elif not self.plane.weather.is_one_sided or self.limit <= chunk:
            self._end(Failure("source-lost", f"{self.grant.source} withdrew version {self.grant.version}"))
            return
        if self.limit <= chunk:
            self.plane.world.after(self.plane.pace(), self._fetch)  # it is filling itself
            return
        if not self.is_touched:
            self.is_touched = True
            self.reader.touches(self)
            if self.is_stopped:
                self._end(None)
                return
        value = self.memory[chunk]
        self.plane.cluster.oracles.sent(source, self, chunk)
        if self.plane.is_stormy and self.plane.world.happens(self.plane.weather.corruption):
            value = -abs(value) - 7
        source.sent += 1
        self.plane.world.after(self.plane.pace(), lambda: self._land(chunk, value))

    def _land(self, chunk: int, value: int) -> None:
        reader = self.reader
        if not reader.is_alive or self.is_ended:
            return
        if self.grant.to_host:
            self.target.memory[chunk] = value
        else:
            reader.write(chunk, value)
        if self.is_stopped:
            self._end(None)
        elif reader.now >= reader.trust_until:
            self._end(Failure("session-lost", "the lease ended during the read"))
        elif self.plane.weather.verifies and value != self.plane.contents[self.grant.root][chunk]:
            self._end(Failure("corrupt-transfer", f"chunk {chunk} is not as published"))
        else:
            reader.accept(chunk, self)
            self._fetch()

    def _end(self, failure: Failure | None) -> None:
        if self.is_ended or not self.reader.is_alive:
            return
        self.is_ended = True
        self.reader.read_ended(self, failure)


class DataPlane:
    """All reads of the cluster, and the true content of everything that was ever published."""

    def __init__(self, world: World, weather: Weather, cluster: "Cluster") -> None:
        self.world = world
        self.weather = weather
        self.cluster = cluster
        self.is_stormy = True
        self.contents: dict[Digest, tuple[int, ...]] = {}

    def pace(self) -> float:
        chunk_s = self.weather.chunk_s
        if not self.is_stormy:
            chunk_s = min(chunk_s, 0.2, 1.2 / self.weather.chunks)
        return self.world.chance.uniform(0.5, 1.5) * chunk_s
