"""One life of one simulated worker process: its memory, its clock, and the shell around the real worker machine."""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from tensorhub.protocol.manifest import Layout, TensorSpec
from tensorhub.protocol.messages import PROTOCOL, Failure, Hello, LayoutInfo, Orders, Refusal, Report, call_text, named
from tensorhub.protocol.names import Digest, Version, WorkerId
from tensorhub.worker.events import (
    Called,
    Cancelled,
    Closing,
    Connected,
    CopyIn,
    CopyOut,
    Delayed,
    Disconnected,
    DropCopy,
    Effect,
    Event,
    Finished,
    Left,
    OpenRead,
    ReadAdvanced,
    ReadBarred,
    ReadEnded,
    ReadOpened,
    ReadTouched,
    Received,
    Registered,
    Send,
    ServingStopped,
    StartRead,
    StartServing,
    StopRead,
    StopServing,
    Tick,
    Trust,
    Warn,
    Wished,
)
from tensorhub.worker.machine import Worker

from .across import SimAcross
from .dataplane import SimRead
from .hostcopies import HostCopies, Place
from .network import Connection
from .plan import Replica

if TYPE_CHECKING:
    from .cluster import Cluster

OnFinished = Callable[[Finished], None]
CANCELLED = Finished(0, error=Failure("cancelled", "the caller gave up"))


