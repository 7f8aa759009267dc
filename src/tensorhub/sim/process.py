"""One life of one simulated worker process: its memory, its clock, and the shell around the real worker machine."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..core.events import (
    Called,
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
    Wished,
)
from ..core.manifest import Layout, TensorSpec
from ..core.messages import PROTOCOL, Failure, Hello, LayoutInfo, Orders, Refusal, Report
from ..core.names import Digest, Version, WorkerId
from ..core.worker import Worker
from .dataplane import SimRead
from .hostcopies import HostCopies, Place

if TYPE_CHECKING:
    from .cluster import Cluster

OnFinished = Callable[[Finished], None]


class Process:
    """A worker that lives until it is killed; then everything of it is gone at once."""

    def __init__(self, cluster: "Cluster", me: WorkerId, life: int, site: str, reliable: bool) -> None:
        world = cluster.world
        self.cluster = cluster
        self.me = me
        self.life = life
        self.sender = f"{me}#{life}"
        self.is_alive = True
        self.is_mute = False  # what it says is lost
        self.muted_in_life = 0  # of the server
        self.is_deaf = False  # what it is told is lost
        self.is_data_cut = False
        self.memory = [0] * cluster.weather.chunks
        self.buffer = Place(self.memory)
        self.filled_version: Version | None = None
        self.opened: Version | None = None  # peers may open it here too, and get nothing of it yet
        self.host = HostCopies(self)
        self.sent = 0  # chunks that others took from here
        self.trust_until = float("-inf")
        self.read: SimRead | None = None
        self._follow_ups: list[Event] = []  # answers that come at once
        self.on_finished: OnFinished | None = None
        self.called_until: float | None = None
        self.has_left = False
        self._rate = 1.0 + world.chance.uniform(-cluster.weather.drift, cluster.weather.drift)
        self._skew = world.chance.uniform(0, 1000)
        self._tick_at = float("inf")
        self.hello = Hello(
            PROTOCOL,
            me.model,
            me.replica,
            me.shard,
            cluster.weather.shards,
            self.sender,
            endpoints=(f"sim://{self.sender}",),
            revocable=not cluster.weather.is_one_sided,
            reliable=reliable,
            site=site,
            host=self.sender,
            prefetch=cluster.weather.prefetch,
            retain=cluster.weather.retain,
        )
        layout = Layout(
            (TensorSpec(f"w{me.shard}", "uint8", (len(self.memory),), (1,), 0, len(self.memory)),), len(self.memory)
        )
        self.layout = LayoutInfo.of(layout)
        self.worker = Worker(me)
        self.tell(Registered(self.layout, layout.digest(), layout.size_bytes, cluster.weather.host_copies))
        cluster.control.processes[self.sender] = self
        self.server_started()

    @property
    def name(self) -> str:
        return self.sender

    @property
    def now(self) -> float:
        """This process's own clock."""
        return self._skew + self.cluster.world.now * self._rate

    # --- events into the machine, effects out of it -------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        if not self.is_alive:
            return
        for effect in self.worker.handle(event, now=self.now):
            self._carry_out(effect)
        while self._follow_ups and self.is_alive:
            self.tell(self._follow_ups.pop(0))
        self._schedule_tick()
        self.cluster.oracles.after_event(self)

    def _schedule_tick(self) -> None:
        at = (self.worker.next_deadline() - self._skew) / self._rate
        if at < self._tick_at:
            self._tick_at = at
            self.cluster.world.after(at - self.cluster.world.now + 1e-9, self._tick)

    def _tick(self) -> None:
        self._tick_at = float("inf")
        self.tell(Tick())

    def _carry_out(self, effect: Effect) -> None:
        world = self.cluster.world
        match effect:
            case Send(message=message):
                if isinstance(message, Report) and not self.is_mute:
                    self.cluster.control.to_server(self, self.hello, self.layout, message)
            case OpenRead(grant=grant):
                world.note(self.name, f"opens version {grant.version} at {grant.source}, ticket {grant.ticket}")
                self.read = SimRead(self.cluster.data, self, grant, is_only_opened=True)
            case StartRead(grant=grant):
                world.note(
                    self.name,
                    f"reads version {grant.version} from {grant.source}, ticket {grant.ticket}: {grant.reason}",
                )
                if not grant.to_host:
                    self.opened = grant.version
                self.read = SimRead(self.cluster.data, self, grant)
            case Trust(until=until):
                self.trust_until = until
            case StopRead(ticket=ticket):
                assert self.read is not None
                self.read.stop()
                self._follow_ups.append(ReadBarred(ticket, self.read.is_touched))
            case StartServing(version=version):
                self.buffer.version, self.buffer.is_filled, self.filled_version = version, False, None
                self.opened = None
            case StopServing(version=version):
                self.cluster.oracles.serving_stops(self, version)
                self.buffer.version, self.buffer.is_filled, self.filled_version = None, False, None
                self.opened = self.opened if self.opened != version else None
                delay = self.cluster.data.pace()
                world.after(delay, lambda: self.tell(ServingStopped(version)))
            case CopyOut(version=version):
                self.host.copy_out(version)
            case CopyIn(version=version):
                self.host.copy_in(version)
            case DropCopy(version=version):
                self.host.drop(version)
            case Finished():
                self._finished(effect)
            case Delayed(why=why):
                world.note(self.name, f"waits: {why.message}")
            case Left():
                self.has_left = True
                world.note(self.name, f"left, drained: {effect.drained}")
                world.after(0.0, lambda: self.cluster.kill(self))

    def _finished(self, effect: Finished) -> None:
        outcome = (
            f"version {effect.version}" if effect.error is None else f"{effect.error.code}: {effect.error.message}"
        )
        self.cluster.world.note(self.name, f"call {effect.number} ended: {outcome}")
        self.called_until = None
        if effect.error is None and effect.version is not None:
            self.cluster.oracles.first_success(self, effect.number, effect.version)
        on_finished, self.on_finished = self.on_finished, None
        if on_finished is not None:
            self.cluster.world.after(0.0, lambda: on_finished(effect))

    # --- the network --------------------------------------------------------------------------------------------------

    def server_started(self) -> None:
        """The server lives again; this process finds out a little later."""
        self.cluster.world.after(self.cluster.world.chance.uniform(0, 1), self._reconnect)

    def _reconnect(self) -> None:
        self.tell(Disconnected())
        self.tell(Connected())

    def receive(self, message: Orders | Refusal) -> None:
        self.tell(Received(message))
        if isinstance(message, Refusal):
            self.cluster.world.note(self.name, f"is refused: {message.message}")
            self.tell(Disconnected())
            if message.retry_s > 0:
                self.cluster.world.after(message.retry_s, self._reconnect)
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

    def touches(self, read: SimRead) -> None:
        """The read is about to have a chunk on its way into the buffer."""
        version = read.grant.version
        if self.filled_version != version:
            self.cluster.oracles.begins_to_change(self, version)
            self.filled_version = version
            self.buffer.version, self.buffer.is_filled, self.buffer.done = version, True, 0
        self.tell(ReadTouched(read.grant.ticket))

    def has_opened(self, read: SimRead) -> None:
        """The manifest is here."""
        self.opened = read.grant.version
        self.tell(ReadOpened(read.grant.ticket))

    def write(self, chunk: int, value: int) -> None:
        self.memory[chunk] = value
        self.cluster.oracles.memory_written(self, chunk)

    def accept(self, chunk: int, read: SimRead) -> None:
        read.target.done = chunk + 1
        self.cluster.oracles.accepted(self, read, chunk)
        self.tell(ReadAdvanced(read.grant.ticket, chunk + 1, len(self.memory)))

    def read_ended(self, read: SimRead, failure: Failure | None) -> None:
        complete = read.done == len(self.memory) and not read.is_only_opened
        self.read = None
        if complete and read.grant.to_host:
            self.cluster.oracles.copy_is_whole(self, read.grant.version)
        self.tell(ReadEnded(read.grant.ticket, complete, None if complete else failure))

    # --- the caller ---------------------------------------------------------------------------------------------------

    def call(self, verb: str, spec: int | str, timeout_s: float, on_finished: OnFinished, root: Digest) -> None:
        """As the user's code would: it waits until `on_finished`."""
        self.cluster.world.note(self.name, f"calls {verb}({spec!r}), timeout {timeout_s:.2f} s")
        self.on_finished = on_finished
        self.called_until = self.now + timeout_s
        self.tell(Called(verb, spec, self.now + timeout_s, root))

    def wish(self, prefetch: int | str | None, pins: tuple[Version, ...]) -> None:
        self.tell(Wished(prefetch, pins))

    def close(self, timeout_s: float) -> None:
        self.tell(Closing(self.now + timeout_s))
