"""A worker without data: the product's own worker machine, around it a shell in which reading takes a modelled time.

It says and hears what a real worker says and hears, and costs a few kilobytes. The ground that it stands on is a
simulated clock (`fleet`) or an event loop with real connections (`crowd`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Protocol

from tensorhub.protocol.manifest import Layout, TensorSpec
from tensorhub.protocol.messages import PROTOCOL, Grant, Hello, Holding, LayoutInfo
from tensorhub.protocol.names import Digest, Version, WorkerId
from tensorhub.worker import events
from tensorhub.worker.machine import Worker

CHUNKS = 256
SIZE_BYTES = CHUNKS * 4 * 1024 * 1024
MEASURE_S = 0.5  # between two measurements of a read, as in the product
LAYOUT = Layout((TensorSpec("w", "uint8", (SIZE_BYTES,), (1,), 0, SIZE_BYTES),), SIZE_BYTES)
LAYOUT_INFO = LayoutInfo.of(LAYOUT)
LAYOUT_DIGEST = LAYOUT.digest()


class Ground(Protocol):
    """Where thin workers live: a clock, and how long a read takes."""

    @property
    def now(self) -> float:
        """Seconds, never going back."""

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Let it happen so much later."""

    def finish_at(self, grant: Grant, begun_at: float, share_left: float) -> float:
        """When the last chunk of the read is there, as far as can be told now."""


def root_of(version: int, shard: int) -> Digest:
    """The content that everybody has as that version."""
    return Digest(f"root-{version}-{shard}")


def hello_of(me: WorkerId, shards: int, *, life: str = "1", token: str = "") -> Hello:
    """What the worker says of itself."""
    return Hello(
        *(PROTOCOL, me.model, me.replica, me.shard, shards, f"{me}#{life}"),
        endpoints=(f"tcp://10.0.0.1:{me.shard + 1000}", f"local://{me.replica}"),
        revocable=True,
        host=f"host-{me.replica}",
        token=token,
    )


@dataclass
class OpenedRead:
    """A read under way."""

    grant: Grant
    begun_at: float
    share_before: float  # of the version, when it began
    finish_at: float = inf  # as far as could be told when it was last looked at


