"""The data plane: reads that take time, fail, corrupt, and take what is in the source's memory at that very moment.

Two kinds, as the plan says. A two-sided source (sockets) refuses what it no longer serves, and sends nothing while it
stands still. A one-sided source (RDMA) does not notice that it is read: only the protocol keeps a reader off a buffer
that has changed. In both, a chunk that is under way when its read is stopped still lands; only then has the read ended.
"""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from tensorhub.protocol.messages import Failure, Grant
from tensorhub.protocol.names import Digest
from tensorhub.worker.events import NotShared, ReadMeasured

from .fates import Fates
from .hostcopies import Place
from .plan import MAX_LEASES, Plan
from .world import World

if TYPE_CHECKING:
    from .cluster import Cluster
    from .process import Process

EXPECT_S = 0.5  # a source is asked again for so long for what it does not serve yet
SILENCE_S = 5.0  # a source that shows no sign of life for so long is given up, as the transports do
LOOK_S = 0.1  # so often a reader looks whether a silent source is back
MEASURE_S = 0.5  # as the runtime does
CHUNK_BYTES = 2**20


class SimRead:
    """One read, chunk after chunk."""

    def __init__(self, plane: "DataPlane", reader: "Process", grant: Grant, *, is_only_opened: bool = False) -> None:
        self.plane = plane
        self.reader = reader
        self.grant = grant
        self.ticket, self.root, self.peer = grant.ticket, grant.root, grant.source.worker
        self.source = plane.cluster.process_of(grant.source)
        self.shares = grant.shares  # it maps a host copy of its source, rather than fill one
        self.target = reader.buffer
        if grant.to_host:
            self.target = Place([0] * len(reader.memory)) if grant.shares else reader.host.place(grant.version)
        self.began = self.heard_at = plane.world.now
        self.is_stopped = False
        self.is_ended = False
        self.is_only_opened = is_only_opened  # the manifest is fetched, and nothing else
        self.is_touched = grant.to_host  # a chunk is, or was, on its way into the buffer
        self.limit = 0  # chunks that the source has told of
        self.memory: list[int] = []  # of the source, wherever that is
        self._landed: deque[float] = deque()
        self._rate = -1
        self._later(plane.pace(reader), self._begin)
        if not is_only_opened:
            plane.world.after(MEASURE_S, self._measure)

    def stop(self) -> None:
        self.is_stopped = True
        if self.is_only_opened:
            self._later(self.plane.pace(self.reader), lambda: self._end(None))

    @property
    def done(self) -> int:
        """Chunks in place of the version that is read."""
        return self.target.done if self.target.version == self.grant.version else 0

    @property
    def into(self) -> list[int]:
        """The memory that it fills, or has mapped."""
        return self.target.memory

    @property
    def is_cross_site(self) -> bool:
        """It comes from another site."""
        return self.source is not None and self.source.hello.site != self.reader.hello.site

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        """In the reader's process: it waits while that stands still."""
        self.plane.world.after(delay_s, lambda: self.reader.run(action))

    def _begin(self) -> None:
        if not self.grant.source.endpoints and not self.is_stopped:  # as a worker that is told of no way to its source
            self._end(Failure("transport-missing", f"{self.reader.me} is told of no endpoint of {self.peer}"))
            return
        if not self._goes_on():
            return
        source = self.source
        assert source is not None
        if not self._is_served(source):
            if self.plane.world.now < self.began + EXPECT_S:
                self._later(self.plane.pace(self.reader), self._begin)  # it was granted, and is about to begin itself
                return
            self._end(Failure("source-lost", f"{self.peer} does not serve version {self.grant.version}"))
            return
        if self.plane.layouts.get(self.root, self.reader.layout_digest) != self.reader.layout_digest:
            self._end(
                Failure("layout-mismatch", f"{self.reader.me} has other tensors than version {self.grant.version}")
            )
        elif self.is_only_opened:
            self.reader.has_opened(self)
        else:
            self._fetch()

    def _is_served(self, source: "Process") -> bool:
        """The source can be asked for the version, of which it may have nothing yet."""
        grant = self.grant
        is_there = source.place(grant.version, on_host=grant.source.from_host) is not None
        return is_there or (not grant.source.from_host and source.is_opened(grant.version))

    def _goes_on(self) -> bool:
        """The read may go on now; otherwise it has just been ended, or will be, or looks again later."""
        world, source = self.plane.world, self.source
        if not self.reader.is_alive or self.is_ended:
            return False
        if self.is_stopped:
            self._stopped()
            return False
        if source is None or not source.is_alive or self.plane.cluster.cuts.is_unplugged(source, self.reader):
            delay_s = world.stream(f"read {self.reader.name}").uniform(0.1, 1.0)
            self._later(delay_s, lambda: self._end(Failure("source-lost", f"{self.peer} is gone")))
            return False
        is_paused = source.is_paused and not self.plane.plan.conditions.is_one_sided
        if is_paused or self.plane.cluster.cuts.is_silent(source):
            if world.now > self.heard_at + SILENCE_S:
                self._end(Failure("source-lost", f"{self.peer} says nothing"))
            else:
                self._later(LOOK_S, self._fetch if self.memory else self._begin)
            return False
        self.heard_at = world.now
        if self.plane.fates.fails(self.reader.name, "error", self.plane.plan.conditions.read_error):
            self._end(Failure("source-lost", "connection reset"))
            return False
        return True

    def _fetch(self) -> None:
        if not self._goes_on():
            return
        source, chunk = self.source, self.done
        assert source is not None
        if self.shares:
            self._map(source)
            return
        if chunk >= len(self.reader.memory):
            self._end(None)
            return
        place = source.place(self.grant.version, on_host=self.grant.source.from_host)
        if place is not None:
            self.limit, self.memory = place.available(self.grant.version), place.memory
        elif self._is_served(source):
            self.limit = min(self.limit, chunk)
        elif not self.plane.plan.conditions.is_one_sided or self.limit <= chunk:
            self._end(Failure("source-lost", f"{self.peer} withdrew version {self.grant.version}"))
            return
        if self.limit <= chunk:
            self._later(self.plane.pace(self.reader), self._fetch)  # it is filling itself
            return
        if not self.is_touched:
            self.is_touched = True
            self.reader.touches(self)
            if self.is_stopped:
                self._stopped()
                return
        value = self.memory[chunk]
        self.plane.cluster.watch.chunk_sent(source, self, chunk)
        if self.plane.fates.fails(self.reader.name, "corrupt", self.plane.plan.conditions.corruption):
            value = -abs(value) - 7
        took_s = self.plane.departs(self)
        self.plane.world.after(took_s, lambda: self._land(chunk, value))

    def _map(self, source: "Process") -> None:
        """Have the memory of the source's host copy, and look at all of it."""
        version, reader = self.grant.version, self.reader
        place = source.place(version, on_host=True)
        if place is None or place.available(version) < len(reader.memory):
            self._end(Failure("source-lost", f"{self.peer} has no host copy of version {version}"))
        elif self.plane.fates.fails(reader.name, "unmappable", self.plane.plan.conditions.unmappable):
            self.shares = False
            reader.tell(NotShared(self.grant.ticket))
            if not self.is_stopped:  # else there was no room for a copy of its own
                self.target = reader.host.place(version)
            self._fetch()
        else:
            self.target = reader.host.mapped(place, source)
            self._later(self.plane.pace(reader), self._look_through)

    def _look_through(self) -> None:
        reader, wanted = self.reader, self.plane.contents[self.grant.root]
        failure: Failure | None = None
        if reader.now >= reader.trust_until:
            failure = Failure("session-lost", "the lease ended during the read")
        elif self.plane.plan.conditions.verifies and tuple(self.target.memory) != wanted:
            failure = Failure("corrupt-transfer", "what was mapped is not as published")
        if failure is not None or self.is_stopped or self.is_ended:
            self.target.mapped.let_go(reader)
        else:
            reader.host.keep(self.grant.version, self.target)
        self._end(failure)

    def _land(self, chunk: int, value: int) -> None:
        """The bytes are in the memory, whatever the reader's process is doing; then it looks at them."""
        reader = self.reader
        self.plane.arrived(self)
        if not reader.is_alive or self.is_ended:
            return
        if self.grant.to_host:
            self.target.memory[chunk] = value
        else:
            reader.write(chunk, value)
        reader.run(lambda: self._judge(chunk, value))

    def _judge(self, chunk: int, value: int) -> None:
        reader = self.reader
        if self.is_ended:
            return
        if self.is_stopped:
            self._stopped()
        elif reader.now >= reader.trust_until:
            self._end(Failure("session-lost", "the lease ended during the read"))
        elif self.plane.plan.conditions.verifies and value != self.plane.contents[self.grant.root][chunk]:
            self._end(Failure("corrupt-transfer", f"chunk {chunk} is not as published"))
        else:
            self._landed.append(self.plane.world.now)
            reader.accept(chunk, self)
            self._fetch()

    def _stopped(self) -> None:
        """It was told to stop: at once as a rule, and now and then not for long."""
        if self.is_ended:
            return
        self.is_ended = True
        delay_s = 0.0
        if self.plane.fates.fails(self.reader.name, "stuck", self.plane.plan.conditions.stuck_stop):
            lease_s = self.plane.plan.settings.lease_s
            delay_s = self.plane.world.stream(f"read {self.reader.name}").uniform(0, lease_s)
        if delay_s:
            self._later(delay_s, lambda: self.reader.read_ended(self, None))
        else:
            self.reader.read_ended(self, None)

    def _end(self, failure: Failure | None) -> None:
        if self.is_ended or not self.reader.is_alive:
            return
        if self.is_stopped:
            self._stopped()
            return
        self.is_ended = True
        self.reader.read_ended(self, failure)

    def _measure(self) -> None:
        """Tell how it goes, as the runtime does."""
        if self.is_ended or not self.reader.is_alive:
            return
        now = self.plane.world.now
        while self._landed and self._landed[0] <= now - 1.0:
            self._landed.popleft()
        rate = round(len(self._landed) * CHUNK_BYTES / min(1.0, now - self.began))
        if rate != self._rate:
            self._rate = rate
            self.reader.run(lambda: self.reader.tell(ReadMeasured(self.grant.ticket, "sim", "sim", "", rate)))
        self.plane.world.after(MEASURE_S, self._measure)


