"""Sees everything that happens in a cluster, tells it to the truth, and asks the judges.

The only thing that it asks of the core is whether a machine contradicts itself; no judge hears of that.
"""

from typing import TYPE_CHECKING

from tensorhub.protocol.errors import InvariantViolation
from tensorhub.protocol.messages import Orders, Report
from tensorhub.protocol.names import Version
from tensorhub.worker import events
from tensorhub.worker.events import Finished

from .across import SimAcross
from .dataplane import SimRead
from .judges.claims import ClaimJudge
from .judges.crossings import CrossingJudge
from .judges.drains import DrainJudge
from .judges.errors import ErrorJudge
from .judges.groups import GroupCall
from .judges.memory import MemoryJudge
from .judges.progress import ProgressJudge
from .judges.retention import RetentionJudge
from .judges.stalls import StallJudge
from .judges.versions import VersionJudge
from .plan import Misfortune
from .truth.life import Call, Life
from .truth.record import Truth
from .world import OracleViolation

if TYPE_CHECKING:
    from .apps import App, Outcomes
    from .cluster import Cluster
    from .process import Process

LOOK_S = 0.25  # so often the judges look at everybody


class Watch:
    """Eyes and ears of one history."""

    def __init__(self, cluster: "Cluster") -> None:
        self.cluster = cluster
        world, truth = cluster.world, Truth(cluster.world, cluster.plan, cluster.data.contents)
        self.truth = truth
        self.memory = MemoryJudge(truth, world)
        self.versions = VersionJudge(truth, world)
        self.claims = ClaimJudge(truth, world)
        self.retention = RetentionJudge(truth, world)
        self.drains = DrainJudge(truth, world)
        self.crossings = CrossingJudge(truth, world)
        self.errors = ErrorJudge(self.drains)
        self.progress = ProgressJudge(truth, world)
        self.stalls = StallJudge(truth, world)
        self.groups: dict[str, GroupCall] = {}
        self._earlier_reads: dict[int, str] = {}
        world.after(LOOK_S, self._look)

    def _look(self) -> None:
        for life in self.truth.lives.values():
            self.memory.other_content(life)
            self.memory.shared(life)
            self.stalls.look(life)
        self.cluster.world.after(LOOK_S, self._look)

    def newest(self, model: str) -> int:
        """As anybody can see who asks the server for the versions of a model."""
        return self.truth.newest(model) or 0

    def life(self, process: "Process") -> Life:
        return self.truth.by_name[process.name]

    # --- processes and faults -----------------------------------------------------------------------------------------

    def started(self, process: "Process") -> None:
        now = self.truth.now
        memory = process.memory, lambda version: process.host.places[version].memory
        life = Life(process.me, process.name, process.hello, *memory, lambda: process.now, started=now, cut=process.cut)
        self.truth.born(life)

    def died(self, process: "Process") -> None:
        self.truth.died(self.life(process))

    def struck(self, number: int, misfortune: Misfortune) -> None:
        self.truth.troubles.struck(number, misfortune, self.truth.now)

    def passed(self, number: int) -> None:
        self.truth.troubles.passed(number, self.truth.now)

    # --- messages -----------------------------------------------------------------------------------------------------

    def message(self, process: "Process", delays: tuple[float, ...]) -> None:
        """One message to or from a process is on its way, or lost."""
        self.truth.troubles.message(self.life(process), delays, self.truth.now)

    def heard(self, process: "Process", report: Report) -> None:
        """A report arrives at the server, and is taken in."""
        self.truth.server_life = self.cluster.control.lives
        self.truth.heard(self.life(process), report)

    def ordered(self, process: "Process", orders: Orders) -> None:
        """Orders leave the server."""
        life = self.life(process)
        self.truth.ordered(life, orders)
        self.versions.ordered(life, orders)
        self.claims.ordered(life, orders)
        self.stalls.ordered(life, orders)

    def turned_away(self, process: "Process") -> None:
        """The server refuses what it has said, and closes its connection."""
        self.truth.server_life = self.cluster.control.lives
        self.stalls.turned_away(self.life(process))
        self.truth.turned_away(self.life(process))

    def disconnected(self, process: "Process") -> None:
        """The server has noticed that a connection is gone."""
        self.life(process).is_connected = False

    def server_acted(self) -> None:
        """The machine of the server has decided."""
        server = self.cluster.control.server
        if server is not None and server.state.counters["unsettled"]:
            self._contradicts("livelock: the rules contradict each other: one worker was decided for again and again")
        if server is not None and self.cluster.world.events % 32 == 0:
            try:
                server.check_invariants()
            except InvariantViolation as error:
                self._contradicts(str(error))

    def acted(self, process: "Process") -> None:
        """The machine of a worker has decided."""
        try:
            process.worker.check_invariants()
        except InvariantViolation as error:
            self._contradicts(str(error))

    def _contradicts(self, what: str) -> None:
        self.cluster.world.note("oracle", f"invariant: {what}")
        raise OracleViolation(f"invariant broken at {self.truth.now:.4f}: {what}")

    # --- events into a worker's machine, effects out of it ------------------------------------------------------------

    def told(self, process: "Process", event: events.Event) -> None:
        life, before = self.life(process), self.life(process).call
        self._before(process, life, event)
        self.truth.told(life, event)
        if isinstance(event, events.Called) and before is None and life.call is not None:
            self.errors.called(life, life.call)
        if isinstance(event, events.Cancelled) and before is not None:
            self.retention.call_ended(life, before)
        if isinstance(event, events.ReadTouched):
            self._touched(life)

    def _before(self, process: "Process", life: Life, event: events.Event) -> None:
        if isinstance(event, events.CopiedOut) and event.failure is None and life.copying is not None:
            place = process.host.places[event.version]
            self.memory.whole(life, event.version, life.copying[1], place.memory, "the copy")
        if isinstance(event, events.ReadEnded) and event.complete and life.read is not None:
            grant = life.read.grant
            place = process.host.places[grant.version] if grant.to_host else process.buffer
            self.memory.whole(life, grant.version, life.read.root, place.memory, "what was read")

    def _touched(self, life: Life) -> None:
        """The registered memory may be written from now on: what it had is gone."""
        if life.call is not None:
            life.call.is_touched = True
        held = life.held
        if held is not None and not held.is_served:
            life.held = None
            self._gives_up(life, held.version, "in the buffer")

    def wants(self, process: "Process", effect: events.Effect) -> None:
        life, call = self.life(process), self.life(process).call
        had = life.held.version if life.held is not None else None
        match effect:
            case events.StopServing(version):
                self.memory.serving_stops(life, version, from_host=False)
                self.claims.withdraws(life, version, call)
            case events.DropCopy(version):
                self.memory.serving_stops(life, version, from_host=True)
            case events.StartServing(version, root):
                where = "the published buffer" if call is not None and call.verb == "publish" else "what was copied in"
                self.memory.whole(life, version, root, process.memory, where)
            case events.Left():
                self.retention.leaves(life)
            case events.Send(message) if isinstance(message, Report):
                self.truth.said(life, message)
                self.memory.said(life, message)
        was_whole = isinstance(effect, events.DropCopy) and effect.version in life.copies
        if isinstance(effect, events.Finished) and call is not None:
            self._finishes(life, call, effect, had)
        self.truth.wants(life, effect)
        if isinstance(effect, events.StartServing) and call is not None and call.verb == "publish":
            self.truth.published(life, effect.version, effect.root)
        if isinstance(effect, events.CopyIn):
            self._touched(life)
        if isinstance(effect, events.DropCopy) and was_whole:
            self._gives_up(life, effect.version, "in host memory")
        if isinstance(effect, events.Finished) and call is not None:
            self._has_finished(life, call, effect, had)

    def _finishes(self, life: Life, call: Call, finished: Finished, had: Version | None) -> None:
        if finished.error is None and call.verb == "unpublish":
            self.memory.unpublished(life, had)
        if finished.error is None and finished.version is not None:
            self.truth.note_known(life, finished.version, life.root_of(finished.version))

    def _has_finished(self, life: Life, call: Call, finished: Finished, had: Version | None) -> None:
        if finished.error is not None:
            self.errors.call_ended(life, call, finished.error)
        self.errors.shard_ended(life, call, finished)
        self.drains.ended(life, call)
        self.retention.call_ended(life, call)
        if finished.error is None and call.verb == "unpublish" and had is not None:
            self._gives_up(life, had, "in the buffer")

    def _gives_up(self, life: Life, version: Version, where: str) -> None:
        self.retention.gives_up(life, version, where)  # first: what is lost by that is no excuse for it
        self.truth.note_loss(life, version)

    # --- bytes --------------------------------------------------------------------------------------------------------

    def written(self, process: "Process", chunk: int) -> None:
        """A chunk of the registered memory was written."""
        life, value = self.life(process), process.memory[chunk]
        self.memory.written(life, chunk, value)
        held = life.held
        if held is not None and value != self.truth.contents[held.root][chunk]:
            life.held = None
            self._gives_up(life, held.version, "in the buffer")

    def began(self, process: "Process", read: SimRead | SimAcross) -> None:
        """A read was begun."""
        self.truth.begins(self.life(process), read)

    def accepted(self, process: "Process", read: SimRead | SimAcross, chunk: int) -> None:
        """A reader takes a chunk for good."""
        self.memory.accepted(self.life(process), read, chunk, read.target.memory[chunk])
        self.truth.accepted(self.life(process), read, chunk)

    def chunk_sent(self, source: "Process", read: SimRead, chunk: int) -> None:
        """A chunk goes over the wire."""
        if source.hello.site != read.reader.hello.site:
            self.crossings.sent(self.life(source), self.life(read.reader), read, chunk)

    # --- programs -----------------------------------------------------------------------------------------------------

    def group_called(self, app: "App", verb: str, spec: int | str) -> None:
        """All shards of a replica are about to call."""
        lives = {shard: self.life(process) for shard, process in app.shards.items()}
        self.groups[app.name] = GroupCall(app.name, verb, spec, self.truth.now, lives)
        self.errors.began(self.groups[app.name])

    def group_ended(self, app: "App", outcomes: "Outcomes") -> None:
        """All have returned, or died."""
        self.errors.ended(self.groups[app.name], outcomes)

    def _reads(self) -> dict[int, str]:
        """Those that the server shows as open."""
        server = self.cluster.control.server
        transfers = server.status(now=self.cluster.control.server_now).transfers if server is not None else ()
        return {transfer.ticket: f"{transfer.model}/{transfer.target}[{transfer.shard}]" for transfer in transfers}

    def nearly_at_the_end(self) -> None:
        """What is open now, and still is at the end, is open for ever unless it is read."""
        self._earlier_reads = self._reads()

    def at_the_end(self) -> None:
        """Everybody has what he wanted, and nothing is left over."""
        from .apps import RolloutApp, TrainerApp  # it needs us

        for app in self.cluster.apps:
            if isinstance(app, TrainerApp):
                self.progress.trainer(app.name, app.published, is_refused=app.is_refused)
            elif isinstance(app, RolloutApp):
                self.progress.rollout(app.name, app.has, self.groups.get(app.name), is_refused=app.is_refused)
        self.progress.copies()
        server = self.cluster.control.server
        assert server is not None
        status = server.status(now=self.cluster.control.server_now)
        reads = {ticket: reader for ticket, reader in self._reads().items() if ticket in self._earlier_reads}
        holders = {
            f"version {v.version} of {m.name}": [f"{m.name}/{r}" for r in v.holders]
            for m in status.models
            for v in m.versions
        }
        self.progress.left_over(reads, holders)
