"""Sees everything that happens in a cluster, tells it to the truth, and asks the oracles.

Of the core it asks only whether a machine contradicts itself, and what the server shows to people.
"""

from typing import TYPE_CHECKING

from tensorhub.protocol.errors import InvariantViolation
from tensorhub.protocol.messages import Orders, Report
from tensorhub.worker import events

from .across import SimAcross
from .dataplane import SimRead
from .oracles import GroupCall, Oracles
from .plan import Misfortune
from .truth import Life, Truth

if TYPE_CHECKING:
    from .apps import App, Outcomes
    from .cluster import Cluster
    from .process import Process

LOOK_S = 0.25  # so often the oracles look at all workers


class Watch:
    """Eyes and ears of one history."""

    def __init__(self, cluster: "Cluster") -> None:
        self.cluster = cluster
        self.truth = Truth(cluster.world, cluster.plan, cluster.data.contents)
        self.oracles = Oracles(self.truth)
        self.groups: dict[str, GroupCall] = {}
        cluster.world.after(LOOK_S, self._look)

    def _look(self) -> None:
        for life in self.truth.lives.values():
            self.oracles.look(life)
        self.cluster.world.after(LOOK_S, self._look)

    def newest(self, model: str) -> int:
        """As a program can ask the server."""
        return self.truth.newest(model) or 0

    def life(self, process: "Process") -> Life:
        return self.truth.by_name[process.name]

    # --- processes, faults, messages ----------------------------------------------------------------------------------

    def started(self, process: "Process") -> None:
        memory = process.memory, lambda version: process.host.places[version].memory
        now, clock = self.truth.now, lambda: process.now
        self.truth.born(Life(process.me, process.name, process.hello, *memory, clock, started=now, cut=process.cut))

    def died(self, process: "Process") -> None:
        self.truth.died(self.life(process))

    def struck(self, number: int, misfortune: Misfortune) -> None:
        self.truth.weather.struck(number, misfortune)

    def passed(self, number: int) -> None:
        self.truth.weather.passed(number, self.truth.now)

    def message(self, delays: tuple[float, ...]) -> None:
        """One message is on its way, or lost."""
        usual_s = 2 * self.truth.conditions.delay_s
        if not delays or max(delays) > usual_s:
            self.truth.weather.disturbed("messages", self.truth.now + max(delays, default=0.0))

    def no_server(self, since: float) -> None:
        """The server is killed then; inf: one starts."""
        self.truth.no_server_since = since

    def heard(self, process: "Process", report: Report) -> None:
        """A report arrives at the server, and is taken in."""
        self.truth.server_life = self.cluster.control.lives
        self.truth.heard(self.life(process), report)

    def ordered(self, process: "Process", orders: Orders) -> None:
        """Orders leave the server."""
        self.truth.ordered(self.life(process), orders)
        self.oracles.ordered(self.life(process), orders)

    def turned_away(self, process: "Process") -> None:
        """The server refuses what a worker has said, and closes its connection."""
        self.truth.server_life = self.cluster.control.lives
        self.oracles.turned_away(self.life(process))
        self.life(process).heard_by = 0
        self.truth.weather.disturbed("lives", self.truth.now)

    # --- the machines -------------------------------------------------------------------------------------------------

    def server_acted(self) -> None:
        """The machine of the server has decided."""
        server = self.cluster.control.server
        if server is not None and server.state.counters["unsettled"]:
            self._contradicts("one worker was decided for again and again: the rules contradict each other")
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
        self.oracles.broken("invariant", what)

    def told(self, process: "Process", event: events.Event) -> None:
        """An event goes into a worker's machine."""
        life, before = self.life(process), self.life(process).call
        if isinstance(event, events.CopiedOut) and event.failure is None and life.copying is not None:
            place = process.host.places[event.version]
            self.oracles.whole(life, event.version, life.copying[1], place.memory, "the copy")
        if isinstance(event, events.ReadEnded) and event.complete and life.read is not None:
            grant = life.read.grant
            place = process.host.places[grant.version] if grant.to_host else process.buffer
            self.oracles.whole(life, grant.version, life.read.root, place.memory, "what was read")
        self.truth.told(life, event)
        if isinstance(event, events.Called) and before is None and life.call is not None:
            self.oracles.called(life, life.call)
        if isinstance(event, events.Cancelled) and before is not None:
            self.oracles.may_have_it_back(life, before)
        if isinstance(event, events.ReadTouched):
            self._touched(life)

    def _touched(self, life: Life) -> None:
        """The registered memory may be written from now on: what it had is gone."""
        if life.call is not None:
            life.call.is_touched = True
        held = life.held
        if held is not None and not held.is_served:
            life.held = None
            self.oracles.gives_up(life, held.version, "in the buffer")

    def wants(self, process: "Process", effect: events.Effect) -> None:
        """An effect comes out of a worker's machine."""
        life, call = self.life(process), self.life(process).call
        had = life.held.version if life.held is not None else None
        match effect:
            case events.StopServing(version):
                self.oracles.serving_stops(life, version, from_host=False)
            case events.DropCopy(version):
                self.oracles.serving_stops(life, version, from_host=True)
            case events.StartServing(version, root):
                where = "the published buffer" if call is not None and call.verb == "publish" else "what was copied in"
                self.oracles.whole(life, version, root, process.memory, where)
            case events.Left():
                self.oracles.leaves(life)
            case events.Send(message) if isinstance(message, Report):
                self.truth.said(life, message)
                self.oracles.said(life, message)
        was_whole = isinstance(effect, events.DropCopy) and effect.version in life.copies
        if isinstance(effect, events.Finished) and call is not None:
            self.oracles.call_ended(life, call, effect)
        self.truth.wants(life, effect)
        if isinstance(effect, events.StartServing) and call is not None and call.verb == "publish":
            self.truth.published(life, effect.version, effect.root)
        if isinstance(effect, events.CopyIn):
            self._touched(life)
        if isinstance(effect, events.DropCopy) and was_whole:
            self.oracles.gives_up(life, effect.version, "in host memory")
        if isinstance(effect, events.Finished) and call is not None:
            self.oracles.may_have_it_back(life, call)
            if effect.error is None and call.verb == "unpublish" and had is not None:
                self.oracles.gives_up(life, had, "in the buffer")

    # --- bytes --------------------------------------------------------------------------------------------------------

    def written(self, process: "Process", chunk: int) -> None:
        """A chunk of the registered memory was written."""
        life, value = self.life(process), process.memory[chunk]
        self.oracles.written(life, chunk, value)
        held = life.held
        if held is not None and value != self.truth.contents[held.root][chunk]:
            life.held = None
            self.oracles.gives_up(life, held.version, "in the buffer")

    def began(self, process: "Process", read: SimRead | SimAcross) -> None:
        """A read was begun."""
        self.truth.begins(self.life(process), read)

    def accepted(self, process: "Process", read: SimRead | SimAcross, chunk: int) -> None:
        """A reader takes a chunk for good."""
        self.oracles.accepted(self.life(process), read, chunk, read.target.memory[chunk])

    def chunk_sent(self, source: "Process", read: SimRead, chunk: int) -> None:
        """A chunk goes over the wire."""
        if source.hello.site != read.reader.hello.site:
            self.oracles.sent(self.life(source), self.life(read.reader), read, chunk)

    # --- programs -----------------------------------------------------------------------------------------------------

    def group_called(self, app: "App", verb: str, spec: int | str) -> None:
        """All shards of a replica are about to call."""
        lives = {shard: self.life(process) for shard, process in app.shards.items()}
        self.groups[app.name] = GroupCall(app.name, verb, spec, self.truth.now, lives, is_plain=app.is_quiet)

    def group_ended(self, app: "App", outcomes: "Outcomes") -> None:
        """All have returned, or died."""
        self.oracles.group_ended(self.groups[app.name], outcomes)

    # --- the end ------------------------------------------------------------------------------------------------------

    def reads(self) -> dict[int, str]:
        """Those that the server shows as open."""
        server = self.cluster.control.server
        transfers = server.status(now=self.cluster.control.server_now).transfers if server is not None else ()
        return {each.ticket: f"{each.model}/{each.target}[{each.shard}]" for each in transfers}

    def unsettled(self, earlier_reads: dict[int, str]) -> str:
        """What is still wrong at the end: a replica without its version, or something left over."""
        for app in self.cluster.apps:
            lacks = self.oracles.unsettled(app.name, app.replica.is_trainer, app.has, app.is_refused)
            if lacks:
                return f"progress broken: {lacks}"
        server = self.cluster.control.server
        assert server is not None
        models = server.status(now=self.cluster.control.server_now).models
        holders = {f"version {v.version}": [f"{m.name}/{r}" for r in v.holders] for m in models for v in m.versions}
        reads = {ticket: reader for ticket, reader in self.reads().items() if ticket in earlier_reads}
        left = self.oracles.leftovers(reads, holders)
        return f"leak broken: {left}" if left else ""