class ThinWorker:
    """One worker. `send` takes its messages; `is_idle` says of the present one that nothing but time has caused it."""

    def __init__(self, me: WorkerId, ground: Ground, send: Callable[["ThinWorker", object], None]) -> None:
        self.me = me
        self.worker = Worker(me)
        self.read: OpenedRead | None = None
        self.is_alive = True
        self.is_idle = False
        self.sessions = 0  # that it was given
        self.held: dict[Version, float] = {}  # version → when all of it was here
        self.finished: list[tuple[float, events.Finished]] = []
        self.on_finished: Callable[[events.Finished], None] = lambda finished: None
        self._ground, self._send = ground, send
        self._share = 0.0  # of the version that is being filled
        self._filling: Version | None = None
        self._tick_at = inf
        self._follow_ups: list[events.Event] = []
        self.tell(events.Registered(LAYOUT_INFO, LAYOUT_DIGEST, SIZE_BYTES, max_copies=1))

    def begin_with(self, version: int) -> None:
        """It comes with that version in its buffer, as after a restart of the server. Before it connects."""
        assert not self.worker.connected
        memory = self.worker.state.memory
        memory.buffer, memory.serving = Holding(Version(version), root_of(version, self.me.shard)), Version(version)

    def call(self, verb: str, spec: int | str = "", *, timeout_s: float = 600.0) -> None:
        """The caller calls."""
        root = root_of(int(spec), self.me.shard) if verb == "publish" else Digest("")
        self.tell(events.Called(verb, spec, self._ground.now + timeout_s, root))

    def die(self) -> None:
        """Nothing more comes from it."""
        self.is_alive = False

    # --- events in, effects out ---------------------------------------------------------------------------------------

    def tell(self, event: events.Event) -> None:
        """Hand the machine an event, and carry out what it wants."""
        if not self.is_alive:
            return
        worker, session = self.worker, self.worker.session
        effects = worker.handle(event, now=self._ground.now)
        self.is_idle = isinstance(event, events.Tick) and worker.call is None and self.read is None
        self.sessions += worker.session != session
        for effect in effects:
            self._carry_out(effect)
        while self._follow_ups and self.is_alive:
            self.tell(self._follow_ups.pop(0))
        self._schedule_tick()

    def _carry_out(self, effect: events.Effect) -> None:
        match effect:
            case events.Send(message=message):
                self._send(self, message)
            case events.OpenRead(grant=grant):
                self._follow_ups.append(events.ReadOpened(grant.ticket))
            case events.StartRead(grant=grant):
                self._start(grant)
            case events.StopRead(ticket=ticket):
                read, self.read = self.read, None
                is_touched = read is not None and not read.grant.to_host
                self._follow_ups += [events.ReadBarred(ticket, is_touched), events.ReadEnded(ticket)]
            case events.StopServing(version=version):
                self._follow_ups.append(events.ServingStopped(version))
            case events.StartServing(version=version):
                self.held.setdefault(version, self._ground.now)
            case events.CopyOut(version=version):
                self._follow_ups.append(events.CopiedOut(version))
            case events.CopyIn(version=version):
                self._follow_ups.append(events.CopiedIn(version))
            case events.DropCopy(version=version):
                self._follow_ups.append(events.CopyDropped(version))
            case events.Finished():
                self.finished.append((self._ground.now, effect))
                self.on_finished(effect)
            case _:
                pass  # trust, warnings, delays: nothing here depends on them

    def _schedule_tick(self) -> None:
        at = self.worker.next_deadline()
        if at < self._tick_at:
            self._tick_at = at
            self._ground.after(max(0.0, at - self._ground.now), lambda: self._tick(at))

    def _tick(self, at: float) -> None:
        if at == self._tick_at:
            self._tick_at = inf
            self.tell(events.Tick())

    # --- reads --------------------------------------------------------------------------------------------------------

    def _start(self, grant: Grant) -> None:
        if self._filling != grant.version:
            self._filling, self._share = grant.version, 0.0
        self.read = OpenedRead(grant, self._ground.now, self._share)
        self._follow_ups.append(events.ReadTouched(grant.ticket))
        self._watch(self.read)

    def _watch(self, read: OpenedRead) -> None:
        """Look again when the next measurement is due, or the end."""
        read.finish_at = self._ground.finish_at(read.grant, read.begun_at, 1.0 - read.share_before)
        self._ground.after(min(read.finish_at - self._ground.now, MEASURE_S), lambda: self._measure(read))

    def _measure(self, read: OpenedRead) -> None:
        if self.read is not read or not self.is_alive:
            return
        now, grant = self._ground.now, read.grant
        finish_at = read.finish_at = self._ground.finish_at(grant, read.begun_at, 1.0 - read.share_before)
        if now >= finish_at - 1e-6:
            self.read, self._filling = None, None
            self.held[grant.version] = now
            self.tell(events.ReadAdvanced(grant.ticket, CHUNKS, CHUNKS))
            self.tell(events.ReadEnded(grant.ticket, complete=True))
            return
        pace = (1.0 - read.share_before) / max(1e-9, finish_at - read.begun_at)
        self._share = max(self._share, min(1.0, read.share_before + (now - read.begun_at) * pace))
        arrived_bytes = int((self._share - read.share_before) * SIZE_BYTES)
        self.tell(events.ReadAdvanced(grant.ticket, int(self._share * CHUNKS), CHUNKS))
        self.tell(events.ReadMeasured(grant.ticket, "tcp", "", "", int(pace * SIZE_BYTES), arrived_bytes))
        self._watch(read)