class DataPlane:
    """All reads of the cluster, and the true content of everything that was ever published."""

    def __init__(self, world: World, plan: Plan, fates: Fates, cluster: "Cluster") -> None:
        self.world, self.plan, self.fates, self.cluster = world, plan, fates, cluster
        self.is_stormy = True
        self.contents: dict[Digest, tuple[int, ...]] = {}
        self.layouts: dict[Digest, Digest] = {}  # of what was published, by root: a manifest says it
        self._leaving: dict[str, int] = {}  # chunks on their way, by source; and by site, those that leave it

    @property
    def chunk_s(self) -> float:
        """Time of one chunk from an idle source, typically."""
        conditions = self.plan.conditions
        return conditions.chunk_s if self.is_stormy else min(conditions.chunk_s, 0.1, 0.4 / conditions.chunks)

    def pace(self, process: "Process") -> float:
        """Time of some step of a data plane."""
        return self.world.stream(f"pace {process.name}").uniform(0.5, 1.5) * self.chunk_s

    def departs(self, read: SimRead) -> float:
        """A chunk leaves its source. Returns when it will be there: uplinks are shared."""
        source, conditions = read.source, self.plan.conditions
        assert source is not None
        others = self._leaving.get(source.name, 0) if conditions.is_shared else 0
        crossing = self._leaving.get(source.hello.site, 0) if read.is_cross_site else 0
        for key in (source.name, source.hello.site) if read.is_cross_site else (source.name,):
            self._leaving[key] = self._leaving.get(key, 0) + 1
        slowness = self.cluster.cuts.slowness(source)
        took_s = self.pace(read.reader) * slowness * (1 + others) * (1 + conditions.uplink * crossing)
        return min(took_s, MAX_LEASES * self.plan.settings.lease_s)

    def arrived(self, read: SimRead) -> None:
        """The chunk is no longer on its way."""
        assert read.source is not None
        for key in (read.source.name, read.source.hello.site) if read.is_cross_site else (read.source.name,):
            self._leaving[key] -= 1