class Process:
    """A worker that lives until it is killed; then everything of it is gone at once."""

    def __init__(self, cluster: "Cluster", me: WorkerId, life: int, replica: Replica) -> None:
        self.cluster = cluster
        self.me = me
        self.life = life
        self.name = f"{me}#{life}"
        self.is_alive = True
        self.is_paused = False
        self.memory = [0] * cluster.plan.conditions.chunks
        self.buffer = Place(self.memory)
        self.filled_version: Version | None = None
        self.opened: Version | None = None  # peers may open it here too, and get nothing of it yet
        self.host = HostCopies(self)
        self._follow_ups: list[Event] = []  # answers that come at once
        self.trust_until = -inf
        self.read: SimRead | SimAcross | None = None
        self.on_finished: OnFinished | None = None
        self.connection: Connection | None = None
        self.is_closing = False
        self._connections = 0
        self._backlog: list[Callable[[], None]] = []
        self._chance = cluster.world.stream(f"process {self.name}")
        drift = cluster.plan.conditions.drift
        self._rate = 1.0 + self._chance.uniform(-drift, drift)
        self._skew = self._chance.uniform(0, 1000)
        self._tick_at = inf
        self.hello, self.cut = self._introduce(replica), replica.cut
        self.layout = self._layout("same")
        self.layout_digest = self.layout.digest()
        self.worker = Worker(me, shards=self.hello.shards, may_work_alone=cluster.plan.conditions.verifies)
        self.is_paused = cluster.cuts.is_paused(self)
        cluster.watch.started(self)
        self.run(lambda: self._register(self.layout))
        self.run(self._reconnect)

    def _introduce(self, replica: Replica) -> Hello:
        conditions = self.cluster.plan.conditions
        return Hello(
            PROTOCOL,
            self.me.model,
            self.me.replica,
            self.me.shard,
            conditions.shards_in(replica.cut),
            self.name,
            endpoints=(f"sim://{self.name}",),
            revocable=not conditions.is_one_sided,
            reliable=replica.reliable,
            site=replica.site,
            host=replica.host,
            prefetch=conditions.prefetch,
            retain=conditions.retain,
            place=f"place of {replica.host}" if conditions.maps else "",
        )

    def _layout(self, kind: str) -> LayoutInfo:
        size, name = len(self.memory), f"w{self.me.shard}" if kind == "same" else f"other{self.me.shard}"
        boxes = f"{self.cut}/{self.me.shard}".encode() if self.cut else b""
        return LayoutInfo.of(Layout((TensorSpec(name, "uint8", (size,), (1,), 0, size),), size), boxes)

    @property
    def now(self) -> float:
        """This process's own clock."""
        return self._skew + self.cluster.world.now * self._rate

    # --- standing still -----------------------------------------------------------------------------------------------

    def run(self, action: Callable[[], None]) -> None:
        """Something happens in this process: now, or all at once when it goes on."""
        if self.is_paused:
            self._backlog.append(action)
        elif self.is_alive:
            action()

    def pause(self) -> None:
        if not self.is_paused:
            self.is_paused = True
            self.cluster.world.note(self.name, "stands still")

    def resume(self) -> None:
        if not self.is_paused:
            return
        self.is_paused = False
        self.cluster.world.note(self.name, "goes on")
        backlog, self._backlog = self._backlog, []
        for action in backlog:
            self.run(action)
        self._schedule_tick()

    # --- events into the machine, effects out of it -------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        if not self.is_alive:
            return
        self.cluster.watch.told(self, event)
        for effect in self.worker.handle(event, now=self.now):
            self.cluster.watch.wants(self, effect)
            self._carry_out(effect)
        while self._follow_ups and self.is_alive:
            self.tell(self._follow_ups.pop(0))
        self._schedule_tick()
        self.cluster.watch.acted(self)

    def _schedule_tick(self) -> None:
        at = (self.worker.next_deadline() - self._skew) / self._rate
        if at < self._tick_at:
            self._tick_at = at
            self.cluster.world.after(at - self.cluster.world.now + 1e-9, lambda: self.run(lambda: self._tick(at)))

    def _tick(self, at: float) -> None:
        if at == self._tick_at:  # else another one was due sooner, and has planned what comes after it
            self._tick_at = inf
            self.tell(Tick())

    def _carry_out(self, effect: Effect) -> None:
        world = self.cluster.world
        match effect:
            case Send(message=message):
                if self.connection is not None and isinstance(message, Report):
                    self.cluster.control.to_server(self.connection, self.hello, self.layout, message)
            case OpenRead(grant=grant):
                world.note(self.name, f"opens version {grant.version} at {named(grant.sources)}, ticket {grant.ticket}")
                if grant.is_across:
                    self._begin(SimAcross(self.cluster.data, self, grant))
                else:
                    self._begin(SimRead(self.cluster.data, self, grant, is_only_opened=True))
            case StartRead(grant=grant):
                text = f"reads version {grant.version} from {named(grant.sources)}, ticket {grant.ticket}"
                world.note(self.name, f"{text}: {grant.reason}")
                if not grant.to_host:
                    self.opened = grant.version
                if isinstance(self.read, SimAcross):
                    self.read.start()
                else:
                    self._begin(SimRead(self.cluster.data, self, grant))
            case Trust(until=until):
                self.trust_until = until
            case StopRead(ticket=ticket):
                if self.read is not None and self.read.ticket == ticket:  # it may just have ended by itself
                    self.read.stop()
                    self._follow_ups.append(ReadBarred(ticket, self.read.is_touched))
            case StartServing(version=version):
                self.buffer.version, self.buffer.is_filled, self.filled_version = version, False, None
                self.opened = None
            case StopServing(version=version):
                self.buffer.version, self.buffer.is_filled, self.filled_version = None, False, None
                self.opened = self.opened if self.opened != version else None
                self.later(self.cluster.data.pace(self), lambda: self.tell(ServingStopped(version)))
            case CopyOut(version=version):
                self.host.copy_to_host(version)
            case CopyIn(version=version):
                self.host.copy_in(version)
            case DropCopy(version=version):
                self.host.drop(version)
            case Finished():
                self._finished(effect)
            case Warn(text=text):
                world.note(self.name, f"warns: {text}")
            case Delayed(why=why):
                world.note(self.name, f"waits: {why.message}")
            case Left():
                world.note(self.name, f"left, drained: {effect.drained}")
                world.after(0.0, lambda: self.cluster.kill(self))

    def _begin(self, read: SimRead | SimAcross) -> None:
        if self.read is not None:
            self.read.is_ended = True  # it had only been opened, and goes on as this one
        self.read = read
        self.cluster.watch.began(self, read)

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """It happens in this process, so much later."""
        self.cluster.world.after(delay_s, lambda: self.run(action))

    def _finished(self, effect: Finished) -> None:
        outcome = (
            f"version {effect.version}" if effect.error is None else f"{effect.error.code}: {effect.error.message}"
        )
        self.cluster.world.note(self.name, f"call {effect.number} ended: {outcome}")
        self._return(effect)

    def _return(self, finished: Finished) -> None:
        on_finished, self.on_finished = self.on_finished, None
        if on_finished is not None:
            self.cluster.world.after(0.0, lambda: on_finished(finished))

    # --- the network --------------------------------------------------------------------------------------------------

    def _reconnect(self) -> None:
        """Until it works: connections are made as soon as the server answers."""
        if self.connection is not None or not self.is_alive:
            return
        self._connections += 1
        if self.cluster.cuts.has_line(self):
            self.connection = self.cluster.control.connect(self, self._connections)
        if self.connection is None:
            self.later(self._chance.uniform(0.1, 1.0), self._reconnect)
        else:
            self.tell(Connected())

    def connection_lost(self, connection: Connection) -> None:
        """It is known here that this connection is gone."""
        self.run(lambda: self._connection_lost(connection))

    def _connection_lost(self, connection: Connection) -> None:
        if self.connection is connection and self.is_alive:
            self.connection = None
            self.tell(Disconnected())
            self.later(self._chance.uniform(0.05, 0.5), self._reconnect)

    def hang_up(self) -> None:
        """The connection breaks, and both ends find out."""
        connection = self.connection
        if connection is not None:
            self.cluster.world.note(self.name, "loses its connection")
            self.cluster.control.close(connection)
            self.connection_lost(connection)

    def receive(self, connection: Connection, message: Orders | Refusal) -> None:
        self.run(lambda: self._receive(connection, message))

    def _receive(self, connection: Connection, message: Orders | Refusal) -> None:
        if self.connection is not connection or not self.is_alive:
            return
        self.tell(Received(message))
        if isinstance(message, Refusal):
            self.cluster.world.note(self.name, f"is refused: {message.message}")
            self.connection = None
            self.tell(Disconnected())
            if message.retry_s > 0:
                self.later(message.retry_s, self._reconnect)
            else:
                self.cluster.world.after(0.0, lambda: self.cluster.kill(self))  # open() has raised

    # --- the data plane -----------------------------------------------------------------------------------------------

    def place(self, version: Version, *, on_host: bool) -> Place | None:
        """Where others read the version here, in the buffer or beside it; None where they cannot."""
        found = self.host.places.get(version) if on_host else self.buffer
        return found if self.is_alive and found is not None and found.version == version else None

    def is_opened(self, version: Version) -> bool:
        """Others may open the version here, though there is nothing of it yet."""
        return self.is_alive and self.opened == version

    def touches(self, read: SimRead | SimAcross) -> None:
        """The read is about to have a chunk on its way into the buffer."""
        version = read.grant.version
        if self.filled_version != version:
            self.filled_version = version
            self.buffer.version, self.buffer.is_filled, self.buffer.done = version, True, 0
        self.tell(ReadTouched(read.ticket))

    def has_opened(self, read: SimRead | SimAcross) -> None:
        """The manifest is here."""
        self.opened = read.grant.version
        self.tell(ReadOpened(read.ticket, read.root if read.grant.is_across else Digest("")))

    def write(self, chunk: int, value: int) -> None:
        self.memory[chunk] = value
        self.cluster.watch.written(self, chunk)

    def accept(self, chunk: int, read: SimRead | SimAcross) -> None:
        read.target.done = chunk + 1
        self.cluster.watch.accepted(self, read, chunk)
        self.tell(ReadAdvanced(read.ticket, chunk + 1, len(self.memory)))

    def read_ended(self, read: SimRead | SimAcross, failure: Failure | None, source: WorkerId | None = None) -> None:
        complete = read.done == len(self.memory) and not read.is_only_opened
        self.read = None
        self.tell(ReadEnded(read.ticket, complete, None if complete else failure, source))

    # --- the caller ---------------------------------------------------------------------------------------------------

    def call(self, called: Called, on_finished: OnFinished) -> None:
        """As the user's code would: it waits until `on_finished`. The deadline of `called` counts from now."""
        what = call_text(called.verb, called.spec, called.claim, waits=called.waits)
        self.cluster.world.note(self.name, f"calls {what}, timeout {called.deadline:.2f} s")
        self.on_finished = on_finished
        if called.verb == "publish":
            self.cluster.data.layouts[called.root] = self.layout_digest
        called = replace(called, deadline=self.now + called.deadline)
        known = self.worker.update_at_once(self.hello, called)
        if known is None:
            self.tell(called)
            return
        self.cluster.watch.told(self, called)
        finished = Finished(0, error=known) if isinstance(known, Failure) else Finished(0, version=known)
        self.cluster.watch.wants(self, finished)
        self._finished(finished)

    def cancel(self) -> None:
        """The user's code gives up."""
        if self.on_finished is not None:
            self.cluster.world.note(self.name, "gives up its call")
            self.tell(Cancelled())
            self._return(CANCELLED)

    def wish(self, prefetch: int | str | None, pins: tuple[Version, ...]) -> None:
        self.run(lambda: self.tell(Wished(prefetch, pins)))

    def close(self, timeout_s: float) -> None:
        self.is_closing = True
        self.tell(Closing(self.now + timeout_s))

    def register(self, kind: str) -> bool:
        """Other tensors, if that is allowed now."""
        if self.worker.may_register:
            self.cluster.world.note(self.name, f"registers {kind} tensors")
            self._register(self._layout(kind))
            return True
        return False

    def _register(self, layout: LayoutInfo) -> None:
        self.layout, self.layout_digest = layout, layout.digest()
        self.memory[:] = [0] * len(self.memory)
        self.buffer.version, self.filled_version, self.opened = None, None, None
        size, copies = layout.decode().size_bytes, self.cluster.plan.conditions.host_copies
        self.tell(Registered(layout, self.layout_digest, size, copies))
