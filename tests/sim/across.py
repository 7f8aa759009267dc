"""Reads across layouts in the simulated data plane: a chunk of the reader's comes out of one of several sources.

The reader's chunk number n needs shard n of the sources' cut, counted round. What is taken is good only if the source's
memory is what was granted at that very moment. How contents follow from each other says `contents.py`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from tensorhub.protocol.messages import Failure, Grant, Source
from tensorhub.protocol.names import Digest
from tensorhub.worker.events import ReadMeasured

from .contents import derived, values_of
from .dataplane import CHUNK_BYTES, LOOK_S, SILENCE_S, DataPlane
from .hostcopies import Place

if TYPE_CHECKING:
    from .process import Process


class SimSource:
    """One source of a read across."""

    def __init__(self, source: Source, process: "Process | None", now: float) -> None:
        self.source, self.process = source, process
        self.heard_at = now
        self.memory: list[int] = []


class SimAcross:
    """One read across, chunk after chunk."""

    shares = False

    def __init__(self, plane: DataPlane, reader: "Process", grant: Grant) -> None:
        self.plane, self.reader = plane, reader
        self.grant, self.ticket = grant, grant.ticket
        self.began = plane.world.now
        self.sources = [SimSource(each, plane.cluster.process_of(each), self.began) for each in grant.sources]
        self.root = Digest("")
        self.arrived_bytes = 0
        self.is_only_opened = True
        self.is_stopped = False
        self.is_ended = False
        self.is_touched = grant.to_host
        self.target = Place([0] * len(reader.memory)) if grant.to_host else reader.buffer
        self._later(plane.pace(reader), self._open)

    @property
    def into(self) -> list[int]:
        return self.target.memory

    @property
    def done(self) -> int:
        return self.target.done if self.target.version == self.grant.version else 0

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        self.plane.world.after(delay_s, lambda: self.reader.run(action))

    # --- what the machine wants ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """What was opened is read."""
        self.is_only_opened = False
        if self.grant.to_host:
            self.target = self.reader.host.place(self.grant.version)
        self._later(self.plane.pace(self.reader), self._step)

    def stop(self) -> None:
        self.is_stopped = True
        if self.is_only_opened:
            self._later(self.plane.pace(self.reader), self._stopped)

    # --- opening ------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Ask all sources for their manifests; where one does not answer the read fails."""
        if not self._goes_on():
            return
        there = [self._is_there(each) for each in self.sources]
        if self.is_ended or self.is_stopped or not self.reader.is_alive:
            return
        if not all(there):
            self._later(LOOK_S, self._open)
            return
        roots = {derived(each.root, self.reader.cut, self.reader.me.shard): None for each in self.grant.sources}
        if len(roots) > 1:
            self.end(Failure("layout-mismatch", f"the sources have different contents: {list(roots)}"))
            return
        self.root = next(iter(roots))
        self.plane.contents[self.root] = values_of(self.root, len(self.reader.memory))
        self.reader.has_opened(self)

    def _goes_on(self) -> bool:
        if self.is_stopped and not self.is_only_opened:
            self._stopped()
        return not (self.is_ended or self.is_stopped) and self.reader.is_alive

    def _is_there(self, one: SimSource) -> bool:
        """The source answers now. If it never will, the read has failed."""
        if self.is_ended:
            return False
        world, process, conditions = self.plane.world, one.process, self.plane.plan.conditions
        cuts, source, version = self.plane.cluster.cuts, one.source, self.grant.version
        if not source.endpoints:
            self.end(Failure("transport-missing", "no endpoint is named"), one)
        elif process is None or not process.is_alive or cuts.is_unplugged(process, self.reader):
            self.end(Failure("source-lost", f"{source.worker} is gone"), one)
        elif (process.is_paused and not conditions.is_one_sided) or cuts.is_silent(process):
            if world.now > one.heard_at + SILENCE_S:
                self.end(Failure("source-lost", f"{source.worker} says nothing"), one)
        elif self.plane.fates.fails(self.reader.name, "error", conditions.read_error):
            self.end(Failure("source-lost", "connection reset"), one)
        else:
            one.heard_at = world.now
            place = process.place(version, on_host=source.from_host)
            if place is not None and place.available(version) >= len(place.memory):
                one.memory = place.memory
                return True
            if conditions.is_one_sided and one.memory:
                return True  # it does not notice
            self.end(Failure("source-lost", f"{source.worker} does not serve version {version}"), one)
        return False

    # --- bytes --------------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        if not self._goes_on():
            return
        chunk = self.done
        if chunk >= len(self.reader.memory):
            self.end(None)
            return
        one = self.sources[chunk % len(self.sources)]
        if self._is_there(one):
            self._fetch(one, chunk)
        else:
            self._later(LOOK_S, self._step)

    def _fetch(self, one: SimSource, chunk: int) -> None:
        plane, process, reader = self.plane, one.process, self.reader
        assert process is not None
        if not self.is_touched:
            self.is_touched = True
            reader.touches(self)
            if not self._goes_on():
                return
        at = chunk % len(one.memory)
        is_good = one.memory[at] == plane.contents[one.source.root][at]
        is_good = is_good and not plane.fates.fails(reader.name, "corrupt", plane.plan.conditions.corruption)
        value = plane.contents[self.root][chunk]
        took_s = plane.pace(reader) * plane.cluster.cuts.slowness(process)
        took_s = min(took_s, 2 * plane.plan.settings.lease_s)
        plane.world.after(took_s, lambda: self._land(one, chunk, value if is_good else -value - 9))

    def _land(self, one: SimSource, chunk: int, value: int) -> None:
        """The bytes are in the memory, whatever the reader's process is doing; then it looks at them."""
        if not self.reader.is_alive or self.is_ended:
            return
        if self.grant.to_host:
            self.target.memory[chunk] = value
        else:
            self.reader.write(chunk, value)
        self.reader.run(lambda: self._judge(one, chunk, value))

    def _judge(self, one: SimSource, chunk: int, value: int) -> None:
        reader = self.reader
        if not self._goes_on():
            return
        if reader.now >= reader.trust_until:
            self.end(Failure("session-lost", "the lease ended during the read"))
        elif self.plane.plan.conditions.verifies and value != self.plane.contents[self.root][chunk]:
            self.end(Failure("corrupt-transfer", f"a tile of chunk {chunk} is not as published"), one)
        else:
            self.arrived_bytes += CHUNK_BYTES
            reader.tell(ReadMeasured(self.ticket, "sim", "sim", "", 0, self.arrived_bytes))
            if self._goes_on():  # else its time was up just then
                reader.accept(chunk, self)
                self._step()

    def _stopped(self) -> None:
        if not self.is_ended and self.reader.is_alive:
            self.is_ended = True
            self.reader.read_ended(self, None)

    def end(self, failure: Failure | None, one: SimSource | None = None) -> None:
        """It is over, because of that source if it has failed."""
        if self.is_ended or not self.reader.is_alive:
            return
        self.is_ended = True
        source = one.source.worker if one is not None else None
        self.reader.read_ended(self, None if self.is_stopped else failure, source)
