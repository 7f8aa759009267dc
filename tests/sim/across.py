"""Reads across layouts in the simulated data plane: a chunk of the reader's comes out of one of several sources.

The reader's chunk number n needs shard n of the source's cut, counted round. What is taken is good only if the source's
memory is what was granted at that very moment. How contents follow from each other says `contents.py`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from tensorhub.protocol.messages import Failure, Grant
from tensorhub.protocol.names import Digest, Ticket, WorkerId
from tensorhub.worker.events import AcrossOpened, PartEnded, PartMeasured

from .contents import derived, values_of
from .dataplane import CHUNK_BYTES, LOOK_S, SILENCE_S, DataPlane
from .hostcopies import Place

if TYPE_CHECKING:
    from .process import Process


class SimPart:
    """One source of a read across."""

    def __init__(self, grant: Grant, source: "Process | None") -> None:
        self.grant, self.source = grant, source
        self.is_stopped = False
        self.is_ended = False
        self.is_busy = False  # a chunk is on its way
        self.arrived_bytes = 0
        self.heard_at = -1.0
        self.memory: list[int] = []


class SimAcross:
    """One read across, chunk after chunk."""

    shares = False
    is_cross_site = False

    def __init__(self, plane: DataPlane, reader: "Process", ticket: Ticket, grants: tuple[Grant, ...]) -> None:
        self.plane, self.reader, self.ticket = plane, reader, ticket
        self.grant = grants[0]
        self.parts: dict[Ticket, SimPart] = {}
        self.tickets: dict[Ticket, WorkerId] = {}
        self.lacking = 0  # parts that ended without what was wanted of them, and were not replaced
        self.began = plane.world.now
        self.root = Digest("")
        self.is_only_opened = True
        self.is_stopped = False
        self.is_ended = False
        self.is_touched = self.grant.to_host
        self.target = Place([0] * len(reader.memory)) if self.grant.to_host else reader.buffer
        for grant in grants:
            self._add(grant)
        self._later(plane.pace(reader), self._open)

    @property
    def into(self) -> list[int]:
        return self.target.memory

    def read_now(self) -> "list[SimPart]":
        """What may bring something."""
        return [] if self.is_stopped or self.is_ended else list(self.parts.values())

    @property
    def done(self) -> int:
        return self.target.done if self.target.version == self.grant.version else 0

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        self.plane.world.after(delay_s, lambda: self.reader.run(action))

    # --- what the machine wants ---------------------------------------------------------------------------------------

    def _add(self, grant: Grant) -> None:
        source = self.plane.cluster.living(grant.source)
        is_same_life = source is not None and source.hello.endpoints == grant.endpoints
        part = self.parts[grant.ticket] = SimPart(grant, source if is_same_life else None)
        part.heard_at = self.plane.world.now
        self.tickets[grant.ticket] = grant.source

    def add(self, grant: Grant) -> None:
        self._add(grant)
        self.lacking = max(0, self.lacking - 1)
        if self.root and not self._needs(self.parts[grant.ticket]):
            self._later(self.plane.pace(self.reader), lambda: self._part_over(grant.ticket, brought=True))

    def start(self) -> None:
        """What was opened is read."""
        self.is_only_opened = False
        if self.grant.to_host:
            self.target = self.reader.host.place(self.grant.version)
        self._later(self.plane.pace(self.reader), self._step)

    def stop(self) -> None:
        self.is_stopped = True
        if self.is_only_opened:
            self._later(self.plane.pace(self.reader), lambda: self.end(None))

    def stop_part(self, ticket: Ticket) -> None:
        part = self.parts.get(ticket)
        if part is None:
            return
        part.is_stopped = True
        self.lacking += 1
        if not part.is_busy:
            self._later(self.plane.pace(self.reader), lambda: self._part_over(ticket))

    # --- opening ------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Ask all sources for their manifests; who does not answer fails."""
        if self.is_ended or self.is_stopped or self.root or not self.reader.is_alive:
            return
        for ticket, part in list(self.parts.items()):
            self._is_there(ticket, part)
        if self.is_ended or self.is_stopped or not self.reader.is_alive:
            return  # it was told of a part that had failed
        shards = {part.grant.source.shard: part for part in self.parts.values() if not part.is_stopped}
        wants = next((part.source.hello.shards for part in shards.values() if part.source is not None), 0)
        silent = any(part.heard_at < self.plane.world.now for part in shards.values())
        if wants and len(shards) < wants and not silent and self.lacking == 0:
            self.end(Failure("layout-mismatch", f"of {wants} shards of the sources only {sorted(shards)} are granted"))
            return
        if not wants or len(shards) < wants or silent:
            self._later(LOOK_S, self._open)
            return
        roots = {derived(part.grant.root, self.reader.cut, self.reader.me.shard): None for part in shards.values()}
        if len(roots) > 1:
            self.end(Failure("layout-mismatch", f"the sources have different contents: {list(roots)}"))
            return
        self.root = next(iter(roots))
        self.plane.contents[self.root] = values_of(self.root, len(self.reader.memory))
        self.reader.opened = self.grant.version
        self.reader.tell(AcrossOpened(self.ticket, self.root))

    def _is_there(self, ticket: Ticket, part: SimPart) -> bool:
        """The source answers now. If it never will, the part has failed."""
        world, source, conditions = self.plane.world, part.source, self.plane.plan.conditions
        cuts = self.plane.cluster.cuts
        if not part.grant.endpoints:
            self._fails(ticket, "transport-missing", "no endpoint is named")
        elif source is None or not source.is_alive or cuts.is_unplugged(source, self.reader):
            self._fails(ticket, "source-lost", f"{part.grant.source} is gone")
        elif (source.is_paused and not conditions.is_one_sided) or cuts.is_silent(source):
            if world.now > part.heard_at + SILENCE_S:
                self._fails(ticket, "source-lost", f"{part.grant.source} says nothing")
        elif self.plane.fates.fails(self.reader.name, "error", conditions.read_error):
            self._fails(ticket, "source-lost", "connection reset")
        else:
            part.heard_at = world.now
            place = source.place(part.grant.version, on_host=part.grant.from_host)
            if place is not None and place.available(part.grant.version) >= len(place.memory):
                part.memory = place.memory
                return True
            if conditions.is_one_sided and part.memory:
                return True  # it does not notice
            self._fails(ticket, "source-lost", f"{part.grant.source} does not serve version {part.grant.version}")
        return False

    def _fails(self, ticket: Ticket, code: str, message: str) -> None:
        self._part_over(ticket, failure=Failure(code, message))

    def _part_over(self, ticket: Ticket, *, brought: bool = False, failure: Failure | None = None) -> None:
        part = self.parts.pop(ticket, None)
        if part is not None and not self.is_ended and self.reader.is_alive:
            part.is_ended = True
            brought = brought and not part.is_stopped
            self.lacking += not (brought or part.is_stopped)  # who was told to stop lacks since then
            self.reader.tell(PartEnded(self.ticket, ticket, brought, None if part.is_stopped else failure))

    # --- bytes --------------------------------------------------------------------------------------------------------

    def _wants(self, part: SimPart, chunk: int) -> bool:
        return part.source is None or chunk % part.source.hello.shards == part.grant.source.shard

    def _needs(self, part: SimPart) -> bool:
        return any(self._wants(part, chunk) for chunk in range(self.done, len(self.reader.memory)))

    def _step(self) -> None:
        if self.is_ended or not self.reader.is_alive:
            return
        if self.is_stopped:
            self._stopped()
            return
        chunk = self.done
        if chunk >= len(self.reader.memory):
            self.end(None)
            return
        for ticket, part in list(self.parts.items()):
            if not part.is_stopped and not self._needs(part):
                self._part_over(ticket, brought=True)
        ready = [(t, p) for t, p in self.parts.items() if not p.is_stopped and self._wants(p, chunk)]
        if not ready or not self._is_there(*ready[0]):
            self._later(LOOK_S, self._step)
            return
        self._fetch(*ready[0], chunk)

    def _fetch(self, ticket: Ticket, part: SimPart, chunk: int) -> None:
        plane, source, reader = self.plane, part.source, self.reader
        assert source is not None
        if not self.is_touched:
            self.is_touched = True
            reader.touches(self)
            if self.is_stopped or part.is_ended:
                self._step()
                return
        at = chunk % len(part.memory)
        is_good = part.memory[at] == plane.contents[part.grant.root][at]
        is_good = is_good and not plane.fates.fails(reader.name, "corrupt", plane.plan.conditions.corruption)
        value = plane.contents[self.root][chunk]
        part.is_busy = True
        took_s = plane.pace(reader) * plane.cluster.cuts.slowness(source)
        took_s = min(took_s, 2 * plane.plan.settings.lease_s)
        plane.world.after(took_s, lambda: self._land(ticket, part, chunk, value if is_good else -value - 9))

    def _land(self, ticket: Ticket, part: SimPart, chunk: int, value: int) -> None:
        """The bytes are in the memory, whatever the reader's process is doing; then it looks at them."""
        if not self.reader.is_alive or self.is_ended:
            return
        if self.grant.to_host:
            self.target.memory[chunk] = value
        else:
            self.reader.write(chunk, value)
        self.reader.run(lambda: self._judge(ticket, part, chunk, value))

    def _judge(self, ticket: Ticket, part: SimPart, chunk: int, value: int) -> None:
        reader, part.is_busy = self.reader, False
        if self.is_ended:
            return
        if self.is_stopped:
            self._stopped()
        elif reader.now >= reader.trust_until:
            self.end(Failure("session-lost", "the lease ended during the read"))
        elif part.is_stopped:
            self._part_over(ticket)
            self._step()
        elif self.plane.plan.conditions.verifies and value != self.plane.contents[self.root][chunk]:
            self._fails(ticket, "corrupt-transfer", f"a tile of chunk {chunk} is not as published")
            self._step()
        else:
            part.arrived_bytes += CHUNK_BYTES
            reader.tell(PartMeasured(self.ticket, ticket, part.arrived_bytes))
            if self.is_stopped or self.is_ended:  # its time was up just then
                self._stopped()
                return
            reader.accept(chunk, self)
            self._step()

    def _stopped(self) -> None:
        if self.is_ended:
            return
        self.is_ended = True
        self.reader.read_ended(self, None)

    def end(self, failure: Failure | None) -> None:
        """The whole is over."""
        if self.is_ended or not self.reader.is_alive:
            return
        self.is_ended = True
        self.reader.read_ended(self, None if self.is_stopped else failure)
